"""Measure the stages on a GPU machine into benchmarks/gpu.md: step times, rollout ratio, rollout gap in bfloat16, memory against the plan.

    python -m benchmarks.gpu [--set FIELD=VALUE ...]

Runs benchmarks/gpu.yaml twice, causal and structured, in a store of its own, then the rollout benchmarks, and appends a section with date,
machine, versions and commands. Works without a GPU too, where it measures the CPU: so its parts are tested.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from benchmarks import in_worker
from flows.plan import this_machine
from parallel_r1.config import PipelineConfig, load
from parallel_r1.planning import GB, Machine, StagePlan, plan
from parallel_r1.store import Manifest, Store
from tasks.places import PROJECT, state_folder

RECIPE = "benchmarks/gpu.yaml"
PAGE = Path(__file__).with_name("gpu.md")
ATTENTIONS = ("causal", "structured")
ROLLOUTS = ("rollout_vs_plain", "rollout_vs_lockstep")
REGIONS = ("main", "path_1", "path_n", "summary")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu")
    parser.add_argument("--set", dest="overrides", nargs="*", action="extend", default=[], help="for a smaller or larger model")
    parser.add_argument("--page", type=Path, default=PAGE, help="what the section is appended to")
    options = parser.parse_args()
    machine = this_machine()
    command = f'`make bench-gpu SET="{" ".join(options.overrides)}"`'
    _append(options.page, [f"## {datetime.now(UTC):%Y-%m-%d %H:%M} UTC: {_machine(machine)}", "", command])
    for attention in ATTENTIONS:
        root = state_folder() / "bench-gpu" / attention
        overrides = [*options.overrides, f"attention={attention}", f"store={root}"]
        subprocess.run([sys.executable, "-m", "flows.run", RECIPE, "--set", *overrides], cwd=PROJECT, check=True)
        config = load(PROJECT / RECIPE, overrides)
        _append(options.page, [f"### {attention}", "", *table(list(Store(root).manifests()), plan(config, machine), config)])
    _append(options.page, _rollouts())


def _append(page: Path, lines: Iterable[str]) -> None:
    """Write down each part as soon as it was measured."""
    text = "\n".join([*lines, "", ""])
    print(text)
    with page.open("a", encoding="utf-8") as file:
        file.write(text)


def _machine(machine: Machine) -> str:
    if not machine.on_gpu:
        return f"no GPU, a CPU with {machine.memory / GB:.0f} GB"
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    shown = subprocess.run(query, capture_output=True, text=True, check=True)
    return f"{machine.gpus} x {shown.stdout.splitlines()[0]}"


def table(manifests: Sequence[Manifest], plans: Sequence[StagePlan], config: PipelineConfig) -> Iterator[str]:
    """What was measured of each stage with a model, as Markdown; memory beside what was planned."""
    planned = {stage.title.split()[0]: stage for stage in plans}
    yield "| stage | seconds | seconds per step | tokens per second | peak GB | planned GB | gap mean | gap max |"
    yield "|---|---|---|---|---|---|---|---|"
    for manifest in sorted(manifests, key=lambda manifest: manifest.committed_at):
        if manifest.stage not in planned:
            continue
        found = manifest.metrics
        gaps = [found[name] for region in REGIONS if (name := f"rollout_gap/{region}/mean") in found]
        worst = [found[name] for region in REGIONS if (name := f"rollout_gap/{region}/max") in found]
        cells = [
            manifest.stage,
            f"{manifest.seconds:.0f}",
            _number(found.get("seconds_per_step")),
            _number(found.get("tokens_per_second")),
            _number(found.get("peak_memory_gb")),
            f"{planned[manifest.stage].peak / GB:.2f}",
            _number(sum(gaps) / len(gaps) if gaps else None),
            _number(max(worst, default=None)),
        ]
        yield f"| {' | '.join(cells)} |"
    versions = next((manifest.versions for manifest in manifests if manifest.stage == "rl"), {})
    yield ""
    yield f"Versions: {', '.join(f'{name} {version}' for name, version in sorted(versions.items()))}. Recipe: {config.name}."


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _rollouts() -> Iterator[str]:
    """Spawn-join over plain generation, at the same number of sampled tokens and requests in flight."""
    yield "### Rollouts over plain generation (`make bench`)"
    yield ""
    for name in ROLLOUTS:
        measured = in_worker.BENCHMARKS[name]([RECIPE, "--set"])
        yield f"- {name}: {json.dumps(measured.value)} {measured.unit}"


if __name__ == "__main__":
    main()
