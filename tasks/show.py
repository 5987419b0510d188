"""Artifacts as a person sees them in Prefect's UI. Keys are stable, so an artifact's history runs over all runs.

What a stage shows is kept beside the run's state, so that a cached stage shows the same again in a few milliseconds.
"""

from __future__ import annotations

import base64
import html
import io
import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from pathlib import Path
from typing import Any, Literal

from prefect.artifacts import ImageArtifact, MarkdownArtifact, TableArtifact
from pydantic import BaseModel

from parallel_r1.jobs import METRICS, write_durably
from parallel_r1.store import ArtifactRef
from tasks.progress import slug

SHOWN_CURVES = ("loss", "reward", "accuracy", "parallel_ratio", "valid_ratio", "response_tokens", "entropy", "rollout_gap/main/mean")
CELL_CHARACTERS = 1200
"""Longer texts are cut in tables: the whole one lies in the artifact."""


class Page(BaseModel):
    """One artifact of the UI."""

    kind: Literal["table", "markdown", "image"]
    key: str
    description: str
    data: Any

    def post(self) -> None:
        """Add it to the run."""
        named = {"key": self.key, "description": self.description}
        match self.kind:
            case "table":
                TableArtifact(table=self.data, **named).create()
            case "markdown":
                MarkdownArtifact(markdown=self.data, **named).create()
            case "image":
                ImageArtifact(image_url=self.data, **named).create()


_collected: ContextVar[list[Page]] = ContextVar("collected")
_poster = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pages")
_posted: deque[Future[None]] = deque()


def post(pages: Sequence[Page]) -> None:
    """Add pages to the run, in order, while it goes on: each is a request to the server, and a cached run makes little else.

    Called by the task that they belong to; `all_posted` waits for them.
    """
    context = copy_context()
    _posted.extend(_poster.submit(context.copy().run, page.post) for page in pages)


def all_posted() -> None:
    """Wait until every page is in the server's hands. Raises what the server said when it refused one."""
    while _posted:
        _posted.popleft().result()


@contextmanager
def collecting() -> Iterator[list[Page]]:
    """The pages that are shown within the block; they are not posted yet."""
    pages: list[Page] = []
    token = _collected.set(pages)
    try:
        yield pages
    finally:
        _collected.reset(token)


def keep(file: Path, pages: Sequence[Page]) -> None:
    """Write pages down, so that `kept` finds all of them or none."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_durably(file, json.dumps([page.model_dump() for page in pages]))


def kept(file: Path) -> list[Page] | None:
    """Pages that were written down; None when there are none."""
    try:
        return [Page.model_validate(page) for page in json.loads(file.read_text(encoding="utf-8"))]
    except (FileNotFoundError, ValueError):
        return None


def with_inputs(page: Page, inputs: Mapping[str, ArtifactRef], titles: Mapping[str, str]) -> Page:
    """The page with its lineage: every input by name, with a link to its own page where this run has one (`titles` by URI)."""
    if not inputs:
        return page
    links = []
    for name, ref in inputs.items():
        where = f"`{ref.stage}/{ref.key}`"
        linked = f"[{titles[ref.uri]}](/artifacts/key/{slug(titles[ref.uri])}) {where}" if ref.uri in titles else where
        links.append(f"- {name}: {linked}")
    lineage = "\n\nMade from:\n" + "\n".join(links)
    if page.kind == "markdown":
        return page.model_copy(update={"data": page.data + lineage})
    return page.model_copy(update={"description": page.description + lineage})


def describe(ref: ArtifactRef, text: str) -> str:
    """What the artifact is, and where it lies."""
    return f"{text}\n\n`{ref.stage}/{ref.key}` in `{ref.uri}` (digest `{ref.digest[:12]}`)"


def show_table(title: str, rows: Sequence[dict[str, Any]], ref: ArtifactRef, text: str) -> None:
    """A table artifact. Long texts are cut."""
    short = [{name: _cut(value) for name, value in row.items()} for row in rows]
    description = describe(ref, f"**{title}**: {text}")
    _collected.get().append(Page(kind="table", key=slug(title), description=description, data=short))


def show_markdown(title: str, text: str, ref: ArtifactRef) -> None:
    """A Markdown artifact."""
    _collected.get().append(Page(kind="markdown", key=slug(title), description=title, data=f"# {title}\n\n{describe(ref, text)}"))


def show_image(title: str, url: str, text: str) -> None:
    """An image artifact."""
    _collected.get().append(Page(kind="image", key=slug(title), description=f"{title}: {text}", data=url))


def as_text(text: str) -> str:
    """Model text inside Markdown: shown as it is, never as markup; one line, so that it fits a table's cell."""
    marks = {ord(mark): f"&#{ord(mark)};" for mark in "|`*_[]~\\"}
    return html.escape(_cut(text)).translate(marks).replace("\n", "<br>")


def _cut(value: Any) -> Any:
    return f"{value[:CELL_CHARACTERS]} ..." if isinstance(value, str) and len(value) > CELL_CHARACTERS else value


def show_curves(title: str, ref: ArtifactRef, folder: Path) -> None:
    """The curves of a training stage as one image, and its headline numbers as a table."""
    metrics = [{"metric": name, "value": f"{value:.4g}"} for name, value in ref.metrics.items()]
    show_table(title, metrics, ref, "headline numbers")
    if not (folder / METRICS).exists():
        return
    rows = [json.loads(line) for line in (folder / METRICS).read_text(encoding="utf-8").splitlines()]
    names = [name for name in SHOWN_CURVES if any(name in row for row in rows)]
    if names:
        show_image(f"{title} curves", curves_image(rows, names), ", ".join(names))


def curves_image(rows: Sequence[Mapping[str, float]], names: Sequence[str], ends: Sequence[int] = ()) -> str:
    """A PNG as a data URI: one small panel per metric over the steps, with a dotted line where a stage ends."""
    from matplotlib.figure import Figure  # takes half a second, and cached runs draw nothing

    columns = min(4, len(names))
    lines = -(-len(names) // columns)
    figure = Figure(figsize=(3.2 * columns, 2.3 * lines), layout="constrained")
    for axes, name in zip(figure.subplots(lines, columns, squeeze=False).flat, names, strict=False):
        points = [(row["step"], row[name]) for row in rows if name in row]
        marker = "." if len(points) < 30 else None  # a single step is a point, and no line
        axes.plot(*zip(*points, strict=True), linewidth=1, marker=marker)
        for end in ends:
            axes.axvline(end + 0.5, color="grey", linewidth=0.8, linestyle=":")
        axes.set_title(name, fontsize=9)
        axes.tick_params(labelsize=7)
        axes.grid(alpha=0.3)
    for axes in list(figure.axes)[len(names) :]:
        axes.set_axis_off()
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=100)
    return "data:image/png;base64," + base64.b64encode(image.getvalue()).decode()
