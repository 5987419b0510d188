"""The table that `make bench-gpu` writes, from manifests as the stages leave them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.gpu import RECIPE, table
from parallel_r1.config import load
from parallel_r1.planning import GB, Machine, plan
from parallel_r1.store import Manifest

ROOT = Path(__file__).parents[1]


def manifest(stage: str, at: str, **metrics: float) -> Manifest:
    versions = {"torch": "2.13.0", "vllm": "0.31.0"}
    filled: dict[str, Any] = {"key": "0" * 32, "digest": "0", "files": {}, "config": {}, "inputs": {}, "seconds": 61.0}
    return Manifest(stage=stage, committed_at=at, versions=versions, metrics=metrics, **filled)


def test_the_recipe_fits_a_gpu_with_24_gb() -> None:
    config = load(ROOT / RECIPE)
    stages = plan(config, Machine(gpus=1, memory=24 * GB))
    assert [fault for stage in stages for fault in stage.faults] == []
    assert 1e8 < stages[0].trained < 3e8


def test_measured_stands_beside_planned() -> None:
    config = load(ROOT / RECIPE)
    plans = plan(config, Machine(gpus=1, memory=24 * GB))
    gaps = {"rollout_gap/main/mean": 0.01, "rollout_gap/path_1/mean": 0.03, "rollout_gap/main/max": 0.2, "rollout_gap/path_1/max": 0.4}
    manifests = [
        manifest("rl", "2026-12-01T10:00", seconds_per_step=1.5, tokens_per_second=20_000, peak_memory_gb=11.5, **gaps),
        manifest("sft", "2026-12-01T09:00", seconds_per_step=0.25, tokens_per_second=40_000, peak_memory_gb=6.25),
        manifest("filter", "2026-12-01T08:00", kept=10),
    ]
    header, _, sft, rl, _, versions = table(manifests, plans, config)
    cells = [cell.strip() for cell in rl.strip("|").split("|")]
    assert [cell.strip() for cell in header.strip("|").split("|")][:3] == ["stage", "seconds", "seconds per step"]
    assert sft.startswith("| sft | 61 | 0.25 | 4e+04 | 6.25 |"), "in the order of the run; stages without a model are left out"
    planned = next(stage.peak for stage in plans if stage.title == "rl easy") / GB
    assert cells == ["rl", "61", "1.5", "2e+04", "11.5", f"{planned:.2f}", "0.02", "0.4"]
    assert versions == "Versions: torch 2.13.0, vllm 0.31.0. Recipe: gpu."
