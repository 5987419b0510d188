"""Measure speeds into benchmarks/results.json: {name: {value, unit, better, command, at}}.

    python -m benchmarks.run [CONFIG] [--set FIELD=VALUE ...] [--only NAME ...]

What is not measured this time keeps its last value.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from benchmarks import grading, in_worker
from benchmarks.measurement import Measurement
from tasks.places import PROJECT

RESULTS = Path(__file__).with_name("results.json")
REPETITIONS = 5


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


BENCHMARKS = {"cached_run_seconds": cached_run_seconds, **grading.BENCHMARKS, **in_worker.BENCHMARKS}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run")
    parser.add_argument("recipe", nargs="?", default="pipeline_config.yaml")
    parser.add_argument("--set", dest="overrides", nargs="*", action="extend", default=[])
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS))
    options = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in options.only:
        measured = BENCHMARKS[name]([options.recipe, "--set", *options.overrides])
        command = shlex.join(["make", "bench", f"CONFIG={options.recipe}", f"SET={' '.join(options.overrides)}"])
        results[name] = {**measured._asdict(), "command": command, "at": datetime.now(UTC).isoformat(timespec="seconds")}
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
        print(f"{name}: {measured.value:g} {measured.unit} ({measured.better} is better)")


if __name__ == "__main__":
    main()
