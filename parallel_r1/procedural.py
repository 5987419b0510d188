"""Integer-answer word problems in three tiers, made from a seed.

    Tom has 12 apples. He buys 5. Then he loses 3. How many apples now?

What a tier demands:

- tier 1: small numbers. 1 to 3 events, start 3..15, each event 2..5 up or down. Sums of small numbers, carried through three steps at most.
- tier 2: a carry. 2 events, start 3..40, each event 2..9; at least one step crosses a ten (`28+5=33`).
- tier 3: carries in a row. 3 events in the same ranges; at least two steps cross a ten.

The count never falls below 0. A problem's *numbers* (start and signed events) belong either to `train` or to `heldout`, by their hash: one
in four is held out, whatever the names around them, at every seed and in every tier. So a held-out problem is a new combination of numbers,
not a new sum. Problems of a set differ in their text; those of a held-out set differ in their numbers too.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import re
from collections.abc import Iterator
from functools import cache
from typing import Literal, NamedTuple

from parallel_r1.problems import Problem

Split = Literal["train", "heldout"]

_PEOPLE = {"Tom": "he", "Mia": "she", "Sam": "he", "Ana": "she", "Leo": "he", "Eva": "she", "Max": "he", "Zoe": "she"}
_ITEMS = ("apples", "coins", "books", "shells", "cards", "pens", "stamps", "beads")
_GAINS = ("buys", "finds", "gets", "wins")
_LOSSES = ("loses", "sells", "gives away", "drops")
_PROBLEM = re.compile(rf"\w+ has \d+ \w+\.(?: (?:Then )?[Ss]?[Hh]e (?:{'|'.join(_GAINS + _LOSSES)}) \d+\.)+ How many \w+ now\?")
_HELD_OUT_OF = 4


class Numbers(NamedTuple):
    """What a problem is made of: the count at the start and the signed changes, in order."""

    start: int
    events: tuple[int, ...]

    @property
    def answer(self) -> int:
        """The count at the end."""
        return self.start + sum(self.events)


class _Tier(NamedTuple):
    events: tuple[int, ...]
    max_start: int
    max_change: int
    min_crossings: int


_TIERS = {1: _Tier((1, 2, 3), 15, 5, 0), 2: _Tier((2,), 40, 9, 1), 3: _Tier((3,), 40, 9, 2)}


def make_problems(tier: int, split: Split, count: int, seed: int) -> list[Problem]:
    """`count` problems of a tier, the same ones for the same arguments. Raises ValueError where the tier hasn't so many."""
    by_length = _numbers(tier, split)
    bound = _bound(by_length, split)
    if count > bound:
        raise ValueError(f"procedural source: tier {tier}, split {split}: count = {count}, but only {bound} different problems exist")
    rng = random.Random(f"procedural/{tier}/{split}/{seed}")
    draw = _draw_distinct(by_length, rng) if split == "heldout" else _draw(by_length, rng)
    problems: list[Problem] = []
    seen: set[str] = set()
    while len(problems) < count:
        numbers = next(draw)
        text = _tell(numbers, rng)
        if text not in seen:
            seen.add(text)
            problem_id = f"tier{tier}-{split}-{len(problems):04d}"
            problems.append(Problem(problem_id, text, str(numbers.answer), f"procedural tier {tier}"))
    return problems


def parse(problem: str) -> Numbers:
    """The numbers of a procedural problem. Raises ValueError for any other text."""
    if not _PROBLEM.fullmatch(problem):
        raise ValueError(f"not a procedural problem: {problem[:200]!r}. It reads like 'Tom has 12 apples. He buys 5. How many apples now?'")
    start, *events = re.findall(r"(?:has|" + "|".join(_GAINS + _LOSSES) + r") \d+", problem)
    return Numbers(_number(start), tuple(_number(event) * (1 if event.startswith(_GAINS) else -1) for event in events))


def is_held_out(numbers: Numbers) -> bool:
    """Whether these numbers are kept from training: a fixed quarter of all."""
    key = f"{numbers.start}:{','.join(f'{event:+d}' for event in numbers.events)}"
    return int(hashlib.md5(key.encode(), usedforsecurity=False).hexdigest(), 16) % _HELD_OUT_OF == 0


@cache
def _numbers(tier: int, split: Split) -> dict[int, tuple[Numbers, ...]]:
    """All numbers of a tier and split, by how many events they have."""
    rule = _TIERS[tier]
    changes = [sign * size for sign in (1, -1) for size in range(2, rule.max_change + 1)]
    return {
        length: tuple(
            numbers
            for start in range(3, rule.max_start + 1)
            for events in itertools.product(changes, repeat=length)
            if _fits(numbers := Numbers(start, events), rule) and is_held_out(numbers) == (split == "heldout")
        )
        for length in rule.events
    }


def _fits(numbers: Numbers, rule: _Tier) -> bool:
    counts = list(itertools.accumulate(numbers.events, initial=numbers.start))
    crossings = sum(before // 10 != after // 10 for before, after in itertools.pairwise(counts))
    return min(counts) >= 0 and crossings >= rule.min_crossings


def _bound(by_length: dict[int, tuple[Numbers, ...]], split: Split) -> int:
    if split == "heldout":
        return sum(len(numbers) for numbers in by_length.values())
    return sum(len(numbers) * len(_PEOPLE) * len(_ITEMS) * len(_GAINS) ** length for length, numbers in by_length.items())


def _draw(by_length: dict[int, tuple[Numbers, ...]], rng: random.Random) -> Iterator[Numbers]:
    lengths = list(by_length)
    while True:
        yield rng.choice(by_length[rng.choice(lengths)])


def _draw_distinct(by_length: dict[int, tuple[Numbers, ...]], rng: random.Random) -> Iterator[Numbers]:
    left = {length: rng.sample(numbers, len(numbers)) for length, numbers in by_length.items()}
    while left := {length: numbers for length, numbers in left.items() if numbers}:
        yield left[rng.choice(list(left))].pop()


def _tell(numbers: Numbers, rng: random.Random) -> str:
    name, item = rng.choice(list(_PEOPLE)), rng.choice(_ITEMS)
    sentences = [f"{name} has {numbers.start} {item}."]
    for index, event in enumerate(numbers.events):
        who = f"Then {_PEOPLE[name]}" if index else _PEOPLE[name].capitalize()
        sentences.append(f"{who} {rng.choice(_GAINS if event > 0 else _LOSSES)} {abs(event)}.")
    return " ".join([*sentences, f"How many {item} now?"])


def _number(words: str) -> int:
    return int(words.rsplit(" ", 1)[1])
