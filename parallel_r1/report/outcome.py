"""What the run shows: differences between checkpoints with intervals, and the paragraph that says no more than they carry."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from parallel_r1.metrics import holm, paired_difference
from parallel_r1.report.inputs import Evaluation
from parallel_r1.report.numbers import Estimate, duration, estimate, mean_of, signed
from parallel_r1.report.rollouts import RolloutIndex

FEWEST_PROBLEMS = 10
"""With fewer problems a bootstrap interval is too short to be believed, so no claim is made from one."""

LEVEL = 0.05
"""Of the paired tests, corrected for how many there are."""
MUCH_TRUNCATED = 0.1
PERCENT = "\u00a0%"


@dataclass(frozen=True)
class Change:
    """Accuracy of `after` minus accuracy of `before` on one set. `paired`: resampled over the problems that both have."""

    before: str
    after: str
    set: str
    difference: Estimate
    problems: int
    paired: bool
    p: float = math.nan
    """Of the paired permutation test."""
    p_holm: float = math.nan
    """The same, corrected for the number of comparisons of the run."""

    @property
    def verdict(self) -> str:
        """higher or lower where the interval leaves out zero and the corrected test, where there is one, agrees; else 'not shown'."""
        if self.problems < FEWEST_PROBLEMS or not self.difference.bounded or self.p_holm >= LEVEL:
            return "not shown"
        if self.difference.low > 0:
            return "higher"
        return "lower" if self.difference.high < 0 else "not shown"


def set_metrics(evaluation: Evaluation, name: str) -> Mapping[str, object]:
    """Metrics of a set of results.json; empty where the checkpoint was not measured on it."""
    return ((evaluation.results.get("sets") or {}).get(name) or {}).get("metrics") or {}


def set_names(evaluations: Sequence[Evaluation]) -> list[str]:
    """Every evaluated set, in order of first appearance."""
    return list(dict.fromkeys(name for one in evaluations for name in one.results.get("sets") or {}))


def over_sets(evaluation: Evaluation, metric: str) -> Estimate:
    """Mean of a metric over the sets of a checkpoint."""
    return mean_of([estimate(set_metrics(evaluation, name), metric) for name in evaluation.results.get("sets") or {}])


def changes(evaluations: Sequence[Evaluation], indexes: Sequence[RolloutIndex]) -> list[Change]:
    """Every checkpoint against the one before, then the last against the first and against the one after sft."""
    last = len(evaluations) - 1
    pairs = [(i, i + 1) for i in range(last)]
    cold_start = next((i for i, one in enumerate(evaluations) if one.label == "sft"), None)
    pairs += [(i, last) for i in (cold_start, 0) if i is not None and i < last and (i, last) not in pairs]
    names = set_names(evaluations)
    found = [_change(evaluations[i], evaluations[j], indexes[i], indexes[j], name) for i, j in dict.fromkeys(pairs) for name in names]
    return _corrected([one for one in found if one.difference.known])


def _corrected(found: list[Change]) -> list[Change]:
    adjusted = iter(holm([one.p for one in found if one.paired]))
    return [replace(one, p_holm=next(adjusted)) if one.paired else one for one in found]


def _change(before: Evaluation, after: Evaluation, old: RolloutIndex, new: RolloutIndex, name: str) -> Change:
    old_rows, new_rows = old.correct.get(name, {}), new.correct.get(name, {})
    if paired := paired_difference(old_rows, new_rows):
        difference = Estimate(paired.value, paired.low, paired.high)
        return Change(before.label, after.label, name, difference, paired.problems, paired=True, p=paired.p)
    problems = min(int((one.results.get("sets") or {}).get(name, {}).get("problems") or 0) for one in (before, after))
    difference = _unpaired(estimate(set_metrics(before, name), "mean"), estimate(set_metrics(after, name), "mean"))
    return Change(before.label, after.label, name, difference, problems, paired=False)


def _unpaired(before: Estimate, after: Estimate) -> Estimate:
    """Difference of two independent estimates from their intervals (square-and-add, Newcombe 1998)."""
    value = after.value - before.value
    below = math.hypot(after.value - after.low, before.high - before.value)
    above = math.hypot(after.high - after.value, before.value - before.low)
    return Estimate(value, value - below, value + above)


# --- the paragraph --------------------------------------------------------------------------------------------------------


def summary(evaluations: Sequence[Evaluation], found: Sequence[Change], seconds: float) -> list[str]:
    """The outcome in a few sentences, computed from the results."""
    if not any(set_names([one]) for one in evaluations):
        return ["No checkpoint of this run has been evaluated, so the page shows how it went, but no outcome."]
    measured = [one for one in evaluations if set_names([one])]
    first, last = measured[0], measured[-1]
    if first is last:
        sentences = [f"Only one checkpoint was evaluated, {last.label}: {_levels(last)}."]
    else:
        reference = next((one for one in measured[:-1] if one.label == "sft"), first)
        sentences = [_compare(reference, last, found)]
        if reference is not first:
            sentences.append(_compare(first, last, found))
    sentences += _form(measured)
    if math.isfinite(seconds) and seconds > 0:
        sentences.append(f"All stages together took {duration(seconds)}.")
    closing = f"Intervals are 95{PERCENT}, over the problems of a set; they say nothing about another seed, and this is one run."
    return [*sentences, closing]


def _levels(evaluation: Evaluation) -> str:
    levels = [(name, estimate(set_metrics(evaluation, name), "mean")) for name in set_names([evaluation])]
    return ", ".join(f"{name} {_with_interval(one)}" for name, one in levels)


def _with_interval(one: Estimate) -> str:
    return f"{one.percent()}{PERCENT} ({one.percents()})" if one.bounded else f"{one.percent()}{PERCENT}"


def _compare(before: Evaluation, after: Evaluation, found: Sequence[Change]) -> str:
    mine = [one for one in found if (one.before, one.after) == (before.label, after.label)]
    if not mine:
        return f"{before.label} and {after.label} were not measured on the same sets."
    clauses = []
    for verdict in ("higher", "lower"):
        parts = [f"on {one.set} by {_points(one, after)}" for one in mine if one.verdict == verdict]
        if parts:
            clauses.append(f"is {verdict} {_listed(parts)}")
    rest = [f"{one.set} ({_span(one)})" for one in mine if one.verdict == "not shown"]
    opening = f"Against {before.label}, the accuracy of {after.label}"
    if not clauses:
        return f"{opening} shows no difference that intervals and corrected tests carry: {_listed(rest)}."
    tail = f"; on {_listed(rest)} the run shows no difference" if rest else ""
    return f"{opening} {', and '.join(clauses)}{tail}."


def _points(one: Change, after: Evaluation) -> str:
    level = estimate(set_metrics(after, one.set), "mean")
    return f"{abs(one.difference.value) * 100:.1f} points ({_span(one)}) to {level.percent()}{PERCENT}"


def _span(one: Change) -> str:
    if one.problems < FEWEST_PROBLEMS:
        return f"{one.problems} problem{'s' * (one.problems != 1)}: too few for an interval"
    if not one.difference.bounded:
        return "no interval"
    return f"{signed(one.difference.low * 100)} to {signed(one.difference.high * 100)}"


def _listed(parts: Sequence[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else "".join(parts)


def _form(measured: Sequence[Evaluation]) -> list[str]:
    """Valid blocks and truncation, as means over the sets."""
    chosen = [one for one in measured if one.label == "sft"][:1] + [measured[-1]]
    if len(chosen) == 2 and chosen[0] is chosen[1]:
        chosen.pop()
    valid = [(one.label, over_sets(one, "valid_ratio")) for one in chosen]
    parts = [f"{_with_interval(share)} of rollouts for {label}" for label, share in valid if share.known]
    sentences = [f"Blocks are used and well formed in {_listed(parts)} (mean over sets)."] if parts else []
    for one in measured:
        cut = [(name, estimate(set_metrics(one, name), "truncated_ratio")) for name in set_names([one])]
        much = [f"{share.percent()}{PERCENT} on {name}" for name, share in cut if share.known and share.value > MUCH_TRUNCATED]
        if much:
            sentences.append(f"Of the rollouts for {one.label}, {_listed(much)} were cut off before they ended, so that score is too low.")
    return sentences
