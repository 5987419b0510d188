"""Stage `generate`: the teacher writes one trajectory per problem (paper section 3.1)."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from parallel_r1.config import GenerateConfig
from parallel_r1.jobs import append_lines, read_lines
from parallel_r1.markup import validate
from parallel_r1.problems import read_problems
from parallel_r1.store import ArtifactRef
from parallel_r1.teacher import generate
from tasks.prepare import PROBLEMS
from tasks.show import show_table
from tasks.stage import Metrics, Work, stage

TRAJECTORIES = "trajectories.jsonl"
SHOWN_TRAJECTORIES = 5
SPENT = ("prompt_tokens", "completion_tokens", "cost")
"""What a teacher that counts says of every trajectory."""
ROWS_PER_WRITE = 500


def show_trajectories(title: str, ref: ArtifactRef, folder: Path) -> None:
    """The first trajectories, how many there are, what they cost, and how many the grammar accepts."""
    trajectories = read_lines(folder / TRAJECTORIES)
    rows = [{"problem": row["problem"], "text": row["text"]} for row in trajectories[:SHOWN_TRAJECTORIES]]
    totals = {name.replace("_", " "): sum(row.get(name) or 0 for row in trajectories) for name in SPENT}
    spent = ", ".join(f"{name}: {total:,}" for name, total in totals.items() if total)
    size = f"{ref.metrics['trajectories']:.0f} trajectories, {ref.metrics['mean_characters']:.0f} characters each"
    show_table(title, rows, ref, f"{size}. {spent or 'No tokens were counted: the teacher is a script or a file'}")
    show_table(f"{title} acceptance", list(acceptance(trajectories)), ref, "by the grammar alone; `filter` judges answers too")


def acceptance(trajectories: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """How many trajectories are well-formed, and how many have which fault, with an example of each."""
    faults = [validate(row["text"]) for row in trajectories]
    examples = {fault.code: f"{row['id']}: {fault.message}" for row, found in zip(trajectories, faults, strict=True) for fault in found}
    counts = Counter(code for found in faults for code in {fault.code for fault in found})
    accepted = sum(not found for found in faults)
    for what, count in [("accepted", accepted), *counts.most_common()]:
        yield {"fault": what, "trajectories": count, "share": f"{count / len(faults):.1%}", "example": examples.get(what, "")}


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
