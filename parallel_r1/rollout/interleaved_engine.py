"""Structured spawn-join with transformers: one forward decodes all live paths of all rollouts, in one cache (method.md section 6).

Under the structured attention a key stays right once it is computed: a path sees what lies before its block and itself, and whatever comes
after the block sees all of it. So the paths of a rollout append their keys to its row of the cache, interleaved, and each query has a mask
of the columns that it may see. A join feeds the tokens that it forces and computes nothing anew. Under the causal attention a second path
is read behind the first from then on, so its keys change: transformers_engine.py computes such contexts again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from parallel_r1.rollout.machine import Completion, Request, Rollout
from parallel_r1.rollout.transformers_engine import TransformersEngine


@dataclass
class _Thread:
    """The main thread or a path of one rollout."""

    seen: Tensor
    """Which columns of the rollout's row of the cache it sees, (columns,) bool."""
    position: int
    """Of the next token that is fed."""
    fed: int
    """How many tokens of its text are in the cache or in the queue."""
    queue: deque[int] = field(default_factory=deque)
    """Tokens of its text that still have to be fed."""
    request: Request | None = None
    generator: torch.Generator | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def extend(self, text: list[int]) -> None:
        """Queue what `text` has beyond what was fed."""
        self.queue.extend(text[self.fed :])
        self.fed = len(text)

    def ask(self, request: Request, generator: torch.Generator) -> None:
        """Sample for a request as soon as the queue is empty."""
        self.request, self.generator, self.tokens, self.logprobs = request, generator, [], []

    def take(self, token: int, logprob: float) -> Completion | None:
        """Note a sampled token; the completion if it was the last one. That one isn't fed: the next request's context says what follows."""
        assert self.request
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if token in self.request.stop or len(self.tokens) >= self.request.max_tokens:
            self.request = None
            return Completion(self.tokens, self.logprobs)
        self.queue.append(token)
        self.fed += 1
        return None


class _Row:
    """One rollout: its main thread and, in a block, its paths, in the order of the machine's slots."""

    def __init__(self, rollout: Rollout, width: int, path_end: int) -> None:
        self.rollout = rollout
        known = len(rollout.trajectory.prompt_ids) - 1
        self.main = _Thread(torch.arange(width) < known, position=known, fed=known)
        self.paths: list[_Thread] = []
        self._path_end = path_end
        self._joined: list[int] | None = None
        """The text after the present block, while its paths still have closing tags to feed."""

    @property
    def threads(self) -> list[_Thread]:
        """By slot."""
        return [self.main, *self.paths]

    def accept(self, requests: list[Request], generators: list[torch.Generator]) -> None:
        """Take the machine's next requests: none, one for the main thread or a summary, or one for each path."""
        if not requests:
            return
        text = requests[0].token_ids
        if requests[0].slot:
            self.main.extend(text[:-1])
            self.paths = [_Thread(self.main.seen, self.main.position, fed=1, queue=deque(text[-1:])) for _ in requests]
        elif self.paths:
            self._close_paths(text)
        else:
            self.main.extend(text)
        for request, generator in zip(requests, generators, strict=True):
            self.threads[request.slot].ask(request, generator)

    def _close_paths(self, text: list[int]) -> None:
        """Queue what the machine put at the end of each path; the main thread goes on behind the last of them."""
        for path in self.paths:
            end = text.index(self._path_end, self.main.fed) + 1
            path.extend(text[self.main.fed : end])
            self.main.fed = end
        self._joined = text

    def feeding(self) -> list[int]:
        """Slots that feed a token now: the main thread, or all paths that have one."""
        if not self.main.queue and self._joined and not any(path.queue for path in self.paths):
            self.main.seen = torch.stack([path.seen for path in self.paths]).any(0)
            self.main.position = max(path.position for path in self.paths)
            self.main.extend(self._joined)
            self.paths, self._joined = [], None
        return [0] if self.main.queue else [slot for slot, path in enumerate(self.paths, start=1) if path.queue]

    def feed(self, slot: int, column: int) -> tuple[int, int]:
        """Feed a thread's next token into a column; gives token and position. What the main thread feeds, paths that wait for it see."""
        thread = self.threads[slot]
        token, position = thread.queue.popleft(), thread.position
        for reader in [thread] if slot else self.threads:
            reader.seen[column] = True
            reader.position = position + 1
        return token, position


class InterleavedEngine(TransformersEngine):
    """Structured sampling in one cache; `max_in_flight` counts rollouts."""

    def run(self, rollouts: Iterable[Rollout]) -> Iterator[Rollout]:
        """Carry all rollouts to their end, `max_in_flight` of them at a time; give each as soon as it is done."""
        waiting = iter(rollouts)
        while batch := list(islice(waiting, self._config.max_in_flight)):
            yield from self._run_batch(batch)

    @torch.no_grad()
    def _run_batch(self, rollouts: list[Rollout]) -> Iterator[Rollout]:
        width = max(len(rollout.trajectory.prompt_ids) for rollout in rollouts) - 1
        rows = [_Row(rollout, width, self._tags.path_end) for rollout in rollouts]
        cache = DynamicCache(config=self._model.config)
        self._read_prompts(rows, width, cache)
        for row in rows:
            self._accept(row, row.rollout.begin())
        while rows:
            self._step(rows, cache)
            yield from (row.rollout for row in rows if row.rollout.done)
            going_on = [number for number, row in enumerate(rows) if not row.rollout.done]
            if 0 < len(going_on) < len(rows):
                cache.batch_select_indices(torch.tensor(going_on, device=self._model.device))
            rows = [rows[number] for number in going_on]

    def _accept(self, row: _Row, requests: list[Request]) -> None:
        row.accept(requests, [self._generator(request) for request in requests])

    def _read_prompts(self, rows: list[_Row], width: int, cache: DynamicCache) -> None:
        """All of each prompt but its last token, which the main thread's first request feeds."""
        if not width:
            return
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        for number, row in enumerate(rows):
            prompt = row.rollout.trajectory.prompt_ids[:-1]
            ids[number, : len(prompt)] = torch.tensor(prompt)
        causal = torch.ones(width, width, dtype=torch.bool).tril()
        self._forward(ids, torch.arange(width).expand_as(ids), causal.expand(len(rows), width, width), cache)

    def _step(self, rows: list[_Row], cache: DynamicCache) -> None:
        """Feed every row one token of its main thread or one of each live path, and sample behind those whose text has been fed."""
        feeds = [(number, column, slot) for number, row in enumerate(rows) for column, slot in enumerate(row.feeding())]
        before = len(rows[0].main.seen)
        width = 1 + max(column for _, column, _ in feeds)
        for thread in (thread for row in rows for thread in row.threads):
            thread.seen = nn.functional.pad(thread.seen, (0, width))
        ids, positions = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
        visible = torch.stack([row.main.seen for row in rows])[:, None].repeat(1, width, 1)
        for number, column, slot in feeds:
            ids[number, column], positions[number, column] = rows[number].feed(slot, before + column)
            visible[number, column] = rows[number].threads[slot].seen
        scores = torch.log_softmax(self._forward(ids, positions, visible, cache).float() / self._config.temperature, -1)
        for number, column, slot in feeds:
            thread = rows[number].threads[slot]
            if thread.request and not thread.queue:
                self._sample_one(rows[number], slot, scores[number, column])

    def _sample_one(self, row: _Row, slot: int, scores: Tensor) -> None:
        thread = row.threads[slot]
        assert thread.request and thread.generator
        token = self._choose(scores, thread.request, thread.generator)
        if self.on_token:
            self.on_token(thread.request, token)
        if completion := thread.take(token, float(scores[token])):
            self._accept(row, row.rollout.receive(slot, completion))

    def _forward(self, ids: Tensor, positions: Tensor, visible: Tensor, cache: DynamicCache) -> Tensor:
        """Logits, (rows, width, vocabulary), of tokens appended to the cache; `visible`: (rows, width, columns)."""
        device = self._model.device
        inputs = {"input_ids": ids.to(device), "position_ids": positions.to(device), "attention_mask": visible[:, None].to(device)}
        return self._model(**inputs, past_key_values=cache, use_cache=True).logits
