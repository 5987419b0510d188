"""The whole pipeline, as the paper tells it: a base model, a cold start on a teacher's trajectories, then rl in stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeVar

from prefect import flow
from prefect.task_runners import ThreadPoolTaskRunner

from flows.elsewhere import Elsewhere
from flows.forms import (
    RECIPE,
    EvaluateForm,
    FilterForm,
    GenerateForm,
    Overrides,
    PrepareForm,
    Recipe,
    RlForm,
    RunForm,
    SftForm,
    StageName,
    StudentForm,
    config_of,
    described,
    filled_in,
)
from flows.steps import Steps
from parallel_r1.store import ArtifactRef, Damaged
from tasks.progress import say
from tasks.show import all_posted
from tasks.supervise import programs_end_with_flow

Told = TypeVar("Told")
REPAIRS = 3


@flow(name="parallel-r1", flow_run_name="{recipe}", task_runner=ThreadPoolTaskRunner(max_workers=1))
@described
def pipeline(
    recipe: Recipe = RECIPE,
    overrides: Overrides = [],  # noqa: B006  # Prefect shows the default in the form and hands out copies
    force: list[StageName] = [],  # noqa: B006
    place: Literal["here", "pools"] = "here",
    run: RunForm = RunForm(),
    prepare: PrepareForm = PrepareForm(),
    student: StudentForm | None = None,
    generate: GenerateForm = GenerateForm(),
    filter: FilterForm = FilterForm(),
    sft: SftForm = SftForm(),
    rl: list[RlForm] = [],  # noqa: B006
    evaluate: EvaluateForm = EvaluateForm(),
) -> dict[str, ArtifactRef]:
    """Train a student to think in parallel and measure it on the way. Returns every artifact by title, the report last.

    The flow's own thread trains; the one thread of its task runner evaluates beside it.
    """
    sections = {"run": run, "prepare": prepare, "student": student, "generate": generate, "filter": filter}
    sections |= {"sft": sft, "rl": rl, "evaluate": evaluate}
    config = config_of(recipe, overrides, sections)
    elsewhere = Elsewhere(recipe, [*filled_in(recipe, sections), *overrides]) if place == "pools" else None
    with programs_end_with_flow():
        return until_whole(lambda: tell(Steps(config, force, elsewhere)))


def tell(steps: Steps) -> dict[str, ArtifactRef]:
    """The story."""
    train(steps)
    steps.analyse(steps.measured())
    steps.report()
    return steps.built


def train(steps: Steps) -> None:
    """The story without its end: every checkpoint is trained, and being measured."""
    config = steps.config
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


def until_whole(story: Callable[[], Told]) -> Told:
    """Tell a story, and tell it again when an artifact that it read turned out to be damaged: all else is in the store, and that
    one is built again. Its pages are all in the UI at its end."""
    for _ in range(REPAIRS):
        try:
            return _told(story)
        except Damaged as damage:
            say(f"  {damage}")
    return _told(story)


def _told(story: Callable[[], Told]) -> Told:
    told = story()
    all_posted()
    return told
