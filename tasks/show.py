"""Artifacts as a person sees them in Prefect's UI. Keys are stable, so an artifact's history runs over all runs."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefect.artifacts import create_image_artifact, create_markdown_artifact, create_table_artifact

from parallel_r1.store import ArtifactRef
from tasks.progress import slug

METRICS = "metrics.jsonl"
SHOWN_CURVES = ("loss", "reward", "accuracy", "parallel_ratio", "valid_ratio", "response_tokens", "entropy", "rollout_gap/main/mean")


def describe(ref: ArtifactRef, text: str) -> str:
    """What the artifact is, and where it lies."""
    return f"{text}\n\n`{ref.uri}` (digest `{ref.digest[:12]}`)"


def show_table(title: str, rows: Sequence[dict[str, Any]], ref: ArtifactRef, text: str) -> None:
    """A table artifact."""
    create_table_artifact(list(rows), key=slug(title), description=describe(ref, f"**{title}**: {text}"))


def show_markdown(title: str, text: str, ref: ArtifactRef) -> None:
    """A Markdown artifact."""
    create_markdown_artifact(f"# {title}\n\n{describe(ref, text)}", key=slug(title), description=title)


def show_curves(title: str, ref: ArtifactRef, folder: Path) -> None:
    """The curves of a training stage as one image, and its headline numbers as a table."""
    metrics = [{"metric": name, "value": f"{value:.4g}"} for name, value in ref.metrics.items()]
    show_table(title, metrics, ref, "headline numbers")
    if not (folder / METRICS).exists():
        return
    rows = [json.loads(line) for line in (folder / METRICS).read_text(encoding="utf-8").splitlines()]
    names = [name for name in SHOWN_CURVES if any(name in row for row in rows)]
    if names:
        create_image_artifact(image_url=_curves(rows, names), key=f"{slug(title)}-curves", description=f"{title}: {', '.join(names)}")


def _curves(rows: list[dict[str, float]], names: Sequence[str]) -> str:
    """A PNG as a data URI: one small panel per metric over the steps."""
    from matplotlib.figure import Figure  # takes half a second, and cached runs draw nothing

    columns = min(4, len(names))
    lines = -(-len(names) // columns)
    figure = Figure(figsize=(3.2 * columns, 2.3 * lines), layout="constrained")
    for axes, name in zip(figure.subplots(lines, columns, squeeze=False).flat, names, strict=False):
        points = [(row["step"], row[name]) for row in rows if name in row]
        axes.plot(*zip(*points, strict=True), linewidth=1)
        axes.set_title(name, fontsize=9)
        axes.tick_params(labelsize=7)
        axes.grid(alpha=0.3)
    for axes in list(figure.axes)[len(names) :]:
        axes.set_axis_off()
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=100)
    return "data:image/png;base64," + base64.b64encode(image.getvalue()).decode()
