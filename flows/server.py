"""A local Prefect server: loopback only, telemetry off, its database under the state folder.

    python -m flows.server start | stop | url

`ensure()` uses the server of PREFECT_API_URL when that is set; else the one it started earlier; else it starts one and leaves it
running, with its process id and address in `{state}/prefect/server.json`. This module sets Prefect's environment, so import it and
call `ensure()` before anything imports prefect.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tasks.places import state_folder

DEFAULT_PORT = 4200
START_SECONDS = 180.0


class ServerError(RuntimeError):
    """No Prefect server could be reached or started."""


def home() -> Path:
    """Prefect's own folder."""
    return state_folder() / "prefect"


def environment() -> dict[str, str]:
    """Prefect's settings for this project; what the caller has set already wins."""
    settings = {
        "PREFECT_HOME": str(home()),
        "PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{home()}/prefect.db",
        "PREFECT_LOCAL_STORAGE_PATH": str(home() / "results"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_CLOUD_ENABLE_ORCHESTRATION_TELEMETRY": "false",
        "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
        "PREFECT_CLI_PROMPT": "false",
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",  # the automation of `make ui` marks runs Crashed whose heart has stopped
        "PREFECT_SERVER_TASKS_TAG_CONCURRENCY_SLOT_WAIT_SECONDS": "5",
        "PREFECT_DEPLOYMENT_CONCURRENCY_SLOT_WAIT_SECONDS": "5",
        "DO_NOT_TRACK": "1",
        "MPLBACKEND": "Agg",
    }
    if password := os.environ.get("PREFECT_SERVER_API_AUTH_STRING"):
        settings["PREFECT_API_AUTH_STRING"] = password  # the server asks for it, so every client of ours gives it
    if protected := os.environ.get("PREFECT_SERVER_CSRF_PROTECTION_ENABLED"):
        settings["PREFECT_CLIENT_CSRF_SUPPORT_ENABLED"] = protected
    return {name: os.environ.get(name, value) for name, value in settings.items()}


def answers(url: str) -> bool:
    """Whether a Prefect API answers at `url`."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as reply:
            return reply.status == 200
    except (OSError, urllib.error.URLError):
        return False


def ensure() -> str:
    """Make this process use a Prefect server that answers; returns its API address."""
    os.environ.update(environment())
    url = os.environ.get("PREFECT_API_URL")
    if url is None:
        with _lock():
            url = _running() or _start()
        os.environ["PREFECT_API_URL"] = url
    elif not answers(url):
        raise ServerError(f"PREFECT_API_URL = {url}: no Prefect server answers there. Unset it to have a local one started.")
    return url


def stop() -> bool:
    """End the server that `ensure` started, if it runs."""
    record = _record()
    if record is None:
        return False
    _record_file().unlink()
    if not _is_prefect(record["pid"]):
        return False
    os.killpg(record["pid"], signal.SIGTERM)
    deadline = time.monotonic() + 15
    while _is_prefect(record["pid"]) and time.monotonic() < deadline:
        time.sleep(0.1)
    if _is_prefect(record["pid"]):
        os.killpg(record["pid"], signal.SIGKILL)
    return True


def hear_interrupts() -> None:
    """For a new process: a shell starts background jobs deaf to SIGINT, which Prefect passes on to end its own children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _running() -> str | None:
    record = _record()
    if record is None or not _is_prefect(record["pid"]):
        return None
    deadline = time.monotonic() + START_SECONDS
    while _is_prefect(record["pid"]) and time.monotonic() < deadline:
        if answers(record["url"]):
            return record["url"]
        time.sleep(0.3)
    return None


def _start() -> str:
    port = _free_port()
    url = f"http://127.0.0.1:{port}/api"
    home().mkdir(parents=True, exist_ok=True)
    log = home() / "server.log"
    print(f"Starting a Prefect server at {url.removesuffix('/api')} (the first start takes about 30 s; log: {log})", flush=True)
    with log.open("ab") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)],
            stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True, preexec_fn=hear_interrupts,
            env={**os.environ, **environment(), "PREFECT_API_URL": url},
        )  # fmt: skip
    _record_file().write_text(json.dumps({"pid": process.pid, "url": url}))
    deadline = time.monotonic() + START_SECONDS
    while not answers(url):
        if process.poll() is not None or time.monotonic() > deadline:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            raise ServerError(f"the Prefect server did not start. The last lines of {log}:\n{tail}")
        time.sleep(0.2)
    return url


def _free_port() -> int:
    wanted = int(os.environ.get("PARALLEL_R1_PORT", DEFAULT_PORT))
    for port in (wanted, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return probe.getsockname()[1]
    raise ServerError("no free port on 127.0.0.1")


def _record_file() -> Path:
    return home() / "server.json"


def _record() -> dict[str, int | str] | None:
    try:
        return json.loads(_record_file().read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def _is_prefect(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        return state != "Z" and b"prefect" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


@contextmanager
def _lock() -> Iterator[None]:
    """Two runs that start at once start one server."""
    home().mkdir(parents=True, exist_ok=True)
    with (home() / "server.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main(arguments: list[str]) -> int:
    """The command line: start, stop, url."""
    match arguments:
        case ["start"] | ["url"]:
            print(ensure().removesuffix("/api"))
        case ["stop"]:
            print("Prefect server stopped" if stop() else "no Prefect server of this project runs")
        case _:
            print(__doc__)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
