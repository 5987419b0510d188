"""Stage `filter`: what of the teacher's work the student learns from (paper section 3.1, Algorithm 1)."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from parallel_r1.config import FilterConfig
from parallel_r1.filtering import select
from parallel_r1.jobs import TRAJECTORIES, append_lines, read_lines
from parallel_r1.store import ArtifactRef
from tasks.show import show_table
from tasks.stage import Metrics, Work, stage

REJECTED = "rejected.jsonl"


def show_funnel(title: str, ref: ArtifactRef, folder: Path) -> None:
    """How many were seen, kept, and rejected for which fault, with an example of each fault."""
    seen = ref.metrics["seen"]
    counts: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for row in read_lines(folder / REJECTED):
        for fault in row["faults"]:
            examples.setdefault(fault["code"], f"{row['id']}: {fault['message']}")
        counts.update({fault["code"] for fault in row["faults"]})
    rows = [
        {"fault": code, "trajectories": count, "share": f"{count / seen:.1%}", "example": examples[code]}
        for code, count in counts.most_common()
    ]
    show_table(title, rows, ref, f"{ref.metrics['kept']:.0f} of {seen:.0f} trajectories kept")


@stage("filter", version=2, show=show_funnel)
def filter_trajectories(work: Work, config: FilterConfig, trajectories: ArtifactRef) -> Metrics:
    """Keep the teacher's well-formed and right trajectories; keep the others apart, each with its faults."""
    rows = read_lines(work.read(trajectories) / TRAJECTORIES)
    selection = select(rows, config)
    append_lines(work.out / TRAJECTORIES, selection.kept)
    append_lines(work.out / REJECTED, selection.rejected)
    work.progress.report(len(rows), len(rows))
    return selection.funnel.metrics()
