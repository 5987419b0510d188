"""The table of the paper's claims, as parallel_r1/claims.py judged them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from parallel_r1.claims import SMALLEST, TEST, Finding, Verdict
from parallel_r1.report.numbers import NOTHING, signed
from parallel_r1.report.tables import Cell, Row, Table, p_value

TONES = {"reproduced": "higher", "not reproduced": "lower", "undecided": ""}
MARKS = {"reproduced": "✓ ", "not reproduced": "✗ ", "undecided": ""}
NO_BREAK = "\u00a0"
PARTS = {"reproduced": "as claimed", "not reproduced": "not as claimed", "undecided": "open"}


def claims_table(verdicts: Sequence[Verdict]) -> Table:
    """A row per claim, and one more for each further part of it: verdict, effect with interval, the paper's effect, sizes, test."""
    columns = ["claim", "verdict", "effect", "paper", "seeds × problems", "p"]
    notes = [
        "Effect: points of accuracy, of the parallel ratio, of valid blocks, or of the position in the response, with its 95 % interval.",
        "Reproduced: the whole interval of every part lies on the claimed side. Not reproduced: a whole interval lies below the smallest "
        f"difference that counts, {100 * SMALLEST:g} points, or beyond what is allowed. Undecided: neither, or too little was run.",
        f"Test: {TEST}. Each interval is at 95 % for itself: of forty claims without any effect, one would be called reproduced.",
    ]
    return Table("The paper's claims", [Cell(title) for title in columns], [row for one in verdicts for row in _rows(one)], notes)


def _rows(verdict: Verdict) -> Iterator[Row]:
    outcome = Cell(f"{MARKS[verdict.outcome]}{verdict.outcome}", tone=TONES[verdict.outcome])
    if not verdict.findings:
        yield Row(Cell(verdict.claim, verdict.sentence), [outcome, *[Cell(NOTHING)] * 4])
    for place, finding in enumerate(verdict.findings):
        part = finding.part
        compared = f"{part.what}: {part.more}{f' − {part.less}' if part.less else ''}"
        head = Cell(verdict.claim if place == 0 else "… and", compared)
        own = Cell("", f"this part: {PARTS[finding.outcome]}" if len(verdict.findings) > 1 else "")
        first = Cell(outcome.text, own.note, outcome.tone) if place == 0 else own
        yield Row(head, [first, *_numbers(finding)])


def _numbers(finding: Finding) -> list[Cell]:
    if not finding.seeds:
        return [Cell(NOTHING, finding.reason), *[Cell(NOTHING)] * 3]
    limit = finding.part.at_most
    notes = [f"{signed(100 * finding.low)} to {signed(100 * finding.high)}".replace(" ", NO_BREAK)]
    notes += [] if limit is None else [f"at most {100 * limit:g} allowed".replace(" ", NO_BREAK)]
    notes += [finding.reason] if finding.reason else []
    paper = Cell(signed(100 * finding.paper) if finding.paper is not None else NOTHING)
    size = Cell(f"{finding.seeds} × {finding.problems}", "steps" if finding.part.measure == "position" else "")
    return [Cell(signed(100 * finding.effect), "\n".join(notes)), paper, size, Cell(p_value(finding.p))]
