"""Spawn-join as a pure state machine (paper section 3.2): told finished completions, it answers with the next requests.

    main thread -> <Parallel> -> num_paths paths, each sampled from `prefix + <Path>`, blind to its siblings
                -> joined, `</Parallel>\n<Summary>` forced -> summary -> main thread goes on

It does no I/O and holds no model. Rules, each a test:
- every request stops at any tag and at EOS; a tag that may not occur in its phase ends the phase and is never left in the response
  (it is counted as a fault; in the main thread a forced EOS takes its place, so that no response is empty);
- budgets are set before a request is made, so a response never overruns and is never cut inside a block: where a whole block no
  longer fits, and after `max_blocks`, `<Parallel>` is banned and the main thread goes on to its answer (the released code stops dead);
- tokens that nobody sampled (`<Path>`, the join, closing tags after EOS or at a budget's end) are forced: no log-prob, no loss.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from parallel_r1.config import RolloutConfig
from parallel_r1.markup import TagIds
from parallel_r1.trajectory import Trajectory

NEVER = -100.0
"""Logit bias with which vLLM never samples a request's `banned` tokens."""

MIN_PATH_TOKENS = 16
"""A block is opened only where each path could have so many tokens (or `max_path_tokens`, where that is set)."""


@dataclass(frozen=True)
class Request:
    """Sample up to `max_tokens` tokens after `token_ids`, ending with the first of `stop`; never sample `banned`."""

    slot: int
    """0 for the main thread and summaries, the 1-based path otherwise; handed back with the completion."""
    token_ids: list[int]
    max_tokens: int
    stop: tuple[int, ...]
    banned: tuple[int, ...] = ()
    seed: int = 0


@dataclass(frozen=True)
class Completion:
    """What an engine sampled, the stop token included where one ended it."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]


class Rollout:
    """One response in the making. `begin()` gives the first requests, `receive()` the next ones; done when it gives none."""

    def __init__(self, prompt_ids: list[int], config: RolloutConfig, tags: TagIds, newline_ids: Sequence[int], seed: str = "") -> None:
        self.trajectory = Trajectory(prompt_ids)
        self.stray_tags = 0
        self._config = config
        self._tags = tags
        self._join = [tags.parallel_end, *newline_ids, tags.summary]
        self._stop = (tags.parallel, tags.parallel_end, tags.path, tags.path_end, tags.summary, tags.summary_end, *sorted(tags.eos))
        self._seed = seed
        self._turn = 0
        self._blocks = 0
        self._in_summary = False
        self._paths: dict[int, Completion] = {}
        self.done = False

    def begin(self) -> list[Request]:
        """The main thread's first request."""
        return self._ask_main()

    def receive(self, slot: int, completion: Completion) -> list[Request]:
        """Take one finished completion; give the requests that it makes possible."""
        if slot:
            return self._receive_path(slot, completion)
        if self._in_summary:
            return self._receive_summary(completion)
        return self._receive_main(completion)

    # main thread

    def _ask_main(self) -> list[Request]:
        left = self._left
        if left <= 0:
            self.done = True
            return []
        until_full = left - self._block_tokens - 1
        if self._blocks < self._config.max_blocks and until_full > 0:
            return [self._request(0, self._context, until_full)]
        return [self._request(0, self._context, left, banned=(self._tags.parallel,))]

    def _receive_main(self, completion: Completion) -> list[Request]:
        body, logprobs, end = self._split(completion)
        self.trajectory.append("main", body, logprobs)
        if end is None:
            return self._ask_main() if body else self._finish("length")
        if end == self._tags.parallel and self._blocks < self._config.max_blocks and self._left - 1 >= self._block_tokens:
            self.trajectory.append("main", [end], [completion.logprobs[len(body)]])
            return self._ask_paths()
        if end in self._tags.eos:
            self.trajectory.append("main", [end], [completion.logprobs[len(body)]])
            return self._finish("eos")
        self.stray_tags += 1
        self.trajectory.append("forced", [min(self._tags.eos)], None)
        return self._finish("stray_tag")

    def _finish(self, finish: str) -> list[Request]:
        self.trajectory.finish = finish
        self.done = True
        return []

    # block

    def _ask_paths(self) -> list[Request]:
        self._paths = {}
        budget = self._path_budget(self._left)
        context = [*self._context, self._tags.path]
        return [self._request(slot, context, budget) for slot in range(1, self._config.num_paths + 1)]

    def _receive_path(self, slot: int, completion: Completion) -> list[Request]:
        self._paths[slot] = completion
        if len(self._paths) < self._config.num_paths:
            return []
        for path in sorted(self._paths):
            self.trajectory.append("path", [self._tags.path], None, self._blocks, path)
            self._append_body("path", self._paths[path], self._tags.path_end, path)
        self.trajectory.append("forced", self._join, None, self._blocks)
        self._in_summary = True
        return [self._request(0, self._context, min(self._config.max_summary_tokens, self._left - 2))]

    def _receive_summary(self, completion: Completion) -> list[Request]:
        self._append_body("summary", completion, self._tags.summary_end, None)
        self._in_summary = False
        self._blocks += 1
        return self._ask_main()

    def _append_body(self, kind: str, completion: Completion, closer: int, path: int | None) -> None:
        """A path or summary: its sampled tokens, then the closing tag, forced where it was not sampled."""
        body, logprobs, end = self._split(completion)
        self.trajectory.append(kind, body, logprobs, self._blocks, path)
        sampled = [completion.logprobs[len(body)]] if end == closer else None
        self.trajectory.append(kind, [closer], sampled, self._blocks, path)
        if end is not None and end != closer and end not in self._tags.eos:
            self.stray_tags += 1

    # budgets, in tokens

    @property
    def _left(self) -> int:
        return self._config.max_response_tokens - len(self.trajectory.completion_ids)

    def _summary_reserve(self, left: int) -> int:
        return min(self._config.max_summary_tokens, max(2, left // (self._config.num_paths + 2)))

    def _path_budget(self, left: int) -> int:
        fixed = len(self._join) + self._summary_reserve(left) + 1 + 1
        share = (left - fixed) // self._config.num_paths - 2
        return min(share, self._config.max_path_tokens or share)

    @property
    def _block_tokens(self) -> int:
        """What a block may take after `<Parallel>`, with one token for the main thread to end on."""
        path = self._config.max_path_tokens or MIN_PATH_TOKENS
        summary = self._config.max_summary_tokens if self._config.max_path_tokens else min(self._config.max_summary_tokens, MIN_PATH_TOKENS)
        return self._config.num_paths * (path + 2) + len(self._join) + summary + 2

    # requests

    @property
    def _context(self) -> list[int]:
        return self.trajectory.prompt_ids + self.trajectory.completion_ids

    def _request(self, slot: int, context: list[int], max_tokens: int, banned: tuple[int, ...] = ()) -> Request:
        self._turn += 1
        digest = hashlib.sha256(f"{self._seed}/{self._turn}/{slot}".encode()).digest()
        return Request(slot, context, max_tokens, self._stop, banned, int.from_bytes(digest[:4], "big") >> 1)

    def _split(self, completion: Completion) -> tuple[list[int], list[float], int | None]:
        """The tokens before the first stop token, their log-probs, and that stop token."""
        stop = set(self._stop)
        ids = list(completion.token_ids)
        cut = next((i for i, token in enumerate(ids) if token in stop), len(ids))
        return ids[:cut], list(completion.logprobs[:cut]), ids[cut] if cut < len(ids) else None
