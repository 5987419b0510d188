"""Which checkpoints are whole, which may go, and whether a run may go on from one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from parallel_r1 import resuming
from parallel_r1.config import CheckpointConfig, RlConfig
from parallel_r1.resuming import MARK, Mark, Origin
from parallel_r1.store import identity

ORIGIN = Origin(recipe=identity(RlConfig()), data="d" * 64, processes=2, strategy="ddp")
REWARDS = {10: 0.1, 20: 0.5, 30: 0.5, 40: 0.2, 50: 0.3}
MARKS = {step: Mark(step=step, origin=ORIGIN, metrics={"reward": reward, "loss": -reward}) for step, reward in REWARDS.items()}


@pytest.mark.parametrize(
    ("rule", "gone", "reason"),
    [
        ({}, [10, 20, 30], "the last two stay"),
        ({"keep_last": 1}, [10, 20, 30, 40], "the newest always stays: a killed run goes on from it"),
        ({"keep_last": 9}, [], "fewer than may stay"),
        ({"keep_last": 1, "keep_every": 20}, [10, 30], "every 20 steps"),
        ({"keep_last": 1, "keep_every": 7}, [10, 20, 30, 40], "no step fits"),
        ({"keep_last": 1, "keep_best": "reward"}, [10, 30, 40], "the best, the earliest of equals"),
        ({"keep_last": 1, "keep_best": "loss", "best": "lowest"}, [10, 30, 40], "the best may be the lowest"),
        ({"keep_last": 1, "keep_best": "accuracy"}, [10, 20, 30, 40], "a metric that is not logged keeps nothing"),
        ({"keep_last": 2, "keep_every": 30, "keep_best": "reward"}, [10], "rules add up"),
    ],
)
def test_what_no_rule_keeps_goes(rule: dict[str, Any], gone: list[int], reason: str) -> None:
    assert resuming.surplus(MARKS, CheckpointConfig(**rule)) == gone, reason


def write(work: Path, step: int, content: str | None) -> Path:
    folder = resuming.folder_of(work, step)
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"w" * step)
    if content is not None:
        (folder / MARK).write_text(content)
    return folder


def test_only_what_bears_its_mark_is_whole(tmp_path: Path) -> None:
    write(tmp_path, 10, MARKS[10].model_dump_json())
    write(tmp_path, 9, Mark(step=9, origin=ORIGIN, metrics={}).model_dump_json())
    write(tmp_path, 20, None)
    write(tmp_path, 30, MARKS[30].model_dump_json()[:40])
    assert list(resuming.whole(tmp_path)) == [9, 10], "by number, not by name; without a mark or with half of one they are not whole"


@pytest.mark.parametrize(
    ("change", "said", "reason"),
    [
        ({}, [], "nothing changed"),
        ({"processes": 4}, [], "DDP: every process holds all state, so others may go on"),
        ({"recipe": identity(RlConfig(checkpoint_every=3))}, [], "how to run is no difference"),
        ({"recipe": identity(RlConfig(clip_high=0.28, steps=7))}, ["clip_high: 0.2 then, 0.28 now", "steps: 300 then, 7"], "all are named"),
        ({"data": "e" * 64}, ["the examples: sha256 dddddddddddd then, eeeeeeeeeeee now"], "other data"),
        ({"strategy": "fsdp2"}, ["launch.strategy: ddp then, fsdp2 now"], "another layout of the optimiser's state"),
    ],
)
def test_what_keeps_a_run_from_going_on_is_named(change: dict[str, Any], said: list[str], reason: str) -> None:
    found = resuming.differences(ORIGIN, ORIGIN.model_copy(update=change))
    assert len(found) == len(said), f"{reason}: {found}"
    assert all(fault.startswith(begin) for fault, begin in zip(found, said, strict=True)), f"{reason}: {found}"


def test_zero3_goes_on_with_as_many_processes_only() -> None:
    there = ORIGIN.model_copy(update={"strategy": "zero3"})
    assert resuming.differences(there, there) == []
    (fault,) = resuming.differences(there, there.model_copy(update={"processes": 4}))
    assert fault.startswith("launch.processes: 2 then, 4 now")


def test_the_order_of_the_examples_counts() -> None:
    one, other = {"prompt": "a", "row": "1"}, {"prompt": "b", "row": "2"}
    assert resuming.digest([one, other]) == resuming.digest([{"row": "1", "prompt": "a"}, other]) != resuming.digest([other, one])
