"""One flow per stage, for reruns: each runs its stage and what that needs, which is a look into the store where it exists already."""

from __future__ import annotations

from prefect import flow
from prefect.task_runners import ThreadPoolTaskRunner

from flows.pipeline import RECIPE
from flows.steps import Steps
from parallel_r1.config import ConfigError, load
from parallel_r1.store import ArtifactRef
from tasks.places import PROJECT
from tasks.supervise import programs_end_with_flow

BESIDE = ThreadPoolTaskRunner(max_workers=1)


def _steps(recipe: str, overrides: list[str] | None) -> Steps:
    return Steps(load(PROJECT / recipe, overrides or []))


@flow(name="prepare", flow_run_name="prepare {recipe}")
def prepare(recipe: str = RECIPE, overrides: list[str] | None = None) -> dict[str, ArtifactRef]:
    """Read all problem sets.

    Args:
        recipe: config file, relative to the project
        overrides: dotted fields that differ from the file, such as prepare.train.tier1.count=100
    """
    steps = _steps(recipe, overrides)
    steps.training_sets()
    steps.held_out_sets()
    return steps.built


@flow(name="base", flow_run_name="base {recipe}", task_runner=BESIDE)
def base(recipe: str = RECIPE, overrides: list[str] | None = None) -> ArtifactRef:
    """Make the base model.

    Args:
        recipe: config file, relative to the project
        overrides: dotted fields that differ from the file, such as student.examples=1000
    """
    with programs_end_with_flow():
        steps = _steps(recipe, overrides)
        return steps.keep_base(steps.base(steps.training_sets()))


@flow(name="generate", flow_run_name="generate {recipe}")
def generate(recipe: str = RECIPE, overrides: list[str] | None = None) -> ArtifactRef:
    """Have the teacher write.

    Args:
        recipe: config file, relative to the project
        overrides: dotted fields that differ from the file, such as generate.count=1000
    """
    steps = _steps(recipe, overrides)
    return steps.written(steps.training_sets())


@flow(name="filter", flow_run_name="filter {recipe}")
def filter_trajectories(recipe: str = RECIPE, overrides: list[str] | None = None) -> ArtifactRef:
    """Filter what the teacher wrote.

    Args:
        recipe: config file, relative to the project
        overrides: dotted fields that differ from the file, such as filter.answer=false
    """
    steps = _steps(recipe, overrides)
    return steps.trajectories(steps.training_sets())


@flow(name="sft", flow_run_name="sft {recipe}", task_runner=BESIDE)
def sft(recipe: str = RECIPE, overrides: list[str] | None = None) -> ArtifactRef:
    """Cold-start the student.

    Args:
        recipe: config file, relative to the project
        overrides: dotted fields that differ from the file, such as sft.max_steps=10
    """
    with programs_end_with_flow():
        return _trained(_steps(recipe, overrides), stages=0)


@flow(name="rl", flow_run_name="rl {recipe}", task_runner=BESIDE)
def rl(recipe: str = RECIPE, overrides: list[str] | None = None, stages: int | None = None) -> ArtifactRef:
    """Train the student with reinforcement learning.

    Args:
        recipe: config file, relative to the project
        overrides: dotted fields that differ from the file, such as rl.0.steps=5
        stages: how many stages of the curriculum to run; all when left out
    """
    with programs_end_with_flow():
        return _trained(_steps(recipe, overrides), stages)


@flow(name="evaluate", flow_run_name="evaluate {recipe}", task_runner=BESIDE)
def evaluate(recipe: str = RECIPE, overrides: list[str] | None = None, stages: int | None = None) -> ArtifactRef:
    """Measure the student after training.

    Args:
        recipe: config file, relative to the project
        overrides: dotted fields that differ from the file, such as evaluate.samples=16
        stages: measure after so many stages of the curriculum; after all when left out
    """
    with programs_end_with_flow():
        steps = _steps(recipe, overrides)
        names = ["sft" if steps.config.sft else "base", *(f"rl {stage.name}" for stage in steps.config.rl[:stages])]
        steps.measure(names[-1], _trained(steps, stages), steps.held_out_sets())
        return steps.measured()[names[-1]]


def _trained(steps: Steps, stages: int | None) -> ArtifactRef:
    """The student after the cold start and the first `stages` stages of rl."""
    config = steps.config
    if stages is not None and not 0 <= stages <= len(config.rl):
        raise ConfigError(f"stages = {stages}: the curriculum of this recipe has {len(config.rl)}")
    sets = steps.training_sets()
    future = steps.base(sets)
    kept = steps.trajectories(sets) if config.sft else None
    student = steps.keep_base(future)
    if kept:
        student = steps.cold_start(student, kept)
    for stage in config.rl[:stages]:
        student = steps.reinforce(stage, student, sets)
    return student
