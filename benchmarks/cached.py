"""What caching costs."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.measurement import Measurement
from tasks.places import PROJECT

REPETITIONS = 5
CALLS = 20


def cached_run_seconds(arguments: list[str]) -> Measurement:
    """A run in which every stage is in the store already: whole process, Prefect server running; median of five.

    The first run builds what is missing, so run it after `make demo`.
    """
    command = [sys.executable, "-m", "flows.run", *arguments]
    subprocess.run(command, cwd=PROJECT, check=True)
    seconds = []
    for _ in range(REPETITIONS):
        start = time.perf_counter()
        subprocess.run(command, cwd=PROJECT, check=True, stdout=subprocess.DEVNULL)
        seconds.append(time.perf_counter() - start)
    return Measurement(round(statistics.median(seconds), 2), "s", "lower")


def cached_stage_overhead_ms(arguments: list[str]) -> Measurement:
    """What a cached stage takes more than an empty Prefect task: key, lock, a look into the store, showing its artifact again."""
    from flows import server

    server.ensure()
    from prefect import flow, task

    from parallel_r1.config import ProceduralSource, load
    from tasks.prepare import prepare_problems
    from tasks.stage import Run

    @task
    def nothing() -> None: ...

    @flow
    def measured(store: str) -> float:
        run = Run.of(load(PROJECT / "pipeline_config.yaml", [f"store={store}"]))
        source = ProceduralSource(tier=1, count=100)
        prepare_problems(run, source, "benchmark")
        seconds = {}
        for name, call in (("stage", lambda: prepare_problems(run, source, "benchmark")), ("task", nothing)):
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            seconds[name] = time.perf_counter() - start
        return 1000 * (seconds["stage"] - seconds["task"]) / CALLS

    with tempfile.TemporaryDirectory() as folder:
        milliseconds = statistics.median(measured(str(Path(folder, "store"))) for _ in range(3))
    return Measurement(round(milliseconds, 1), "ms", "lower")


BENCHMARKS = {"cached_run_seconds": cached_run_seconds, "cached_stage_overhead_ms": cached_stage_overhead_ms}
