"""Rows of a results table: recipes at several seeds, and what can be said of them together.

A number of a row carries both kinds of doubt: which problems were asked and which seed trained the model. Problems that every seed was
asked, and trainings that answered many problems, aren't independent. So the variance of a mean is clustered both ways, by seed and by
problem (Cameron, Gelbach, Miller 2011, https://doi.org/10.1198/jbes.2010.07136), and its t-distribution has as many degrees of freedom as
there are seeds but one. A bootstrap over a handful of seeds would promise too much: of three seeds it never looks past the best and the
worst. One seed's interval is over its problems alone.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from parallel_r1.config import PipelineConfig
from parallel_r1.jobs import ROLLOUTS, read_lines
from parallel_r1.metrics import MEASURES

COSTS = ("response_tokens", "critical_path_tokens")
"""Measures that are no shares."""

Shares = Mapping[str, Mapping[str, float]]
"""Of one checkpoint: set -> text of a problem -> mean of a measure over its rollouts (an id may name another problem at another seed)."""
Table = Mapping[int, Shares]
"""Of one recipe, by seed."""


@dataclass(frozen=True)
class RowRun:
    """One recipe at one seed.

    `evaluations`: titles ("base", "sft", "rl easy", "rl hard", ...), in the order of the run, to local folders with results.json and
    rollouts.jsonl. `training`: titles of the rl stages to local folders with metrics.jsonl and rollouts.jsonl.
    """

    recipe: str
    seed: int
    config: PipelineConfig
    evaluations: dict[str, Path]
    training: dict[str, Path]

    @property
    def final(self) -> str:
        """Title of the checkpoint that the row is about: the last one measured."""
        return list(self.evaluations)[-1]


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds and problems with its 95 % interval; `by_seed` holds every seed's own."""

    value: float
    low: float
    high: float
    by_seed: dict[int, float]


def by_recipe(runs: Sequence[RowRun]) -> dict[str, list[RowRun]]:
    """The rows in the order in which their recipes first come, each with its seeds."""
    rows: dict[str, list[RowRun]] = defaultdict(list)
    for run in runs:
        rows[run.recipe].append(run)
    return {recipe: sorted(found, key=lambda run: run.seed) for recipe, found in rows.items()}


def shares(folder: Path, measure: str = "mean") -> Shares:
    """A measure of one evaluation, by set and problem: one of MEASURES, or `pass@k`, whether any of a problem's rollouts is right."""
    return {name: {problem: values[measure] for problem, values in problems.items()} for name, problems in _measured(folder).items()}


@cache
def _measured(folder: Path) -> dict[str, dict[str, dict[str, float]]]:
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for row in read_lines(folder / ROLLOUTS):
        groups[row["set"], row["problem"]].append(row)
    found: dict[str, dict[str, dict[str, float]]] = defaultdict(dict)
    for (name, problem), rows in groups.items():
        values = {measure: sum(map(of_row, rows)) / len(rows) for measure, of_row in MEASURES.items()}
        found[name][problem] = values | {"pass@k": float(any(row["correct"] for row in rows))}
    return found


def table(runs: Sequence[RowRun], measure: str = "mean", sets: Sequence[str] | None = None, title: str | None = None) -> Table:
    """A measure of the runs of one recipe, by seed: of the checkpoint `title` (runs without one are left out), the final one when left
    out; on the sets named, on all when left out."""
    found = {}
    for run in runs:
        wanted = title or run.final
        if wanted in run.evaluations:
            all_sets = shares(run.evaluations[wanted], measure)
            found[run.seed] = {name: all_sets[name] for name in (all_sets if sets is None else sets)}
    return found


def estimate(of: Table, most: float = 1.0) -> Estimate:
    """The mean, every seed and every set with equal weight, with its interval, which ends at 0 and at `most`: 1 for shares."""
    by_seed = means(of)
    if not by_seed:
        return Estimate(math.nan, math.nan, math.nan, {})
    value, low, high, _ = measured(of)
    return Estimate(value, max(0.0, low), min(most, high), by_seed)


def gains(before: Table, after: Table) -> Table:
    """`after` minus `before`, problem by problem, for the seeds that both have."""
    found = {number: _gains(before[number], after[number]) for number in before if number in after}
    return {number: sets for number, sets in found.items() if sets}


def _gains(before: Shares, after: Shares) -> dict[str, dict[str, float]]:
    found = {
        name: {problem: after[name][problem] - value for problem, value in values.items() if problem in after[name]}
        for name, values in before.items()
        if name in after
    }
    return {name: values for name, values in found.items() if values}


def means(of: Table) -> dict[int, float]:
    """Every seed's mean, every set with equal weight."""
    return {number: _mean(sets) for number, sets in of.items()}


# --- statistics -----------------------------------------------------------------------------------------------------------


def measured(found: Table, bound: float = 0.0) -> tuple[float, float, float, float]:
    """The mean of a table, its 95 % interval, and the two-sided p of its being `bound`."""
    from scipy.stats import t  # takes half a second to import

    effect, error, freedom = _clustered(found)
    reach = float(t.ppf(0.975, freedom)) * error
    return effect, effect - reach, effect + reach, 2 * float(t.sf(abs(effect - bound) / error, freedom))


def _clustered(found: Table) -> tuple[float, float, int]:
    """Mean over seeds, sets and problems (seeds and sets with equal weight), its standard error clustered by seed and by problem, and the
    degrees of freedom. Where all are alike, which is no certainty, the error is that of one problem of all gone the other way."""
    effect = fmean(map(_mean, found.values()))
    names = {name for sets in found.values() for name in sets}
    of_set = {name: fmean(fmean(sets[name].values()) for sets in found.values() if name in sets) for name in names}
    by_seed = [(_mean(sets) - effect) / len(found) for sets in found.values()]
    by_problem: dict[tuple[str, str], float] = defaultdict(float)
    cells: list[float] = []
    for sets in found.values():
        for name, problems in sets.items():
            weight = 1 / (len(found) * len(sets) * len(problems))
            for problem, gain in problems.items():
                cells.append(weight * (gain - of_set[name]))
                by_problem[name, problem] += cells[-1]
    seeds, problems, single = (_sum_of_squares(list(parts)) for parts in (by_seed, by_problem.values(), cells))
    variance = max(seeds + problems - single, seeds, problems)
    error = math.sqrt(variance) if variance > 1e-12 else 2 / len(cells)
    return effect, error, max(1, len(found if len(found) > 1 else by_problem) - 1)


def _mean(sets: Shares) -> float:
    return fmean(fmean(problems.values()) for problems in sets.values())


def _sum_of_squares(totals: Sequence[float]) -> float:
    """Variance of a sum of independent clusters from their totals; 0 for a single one, which says nothing of others."""
    return float(np.square(totals).sum()) * len(totals) / (len(totals) - 1) if len(totals) > 1 else 0.0
