"""A real Prefect server for the tests of flows: its own state folder, a free port, ended with the session.

Flows run as processes of their own, as `make demo` runs them. Nothing here imports prefect: the worker environment reads this too.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

PROJECT = Path(__file__).resolve().parents[1]
TINY = {
    "prepare": {
        "train": {"tier1": {"type": "procedural", "tier": 1, "count": 200}, "tier2": {"type": "procedural", "tier": 2, "count": 200}},
        "evaluation": {"tier1": {"type": "procedural", "tier": 1, "split": "heldout", "count": 4}},
    },
    "student": {"type": "scratch", "problems": {"tier1": 1.0}, "examples": 320, "hidden_size": 64, "num_heads": 2},
    "generate": {"problems": {"tier1": 1.0}, "count": 150, "teacher": {"type": "scripted"}},
    "sft": {"prompt": "bare", "max_steps": 4, "batch_size": 8, "micro_batch_size": 8, "max_tokens": 512},
    "rl": [],
    "evaluate": {
        "samples": 1, "prompt": "bare", "base_prompt": "bare",
        "rollout": {"engine": "transformers", "max_response_tokens": 64, "max_blocks": 1},
    },
}  # fmt: skip
"""The cheapest config in which every stage but rl is real."""


GUARD = """
import os, socket
def _loud(address):
    host = address[0] if isinstance(address, tuple) else None
    if host is not None and host not in ("127.0.0.1", "::1", "localhost"):
        with open(os.environ["OUTBOUND_LOG"], "a") as file:
            file.write(f"{os.getpid()} {address}\\n")
        raise AssertionError(f"a connect to {address}: nothing may leave this machine")
_connect, _connect_ex, _getaddrinfo = socket.socket.connect, socket.socket.connect_ex, socket.getaddrinfo
socket.socket.connect = lambda self, address: (_loud(address), _connect(self, address))[1]
socket.socket.connect_ex = lambda self, address: (_loud(address), _connect_ex(self, address))[1]
def _resolve(host, *rest, **named):
    _loud((host.decode() if isinstance(host, bytes) else host or "localhost", rest))
    return _getaddrinfo(host, *rest, **named)
socket.getaddrinfo = _resolve
"""
"""A sitecustomize.py: connects to anything but the loopback fail loudly, and are written down."""


@dataclass
class Outbound:
    """Processes with this environment can't leave the machine."""

    environment: dict[str, str]

    def attempts(self) -> list[str]:
        """Process and address of every try."""
        return Path(self.environment["OUTBOUND_LOG"]).read_text().splitlines()


@dataclass
class Project:
    """Starts flows as processes that share a Prefect server, a state folder and an artifact store."""

    state: Path
    recipe: Path
    environment: dict[str, str]
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def store(self) -> Path:
        return self.state / "artifacts"

    def start(self, flow: str, *overrides: str, **environment: str) -> subprocess.Popen[str]:
        """Start `flows.stages.<flow>`, or the whole pipeline by its command line for `run`."""
        arguments = [str(self.recipe), f"store={self.store}", *overrides]
        if flow == "run":
            command = [sys.executable, "-m", "flows.run", arguments[0], "--set", *arguments[1:]]
        else:
            call = f"{flow}(recipe={arguments[0]!r}, overrides={arguments[1:]!r})"
            code = f"from flows import server; server.ensure(); from flows.stages import {flow}; {call}"
            command = [sys.executable, "-c", code]
        process = subprocess.Popen(
            command, cwd=PROJECT, env={**self.environment, **environment}, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self.started.append(process)
        return process

    def run(self, flow: str, *overrides: str, **environment: str) -> dict[str, str]:
        """Run a flow to its end; what happened to each stage: `built` or `cached`."""
        process = self.start(flow, *overrides, **environment)
        output, errors = process.communicate(timeout=300)
        assert process.returncode == 0, f"{output}\n{errors[-6000:]}"
        return outcomes(output)

    def keys(self, stage: str) -> set[str]:
        """Keys of the finished artifacts of a stage."""
        return {path.parent.name for path in self.store.glob(f"{stage}/*/MANIFEST.json")}

    def ask(self, path: str, question: dict[str, Any]) -> list[dict[str, Any]]:
        """POST to the Prefect API."""
        request = urllib.request.Request(
            f"{self.environment['PREFECT_API_URL']}/{path}", json.dumps(question).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as reply:
            return json.load(reply)


def outcomes(output: str) -> dict[str, str]:
    """Of the terminal lines of a run: title of each stage -> `built` or `cached`."""
    found = re.findall(r"^  (\S.*?) +(cached|done in \d+ s)$", output, re.MULTILINE)
    return {title: "cached" if what == "cached" else "built" for title, what in found}


@pytest.fixture(scope="session")
def prefect_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of flows: a Prefect server of this session."""
    state = tmp_path_factory.mktemp("server")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "AWS_"))}
    environment = {**clean, "PARALLEL_R1_STATE": str(state), "PARALLEL_R1_PORT": "0"}
    command = [sys.executable, "-m", "flows.server"]
    started = subprocess.run([*command, "start"], cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=200)
    assert started.returncode == 0, started.stderr
    yield {**environment, "PREFECT_API_URL": f"{started.stdout.split()[-1]}/api"}
    subprocess.run([*command, "stop"], cwd=PROJECT, env=environment, check=True, timeout=60)


@pytest.fixture
def project(prefect_environment: dict[str, str], tmp_path: Path) -> Iterator[Project]:
    """A fresh state folder and store, and the tiny config."""
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(json.dumps(TINY))
    project = Project(tmp_path, recipe, {**prefect_environment, "PARALLEL_R1_STATE": str(tmp_path)})
    yield project
    for process in project.started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, prefect_environment: dict[str, str]) -> Project:
    """TINY up to the evaluation of its sft checkpoint, for tests that read, or begin with a copy of the store."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "tiny.yaml").write_text(json.dumps(TINY))
    project = Project(folder, folder / "tiny.yaml", {**prefect_environment, "PARALLEL_R1_STATE": str(folder)})
    project.run("evaluate")
    return project


@pytest.fixture
def outbound(tmp_path: Path) -> Outbound:
    """The guard, for the processes that get its environment."""
    folder = tmp_path / "guard"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(GUARD)
    (folder / "outbound.log").touch()
    return Outbound({"PYTHONPATH": str(folder), "OUTBOUND_LOG": str(folder / "outbound.log")})


@pytest.fixture(scope="session")
def office(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """`make ui`, for the whole session."""
    from tests.office import Office

    office = Office(tmp_path_factory.mktemp("office"))
    try:
        office.open()
        yield office
    finally:
        office.close()
