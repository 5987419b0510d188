"""The complete flow, every part real: Prefect server, TRL, vLLM, report; killed with -9 inside rl and resumed."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from subprocess import Popen

from tests.conftest import PROJECT, Outbound, Project, outcomes

SMOKE = PROJECT / "recipes" / "smoke.yaml"
STEPS = 4
KILL_AFTER = 2
CHEAP = "evaluate.rollout.engine=transformers"
"""rl samples with vLLM, twice; three evaluations with it would take a minute more (they are in tests/worker/test_evaluation.py)."""
BEFORE_RL = {"prepare train tier1", "prepare evaluation tier1", "base", "generate", "filter", "sft"}


def kill_inside_rl(project: Project, flow: Popen[str]) -> None:
    """Kill -9 the flow once rl has written a checkpoint and is at work on the next step."""
    deadline = time.monotonic() + 400
    while not list(project.state.glob(f"work/rl/*/work/checkpoint-{KILL_AFTER}/COMPLETE.json")):
        assert flow.poll() is None, flow.communicate()
        assert time.monotonic() < deadline, "rl never wrote its checkpoint"
        time.sleep(0.05)
    os.kill(flow.pid, signal.SIGKILL)
    flow.communicate()


def metrics(project: Project, stage: str) -> list[dict[str, float]]:
    [key] = project.keys(stage)
    return [json.loads(line) for line in (project.store / stage / key / "metrics.jsonl").read_text().splitlines()]


def test_the_whole_pipeline_survives_kill_9_inside_rl_and_asks_nobody_outside(project: Project, outbound: Outbound) -> None:
    project.recipe = SMOKE
    kill_inside_rl(project, project.start("run", CHEAP, **outbound.environment))
    before = {stage: project.keys(stage) for stage in ("base", "filter", "sft")}
    assert all(len(keys) == 1 for keys in before.values()) and not project.keys("rl")

    flow = project.start("run", CHEAP, **outbound.environment)
    output, errors = flow.communicate(timeout=500)
    assert flow.returncode == 0, f"{output}\n{errors}"
    assert {title for title, what in outcomes(output).items() if what == "cached"} >= BEFORE_RL, "earlier stages are not run again"
    assert "goes on from the checkpoint of step" in output
    assert {stage: project.keys(stage) for stage in before} == before
    assert [row["step"] for row in metrics(project, "rl")] == list(range(1, STEPS + 1)), "the number of steps of an undisturbed run"

    check_what_was_learned(project)
    check_report(project, output)
    check_analysis(project)
    assert set(project.run("run", CHEAP).values()) == {"cached"}, "a third run finds everything"
    assert outbound.attempts() == [], "every stage ran, and none tried to leave this machine"


def check_what_was_learned(project: Project) -> None:
    """Not levels, which a few steps can't give: that every part did its work."""
    losses = [row["loss"] for row in metrics(project, "sft")]
    assert losses[-1] < 0.5 * losses[0]
    for row in metrics(project, "rl"):
        assert row["rollout_gap/main/max"] < 1e-3, "what is sampled is what is trained"
        assert -1 <= row["reward"] <= 1
    engines = {json.loads(path.read_text())["engine"].split()[0] for path in project.store.glob("evaluate/*/results.json")}
    assert engines == {"transformers"}
    base = next(sets for sets in map(results_of, project.store.glob("evaluate/*/results.json")) if sets["parallel_ratio"]["value"] == 0)
    assert base["response_tokens"]["value"] > 1, "the base model has never seen a block, and answers without"


def results_of(path: Path) -> dict[str, dict[str, float]]:
    return json.loads(path.read_text())["sets"]["tier1"]["metrics"]


def check_report(project: Project, output: str) -> None:
    page = Path(re.search(r"^report +(\S+)$", output, re.MULTILINE)[1])
    html = page.read_text()
    for label in ("base", "sft", "rl easy"):
        assert label in html and label in output
    assert 'id="analysis"' in html and "step 1 beside step" in html
    assert not re.search(r"(src|href)=[\"']https?://", html), "the report loads nothing from outside"
    assert (page.parent / "report.md").exists() and json.loads((page.parent / "results.json").read_text())["rows"]


def check_analysis(project: Project) -> None:
    [path] = project.store.glob("analysis/*/analysis.json")
    found = json.loads(path.read_text())
    assert list(found["paths"]) == ["sft", "rl easy"], "the base model has no blocks"
    [stage] = found["trends"]
    assert stage["steps"] == STEPS and 0 <= stage["windows"][0]["position"]["value"] < 1
    shown = {artifact["key"] for artifact in project.ask("artifacts/latest/filter", {"limit": 200})}
    assert {"analysis", "analysis-curves", "analysis-behaviour", "analysis-samples"} <= shown
