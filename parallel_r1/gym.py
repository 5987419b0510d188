"""Problems from the package reasoning_gym, which makes them up from a seed: over a hundred kinds, most with levels of difficulty.

The package stands in a lock of its own (`requirements/reasoning-gym.txt`), since one of its dependencies is compiled on installation.
A question belongs either to `train` or to `heldout`, by its hash: one in four is held out, at every seed.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

from parallel_r1.config import ReasoningGymSource, RowsSource
from parallel_r1.problems import Problem, ProblemSet, from_rows
from parallel_r1.tables import Row, SourceError

MAX_SHORT_CHARS = 40
TRIES_PER_PROBLEM = 50
_HELD_OUT_OF = 4
_FITS = {"integer": r"[-+]?\d+", "short": rf".{{1,{MAX_SHORT_CHARS}}}"}


def make_problems(source: ReasoningGymSource, seed: int) -> ProblemSet:
    """`count` problems, the same for the same arguments and package. Raises SourceError where the package or so many are missing."""
    counts: Counter[str] = Counter()
    rows = list(itertools.islice(_fitting(source, seed, counts), source.count))
    where = f"reasoning_gym {source.dataset}"
    if len(rows) < source.count:
        tried = source.count * TRIES_PER_PROBLEM
        raise SourceError(f"{where}: count = {source.count}, but {tried} tries gave only {len(rows)} with {source.answers} answers")
    problems, cleaned, dropped = from_rows(rows, RowsSource(problem_column="question"), where, source.dataset)
    named = [Problem(f"{source.dataset}-{source.split}-{place:04d}", one.problem, one.answer, where) for place, one in enumerate(problems)]
    return ProblemSet(named, {**counts, **cleaned}, dropped)


def _fitting(source: ReasoningGymSource, seed: int, counts: Counter[str]) -> Iterator[Row]:
    """Rows of the split with an answer of the right kind, no question twice."""
    seen: set[str] = set()
    for row in _dataset(source, seed):
        if is_held_out(row["question"]) != (source.split == "heldout"):
            continue
        if row["question"] in seen:
            counts["dropped_duplicates"] += 1
        elif not re.fullmatch(_FITS[source.answers], str(row["answer"]).strip()):
            counts[f"dropped_not_{source.answers}"] += 1
        else:
            seen.add(row["question"])
            yield row


def _dataset(source: ReasoningGymSource, seed: int) -> Any:
    try:
        with warnings.catch_warnings(action="ignore", category=SyntaxWarning):  # of a package that it imports
            from reasoning_gym.factory import CURRICULA, DATASETS, create_dataset
    except ImportError as error:
        raise SourceError(f"reasoning_gym source {source.dataset}: {error}. `make reasoning-gym` installs the package") from None
    if source.dataset not in DATASETS:
        raise SourceError(f"reasoning_gym has no data set {source.dataset!r}; there are: {', '.join(sorted(DATASETS))}")
    options = {**source.parameters, "size": source.count * TRIES_PER_PROBLEM, "seed": seed}
    try:
        if source.level is None:
            return create_dataset(source.dataset, **options)
        if source.dataset not in CURRICULA:
            raise ValueError("it has no levels: leave `level` out")
        curriculum = CURRICULA[source.dataset]()
        highest = max(len(attribute.levels) for attribute in curriculum.attributes.values()) - 1
        if source.level > highest:
            raise ValueError(f"its highest level is {highest}")
        curriculum.set_global_level(source.level)
        return DATASETS[source.dataset][0](curriculum.generate_configuration(options))
    except (TypeError, ValueError, AssertionError) as error:
        raise SourceError(f"reasoning_gym {source.dataset}: level {source.level}, parameters {source.parameters}: {error}") from error


def is_held_out(question: str) -> bool:
    """Whether a question is kept from training: a fixed quarter of all."""
    return int(hashlib.md5(question.encode(), usedforsecurity=False).hexdigest(), 16) % _HELD_OUT_OF == 0
