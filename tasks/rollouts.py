"""Rollouts laid out for a person in Markdown: the paths of a block side by side, good ones and bad ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from parallel_r1.jobs import ROLLOUTS, read_lines
from parallel_r1.store import ArtifactRef
from tasks.show import as_text, show_markdown

SHOWN_EACH = 3
Row = dict[str, Any]


def show_rollouts(title: str, ref: ArtifactRef, folder: Path) -> None:
    """The newest good rollouts and the newest bad ones."""
    rows = read_lines(folder / ROLLOUTS)
    if not rows:
        return
    good, bad = chosen(rows)
    parts = [f"{len(rows)} rollouts are kept. All text below is the model's, shown as it is."]
    for what, some in (("Good: right and well-formed", good), ("Bad: wrong or malformed", bad)):
        parts += [f"## {what}", *(laid_out(row) for row in some)] if some else [f"## {what}", "none among those kept"]
    show_markdown(f"{title} rollouts", "\n\n".join(parts), ref)


def chosen(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Up to SHOWN_EACH good and bad ones: those of the last step first, and those with most blocks."""
    ordered = sorted(rows, key=lambda row: (row.get("step", 0), row["blocks"]), reverse=True)
    good = [row for row in ordered if row["correct"] and row["well_formed"]]
    bad = [row for row in ordered if not (row["correct"] and row["well_formed"])]
    return good[:SHOWN_EACH], bad[:SHOWN_EACH]


def laid_out(row: Row) -> str:
    """One rollout: the problem, the verdict, then the response with each block as a table of its paths."""
    facts = [f"answer {as_text(row['answer'])}", f"given {as_text(row['extracted'] or 'none')}", f"{row['tokens']} tokens"]
    facts += [f"{name} {row[name]:g}" for name in ("reward", "step") if name in row]
    facts += [f"faults: {as_text(', '.join(row['faults']))}"] if row["faults"] else []
    return "\n\n".join([f"### {as_text(row['problem'])}", "*" + "; ".join(facts) + "*", *_response(row["segments"])])


def _response(segments: Sequence[Row]) -> Iterator[str]:
    paths: list[str] = []
    for segment in segments:
        text = as_text(segment["text"].strip())
        if segment["kind"] == "path":
            paths.append(text)
            continue
        yield from _table(paths)
        paths = []
        if text:
            yield f"**Summary:** {text}" if segment["kind"] == "summary" else text
    yield from _table(paths)


def _table(paths: Sequence[str]) -> Iterator[str]:
    if paths:
        heads = " | ".join(f"Path {number}" for number in range(1, len(paths) + 1))
        yield f"| {heads} |\n|{'---|' * len(paths)}\n| {' | '.join(path or ' ' for path in paths)} |"
