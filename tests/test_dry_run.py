"""The dry run: every shipped recipe leads to stages, each after what it reads, and what is in the store is said to be there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.conftest import Project

from flows.dry_run import as_text, main, plan
from parallel_r1.config import load

ROOT = Path(__file__).parents[1]
SHIPPED = [ROOT / "pipeline_config.yaml", *sorted(ROOT.glob("recipes/**/*.yaml"))]
FILES = ("math500.jsonl", "amc23.jsonl", "aime24.jsonl", "aime25.jsonl", "teacher_trajectories_200.jsonl")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_recipe_leads_to_stages_in_order(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in FILES:
        (tmp_path / name).write_text("{}\n")
    monkeypatch.setenv("DATA", str(tmp_path))
    monkeypatch.setenv("TEACHER", str(tmp_path))
    config = load(path, [f"store={tmp_path}/store"])
    stages = plan(config)
    titles = [stage.title for stage in stages]
    assert len(titles) == len(set(titles)), "every stage once"
    for place, stage in enumerate(stages):
        assert set(stage.reads) <= set(titles[:place]), f"{stage.title} comes after what it reads"
        assert not stage.cached, "nothing was built"
        assert bool(stage.key) == (not stage.reads), "a key is known where nothing is read that isn't there"
    checkpoints = ["base", *["sft"] * (config.sft is not None), *(f"rl {stage.name}" for stage in config.rl)]
    assert [title for title in titles if re.match("base|sft|rl ", title)] == checkpoints
    assert [title.removeprefix("evaluate ") for title in titles if title.startswith("evaluate ")] == checkpoints
    assert titles[-1] == "report"


def test_what_was_built_is_cached_and_what_a_changed_field_reruns_is_not(project: Project) -> None:
    project.run("filter_trajectories")
    cached = {stage.title for stage in plan(load(project.recipe, [f"store={project.store}"])) if stage.cached}
    assert cached == {"prepare train tier1", "prepare train tier2", "generate", "filter"}
    changed = load(project.recipe, [f"store={project.store}", "generate.count=140"])
    stages = {stage.title: stage for stage in plan(changed)}
    assert stages["generate"].key and not stages["generate"].cached, "its inputs are there, so its key is known"
    assert not stages["filter"].key and stages["filter"].reads == ["generate"]
    text = as_text(changed, list(stages.values()))
    assert "2 cached" in text and re.search(r"^filter +to build +not known yet +generate$", text, re.MULTILINE)


def test_a_bad_recipe_is_one_plain_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes/nowhere.yaml"]) == 2
    assert "no such file" in capsys.readouterr().err
