"""Problem sets: reading them from their sources, normalising, de-duplicating, and drawing from them."""

from __future__ import annotations

import json
import random
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from parallel_r1.config import FilesSource, HubSource, ProceduralSource, Source
from parallel_r1.tables import Row, SourceError, cell, read_file, read_hub


@dataclass(frozen=True)
class Problem:
    """A mathematics problem with its right answer. `source` says where it comes from."""

    id: str
    problem: str
    answer: str
    source: str


class ProblemSet(NamedTuple):
    """Problems of a source, and how many rows were dropped for which reason (`dropped_<reason>`)."""

    problems: list[Problem]
    counts: dict[str, int]


def read_source(source: Source, seed: int) -> ProblemSet:
    """The problems of a source. `seed` matters to the procedural one only. Raises SourceError or ValueError naming what is wrong."""
    if isinstance(source, ProceduralSource):
        from parallel_r1 import procedural  # it builds on Problem

        return ProblemSet(procedural.make_problems(source.tier, source.split, source.count, seed), {})
    if isinstance(source, FilesSource):
        return from_rows(read_file(source.path), source, source.path, PurePosixPath(source.path).stem)
    rows = read_hub(source.name, source.config, source.split, source.revision)
    return from_rows(rows, source, f"hub data set {source.name}", source.name)


def from_rows(rows: Iterable[Row], source: FilesSource | HubSource, where: str, name: str) -> ProblemSet:
    """Problems of raw rows: blank ones and repeated problems go, and are counted; `limit` counts what stays.

    `where` names the rows in errors; `name` is the source and the beginning of an id where the rows bring none.
    """
    problems: list[Problem] = []
    dropped: Counter[str] = Counter()
    texts: set[str] = set()
    ids: set[str] = set()
    for index, row in enumerate(rows):
        if source.limit is not None and len(problems) == source.limit:
            break
        text = str(_value(row, source.problem_column, "problem_column", where) or "").strip()
        answer = clean_answer(_value(row, source.answer_column, "answer_column", where))
        reason = "no_problem" if not text else "no_answer" if not answer else "duplicates" if normalise(text) in texts else None
        if reason:
            dropped[f"dropped_{reason}"] += 1
            continue
        texts.add(normalise(text))
        problems.append(Problem(_new_id(row, name, index, ids), text, answer, str(row.get("source") or name)))
    if not problems:
        raise SourceError(f"{where}: no problem in it that could be used; dropped: {dict(dropped) or 'nothing, it has no rows'}")
    return ProblemSet(problems, dict(dropped))


def _value(row: Row, column: str, field: str, where: str) -> Any:
    return cell(row, column, f"{where}: {field}")


def _new_id(row: Row, name: str, index: int, taken: set[str]) -> str:
    problem_id = str(row["id"]) if row.get("id") is not None else f"{name}-{index:05d}"
    if problem_id in taken:
        problem_id = f"{problem_id}#{index}"
    taken.add(problem_id)
    return problem_id


def normalise(text: str) -> str:
    """What two spellings of one problem have in common: compatible characters, case and white space don't count."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def clean_answer(value: Any) -> str:
    """The gold of a row as text: a number without needless decimals; of a solution ending in `#### 1,234` (GSM8K) the 1234."""
    if value is None:
        return ""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    solution, mark, final = str(value).rpartition("####")
    answer = final.strip()
    return answer.replace(",", "") if mark and re.fullmatch(r"-?\d[\d,]*(\.\d+)?", answer) else answer


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
