"""Rollouts with lengths fixed beforehand: spawn-join and plain generation then sample exactly as many tokens, whatever the model says."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from parallel_r1.config import RolloutConfig
from parallel_r1.markup import TagIds
from parallel_r1.rollout.machine import Completion, Request, Rollout

PROMPT, MAIN, PATH, SUMMARY = (50, 70), (40, 80), (30, 120), (20, 40)
"""Tokens, from..to: about the demo's proportions, longer."""
BLOCKS = {0: 0.1, 1: 0.4, 2: 0.5}
"""Shares of responses with so many blocks."""


@dataclass(frozen=True)
class Plan:
    """One response: its prompt, and the lengths of what is sampled with the tag that ends it, in the order of the requests."""

    prompt_ids: list[int]
    steps: list[tuple[int, int]]

    @property
    def sampled(self) -> int:
        """Tokens that are sampled."""
        return sum(length for length, _ in self.steps)


def rollout_config(num_paths: int, max_in_flight: int) -> RolloutConfig:
    """Budgets in which every plan has room."""
    return RolloutConfig(
        engine="vllm", num_paths=num_paths, max_blocks=max(BLOCKS), max_path_tokens=PATH[1] + 8, max_summary_tokens=SUMMARY[1] + 8,
        max_prompt_tokens=PROMPT[1], max_response_tokens=640 + 300 * num_paths, max_in_flight=max_in_flight,
    )  # fmt: skip


def make_plans(prompts: int, samples: int, num_paths: int, tags: TagIds, vocabulary: range, seed: int = 0) -> list[Plan]:
    """`samples` plans for each of so many random prompts."""
    rng = random.Random(seed)
    plans = []
    for _ in range(prompts):
        prompt_ids = [rng.choice(vocabulary) for _ in range(rng.randint(*PROMPT))]
        plans += [Plan(prompt_ids, list(_steps(num_paths, tags, rng))) for _ in range(samples)]
    return plans


def _steps(num_paths: int, tags: TagIds, rng: random.Random) -> Iterator[tuple[int, int]]:
    blocks = rng.choices(list(BLOCKS), list(BLOCKS.values()))[0]
    for _ in range(blocks):
        yield rng.randint(*MAIN), tags.parallel
        for _ in range(num_paths):
            yield rng.randint(*PATH), tags.path_end
        yield rng.randint(*SUMMARY), tags.summary_end
    yield rng.randint(*MAIN), min(tags.eos)


class PlannedRollout(Rollout):
    """The real state machine, told lengths and closing tags by a plan instead of by the model.

    A closing tag takes the place of the last sampled token. Its keys were not computed yet, so the prefix cache is as if it were sampled.
    """

    def __init__(self, plan: Plan, config: RolloutConfig, tags: TagIds, newline_ids: list[int]) -> None:
        super().__init__(plan.prompt_ids, config, tags, newline_ids)
        self._lengths = iter([length for length, _ in plan.steps])
        self._closers = iter([closer for _, closer in plan.steps])

    def _request(self, slot: int, context: list[int], max_tokens: int, banned: tuple[int, ...] = ()) -> Request:
        return replace(super()._request(slot, context, max_tokens), max_tokens=next(self._lengths), stop=(), banned=())

    def _split(self, completion: Completion) -> tuple[list[int], list[float], int | None]:
        return list(completion.token_ids[:-1]), list(completion.logprobs[:-1]), next(self._closers)
