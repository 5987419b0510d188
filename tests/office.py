"""`make ui` as tests see it: a Prefect server, both workers, all deployments, in a state folder of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.conftest import PROJECT, TINY

RL = {
    "name": "easy", "problems": {"tier1": 1.0}, "prompt": "bare", "reward": "accuracy", "steps": 200,
    "prompts_per_step": 2, "rollouts_per_prompt": 2, "micro_batch_size": 4, "checkpoint_every": 1,
    "rollout": {"max_blocks": 1, "max_prompt_tokens": 256, "max_response_tokens": 64, "max_path_tokens": 16, "max_summary_tokens": 16},
}  # fmt: skip
"""An rl stage that starts soon and ends late: to be cancelled or killed."""
ENDED = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}


class Refused(Exception):
    """The server's answer to a run that it did not create."""


class Office:
    """Creates runs of deployments and watches them."""

    def __init__(self, state: Path, **environment: str) -> None:
        self.state = state
        self.store = state / "artifacts"
        self.recipe = state / "tiny.yaml"
        self.recipe.write_text(json.dumps({**TINY, "name": "tiny", "store": str(self.store), "rl": [RL]}))
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "AWS_"))}
        self.environment = {**clean, "PARALLEL_R1_STATE": str(state), "PARALLEL_R1_PORT": "0", **environment}
        self.log = state / "ui.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.url = ""

    def open(self) -> None:
        """Start everything; returns when the deployments are there."""
        with self.log.open("wb") as log:
            command = [sys.executable, "-m", "flows.ui"]
            self.process = subprocess.Popen(command, cwd=PROJECT, env=self.environment, stdout=log, stderr=log, start_new_session=True)
        self.until(lambda: "UI: http" in self.log.read_text() or self.process.poll() is not None, 300, "make ui")
        assert self.process.poll() is None, self.log.read_text()
        self.url = self.log.read_text().split("UI: ")[1].split("/deployments")[0]

    def close(self) -> None:
        """End the workers, then the server."""
        if self.process and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)
        subprocess.run([sys.executable, "-m", "flows.server", "stop"], cwd=PROJECT, env=self.environment, capture_output=True, timeout=60)

    def ask(self, path: str, question: Any = None) -> Any:
        """GET, or POST where there is a question. Raises Refused with the server's words."""
        body = None if question is None else json.dumps(question).encode()
        request = urllib.request.Request(f"{self.url}/api/{path}", body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=30) as reply:
                return json.loads(reply.read() or "null")
        except urllib.error.HTTPError as error:
            raise Refused(error.read().decode()) from None

    def deployment(self, name: str) -> str:
        """The id of `sft/gpu`."""
        return self.ask(f"deployments/name/{name}")["id"]

    def start(self, name: str, **parameters: Any) -> str:
        """Create a run of a deployment with the tiny recipe; its id."""
        parameters = {"recipe": str(self.recipe), **parameters}
        return self.ask(f"deployments/{self.deployment(name)}/create_flow_run", {"parameters": parameters})["id"]

    def state_of(self, run: str) -> dict[str, Any]:
        """The state of a run: type, name, message."""
        return self.ask(f"flow_runs/{run}")["state"] or {"type": None, "name": None, "message": None}

    def ended(self, run: str, seconds: float = 300) -> dict[str, Any]:
        """The state in which a run ended."""
        self.until(lambda: self.state_of(run)["type"] in ENDED, seconds, f"run {run}")
        return self.state_of(run)

    def shown(self, run: str) -> dict[str, dict[str, Any]]:
        """The artifacts of a run by key."""
        found = self.ask("artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [run]}}, "limit": 200})
        return {artifact["key"]: artifact for artifact in found}

    def until(self, condition: Callable[[], Any], seconds: float, what: str) -> None:
        """Wait for a condition."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"{what}: not within {seconds} s\n{self.log.read_text()[-4000:]}"
            time.sleep(0.2)

    def programs(self) -> list[int]:
        """The stage programs that run now."""
        return list(processes(str(self.state), "parallel_r1."))

    def workers(self, pool: str) -> list[int]:
        """The worker of a pool."""
        return processes("worker", "start", f"{pool}-here", environment=f"PARALLEL_R1_STATE={self.state}")

    def flow_processes(self) -> list[int]:
        """The processes that execute flow runs now: whatever is Prefect's here and neither server nor worker."""
        here = f"PARALLEL_R1_STATE={self.state}"
        others = {*processes("server", environment=here), *processes("worker", "start", environment=here)}
        return [process for process in processes("prefect", environment=here) if process not in others]


def processes(*marks: str, environment: str = "") -> list[int]:
    """Processes whose command line holds all marks, and whose environment holds a setting."""
    return list(_processes(marks, environment))


def _processes(marks: tuple[str, ...], environment: str) -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
                if all(mark.encode() in command for mark in marks) and environment.encode() in (entry / "environ").read_bytes():
                    yield int(entry.name)
            except OSError:
                continue


def kill(process: int) -> None:
    """kill -9."""
    os.kill(process, signal.SIGKILL)
