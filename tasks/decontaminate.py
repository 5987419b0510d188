"""Stages `decontaminate` and `overlap`: what is learned from, compared with what is measured on (`parallel_r1/decontamination.py`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from parallel_r1.config import DecontaminateConfig
from parallel_r1.decontamination import Copy, find_copies
from parallel_r1.jobs import PROBLEMS, TRAJECTORIES, append_lines, read_lines
from parallel_r1.problems import read_problems
from parallel_r1.store import ArtifactRef
from tasks.show import show_table
from tasks.stage import Metrics, Work, stage

COPIES = "copies.jsonl"
OVERLAP = "overlap.json"


def show_copies(title: str, ref: ArtifactRef, folder: Path) -> None:
    """Per test set: how many of its items the training set gives away, with an example."""
    copies = [Copy(**row) for row in read_lines(folder / COPIES)]
    names = [name.removeprefix("overlap/") for name in ref.metrics if name.startswith("overlap/")]
    rows = []
    for name in names:
        found = [copy for copy in copies if copy.set == name]
        example = f"{found[0].train_id} gives away {found[0].test_id}, share {found[0].share:g}" if found else ""
        exact = len({copy.test_id for copy in found if copy.exact})
        rows.append({"test set": name, "items given away": f"{ref.metrics[f'overlap/{name}']:.0f}", "exact": exact, "example": example})
    show_table(title, rows, ref, f"{ref.metrics['copies']:.0f} of {ref.metrics['seen']:.0f} are copies; {ref.metrics['kept']:.0f} stay")


@stage("decontaminate", version=1, show=show_copies)
def decontaminate(work: Work, config: DecontaminateConfig, training: ArtifactRef, tests: Mapping[str, ArtifactRef]) -> Metrics:
    """Find the copies of test items in a problem set or in given trajectories, and take them out unless told otherwise."""
    file = PROBLEMS if training.stage == "prepare" else TRAJECTORIES
    rows = read_lines(work.read(training) / file)
    items = {name: read_problems(work.read(ref) / PROBLEMS) for name, ref in tests.items()}
    copies = find_copies(((row["id"], row["problem"]) for row in rows), items, config)
    guilty = {copy.train_id for copy in copies}
    kept = [row for row in rows if row["id"] not in guilty] if config.remove else rows
    if not kept:
        raise ValueError(f"{work.label}: all of its {len(rows)} problems are copies of test items; nothing is left to learn from")
    append_lines(work.out / file, kept)
    append_lines(work.out / COPIES, map(asdict, copies))
    given_away = {f"overlap/{name}": len({copy.test_id for copy in copies if copy.set == name}) for name in tests}
    work.progress.report(len(rows), len(rows))
    return {"seen": len(rows), "copies": len(guilty), "kept": len(kept), **given_away}


def show_overlap(title: str, ref: ArtifactRef, folder: Path) -> None:
    """Per test set: the items that no longer measure what they should."""
    items: dict[str, list[str]] = json.loads((folder / OVERLAP).read_text(encoding="utf-8"))
    rows = [{"test set": name, "items given away": len(ids), "which": ", ".join(ids[:20])} for name, ids in items.items()]
    show_table(title, rows, ref, "test items given away by anything that the run learns from; the others are the `clean` subset")


@stage("overlap", version=1, show=show_overlap)
def collect_overlap(work: Work, config: None, training: Mapping[str, ArtifactRef], tests: Mapping[str, ArtifactRef]) -> Metrics:
    """The test items given away by any training set, before removal. An artifact of its own: evaluations depend on this list only,
    not on the training sets."""
    found = [Copy(**row) for ref in training.values() for row in read_lines(work.read(ref, COPIES) / COPIES)]
    items = {name: sorted({copy.test_id for copy in found if copy.set == name}) for name in sorted(tests)}
    (work.out / OVERLAP).write_text(json.dumps(items, indent=1), encoding="utf-8")
    return {f"overlap/{name}": len(ids) for name, ids in items.items()}
