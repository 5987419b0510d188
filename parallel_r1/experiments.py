"""Rows of a results table: recipes at several seeds, and what can be said of them together.

A number of a row carries both kinds of doubt: which problems were asked and which seed trained the model. Its 95 % interval resamples
seeds, and within each drawn seed the problems (hierarchical bootstrap, percentile). Where all seeds were asked the same problems, as on a
real benchmark, one draw of problems holds for all seeds. With a handful of seeds the interval reaches about from the worst to the best one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from parallel_r1.config import PipelineConfig
from parallel_r1.jobs import read_lines
from parallel_r1.metrics import MEASURES

METRICS = "metrics.jsonl"
ROLLOUTS = "rollouts.jsonl"
RESULTS = "results.json"
DRAWS = 2_000

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


def estimate(of: Table, draws: int = DRAWS, seed: int = 0) -> Estimate:
    """The mean, every seed and every set with equal weight, with its interval over problems and seeds."""
    by_seed = means(of)
    if not by_seed:
        return Estimate(math.nan, math.nan, math.nan, {})
    low, high = np.quantile(_resampled(of, draws, seed), (0.025, 0.975))
    return Estimate(float(np.mean(list(by_seed.values()))), float(low), float(high), by_seed)


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
    return {number: float(np.mean([np.mean(list(problems.values())) for problems in sets.values()])) for number, sets in of.items()}


def _resampled(of: Table, draws: int, seed: int) -> np.ndarray:
    """Means of `draws` resamples: as many seeds as there are, with replacement, then each one's problems, with replacement."""
    rng = np.random.default_rng(seed)
    seeds = list(of)
    values = [[np.array(list(problems.values())) for problems in of[number].values()] for number in seeds]
    asked_alike = len({tuple((name, *problems) for name, problems in of[number].items()) for number in seeds}) == 1
    shared = [rng.integers(0, len(one), size=(draws, len(one))) for one in values[0]] if asked_alike else None
    total = np.zeros(draws)
    for drawn in rng.integers(0, len(seeds), size=(len(seeds), draws)):
        for place in range(len(seeds)):
            mine = np.flatnonzero(drawn == place)
            for which, one in enumerate(values[place]):
                asked = shared[which][mine] if shared else rng.integers(0, len(one), size=(len(mine), len(one)))
                total[mine] += one[asked].mean(axis=1) / len(values[place])
    return total / len(seeds)
