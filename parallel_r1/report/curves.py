"""Small multiples as inline SVG: every panel is a picture of its own, so that they flow on any width; colours are the page's."""

from __future__ import annotations

import hashlib
import io
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from parallel_r1.report.inputs import Curve, Evaluation, read_rows
from parallel_r1.report.numbers import Estimate, estimate, number, written
from parallel_r1.report.outcome import set_metrics, set_names
from parallel_r1.report.rollouts import shown

COLOURS = {
    "ink": "#000001",
    "grid": "#000002",
    "line": "#000003",
    "main": "#000004",
    "path": "#000005",
    "summary": "#000006",
    "later": "#000007",
}
"""Stand-ins that matplotlib writes; the page gets var(--name), so that light and dark both work."""

RL_PANELS = (
    ("reward", "reward", 1.0, None),
    ("accuracy", "accuracy, %", 100.0, 100.0),
    ("parallel_ratio", "parallel ratio, %", 100.0, 100.0),
    ("valid_ratio", "valid blocks, %", 100.0, 100.0),
    ("truncated_ratio", "truncated, %", 100.0, 10.0),
    ("response_tokens", "response tokens", 1.0, None),
    ("entropy", "entropy, nats", 1.0, None),
)
"""Metric, title, factor, and how high the axis reaches from 0 at least (None: as the values have it)."""

GAP_REGIONS = {
    "main": ("main", "main"),
    "path_1": ("path 1", "path"),
    "path_n": ("later paths", "later"),
    "summary": ("summary", "summary"),
}
"""Region of a rollout, as rl measures the gap: its label and tone."""

TREND_PANELS = {
    "position": ("first block at, % of the response", 100.0, 10.0),
    "blocks": ("blocks per response", 1.0, 1.0),
    "parallel_ratio": ("responses with a block, %", 100.0, 100.0),
    "similarity": ("BLEU of paths", 1.0, 1.0),
    "agreement": ("paths agree, %", 100.0, 100.0),
}
"""What the analysis follows over rl: title, factor, and how high the axis reaches from 0 at least."""

SMOOTH_FROM = 20
FONT = 10.5
LITERAL_TEXT = {"text.parse_math": False}


@dataclass(frozen=True)
class Series:
    """A line in as many pieces as there are stages: (steps, values), NaN where a step has no value. The tone names the colour."""

    label: str
    tone: str
    pieces: list[tuple[np.ndarray, np.ndarray]]
    bars: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    """Low and high of the values of every piece, where they have intervals."""

    @property
    def values(self) -> np.ndarray:
        """The values of all pieces that are known."""
        joined = np.concatenate([values for _, values in self.pieces])
        return joined[np.isfinite(joined)]


@dataclass(frozen=True)
class Frame:
    """What lies around the lines: `top` is how high the axis reaches from 0 at least (None: as the values have it), `end` where what the
    values go over ends, if not at the last value."""

    marks: Sequence[tuple[int, str]] = ()
    top: float | None = None
    log: bool = False
    across: str = "step"
    end: float | None = None


@dataclass(frozen=True)
class Panel:
    """A picture with its title, its legend and its words for those who can't see it."""

    title: str
    svg: str
    alt: str
    legend: list[tuple[str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class _History:
    label: str
    steps: np.ndarray
    rows: list[dict[str, Any]]

    def column(self, key: str, scale: float = 1.0) -> np.ndarray:
        """A metric over the steps; NaN where a step lacks it."""
        return np.array([number(row.get(key)) for row in self.rows]) * scale


def supervised_panels(curves: Sequence[Curve]) -> list[Panel]:
    """The loss of every stage that has no reward: base and sft."""
    panels = []
    for history in _histories(curves):
        if history.rows and "reward" not in history.rows[-1]:
            series = [Series("loss", "line", [(history.steps, history.column("loss"))])]
            panels += _panel(f"{shown(history.label)}: loss", series)
    return panels


def rl_panels(curves: Sequence[Curve]) -> list[Panel]:
    """Every rl metric over the steps of all rl stages, one after the other; vertical lines mark where a stage ends."""
    histories = [one for one in _histories(curves) if one.rows and "reward" in one.rows[-1]]
    if not histories:
        return []
    starts = np.cumsum([0, *(one.steps.max() for one in histories[:-1])])
    marks = [(int(start), shown(one.label)) for one, start in zip(histories, starts, strict=True)]

    def line(key: str, scale: float, label: str, tone: str) -> Series:
        """A metric over all stages."""
        return Series(label, tone, [(one.steps + start, one.column(key, scale)) for one, start in zip(histories, starts, strict=True)])

    panels = []
    for key, title, scale, top in RL_PANELS:
        panels += _panel(title, [line(key, scale, title, "line")], Frame(marks, top))
    for part, title in (("mean", "rollout gap, mean"), ("max", "rollout gap, largest")):
        series = [line(f"rollout_gap/{region}/{part}", 1.0, *look) for region, look in GAP_REGIONS.items()]
        panels += _panel(title, series, Frame(marks, log=True))
    return panels


def trend_panels(stages: Sequence[Mapping[str, Any]]) -> list[Panel]:
    """What the analysis follows over all rl stages, one after the other: a point with its interval for every window of steps."""
    stages = [stage for stage in stages if stage["windows"]]
    starts = np.cumsum([0, *(stage["steps"] for stage in stages)])
    marks = [(int(start), shown(stage["stage"])) for stage, start in zip(stages, starts, strict=False)]
    panels = []
    for key, (title, scale, top) in TREND_PANELS.items():
        pieces, bars = [], []
        for stage, start in zip(stages, starts, strict=False):
            estimates = [estimate(window, key) for window in stage["windows"]]
            middles = np.array([start + (window["first"] + window["last"]) / 2 for window in stage["windows"]])
            pieces.append((middles, np.array([one.value for one in estimates]) * scale))
            bars.append((np.array([one.low for one in estimates]) * scale, np.array([one.high for one in estimates]) * scale))
        if pieces:
            panels += _panel(title, [Series(title, "line", pieces, bars)], Frame(marks, top, end=int(starts[-1])))
    return panels


def budget_panels(by_set: Mapping[str, Any], sequential: Mapping[str, str]) -> list[Panel]:
    """Per set, accuracy within a budget: of the last checkpoint with all its tokens and along its critical path, and of the sequential one
    (by set), whose two are the same."""
    panels = []
    for name, found in by_set.items():
        budgets, label = np.array(found["budgets"]), list(found["curves"])[-1]
        tokens, critical_path = (found["curves"][label][what] for what in ("tokens", "critical_path"))
        lines = [(f"{label}, all tokens", "line", tokens), (f"{label}, critical path", "later", critical_path)]
        if tokens == critical_path:
            lines = [(label, "line", tokens)]
        if sequential.get(name) in found["curves"]:
            lines.append((sequential[name], "main", found["curves"][sequential[name]]["tokens"]))
        series = [Series(shown(title), tone, [(budgets, np.array(values) * 100)]) for title, tone, values in lines]
        panels += _panel(f"{shown(name)}: accuracy within a budget, %", series, Frame(top=10.0, across="tokens"))
    return panels


def largest_gap(curves: Sequence[Curve]) -> float:
    """The largest |log p_train - log p_sampled| of any token in any step; NaN where none was logged."""
    found = [history.column(f"rollout_gap/{region}/max") for history in _histories(curves) for region in GAP_REGIONS]
    known = [value for column in found for value in column if math.isfinite(value)]
    return max(known, default=math.nan)


def accuracy_panels(evaluations: Sequence[Evaluation]) -> list[Panel]:
    """Per set, mean@k of every checkpoint with its interval."""
    panels = []
    for name in set_names(evaluations):
        points = [(shown(one.label), estimate(set_metrics(one, name), "mean")) for one in evaluations]
        known = [(label, one) for label, one in points if one.known]
        if not known:
            continue
        words = ", ".join(f"{label} {one.percent()}{f' ({one.percents()})' if one.bounded else ''}" for label, one in known)
        panels.append(Panel(f"{shown(name)}: accuracy, %", _dots(name, known), f"Accuracy on {shown(name)} in percent: {words}."))
    return panels


def _histories(curves: Sequence[Curve]) -> Iterator[_History]:
    for curve in curves:
        if curve.metrics.exists():
            rows = [row for _, row in read_rows(curve.metrics)]
            steps = np.array([number(row.get("step", place)) for place, row in enumerate(rows, 1)])
            yield _History(curve.label, steps, rows)


def _panel(title: str, series: list[Series], frame: Frame = Frame()) -> list[Panel]:
    """One panel, or none where nothing was logged."""
    known = [one for one in series if len(one.values)]
    if not known:
        return []
    legend = [(one.label, one.tone) for one in known] if len(series) > 1 else []
    pieces = known[0].pieces
    words = " ".join(_in_words(one, frame.log) for one in known)
    alt = f"{title} over {frame.across} {pieces[0][0].min():.0f} to {pieces[-1][0].max():.0f}. {words}"
    return [Panel(title, _lines(title, known, frame), alt, legend)]


def _in_words(series: Series, log: bool) -> str:
    values = series.values
    write = (lambda value: f"{value:.1e}") if log else (lambda value: written(value, 2))
    first, last, low, high = (write(value) for value in (values[0], values[-1], values.min(), values.max()))
    return f"{series.label}: starts at {first}, ends at {last}, between {low} and {high}."


# --- drawing --------------------------------------------------------------------------------------------------------------


@rc_context(LITERAL_TEXT)
def _lines(title: str, series: Sequence[Series], frame: Frame) -> str:
    figure, axes = new_axes()
    for one in series:
        for steps, values in one.pieces:
            shown_values = np.where(values > 0, values, np.nan) if frame.log else values
            _line(axes, steps, shown_values, COLOURS[one.tone], smooth=not frame.log and not one.bars)
        for (steps, _), (low, high) in zip(one.pieces, one.bars, strict=False):
            axes.vlines(steps, low, high, color=COLOURS[one.tone], lw=5, alpha=0.3, clip_on=False)
    everything = np.concatenate([one.values for one in series] + [high[np.isfinite(high)] for one in series for _, high in one.bars])
    if frame.log:
        _log_axis(axes, everything[everything > 0])
    else:
        if frame.top is not None:
            axes.set_ylim(0, max(frame.top, everything.max() * 1.05 if frame.top < 100 else 100))
        axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}".replace("-", "−")))
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
    axes.set_xlim(0, (frame.end or max(steps.max() for steps, _ in series[0].pieces)) + 0.5)
    mark_stages(axes, frame.marks)
    axes.set_xlabel(frame.across, color=COLOURS["ink"], fontsize=FONT, labelpad=2)
    return as_svg(figure, title)


def _line(axes: Axes, steps: np.ndarray, values: np.ndarray, colour: str, smooth: bool) -> None:
    """A line; a long one faint, with its running mean over it."""
    smooth = smooth and len(values) >= SMOOTH_FROM
    width, alpha, marker = (0.8, 0.4, None) if smooth else (1.4, 1, "o" if len(values) <= SMOOTH_FROM // 2 else None)
    axes.plot(steps, values, color=colour, lw=width, alpha=alpha, marker=marker, ms=4, clip_on=False)
    if smooth:
        axes.plot(steps, _running_mean(values), color=colour, lw=2, clip_on=False, solid_capstyle="round")


def _log_axis(axes: Axes, values: np.ndarray) -> None:
    """Whole decades around the values, at least two ticks."""
    axes.set_yscale("log")
    low, high = (math.floor(math.log10(values.min())), math.ceil(math.log10(values.max()))) if len(values) else (-8, -6)
    axes.set_ylim(10.0**low, 10.0 ** max(high, low + 1))
    axes.yaxis.set_major_locator(LogLocator(numticks=5))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"1e{round(math.log10(value))}".replace("-", "−")))


def mark_stages(axes: Axes, marks: Sequence[tuple[int, str]]) -> None:
    """A dotted line where a stage ends, and the names of the stages that are wide enough to hold one."""
    if len(marks) < 2:
        return
    left, right = axes.get_xlim()
    ends = [*(start for start, _ in marks[1:]), right]
    for (start, label), end in zip(marks, ends, strict=True):
        if start:
            axes.axvline(start + 0.5, color=COLOURS["ink"], lw=0.8, linestyle=(0, (2, 3)), clip_on=False)
        if (end - start) / (right - left) > 0.022 * len(_short(label)):
            where = axes.get_xaxis_transform()
            axes.text(start + 0.5, 1.03, f" {_short(label)}", transform=where, color=COLOURS["ink"], fontsize=FONT, va="bottom")


@rc_context(LITERAL_TEXT)
def _dots(name: str, points: Sequence[tuple[str, Estimate]]) -> str:
    figure, axes = new_axes()
    places = np.arange(len(points))
    values = [one.value * 100 for _, one in points]
    axes.plot(places, values, color=COLOURS["line"], lw=1, alpha=0.4, clip_on=False)
    for place, (_, one) in zip(places, points, strict=True):
        roof = one.high if one.bounded else one.value
        if one.bounded:
            axes.plot([place, place], [one.low * 100, one.high * 100], color=COLOURS["line"], lw=5, alpha=0.3, clip_on=False)
        axes.plot([place], [one.value * 100], color=COLOURS["line"], marker="o", ms=6, clip_on=False)
        look = {"color": COLOURS["ink"], "fontsize": FONT, "ha": "center"}
        axes.annotate(one.percent(), (place, roof * 100), (0, 6), textcoords="offset points", **look)
    top = max([5.0, *values, *(one.high * 100 for _, one in points if one.bounded)])
    axes.set_ylim(0, min(100.0, top))
    axes.set_xlim(-0.5, len(points) - 0.5)
    axes.set_xticks(places, [_short(label) for label, _ in points])
    axes.yaxis.set_major_locator(MaxNLocator(4))
    return as_svg(figure, f"accuracy {name}")


def _short(label: str) -> str:
    return label if len(label) <= 12 else f"{label[:11]}…"


def new_axes() -> tuple[Figure, Axes]:
    """An empty panel in the page's look."""
    figure = Figure(figsize=(4.4, 2.3))
    axes = figure.add_axes((0.115, 0.19, 0.86, 0.69))
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(COLOURS["grid"])
    axes.grid(axis="y", color=COLOURS["grid"], lw=0.8, clip_on=False)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=FONT, labelcolor=COLOURS["ink"], pad=4)
    return figure, axes


def _running_mean(values: np.ndarray) -> np.ndarray:
    """Centred mean over a tenth of the steps, of the values that there are."""
    reach = max(1, len(values) // 20)
    windows = (values[max(0, place - reach) : place + reach + 1] for place in range(len(values)))
    return np.array([np.nanmean(window) if np.isfinite(window).any() else np.nan for window in windows])


def as_svg(figure: Figure, title: str) -> str:
    """The figure as an <svg> element: no prolog, no metadata, ids of its own, text in the page's font, colours of the page."""
    name = "p" + hashlib.sha256(title.encode("utf-8", "replace")).hexdigest()[:8]
    out = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "axes.unicode_minus": True}):
        figure.patch.set_visible(False)
        for axes in figure.axes:
            axes.patch.set_visible(False)
        with warnings.catch_warnings():  # the page's font draws the text, not the one that matplotlib measures with
            warnings.filterwarnings("ignore", message="Glyph .* missing")
            figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'<svg [^>]*?viewBox="([^"]+)"[^>]*>', r'<svg viewBox="\1" aria-hidden="true" focusable="false">', text, count=1)
    text = re.sub(r'\bid="', f'id="{name}-', text).replace('xlink:href="#', f'href="#{name}-')
    text = re.sub(r"font: ([\d.]+)px [^;\"]+", r"font-size: \1px; font-family: inherit", text)
    for colour, stand_in in COLOURS.items():
        text = text.replace(stand_in, f"var(--{colour})")
    return re.sub(r"\n\s*", "\n", text)
