"""The paper's claims, judged on the runs at hand: reproduced, not reproduced, or undecided.

A claim has one or more parts, and each compares two checkpoints on the same problems at the same seeds. A part holds where the whole 95 %
interval of the difference lies on the claimed side, fails where the whole interval says that there is no such difference as would count
(SMALLEST), and stays open otherwise. A claim is reproduced where all its parts hold, and not reproduced where one fails.

The interval is that of `experiments.measured`. One seed decides nothing: the difference between two trainings could be that of any two
trainings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from parallel_r1 import published
from parallel_r1.experiments import RowRun, Table, by_recipe, gains, measured, table
from parallel_r1.jobs import METRICS, read_lines

SMALLEST = 0.02
"""The smallest difference that counts as one: 2 points."""
FEWEST_PROBLEMS = 10
"""With fewer problems per seed nothing is decided."""
SMALL_COST = 0.05
"""What a 'small cost in accuracy' is at most. The paper's own is 0.3 points."""
NO_BLOCKS = 0.05
"""A share of rollouts with a valid block below which a model is said not to use them."""
FEWEST_STEPS = 6
"""Training steps with blocks that it takes to see where the blocks move."""

Outcome = Literal["reproduced", "not reproduced", "undecided"]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of a row: by the title of its evaluation, or the final one."""

    recipe: str
    title: str | None = None

    def __str__(self) -> str:
        return f"{self.recipe}, {self.title}" if self.title else self.recipe


@dataclass(frozen=True)
class Part:
    """One comparison: `more` minus `less` (nothing: zero) is above zero, or where `at_most` is given, below that."""

    what: str
    measure: str
    more: Checkpoint
    less: Checkpoint | None = None
    at_most: float | None = None


@dataclass(frozen=True)
class Claim:
    """A claim of the paper. `versions`: the same claim on different rows; the first whose rows are there is judged."""

    text: str
    versions: tuple[tuple[Part, ...], ...]


@dataclass(frozen=True)
class Finding:
    """What a part came to. Shares and positions are fractions; `problems` counts per seed; p is two-sided, against zero or `at_most`."""

    part: Part
    effect: float
    low: float
    high: float
    p: float
    seeds: int
    problems: int
    outcome: Outcome
    reason: str = ""
    """Why nothing could be decided."""

    @property
    def paper(self) -> float | None:
        """The paper's own difference, where it prints both numbers."""
        return _paper(self.part)


@dataclass(frozen=True)
class Verdict:
    """A claim, judged. Without findings there was nothing to judge it on, and the sentence says what would."""

    claim: str
    outcome: Outcome
    findings: tuple[Finding, ...]
    sentence: str


TEST = "paired t-test over seeds, clustered by seed and by problem"


# --- which rows answer which claim ----------------------------------------------------------------------------------------

SEEN, S1, S2 = "parallel_r1_seen", "parallel_r1_unseen_s1", "parallel_r1_unseen_s2"
TRAINED = (SEEN, S1, S2)


def _better_than_sft(recipe: str) -> tuple[Part, ...]:
    return (Part("accuracy after rl over accuracy after sft", "mean", Checkpoint(recipe), Checkpoint(recipe, "sft")),)


def _ratio_falls(recipe: str) -> tuple[Part, ...]:
    return (Part("parallel ratio after sft over the ratio after rl", "parallel_ratio", Checkpoint(recipe, "sft"), Checkpoint(recipe)),)


def _moves_later(recipe: str) -> tuple[Part, ...]:
    return (Part("position in the last third of rl's last stage over that in its first", "position", Checkpoint(recipe)),)


def _better(recipe: str, other: str) -> tuple[Part, ...]:
    return (Part("accuracy", "mean", Checkpoint(recipe), Checkpoint(other)),)


CLAIMS = (
    Claim(
        "A cold start is needed: without it rl does not learn to think in parallel",
        ((
            Part("valid blocks with a cold start over those without", "valid_ratio", Checkpoint(SEEN), Checkpoint("without_cold_start")),
            Part("valid blocks without a cold start", "valid_ratio", Checkpoint("without_cold_start"), at_most=NO_BLOCKS),
        ),),
    ),
    Claim("Reinforcement learning lifts accuracy over the cold start", tuple(map(_better_than_sft, TRAINED))),
    Claim("A reward for accuracy alone lets the parallel ratio fall", tuple(map(_ratio_falls, (S1, SEEN)))),
    Claim(
        "The alternating reward keeps the parallel ratio, at a small cost in accuracy",
        ((
            Part("parallel ratio over that of accuracy alone", "parallel_ratio", Checkpoint(S2), Checkpoint(S1)),
            Part("what it costs in accuracy", "mean", Checkpoint(S1), Checkpoint(S2), at_most=SMALL_COST),
        ),),
    ),
    Claim(
        "A reward for parallel thinking alone keeps the ratio highest, at lower accuracy",
        ((
            Part("parallel ratio over that of the alternating reward", "parallel_ratio", Checkpoint("parallel_only"), Checkpoint(S2)),
            Part("what it costs in accuracy", "mean", Checkpoint(S2), Checkpoint("parallel_only")),
        ),),
    ),
    Claim(
        "<Parallel> moves to a later place in the response as training goes on",
        tuple(map(_moves_later, TRAINED)),
    ),
    Claim("A scaffold of parallel thinking ends above accuracy alone from the start", (_better("scaffold", S1),)),
    Claim(
        "Parallel thinking ends above sequential GRPO",
        (_better(SEEN, "grpo_gsm8k_dapo"), _better(SEEN, "grpo_dapo"), _better(S1, "grpo_dapo")),
    ),
)  # fmt: skip


# --- judging --------------------------------------------------------------------------------------------------------------


def judge(rows: Sequence[RowRun]) -> list[Verdict]:
    """A verdict on every claim. A row answers for the recipe whose name it has."""
    found = by_recipe(rows)
    return [_judged(claim, found) for claim in CLAIMS]


Rows = dict[str, list[RowRun]]


def _judged(claim: Claim, rows: Rows) -> Verdict:
    missing = [_missing(parts, rows) for parts in claim.versions]
    parts = next((parts for parts, lacks in zip(claim.versions, missing, strict=True) if not lacks), None)
    if parts is None:
        wanted = min(missing, key=len)
        return Verdict(claim.text, "undecided", (), f"No run answers this; {' and '.join(wanted)} would.")
    findings = tuple(_found(part, rows) for part in parts)
    outcomes = {finding.outcome for finding in findings}
    outcome = next((one for one in ("not reproduced", "undecided") if one in outcomes), "reproduced")
    return Verdict(claim.text, outcome, findings, " ".join(map(sentence, findings)))


def _missing(parts: Sequence[Part], rows: Rows) -> list[str]:
    wanted = [checkpoint for part in parts for checkpoint in (part.more, part.less) if checkpoint]
    return [recipe for recipe in dict.fromkeys(checkpoint.recipe for checkpoint in wanted) if recipe not in rows]


def _found(part: Part, rows: Rows) -> Finding:
    found = _moves(rows[part.more.recipe]) if part.measure == "position" else _compared(part, rows)
    if not found:
        return Finding(part, math.nan, math.nan, math.nan, math.nan, 0, 0, "undecided", _why_nothing(part))
    problems = min(sum(map(len, sets.values())) for sets in found.values())
    effect, low, high, p = measured(found, part.at_most or 0.0)
    low = low if part.less or part.measure == "position" else max(0.0, low)
    reason = _too_few(part, len(found), problems)
    outcome = "undecided" if reason else _decided(part, low, high)
    return Finding(part, effect, low, high, p, len(found), problems, outcome, reason)


def _compared(part: Part, rows: Rows) -> Table:
    more = table(rows[part.more.recipe], part.measure, title=part.more.title)
    return gains(table(rows[part.less.recipe], part.measure, title=part.less.title), more) if part.less else more


def _why_nothing(part: Part) -> str:
    if part.measure == "position":
        return f"the last rl stage of {part.more.recipe} has fewer than {FEWEST_STEPS} steps with blocks"
    return f"{part.more} and {part.less} share no seed with the same problems" if part.less else f"{part.more} was not evaluated"


def _too_few(part: Part, seeds: int, problems: int) -> str:
    if seeds < 2:
        return "one seed: the interval is over problems only, and another training could differ by more"
    if problems < FEWEST_PROBLEMS and part.measure != "position":
        return f"{problems} problems are too few"
    return ""


def _decided(part: Part, low: float, high: float) -> Outcome:
    if part.at_most is not None:
        return "reproduced" if high < part.at_most else "not reproduced" if low > part.at_most else "undecided"
    return "reproduced" if low > 0 else "not reproduced" if high < SMALLEST else "undecided"


def _moves(runs: Sequence[RowRun]) -> Table:
    """Per seed, the relative position of the first block in the last third of an rl stage's steps minus that in the first, step by step: of
    the last stage, as another one has other problems."""
    found = {}
    for run in runs:
        last = list(run.training.values())[-1:]
        logged = [row.get("parallel_position") for folder in last for row in read_lines(folder / METRICS)]
        positions = [position for position in logged if position is not None]
        third = len(positions) // 3
        if len(positions) >= FEWEST_STEPS:
            pairs = zip(positions[:third], positions[-third:], strict=True)
            found[run.seed] = {"steps": {str(place): late - early for place, (early, late) in enumerate(pairs)}}
    return found


# --- words ----------------------------------------------------------------------------------------------------------------


def sentence(finding: Finding) -> str:
    """What a part came to, in words."""
    part = finding.part
    rows = f"{part.more} against {part.less}" if part.less else f"{part.more}"
    if not finding.seeds:
        return f"{_capital(part.what)} ({rows}): {finding.reason}."
    effect, low, high = (100 * value for value in (finding.effect, finding.low, finding.high))
    told = f"{_capital(part.what)} ({rows}): {effect:+.1f} points (95 % interval {low:+.1f} to {high:+.1f})"
    told += f", allowed are {100 * part.at_most:g}" if part.at_most is not None else ""
    return f"{told}; {finding.reason or _WORDS[finding.outcome]}."


_WORDS = {
    "reproduced": "as claimed",
    "not reproduced": "not as claimed",
    "undecided": "the interval allows either answer",
}


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _paper(part: Part) -> float | None:
    levels = [_level(checkpoint, part.measure) for checkpoint in (part.more, part.less) if checkpoint]
    known = [level for level in levels if level is not None]
    return None if len(known) < 2 else known[0] - known[1]


def _level(checkpoint: Checkpoint, measure: str) -> float | None:
    """What the paper prints for a checkpoint, as a fraction."""
    name = checkpoint.recipe
    if checkpoint.title == "sft":
        name = published.COLD_START["structured" if "unseen" in name else "causal"]
    row = published.row_of(name)
    value = {"mean": row.mean, "parallel_ratio": row.parallel_ratio}.get(measure) if row else None
    return None if value is None else value / 100
