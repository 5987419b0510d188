"""A response as it grows in the terminal: main thread, paths side by side, summaries. What is finished scrolls away."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from parallel_r1.rollout.machine import Request, Rollout
from parallel_r1.rollout.records import Studio

Segment = dict[str, Any]
"""A row of `Studio.segments`: kind, block, path, text."""

COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")
SUMMARY = "bold"
NARROWEST = 24
"""Columns below which paths are drawn below each other."""
FRAMES_PER_SECOND = 24
CURSOR = "▌"


class Thinking:
    """Draws one rollout. `take` is the engine's callback; use as a context manager."""

    def __init__(self, console: Console, rollout: Rollout, studio: Studio, pace: float) -> None:
        """`pace`: tokens per second of a thread at most, 0 for no bound."""
        self.paused = 0.0
        """Seconds that were waited for the reader."""
        self._console = console
        self._rollout = rollout
        self._segments = studio.segments
        self._plain = studio.plain
        self._step_seconds = 1 / pace if pace else 0.0
        self._live = Live(console=console, transient=True, auto_refresh=False, vertical_overflow="crop")
        self._growing: dict[int, tuple[Request, list[int]]] = {}
        self._printed = 0
        self._held = ""
        self._longest = 0
        self._drawn = 0.0

    def __enter__(self) -> Thinking:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.update(Text(""), refresh=True)
        self._live.stop()

    def take(self, request: Request, token: int) -> None:
        """One more token of a request; those of a block's paths come in turns."""
        if request.slot not in self._growing or self._growing[request.slot][0] is not request:
            if request.slot == 0 or 0 in self._growing:
                self._growing.clear()
                self._longest = 0
                self._print(self._finished(request))
            self._growing[request.slot] = (request, [])
        ids = self._growing[request.slot][1]
        ids.append(token)
        if len(ids) > self._longest:
            self._longest = len(ids)
            self._wait()
        if time.monotonic() - self._drawn >= 1 / FRAMES_PER_SECOND:
            self._drawn = time.monotonic()
            self._live.update(self._growing_part(), refresh=True)

    def close(self) -> None:
        """The rollout is done: print what is left."""
        self._live.update(Text(""))
        self._print(self._segments(self._rollout.trajectory)[self._printed :])

    def _wait(self) -> None:
        if self._step_seconds:
            time.sleep(self._step_seconds)
            self.paused += self._step_seconds

    def _finished(self, request: Request) -> list[Segment]:
        """What to print before `request` grows. Main text that it goes on with is held back, to be drawn with it."""
        rest = self._segments(self._rollout.trajectory)[self._printed :]
        goes_on = request.slot == 0 and bool(rest) and rest[-1]["kind"] == "main"
        self._held = rest[-1]["text"] if goes_on else ""
        return rest[:-1] if goes_on else rest

    def _print(self, segments: Sequence[Segment]) -> None:
        self._printed += len(segments)
        for part in draw(segments, self._console.width):
            self._console.print(part)

    def _growing_part(self) -> RenderableType:
        texts = {slot: self._plain(ids) + ("" if ids[-1] in request.stop else CURSOR) for slot, (request, ids) in self._growing.items()}
        if 0 in texts:
            spans = self._rollout.trajectory.spans
            kind = "summary" if spans and spans[-1].kind == "forced" else "main"
            rows = [{"kind": kind, "block": None, "path": None, "text": self._held + texts[0]}]
        else:
            rows = [{"kind": "path", "block": None, "path": slot, "text": text} for slot, text in sorted(texts.items())]
        return Group(*draw(rows, self._console.width, room=max(4, self._console.height - 4)))


def draw(segments: Sequence[Segment], width: int, room: int | None = None) -> list[RenderableType]:
    """Segments for the terminal; with `room`, only the last so many lines of each."""
    parts: list[RenderableType] = []
    for (kind, _), group in groupby(segments, key=lambda segment: (segment["kind"], segment["block"])):
        rows = list(group)
        if kind == "path":
            parts.append(_side_by_side(rows, width, room))
        elif kind == "summary":
            parts += [_panel(row["text"], "summary", SUMMARY, width, room) for row in rows]
        else:
            parts += [Text(_last_lines(row["text"].strip("\n"), width, room)) for row in rows if row["text"].strip()]
    return parts


def _side_by_side(rows: Sequence[Segment], width: int, room: int | None) -> RenderableType:
    share = width // len(rows)
    stacked = share < NARROWEST
    colours = [COLOURS[(row["path"] - 1) % len(COLOURS)] for row in rows]
    panels = [
        _panel(row["text"], f"path {row['path']}", colour, width if stacked else share, room)
        for row, colour in zip(rows, colours, strict=True)
    ]
    if stacked:
        return Group(*panels)
    grid = Table.grid(expand=True)
    for _ in panels:
        grid.add_column(ratio=1)
    grid.add_row(*panels)
    return grid


def _panel(text: str, title: str, style: str, width: int, room: int | None) -> Panel:
    return Panel(Text(_last_lines(text.strip(), width - 4, room)), title=title, title_align="left", border_style=style)


def _last_lines(text: str, width: int, room: int | None) -> str:
    if room is None:
        return text
    lines = [part for line in text.split("\n") for part in textwrap.wrap(line, max(1, width)) or [""]]
    return "\n".join(lines[-room:])
