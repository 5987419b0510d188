"""The report's tables, made once and written three times: HTML (by the page's template), Markdown and plain text."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from parallel_r1 import published
from parallel_r1.config import PipelineConfig
from parallel_r1.report.inputs import Evaluation, StageRun
from parallel_r1.report.numbers import NOTHING, Estimate, duration, estimate, number, signed, written
from parallel_r1.report.outcome import FEWEST_PROBLEMS, Change, over_sets, set_metrics, set_names
from parallel_r1.report.rollouts import RolloutIndex, shown

MAX_WIDTH = 120
FORM = {"parallel_ratio": "parallel ratio", "valid_ratio": "valid blocks", "truncated_ratio": "truncated"}


@dataclass(frozen=True)
class Cell:
    """A cell: its main text, what stands small under it, and how it is marked (higher, lower, published, ...)."""

    text: str
    note: str = ""
    tone: str = ""
    bar: float = 0.0
    """A bar of this many percent of its column, where one is wanted."""


@dataclass(frozen=True)
class Row:
    """A row with its header cell."""

    head: Cell
    cells: list[Cell]


@dataclass(frozen=True)
class Table:
    """A caption, the header of every column (the first names the row headers), and rows."""

    caption: str
    columns: list[Cell]
    rows: list[Row]
    notes: list[str] = field(default_factory=list)


# --- results --------------------------------------------------------------------------------------------------------------


def results(evaluations: Sequence[Evaluation]) -> Table:
    """Checkpoints by sets: mean@k with interval and pass@k, then the shares that tell of the form; below, the paper's rows."""
    names = set_names(evaluations)
    columns = [Cell("checkpoint"), *(Cell(shown(name), _size(evaluations, name)) for name in names)]
    averaged = len(names) > 1
    columns += [Cell("mean", "over sets")] * averaged + [Cell(title, "over sets" if averaged else "") for title in FORM.values()]
    rows = [_result_row(evaluation, names, averaged) for evaluation in evaluations]
    notes = ["Mean@k in percent, the share of right rollouts, with its 95 % interval over problems, and the unbiased pass@k."]
    notes.append("Valid blocks: rollouts with at least one block and no fault in the markup. Truncated: cut off by the token limit.")
    if any(one.bounded and one.half == 0 for one in _all_estimates(evaluations, names)):
        notes.append("An interval without width, such as 0.0 to 0.0, says that all problems came out alike, no more.")
    theirs = _published_rows(names, averaged)
    if theirs:
        notes.append(f"Published rows: {published.SOURCE}, {published.STUDENT} on full sets: compare students and sizes before numbers.")
        notes += map(_sentence, published.CAVEATS)
    return Table("Results", columns, rows + theirs, notes)


def _all_estimates(evaluations: Sequence[Evaluation], names: Sequence[str]) -> list[Estimate]:
    return [estimate(set_metrics(one, name), metric) for one in evaluations for name in names for metric in ("mean", *FORM)]


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _size(evaluations: Sequence[Evaluation], name: str) -> str:
    sizes = {(entry.get("problems"), entry.get("samples")) for one in evaluations if (entry := (one.results.get("sets") or {}).get(name))}
    return " or ".join(f"{problems} problem{'s' * (problems != 1)} × {samples}" for problems, samples in sorted(sizes, key=repr))


def _result_row(evaluation: Evaluation, names: Sequence[str], averaged: bool) -> Row:
    cells = [_score(evaluation, name) for name in names]
    if averaged:
        complete = all(estimate(set_metrics(evaluation, name), "mean").known for name in names)
        cells.append(_share(over_sets(evaluation, "mean")) if complete else Cell(NOTHING))
    return Row(Cell(shown(evaluation.label)), cells + [_share(over_sets(evaluation, metric)) for metric in FORM])


def _share(one: Estimate) -> Cell:
    return Cell(one.percent(), one.percents())


def _score(evaluation: Evaluation, name: str) -> Cell:
    metrics = set_metrics(evaluation, name)
    passed = pass_metric(metrics)
    entry = (evaluation.results.get("sets") or {}).get(name) or {}
    one = estimate(metrics, "mean")
    notes = [_interval_note(one, entry.get("problems"))] if one.known else []
    if passed and (share := estimate(metrics, passed)).known:
        notes.append(f"{_pass_title(passed, entry.get('samples'))} {share.percent()}")
    clean = entry.get("clean") or {}
    if clean.get("problems") and clean["problems"] != entry.get("problems"):
        notes.append(f"clean {estimate(clean['metrics'], 'mean').percent()} ({clean['problems']} problems)")
    return Cell(one.percent(), "\n".join(note for note in notes if note))


def _interval_note(one: Estimate, problems: object) -> str:
    count = number(problems)
    return "too few problems for an interval" if count < FEWEST_PROBLEMS else one.percents()


def pass_metric(metrics: Mapping[str, Any]) -> str | None:
    """The key of the unbiased pass@k with the largest k."""
    keys = [key for key in metrics if re.fullmatch(r"pass@(k|\d+)", key)]
    return max(keys, key=lambda key: math.inf if key.endswith("k") else int(key[5:]), default=None)


def _pass_title(key: str, samples: object) -> str:
    return f"pass@{samples}" if key == "pass@k" and samples else key


def _published_rows(names: Sequence[str], averaged: bool) -> list[Row]:
    if not set(names) & set(published.BENCHMARKS):
        return []
    same_sets = set(names) == set(published.BENCHMARKS)
    rows = []
    for row in published.ROWS:
        passed = {name: f"pass@16 {written(row.pass_at_16[name])}" for name in names if name in row.pass_at_16}
        cells = [Cell(written(row.scores.get(name, math.nan)), passed.get(name, ""), "published") for name in names]
        mean = written(number(row.mean)) if same_sets else NOTHING
        cells += [Cell(mean, tone="published")] * averaged
        cells += [Cell(written(number(row.parallel_ratio)), tone="published"), *[Cell(NOTHING, tone="published")] * 2]
        rows.append(Row(Cell(row.recipe, f"published{', ' * bool(row.note)}{row.note}", "published"), cells))
    return rows


def differences(found: Sequence[Change]) -> Table:
    """Every comparison of two checkpoints: points of accuracy with the interval of the difference."""
    names = list(dict.fromkeys(one.set for one in found))
    rows = []
    for before, after in dict.fromkeys((one.before, one.after) for one in found):
        by_set = {one.set: one for one in found if (one.before, one.after) == (before, after)}
        rows.append(Row(Cell(shown(f"{before} → {after}")), [_difference(by_set.get(name)) for name in names]))
    notes = ["In points of mean@k, with the 95 % interval of the difference."]
    notes.append("Coloured only where the interval leaves out zero and p Holm, where there is one, is below 0.05.")
    if any(one.paired for one in found):
        notes.append(
            "Paired: resampled over the problems of a set; p by flipping the signs of single problems' differences. "
            f"Each interval is at 95 % for itself; p Holm is corrected for all {sum(one.paired for one in found)} comparisons of the table."
        )
    if any(not one.paired for one in found):
        notes.append("Unpaired: computed from the two intervals, since the rollouts of the same problems are not at hand.")
    return Table("Differences between checkpoints", [Cell("from → to"), *(Cell(shown(name)) for name in names)], rows, notes)


def _difference(change: Change | None) -> Cell:
    if change is None:
        return Cell(NOTHING)
    few = change.problems < FEWEST_PROBLEMS
    one = change.difference
    span = f"{signed(one.low * 100)} to {signed(one.high * 100)}" if one.bounded else ""
    note = "too few problems" if few else f"{span}{'' if change.paired else ' unpaired'}"
    if change.paired and not few:
        note += f"\np {p_value(change.p)}, Holm {p_value(change.p_holm)}"
    arrow = {"higher": "▲ ", "lower": "▼ "}.get(change.verdict, "")
    return Cell(f"{arrow}{signed(one.value * 100)}", note, change.verdict.replace("not shown", ""))


def p_value(value: float) -> str:
    """A p-value as it is printed."""
    return "< 0.001" if value < 0.001 else written(value, 3)


def estimators(evaluations: Sequence[Evaluation]) -> Table:
    """One row per checkpoint and set: what each way of counting makes of the same rollouts, with the clean subset below the full set."""
    titles = {"mean": "mean@k", "pass@k": "any@k, pass@k", "maj@k": "maj@k", "best@k": "bootstrap best@k"}
    titles |= {"blocks": "blocks", "paths": "paths"}
    rows = []
    for evaluation in evaluations:
        for name, entry in (evaluation.results.get("sets") or {}).items():
            subsets = [("", entry)] + [(", clean", clean) for clean in [entry.get("clean")] if clean and clean.get("problems")]
            for suffix, subset in subsets:
                size = f"{subset.get('problems')} problems × {subset.get('samples')}"
                cells = [_counted(subset.get("metrics") or {}, metric) for metric in titles]
                rows.append(Row(Cell(shown(evaluation.label), shown(f"{name}{suffix}: {size}")), cells))
    notes = ["Percent with 95 % intervals over problems; under mean@k also ± the part of sampling: another run over the same problems."]
    notes.append("Any@k: a right one among all k: the unbiased pass@k at k samples. maj@k: the commonest answer is right, ties by share.")
    notes.append("Bootstrap best@k: what the paper calls pass@k, draws with replacement; one right of 16 counts 64.4.")
    notes.append("Clean: without the test problems that any training set of the run holds, or nearly. Blocks, paths: per rollout.")
    return Table("Ways of counting", [Cell("checkpoint, set"), *(Cell(title) for title in titles.values())], rows, notes)


def _counted(metrics: Mapping[str, Any], metric: str) -> Cell:
    if metric in ("blocks", "paths"):
        return Cell(written(estimate(metrics, metric).value, 2))
    one, entry = estimate(metrics, metric), metrics.get(metric)
    sampling = number(entry.get("sampling")) if isinstance(entry, Mapping) else math.nan
    part = f"\n± {written(sampling * 100)} sampling" if math.isfinite(sampling) else ""
    return Cell(one.percent(), f"{one.percents()}{part}")


def paper(evaluations: Sequence[Evaluation], config: PipelineConfig) -> Table | None:
    """The paper's main table with our number above its own, and whether the two can be compared. None where no set is the paper's."""
    names = [name for name in published.BENCHMARKS if name in set_names(evaluations)]
    if not names:
        return None
    columns = [Cell("checkpoint"), *(Cell(f"{name} {kind}") for name in names for kind in _kinds(name)), Cell("parallel ratio")]
    rows = []
    for evaluation in evaluations:
        theirs = published.row_for(evaluation.label, last=evaluation is evaluations[-1], config=config)
        cells = [cell for name in names for cell in _beside(evaluation, name, theirs)]
        ratio = Cell(over_sets(evaluation, "parallel_ratio").percent(), _theirs(theirs.parallel_ratio if theirs else None))
        verdict = _comparable(evaluation, names, config) if theirs else Cell("no", "the paper has no such row")
        rows.append(Row(Cell(shown(evaluation.label), theirs.recipe if theirs else ""), [*cells, ratio, verdict]))
    notes = [
        f"Percent: ours, below it {published.SOURCE}. m@16: mean over samples; p@16: on both sides the paper's estimator, a bootstrap."
    ]
    notes.append(
        "Partly: only on the benchmarks that the reasons leave out; where the student, the prompt or the budget differs, nothing is."
    )
    return Table("Beside the paper", [*columns, Cell("comparable")], rows, notes)


def _kinds(name: str) -> list[str]:
    samples = published.SAMPLES[name]
    return [f"m@{samples}", f"p@{samples}"] if samples > 1 else [f"m@{samples}"]


def _beside(evaluation: Evaluation, name: str, theirs: published.Published | None) -> list[Cell]:
    metrics = set_metrics(evaluation, name)
    cells = [Cell(estimate(metrics, "mean").percent(), _theirs(theirs.scores.get(name) if theirs else None))]
    if published.SAMPLES[name] > 1:
        cells.append(Cell(estimate(metrics, "best@k").percent(), _theirs(theirs.pass_at_16.get(name) if theirs else None)))
    return cells


def _theirs(value: float | None) -> str:
    return f"paper {written(number(value))}"


def _comparable(evaluation: Evaluation, names: Sequence[str], config: PipelineConfig) -> Cell:
    entries = {name: entry for name in names if (entry := (evaluation.results.get("sets") or {}).get(name))}
    sizes = [reason for name, entry in entries.items() for reason in published.other_set(name, entry.get("problems"), entry.get("samples"))]
    everywhere = published.other_run(config)
    return Cell("no" if everywhere else "partly" if sizes else "yes", "\n".join([*everywhere, *sizes]))


def by_set(evaluations: Sequence[Evaluation], indexes: Sequence[RolloutIndex]) -> Table:
    """One row per checkpoint and set with everything that was measured there."""
    columns = ["checkpoint, set", "mean@k", "pass@k", *FORM.values(), "tokens", "critical path", "first block at"]
    rows = []
    for evaluation, found in zip(evaluations, indexes, strict=True):
        for name in set_names([evaluation]):
            metrics = set_metrics(evaluation, name)
            cells = [_share(estimate(metrics, "mean")), _share(estimate(metrics, pass_metric(metrics) or ""))]
            cells += [_share(estimate(metrics, metric)) for metric in FORM]
            cells += [_plain(estimate(metrics, metric)) for metric in ("response_tokens", "critical_path_tokens")]
            cells.append(Cell(written(found.position(name) * 100)))
            rows.append(Row(Cell(shown(evaluation.label), shown(name)), cells))
    notes = ["Percent, but for tokens: all of a response. Critical path: of each block only its longest path counts."]
    notes.append("First block at: where the first block starts, in percent of the response; mean over rollouts that have one.")
    return Table("Every set on its own", [Cell(title) for title in columns], rows, notes)


def _plain(one: Estimate) -> Cell:
    return Cell(written(one.value), f"{written(one.low)} to {written(one.high)}" if one.bounded else "")


# --- how it went ----------------------------------------------------------------------------------------------------------


def funnel(metrics: Mapping[str, float]) -> Table:
    """The teacher's trajectories: seen, kept, and why the others went."""
    seen = number(metrics.get("seen"))
    faults = {key.removeprefix("rejected_"): number(value) for key, value in metrics.items() if key.startswith("rejected_")}
    listed = [("seen", seen), *sorted(faults.items(), key=lambda item: -item[1]), ("kept", number(metrics.get("kept")))]
    rows = []
    for title, count in listed:
        share = count / seen * 100 if seen > 0 else math.nan
        tone = title if title in ("seen", "kept") else "rejected"
        label = title if tone == title else f"rejected: {shown(title).replace('_', ' ')}"
        rows.append(Row(Cell(label, tone=tone), [Cell(written(count, 0)), Cell(written(share), bar=share if math.isfinite(share) else 0)]))
    gone, counted = seen - number(metrics.get("kept")), math.fsum(faults.values())
    notes = ["A trajectory may have several faults and is counted under each."] if counted > gone else []
    return Table("From the teacher to the student", [Cell("trajectories"), Cell("count"), Cell("percent of seen")], rows, notes)


def stages(runs: Sequence[StageRun], evaluations: Sequence[Evaluation]) -> Table:
    """Seconds, speed, versions and the artifact of every stage; the seconds are those of the run that built the artifact."""
    speeds = {one.label: one.results.get("tokens_per_second") for one in evaluations}
    rows = []
    for run in runs:
        speed = run.metrics.get("tokens_per_second", speeds.get(run.label) if run.stage == "evaluate" else None)
        cells = [Cell(duration(number(run.seconds))), Cell(written(number(speed), 0))]
        cells += [Cell(shown(run.key[:12]), tone="code"), versions(run)]
        rows.append(Row(Cell(shown(run.stage), shown(run.label) if run.label != run.stage else ""), cells))
    total = math.fsum(seconds for run in runs if math.isfinite(seconds := number(run.seconds)))
    rows.append(Row(Cell("all stages", tone="total"), [Cell(duration(total), tone="total"), *[Cell("", tone="total")] * 3]))
    columns = [Cell("stage"), Cell("time"), Cell("tokens/s"), Cell("artifact"), Cell("versions")]
    return Table("Stages", columns, rows, ["Time is that of the run that built the artifact; a later run takes it from the store."])


def versions(run: StageRun) -> Cell:
    """Versions of a stage in one cell."""
    return Cell(", ".join(f"{shown(name)} {shown(version)}" for name, version in run.versions.items()) or NOTHING, tone="text")


# --- writing --------------------------------------------------------------------------------------------------------------


def as_markdown(table: Table) -> str:
    """A GitHub-flavoured table with its notes."""
    lines = ["| " + " | ".join(_markdown_cell(cell) for cell in table.columns) + " |", "|" + " --- |" * len(table.columns)]
    lines += ["| " + " | ".join(_markdown_cell(cell) for cell in (row.head, *row.cells)) + " |" for row in table.rows]
    return "\n".join(lines + [f"\n{escape_markdown(note)}" for note in table.notes])


def _markdown_cell(cell: Cell) -> str:
    note = escape_markdown(cell.note.replace("\n", ", "))
    return f"{escape_markdown(cell.text)} ({note})" if note else escape_markdown(cell.text)


def escape_markdown(text: str) -> str:
    """Text that Markdown shows as it is, in a table cell too."""
    flat = re.sub(r"\s+", " ", text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|#~])", r"\\\1", flat)


def results_table(evaluations: Sequence[Evaluation]) -> str:
    """The results as plain text of at most 120 columns: percents ± half the width of the 95 % interval."""
    names = set_names(evaluations)
    if not names:
        return "No checkpoint has been evaluated."
    columns = [(shown(name), [estimate(set_metrics(one, name), "mean") for one in evaluations]) for name in names]
    columns += [(title, [over_sets(one, metric) for one in evaluations]) for metric, title in FORM.items()]
    grid = [[_clip(title, 18), *(_text_cell(one) for one in estimates)] for title, estimates in columns]
    labels = ["checkpoint", *(_clip(shown(one.label), 30) for one in evaluations)]
    widest = max(map(len, labels))
    blocks, line = [], [labels]
    for column in grid:
        if sum(max(map(len, one)) + 2 for one in (*line, column)) > MAX_WIDTH:
            blocks, line = [*blocks, line], [labels]
        line.append(column)
    text = "\n\n".join(aligned(block, widest) for block in (*blocks, line))
    return f"{text}\n\npercent, ± half of the 95 % interval over problems; shares of blocks and cuts: mean over sets"


def _clip(text: str, width: int) -> str:
    flat = re.sub(r"\s+", " ", text)
    return flat if len(flat) <= width else f"{flat[: width - 1]}…"


def _text_cell(one: Estimate) -> str:
    return f"{one.percent()} ±{written(one.half * 100)}" if one.bounded else one.percent()


def aligned(columns: Sequence[Sequence[str]], first: int) -> str:
    """Columns of text as lines; the first is `first` wide, the others hold numbers."""
    widths = [first, *(max(map(len, column)) for column in columns[1:])]
    lines = []
    for row in zip(*columns, strict=True):
        numbers = [text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(first), *numbers]).rstrip())
    return "\n".join([lines[0], "─" * max(map(len, lines)), *lines[1:]])
