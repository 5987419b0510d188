"""A real pretrained model through the real flow: SmolLM2-135M as student with LoRA, and as a teacher that the stage serves itself."""

from __future__ import annotations

import json
from typing import Any

import pytest

from parallel_r1.jobs import read_lines
from parallel_r1.store import Manifest
from tasks.places import state_folder
from tests.conftest import TINY, Project

pytestmark = pytest.mark.slow
CHECKPOINT = state_folder() / "smollm2" / "checkpoint"
TEACHER = {
    "type": "served", "model": str(CHECKPOINT), "max_tokens": 256, "max_prompt_tokens": 512, "samples": 2, "attempts": 2, "concurrency": 8,
}  # fmt: skip
RECIPE = TINY | {
    "student": {"type": "hub", "name": str(CHECKPOINT)},
    "generate": {"problems": {"tier1": 1.0}, "count": 12, "teacher": {"type": "scripted"}},
    "sft": {"prompt": "plain", "max_steps": 2, "batch_size": 4, "micro_batch_size": 2, "max_tokens": 512, "lora": {"r": 8}},
    "evaluate": {
        "samples": 1, "prompt": "plain", "base_prompt": "plain",
        "rollout": {"max_prompt_tokens": 256, "max_response_tokens": 128, "max_blocks": 1, "max_in_flight": 8},
    },
}  # fmt: skip


def manifest(project: Project, stage: str, **having: Any) -> Manifest:
    """Of a stage's one artifact, or of the one whose teacher is of a type."""
    found = [Manifest.model_validate_json(path.read_text()) for path in project.store.glob(f"{stage}/*/MANIFEST.json")]
    [one] = [manifest for manifest in found if having.items() <= manifest.config.get("teacher", {}).items()]
    return one


def test_smollm2_is_a_student_and_a_teacher(project: Project) -> None:
    if not (CHECKPOINT / "config.json").exists():
        pytest.skip(f"no {CHECKPOINT}: `make smollm2` makes it")
    project.recipe.write_text(json.dumps(RECIPE))
    outcome = project.run("run")
    assert {"base", "sft", "evaluate base", "evaluate sft"} <= set(outcome)
    assert manifest(project, "base").metrics["new_tags"] == 6
    trained = manifest(project, "sft")
    assert trained.config["lora"]["r"] == 8 and trained.metrics["steps"] == 2 and trained.metrics["loss"] > 0
    results = [json.loads(path.read_text()) for path in project.store.glob("evaluate/*/results.json")]
    assert len(results) == 2 and all(result["engine"].startswith("vllm") and result["sampled_tokens"] > 50 for result in results)

    project.run("filter_trajectories", "generate.count=6", f"generate.teacher={json.dumps(TEACHER)}")
    written = manifest(project, "generate", type="served")
    assert written.metrics["trajectories"] == 6 and 12 <= written.metrics["answers"] <= 24
    assert written.metrics["completion_tokens"] > 500 and written.metrics["tokens_per_second"] > 1
    rows = read_lines(project.store / "generate" / written.key / "trajectories.jsonl")
    assert all(row["text"] for row in rows), "it wrote something for every problem"
    [judged] = [path.parent for path in project.store.glob("filter/*/MANIFEST.json") if written.key in path.read_text()]
    counts = json.loads((judged / "MANIFEST.json").read_text())["metrics"]
    assert counts["seen"] == 6 and counts["kept"] == written.metrics["accepted"]
    faults = {name: count for name, count in counts.items() if name.startswith("rejected_")}
    assert counts["kept"] == 6 or sum(faults.values()) >= counts["rejected"] > 0, "whatever is rejected has a fault by name"
