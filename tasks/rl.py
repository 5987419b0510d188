"""Stage `rl`: one GRPO stage of the curriculum (paper sections 3.3 and 3.4)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from parallel_r1 import prompts
from parallel_r1.config import RlConfig
from parallel_r1.store import ArtifactRef
from tasks.rollouts import show_rollouts
from tasks.show import show_curves
from tasks.stage import Metrics, Work, stage


def show_training(title: str, ref: ArtifactRef, folder: Path) -> None:
    """Curves and headline numbers, then rollouts."""
    show_curves(title, ref, folder)
    show_rollouts(title, ref, folder)


@stage("rl", version=2, show=show_training, gpu=True)
def reinforce(work: Work, config: RlConfig, checkpoint: ArtifactRef, sets: Mapping[str, ArtifactRef]) -> Metrics:
    """Improve the checkpoint by GRPO on parallel rollouts over the problem sets."""
    work.versions["prompt"] = prompts.fingerprint(config.prompt)
    return work.run_program("parallel_r1.training.grpo", config, {"checkpoint": checkpoint, **sets})
