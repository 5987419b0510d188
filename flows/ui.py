"""Serve the Prefect UI and the deployments of prefect.yaml on this machine, until Ctrl-C.

    python -m flows.ui [--set-up-only]

Makes the work pools `cpu` and `gpu` where they are missing, registers the deployments, limits the tag `gpu` to GPU_JOBS (1) tasks at a
time, installs the automation that marks killed runs as Crashed, and runs one worker per pool.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import timedelta

from flows import server
from tasks.places import PROJECT

POOLS = ("cpu", "gpu")
HEARTBEAT = "prefect.flow-run.heartbeat"
ENDINGS = ("Completed", "Failed", "Cancelled", "Crashed", "Paused", "Suspended")
SILENCE = timedelta(seconds=90)
"""Three heartbeats."""
AUTOMATION = "parallel-r1: killed runs are Crashed"


def prefect(*arguments: str) -> None:
    """Run Prefect's command line; its output is shown only when it fails."""
    done = subprocess.run([sys.executable, "-m", "prefect", *arguments], cwd=PROJECT, capture_output=True, text=True)
    if done.returncode != 0:
        raise server.ServerError(f"prefect {' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")


def set_up() -> None:
    """Make the server know pools, deployments, the limit and the automation. Again changes nothing."""
    for pool in POOLS:
        make_pool(pool)
    prefect("deploy", "--all")
    limit_gpu_jobs(int(os.environ.get("GPU_JOBS", "1")))
    install_automation()


def make_pool(name: str) -> None:
    """A pool whose runs are processes of its workers, unless there is one, of whatever type (docker/pools)."""
    from prefect.client.orchestration import get_client
    from prefect.exceptions import ObjectNotFound

    try:
        with get_client(sync_client=True) as client:
            client.read_work_pool(name)
    except ObjectNotFound:
        prefect("work-pool", "create", name, "--type", "process")


def limit_gpu_jobs(jobs: int) -> None:
    """So many tasks with the tag `gpu` run at a time; further ones wait for a slot. A killed one's slot comes free within a minute."""
    from prefect.client.orchestration import get_client

    from tasks.stage import GPU

    with get_client(sync_client=True) as client:
        client.create_concurrency_limit(tag=GPU, concurrency_limit=jobs)


def install_automation() -> None:
    """A flow process that was killed can't say so: whoever was heard and falls silent without an ending is marked Crashed."""
    from prefect.automations import Automation
    from prefect.client.schemas.objects import StateType
    from prefect.events.actions import ChangeFlowRunState
    from prefect.events.schemas.automations import EventTrigger, Posture

    try:
        Automation.read(name=AUTOMATION)
    except ValueError:
        trigger = EventTrigger(
            after={HEARTBEAT},
            expect={HEARTBEAT, *(f"prefect.flow-run.{ending}" for ending in ENDINGS)},
            match={"prefect.resource.id": ["prefect.flow-run.*"]},
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=SILENCE,
        )
        message = "No heartbeat: the flow's process is gone. Run again: finished stages are kept, and a stage goes on from its checkpoint"
        crash = ChangeFlowRunState(state=StateType.CRASHED, name="Crashed", message=message)
        Automation(name=AUTOMATION, description="A run without heartbeat has crashed", trigger=trigger, actions=[crash]).create()


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until interrupted; gives the exit code."""
    parser = argparse.ArgumentParser(prog="python -m flows.ui", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--set-up-only", action="store_true", help="make the server know everything and end; workers run elsewhere")
    options = parser.parse_args(arguments)
    os.environ["PARALLEL_R1_PROJECT"] = str(PROJECT)  # where the workers' flow runs find the project
    try:
        url = server.ensure()
        set_up()
    except server.ServerError as error:
        print(error, file=sys.stderr)
        return 2
    if options.set_up_only:
        return 0
    print(f"UI: {url.removesuffix('/api')}/deployments   Ctrl-C ends the workers; `make stop` ends the server", flush=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(0))
    run_workers()
    return 0


def run_workers() -> None:
    """One worker per pool, until this process is told to end. A worker that was killed is started again."""
    workers = {pool: start_worker(pool) for pool in POOLS}
    try:
        while True:
            time.sleep(1)
            for pool, worker in workers.items():
                if worker.poll() is not None:
                    print(f"The worker of the pool {pool} ended with {worker.returncode}: starting it again", flush=True)
                    workers[pool] = start_worker(pool)
    finally:
        for worker in workers.values():
            worker.terminate()
        for worker in workers.values():
            worker.wait()


def start_worker(pool: str) -> subprocess.Popen[bytes]:
    """A worker that takes the runs of a pool."""
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", pool, "--name", f"{pool}-here"]
    return subprocess.Popen(command, cwd=PROJECT, start_new_session=True, preexec_fn=server.hear_interrupts)


if __name__ == "__main__":
    sys.exit(main())
