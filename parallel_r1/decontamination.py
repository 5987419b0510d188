"""Which training problems are test items, or nearly: the same text after normalising, or at least half of a test item's 13-grams.

A 13-gram is 13 words in a row, whatever case and signs stand between them. The share counts the pieces of one test item that occur in
one training problem. Test items of fewer than 13 words are compared as a whole only.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from parallel_r1.cleaning import normalise
from parallel_r1.config import DecontaminateConfig
from parallel_r1.problems import Problem

Gram = tuple[str, ...]
Item = tuple[str, int]
"""A test item: its set and its place in it."""


@dataclass(frozen=True)
class Copy:
    """A training problem that is a test item, or nearly. `share`: of the item's pieces, 1 where the texts are the same."""

    train_id: str
    set: str
    test_id: str
    share: float
    exact: bool


class Index:
    """Test items by their pieces."""

    def __init__(self, tests: Mapping[str, Sequence[Problem]], config: DecontaminateConfig) -> None:
        self.tests = tests
        self.config = config
        self._pieces: dict[Item, int] = {}
        self._by_gram: dict[Gram, list[Item]] = defaultdict(list)
        self._by_text: dict[str, list[Item]] = defaultdict(list)
        for name, problems in tests.items():
            for place, problem in enumerate(problems):
                self._add((name, place), problem.problem)

    def _add(self, item: Item, text: str) -> None:
        grams = self._grams(text)
        self._pieces[item] = len(grams)
        self._by_text[normalise(text)].append(item)
        for gram in grams:
            self._by_gram[gram].append(item)

    def _grams(self, text: str) -> set[Gram]:
        words = re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold())
        return {tuple(words[start : start + self.config.ngram]) for start in range(len(words) - self.config.ngram + 1)}

    def copies(self, train_id: str, text: str) -> Iterator[Copy]:
        """The test items that a training problem gives away."""
        exact = set(self._by_text.get(normalise(text), ()))
        found = Counter(item for gram in self._grams(text) for item in self._by_gram.get(gram, ()))
        for item in sorted(exact | set(found)):
            share = 1.0 if item in exact else found[item] / self._pieces[item]
            if share >= self.config.threshold:
                yield Copy(train_id, item[0], self.tests[item[0]][item[1]].id, round(share, 3), item in exact)


def find_copies(training: Iterable[tuple[str, str]], tests: Mapping[str, Sequence[Problem]], config: DecontaminateConfig) -> list[Copy]:
    """Every pair of a training problem, given as (id, text), and a test item that it gives away."""
    index = Index(tests, config)
    return [copy for train_id, text in training for copy in index.copies(train_id, text)]
