"""The whole pipeline, as the paper tells it: a base model, a cold start on a teacher's trajectories, then rl in stages."""

from __future__ import annotations

from prefect import flow
from prefect.task_runners import ThreadPoolTaskRunner

from flows.steps import Steps
from parallel_r1.config import PipelineConfig, load
from parallel_r1.store import ArtifactRef
from tasks.places import PROJECT
from tasks.supervise import programs_end_with_flow

RECIPE = "pipeline_config.yaml"


@flow(name="parallel-r1", flow_run_name="{recipe}", task_runner=ThreadPoolTaskRunner(max_workers=1))
def pipeline(recipe: str = RECIPE, overrides: list[str] | None = None) -> dict[str, ArtifactRef]:
    """Train a student to think in parallel and measure it on the way. Returns every artifact by title, the report last.

    The flow's own thread trains; the one thread of its task runner evaluates beside it.

    Args:
        recipe: config file, relative to the project: pipeline_config.yaml or recipes/*.yaml
        overrides: dotted fields that differ from the file, such as rl.0.steps=5
    """
    with programs_end_with_flow():
        return tell(load(PROJECT / recipe, overrides or []))


def tell(config: PipelineConfig) -> dict[str, ArtifactRef]:
    """The story."""
    steps = Steps(config)
    training, held_out = steps.training_sets(), steps.held_out_sets()

    base = steps.base(training)
    trajectories = steps.trajectories(training) if config.sft else None
    student = steps.keep_base(base)
    steps.measure("base", student, held_out)

    if trajectories:
        student = steps.cold_start(student, trajectories)
        steps.measure("sft", student, held_out)

    for stage in config.rl:
        student = steps.reinforce(stage, student, training)
        steps.measure(f"rl {stage.name}", student, held_out)

    steps.measured()
    return {**steps.built, "report": steps.report()}
