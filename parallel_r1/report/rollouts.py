"""Rollouts of a checkpoint: what the comparison needs of all of them, and a few to be looked at, laid out by block."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from parallel_r1.report.inputs import read_row, read_rows
from parallel_r1.report.numbers import number

MAX_SHOWN_CHARS = 20_000
_CONTROL_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421, 0x0D: None}


@dataclass
class RolloutIndex:
    """What stays in memory of a rollouts.jsonl: outcomes by set and problem, positions by set, byte offsets by (set, correct)."""

    correct: dict[str, dict[str, list[bool]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    positions: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    candidates: dict[tuple[str, bool], list[tuple[str, str, int]]] = field(default_factory=lambda: defaultdict(list))

    def position(self, name: str) -> float:
        """Mean start of the first block as a share of the response, over the rollouts of a set that have one."""
        found = self.positions.get(name)
        return math.fsum(found) / len(found) if found else math.nan


@dataclass(frozen=True)
class Main:
    """Text of the main thread."""

    text: str


@dataclass
class Block:
    """Paths that ran side by side, and what the summary says of them."""

    paths: list[str] = field(default_factory=list)
    summary: str | None = None


@dataclass(frozen=True)
class SampleRollout:
    """A rollout as the page shows it. All text is the model's or the data's: shown, never interpreted."""

    set: str
    problem_id: str
    problem: str
    answer: str
    extracted: str
    correct: bool
    tokens: float
    critical_path_tokens: float
    finish: str
    faults: list[str]
    parts: list[Main | Block]

    @property
    def blocks(self) -> int:
        """Blocks in the response."""
        return sum(isinstance(part, Block) for part in self.parts)


def index(path: Path | None) -> RolloutIndex:
    """Read a rollouts.jsonl once, line by line; an empty index where there is none."""
    found = RolloutIndex()
    if path is None or not path.exists():
        return found
    for offset, row in read_rows(path):
        name, problem, correct = str(row.get("set", "")), str(row.get("problem_id", "")), row.get("correct") is True
        found.correct[name][problem].append(correct)
        position = number(row.get("position"))
        if math.isfinite(position):
            found.positions[name].append(position)
        sequential = "0" if number(row.get("blocks")) > 0 else "1"
        found.candidates[name, correct].append((sequential, _rank(name, problem, row.get("sample")), offset))
    return found


def samples(path: Path | None, found: RolloutIndex, count: int) -> list[SampleRollout]:
    """`count` rollouts, right and wrong in turn, over all sets in turn; with blocks first, and the same problems for every checkpoint."""
    if path is None or not found.candidates:
        return []
    right, wrong = (_in_turn(found, correct) for correct in (True, False))
    paired = [offset for pair in zip_longest(right, wrong) for offset in pair if offset is not None]
    return [lay_out(read_row(path, offset)) for offset in paired[:count]]


def lay_out(row: Mapping[str, Any]) -> SampleRollout:
    """A Rollout row as parts in reading order: main text, blocks, main text."""
    segments = row.get("segments") or [{"kind": "main", "text": row.get("text", "")}]
    faults = [str(fault.get("code", fault) if isinstance(fault, Mapping) else fault) for fault in row.get("faults") or []]
    return SampleRollout(
        set=shown(row.get("set")),
        problem_id=shown(row.get("problem_id")),
        problem=shown(row.get("problem")).strip(),
        answer=shown(row.get("answer")),
        extracted=shown(row.get("extracted")),
        correct=row.get("correct") is True,
        tokens=number(row.get("tokens")),
        critical_path_tokens=number(row.get("critical_path_tokens")),
        finish=shown(row.get("finish")),
        faults=[shown(fault) for fault in faults],
        parts=_parts(segments),
    )


def encodable(text: str) -> str:
    """Text without what HTML or UTF-8 can't hold: control characters become pictures, lone surrogates question marks."""
    return text.encode("utf-8", "replace").decode("utf-8").translate(_CONTROL_PICTURES)


def shown(text: object) -> str:
    """Text as the page shows it: encodable, and cut where it is very long."""
    if text is None:
        return ""
    clean = encodable(str(text))
    if len(clean) <= MAX_SHOWN_CHARS:
        return clean
    return f"{clean[:MAX_SHOWN_CHARS]} … ({len(clean) - MAX_SHOWN_CHARS:,} more characters in rollouts.jsonl)"


def _parts(segments: Iterable[Mapping[str, Any]]) -> list[Main | Block]:
    parts: list[Main | Block] = []
    block, number_of_block = None, None
    for segment in segments:
        kind, text = segment.get("kind"), shown(segment.get("text"))
        if kind not in ("path", "summary"):
            block = None
            if text.strip():
                parts.append(Main(text.strip("\n")))
            continue
        goes_on = block is not None and segment.get("block") == number_of_block and (kind == "summary" or block.summary is None)
        if not goes_on:
            block, number_of_block = Block(), segment.get("block")
            parts.append(block)
        if kind == "path":
            block.paths.append(text.strip("\n"))
        else:
            block.summary = f"{block.summary or ''}{text}".strip("\n")
    return parts


def _rank(*identity: object) -> str:
    return hashlib.sha256(repr(identity).encode("utf-8", "backslashreplace")).hexdigest()


def _in_turn(found: RolloutIndex, correct: bool) -> list[int]:
    """Offsets of the right or wrong rollouts, one set after the other in turn, each problem of a set before any comes twice."""
    by_set = [sorted(rows) for (_, was), rows in found.candidates.items() if was is correct]
    return [row[2] for turn in zip_longest(*by_set) for row in turn if row is not None]
