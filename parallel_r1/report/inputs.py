"""What the report is made from: plain data and local files, no store and no Prefect."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parallel_r1.config import PipelineConfig


@dataclass(frozen=True)
class StageRun:
    """One finished stage, as its manifest tells it. `label` is the checkpoint's or set's name, such as 'rl hard'."""

    stage: str
    label: str
    key: str
    seconds: float
    versions: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    folder: Path | None = None


@dataclass(frozen=True)
class Evaluation:
    """A checkpoint's `results.json` and, where there is one, its `rollouts.jsonl`."""

    label: str
    results: Mapping[str, Any]
    rollouts: Path | None = None


@dataclass(frozen=True)
class Curve:
    """A training stage's `metrics.jsonl`: one object per optimiser step."""

    label: str
    metrics: Path


@dataclass(frozen=True)
class ReportInput:
    """Everything of one run, in the order in which it happened. `funnel` holds the metrics of the filter stage, `analysis` what
    parallel_r1/analysis.py found."""

    name: str
    config: PipelineConfig
    stages: Sequence[StageRun] = ()
    evaluations: Sequence[Evaluation] = ()
    curves: Sequence[Curve] = ()
    funnel: Mapping[str, float] | None = None
    analysis: Mapping[str, Any] | None = None


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Byte offset and object of every line of a jsonl file; ValueError names file and line of one that can't be read."""
    with path.open("rb") as lines:
        offset = 0
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield offset, _parse(line, f"{path}, line {number}")
            offset += len(line)


def read_row(path: Path, offset: int) -> dict[str, Any]:
    """The object of the line that starts at `offset`."""
    with path.open("rb") as lines:
        lines.seek(offset)
        return _parse(lines.readline(), f"{path}, byte {offset}")


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: no JSON object: {error}. The stage that wrote it did not finish; run it again") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where}: a JSON object is expected, this is {type(row).__name__}")
    return row
