"""Scores of rollouts with their uncertainty: each metric is {"value", "low", "high"}, a share 0..1 or a plain number.

Rollouts of one problem aren't independent, so the 95 % interval comes from a bootstrap over problems (seeded, percentile). It holds both
parts of the uncertainty: which problems were asked, and which responses were sampled. "sampling", where it stands, is half of the 95 %
interval from the second part alone: how far another run over the same problems would fall.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from parallel_r1.grading import canonical

Score = dict[str, float]
Row = Mapping[str, Any]
Z95 = 1.959964
FLIPS = 10_000
RESAMPLES = 2_000


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased chance that at least one of `k` samples is right, given `c` right ones of `n` (Chen et al. 2021, arXiv 2107.03374)."""
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass@k: n = {n}, c = {c}, k = {k}: needs 0 <= c <= n and 1 <= k <= n")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def best_at_k_bootstrap(n: int, c: int, k: int) -> float:
    """The paper's pass@k (verl's best@k): the chance that `k` draws *with* replacement hold a right one. One right of 16: 0.644.

    verl draws 1000 times; this is what its average tends to. Lower than the unbiased estimate, most where few are right.
    """
    return 1.0 - (1.0 - c / n) ** k


def majority(rows: Sequence[Row]) -> float:
    """maj@k of one problem: 1 where the commonest answer is right, a share where several are equally common. No answer, no vote."""
    voters = [row for row in rows if row["correct"] or row["extracted"]]
    votes = Counter("right" if row["correct"] else f"wrong: {canonical(row['extracted'])}" for row in voters)
    most = max(votes.values(), default=0)
    winners = [answer for answer, count in votes.items() if count == most]
    return ("right" in winners) / max(1, len(winners))


def summarise(rows: Sequence[Row], samples: int, bootstrap: int, seed: int) -> dict[str, Score]:
    """Metrics of one problem set's rollouts, `samples` per problem.

    mean@k ("mean"); unbiased "pass@1" .. "pass@k" ("pass@k" is the one of all samples, the same as any-of-k); "maj@k"; verl's bootstrap
    "best@k"; "parallel_ratio" (rollouts with a block), "valid_ratio" (with a block and no fault), "truncated_ratio"; "blocks" and "paths"
    per rollout; "response_tokens", "critical_path_tokens". Raises ValueError where a problem has another number of rollouts.
    """
    by_problem = _by_problem(rows, samples)
    tables = {name: np.array([[float(measure(row)) for row in group] for group in by_problem]) for name, measure in MEASURES.items()}
    per_problem = {name: table.mean(axis=1) for name, table in tables.items()}
    right = tables["mean"].sum(axis=1).astype(int).tolist()
    for k in range(1, samples):
        per_problem[f"pass@{k}"] = np.array([pass_at_k(samples, c, k) for c in right])
    per_problem["pass@k"] = np.array([pass_at_k(samples, c, samples) for c in right])
    per_problem["maj@k"] = np.array([majority(group) for group in by_problem])
    per_problem["best@k"] = np.array([best_at_k_bootstrap(samples, c, samples) for c in right])
    draws = np.random.default_rng(seed).integers(0, len(by_problem), size=(bootstrap, len(by_problem)))
    scores = {name: _score(values, draws) for name, values in per_problem.items()}
    return {name: score | _sampling_part(tables.get(name)) for name, score in scores.items()}


MEASURES: dict[str, Callable[[Row], float]] = {
    "mean": lambda row: row["correct"],
    "parallel_ratio": lambda row: row["blocks"] > 0,
    "valid_ratio": lambda row: row["blocks"] > 0 and row["well_formed"],
    "truncated_ratio": lambda row: row["finish"] == "length",
    "blocks": lambda row: row["blocks"],
    "paths": lambda row: sum(segment["kind"] == "path" for segment in row["segments"]),
    "response_tokens": lambda row: row["tokens"],
    "critical_path_tokens": lambda row: row["critical_path_tokens"],
}
"""What is measured of a rollout; "mean" is the accuracy."""


def _sampling_part(table: np.ndarray | None) -> Score:
    """Half of the 95 % interval that sampling alone makes, from the spread within problems; unknown with one sample each."""
    if table is None or table.shape[1] < 2:
        return {}
    problems, samples = table.shape
    return {"sampling": float(Z95 * math.sqrt(table.var(axis=1, ddof=1).sum() / samples) / problems)}


def _by_problem(rows: Sequence[Row], samples: int) -> list[list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["problem_id"], []).append(row)
    if not groups:
        raise ValueError("no rollouts to summarise")
    for problem_id, group in groups.items():
        if len(group) != samples:
            raise ValueError(f"problem {problem_id} has {len(group)} rollouts, {samples} are expected")
    return list(groups.values())


def _score(values: np.ndarray, draws: np.ndarray) -> Score:
    low, high = np.quantile(values[draws].mean(axis=1), (0.025, 0.975))
    return {"value": float(values.mean()), "low": float(low), "high": float(high)}


# --- two checkpoints ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """Accuracy of one checkpoint minus that of another over the problems both were asked, with its 95 % interval and a two-sided p."""

    value: float
    low: float
    high: float
    p: float
    problems: int


def paired_difference(before: Mapping[str, Sequence[bool]], after: Mapping[str, Sequence[bool]], seed: int = 0) -> Difference | None:
    """Compare outcomes by problem; None where no problem is shared. Interval: bootstrap over the problems. p: the gains of single problems
    with their signs flipped at random are as large as the mean gain seen (paired permutation test)."""
    gains = np.array([np.mean(after[problem]) - np.mean(before[problem]) for problem in before if problem in after])
    if not len(gains):
        return None
    rng = np.random.default_rng(seed)
    means = [gains[rng.integers(0, len(gains), len(gains))].mean() for _ in range(RESAMPLES)]
    low, high = np.quantile(means, [0.025, 0.975])
    flipped = rng.choice(np.array([-1.0, 1.0]), size=(FLIPS, len(gains))) @ gains / len(gains)
    extreme = int((np.abs(flipped) >= abs(gains.mean()) - 1e-12).sum())
    return Difference(float(gains.mean()), float(low), float(high), (extreme + 1) / (FLIPS + 1), len(gains))


def holm(p_values: Sequence[float]) -> list[float]:
    """The same p corrected for their number (Holm 1979): below 0.05 here means below 0.05 for all claims of the table together."""
    adjusted, floor = [1.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda place: p_values[place])):
        floor = max(floor, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = floor
    return adjusted
