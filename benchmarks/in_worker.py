"""Starts benchmarks/worker.py, once per group, and reads its numbers. Targets are those of the second core issue, on a quiet machine."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from functools import cache
from typing import Literal, NamedTuple

from benchmarks.measurement import Measurement
from parallel_r1.config import load
from tasks.places import PROJECT


class Wanted(NamedTuple):
    """A number of a group."""

    group: str
    better: Literal["lower", "higher"]
    unit: str = "x"


WANTED = {
    "rollout_vs_plain": Wanted("in_process", "higher"),  # target 0.90
    "rollout_vs_lockstep": Wanted("in_process", "higher"),  # target 1.0
    "rollout_http_vs_plain": Wanted("over_http", "higher"),  # target 0.75
    "join_prefix_hit_share": Wanted("table", "higher", "share"),
    "layout_vs_loop": Wanted("layout", "higher"),  # target 200
    "structured_step_vs_causal": Wanted("step", "lower"),  # target 1.25
}


@cache
def _numbers(group: str, interpreter: str) -> dict[str, float]:
    command = [str(PROJECT / interpreter), "-W", "ignore", "-m", "benchmarks.worker", group]
    with subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith(("  ", "|")):
                print(line, end="", flush=True)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with exit code {process.returncode}")
    return json.loads(lines[-1])


def _benchmark(name: str) -> Callable[[list[str]], Measurement]:
    wanted = WANTED[name]

    def measure(arguments: list[str]) -> Measurement:
        interpreter = load(arguments[0], arguments[2:]).resources.worker_python
        return Measurement(round(_numbers(wanted.group, interpreter)[name], 3), wanted.unit, wanted.better)

    return measure


BENCHMARKS = {name: _benchmark(name) for name in WANTED}
