"""The page about several recipes at several seeds: the paper's table with intervals over problems and seeds, its claims, its curves."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any

from parallel_r1 import claims, published
from parallel_r1.analysis import depth_of_rows
from parallel_r1.config import ScratchStudent
from parallel_r1.experiments import COSTS, Estimate, RowRun, Table as Measured, by_recipe, estimate, gains, means, measured, table
from parallel_r1.jobs import RESULTS
from parallel_r1.metrics import holm
from parallel_r1.report import analysis, numbers
from parallel_r1.report.claims import claims_table
from parallel_r1.report.numbers import NOTHING, duration, number, signed, written
from parallel_r1.report.page import Report, template
from parallel_r1.report.rollouts import encodable, shown
from parallel_r1.report.tables import Cell, Row, Table, aligned, as_markdown, escape_markdown, p_value

Rows = Mapping[str, Sequence[RowRun]]
RATIO = "parallel_ratio"
SHARES = ("mean", "pass@k", RATIO, "valid_ratio", "truncated_ratio")

QUESTIONS = (
    ("sft_seen", "base"),
    ("sft_unseen", "base"),
    ("grpo_dapo", "base"),
    ("parallel_r1_seen", "sft_seen"),
    ("parallel_r1_seen", "grpo_dapo"),
    ("parallel_r1_seen", "grpo_gsm8k_dapo"),
    ("parallel_r1_unseen_s1", "sft_unseen"),
    ("parallel_r1_unseen_s1", "grpo_dapo"),
    ("parallel_r1_unseen_s1", "parallel_r1_seen"),
    ("parallel_r1_unseen_s2", "parallel_r1_unseen_s1"),
    ("scaffold", "parallel_r1_unseen_s1"),
    ("parallel_only", "parallel_r1_unseen_s1"),
    ("seen_without_rl_easy", "parallel_r1_seen"),
    ("unseen_with_rl_easy", "parallel_r1_unseen_s1"),
    ("without_cold_start", "parallel_r1_seen"),
    ("without_parallel_prompt", "parallel_r1_seen"),
)
"""Which row of the paper asks to be held against which."""


@dataclass(frozen=True)
class Experiments:
    """What the page is made from. `failed`: why a row has no results, by its title. `seconds`: of all rows' rl and evaluation stages."""

    runs: Sequence[RowRun]
    failed: Mapping[str, str] = field(default_factory=dict)
    seconds: float = math.nan


@dataclass(frozen=True)
class Difference(Estimate):
    """Of two rows, on the same problems at the same seeds, with the interval and the p of the claims' test."""

    p: float
    problems: int


@dataclass(frozen=True)
class Comparison:
    """One row against another: accuracy by set and over all sets (under None), and the parallel ratio."""

    after: str
    before: str
    accuracy: Mapping[str | None, Difference]
    ratio: Difference
    p_holm: float = math.nan


def build(experiments: Experiments) -> Report:
    """Make the page. Raises ValueError where no row has results."""
    from parallel_r1.report import row_figures  # matplotlib takes half a second to load

    rows = _as_in_the_paper(by_recipe(experiments.runs))
    if not rows:
        raise ValueError("no row has results")
    compared = compare(rows)
    verdicts = claims.judge(experiments.runs)
    tables = {
        "results": results_table(rows),
        "claims": claims_table(verdicts),
        "differences": differences_table(rows, compared) if compared else None,
        "depth": analysis.depth_of_rows(entries) if (entries := depth_of_rows(experiments.runs)) else None,
        "checkpoints": checkpoints_table(rows),
        "seeds": seeds_table(rows),
        "by_set": by_set_table(rows),
        "failed": failed_table(experiments.failed) if experiments.failed else None,
    }
    title = f"{_count(len(rows), 'recipe')}, {_count(len(_seeds(rows)), 'seed')}"
    words = {"title": title, "facts": _facts(rows, experiments), "lead": _lead(rows, verdicts)}
    figures = {"overview": row_figures.overview(rows), "curves": row_figures.training(rows)}
    html = template("experiments.html.j2").render(**words, **figures, tables=tables)
    return Report(encodable(html), encodable(_markdown(tables=tables, **words)), _results(rows, compared, verdicts))


def _as_in_the_paper(rows: Rows) -> Rows:
    """In the order of the paper's tables; what isn't there comes last."""
    order = [row.recipe for row in (*published.ROWS, *published.ABLATIONS)]
    return dict(sorted(rows.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)))


# --- what is said ---------------------------------------------------------------------------------------------------------


def _lead(rows: Rows, verdicts: Sequence[claims.Verdict]) -> list[str]:
    """How the claims came out, and what the numbers can carry."""
    counts = {outcome: sum(one.outcome == outcome for one in verdicts) for outcome in ("reproduced", "not reproduced", "undecided")}
    came = ", ".join(f"{count} came out {outcome}" for outcome, count in counts.items())
    first = f"Of {_count(len(verdicts), 'claim')} of the paper, {came}."
    scratch = any(isinstance(run.config.student, ScratchStudent) for runs in rows.values() for run in runs)
    small = "The students are small models made from scratch on procedural problems: this page tests the method's claims at that scale, " \
            "and its levels say nothing about the paper's."  # fmt: skip
    doubt = "problems and seeds" if len(_seeds(rows)) > 1 else "problems alone: one seed says nothing of another"
    return [first, *[small] * scratch, f"Every interval is 95 %, over {doubt}."]


def _facts(rows: Rows, experiments: Experiments) -> list[tuple[str, str]]:
    first = next(iter(rows.values()))[0]
    engine = json.loads((first.evaluations[first.final] / RESULTS).read_text(encoding="utf-8"))["engine"]
    student = first.config.student
    named = "a small model trained from scratch" if isinstance(student, ScratchStudent) else shown(student.name)
    facts = [("seeds", ", ".join(map(str, _seeds(rows)))), ("student", named), ("engine", shown(engine))]
    return [*facts, ("stages of rl and evaluation", duration(experiments.seconds))]


def _seeds(rows: Rows) -> list[int]:
    return sorted({run.seed for runs in rows.values() for run in runs})


def _count(number_of: int, what: str) -> str:
    return f"{number_of} {what}{'s' * (number_of != 1)}"


# --- tables ---------------------------------------------------------------------------------------------------------------


def _sets(rows: Rows) -> list[str]:
    return list(dict.fromkeys(name for runs in rows.values() for run in runs for name in _entries(run)))


def _entries(run: RowRun, title: str | None = None) -> Mapping[str, Any]:
    return json.loads((run.evaluations[title or run.final] / RESULTS).read_text(encoding="utf-8"))["sets"]


def _cell(one: Estimate, *notes: str) -> Cell:
    shape = numbers.Estimate(one.value, one.low, one.high)
    return Cell(shape.percent(), "\n".join(note for note in (shape.percents(), *notes) if note))


def results_table(rows: Rows) -> Table:
    """The paper's layout: recipes by sets with mean@k and pass@k, their mean, the parallel ratio; the paper's numbers beside ours."""
    names = _sets(rows)
    first = _entries(next(iter(rows.values()))[0])
    sizes = {name: f"{entry['problems']} problems × {entry['samples']}" for name, entry in first.items()}
    columns = [Cell("recipe"), *(Cell(shown(name), sizes.get(name, "")) for name in names)]
    columns += [Cell("mean", "over sets"), Cell("parallel", "ratio"), Cell("valid", "blocks")]
    columns += [Cell("paper", "mean"), Cell("paper", "ratio")]
    body = []
    for recipe, runs in rows.items():
        theirs = published.row_of(recipe)
        cells = [_set_cell(runs, name, theirs) for name in names]
        cells += [_cell(estimate(table(runs, measure))) for measure in ("mean", RATIO, "valid_ratio")]
        cells += [Cell(written(number(value)), tone="published") for value in (theirs and theirs.mean, theirs and theirs.parallel_ratio)]
        seeds = _count(len(runs), "seed")
        body.append(Row(Cell(shown(recipe), seeds), cells))
    notes = ["Mean@k of the last checkpoint in percent with its 95 % interval over problems and seeds, and the unbiased pass@k."]
    notes.append("Parallel ratio: rollouts with a block; valid blocks: with one and no fault in the markup; both as means over sets.")
    notes.append(f"The paper's numbers ({published.SOURCE}) are for {published.STUDENT} on {', '.join(published.BENCHMARKS)}.")
    return Table("Results", columns, body, notes)


def _set_cell(runs: Sequence[RowRun], name: str, theirs: published.Published | None) -> Cell:
    mine = [run for run in runs if name in _entries(run)]
    if not mine:
        return Cell(NOTHING)
    passed = fmean(means(table(mine, "pass@k", [name])).values())
    samples = _entries(mine[0])[name]["samples"]
    paper = f"paper {written(theirs.scores[name])}" if theirs and name in theirs.scores else ""
    return _cell(estimate(table(mine, "mean", [name])), f"pass@{samples} {written(passed * 100)}", paper)


def compare(rows: Rows) -> list[Comparison]:
    """The paper's questions that the rows can answer; a row that no question names is held against the first one."""
    pairs = [(after, before) for after, before in QUESTIONS if after in rows and before in rows]
    asked = {name for pair in pairs for name in pair}
    first = next(iter(rows))
    pairs += [(name, first) for name in rows if name not in asked and name != first]
    found = [one for after, before in pairs if (one := _compare(rows, after, before))]
    adjusted = holm([one.accuracy[None].p for one in found])
    return [replace(one, p_holm=p) for one, p in zip(found, adjusted, strict=True)]


def _compare(rows: Rows, after: str, before: str) -> Comparison | None:
    by_set = {name: difference(_of_set(rows[before], name), _of_set(rows[after], name)) for name in _sets(rows)}
    overall = difference(table(rows[before]), table(rows[after]))
    ratio = difference(table(rows[before], RATIO), table(rows[after], RATIO))
    if overall is None or ratio is None:
        return None
    return Comparison(after, before, {None: overall} | {name: found for name, found in by_set.items() if found}, ratio)


def difference(before: Measured, after: Measured) -> Difference | None:
    """`after` minus `before`, problem by problem within each seed that both have; None where they share nothing."""
    found = gains(before, after)
    if not found:
        return None
    value, low, high, p = measured(found)
    return Difference(value, low, high, means(found), p, sum(len(problems) for sets in found.values() for problems in sets.values()))


def _of_set(runs: Sequence[RowRun], name: str) -> Measured:
    return table([run for run in runs if name in _entries(run)], "mean", [name])


def differences_table(rows: Rows, compared: Sequence[Comparison]) -> Table:
    """Points that one row is above another, on the same problems at the same seeds."""
    names = _sets(rows)
    columns = [Cell("row − row"), Cell("accuracy", "over all sets"), *(Cell(shown(name)) for name in names)]
    columns += [Cell("parallel ratio"), Cell("seeds higher")]
    body = []
    for one in compared:
        overall = one.accuracy[None]
        test = f"p {p_value(overall.p)}, Holm {p_value(one.p_holm)}"
        cells = [_points(overall, test), *(_points(one.accuracy.get(name)) for name in names), _points(one.ratio)]
        higher = sum(value > 0 for value in overall.by_seed.values())
        body.append(Row(Cell(shown(one.after), f"− {shown(one.before)}"), [*cells, Cell(f"{higher} of {len(overall.by_seed)}")]))
    notes = ["Points of percent with the 95 % interval; ▲ ▼ where it leaves out zero. Problems are paired within a seed. Interval and p: "
             f"{claims.TEST}, as for the claims; Holm: p corrected for the number of rows here."]  # fmt: skip
    notes.append(
        "Three seeds leave the test two degrees of freedom: only differences that are large against their spread over seeds come out."
    )
    notes.append("One seed is tested over its problems alone, and gets no arrow: two trainings differ by more than that.")
    return Table("Differences", columns, body, notes)


def _points(one: Difference | None, test: str = "") -> Cell:
    if one is None:
        return Cell(NOTHING)
    decided = len(one.by_seed) > 1
    tone = "higher" if decided and one.low > 0 else "lower" if decided and one.high < 0 else ""
    arrow = {"higher": "▲ ", "lower": "▼ ", "": ""}[tone]
    span = f"{signed(one.low * 100)} to {signed(one.high * 100)}"
    return Cell(f"{arrow}{signed(one.value * 100)}", "\n".join(filter(None, (span, test))), tone)


def checkpoints_table(rows: Rows) -> Table:
    """Accuracy and parallel ratio of every checkpoint on the way to the last one."""
    places = [(place, title) for runs in rows.values() for run in runs for place, title in enumerate(run.evaluations)]
    titles = sorted({title: None for _, title in places}, key=lambda title: max(place for place, other in places if other == title))
    body = []
    for recipe, runs in rows.items():
        cells = []
        for title in titles:
            there = table(runs, "mean", title=title)
            ratio = means(table(runs, RATIO, title=title))
            cells.append(_cell(estimate(there), f"ratio {written(fmean(ratio.values()) * 100)}") if there else Cell(""))
        body.append(Row(Cell(shown(recipe)), cells))
    notes = ["Mean@k over all sets in percent with its 95 % interval over problems and seeds; below it the parallel ratio."]
    return Table("On the way", [Cell("recipe"), *(Cell(shown(title)) for title in titles)], body, notes)


def seeds_table(rows: Rows) -> Table:
    """Every seed's own accuracy and parallel ratio."""
    seeds = _seeds(rows)
    body = []
    for recipe, runs in rows.items():
        accuracy, ratio = means(table(runs)), means(table(runs, RATIO))
        measured_at = {seed: Cell(written(accuracy[seed] * 100), f"ratio {written(ratio[seed] * 100)}") for seed in accuracy}
        body.append(Row(Cell(shown(recipe)), [measured_at.get(seed, Cell(NOTHING)) for seed in seeds]))
    columns = [Cell("recipe"), *(Cell(f"seed {seed}") for seed in seeds)]
    return Table("Every seed", columns, body, ["Mean@k over all sets, and the parallel ratio, in percent."])


def by_set_table(rows: Rows) -> Table:
    """Form and cost on every set."""
    shares = {RATIO: "parallel ratio", "valid_ratio": "valid blocks", "truncated_ratio": "truncated"}
    body = []
    for recipe, runs in rows.items():
        for name in _sets(rows):
            mine = [run for run in runs if name in _entries(run)]
            cells = [_cell(estimate(table(mine, measure, [name]))) for measure in shares]
            costly = [estimate(table(mine, measure, [name]), math.inf) for measure in COSTS]
            cells += [Cell(written(one.value), f"{written(one.low)} to {written(one.high)}") for one in costly]
            body.append(Row(Cell(shown(recipe), shown(name)), cells))
    notes = ["Percent, but for tokens: all of a response. Critical path: of each block only its longest path counts."]
    return Table("Every set on its own", [Cell("recipe, set"), *map(Cell, (*shares.values(), "tokens", "critical path"))], body, notes)


def failed_table(failed: Mapping[str, str]) -> Table:
    """Rows that have no results, and why."""
    rows = [Row(Cell(shown(title)), [Cell(shown(reason), tone="text")]) for title, reason in failed.items()]
    return Table("Rows that failed", [Cell("row"), Cell("why")], rows, ["Run again: what is finished is kept, and these rows go on."])


# --- the same as text and as data -------------------------------------------------------------------------------------------


def _markdown(title: str, lead: Sequence[str], facts: Sequence[tuple[str, str]], tables: Mapping[str, Table | None]) -> str:
    listed = "\n".join(f"- {escape_markdown(name)}: {escape_markdown(text)}" for name, text in facts)
    parts = [f"# {escape_markdown(title)}", escape_markdown(" ".join(lead)), listed]
    for one in tables.values():
        parts += [f"## {escape_markdown(one.caption)}", as_markdown(one)] if one else []
    return "\n\n".join(parts) + "\n"


def _results(rows: Rows, compared: Sequence[Comparison], verdicts: Sequence[claims.Verdict]) -> dict[str, Any]:
    """Every number as a row: means over all sets by checkpoint (None: the last one), and by set. None where a number is unknown."""
    by_row = [
        {"recipe": recipe, "checkpoint": title, "measure": measure, **_plain(estimate(table(runs, measure, title=title), most))}
        for recipe, runs in rows.items()
        for title in (None, *runs[0].evaluations)
        for measure, most in (dict.fromkeys(SHARES, 1.0) | dict.fromkeys(COSTS, math.inf)).items()
    ]
    by_set = [
        {"recipe": recipe, "set": name, "measure": "mean", **_plain(estimate(_of_set(runs, name)))}
        for recipe, runs in rows.items()
        for name in _sets(rows)
    ]
    differences = [
        {"after": one.after, "before": one.before, "set": name, "measure": "mean", **_plain(gain)}
        for one in compared
        for name, gain in one.accuracy.items()
    ]
    differences += [{"after": one.after, "before": one.before, "set": None, "measure": RATIO, **_plain(one.ratio)} for one in compared]
    judged = [{"claim": one.claim, "outcome": one.outcome, "sentence": one.sentence} for one in verdicts]
    return {"rows": by_row, "sets": by_set, "differences": differences, "claims": judged}


def as_text(results: Mapping[str, Any]) -> str:
    """The table of a page's `results.json` for a terminal: percents ± half of the interval, then the claims."""
    recipes = list(dict.fromkeys(row["recipe"] for row in results["rows"]))
    sets = list(dict.fromkeys(row["set"] for row in results["sets"]))
    by_set = {(row["recipe"], row["set"]): row for row in results["sets"]}
    overall = {(row["recipe"], row["measure"]): row for row in results["rows"] if row["checkpoint"] is None}
    columns = [["recipe", *recipes], *([name, *(_short(by_set.get((recipe, name))) for recipe in recipes)] for name in sets)]
    for title, measure in (("mean", "mean"), ("parallel", RATIO)):
        columns.append([title, *(_short(overall[recipe, measure]) for recipe in recipes)])
    judged = [f"{one['outcome']:<16} {one['claim']}" for one in results["claims"]]
    return "\n".join([aligned(columns, max(map(len, columns[0]))), "", *judged])


def _short(row: Mapping[str, Any] | None) -> str:
    return f"{written(100 * row['value'])} ±{written(50 * (row['high'] - row['low']))}" if row else NOTHING


def _plain(one: Estimate) -> dict[str, Any]:
    return {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in asdict(one).items()}
