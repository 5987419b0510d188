"""Stage `generate`: the teacher writes one trajectory per problem (paper section 3.1)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

from parallel_r1.config import GenerateConfig
from parallel_r1.jobs import append_lines, read_lines
from parallel_r1.problems import read_problems
from parallel_r1.store import ArtifactRef
from parallel_r1.teacher import generate
from tasks.prepare import PROBLEMS
from tasks.show import show_table
from tasks.stage import Metrics, Work, stage

TRAJECTORIES = "trajectories.jsonl"
SHOWN_TRAJECTORIES = 5
ROWS_PER_WRITE = 500


def show_trajectories(title: str, ref: ArtifactRef, folder: Path) -> None:
    """The first trajectories, and how many there are."""
    rows = [{"problem": row["problem"], "text": row["text"]} for row in read_lines(folder / TRAJECTORIES)[:SHOWN_TRAJECTORIES]]
    show_table(title, rows, ref, f"{ref.metrics['trajectories']:.0f} trajectories, {ref.metrics['mean_characters']:.0f} characters each")


@stage("generate", version=1, show=show_trajectories)
def write_trajectories(work: Work, config: GenerateConfig, sets: Mapping[str, ArtifactRef]) -> Metrics:
    """Ask the teacher, who may be a script, a served model, or a file of trajectories that exist already."""
    problems = {name: read_problems(work.read(ref) / PROBLEMS) for name, ref in sets.items()}
    rows = generate(config, problems, work.seed, work.scratch, work.progress.report)
    count = characters = 0
    while chunk := list(itertools.islice(rows, ROWS_PER_WRITE)):
        append_lines(work.out / TRAJECTORIES, chunk)
        count += len(chunk)
        characters += sum(len(row["text"]) for row in chunk)
    return {"trajectories": count, "mean_characters": characters / count}
