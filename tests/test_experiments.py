"""Rows over seeds: statistics with known answers, the page about them, and the flow that makes both."""

from __future__ import annotations

import html
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conftest import PROJECT, TINY, Project

from flows.run_experiments import main
from parallel_r1.config import ConfigError, PipelineConfig
from parallel_r1.experiments import RowRun, Table, estimate, means, table
from parallel_r1.report.combined import Experiments, as_text, build, difference

SMOKE = {"value": 0.5, "low": 0.4, "high": 0.6}


# --- statistics -----------------------------------------------------------------------------------------------------------


def of(*seeds: dict[str, list[float]], asked: str = "other") -> Table:
    """A table from the values of each set, seed by seed; `asked`: the same problems at every seed, or other ones."""
    return {
        seed: {
            name: {f"{name} {place}{f' of {seed}' * (asked == 'other')}": value for place, value in enumerate(values)}
            for name, values in sets.items()
        }
        for seed, sets in enumerate(seeds)
    }


COIN = [0.0, 1.0] * 50


@pytest.mark.parametrize(("found", "value", "low", "high", "reason"), [
    (of({"a": COIN}), 0.5, 0.40, 0.60, "one seed: over problems, t(99) = 1.98 x sqrt(0.25 / 99)"),
    (of({"a": COIN}, {"a": COIN}, {"a": COIN}, {"a": COIN}), 0.5, 0.42, 0.58, "four seeds, other problems each: 3.18 x sqrt(0.25 / 400)"),
    (of(*[{"a": COIN}] * 4, asked="same"), 0.5, 0.34, 0.66, "four seeds, the same problems: twice as wide, as nothing new was asked"),
    (of({"a": [0.4] * 9}, {"a": [0.5] * 9}, {"a": [0.6] * 9}), 0.5, 0.252, 0.748, "three seeds, no spread inside: 4.30 x 0.1 / sqrt(3)"),
    (of({"a": [0.1] * 9}, {"a": [0.5] * 9}, {"a": [0.9] * 9}), 0.5, 0.0, 1.0, "a share stays one"),
    (of({"a": [1.0] * 90, "b": [0.0] * 10}), 0.5, 0.46, 0.54, "sets count alike; all alike is no certainty: one of 100 gone the other way"),
])  # fmt: skip
def test_intervals_with_known_answers(found: Table, value: float, low: float, high: float, reason: str) -> None:
    one = estimate(found)
    assert one.value == pytest.approx(value), reason
    assert (one.low, one.high) == pytest.approx((low, high), abs=0.012), reason


@pytest.mark.parametrize("spread", [0.04, 0.15])
@pytest.mark.parametrize("seeds", [2, 3, 8])
def test_intervals_hold_the_truth_when_seeds_and_problems_both_vary(seeds: int, spread: float) -> None:
    """A percentile bootstrap of seeds, then problems, holds it 75 % of the time at two seeds that differ by 15 points, 85 % at three."""
    rng = np.random.default_rng(1)
    held = 0
    for _ in range(400):
        levels = np.clip(0.6 + rng.normal(0, spread, seeds), 0, 1)
        one = estimate(of(*({"a": list((rng.random(60) < level).astype(float))} for level in levels)))
        held += one.low <= 0.6 <= one.high
    assert 0.92 <= held / 400


def test_costs_are_no_shares() -> None:
    one = estimate(of({"a": [40.0, 60.0] * 10}), math.inf)
    assert one.value == 50 and 40 < one.low < 50 < one.high < 60


def test_a_difference_is_paired_within_seeds() -> None:
    before = of({"a": COIN}, {"a": COIN}, {"a": COIN})
    after = {seed: {"a": {problem: value + 0.1 * (seed + 1) for problem, value in sets["a"].items()}} for seed, sets in before.items()}
    found = difference(before, after)
    assert found and found.value == pytest.approx(0.2)
    assert found.by_seed == pytest.approx({0: 0.1, 1: 0.2, 2: 0.3}) and found.problems == 300
    assert found.p == pytest.approx(0.0742, abs=1e-4), "problems gain alike, so t = 0.2 / (0.1 / sqrt 3) = 3.46 at two degrees of freedom"
    assert found.low == pytest.approx(0.2 - 4.303 * 0.1 / 3**0.5, abs=1e-3)


def test_a_difference_takes_what_both_have() -> None:
    before, after = of({"a": [0.0, 0.0]}, {"a": [0.0]}), of({"a": [1.0]})
    found = difference(before, after)
    assert found and (found.value, found.problems, list(found.by_seed)) == (1.0, 1, [0])
    assert difference(before, of({"b": [1.0]})) is None
    assert difference(before, {7: before[0]}) is None


# --- runs on the disk -----------------------------------------------------------------------------------------------------


def measured(folder: Path, right: list[list[bool]], block: bool) -> Path:
    """The files of an evaluation: per problem the outcome of each sample."""
    folder.mkdir(parents=True)
    rows = [
        {"set": "tier1", "problem_id": f"p{place}", "problem": f"problem {place}", "sample": sample, "correct": correct, "blocks": int(block),
         "well_formed": correct, "finish": "eos", "tokens": 40, "critical_path_tokens": 30, "position": None, "segments": [], "text": "",
         "answer": "1", "extracted": "1", "faults": []}
        for place, samples in enumerate(right) for sample, correct in enumerate(samples)
    ]  # fmt: skip
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    entry = {"problems": len(right), "samples": len(right[0]), "metrics": {"mean": SMOKE}}
    (folder / "results.json").write_text(json.dumps({"engine": "none 1.0", "seconds": 1.0, "sets": {"tier1": entry}}))
    return folder


def run_of(folder: Path, recipe: str, seed: int, right: float, block: bool = True) -> RowRun:
    """A recipe with a cold start and, where its name doesn't say sft, a stage of rl."""
    rng = np.random.default_rng(seed)
    outcomes = [[bool(rng.random() < right), bool(rng.random() < right)] for _ in range(30)]
    evaluations = {"base": measured(folder / recipe / f"{seed}" / "base", outcomes, False)}
    evaluations["sft"] = measured(folder / recipe / f"{seed}" / "sft", outcomes, block)
    training = {}
    if "sft" not in recipe:
        evaluations["rl hard"] = measured(folder / recipe / f"{seed}" / "rl", outcomes, block)
        training["rl hard"] = folder / recipe / f"{seed}" / "rl"
        steps = [{"step": step, "reward": 0.0, "accuracy": 0.1 * step, "parallel_ratio": 0.9} for step in range(1, 9)]
        (training["rl hard"] / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in steps))
    return RowRun(recipe, seed, PipelineConfig(seed=seed), evaluations, training)


def test_measures_of_runs(tmp_path: Path) -> None:
    right = [[True, False], [False, False], [True, True]]
    run = RowRun(
        "x",
        4,
        PipelineConfig(),
        {"base": measured(tmp_path / "base", [[False]], False), "sft": measured(tmp_path / "sft", right, True)},
        {},
    )
    assert run.final == "sft"
    assert means(table([run])) == {4: 0.5}
    assert means(table([run], "pass@k"))[4] == pytest.approx(2 / 3)
    assert means(table([run], "parallel_ratio")) == {4: 1.0} and means(table([run], "valid_ratio")) == {4: 0.5}
    assert means(table([run], title="base")) == {4: 0.0}
    assert table([run], title="rl hard") == {}, "a checkpoint that the run has not"


# --- the page -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def rows(tmp_path: Path) -> list[RowRun]:
    """Two of the paper's rows and one that it has not, at two seeds."""
    levels = {"own_idea": 0.5, "parallel_r1_seen": 0.9, "sft_seen": 0.4}
    return [run_of(tmp_path, recipe, seed, right) for seed in (1, 0) for recipe, right in levels.items()]


def test_the_page_has_the_papers_layout_with_its_numbers_beside_ours(rows: list[RowRun]) -> None:
    page = build(Experiments(rows, seconds=60))
    table_lines = [line for line in page.markdown.split("## ")[1].splitlines() if line.startswith("|")]
    assert [re.match(r"\| (\S+)", line)[1].replace("\\", "") for line in table_lines[2:]] == ["sft_seen", "parallel_r1_seen", "own_idea"], (
        "the paper's order"
    )
    assert "48.9 | 27.3 |" in table_lines[3] and "36.0 | 95.6 |" in table_lines[2] and "– | – |" in table_lines[4]
    assert "pass@2" in table_lines[2] and "2 seeds" in table_lines[2]
    assert page.html.count("<svg") == 4, "two of the overview, one per row with rl"
    assert not re.search(r"(?:src|href)=.?https?:|@import|url\((?!#)", page.html), "one file without a request"
    json.dumps(page.results, allow_nan=False)


def test_the_papers_questions_are_asked_and_an_own_row_is_held_against_the_first(rows: list[RowRun]) -> None:
    found = [row for row in build(Experiments(rows)).results["differences"] if row["measure"] == "mean" and row["set"] is None]
    assert [(row["after"], row["before"]) for row in found] == [("parallel_r1_seen", "sft_seen"), ("own_idea", "sft_seen")]
    assert found[0]["value"] > 0.3 and found[0]["by_seed"].keys() == {0, 1}


def test_rows_that_failed_are_said_and_their_reason_is_text(rows: list[RowRun]) -> None:
    reason = "StageFailed: <script>alert(1)</script> exit code 1"
    page = build(Experiments(rows, {"scaffold, seed 1": reason}))
    assert "Rows that failed" in page.html and "<script>" not in page.html and "&lt;script&gt;" in page.html
    assert "scaffold, seed 1" in page.markdown


def test_without_any_result_there_is_no_page() -> None:
    with pytest.raises(ValueError, match="no row has results"):
        build(Experiments([]))


def test_the_terminal_gets_the_same_numbers(rows: list[RowRun]) -> None:
    results = build(Experiments(rows)).results
    text = as_text(results)
    [line] = [line for line in text.splitlines() if line.startswith("parallel_r1_seen")]
    final = next(row for row in results["rows"] if (row["recipe"], row["measure"], row["checkpoint"]) == ("parallel_r1_seen", "mean", None))
    assert f"{100 * final['value']:.1f} ±" in line and line.count("±") == 3
    assert text.count("undecided") == len(results["claims"])


# --- the flow -------------------------------------------------------------------------------------------------------------


def recipe(folder: Path, name: str, **changes: Any) -> str:
    """A row of its own on top of the cheapest config."""
    (folder / f"{name}.yaml").write_text(json.dumps({**TINY, "name": name, **changes}))
    return str(folder / f"{name}.yaml")


def start(project: Project, *recipes: str, seeds: int = 2) -> tuple[int, str, str]:
    """`make experiments`: exit code, output, errors."""
    command = [sys.executable, "-m", "flows.run_experiments", *recipes, "--seeds", str(seeds), "--set", f"store={project.store}"]
    done = subprocess.run(command, cwd=PROJECT, env=project.environment, capture_output=True, text=True, timeout=1200)
    return done.returncode, done.stdout, done.stderr


def test_rows_share_stages_a_failed_one_is_reported_and_a_rerun_goes_on(project: Project, trained: Project, tmp_path: Path) -> None:
    shutil.copytree(trained.store, project.store)
    base, sft = recipe(tmp_path, "base", generate=None, sft=None), recipe(tmp_path, "sft_seen")
    broken = recipe(tmp_path, "sft_unseen", sft={**TINY["sft"], "max_tokens": 16})
    code, output, errors = start(project, base, broken, sft, seeds=1)
    assert code == 1 and "1 of 3 rows failed" in errors and "sft_unseen, seed 0" in errors, errors
    assert {stage: len(project.keys(stage)) for stage in ("base", "sft", "evaluate", "experiments")} == {
        "base": 1, "sft": 1, "evaluate": 2, "experiments": 1,
    }, "what was there is used, and what rows share is built once"  # fmt: skip
    [page] = project.store.glob("experiments/*/report.html")
    assert "Rows that failed" in page.read_text() and "sft_seen" in page.read_text()

    options = ("--ready", "--copy-to", f"{tmp_path}/docs", "--set", "analysis.samples=1")
    code, output, errors = start(project, base, broken, sft, *options, seeds=2)
    assert code == 0 and "sft_unseen" not in output and "seed 1" not in output, "only what is finished"
    for name in ("report.html", "README.md"):
        text = html.unescape((tmp_path / "docs" / name).read_text())
        assert re.search(r'make experiments RECIPES=.*SEEDS=2 READY=1 SET="analysis.samples=1"` at commit \w+, \d{4}-\d\d-\d\d', text)
        assert str(project.store) not in text, "where it lay is nobody's business"

    code, output, errors = start(project, base, seeds=2)
    assert code == 0, errors
    built = re.findall(r"^  (\S.*?) +starts$", output, re.MULTILINE)
    assert built.count("base") == 1 and built.count("evaluate base") == 1 and built[-1] == "experiments", "seed 0 is there, seed 1 is new"
    assert re.search(r"^base +\d", output, re.MULTILINE), "the table in the terminal"


def test_two_rows_of_one_name_are_refused(project: Project, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    code, _, errors = start(project, recipe(tmp_path, "twin"), recipe(tmp_path / "other", "twin"), seeds=1)
    assert code == 2 and "both are called 'twin'" in errors


def test_a_seed_of_ones_own_is_refused(tmp_path: Path) -> None:
    from flows.experiments import experiments

    with pytest.raises(ConfigError, match="override 'seed=7': experiments give every row its seed, 0 to 1"):
        experiments.fn([recipe(tmp_path, "one")], 2, ["seed=7"])


@pytest.mark.parametrize(("arguments", "message", "reason"), [
    (["recipes/tinny/*.yaml"], "recipes/tinny/*.yaml", "a pattern that matches nothing is named"),
    (["recipes/tiny/base.yaml", "--seeds", "0"], "SEEDS=0: one seed at least", "no seed, no row"),
    (["recipes/tiny/base.yaml", "--set", "evaluate.sampels=3"], "unknown key", "the schema checks overrides"),
])  # fmt: skip
def test_what_cannot_be_run_is_said_before_anything_starts(
    arguments: list[str], message: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(arguments)
    except SystemExit as refused:
        code = refused.code
    assert code == 2 and message in capsys.readouterr().err, reason
