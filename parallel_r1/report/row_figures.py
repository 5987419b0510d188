"""Figures about several recipes at several seeds: where they end, and how they got there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib import rc_context
from matplotlib.ticker import MaxNLocator

from parallel_r1.experiments import Estimate, RowRun, estimate, table
from parallel_r1.jobs import METRICS, read_lines
from parallel_r1.report.curves import COLOURS, FONT, LITERAL_TEXT, Panel, as_svg, mark_stages, new_axes
from parallel_r1.report.numbers import number, written
from parallel_r1.report.rollouts import shown

LINES = (("accuracy", "accuracy", "line"), ("parallel_ratio", "parallel ratio", "summary"))
"""Metric of rl, its label, its colour: both in percent, in one panel per recipe."""
OVERVIEW = (("mean", "accuracy, %"), ("parallel_ratio", "parallel ratio, %"))
ROW_INCHES = 0.27


def overview(rows: Mapping[str, Sequence[RowRun]]) -> list[Panel]:
    """Where every recipe ends, over all sets: a panel for accuracy, one for the parallel ratio."""
    panels = []
    for measure, title in OVERVIEW:
        found = {shown(recipe): estimate(table(runs, measure)) for recipe, runs in rows.items()}
        words = ", ".join(f"{recipe} {written(100 * one.value)}" for recipe, one in found.items())
        panels.append(Panel(title, _dots(title, found), f"{title} by recipe: {words}."))
    return panels


def training(rows: Mapping[str, Sequence[RowRun]]) -> list[Panel]:
    """Accuracy and parallel ratio over the steps of rl, a panel per recipe; recipes without rl have none."""
    legend = [(label, tone) for _, label, tone in LINES]
    panels = []
    for recipe, runs in rows.items():
        seeds = [curves for run in runs if (curves := _curves(run))]
        if seeds:
            ends = [f"{label} ends at {written(float(np.mean([one[metric][-1] for one in seeds])), 1)}" for metric, label, _ in LINES]
            svg = _lines(recipe, seeds, _marks(runs[0]))
            told = f"{shown(recipe)} over {len(seeds[0]['step'])} steps: {', '.join(ends)} percent."
            panels.append(Panel(f"{shown(recipe)}, %", svg, told, legend))
    return panels


def _curves(run: RowRun) -> dict[str, np.ndarray]:
    """The metrics of all rl stages of a run, one after the other, in percent; empty where there is none."""
    logged = [row for folder in run.training.values() for row in read_lines(folder / METRICS)]
    if not logged:
        return {}
    curves = {metric: np.array([100 * number(row.get(metric)) for row in logged]) for metric, _, _ in LINES}
    return {"step": np.arange(1, len(logged) + 1)} | curves


def _marks(run: RowRun) -> list[tuple[int, str]]:
    marks, start = [], 0
    for title, folder in run.training.items():
        marks.append((start, shown(title)))
        start += len(read_lines(folder / METRICS))
    return marks


@rc_context(LITERAL_TEXT)
def _lines(recipe: str, seeds: Sequence[Mapping[str, np.ndarray]], marks: Sequence[tuple[int, str]]) -> str:
    figure, axes = new_axes()
    steps = min((one["step"] for one in seeds), key=len)
    for metric, _, tone in LINES:
        for one in seeds:
            axes.plot(one["step"], one[metric], color=COLOURS[tone], lw=0.7, alpha=0.4, clip_on=False)
        mean = np.mean([one[metric][: len(steps)] for one in seeds], axis=0)
        axes.plot(steps, mean, color=COLOURS[tone], lw=2, clip_on=False, solid_capstyle="round")
    axes.set_ylim(0, 100)
    axes.set_xlim(0, len(steps) + 0.5)
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
    mark_stages(axes, marks)
    axes.set_xlabel("step", color=COLOURS["ink"], fontsize=FONT, labelpad=2)
    return as_svg(figure, f"training {recipe}")


@rc_context(LITERAL_TEXT)
def _dots(title: str, found: Mapping[str, Estimate]) -> str:
    """One line per recipe, the first on top."""
    figure, axes = new_axes()
    height = ROW_INCHES * len(found) + 0.5
    figure.set_size_inches(5.2, height)
    axes.set_position((0.33, 0.35 / height, 0.6, 1 - 0.5 / height))
    for place, one in enumerate(found.values()):
        axes.plot([100 * one.low, 100 * one.high], [place, place], color=COLOURS["line"], lw=5, alpha=0.3, clip_on=False)
        seeds = [100 * value for value in one.by_seed.values()]
        axes.plot(seeds, [place] * len(seeds), color=COLOURS["ink"], marker="o", ms=2.5, lw=0, clip_on=False)
        axes.plot([100 * one.value], [place], color=COLOURS["line"], marker="o", ms=6, clip_on=False)
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color=COLOURS["grid"], lw=0.8)
    axes.set_yticks(range(len(found)), list(found))
    axes.tick_params(axis="y", pad=10)
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.set_xlim(0, 100)
    return as_svg(figure, f"overview {title}")
