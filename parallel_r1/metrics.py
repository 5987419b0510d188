"""Scores of rollouts with their uncertainty: each metric is {"value", "low", "high"}, a share 0..1 or a plain number.

Rollouts of one problem aren't independent, so the 95 % interval comes from a bootstrap over problems (seeded, percentile).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Score = dict[str, float]


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased chance that at least one of `k` samples is right, given `c` right ones of `n` (Chen et al. 2021, arXiv 2107.03374)."""
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass@k: n = {n}, c = {c}, k = {k}: needs 0 <= c <= n and 1 <= k <= n")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def summarise(rows: Sequence[Mapping[str, Any]], samples: int, bootstrap: int, seed: int) -> dict[str, Score]:
    """Metrics of one problem set's rollouts, `samples` per problem.

    mean@k ("mean"), "pass@k", "parallel_ratio" (rollouts with a block), "valid_ratio" (with a block and no fault), "truncated_ratio",
    "response_tokens", "critical_path_tokens". Raises ValueError where a problem has another number of rollouts.
    """
    by_problem = _by_problem(rows, samples)
    tables = {name: np.array([[float(measure(row)) for row in group] for group in by_problem]) for name, measure in _MEASURES.items()}
    per_problem = {name: table.mean(axis=1) for name, table in tables.items()}
    right = tables["mean"].sum(axis=1).astype(int)
    per_problem["pass@k"] = np.array([pass_at_k(samples, c, samples) for c in right.tolist()])
    draws = np.random.default_rng(seed).integers(0, len(by_problem), size=(bootstrap, len(by_problem)))
    return {name: _score(values, draws) for name, values in per_problem.items()}


_MEASURES = {
    "mean": lambda row: row["correct"],
    "parallel_ratio": lambda row: row["blocks"] > 0,
    "valid_ratio": lambda row: row["blocks"] > 0 and row["well_formed"],
    "truncated_ratio": lambda row: row["finish"] == "length",
    "response_tokens": lambda row: row["tokens"],
    "critical_path_tokens": lambda row: row["critical_path_tokens"],
}


def _by_problem(rows: Sequence[Mapping[str, Any]], samples: int) -> list[list[Mapping[str, Any]]]:
    groups: dict[str, list[Mapping[str, Any]]] = {}
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
