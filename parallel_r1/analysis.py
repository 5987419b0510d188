"""What the blocks of a run are good for, and how their use changes while the student learns (paper section 5).

Read from what the stages have written: per optimiser step rl's metrics.jsonl, and the rollouts that it kept of each step; per checkpoint
the rollouts of its evaluation. Every estimate is {"value", "low", "high", "n"} with a 95 % interval (None where there is nothing to make
one of): over the steps of a window for training, by a bootstrap over problems for checkpoints.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from parallel_r1.claims import measured
from parallel_r1.config import AnalysisConfig
from parallel_r1.experiments import RowRun, by_recipe, gains
from parallel_r1.grading import canonical, extract, grade
from parallel_r1.jobs import METRICS, ROLLOUTS, read_lines
from parallel_r1.metrics import RESAMPLES, paired_difference

Row = Mapping[str, Any]
Estimate = dict[str, float | None]

TRENDS = {
    "position": "parallel_position",
    "blocks": "blocks_per_response",
    "parallel_ratio": "parallel_ratio",
    "similarity": "path_similarity",
}
"""What is followed over training, by the metric of a step that holds it: where the first block starts, as a share of the response; blocks
per response; responses with a block; pairwise BLEU of the paths of a block."""

FEWEST_STEPS = 3
"""Steps in a window: with fewer an interval over them says nothing."""

NO_BLOCK, PARALLEL, MALFORMED = "no block", "parallel", "malformed"
SEQUENTIAL = 0.05
"""A checkpoint with blocks in fewer of its responses is called sequential."""
BUDGETS = 12
"""Points of a curve of accuracy against budget."""
BUDGET_SHARE = 0.9
"""The budget of a comparison: as many tokens as this share of the parallel responses needs along its critical path."""


def analyse(training: Mapping[str, Path], evaluations: Mapping[str, Path], config: AnalysisConfig) -> dict[str, Any]:
    """All of it, as JSON. `training`: titles of the rl stages, in their order, to folders; `evaluations`: labels of checkpoints."""
    kept = {title: read_lines(folder / ROLLOUTS) for title, folder in training.items()}
    checkpoints = {label: read_lines(folder / ROLLOUTS) for label, folder in evaluations.items()}
    return {
        "trends": trends({title: read_lines(folder / METRICS) for title, folder in training.items()}, kept, config.windows),
        "behaviour": {title: behaviour(rows) for title, rows in kept.items() if rows},
        "paths": {label: paths(rows) for label, rows in checkpoints.items() if any(_blocks(row) for row in rows)},
        "budget": budget(checkpoints),
        "depth": depth(checkpoints),
        "samples": {title: early_and_late(rows, config.samples) for title, rows in kept.items() if rows},
    }


# --- over training --------------------------------------------------------------------------------------------------------


def trends(metrics: Mapping[str, Sequence[Row]], kept: Mapping[str, Sequence[Row]], windows: int) -> list[dict[str, Any]]:
    """One entry per stage, {"stage", "steps", "windows"}: about `windows` windows over the steps of all stages, none across two, each
    {"first", "last"} (steps of the stage) with the estimates of TRENDS and "agreement", of the paths in the rollouts that were kept."""
    steps = sum(map(len, metrics.values()))
    width = max(FEWEST_STEPS, -(-steps // windows))
    found = []
    for title, rows in metrics.items():
        agreement = _agreement_by_step(kept.get(title, ()))
        chunks = [rows[start : start + width] for start in range(0, len(rows), width)]
        if len(chunks) > 1 and len(chunks[-1]) < FEWEST_STEPS:
            chunks[-2:] = [[*chunks[-2], *chunks[-1]]]
        found.append({"stage": title, "steps": len(rows), "windows": [_window(chunk, agreement) for chunk in chunks]})
    return found


def _window(rows: Sequence[Row], agreement: Mapping[int, float]) -> dict[str, Any]:
    series = {name: [row[metric] for row in rows if metric in row] for name, metric in TRENDS.items()}
    series["agreement"] = [agreement[row["step"]] for row in rows if row["step"] in agreement]
    bounds = {name: math.inf if name == "blocks" else 1.0 for name in series}
    return {"first": rows[0]["step"], "last": rows[-1]["step"]} | {name: over_steps(series[name], top) for name, top in bounds.items()}


def over_steps(values: Sequence[float], top: float = math.inf) -> Estimate:
    """Mean over steps with its interval, by Student's t, cut at 0 and `top`."""
    if len(values) < 2:
        return {"value": values[0] if values else None, "low": None, "high": None, "n": len(values)}
    from scipy.stats import t  # takes half a second to import

    reach = float(t.ppf(0.975, len(values) - 1)) * float(np.std(values, ddof=1)) / len(values) ** 0.5
    mean = fmean(values)
    return {"value": mean, "low": max(0.0, mean - reach), "high": min(top, mean + reach), "n": len(values)}


def _agreement_by_step(rows: Iterable[Row]) -> dict[int, float]:
    """Of the blocks of a step whose paths all come to an answer, the share in which it is the same one."""
    verdicts: dict[int, list[bool]] = defaultdict(list)
    for row in rows:
        verdicts[row["step"]] += [len(set(answers)) == 1 for block in _blocks(row) if (answers := answers_of(block))]
    return {step: fmean(found) for step, found in verdicts.items() if found}


def behaviour(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Of the rollouts that a stage kept, what they did (right or wrong; without a block, parallel, malformed), how often in the first and
    in the last third of its steps, and what it earned."""
    steps = sorted({row["step"] for row in rows})
    third = max(1, len(steps) // 3)
    early, late = ([row for row in rows if row["step"] in chosen] for chosen in (set(steps[:third]), set(steps[-third:])))
    found = []
    for form in (NO_BLOCK, PARALLEL, MALFORMED):
        for correct in (True, False):
            mine, first, last = ([row for row in part if (form_of(row), row["correct"]) == (form, correct)] for part in (rows, early, late))
            share = {"early": len(first) / len(early), "late": len(last) / len(late), "n": len(mine)}
            found.append({"form": form, "correct": correct, **share, "reward": over_problems(mine, lambda row: row["reward"])})
    return found


def form_of(row: Row) -> str:
    """What a rollout did with the markup."""
    if not row["well_formed"]:
        return MALFORMED
    return PARALLEL if row["blocks"] else NO_BLOCK


def early_and_late(rows: Sequence[Row], count: int) -> dict[str, list[Row]]:
    """Rollouts of the first and of the last step that was kept: those with a block first, and of other problems before the same again."""
    steps = [row["step"] for row in rows]
    return {"early": _chosen(rows, min(steps), count), "late": _chosen(rows, max(steps), count)}


def _chosen(rows: Sequence[Row], step: int, count: int) -> list[Row]:
    seen: Counter[str] = Counter()
    ranked = []
    for row in sorted((row for row in rows if row["step"] == step), key=lambda row: not row["blocks"]):
        ranked.append((seen[row["problem_id"]], not row["blocks"], row))
        seen[row["problem_id"]] += 1
    return [row for *_, row in sorted(ranked, key=lambda entry: entry[:2])][:count]


# --- paths ----------------------------------------------------------------------------------------------------------------


def paths(rows: Sequence[Row]) -> dict[str, Any]:
    """What the paths of a checkpoint's blocks come to: how alike their texts are, whether they agree, and what the response makes of it.

    Only blocks whose paths all come to an answer are asked whether they agree, and only rollouts with one such block or more whether any
    path was right: its own accuracy ("right") beside the share with a right path ("any_path_right") says what summaries lose.
    """
    blocks = [(row, block) for row in rows for block in _blocks(row)]
    answered = [(row, answers) for row, block in blocks if (answers := answers_of(block))]
    agreeing = [(row, len(set(answers)) == 1) for row, answers in answered]
    any_right = [(row, any(_is_right(answer, row["answer"]) for answer in answers)) for row, answers in answered]
    split = [(row, right) for (row, right), (_, agree) in zip(any_right, agreeing, strict=True) if not agree]
    return {
        "blocks": len(blocks),
        "answered": clustered([(_problem(row), bool(answers_of(block))) for row, block in blocks]),
        "similarity": over_problems([row for row in rows if _blocks(row)], lambda row: row["path_similarity"]),
        "agreement": clustered([(_problem(row), agree) for row, agree in agreeing]),
        "right_where_agreed": clustered([(_problem(row), row["correct"]) for row, agree in agreeing if agree]),
        "right_where_split": clustered([(_problem(row), row["correct"]) for row, agree in agreeing if not agree]),
        "right": clustered([(_problem(row), row["correct"]) for row, _ in any_right]),
        "any_path_right": clustered([(_problem(row), right) for row, right in any_right]),
        "right_of_split_with_a_right_path": clustered([(_problem(row), row["correct"]) for row, right in split if right]),
    }


def _blocks(row: Row) -> list[list[str]]:
    """The texts of the paths of each block that has two or more."""
    found: dict[int, list[str]] = defaultdict(list)
    for segment in row["segments"]:
        if segment["kind"] == "path":
            found[segment["block"]].append(segment["text"])
    return [texts for texts in found.values() if len(texts) > 1]


_NUMBER = re.compile(r"(?:(?<![\w)])-)?\d+(?:,\d{3})*(?:\.\d+)?(?:/\d+)?")


def path_answer(text: str) -> str | None:
    """What a path comes to, in one spelling: the answer that the grader would extract, else its last number; None without one."""
    numbers = _NUMBER.findall(text)
    answer = extract(text) or (numbers[-1] if numbers else None)
    return canonical(answer) if answer else None


def answers_of(block: Sequence[str]) -> list[str]:
    """The answers of all paths of a block; nothing where one has none."""
    answers = [answer for text in block if (answer := path_answer(text)) is not None]
    return answers if len(answers) == len(block) else []


@cache
def _is_right(answer: str, gold: str) -> bool:
    return grade(f"Final Answer: {answer}", gold).correct


# --- depth and tokens -----------------------------------------------------------------------------------------------------

SIZES = {"tokens": "tokens", "critical_path": "critical_path_tokens"}


def budget(checkpoints: Mapping[str, Sequence[Row]]) -> dict[str, dict[str, Any]]:
    """Accuracy against budget, by set: {"budgets", "curves": {label: {"tokens", "critical_path"}}}. A response counts as right within a
    budget where it is right and no longer, in all its tokens or, at equal depth, along its critical path."""
    found = {}
    for name in dict.fromkeys(row["set"] for rows in checkpoints.values() for row in rows):
        of_set = {label: [row for row in rows if row["set"] == name] for label, rows in checkpoints.items()}
        lengths = [row[size] for rows in of_set.values() for row in rows for size in SIZES.values()]
        budgets = sorted({int(value) for value in np.quantile(lengths, np.linspace(0.02, 1, BUDGETS))})
        curves = {
            label: {what: [_within(rows, size, limit) for limit in budgets] for what, size in SIZES.items()}
            for label, rows in of_set.items()
            if rows
        }
        found[name] = {"budgets": budgets, "curves": curves}
    return found


def _within(rows: Sequence[Row], size: str, limit: float) -> float:
    return fmean(row["correct"] and row[size] <= limit for row in rows)


def depth(checkpoints: Mapping[str, Sequence[Row]]) -> list[dict[str, Any]]:
    """Every checkpoint with blocks against the last sequential one before it, by set, within the same budget: a difference in accuracy at
    as many tokens along the critical path, and one at as many tokens in all. Parallel thinking buys depth, not tokens."""
    found: list[dict[str, Any]] = []
    sequential: dict[str, tuple[str, list[Row]]] = {}
    for label, rows in checkpoints.items():
        for name in dict.fromkeys(row["set"] for row in rows):
            mine = [row for row in rows if row["set"] == name]
            if fmean(row["blocks"] > 0 for row in mine) < SEQUENTIAL:
                sequential[name] = label, mine
            elif name in sequential:
                found.append({"set": name, "checkpoint": label, "sequential": sequential[name][0], **_compared(sequential[name][1], mine)})
    return found


def _compared(sequential: Sequence[Row], parallel: Sequence[Row]) -> dict[str, Any]:
    limit = int(np.quantile([row["critical_path_tokens"] for row in parallel], BUDGET_SHARE))
    before = _right_within(sequential, "tokens", limit)
    differences = {what: paired_difference(before, _right_within(parallel, size, limit)) for what, size in SIZES.items()}
    means = {f"mean_{what}": fmean(row[size] for row in parallel) for what, size in SIZES.items()}
    means["mean_sequential"] = fmean(row["tokens"] for row in sequential)
    return {"budget": limit} | means | {what: vars(found) if found else None for what, found in differences.items()}


def _right_within(rows: Sequence[Row], size: str, limit: float) -> dict[str, list[bool]]:
    found: dict[str, list[bool]] = defaultdict(list)
    for row in rows:
        found[row["problem_id"]].append(row["correct"] and row[size] <= limit)
    return found


TWINS = {
    "parallel_r1_seen": ("grpo_gsm8k_dapo", "grpo_dapo"),
    "parallel_r1_unseen_s1": ("grpo_dapo",),
    "parallel_r1_unseen_s2": ("grpo_dapo",),
    "scaffold": ("grpo_dapo",),
}
"""Rows that think in parallel, and the sequential rows that had as much rl; the first that is there is compared with."""


def depth_of_rows(runs: Sequence[RowRun]) -> list[dict[str, Any]]:
    """As `depth`, for whole rows over all their seeds and sets: the final checkpoints of the rows of TWINS."""
    rows = by_recipe(runs)
    twins = {name: next((twin for twin in TWINS[name] if twin in rows), None) for name in TWINS if name in rows}
    found = []
    for name, twin in ((name, twin) for name, twin in twins.items() if twin):
        parallel, sequential = ({run.seed: read_lines(run.evaluations[run.final] / ROLLOUTS) for run in rows[one]} for one in (name, twin))
        compared = _compared_by_seed(sequential, parallel)
        found += [{"set": "all sets", "checkpoint": name, "sequential": twin, **compared}] if compared else []
    return found


def _compared_by_seed(sequential: Mapping[int, list[Row]], parallel: Mapping[int, list[Row]]) -> dict[str, Any] | None:
    pooled = [row for rows in parallel.values() for row in rows]
    limit = int(np.quantile([row["critical_path_tokens"] for row in pooled], BUDGET_SHARE))
    before = {seed: _shares_within(rows, "tokens", limit) for seed, rows in sequential.items()}
    found: dict[str, Any] = {"budget": limit, "mean_sequential": fmean(row["tokens"] for rows in sequential.values() for row in rows)}
    for what, size in SIZES.items():
        differences = gains(before, {seed: _shares_within(rows, size, limit) for seed, rows in parallel.items()})
        if not differences:
            return None
        value, low, high, p = measured(differences)
        found[what] = {"value": value, "low": low, "high": high, "p": p, "seeds": len(differences)}
        found[f"mean_{what}"] = fmean(row[size] for row in pooled)
    return found


def _shares_within(rows: Iterable[Row], size: str, limit: float) -> dict[str, dict[str, float]]:
    answers: dict[str, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        answers[row["set"]][row["problem"]].append(row["correct"] and row[size] <= limit)
    return {name: {problem: fmean(verdicts) for problem, verdicts in problems.items()} for name, problems in answers.items()}


# --- intervals over problems ----------------------------------------------------------------------------------------------


def over_problems(rows: Sequence[Row], measure: Callable[[Row], float]) -> Estimate:
    """Mean of a measure of rollouts, with its interval over problems."""
    return clustered([(_problem(row), measure(row)) for row in rows])


def clustered(values: Sequence[tuple[str, float]], seed: int = 0) -> Estimate:
    """Mean of (problem, value) pairs; the interval resamples problems, each with all its values. `n` counts values."""
    if not values:
        return {"value": None, "low": None, "high": None, "n": 0}
    names: dict[str, int] = {}
    places = [names.setdefault(name, len(names)) for name, _ in values]
    sums = np.bincount(places, weights=[float(value) for _, value in values])
    counts = np.bincount(places)
    estimate: Estimate = {"value": float(sums.sum() / counts.sum()), "low": None, "high": None, "n": len(values)}
    if len(names) > 1:
        drawn = np.random.default_rng(seed).integers(0, len(names), size=(RESAMPLES, len(names)))
        low, high = np.quantile(sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1), (0.025, 0.975))
        estimate |= {"low": float(low), "high": float(high)}
    return estimate


def _problem(row: Row) -> str:
    return f"{row['set']}/{row['problem_id']}"
