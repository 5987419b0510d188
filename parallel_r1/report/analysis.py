"""The report's section on the blocks of a run, from what parallel_r1/analysis.py found: tables, and rollouts side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from parallel_r1 import published
from parallel_r1.report.numbers import NOTHING, estimate, number, signed, written
from parallel_r1.report.outcome import FEWEST_PROBLEMS
from parallel_r1.report.rollouts import SampleRollout, lay_out, shown
from parallel_r1.report.tables import Cell, Row, Table, p_value

Found = Mapping[str, Any]


@dataclass(frozen=True)
class Pair:
    """A rollout of the first step of an rl stage beside one of its last."""

    early: SampleRollout
    late: SampleRollout


@dataclass(frozen=True)
class StagePairs:
    """Early and late rollouts of one rl stage, with the steps they are of."""

    stage: str
    first: int
    last: int
    pairs: list[Pair]


def summary(found: Found) -> list[str]:
    """What the section shows, in a sentence or two."""
    return [*_moved(found["trends"]), *_lost(found["paths"])]


def _moved(stages: Sequence[Found]) -> Iterator[str]:
    windows = [window for stage in stages for window in stage["windows"] if window["position"]["value"] is not None]
    if len(windows) > 1:
        start, end, few, many = (
            estimate(one, key).percent() for key in ("position", "parallel_ratio") for one in (windows[0], windows[-1])
        )  # fmt: skip
        moved = f"the first block moved from {start} to {end} % of the response"
        yield f"Over rl, {moved}, and responses with a block went from {few} to {many} %."


def _lost(by_label: Mapping[str, Found]) -> Iterator[str]:
    label = next(reversed(by_label), None)
    entry = by_label[label] if label else {}
    if entry and entry["agreement"]["n"] >= FEWEST_PROBLEMS:
        agreed, right, reached = (estimate(entry, key) for key in ("agreement", "right", "any_path_right"))
        told = f"The paths of {shown(label)} agree in {agreed.percent()} % of blocks"
        yield f"{told}; a path is right in {reached.percent()} %, the response in {right.percent()} % of them."


def tables(found: Found) -> list[Table]:
    """The tables for which there is anything to show."""
    made = [
        paths(found["paths"]) if found["paths"] else None,
        depth(found["depth"]) if found["depth"] else None,
        behaviour(found["behaviour"]) if found["behaviour"] else None,
    ]
    return [table for table in made if table]


def paths(by_label: Mapping[str, Found]) -> Table:
    """One row per checkpoint: how alike the paths of a block are, whether they agree, and what the response makes of it."""
    columns = [
        Cell("checkpoint", "blocks"), Cell("BLEU of paths", f"paper {published.PATH_DIVERSITY_BLEU:.3f}"), Cell("paths agree"),
        Cell("right", "where they agree"), Cell("right", "where they don't"), Cell("right", "all of these"), Cell("a path is right"),
        Cell("right", "of split, a path right"),
    ]  # fmt: skip
    keys = ("agreement", "right_where_agreed", "right_where_split", "right", "any_path_right", "right_of_split_with_a_right_path")
    rows = []
    for label, entry in by_label.items():
        alike = estimate(entry, "similarity")
        bleu = Cell(written(alike.value, 3), f"{written(alike.low, 3)} to {written(alike.high, 3)}" if alike.bounded else "")
        rows.append(Row(Cell(shown(label), f"{entry['blocks']:,}"), [bleu, *(_share(entry, key) for key in keys)]))
    notes = ["Percent with 95 % intervals over problems, all sets together; BLEU from 0 to 1, mean over pairs of paths, 1 for copies."]
    notes.append(
        "A path's answer is what the grader would extract of it, else its last number. Only blocks whose paths all have one are counted, "
        f"and none has an interval with fewer than {FEWEST_PROBLEMS}. A path is right, yet the response is wrong: what the summaries lose."
    )
    return Table("The paths of a block", columns, rows, notes)


def _share(entry: Found, key: str) -> Cell:
    one, count = estimate(entry, key), entry[key]["n"]
    return Cell(one.percent(), f"{one.percents() if count >= FEWEST_PROBLEMS else ''}\nof {count:,}")


def depth(entries: Sequence[Found]) -> Table:
    """Every checkpoint with blocks against a sequential one, at equal depth and at equal tokens."""
    columns = [
        Cell("checkpoint", "against, set"), Cell("budget", "tokens"), Cell("tokens", "sequential"), Cell("tokens", "parallel, all"),
        Cell("tokens", "critical path"), Cell("at equal critical path", "points"), Cell("at equal tokens", "points"),
    ]  # fmt: skip
    rows = []
    for entry in entries:
        head = Cell(shown(entry["checkpoint"]), shown(f"− {entry['sequential']}, {entry['set']}"))
        means = [Cell(written(number(entry[f"mean_{what}"]))) for what in ("sequential", "tokens", "critical_path")]
        differences = [_difference(entry[what]) for what in ("critical_path", "tokens")]
        rows.append(Row(head, [Cell(written(entry["budget"], 0)), *means, *differences]))
    notes = [BUDGET_NOTE, "Paired by problem, 95 % intervals, one training each. The sequential checkpoint of a run is its base model, "
             "which had no rl: what blocks are worth against sequential rl is a comparison of two recipes (make experiments)."]  # fmt: skip
    return Table("Equal depth, equal tokens", columns, rows, notes)


BUDGET_NOTE = (
    "Difference in accuracy where an answer counts only within the budget, the depth that 90 % of the parallel responses need. "
    "Parallel thinking buys depth: along the critical path a block costs its longest path, in tokens all of them."
)


def depth_of_rows(entries: Sequence[Found]) -> Table:
    """Every row with blocks against the sequential row that had as much rl."""
    tested = "Points over seeds and problems, 95 % intervals by a t-test over seeds that is clustered by seed and by problem."
    return replace(depth(entries), notes=[BUDGET_NOTE, tested])


def _difference(found: Found | None) -> Cell:
    if found is None:
        return Cell(NOTHING)
    tone = "higher" if found["low"] > 0 else "lower" if found["high"] < 0 else ""
    tone = tone if found.get("seeds", 2) > 1 else ""
    span = f"{signed(100 * found['low'])} to {signed(100 * found['high'])}"
    return Cell(signed(100 * found["value"]), f"{span}\np {p_value(found['p'])}", tone)


def behaviour(by_stage: Mapping[str, Sequence[Found]]) -> Table:
    """Of every rl stage, what rollouts did at its beginning and at its end, and what each kind earned."""
    columns = [Cell(title) for title in ("stage, rollout", "first third, %", "last third, %", "mean reward", "seen")]
    rows = []
    for stage, entries in by_stage.items():
        for entry in (entry for entry in entries if entry["n"]):
            reward = estimate(entry, "reward")
            span = f"{written(reward.low, 2)} to {written(reward.high, 2)}" if reward.bounded and reward.low < reward.high else ""
            did = f"{'right' if entry['correct'] else 'wrong'}, {entry['form']}"
            shares = [Cell(written(100 * entry[when])) for when in ("early", "late")]
            rows.append(Row(Cell(did, shown(stage)), [*shares, Cell(written(reward.value, 2), span), Cell(written(entry["n"], 0))]))
    notes = ["Of the rollouts that rl kept of every step (rl.N.sample_rollouts). Malformed: any fault in the markup, in a block or not."]
    return Table("Behaviour and reward in rl", columns, rows, notes)


def sequential(found: Found) -> dict[str, str]:
    """By set, the sequential checkpoint that the last one is compared with."""
    return {entry["set"]: entry["sequential"] for entry in found["depth"]}


def samples(found: Found) -> list[StagePairs]:
    """Early and late rollouts of every rl stage."""
    return [StagePairs(shown(stage), *_steps(pair), list(_pairs(pair))) for stage, pair in found["samples"].items() if pair["early"]]


def _steps(pair: Found) -> tuple[int, int]:
    return pair["early"][0]["step"], pair["late"][0]["step"]


def _pairs(pair: Found) -> Iterator[Pair]:
    for early, late in zip(pair["early"], pair["late"], strict=False):
        yield Pair(lay_out(early), lay_out(late))
