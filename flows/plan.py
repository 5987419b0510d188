"""Say what a run needs before anything runs: memory per GPU against what there is, tokens, hours, price, disk.

    python -m flows.plan recipes/parallel_r1_seen.yaml --set machine.gpu=H100 machine.gpus=8 launch.processes=8 launch.strategy=fsdp2

The machine is the config's section `machine`; when that is left out, this machine: what nvidia-smi shows, else the CPU.
Exit codes: 0 everything fits, 1 something can't (with the settings that would), 2 the config can't be used.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from flows.command_line import add_recipe, config_named, parser_of
from parallel_r1.config import ConfigError, MachineConfig, PipelineConfig
from parallel_r1.planning import GB, GPUS, SAFE, Machine, PlanError, StagePlan, architecture_of, plan
from tasks.places import state_folder


def this_machine() -> Machine:
    """What nvidia-smi shows, else the CPU with its memory."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        shown = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        shown = []
    if not shown:
        return Machine(gpus=0, memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return machine_of(shown)


def machine_of(shown: Sequence[str]) -> Machine:
    """From lines `name, MiB` of nvidia-smi; the smallest GPU counts."""
    names, sizes = zip(*(line.rsplit(",", 1) for line in shown), strict=True)
    known = next((name for name in GPUS if name in names[0]), None)
    return Machine.of(MachineConfig(gpu=known, gpus=len(shown), memory_gb=min(map(float, sizes)) * 2**20 / GB))


def pages(config: PipelineConfig, machine: Machine, stages: Sequence[StagePlan]) -> Iterator[str]:
    """The plan as lines of text."""
    model = architecture_of(config)
    what = f"{machine.gpus} x {machine.memory / GB:.0f} GB GPU" if machine.on_gpu else f"CPU, {machine.memory / GB:.1f} GB"
    bound = "at most " if config.student.type == "scratch" else ""
    yield f"{config.name}: {bound}{model.parameters:,} parameters, {model.vocabulary:,} rows in the vocabulary, tags included"
    yield f"machine: {what}; {SAFE:.0%} of the memory can be planned for"
    for stage in stages:
        yield ""
        yield _headline(stage, machine)
        for moment, parts in stage.moments.items():
            listed = "  ".join(f"{name} {value / GB:.2f}" for name, value in parts.items() if value >= 5e6)
            yield f"  {moment:<9}{sum(parts.values()) / GB:8.2f} GB per {machine.unit}   {listed}"
        yield from (f"  DOES NOT FIT  {fault}" for fault in stage.faults)
    yield ""
    yield from _totals(stages, machine)


def _headline(stage: StagePlan, machine: Machine) -> str:
    facts = [f"{stage.processes} process{'es' if stage.processes > 1 else ''}"]
    if stage.trained:
        facts.append(f"{stage.trained:,} parameters trained")
    if stage.tokens_per_step:
        facts.append(f"{stage.tokens_per_step:,.0f} tokens per step")
        facts.append(f"{stage.steps:,} steps" if stage.steps else "steps: as the teacher's trajectories are many")
    if stage.seconds is not None:
        facts.append(_hours(stage.seconds, machine))
    if stage.disk:
        facts.append(f"{stage.disk / GB:.2f} GB of disk")
    return f"{stage.title}: {', '.join(facts)}"


def _hours(seconds: float, machine: Machine) -> str:
    price = f", {seconds / 3600 * machine.price_per_hour:.2f} to pay" if machine.price_per_hour else ""
    return f"{seconds / 3600:.2f} hours{price}"


def _totals(stages: Sequence[StagePlan], machine: Machine) -> Iterator[str]:
    known = [stage.seconds for stage in stages if stage.seconds is not None]
    if any(stage.faults for stage in stages):
        yield "time: not reckoned, as not every stage fits"
    elif known:
        without = [stage.title for stage in stages if stage.seconds is None]
        apart = f", without {', '.join(without)}" if without else ""
        yield f"time: {_hours(sum(known), machine)}{apart}"
        yield f"  assumes {machine.mfu:.0%} of the peak in training, and responses of half their budget"
    else:
        yield "time: unknown without machine.tflops and machine.bandwidth_tb, or machine.gpu"
    artifacts = sum(stage.disk for stage in stages)
    yield f"disk: {artifacts / GB:.2f} GB for artifacts and, while a stage trains, its checkpoints"


def no_room(stages: Sequence[StagePlan], folder: Path) -> str | None:
    """Why the disk under the state folder is too small for the stage that needs most; None where it isn't."""
    while not folder.exists():
        folder = folder.parent
    free, need = shutil.disk_usage(folder).free, max(stage.disk for stage in stages)
    if need <= free:
        return None
    way_out = "PARALLEL_R1_STATE moves it, store: s3://... keeps artifacts elsewhere"
    return f"{folder} has {free / GB:.1f} GB free, a stage needs {need / GB:.1f} GB: {way_out}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; gives the exit code."""
    parser = parser_of("flows.plan", __doc__)
    add_recipe(parser)
    options = parser.parse_args(arguments)
    try:
        config = config_named(options.recipe, options.overrides)
        machine = Machine.of(config.machine) if config.machine else this_machine()
        stages = plan(config, machine)
    except (ConfigError, PlanError) as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(pages(config, machine, stages)))
    full = None if config.machine else no_room(stages, state_folder())
    if full:
        print(f"DOES NOT FIT  {full}")
    return 1 if full or any(stage.faults for stage in stages) else 0


if __name__ == "__main__":
    sys.exit(main())
