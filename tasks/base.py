"""Stage `base`: the student before it has seen a block."""

from __future__ import annotations

from collections.abc import Mapping

from parallel_r1.config import Student
from parallel_r1.store import ArtifactRef
from tasks.show import show_curves
from tasks.stage import Metrics, Work, stage


@stage("base", version=1, show=show_curves, gpu=True)
def make_base(work: Work, student: Student, sets: Mapping[str, ArtifactRef]) -> Metrics:
    """Make the base model: from scratch on sequential solutions, or a checkpoint that gets its tags."""
    return work.run_program("parallel_r1.training.base", student, sets)
