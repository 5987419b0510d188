"""Flows with a real Prefect server and real stages: caching, keys, crashes, two runs at once, S3."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.conftest import PROJECT, Project, outcomes
from tests.office import processes
from moto.server import ThreadedMotoServer

STAGES = {"prepare train tier1", "prepare train tier2", "generate", "filter"}
SLOW_BASE = ("student.examples=4800", "student.checkpoint_every=300")


def test_the_second_run_is_cached_and_a_changed_field_reruns_what_depends_on_it(project: Project) -> None:
    assert project.run("filter_trajectories") == dict.fromkeys(STAGES, "built")
    assert project.run("filter_trajectories") == dict.fromkeys(STAGES, "cached")
    cached = project.ask("task_runs/filter", {"task_runs": {"state": {"name": {"any_": ["Cached"]}}}, "limit": 200})
    assert STAGES <= {run["name"].rsplit("-", 1)[0] if run["name"] not in STAGES else run["name"] for run in cached}

    changes = {
        "filter.max_chars=200": {"filter"},
        "generate.count=140": {"generate", "filter"},
        "prepare.train.tier1.count=190": {"prepare train tier1", "generate", "filter"},
        "prepare.train.tier2.count=190": {"prepare train tier2"},
        "resources.threads=2 name=other": set(),
    }
    for overrides, rebuilt in changes.items():
        expected = {title: "built" if title in rebuilt else "cached" for title in STAGES}
        assert project.run("filter_trajectories", *overrides.split()) == expected, overrides


def test_a_damaged_artifact_is_rebuilt_and_what_depends_on_it_stays(project: Project) -> None:
    project.run("filter_trajectories")
    [key] = project.keys("generate")
    folder = project.store / "generate" / key
    digest = json.loads((folder / "MANIFEST.json").read_text())["digest"]
    (folder / "trajectories.jsonl").unlink()
    assert project.run("filter_trajectories") == dict.fromkeys(STAGES, "cached") | {"generate": "built"}
    assert json.loads((folder / "MANIFEST.json").read_text())["digest"] == digest, "the stage is deterministic"


def test_two_identical_runs_at_once_build_each_thing_once(project: Project) -> None:
    runs = [project.start("filter_trajectories", "generate.count=3000", "prepare.train.tier1.count=3000") for _ in range(2)]
    results = []
    for run in runs:
        output, errors = run.communicate(timeout=120)
        assert run.returncode == 0, errors
        results.append(outcomes(output))
    for title in STAGES:
        assert sorted(result[title] for result in results) == ["built", "cached"], title


def wait_for(path_pattern: str, folder: Path, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not list(folder.glob(path_pattern)):
        assert time.monotonic() < deadline, f"no {path_pattern} in {folder}"
        time.sleep(0.1)


def gone(project: Project, seconds: float = 20) -> bool:
    deadline = time.monotonic() + seconds
    while (left := processes(str(project.state), "parallel_r1.training")) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not left


def test_ctrl_c_ends_the_stage_process_and_says_how_to_go_on(project: Project) -> None:
    flow = project.start("run", *SLOW_BASE)
    wait_for("work/base/*/log.txt", project.state)
    time.sleep(1)
    os.killpg(flow.pid, signal.SIGINT)
    _, errors = flow.communicate(timeout=40)
    assert flow.returncode == 130, errors
    assert "run again" in errors and "Traceback" not in errors
    assert gone(project)


def test_a_failing_stage_program_fails_the_run_with_its_reason(project: Project) -> None:
    flow = project.start("run", "resources.worker_python=/bin/false")
    _, errors = flow.communicate(timeout=120)
    assert flow.returncode == 1
    assert "exit code 1" in errors and "Full log" in errors and "Traceback" not in errors


@pytest.mark.parametrize("arguments, message, reason", [
    (["missing.yaml"], "missing.yaml: no such file", "a missing file"),
    (["pipeline_config.yaml", "--set", "rl.0.stepz=5"], "rl.0.stepz", "an unknown key"),
    (["pipeline_config.yaml", "--set", "seed=-1"], "seed = -1", "out of bounds"),
    (["pipeline_config.yaml", "--set", "seed"], "dotted.field=value", "not an override"),
])  # fmt: skip
def test_a_bad_config_is_one_plain_message(arguments: list[str], message: str, reason: str) -> None:
    done = subprocess.run([sys.executable, "-m", "flows.run", *arguments], cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode == 2, reason
    assert message in done.stderr and "Traceback" not in done.stderr


def test_the_store_on_s3(project: Project) -> None:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
        environment = {**keys, "AWS_ENDPOINT_URL": f"http://{host}:{port}"}
        make = f"import s3fs; s3fs.S3FileSystem(endpoint_url='http://{host}:{port}').mkdir('flows')"
        subprocess.run([sys.executable, "-c", make], env={**os.environ, **keys}, check=True)
        assert project.run("filter_trajectories", "store=s3://flows/some/prefix", **environment) == dict.fromkeys(STAGES, "built")
        assert project.run("filter_trajectories", "store=s3://flows/some/prefix", **environment) == dict.fromkeys(STAGES, "cached")
    finally:
        server.stop()
    assert not project.store.exists()


def test_every_stage_shows_an_artifact(project: Project) -> None:
    project.run("filter_trajectories")
    shown = {artifact["key"] for artifact in project.ask("artifacts/latest/filter", {"limit": 200})}
    assert {"prepare-train-tier1", "generate", "filter", "progress-generate"} <= shown
    [table] = [artifact for artifact in project.ask("artifacts/latest/filter", {"limit": 200}) if artifact["key"] == "filter"]
    assert {"fault", "trajectories", "share", "example"} == set(json.loads(table["data"])[0])
