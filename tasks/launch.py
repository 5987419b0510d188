"""The command that starts a training program: plain Python for one process, `accelerate launch` for several (config section `launch`).

torchrun, below accelerate, watches the processes: when one dies it ends the others and says which was the first. Each line of a process
comes with its rank in front (RANK_TEMPLATE), and each process's streams are kept in files under `logs` besides.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from parallel_r1.config import LaunchConfig
from tasks.places import PROJECT

CONFIGS = PROJECT / "parallel_r1" / "training" / "accelerate"
RANK_TEMPLATE = "[rank ${rank}] "


def command(program: list[str | os.PathLike[str]], launch: LaunchConfig, threads: int, logs: Path) -> list[str | os.PathLike[str]]:
    """`program`, which is [python, -m, module, ...], as the launch section has it run."""
    if launch.processes == 1:
        return program
    python, *module = program
    options = {
        "--config_file": CONFIGS / f"{launch.strategy}.yaml",
        "--num_processes": launch.processes,
        "--num_machines": launch.machines,
        "--main_process_port": launch.main_port if launch.machines > 1 else 0,  # 0: any that is free
        "--num_cpu_threads_per_process": threads,
        "--log_dir": logs,
        "--tee": 3,
    }
    if launch.machines > 1:  # each machine gets its rank where they meet
        options |= {"--rdzv_backend": "c10d", "--main_process_ip": launch.main_address, "--machine_rank": 0}
    flat = [str(part) for pair in options.items() for part in pair]
    return [*launch.prefix, python, "-m", "accelerate.commands.launch", *flat, *module]


def environment(launch: LaunchConfig) -> Mapping[str, str]:
    """What the launched processes need beside a program's environment."""
    return {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": RANK_TEMPLATE} if launch.processes > 1 else {}
