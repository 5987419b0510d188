"""Stage `prepare`: one named problem set from its source."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from parallel_r1.config import Source
from parallel_r1.jobs import PROBLEMS, append_lines, read_lines
from parallel_r1.problems import read_problems, read_source, write_problems
from parallel_r1.store import ArtifactRef
from tasks.show import show_table
from tasks.stage import Metrics, Work, stage

DROPPED = "dropped.jsonl"
SHOWN_PROBLEMS = 5


def show_problems(title: str, ref: ArtifactRef, folder: Path) -> None:
    """The first problems, how many there are, and what the cleaning did to the others."""
    rows = [{"id": problem.id, "problem": problem.problem, "answer": problem.answer} for problem in read_problems(folder / PROBLEMS)]
    show_table(title, rows[:SHOWN_PROBLEMS], ref, f"{len(rows)} problems; {steps_in_words(ref.metrics)}")
    examples = {row["reason"]: row for row in reversed(read_lines(folder / DROPPED))}
    steps = [
        {"step": step.replace("_", " "), "rows": f"{count:g}"} | _example(examples.get(step.removeprefix("dropped_")))
        for step, count in ref.metrics.items()
        if step.startswith(("repaired_", "dropped_"))
    ]
    if steps:
        show_table(f"{title} cleaning", steps, ref, "what happened to the rows of the source")


def steps_in_words(metrics: Mapping[str, float]) -> str:
    """`dropped: duplicates 3; repaired: control 1`"""
    parts = []
    for what in ("dropped", "repaired"):
        found = [f"{name.removeprefix(f'{what}_')} {count:g}" for name, count in metrics.items() if name.startswith(f"{what}_")]
        parts.append(f"{what}: {', '.join(found) or 'none'}")
    return "; ".join(parts)


def _example(row: Mapping[str, str] | None) -> dict[str, str]:
    return {"example": f"{row['id']}: {row['problem']}" if row else "", "gold": row["answer"] if row else ""}


@stage("prepare", version=2, show=show_problems)
def prepare_problems(work: Work, source: Source) -> Metrics:
    """Read a source of problems, clean it, and list what was dropped and why."""
    found = read_source(source, work.seed)
    write_problems(work.out / PROBLEMS, found.problems)
    if found.dropped:
        append_lines(work.out / DROPPED, found.dropped)
    work.progress.report(len(found.problems), len(found.problems))
    return {"problems": len(found.problems), **found.counts}
