"""Checkpoints from which a killed training goes on: which are whole, which may go, and whether one fits the run that finds it.

A program writes them into its work folder (parallel_r1/training/runs.py); the task copies them into the store while training goes on
(tasks/uploads.py). MARK is written last: a folder without it is not whole.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from parallel_r1.config import CheckpointConfig

MARK = "COMPLETE.json"
PREFIX = "checkpoint-"


class Origin(BaseModel):
    """What a checkpoint was made by, as far as going on from it depends on it."""

    model_config = ConfigDict(frozen=True)

    recipe: dict[str, Any]
    """Config section of the stage, without what only says how to run."""
    data: str
    """sha256 of the examples in their order."""
    processes: int
    strategy: str


class Mark(BaseModel):
    """What MARK holds."""

    step: int
    origin: Origin
    metrics: dict[str, float]
    """What was logged last."""


def digest(rows: Iterable[Mapping[str, Any]]) -> str:
    """sha256 of rows in their order."""
    hashed = hashlib.sha256()
    for row in rows:
        hashed.update(json.dumps(row, sort_keys=True).encode())
    return hashed.hexdigest()


def whole(work: Path) -> dict[int, Mark]:
    """The whole checkpoints in a work folder, by step."""
    marks = {}
    for path in work.glob(f"{PREFIX}*/{MARK}"):
        try:
            mark = Mark.model_validate_json(path.read_text(encoding="utf-8"))
        except (OSError, ValidationError):
            continue
        marks[mark.step] = mark
    return dict(sorted(marks.items()))


def folder_of(work: Path, step: int) -> Path:
    """Where the checkpoint of a step lies in a work folder."""
    return work / f"{PREFIX}{step}"


def lasting(marks: Mapping[int, Mark], rule: CheckpointConfig) -> set[int]:
    """Steps of the checkpoints that are kept to be looked at: every so many steps, and the best one, the earliest of equals."""
    every = {step for step in marks if rule.keep_every and step % rule.keep_every == 0}
    sign = 1 if rule.best == "highest" else -1
    scores = {step: sign * mark.metrics[rule.keep_best] for step, mark in sorted(marks.items()) if rule.keep_best in mark.metrics}
    return every | ({max(scores, key=scores.__getitem__)} if scores else set())


def surplus(marks: Mapping[int, Mark], rule: CheckpointConfig) -> list[int]:
    """Steps of the checkpoints that no rule keeps. The newest is always kept: from it a killed run goes on."""
    kept = set(sorted(marks)[-rule.keep_last :]) | lasting(marks, rule)
    return [step for step in sorted(marks) if step not in kept]


def differences(there: Origin, here: Origin) -> list[str]:
    """Why a run can't go on from a checkpoint; empty when it can. Another number of processes is no reason where each holds all state."""
    found = [f"{name}: {then!r} then, {now!r} now" for name, then, now in _changed(there.recipe, here.recipe)]
    if there.data != here.data:
        found.append(f"the examples: sha256 {there.data[:12]} then, {here.data[:12]} now")
    if there.strategy != here.strategy:
        found.append(f"launch.strategy: {there.strategy} then, {here.strategy} now: they keep the optimiser's state in different files")
    elif there.processes != here.processes and there.strategy == "zero3":
        found.append(f"launch.processes: {there.processes} then, {here.processes} now: with zero3 each process keeps a part of the state")
    return found


def _changed(there: Any, here: Any, name: str = "") -> list[tuple[str, Any, Any]]:
    if isinstance(there, dict) and isinstance(here, dict):
        names = sorted(there.keys() | here.keys())
        return [fault for key in names for fault in _changed(there.get(key), here.get(key), f"{name}.{key}".lstrip("."))]
    return [] if there == here else [(name, there, here)]
