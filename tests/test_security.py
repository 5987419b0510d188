"""What must never happen: a secret written down, a path that leaves the store, code from a store that runs, a byte sent elsewhere."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from moto.server import ThreadedMotoServer

from parallel_r1.store import Store, StoreError
from tasks.rollouts import laid_out
from tasks.show import as_text
from tests.conftest import PROJECT, TINY, Outbound, Project

SECRETS = {
    "AWS_ACCESS_KEY_ID": "planted-aws-id-4711", "AWS_SECRET_ACCESS_KEY": "planted-aws-secret-4712", "OPENAI_API_KEY": "planted-openai-4713",
    "HF_TOKEN": "planted-hub-4714", "PREFECT_SERVER_API_AUTH_STRING": "admin:planted-password-4715", "WANDB_API_KEY": "planted-wandb-4716",
}  # fmt: skip


def found_in(folder: Path, words: dict[str, str]) -> list[str]:
    """Files below a folder that hold one of the words."""
    found = []
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            content = path.read_bytes()
            found += [f"{path}: {name}" for name, word in words.items() if word.encode() in content]
    return found


@pytest.fixture
def guarded_server(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A Prefect server that wants a password and CSRF tokens, with secrets planted in its environment and that of its flows."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "AWS_"))}
    environment = {**clean, **SECRETS, "PREFECT_SERVER_CSRF_PROTECTION_ENABLED": "true", "AWS_DEFAULT_REGION": "us-east-1"}
    environment |= {"PARALLEL_R1_STATE": str(tmp_path), "PARALLEL_R1_PORT": "0"}
    command = [sys.executable, "-m", "flows.server"]
    started = subprocess.run([*command, "start"], cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=200)
    assert started.returncode == 0, started.stderr
    yield {**environment, "PREFECT_API_URL": f"{started.stdout.split()[-1]}/api"}
    subprocess.run([*command, "stop"], cwd=PROJECT, env=environment, check=True, timeout=60)


def test_secrets_are_found_nowhere(guarded_server: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs, parameters, artifacts of the UI, the database, manifests, job files, what lies on S3; and the password is really asked for."""
    s3 = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    s3.start()
    host, port = s3.get_host_and_port()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, SECRETS[name])
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    store = Store("s3://secrets/x")
    store.filesystem.mkdir("secrets")
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(json.dumps(TINY))
    environment = {**guarded_server, "AWS_ENDPOINT_URL": f"http://{host}:{port}"}
    project = Project(tmp_path, recipe, environment)
    try:
        assert set(project.run("filter_trajectories", "store=s3://secrets/x").values()) == {"built"}
        failing = project.start("base", "store=s3://secrets/x", "resources.worker_python=/bin/false")
        _, errors = failing.communicate(timeout=120)
        assert failing.returncode != 0
        store.filesystem.get("secrets/x", str(tmp_path / "fetched"), recursive=True)
    finally:
        s3.stop()
    assert (tmp_path / "fetched").is_dir() and (tmp_path / "prefect" / "prefect.db").stat().st_size > 100_000
    assert found_in(tmp_path, SECRETS) == []
    asked = subprocess.run(
        [sys.executable, "-c", "import os, urllib.request as r; r.urlopen(os.environ['PREFECT_API_URL'] + '/flows/count')"],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert "401" in asked.stderr, "without the password the API says no"
    assert "planted" not in errors


def test_the_guard_of_outbound_connects_is_on_in_both_environments(outbound: Outbound) -> None:
    """tests/test_flow_full.py runs the whole pipeline under it."""
    for python in (sys.executable, str(PROJECT / ".venv/worker/bin/python")):
        tried = subprocess.run([python, "-c", "import socket; socket.create_connection(('192.0.2.1', 80), 1)"],
                               env={**os.environ, **outbound.environment}, capture_output=True, text=True)  # fmt: skip
        assert "nothing may leave this machine" in tried.stderr
    assert len(outbound.attempts()) == 2


def test_servers_listen_on_loopback_only(prefect_environment: dict[str, str]) -> None:
    port = int(re.search(r":(\d+)/", prefect_environment["PREFECT_API_URL"])[1])
    listening = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        rows = [line.split() for line in Path(table).read_text().splitlines()[1:]] if Path(table).exists() else []
        listening += [row[1] for row in rows if row[3] == "0A" and int(row[1].split(":")[1], 16) == port]
    assert listening == [f"0100007F:{port:04X}"]


@pytest.mark.parametrize("name", ["weights.bin", "model.pt", "optimizer.pth", "data.pkl", "state.pickle"])
def test_a_pickle_is_never_stored(tmp_path: Path, name: str) -> None:
    out = tmp_path / "out"
    (out / "checkpoint").mkdir(parents=True)
    (out / "checkpoint" / name).write_bytes(b"\x80\x04.")
    with pytest.raises(StoreError, match="no pickles"):
        Store(tmp_path / "store").commit("sft", "key", out)


def test_weights_are_read_as_safetensors_and_model_code_is_not_run() -> None:
    sources = {path: path.read_text() for path in (PROJECT / "parallel_r1").rglob("*.py")}
    lines = [(path.name, line) for path, text in sources.items() for line in text.splitlines()]
    loads = [(name, line) for name, line in lines if "Model" in line and ".from_pretrained(" in line]
    assert len(loads) >= 4
    assert all("use_safetensors=True" in line or "gguf_file=" in line for _, line in loads), "neither format can hold code"
    trusting = {path.name for path, text in sources.items() if "trust_remote_code" in text}
    assert trusting <= {"config.py", "student.py", "base.py"}, "only where the config says so: base alone loads foreign checkpoints"
    assert not [path for path, text in sources.items() if re.search(r"\b(pickle|torch)\.loads?\(", text)]


def test_a_link_inside_the_store_leads_nowhere(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "a.json").write_text("[1]")
    store = Store(tmp_path / "store")
    ref = store.commit("sft", "key", out)
    file = tmp_path / "store" / "sft" / "key" / "a.json"
    file.unlink()
    file.symlink_to(out / "a.json")
    assert "a link" in (store.check(ref) or "")
    assert store.load("sft", "key") is None


HOSTILE = "<script>alert(1)</script> | `code` **bold** [link](http://x) ![i](http://x/y.png)\nnext"


def test_model_text_is_text_in_the_ui() -> None:
    shown = as_text(HOSTILE)
    assert not re.search(r"<(?!br>)|[|`*\[\]]", shown), "nothing that Markdown or HTML would act on"
    segments = [{"kind": kind, "text": HOSTILE} for kind in ("path", "path", "summary")]
    row = {"problem": HOSTILE, "answer": HOSTILE, "extracted": HOSTILE, "tokens": 3, "faults": [HOSTILE], "segments": segments}
    page = laid_out(row)
    assert "<script" not in page and "](http" not in page
    table = [line for line in page.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1, "a bar in a path adds no column"
