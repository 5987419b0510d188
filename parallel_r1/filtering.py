"""What of the teacher's work the student learns from (paper section 3.1, Algorithm 1): well-formed, right, not too long."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from parallel_r1.config import FilterConfig
from parallel_r1.grading import Grade, grade_many
from parallel_r1.markup import Fault, canonicalise, validate

Row = dict[str, Any]

_BATCH = 1000


@dataclass
class Funnel:
    """How many trajectories came in, stayed, and went for which fault. One that has several faults counts for each of them once."""

    seen: int = 0
    kept: int = 0
    by_code: Counter[str] = field(default_factory=Counter)

    def metrics(self) -> dict[str, int]:
        """Flat numbers: "seen", "kept", "rejected", "rejected_<code>"."""
        codes = {f"rejected_{code}": count for code, count in sorted(self.by_code.items())}
        return {"seen": self.seen, "kept": self.kept, "rejected": self.seen - self.kept, **codes}


@dataclass
class Selection:
    """Kept trajectories in canonical spelling; rejected ones as they came, with "faults"."""

    kept: list[Row] = field(default_factory=list)
    rejected: list[Row] = field(default_factory=list)
    funnel: Funnel = field(default_factory=Funnel)


def select(rows: Iterable[Row], config: FilterConfig) -> Selection:
    """Sort trajectories ({"text", "answer", ...}) into kept and rejected. A rejected one names all its faults."""
    selection = Selection()
    for batch in _batches(rows):
        grades = grade_many([(row["text"], row["answer"]) for row in batch]) if config.answer else [None] * len(batch)
        for row, grade in zip(batch, grades, strict=True):
            _sort(selection, row, faults_of(row["text"], grade, config))
    return selection


def faults_of(text: str, grade: Grade | None, config: FilterConfig) -> list[Fault]:
    """Why a trajectory can't be learned from; none where it can. `grade` None leaves the answer out."""
    faults = validate(text) if config.markup else []
    if grade is not None and not grade.correct:
        faults.append(Fault("wrong_answer", len(text), grade.reason))
    if config.max_chars is not None and len(text) > config.max_chars:
        faults.append(Fault("too_long", config.max_chars, f"{len(text)} characters, at most {config.max_chars} are allowed"))
    return faults


def _sort(selection: Selection, row: Row, faults: list[Fault]) -> None:
    selection.funnel.seen += 1
    selection.funnel.by_code.update({fault.code for fault in faults})
    if faults:
        selection.rejected.append({**row, "faults": [asdict(fault) for fault in faults]})
    else:
        selection.funnel.kept += 1
        selection.kept.append({**row, "text": canonicalise(row["text"])})


def _batches(rows: Iterable[Row]) -> Iterable[list[Row]]:
    batch: list[Row] = []
    for row in rows:
        batch.append(row)
        if len(batch) == _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch
