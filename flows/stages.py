"""One flow per stage, for reruns: each runs its stage and what that needs, which is a look into the store where it exists already."""

from __future__ import annotations

from typing import Annotated

from prefect import flow
from prefect.task_runners import ThreadPoolTaskRunner
from pydantic import Field

from flows.forms import (
    RECIPE,
    AnalysisForm,
    EvaluateForm,
    FilterForm,
    FromBase,
    FromCheckpoint,
    FromTrajectories,
    GenerateForm,
    Overrides,
    PrepareForm,
    Recipe,
    ReportForm,
    RlForm,
    RunForm,
    SftForm,
    StudentForm,
    config_of,
    described,
    filled_in,
)
from flows.pipeline import tell, until_whole
from flows.steps import Steps
from parallel_r1.config import ConfigError, PipelineConfig
from parallel_r1.store import ArtifactRef
from tasks.supervise import programs_end_with_flow

BESIDE = ThreadPoolTaskRunner(max_workers=1)
Stages = Annotated[int, Field(ge=0)] | None


@flow(name="prepare", flow_run_name="prepare {recipe}")
@described
def prepare(
    recipe: Recipe = RECIPE,
    overrides: Overrides = [],  # noqa: B006  # Prefect shows the default in the form and hands out copies
    prepare: PrepareForm = PrepareForm(),
    run: RunForm = RunForm(),
    force: bool = False,
) -> dict[str, ArtifactRef]:
    """Read all problem sets, and compare what is learned from with what is measured on."""
    config = config_of(recipe, overrides, {"run": run, "prepare": prepare})
    rebuild = {"prepare", "decontaminate"} if force else set()

    def story() -> dict[str, ArtifactRef]:
        steps = Steps(config, rebuild)
        steps.training_sets()
        steps.held_out_sets()
        return steps.built

    return until_whole(story)


@flow(name="base", flow_run_name="base {recipe}", task_runner=BESIDE)
@described
def base(
    recipe: Recipe = RECIPE,
    overrides: Overrides = [],  # noqa: B006
    student: StudentForm | None = None,
    run: RunForm = RunForm(),
    force: bool = False,
) -> ArtifactRef:
    """Make the base model: from scratch, or a checkpoint that gets its tags."""
    config = config_of(recipe, overrides, {"run": run, "student": student})

    def story() -> ArtifactRef:
        steps = Steps(config, {"base"} if force else ())
        return steps.keep_base(steps.base(steps.training_sets()))

    with programs_end_with_flow():
        return until_whole(story)


@flow(name="generate", flow_run_name="generate {recipe}")
@described
def generate(
    recipe: Recipe = RECIPE,
    overrides: Overrides = [],  # noqa: B006
    generate: GenerateForm = GenerateForm(),
    run: RunForm = RunForm(),
    force: bool = False,
) -> ArtifactRef:
    """Have the teacher write."""
    config = config_of(recipe, overrides, {"run": run, "generate": generate})

    def story() -> ArtifactRef:
        steps = Steps(config, {"generate"} if force else ())
        return steps.written(steps.training_sets())

    return until_whole(story)


@flow(name="filter", flow_run_name="filter {recipe}")
@described
def filter_trajectories(
    recipe: Recipe = RECIPE,
    overrides: Overrides = [],  # noqa: B006
    filter: FilterForm = FilterForm(),
    upstream: FromTrajectories = FromTrajectories(),
    run: RunForm = RunForm(),
    force: bool = False,
) -> ArtifactRef:
    """Filter what the teacher wrote."""
    config = config_of(recipe, overrides, {"run": run, "filter": filter})

    def story() -> ArtifactRef:
        steps = Steps(config, {"filter"} if force else ())
        written = steps.chosen(upstream.generate) or steps.written(steps.training_sets())
        return steps.filtered(written)

    return until_whole(story)


@flow(name="sft", flow_run_name="sft {recipe}", task_runner=BESIDE)
@described
def sft(
    recipe: Recipe = RECIPE,
    overrides: Overrides = [],  # noqa: B006
    sft: SftForm = SftForm(),
    upstream: FromBase = FromBase(),
    run: RunForm = RunForm(),
    force: bool = False,
) -> ArtifactRef:
    """Cold-start the student."""
    config = config_of(recipe, overrides, {"run": run, "sft": sft})
    with programs_end_with_flow():
        return until_whole(lambda: _cold_started(Steps(config, {"sft"} if force else ()), upstream))


@flow(name="rl", flow_run_name="rl {recipe}", task_runner=BESIDE)
@described
def rl(
    recipe: Recipe = RECIPE,
    overrides: Overrides = [],  # noqa: B006
    stages: Stages = None,
    rl: RlForm = RlForm(),
    upstream: FromCheckpoint = FromCheckpoint(),
    run: RunForm = RunForm(),
    force: bool = False,
) -> ArtifactRef:
    """Train the student with reinforcement learning. The form's fields and `force` are about the last of the stages that run; with a
    checkpoint chosen, that stage alone runs."""
    last = len(_curriculum(config_of(recipe, overrides, {"run": run}), stages))
    if last == 0:
        raise ConfigError(f"stages = {stages}: nothing to train; the curriculum of this recipe has stages from 1 on")
    edits = filled_in(recipe, {"rl": [RlForm()] * (last - 1) + [rl]})
    config = config_of(recipe, [*edits, *overrides], {"run": run})

    def story() -> ArtifactRef:
        stage = config.rl[last - 1]
        steps = Steps(config, {f"rl {stage.name}"} if force else ())
        if checkpoint := steps.chosen(upstream.checkpoint):
            return steps.reinforce(stage, checkpoint, steps.training_sets())
        return _trained(steps, last)

    with programs_end_with_flow():
        return until_whole(story)


@flow(name="evaluate", flow_run_name="evaluate {recipe}", task_runner=BESIDE)
@described
def evaluate(
    recipe: Recipe = RECIPE,
    overrides: Overrides = [],  # noqa: B006
    stages: Stages = None,
    evaluate: EvaluateForm = EvaluateForm(),
    upstream: FromCheckpoint = FromCheckpoint(),
    run: RunForm = RunForm(),
    force: bool = False,
) -> ArtifactRef:
    """Measure the student after so many stages of the curriculum, or a checkpoint of your choice."""
    config = config_of(recipe, overrides, {"run": run, "evaluate": evaluate})

    def story() -> ArtifactRef:
        steps = Steps(config, {"evaluate"} if force else ())
        checkpoint = steps.chosen(upstream.checkpoint)
        names = ["sft" if config.sft else "base", *(f"rl {stage.name}" for stage in _curriculum(config, stages))]
        label = checkpoint.stage if checkpoint else names[-1]
        if checkpoint:
            steps.training_sets()  # an evaluation knows which of its problems the training sets give away
        steps.measure(label, checkpoint or _trained(steps, stages), steps.held_out_sets())
        return steps.measured()[label]

    with programs_end_with_flow():
        return until_whole(story)


@flow(name="analysis", flow_run_name="analysis {recipe}", task_runner=BESIDE)
@described
def analysis(
    recipe: Recipe = RECIPE,
    overrides: Overrides = [],  # noqa: B006
    analysis: AnalysisForm = AnalysisForm(),
    run: RunForm = RunForm(),
    force: bool = False,
) -> ArtifactRef:
    """Say what the blocks of a run are good for, and build whatever of the run is missing."""
    config = config_of(recipe, overrides, {"run": run, "analysis": analysis})
    with programs_end_with_flow():
        return until_whole(lambda: tell(Steps(config, {"analysis"} if force else ()))["analysis"])


@flow(name="report", flow_run_name="report {recipe}", task_runner=BESIDE)
@described
def report(
    recipe: Recipe = RECIPE,
    overrides: Overrides = [],  # noqa: B006
    report: ReportForm = ReportForm(),
    run: RunForm = RunForm(),
    force: bool = False,
) -> ArtifactRef:
    """Write the page about a run, and whatever of the run is missing."""
    config = config_of(recipe, overrides, {"run": run, "report": report})
    with programs_end_with_flow():
        return until_whole(lambda: tell(Steps(config, {"report"} if force else ()))["report"])


def _curriculum(config: PipelineConfig, stages: int | None) -> list[object]:
    if stages is not None and stages > len(config.rl):
        raise ConfigError(f"stages = {stages}: the curriculum of this recipe has {len(config.rl)}")
    return config.rl[:stages]


def _cold_started(steps: Steps, upstream: FromBase) -> ArtifactRef:
    """The student after the cold start."""
    student, kept = steps.chosen(upstream.base), steps.chosen(upstream.filter)
    if student and kept:
        return steps.cold_start(student, kept)
    sets = steps.training_sets()
    future = None if student else steps.base(sets)
    kept = kept or steps.trajectories(sets)
    return steps.cold_start(student or steps.keep_base(future), kept)


def _trained(steps: Steps, stages: int | None) -> ArtifactRef:
    """The student after the cold start, where the recipe has one, and the first `stages` stages of rl."""
    sets = steps.training_sets()
    student = _cold_started(steps, FromBase()) if steps.config.sft else steps.keep_base(steps.base(sets))
    for stage in _curriculum(steps.config, stages):
        student = steps.reinforce(stage, student, sets)
    return student
