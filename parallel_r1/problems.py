"""Problem sets: reading them from their sources, and drawing from them. What is done to raw rows says `parallel_r1/cleaning.py`."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from parallel_r1 import cleaning
from parallel_r1.config import FilesSource, ProceduralSource, ReasoningGymSource, RowsSource, Source
from parallel_r1.tables import Row, SourceError, cell, read_file, read_hub


@dataclass(frozen=True)
class Problem:
    """A mathematics problem with its right answer. `source` says where it comes from."""

    id: str
    problem: str
    answer: str
    source: str


class ProblemSet(NamedTuple):
    """Problems of a source, how many rows were repaired or dropped for which reason, and the first dropped rows of each."""

    problems: list[Problem]
    counts: dict[str, int]
    dropped: list[dict[str, str | int]]


def read_source(source: Source, seed: int) -> ProblemSet:
    """The problems of a source. `seed` matters to those that make problems up. Raises SourceError or ValueError naming what is wrong."""
    if isinstance(source, ProceduralSource):
        from parallel_r1 import procedural  # it builds on Problem

        return ProblemSet(procedural.make_problems(source.tier, source.split, source.count, seed), {}, [])
    if isinstance(source, ReasoningGymSource):
        from parallel_r1 import gym

        return gym.make_problems(source, seed)
    if isinstance(source, FilesSource):
        return from_rows(read_file(source.path), source, source.path, PurePosixPath(source.path).stem)
    rows = read_hub(source.name, source.config, source.split, source.revision)
    return from_rows(rows, source, f"hub data set {source.name}", source.name)


def from_rows(rows: Iterable[Row], source: RowsSource, where: str, name: str) -> ProblemSet:
    """Problems of raw rows, cleaned. `where` names the rows in errors; `name` is the source and the beginning of an id where the
    rows bring none."""
    log, gathering = cleaning.Log(), cleaning.Gathering()
    origins: dict[str, str] = {}
    for index, row in enumerate(rows):
        text = str(_value(row, source.problem_column, "problem_column", where) or "")
        text, answer = cleaning.tidy(text, _value(row, source.answer_column, "answer_column", where), source, log)
        row_id = _new_id(row, name, index, origins)
        if reason := cleaning.fault(text, answer, source):
            log.drop(reason, row_id, text, answer)
        else:
            origins[row_id] = str(row.get("source") or name)
            gathering.add(row_id, text, answer)
    problems = [Problem(same.row_id, same.problem, same.answer, origins[same.row_id]) for same in gathering.distinct(log)]
    if not problems:
        raise SourceError(f"{where}: no problem in it that could be used; dropped: {dict(log.counts) or 'nothing, it has no rows'}")
    return ProblemSet(problems[: source.limit], dict(log.counts), log.dropped)


def _value(row: Row, column: str, field: str, where: str) -> Any:
    return cell(row, column, f"{where}: {field}")


def _new_id(row: Row, name: str, index: int, taken: Mapping[str, str]) -> str:
    problem_id = str(row["id"]) if row.get("id") is not None else f"{name}-{index:05d}"
    return f"{problem_id}#{index}" if problem_id in taken else problem_id


def draw(sets: Mapping[str, Sequence[Problem]], mixture: Mapping[str, float], count: int | None, seed: int) -> list[Problem]:
    """`count` problems, each from a set chosen by its weight; a set repeats only once all of it was drawn. None: every problem once.

    The same arguments give the same problems in the same order. Raises ValueError for a set that is unknown or empty.
    """
    for name in mixture:
        if not sets.get(name):
            raise ValueError(f"problems: set '{name}' is {'empty' if name in sets else 'unknown'}; there are: {', '.join(sets) or 'none'}")
    rng = random.Random(f"draw/{seed}")
    if count is None:
        everything = [problem for name in mixture for problem in sets[name]]
        return rng.sample(everything, len(everything))
    decks = {name: _deck(sets[name], rng) for name in mixture}
    return [next(decks[name]) for name in rng.choices(list(mixture), list(mixture.values()), k=count)]


def _deck(problems: Sequence[Problem], rng: random.Random) -> Iterator[Problem]:
    while True:
        yield from rng.sample(problems, len(problems))


def write_problems(path: Path, problems: Iterable[Problem]) -> None:
    """Write one JSON object per line."""
    with path.open("w", encoding="utf-8") as file:
        for problem in problems:
            file.write(json.dumps(asdict(problem), ensure_ascii=False) + "\n")


def read_problems(path: Path) -> list[Problem]:
    """Read what `write_problems` wrote."""
    with path.open(encoding="utf-8") as file:
        return [Problem(**json.loads(line)) for line in file]
