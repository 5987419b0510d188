"""Serve the Prefect UI and the deployments of prefect.yaml on this machine, until Ctrl-C.

    python -m flows.ui

Makes the work pools `cpu` and `gpu` where they are missing, registers the deployments, and runs one worker per pool.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from flows import server
from tasks.places import PROJECT

POOLS = ("cpu", "gpu")


def prefect(*arguments: str) -> None:
    """Run Prefect's command line; its output is shown only when it fails."""
    done = subprocess.run([sys.executable, "-m", "prefect", *arguments], cwd=PROJECT, capture_output=True, text=True)
    if done.returncode != 0:
        raise server.ServerError(f"prefect {' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")


def main() -> int:
    """Serve until interrupted; gives the exit code when the workers end on their own."""
    os.environ["PARALLEL_R1_PROJECT"] = str(PROJECT)  # where the workers' flow runs find the project
    try:
        url = server.ensure()
        for pool in POOLS:
            prefect("work-pool", "create", pool, "--type", "process", "--overwrite")
        prefect("deploy", "--all")
    except server.ServerError as error:
        print(error, file=sys.stderr)
        return 2
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "prefect", "worker", "start", "--pool", pool, "--name", f"{pool}-here"],
            cwd=PROJECT, start_new_session=True, preexec_fn=server.hear_interrupts,
        )
        for pool in POOLS
    ]  # fmt: skip
    print(f"UI: {url.removesuffix('/api')}/deployments   Ctrl-C ends the workers; `make stop` ends the server", flush=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(0))
    try:
        for worker in workers:
            worker.wait()
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.wait()
    return 1


if __name__ == "__main__":
    sys.exit(main())
