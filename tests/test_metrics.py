"""The metrics, against brute force and known values."""

import itertools
import math
import random
import statistics

import pytest

from parallel_r1.metrics import best_at_k_bootstrap, holm, majority, paired_difference, pass_at_k, summarise


def rollout(
    problem: str, correct: bool = False, blocks: int = 0, well_formed: bool = True, finish: str = "eos", tokens: int = 10,
    extracted: str | None = None,
) -> dict:  # fmt: skip
    return {
        "extracted": extracted,
        "segments": [{"kind": "path"}, {"kind": "path"}, {"kind": "summary"}] * blocks,
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
        "pass@1": 0.25,
        "pass@k": 0.5,
        "maj@k": 0.5,
        "best@k": 0.375,
        "blocks": 0.5,
        "paths": 1.0,
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
    assert one == {name: many[name] for name in ("value", "low", "high")} and many["sampling"] == 0
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


# --- other estimators -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "c", "k"), [(n, c, k) for n in range(1, 5) for c in range(n + 1) for k in range(1, n + 1)])
def test_best_at_k_equals_brute_force_over_draws_with_replacement(n: int, c: int, k: int) -> None:
    outcomes = [True] * c + [False] * (n - c)
    draws = list(itertools.product(outcomes, repeat=k))
    assert best_at_k_bootstrap(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_best_at_k_known_values() -> None:
    """One right of 16 counts 0.644 in the paper's pass@16; verl's own way, 1000 draws, gives it within its noise."""
    assert best_at_k_bootstrap(16, 1, 16) == pytest.approx(0.644, abs=5e-4)
    rng = random.Random(42)
    drawn = sum(any(rng.randrange(16) == 0 for _ in range(16)) for _ in range(1000)) / 1000
    assert drawn == pytest.approx(0.644, abs=0.05)


@pytest.mark.parametrize(
    ("answers", "expected", "reason"),
    [
        (["42", "42", "41", None], 1.0, "two of three votes; no answer, no vote"),
        (["42", "41", "41", "40"], 0.0, "a wrong one leads"),
        (["42", "42", "41", "41"], 0.5, "a tie"),
        (["42", "41", "$41$", "41."], 0.0, "spellings of one wrong answer are one"),
        (["42", "1/2", "0.5", None], 0.0, "by value"),
        ([None, None, None, None], 0.0, "nobody answers"),
        (["42", "41", "40", "39"], 0.25, "all different"),
    ],
)
def test_majority(answers: list[str | None], expected: float, reason: str) -> None:
    assert majority([rollout("p", correct=answer == "42", extracted=answer) for answer in answers]) == expected, reason


def test_pass_at_every_smaller_k_and_any_of_k() -> None:
    rows = [rollout("a", correct=s < 1) for s in range(16)] + [rollout("b", correct=s < 8) for s in range(16)]
    scores = summarise(rows, 16, 200, 0)
    for k in range(1, 16):
        assert scores[f"pass@{k}"]["value"] == pytest.approx((pass_at_k(16, 1, k) + pass_at_k(16, 8, k)) / 2)
    assert scores["pass@1"]["value"] == pytest.approx(scores["mean"]["value"])
    assert scores["pass@k"]["value"] == 1.0, "at k = n the estimate is any-of-k"


def test_the_sampling_part_is_the_spread_of_runs_over_the_same_problems() -> None:
    chances = [0.1, 0.3, 0.5, 0.9] * 5
    rng = random.Random(0)

    def run() -> dict:
        rows = [rollout(str(p), correct=rng.random() < chance) for p, chance in enumerate(chances) for _ in range(8)]
        return summarise(rows, 8, 100, 0)["mean"]

    runs = [run() for _ in range(300)]
    spread = statistics.stdev(score["value"] for score in runs)
    assert statistics.mean(score["sampling"] for score in runs) == pytest.approx(1.96 * spread, rel=0.12)
    assert all(score["sampling"] < (score["high"] - score["low"]) / 2 for score in runs), "a part of the whole"
    assert "sampling" not in summarise([rollout("a"), rollout("b")], 1, 100, 0)["mean"]


# --- two checkpoints ------------------------------------------------------------------------------------------------------


def outcomes(shares: list[float], samples: int = 4) -> dict[str, list[bool]]:
    return {str(p): [s < share * samples for s in range(samples)] for p, share in enumerate(shares)}


def test_paired_difference() -> None:
    before, after = outcomes([0.25] * 20), outcomes([0.5] * 20)
    gain = paired_difference(before, after)
    assert gain and (gain.value, gain.low, gain.high, gain.problems) == (0.25, 0.25, 0.25, 20) and gain.p < 1e-3
    same = paired_difference(before, before)
    assert same and same.value == 0 and same.p == 1
    assert paired_difference(before, {"other": [True]}) is None


def test_p_equals_the_exact_permutation_test() -> None:
    """8 problems, gains of 1, 1, 1, 1, 1, 0, 0, -1: of the 2^6 ways to flip the signs, 14 reach a sum of 4 or more in size."""
    before = {str(p): [gain < 0] for p, gain in enumerate([1, 1, 1, 1, 1, 0, 0, -1])}
    after = {str(p): [gain > 0] for p, gain in enumerate([1, 1, 1, 1, 1, 0, 0, -1])}
    gains = [1, 1, 1, 1, 1, -1]
    exact = sum(abs(sum(s * g for s, g in zip(signs, gains, strict=True))) >= 4 for signs in itertools.product((1, -1), repeat=6)) / 64
    found = paired_difference(before, after)
    assert exact == 14 / 64 and found and found.p == pytest.approx(exact, abs=0.015)


def test_p_is_honest_where_nothing_differs() -> None:
    """Two runs of one model: about 5 % of 300 comparisons fall below 0.05."""
    rng = random.Random(1)
    low = 0
    for _ in range(300):
        runs = [{str(p): [rng.random() < 0.1 + p / 40 for _ in range(4)] for p in range(30)} for _ in range(2)]
        found = paired_difference(*runs)
        low += found is not None and found.p < 0.05
    assert 4 <= low <= 28


def test_holm_known_values() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.6]) == [1.0, 1.0] and holm([]) == []
