"""Everything that can be killed, cut or filled up, for real. After each fault the next run completes, and what it made is what an
undisturbed run makes. `make test-faults`: minutes, so not part of `make test`; what fits there is in test_flow.py and test_store.py."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from moto.server import ThreadedMotoServer

from parallel_r1.store import Store, StoreError
from tests.conftest import PROJECT, Project, outcomes
from tests.office import Office, kill, processes

pytestmark = [pytest.mark.fault, pytest.mark.slow]

SMALL = ("prepare.train.tier1.count=150", "generate.count=100")
LONG_BASE = ("student.examples=4800", "student.checkpoint_every=20")
LONG_SFT = ("sft.epochs=30", "sft.max_steps=200", "sft.checkpoint_every=20")


def until(condition: object, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.1)


def digests(store: Path | Store) -> dict[str, str]:
    """Digest of every artifact of the stages that are deterministic on one machine."""
    store = store if isinstance(store, Store) else Store(store)
    return {f"{manifest.stage}/{manifest.key}": manifest.digest for manifest in store.manifests()}


def weights(store: Path, stage: str) -> str:
    """Digest of the weights of a stage's only artifact."""
    [manifest] = [manifest for manifest in Store(store).manifests() if manifest.stage == stage]
    return manifest.files["checkpoint/model.safetensors"].sha256


class S3:
    """An S3 server on loopback that can go away and come back with its content."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.server: ThreadedMotoServer | None = None
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}", "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }  # fmt: skip

    def up(self) -> None:
        self.server = ThreadedMotoServer(ip_address="127.0.0.1", port=self.port, verbose=False)
        self.server.start()

    def down(self) -> None:
        if self.server:
            self.server.stop()
        self.server = None


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    server = S3()
    server.up()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    yield server
    server.down()


# --- processes that are killed ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage, long", [("base", LONG_BASE), ("sft", LONG_SFT)])
def test_kill_9_of_the_program_of_a_training_stage(project: Project, stage: str, long: tuple[str, ...]) -> None:
    """The flow killed in rl: tests/test_flow_full.py."""
    flow = project.start(stage, *long)
    until(lambda: list(project.state.glob(f"work/{stage}/*/work/checkpoint-20/COMPLETE.json")))
    for process in processes(str(project.state), f"parallel_r1.training.{stage}"):
        kill(process)
    _, errors = flow.communicate(timeout=60)
    assert flow.returncode != 0 and f"{stage} ended" in errors
    output, errors = project.start(stage, *long).communicate(timeout=200)
    assert "goes on from the checkpoint" in output and outcomes(output)[stage] == "built", errors

    undisturbed = replace(project, state=project.state / "undisturbed", environment={**project.environment})
    undisturbed.environment["PARALLEL_R1_STATE"] = str(undisturbed.state)
    undisturbed.run(stage, *long)
    assert weights(project.store, stage) == weights(undisturbed.store, stage)


def test_kill_9_of_the_flow_in_a_training(project: Project) -> None:
    flow = project.start("base", *LONG_BASE)
    until(lambda: list(project.state.glob("work/base/*/work/checkpoint-40/COMPLETE.json")))
    kill(flow.pid)
    until(lambda: not processes(str(project.state), "parallel_r1.training"), 20)
    assert not project.keys("base"), "the stage program ends with the flow"
    output, errors = project.start("base", *LONG_BASE).communicate(timeout=200)
    assert "goes on from the checkpoint of step" in output, errors
    assert outcomes(output) == {"prepare train tier1": "cached", "prepare train tier2": "cached", "base": "built"}
    [key] = project.keys("base")
    steps = [json.loads(line)["step"] for line in (project.store / "base" / key / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(set(steps)) and steps[-1] == 300, "every step once"
    assert not list(project.state.glob("work/base/*")), "the work folder goes with the commit"


TWO = ("launch.processes=2", "sft.micro_batch_size=4", "sft.epochs=9", "sft.max_steps=60", "sft.checkpoint_every=10", *SMALL)


def test_kill_9_of_one_of_two_training_processes(project: Project) -> None:
    flow = project.start("sft", *TWO)
    until(lambda: list(project.state.glob("work/sft/*/work/checkpoint-10/COMPLETE.json")))
    (process,) = processes(str(project.state), "-u\0-m\0parallel_r1.training.sft", environment="\0RANK=1\0")
    kill(process)
    _, errors = flow.communicate(timeout=60)
    assert flow.returncode != 0 and "Rank 1 was the first to fail, with exit code -9" in errors and "Last lines of rank 1" in errors
    output, errors = project.start("sft", *TWO).communicate(timeout=200)
    assert "goes on from the checkpoint" in output and outcomes(output)["sft"] == "built", errors


def test_a_training_goes_on_on_another_machine(project: Project, s3: S3, tmp_path: Path) -> None:
    root = "s3://machines/x"
    Store(root).filesystem.mkdir("machines")
    uploaded = Store(f"{root}/.checkpoints")
    here = (*TWO[2:], f"store={root}")
    flow = project.start("sft", *here, **s3.environment)
    until(lambda: list(uploaded.manifests()))
    kill(flow.pid)  # its stage program ends with it
    flow.communicate()

    elsewhere = Project(tmp_path / "elsewhere", project.recipe, {**project.environment, "PARALLEL_R1_STATE": str(tmp_path / "elsewhere")})
    output, errors = elsewhere.start("sft", *here, **s3.environment).communicate(timeout=300)
    assert f"was fetched from {uploaded.root}/sft/" in output and "goes on from the checkpoint" in output, f"{output}\n{errors[-3000:]}"
    assert outcomes(output)["sft"] == "built" and not list(uploaded.manifests()), "the artifact takes their place"


def test_kill_9_of_vllm_in_an_evaluation(project: Project) -> None:
    many = ("prepare.evaluation.tier1.count=300", "evaluate.samples=16", "evaluate.rollout.engine=vllm")
    flow = project.start("evaluate", *many)
    until(lambda: list(project.state.glob("work/evaluate/*/work/*.jsonl")), 300)
    for process in processes(str(project.state), "parallel_r1.evaluation"):
        kill(process)
    _, errors = flow.communicate(timeout=60)
    assert flow.returncode != 0 and "evaluate sft ended" in errors
    assert project.run("evaluate", *many)["evaluate sft"] == "built", "the next run completes"


def test_the_prefect_server_is_killed_and_restarted(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment |= {"PARALLEL_R1_STATE": str(tmp_path / "server"), "PARALLEL_R1_PORT": str(port)}

    def serve(command: str) -> str:
        done = subprocess.run([sys.executable, "-m", "flows.server", command], cwd=PROJECT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()[-1]

    url = serve("start")
    recipe = tmp_path / "tiny.yaml"
    from tests.conftest import TINY

    recipe.write_text(json.dumps(TINY))
    project = Project(tmp_path, recipe, {**environment, "PARALLEL_R1_STATE": str(tmp_path), "PREFECT_API_URL": f"{url}/api"})
    flow = project.start("base", *LONG_BASE)
    try:
        until(lambda: list(project.state.glob("work/base/*/work/checkpoint-20/COMPLETE.json")))
        kill(json.loads((tmp_path / "server" / "prefect" / "server.json").read_text())["pid"])
        assert serve("start") == url, "the same address"
        output, errors = flow.communicate(timeout=300)
        assert flow.returncode == 0 and outcomes(output)["base"] == "built", f"{output}\n{errors[-3000:]}"
        assert project.run("base", *LONG_BASE)["base"] == "cached"
    finally:
        flow.kill()
        serve("stop")


def test_killed_with_its_worker_a_run_is_marked_crashed_and_the_next_one_goes_on(office: Office) -> None:
    run = office.start("rl/gpu")
    written = "work/rl/*/work/checkpoint-*/COMPLETE.json"  # a run that was cancelled before may have left some
    office.until(lambda: office.programs() and list(office.state.glob(written)), 400, "rl at work, and a checkpoint of it")
    workers, flows = office.workers("gpu"), office.flow_processes()
    assert workers and flows
    for process in workers:
        os.kill(process, signal.SIGSTOP)  # else it would report the run as crashed before it is killed itself
    for process in (*flows, *workers):
        kill(process)
    office.until(lambda: not office.programs(), 30, "the end of the stage program")
    assert office.state_of(run)["type"] == "RUNNING", "nobody was left to say what happened"
    state = office.ended(run, 240)
    assert state["type"] == "CRASHED" and "No heartbeat" in state["message"]

    again = office.start("rl/gpu")  # needs the worker that `make ui` started again, and the slots that the killed run held
    its_log = {"logs": {"flow_run_id": {"any_": [again]}}}
    office.until(lambda: "goes on from the checkpoint" in json.dumps(office.ask("logs/filter", its_log)), 300, "the next run goes on")
    office.ask(f"flow_runs/{again}/set_state", {"state": {"type": "CANCELLING"}})
    assert office.ended(again, 60)["type"] == "CANCELLED"
    assert not office.programs()


def test_the_full_flow_hands_its_gpu_stages_to_the_pool(office: Office) -> None:
    """Also with one slot for the tag: the waiting flow holds none. A child that fails is a parent that fails, with its words."""
    run = office.start("parallel-r1/full", place="pools", overrides=["rl=[]", "name=pools"])
    state = office.ended(run, 600)
    assert state["type"] == "COMPLETED", state["message"]
    children = office.ask("flow_runs/filter", {"flow_runs": {"parent_flow_run_id": {"any_": [run]}}})
    assert {child["state"]["type"] for child in children} == {"COMPLETED"} and len(children) >= 2
    assert "report" in office.shown(run)

    run = office.start("parallel-r1/full", place="pools", overrides=["rl=[]", "seed=7", "resources.worker_python=/bin/false"])
    state = office.ended(run, 300)
    assert state["type"] == "FAILED" and "base: run" in state["message"] and "exit code 1" in state["message"]


def test_runs_of_one_deployment_queue(office: Office) -> None:
    runs = [office.start("generate/cpu", overrides=[f"generate.count={count}"]) for count in (140, 141, 142)]
    assert [office.ended(run)["type"] for run in runs] == ["COMPLETED"] * 3


# --- stores that go away, fill up, or rot -------------------------------------------------------------------------------------


def test_an_outage_of_s3_is_waited_for(project: Project, s3: S3) -> None:
    Store("s3://patient/x").filesystem.mkdir("patient")
    here = {**s3.environment, "PARALLEL_R1_STORE_PATIENCE": "60"}
    undisturbed = project.run("filter_trajectories", "store=s3://patient/calm", *SMALL, **here)
    flow = project.start("filter_trajectories", "store=s3://patient/storm", *SMALL, **here)
    until(lambda: list(Store("s3://patient/storm").manifests()))
    s3.down()
    time.sleep(8)
    s3.up()
    output, errors = flow.communicate(timeout=200)
    assert flow.returncode == 0 and outcomes(output) == undisturbed, errors[-3000:]
    assert digests(Store("s3://patient/storm")) == digests(Store("s3://patient/calm"))


def test_an_outage_that_lasts_is_a_clear_error_and_the_next_run_goes_on(project: Project, s3: S3) -> None:
    Store("s3://gone/x").filesystem.mkdir("gone")
    here = {**s3.environment, "PARALLEL_R1_STORE_PATIENCE": "4"}
    flow = project.start("run", "store=s3://gone/x", *SMALL, **here)
    until(lambda: list(Store("s3://gone/x").manifests()))
    s3.down()
    _, errors = flow.communicate(timeout=200)
    assert flow.returncode == 1
    assert "no answer for 4 s" in errors and "run again when the store is back" in errors and "Traceback" not in errors
    s3.up()
    finished = {manifest.stage for manifest in Store("s3://gone/x").manifests()}
    results = project.run("filter_trajectories", "store=s3://gone/x", *SMALL, **here)
    assert "cached" in results.values() and "prepare" in finished


def test_an_upload_that_broke_off_is_no_artifact_and_goes_on_later(s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARALLEL_R1_STORE_PATIENCE", "3")
    store = Store("s3://torn/x")
    store.filesystem.mkdir("torn")
    out = tmp_path / "out"
    out.mkdir()
    (out / "a.json").write_text("[1]")
    (out / "b.safetensors").write_bytes(os.urandom(1 << 20) * 150)

    def cut() -> None:
        until(lambda: Store("s3://torn/x").filesystem.exists("torn/x/sft/key/a.json"))
        s3.down()

    cutter = threading.Thread(target=cut)
    cutter.start()
    with pytest.raises(StoreError, match="run again when the store is back"):
        store.commit("sft", "key", out)
    cutter.join()
    s3.up()
    store = Store("s3://torn/x")
    assert store.filesystem.exists("torn/x/sft/key/a.json") and store.load("sft", "key") is None, "half of it is nothing"
    said: list[str] = []
    ref = store.commit("sft", "key", out, on_progress=said.append)
    assert "a.json is uploaded already" in said and not any("b.safetensors is uploaded" in text for text in said)
    assert store.check(ref, deep=True) is None
    store.invalidate("sft", "key")
    (out / "a.json").write_text("[2]")
    said.clear()
    assert store.check(store.commit("sft", "key", out, on_progress=said.append), deep=True) is None
    assert said == ["b.safetensors is uploaded already"], "another content of the same size is not taken for the old one"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(folder)], capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"no right to mount a small disk here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_in_the_store(project: Project, small_disk: Path) -> None:
    here = (f"store={small_disk}/store", "generate.count=1000", "prepare.train.tier1.count=1000")
    flow = project.start("run", *here)
    _, errors = flow.communicate(timeout=120)
    assert flow.returncode == 1
    assert "No space left on device" in errors and "make room and run again" in errors and "Traceback" not in errors
    assert not list(small_disk.glob("store/.staging/*")), "the half that fitted is taken away"
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    output, errors = project.start("filter_trajectories", *here).communicate(timeout=120)
    assert "is built already and only has to be stored" in output, errors
    assert set(outcomes(output).values()) >= {"built"}
    calm = project.state / "calm"
    project.run("filter_trajectories", f"store={calm}", *here[1:])
    assert digests(small_disk / "store") == digests(calm)


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete"])
def test_a_damaged_input_is_rebuilt_in_the_same_run_and_never_served(project: Project, damage: str) -> None:
    project.run("filter_trajectories", *SMALL)
    before = digests(project.store)
    [key] = project.keys("generate")
    file = project.store / "generate" / key / "trajectories.jsonl"
    content = file.read_bytes()
    if damage == "flip":
        file.write_bytes(content.replace(b"Final", b"fINAL", 1))
    elif damage == "truncate":
        file.write_bytes(content[:-10])
    else:
        file.unlink()
    results = project.run("filter_trajectories", *SMALL, "filter.max_chars=10000")
    assert results["generate"] == "built" and results["filter"] == "built"
    after = digests(project.store)
    assert {name: after[name] for name in before} == before
