"""The metrics, against brute force and known values."""

import itertools
import math
import random

import pytest

from parallel_r1.metrics import pass_at_k, summarise


def rollout(problem: str, correct: bool = False, blocks: int = 0, well_formed: bool = True, finish: str = "eos", tokens: int = 10) -> dict:
    return {
        "problem_id": problem,
        "correct": correct,
        "blocks": blocks,
        "well_formed": well_formed,
        "finish": finish,
        "tokens": tokens,
        "critical_path_tokens": tokens // 2,
    }


@pytest.mark.parametrize("n, c", [(n, c) for n in range(1, 8) for c in range(n + 1)])
def test_pass_at_k_equals_brute_force(n: int, c: int) -> None:
    outcomes = [True] * c + [False] * (n - c)
    for k in range(1, n + 1):
        subsets = list(itertools.combinations(outcomes, k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(any(subset) for subset in subsets) / len(subsets))


@pytest.mark.parametrize(
    "n, c, k, expected, reason",
    [
        (16, 1, 16, 1.0, "one right of 16 counts fully at k = n (the paper's bootstrap counts 0.644)"),
        (16, 0, 16, 0.0, "none right"),
        (4, 1, 1, 0.25, "k = 1 is the mean"),
        (200, 10, 10, 1 - math.prod(1 - 10 / i for i in range(191, 201)), "the product form of the paper's code, no overflow"),
    ],
)
def test_pass_at_k_known_values(n: int, c: int, k: int, expected: float, reason: str) -> None:
    assert pass_at_k(n, c, k) == pytest.approx(expected), reason


@pytest.mark.parametrize("n, c, k", [(4, 5, 1), (4, -1, 1), (4, 1, 5), (4, 1, 0)])
def test_pass_at_k_bounds(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="pass@k"):
        pass_at_k(n, c, k)


def test_values() -> None:
    rows = [
        rollout("a", correct=True, blocks=1, tokens=10),
        rollout("a", correct=False, blocks=1, well_formed=False, tokens=20),
        rollout("b", correct=False, blocks=0, finish="length", tokens=30),
        rollout("b", correct=False, blocks=0, finish="stray_tag", well_formed=False, tokens=40),
    ]
    scores = summarise(rows, samples=2, bootstrap=200, seed=0)
    assert {name: score["value"] for name, score in scores.items()} == {
        "mean": 0.25,
        "pass@k": 0.5,
        "parallel_ratio": 0.5,
        "valid_ratio": 0.25,
        "truncated_ratio": 0.25,
        "response_tokens": 25.0,
        "critical_path_tokens": 12.5,
    }
    assert all(score["low"] <= score["value"] <= score["high"] for score in scores.values())


def test_rows_may_come_in_any_order() -> None:
    rows = [rollout(str(p), correct=bool(p % 3), blocks=s % 2) for p in range(12) for s in range(4)]
    values = {name: score["value"] for name, score in summarise(rows, 4, 200, 0).items()}
    random.Random(0).shuffle(rows)
    assert {name: score["value"] for name, score in summarise(rows, 4, 200, 0).items()} == pytest.approx(values)


def test_the_interval_is_over_problems_not_rollouts() -> None:
    """16 copies of a rollout say no more than one: the interval must not shrink. Width as the normal approximation over problems says."""
    once = [rollout(str(p), correct=p < 50) for p in range(100)]
    often = [rollout(str(p), correct=p < 50) for p in range(100) for _ in range(16)]
    one, many = summarise(once, 1, 4000, 0)["mean"], summarise(often, 16, 4000, 0)["mean"]
    assert one == many
    assert one["high"] - one["low"] == pytest.approx(2 * 1.96 * 0.05, rel=0.1)


def test_the_interval_covers_the_truth() -> None:
    """Of 200 experiments with 40 problems each, about 95 % of the intervals hold the true mean 0.3."""
    rng = random.Random(0)
    covered = 0
    for _ in range(200):
        rows = [rollout(str(p), correct=rng.random() < 0.3) for p in range(40)]
        score = summarise(rows, 1, 300, 0)["mean"]
        covered += score["low"] <= 0.3 <= score["high"]
    assert 178 <= covered <= 200


def test_the_seed_decides() -> None:
    rows = [rollout(str(p), correct=p % 2 == 0, tokens=p) for p in range(30)]
    assert summarise(rows, 1, 200, 1) == summarise(rows, 1, 200, 1)
    assert summarise(rows, 1, 200, 1) != summarise(rows, 1, 200, 2)


@pytest.mark.parametrize(
    "rows, message", [([], "no rollouts"), ([rollout("a"), rollout("a"), rollout("b")], "problem b has 1 rollouts, 2 are")]
)
def test_incomplete_input_is_refused(rows: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        summarise(rows, 2, 100, 0)
