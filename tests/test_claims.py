"""The claims: known effects give the known verdicts, no effect is seldom taken for one, and little data decides nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parallel_r1.analysis import TWINS
from parallel_r1.claims import CLAIMS, Verdict, judge
from parallel_r1.config import PipelineConfig, load
from parallel_r1.experiments import RowRun, measured
from parallel_r1.report import claims_table
from parallel_r1.report.tables import as_markdown

RECIPES = Path(__file__).parents[1] / "recipes"
COLD_START, LIFTS, FALLS, ALTERNATING, PARALLEL_ONLY, MOVES, SCAFFOLD, SEQUENTIAL = range(len(CLAIMS))


@dataclass(frozen=True)
class Level:
    """What a checkpoint is made to show."""

    accuracy: float
    ratio: float = 0.0


SFT = Level(0.36, 0.95)
PAPER = {
    "parallel_r1_seen": {"sft": SFT, "rl hard": Level(0.70, 0.30)},
    "parallel_r1_unseen_s1": {"sft": SFT, "rl hard": Level(0.68, 0.14)},
    "parallel_r1_unseen_s2": {"sft": SFT, "rl hard": Level(0.675, 0.63)},
    "parallel_only": {"sft": SFT, "rl hard": Level(0.45, 0.90)},
    "without_cold_start": {"base": Level(0.3), "rl hard": Level(0.6)},
    "scaffold": {"sft": SFT, "rl explore": Level(0.6, 0.7), "rl exploit": Level(0.85, 0.3)},
    "grpo_gsm8k_dapo": {"base": Level(0.3), "rl hard": Level(0.45)},
}
"""Recipes whose numbers have the paper's directions."""


def rows(
    folder: Path, levels: Mapping[str, Mapping[str, Level]], seeds: int = 3, problems: int = 150, position: tuple[float, float] = (0.1, 0.4)
) -> list[RowRun]:
    """Runs with rollouts of the given levels: problems differ in difficulty, every training by a little luck."""
    rng = np.random.default_rng(7)
    hardness = rng.normal(0, 0.12, problems)
    runs = []
    for recipe, checkpoints in levels.items():
        for seed in range(seeds):
            place = folder / recipe / str(seed)
            evaluations = {title: evaluation(place / title, level, hardness, rng) for title, level in checkpoints.items()}
            steps = np.linspace(*position, 30) + rng.normal(0, 0.01, 30)
            write(place / "rl" / "metrics.jsonl", [{"step": i, "parallel_position": float(at)} for i, at in enumerate(steps, 1)])
            write(place / "easy" / "metrics.jsonl", [{"step": i, "parallel_position": 0.2} for i in range(1, 31)])
            runs.append(RowRun(recipe, seed, PipelineConfig(), evaluations, {"rl easy": place / "easy", "rl hard": place / "rl"}))
    return runs


def evaluation(folder: Path, level: Level, hardness: np.ndarray, rng: np.random.Generator) -> Path:
    chances = np.clip(level.accuracy + rng.normal(0, 0.01) + hardness, 0, 1)
    found = []
    for place, chance in enumerate(chances):
        for _ in range(4):
            blocks = int(rng.random() < level.ratio)
            row: dict[str, Any] = {"set": "tier1", "problem_id": f"p{place}", "problem": f"problem {place}", "segments": []}
            row["correct"] = bool(rng.random() < chance)
            found.append(row | {"blocks": blocks, "well_formed": True, "finish": "eos", "tokens": 50, "critical_path_tokens": 40})
    write(folder / "rollouts.jsonl", found)
    return folder


def write(path: Path, found: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in found))


def changed(recipe: str, title: str, level: Level) -> dict[str, dict[str, Level]]:
    """The paper's numbers, but for one checkpoint."""
    return {**PAPER, recipe: {**PAPER[recipe], title: level}}


def test_numbers_with_the_papers_directions_reproduce_every_claim(tmp_path: Path) -> None:
    verdicts = judge(rows(tmp_path, PAPER, seeds=6))
    assert [verdict.claim for verdict in verdicts] == [claim.text for claim in CLAIMS]
    assert {verdict.claim: verdict.outcome for verdict in verdicts} == dict.fromkeys((claim.text for claim in CLAIMS), "reproduced")
    lifted = verdicts[LIFTS].findings[0]
    assert lifted.effect == pytest.approx(0.34, abs=0.03) and lifted.low < 0.34 < lifted.high
    assert (lifted.seeds, lifted.problems) == (6, 150) and lifted.p < 0.05 and lifted.paper == pytest.approx(0.489 - 0.36)


@pytest.mark.parametrize("claim, levels, reason", [
    (LIFTS, changed("parallel_r1_seen", "rl hard", Level(0.20, 0.3)), "rl made it worse"),
    (FALLS, changed("parallel_r1_unseen_s1", "rl hard", Level(0.68, 1.0)), "the ratio rose"),
    (ALTERNATING, changed("parallel_r1_unseen_s2", "rl hard", Level(0.68, 0.02)), "alternating lost the ratio"),
    (ALTERNATING, changed("parallel_r1_unseen_s2", "rl hard", Level(0.45, 0.63)), "alternating kept it at a large cost"),
    (PARALLEL_ONLY, changed("parallel_only", "rl hard", Level(0.9, 0.9)), "parallel-only was more accurate"),
    (COLD_START, changed("without_cold_start", "rl hard", Level(0.6, 0.6)), "blocks came without a cold start"),
    (SCAFFOLD, changed("scaffold", "rl exploit", Level(0.5, 0.3)), "the scaffold ended below"),
    (SEQUENTIAL, changed("grpo_gsm8k_dapo", "rl hard", Level(0.95)), "sequential rl won"),
])  # fmt: skip
def test_effects_the_other_way_are_not_reproduced(tmp_path: Path, claim: int, levels: dict[str, dict[str, Level]], reason: str) -> None:
    assert judge(rows(tmp_path, levels))[claim].outcome == "not reproduced", reason


@pytest.mark.parametrize("position, expected", [((0.1, 0.4), "reproduced"), ((0.4, 0.1), "not reproduced"), ((0.2, 0.2), "not reproduced")])
def test_where_blocks_move_within_the_last_stage(tmp_path: Path, position: tuple[float, float], expected: str) -> None:
    verdict = judge(rows(tmp_path, {"parallel_r1_seen": PAPER["parallel_r1_seen"]}, problems=4, position=position))[MOVES]
    assert verdict.outcome == expected, verdict.sentence


@pytest.mark.parametrize("seeds, problems, reason", [
    (1, 150, "one seed"),
    (3, 5, "problems are too few"),
    (2, 10, "either answer"),
])  # fmt: skip
def test_little_data_decides_nothing(tmp_path: Path, seeds: int, problems: int, reason: str) -> None:
    verdict = judge(rows(tmp_path, PAPER, seeds, problems))[LIFTS]
    assert verdict.outcome == "undecided" and reason in verdict.sentence, verdict.sentence


def test_rows_that_are_missing_are_named(tmp_path: Path) -> None:
    verdicts = judge(rows(tmp_path, {"parallel_r1_unseen_s1": PAPER["parallel_r1_unseen_s1"]}, problems=20))
    assert "; parallel_r1_unseen_s2 would" in verdicts[ALTERNATING].sentence and verdicts[ALTERNATING].outcome == "undecided"
    assert verdicts[LIFTS].findings[0].part.more.recipe == "parallel_r1_unseen_s1", "the claim is judged on the row that is there"
    assert all(verdict.outcome == "undecided" and not verdict.findings for verdict in judge([]))


@pytest.mark.parametrize("pattern", ["tiny/*.yaml", "*.yaml ablations/*.yaml"])
def test_every_claim_has_its_recipes(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA", "/nowhere")
    monkeypatch.setenv("TEACHER", "/nowhere")
    shipped = {load(path).name for part in pattern.split() for path in RECIPES.glob(part)}
    checkpoints = [checkpoint for claim in CLAIMS for parts in claim.versions for part in parts for checkpoint in (part.more, part.less)]
    assert {checkpoint.recipe for checkpoint in checkpoints if checkpoint} | {*TWINS, *sum(TWINS.values(), ())} <= shipped


def test_seeds_that_two_rows_do_not_share_compare_nothing(tmp_path: Path) -> None:
    runs = rows(tmp_path, PAPER, problems=20)
    apart = [run for run in runs if run.recipe == "scaffold" and run.seed == 0 or run.recipe == "parallel_r1_unseen_s1" and run.seed == 1]
    verdict = judge(apart)[SCAFFOLD]
    assert verdict.outcome == "undecided" and "share no seed" in verdict.sentence


# --- the statistics -------------------------------------------------------------------------------------------------------


def simulated(
    rng: np.random.Generator, effect: float, seeds: int, problems: int, by_seed: float, by_problem: float, shared: bool
) -> dict[int, dict[str, dict[str, float]]]:
    """Differences by seed and problem; `shared`: all seeds were asked the same problems."""
    of_problem = rng.normal(0, by_problem, problems)
    found = {}
    for seed in range(seeds):
        parts = of_problem if shared else rng.normal(0, by_problem, problems)
        gains = effect + rng.normal(0, by_seed) + parts + rng.normal(0, 0.3, problems)
        found[seed] = {"a": {f"{'' if shared else seed}/{place}": float(gain) for place, gain in enumerate(gains)}}
    return found


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("seeds, problems, by_seed, by_problem, reason", [
    (3, 40, 0.1, 0.2, "trainings differ much, as at tiny scale"),
    (3, 40, 0.0, 0.3, "trainings don't differ, problems do"),
    (5, 30, 0.05, 0.0, "all problems alike"),
    (2, 150, 0.1, 0.2, "two seeds"),
])  # fmt: skip
def test_no_effect_is_seldom_taken_for_one(seeds: int, problems: int, by_seed: float, by_problem: float, reason: str, shared: bool) -> None:
    rng = np.random.default_rng(11)
    runs = 400
    found = [measured(simulated(rng, 0.0, seeds, problems, by_seed, by_problem, shared)) for _ in range(runs)]
    for wrong in ([low > 0 for _, low, _, _ in found], [high < 0 for _, _, high, _ in found]):
        assert np.mean(wrong) <= 0.025 + 2.6 * np.sqrt(0.025 * 0.975 / runs), reason
    assert np.mean([p < 0.05 for *_, p in found]) <= 0.05 + 2.6 * np.sqrt(0.05 * 0.95 / runs), reason


def test_intervals_hold_the_truth_and_find_an_effect() -> None:
    rng = np.random.default_rng(3)
    found = [measured(simulated(rng, 0.3, 3, 100, 0.05, 0.2, shared=True)) for _ in range(300)]
    assert np.mean([low < 0.3 < high for _, low, high, _ in found]) > 0.92
    assert np.mean([low > 0 for _, low, _, _ in found]) > 0.8


def test_a_problem_asked_in_every_seed_counts_once() -> None:
    """Five seeds of one model on ten problems are ten problems, not fifty."""
    gains = {str(place): gain for place, gain in enumerate([1.0, -1.0] * 5)}
    _, low, high, _ = measured({seed: {"a": gains} for seed in range(5)})
    assert (high - low) / 2 > 1.96 / np.sqrt(10)


def test_all_alike_is_no_certainty() -> None:
    effect, low, high, p = measured({seed: {"a": dict.fromkeys("abcdefghij", 1.0)} for seed in range(2)})
    assert effect == 1.0 and low < 0 and p > 0.05, "20 answers at 2 seeds"
    _, low, _, p = measured({seed: {"a": {str(place): 1.0 for place in range(100)}} for seed in range(3)})
    assert low > 0.9 and p < 0.05


# --- the table ------------------------------------------------------------------------------------------------------------


def test_the_table_says_every_verdict(tmp_path: Path) -> None:
    verdicts: list[Verdict] = judge(rows(tmp_path, PAPER, problems=40))
    text = as_markdown(claims_table(verdicts))
    for verdict in verdicts:
        assert verdict.claim.replace("<", "&lt;").replace(">", "&gt;") in text
    assert {verdict.outcome for verdict in verdicts} <= {outcome for outcome in ("reproduced", "undecided") if outcome in text}
    assert "3 × 40" in text and "+12.9" in text
    assert "0.0 (0.0 to" in text, "a share that is measured alone doesn't fall below zero"
