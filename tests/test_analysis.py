"""The analysis: what is counted, over which steps and problems, and that it says nothing where there is nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from parallel_r1.analysis import (
    analyse,
    behaviour,
    budget,
    clustered,
    depth,
    depth_of_rows,
    early_and_late,
    over_steps,
    path_answer,
    paths,
    trends,
)
from parallel_r1.config import AnalysisConfig, PipelineConfig
from parallel_r1.experiments import RowRun


def rollout(problem: int = 0, correct: bool = True, blocks: Sequence[Sequence[str]] = (), tokens: int = 40, **more: Any) -> dict[str, Any]:
    """A rollout whose blocks hold paths of the given texts; the right answer is 14."""
    segments = [
        {"kind": "path", "block": number, "path": place, "text": text}
        for number, texts in enumerate(blocks)
        for place, text in enumerate(texts, 1)
    ]
    row = {"set": "tier1", "problem_id": f"p{problem}", "problem": "?", "answer": "14", "correct": correct, "segments": segments}
    row |= {"blocks": len(blocks), "well_formed": True, "tokens": tokens, "critical_path_tokens": tokens, "path_similarity": 0.1}
    return row | more


AGREE, SPLIT, BOTH_WRONG, OPEN = ("12+5=17;17-3=14.", "So 14."), ("so 14", "so 15"), ("so 15", "so 15"), ("so 14", "hm")


@pytest.mark.parametrize("text, expected, reason", [
    ("In order. 12+5=17;17-3=14.", "14", "the last number"),
    ("It is 7.\nFinal Answer: 8", "8", "an answer that is named wins"),
    (r"so \boxed{\frac{1}{2}} by 3 steps", "1/2", "a box wins"),
    ("that makes 1,234 apples", "1234", "one spelling"),
    ("or -3/4 of it", "-3/4", "signs and fractions"),
    ("we are left with 17-5", "5", "a difference is no negative number"),
    ("no number here", None, "nothing"),
])  # fmt: skip
def test_path_answer(text: str, expected: str | None, reason: str) -> None:
    assert path_answer(text) == expected, reason


def test_paths_agree_or_not_and_the_summary_makes_something_of_it() -> None:
    rows = [
        rollout(0, True, [AGREE]), rollout(1, False, [BOTH_WRONG]), rollout(2, True, [SPLIT]), rollout(3, False, [SPLIT]),
        rollout(4, True, [OPEN]), rollout(5, True, [("so 14",)]), rollout(6, True),
    ]  # fmt: skip
    found = paths(rows)
    expected = {
        "answered": (4 / 5, 5), "agreement": (2 / 4, 4), "right_where_agreed": (1 / 2, 2), "right_where_split": (1 / 2, 2),
        "right": (2 / 4, 4), "any_path_right": (3 / 4, 4), "right_of_split_with_a_right_path": (1 / 2, 2),
    }  # fmt: skip
    assert {name: (found[name]["value"], found[name]["n"]) for name in expected} == expected
    assert found["blocks"] == 5, "a single path is no block to compare in"
    assert found["similarity"]["n"] == 5 and found["similarity"]["value"] == pytest.approx(0.1), "rollouts without two paths don't count"


def test_behaviour_counts_what_was_done_at_both_ends_and_what_it_earned() -> None:
    rows = [rollout(step, True, reward=1.0, step=step) for step in (1, 1, 2, 3)]
    rows += [rollout(step, True, [AGREE], reward=1.2, step=step) for step in (3, 3, 3)]
    rows += [rollout(9, True, well_formed=False, blocks=[AGREE], reward=-1.0, step=1)]
    found = {(entry["form"], entry["correct"]): entry for entry in behaviour(rows)}
    assert (found["no block", True]["early"], found["no block", True]["late"]) == (pytest.approx(2 / 3), 0.25)
    assert (found["parallel", True]["early"], found["parallel", True]["late"]) == (0, 0.75)
    assert found["malformed", True]["reward"]["value"] == -1 and found["parallel", True]["reward"]["value"] == pytest.approx(1.2)
    assert sum(entry["n"] for entry in found.values()) == len(rows) and found["parallel", False]["reward"]["value"] is None


def steps(count: int, start: float = 0.0) -> list[dict[str, float]]:
    rates = {"parallel_ratio": 0.5, "blocks_per_response": 2.0}
    return [{"step": step, "parallel_position": start + step / 100, **rates} for step in range(1, count + 1)]


@pytest.mark.parametrize("counts, windows, expected, reason", [
    ([12], 4, [[3, 3, 3, 3]], "even"),
    ([4], 12, [[4]], "a rest too short for an interval goes to the window before"),
    ([10, 20], 10, [[3, 3, 4], [3, 3, 3, 3, 3, 5]], "no window crosses the end of a stage"),
    ([2], 12, [[2]], "a stage shorter than a window"),
])  # fmt: skip
def test_windows(counts: list[int], windows: int, expected: list[list[int]], reason: str) -> None:
    found = trends({f"rl {place}": steps(count) for place, count in enumerate(counts)}, {}, windows)
    assert [[window["last"] - window["first"] + 1 for window in stage["windows"]] for stage in found] == expected, reason
    assert [stage["steps"] for stage in found] == counts


def test_trends_hold_means_with_intervals_and_leave_out_what_was_not_recorded() -> None:
    kept = [rollout(0, True, [AGREE], step=1), rollout(0, True, [SPLIT], step=1), rollout(0, True, [AGREE], step=2)]
    kept += [rollout(0, True, step=3)]
    [stage] = trends({"rl": steps(3)}, {"rl": kept}, 2)
    [window] = stage["windows"]
    assert window["position"]["value"] == pytest.approx(0.02) and 0 <= window["position"]["low"] < 0.02 < window["position"]["high"]
    assert window["agreement"]["value"] == pytest.approx(0.75) and window["agreement"]["n"] == 2, "step 3 had no block"
    assert window["agreement"]["high"] == 1.0, "a share ends at 1"
    assert window["similarity"] == {"value": None, "low": None, "high": None, "n": 0}


def test_intervals_over_steps() -> None:
    assert over_steps([0.5]) == {"value": 0.5, "low": None, "high": None, "n": 1}
    found = over_steps([0.4, 0.5, 0.6])
    assert found["high"] - found["value"] == pytest.approx(4.3027 * 0.1 / 3**0.5, rel=1e-4), "Student's t with 2 degrees of freedom"


def test_accuracy_grows_with_the_budget_and_depth_is_cheaper_than_tokens() -> None:
    parallel = [rollout(n, n % 4 > 0, [AGREE], tokens=60 + n, critical_path_tokens=35 + n) for n in range(20)]
    sequential = [rollout(n, n % 2 > 0, tokens=30 + n) for n in range(20)]
    found = budget({"base": sequential, "rl": parallel})["tier1"]
    curves = found["curves"]
    for curve in (curve for label in curves for curve in curves[label].values()):
        assert curve == sorted(curve)
    assert curves["base"]["tokens"] == curves["base"]["critical_path"] and curves["rl"]["tokens"][-1] == 0.75
    assert all(deep >= wide for deep, wide in zip(curves["rl"]["critical_path"], curves["rl"]["tokens"], strict=True))


def test_depth_compares_with_the_last_sequential_checkpoint_before() -> None:
    sequential = [rollout(n, True, tokens=40) for n in range(20)]
    parallel = [rollout(n, True, [AGREE], tokens=70, critical_path_tokens=40) for n in range(20)]
    [entry] = depth({"base": sequential, "rl": parallel})
    assert (entry["sequential"], entry["checkpoint"], entry["budget"], entry["mean_tokens"]) == ("base", "rl", 40, 70)
    assert entry["critical_path"]["value"] == 0, "as deep, as right"
    assert entry["tokens"]["value"] == -1, "no response fits into as many tokens"
    assert depth({"rl": parallel, "base": sequential}) == [], "nothing sequential before it"


def test_rows_are_compared_with_the_sequential_row_of_as_much_rl(tmp_path: Path) -> None:
    def row(recipe: str, seed: int, **sizes: int) -> RowRun:
        folder = tmp_path / recipe / str(seed)
        folder.mkdir(parents=True)
        found = [rollout(n, n % 10 > seed, [AGREE] if "seen" in recipe else (), **sizes) | {"problem": f"? {n}"} for n in range(40)]
        (folder / "rollouts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in found))
        return RowRun(recipe, seed, PipelineConfig(), {"rl hard": folder}, {})

    runs = [row("grpo_dapo", seed, tokens=30) for seed in range(3)]
    runs += [row("parallel_r1_seen", seed, tokens=70, critical_path_tokens=40) for seed in range(3)]
    [entry] = depth_of_rows(runs)
    assert (entry["checkpoint"], entry["sequential"], entry["budget"]) == ("parallel_r1_seen", "grpo_dapo", 40)
    assert (entry["mean_sequential"], entry["mean_tokens"], entry["mean_critical_path"]) == (30, 70, 40)
    assert entry["critical_path"]["value"] == 0 and entry["critical_path"]["seeds"] == 3
    assert entry["tokens"]["value"] == pytest.approx(-0.8) and entry["tokens"]["high"] < 0
    assert depth_of_rows(runs[:3]) == [], "nothing to compare"


def test_early_and_late_rollouts_are_of_the_first_and_the_last_step() -> None:
    rows = [rollout(n, True, [AGREE] if n % 2 else (), step=1 + n // 4) for n in range(12)]
    found = early_and_late(rows, 2)
    assert {row["step"] for row in found["early"]} == {1} and {row["step"] for row in found["late"]} == {3}
    assert all(row["blocks"] for rows in found.values() for row in rows), "those with a block first"
    again = [rollout(n % 2, True, [AGREE], step=1) for n in (0, 0, 0, 1)]
    assert [row["problem_id"] for row in early_and_late(again, 2)["late"]] == ["p0", "p1"], "another problem before the same again"


def test_rollouts_of_one_problem_count_as_one() -> None:
    apart = clustered([(f"p{n}", n % 2) for n in range(40)])
    together = clustered([(f"p{n // 10}", n // 10 % 2) for n in range(40)])
    assert together["high"] - together["low"] > 2 * (apart["high"] - apart["low"])
    assert clustered([]) == {"value": None, "low": None, "high": None, "n": 0}
    assert clustered([("p", 1), ("p", 0)])["low"] is None, "one problem"


def test_a_whole_run_from_its_files(tmp_path: Path) -> None:
    rows = [rollout(n, True, [AGREE], step=step, reward=1.0) for n in range(4) for step in (1, 2)]
    files = {"rl/metrics.jsonl": steps(2), "rl/rollouts.jsonl": rows, "last/rollouts.jsonl": rows}
    files["base/rollouts.jsonl"] = [rollout(n) for n in range(4)]
    for name, lines in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    checkpoints = {"base": tmp_path / "base", "rl hard": tmp_path / "last"}
    found = analyse({"rl hard": tmp_path / "rl"}, checkpoints, AnalysisConfig())
    assert list(found["paths"]) == ["rl hard"] and list(found["behaviour"]) == ["rl hard"] and len(found["depth"]) == 1
    json.dumps(found, allow_nan=False)
    nothing = analyse({}, {"base": tmp_path / "base"}, AnalysisConfig())
    assert not nothing["paths"] and not nothing["trends"] and not nothing["samples"] and nothing["budget"]
