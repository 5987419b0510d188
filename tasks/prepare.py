"""Stage `prepare`: one named problem set from its source."""

from __future__ import annotations

from pathlib import Path

from parallel_r1.config import Source
from parallel_r1.problems import read_problems, read_source, write_problems
from parallel_r1.store import ArtifactRef
from tasks.show import show_table
from tasks.stage import Metrics, Work, stage

PROBLEMS = "problems.jsonl"
SHOWN_PROBLEMS = 5


def show_problems(title: str, ref: ArtifactRef, folder: Path) -> None:
    """The first problems, and how many there are."""
    rows = [{"id": problem.id, "problem": problem.problem, "answer": problem.answer} for problem in read_problems(folder / PROBLEMS)]
    dropped = ", ".join(f"{name.removeprefix('dropped_')}: {count:g}" for name, count in ref.metrics.items() if name != "problems")
    show_table(title, rows[:SHOWN_PROBLEMS], ref, f"{len(rows)} problems; dropped: {dropped or 'none'}")


@stage("prepare", version=1, show=show_problems)
def prepare_problems(work: Work, source: Source) -> Metrics:
    """Read a source of problems, normalise them and drop what is broken or said twice."""
    found = read_source(source, work.seed)
    write_problems(work.out / PROBLEMS, found.problems)
    work.progress.report(len(found.problems), len(found.problems))
    return {"problems": len(found.problems), **found.counts}
