"""Locks, terminal lines, and where a run reads and writes."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from prefect import Flow
from prefect.utilities.importtools import import_object

from parallel_r1.config import PipelineConfig, ScratchStudent, load
from tasks.locks import FlockManager
from tasks.places import PROJECT
from tasks.progress import Progress, slug
from tasks.show import curves_image
from tasks.stage import Run, uses_hub

HOLDER = """
import sys, time
from pathlib import Path
from tasks.locks import FlockManager
FlockManager(Path(sys.argv[1])).acquire_lock("key", "other")
print("held", flush=True)
time.sleep(600)
"""


def test_a_lock_excludes_other_holders_and_comes_back(tmp_path: Path) -> None:
    locks = FlockManager(tmp_path)
    assert locks.acquire_lock("key", "me") and locks.acquire_lock("key", "me"), "a holder may ask twice"
    assert locks.is_lock_holder("key", "me") and not locks.is_lock_holder("key", "you")
    assert FlockManager(tmp_path).is_locked("key")
    assert not FlockManager(tmp_path).acquire_lock("key", "you", acquire_timeout=0.2)
    assert not locks.wait_for_lock("key", timeout=0.2)
    with pytest.raises(ValueError, match="does not hold"):
        locks.release_lock("key", "you")
    locks.release_lock("key", "me")
    assert not locks.is_locked("key") and locks.wait_for_lock("key")


def test_kill_9_of_the_holder_frees_the_lock(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path], cwd=PROJECT, stdout=subprocess.PIPE, text=True)
    assert holder.stdout and holder.stdout.readline() == "held\n"
    locks = FlockManager(tmp_path)
    assert not locks.acquire_lock("key", "me", acquire_timeout=0.3)
    holder.kill()
    holder.wait()
    start = time.monotonic()
    assert locks.acquire_lock("key", "me", acquire_timeout=5)
    assert time.monotonic() - start < 1


def test_a_terminal_line_shows_how_far_and_how_good() -> None:
    metrics = {"reward": 0.417, "accuracy": 0.71, "parallel_ratio": 0.98, "learning_rate": 1e-6}
    line = Progress("rl easy", logging.getLogger()).line(7, 10, metrics)
    assert line.split() == ["rl", "easy", "7/10", "reward", "0.42", "accuracy", "0.71", "parallel", "0.98", "0", "s"]


@pytest.mark.parametrize("text, expected", [("rl easy", "rl-easy"), ("prepare train AIME_24", "prepare-train-aime-24")])
def test_artifact_keys_are_what_prefect_takes(text: str, expected: str) -> None:
    assert slug(text) == expected


def test_curves_are_an_image_of_what_was_logged() -> None:
    rows = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0, "reward": 0.5}]
    assert curves_image(rows, ["loss", "reward"]).startswith("data:image/png;base64,iVBOR")


def test_only_a_run_without_hub_sources_is_offline() -> None:
    assert uses_hub(PipelineConfig()), "the paper's sources lie on the hub"
    assert not uses_hub(load(PROJECT / "pipeline_config.yaml"))
    assert isinstance(load(PROJECT / "pipeline_config.yaml").student, ScratchStudent)


def test_relative_stores_lie_in_the_project_and_the_state_can_move(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PARALLEL_R1_STATE", str(tmp_path))
    run = Run.of(load(PROJECT / "pipeline_config.yaml"))
    assert run.store.root == str(PROJECT / ".state" / "artifacts")
    assert run.state == tmp_path


def test_every_deployment_is_a_flow_and_every_flow_is_deployed_once() -> None:
    deployments = yaml.safe_load((PROJECT / "prefect.yaml").read_text())["deployments"]
    flows = [import_object(deployment["entrypoint"].replace(".py:", ":").replace("/", ".").replace(":", ".")) for deployment in deployments]
    assert all(isinstance(flow, Flow) and flow.description for flow in flows)
    expected = ["analysis", "base", "evaluate", "experiments", "filter", "generate", "parallel-r1", "prepare", "report", "rl", "sft"]
    assert sorted(flow.name for flow in flows) == expected
    for flow in flows:
        assert all(field.get("description") for field in flow.parameters.model_dump()["properties"].values()), flow.name
