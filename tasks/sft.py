"""Stage `sft`: the cold start (paper section 3.2)."""

from __future__ import annotations

from parallel_r1 import prompts
from parallel_r1.config import SftConfig
from parallel_r1.store import ArtifactRef
from tasks.show import show_curves
from tasks.stage import Metrics, Work, stage


@stage("sft", version=1, show=show_curves, gpu=True)
def cold_start(work: Work, config: SftConfig, base: ArtifactRef, trajectories: ArtifactRef) -> Metrics:
    """Teach the base model the form of parallel thinking on the filtered trajectories."""
    work.versions["prompt"] = prompts.fingerprint(config.prompt)
    return work.run_program("parallel_r1.training.sft", config, {"base": base, "trajectories": trajectories})
