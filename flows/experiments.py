"""Rows of a results table, each a recipe at several seeds, and one page about all of them.

What rows share is built once, as everything is found by its key. A rerun goes on where it stopped. A row that fails stops no other:
the page says why it is missing, and the flow fails once the page is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

from prefect import flow
from prefect.task_runners import ThreadPoolTaskRunner
from pydantic import Field

from flows.dry_run import plan
from flows.forms import TINY, Overrides, described
from flows.pipeline import train, until_whole
from flows.steps import Steps
from parallel_r1.config import ConfigError, PipelineConfig, load
from parallel_r1.store import ArtifactRef, Damaged
from tasks.experiments import ExperimentsConfig, input_name, write_experiments
from tasks.places import PROJECT
from tasks.progress import say
from tasks.report import PAGE
from tasks.stage import Run
from tasks.supervise import programs_end_with_flow

File = Annotated[str, Field(title="recipe", pattern=r"\.ya?ml$")]


class RowsFailed(RuntimeError):
    """Some rows have no results; the page about the others is there."""


@dataclass
class _Row:
    """A recipe at a seed, on its way."""

    config: PipelineConfig
    steps: Steps | None = None
    failure: str = ""

    @property
    def title(self) -> str:
        return f"{self.config.name}, seed {self.config.seed}"


@flow(name="experiments", flow_run_name="experiments, {seeds} seeds", task_runner=ThreadPoolTaskRunner(max_workers=1))
@described
def experiments(
    recipes: Annotated[list[File], Field(min_length=1)] = list(TINY),  # noqa: B006, B008  # Prefect hands out copies
    seeds: Annotated[int, Field(ge=1, le=100)] = 3,
    overrides: Overrides = [],  # noqa: B006
    ready: bool = False,
) -> ArtifactRef:
    """Train and measure every recipe at every seed, then write one page about all of them; returns the page.

    All rows of one seed come before the next seed, so that an unfinished run already compares all recipes. The flow's own thread trains;
    the one thread of its task runner evaluates beside it.
    """
    if chosen := next((one for one in overrides if one.partition("=")[0].strip() == "seed"), None):
        raise ConfigError(f"override {chosen!r}: experiments give every row its seed, 0 to {seeds - 1}; leave it out, or use `make demo`")
    rows = [_Row(config) for seed in range(seeds) for config in _configs(recipes, [*overrides, f"seed={seed}"])]
    if ready:
        rows = [row for row in rows if all(stage.cached for stage in plan(row.config, train))]
    with programs_end_with_flow():
        for place, row in enumerate(rows, 1):
            say(f"{row.title} ({place} of {len(rows)})")
            _attempt(row, _train)
        for row in rows:
            _attempt(row, _await_evaluations)
        page = until_whole(lambda: _page(rows))
    if failed := [f"{row.title}: {row.failure}" for row in rows if row.failure]:
        raise RowsFailed("\n".join([f"{len(failed)} of {len(rows)} rows failed; the others are in {page.uri}/{PAGE}", *failed]))
    return page


def _configs(recipes: Sequence[str], overrides: list[str]) -> list[PipelineConfig]:
    """The recipes' configs. Raises ConfigError where one can't be used, or where two have the same name."""
    configs = [load(PROJECT / recipe, overrides) for recipe in recipes]
    names = [config.name for config in configs]
    if doubled := next((name for name in names if names.count(name) > 1), None):
        twins = " and ".join(recipe for recipe, name in zip(recipes, names, strict=True) if name == doubled)
        raise ConfigError(f"{twins}: both are called {doubled!r}; a row is known by its recipe's name, so give each its own")
    return configs


def _attempt(row: _Row, part: Callable[[_Row], None]) -> None:
    """One part of a row; what goes wrong is the row's, and the others go on."""
    if row.failure:
        return
    try:
        part(row)
    except Exception as error:  # whatever it was stands in the page, and fails the flow at its end
        row.failure = f"{type(error).__name__}: {error}"
        say(f"{row.title} failed: {row.failure}")


def _train(row: _Row) -> None:
    def story() -> Steps:
        steps = Steps(row.config)
        train(steps)
        return steps

    row.steps = until_whole(story)


def _await_evaluations(row: _Row) -> None:
    try:
        row.steps.measured()
    except Damaged as damage:  # the checkpoint that was to be measured: it is made again
        say(f"  {damage}")
        _train(row)
        row.steps.measured()


def _page(rows: Sequence[_Row]) -> ArtifactRef:
    """The page about all rows that have results."""
    whole = [row for row in rows if not row.failure]
    if not whole:
        raise RowsFailed("\n".join(["No row has results yet.", *(f"{row.title}: {row.failure}" for row in rows)]))
    config = ExperimentsConfig(
        name=" ".join(sorted({row.config.name for row in rows})),
        recipes={row.config.name: row.config.model_copy(update={"seed": 0}) for row in rows},
        seeds=sorted({row.config.seed for row in rows}),
        failed={row.title: row.failure for row in rows if row.failure},
    )
    made = {
        input_name(row.config.name, row.config.seed, title): ref
        for row in whole
        for title, ref in row.steps.built.items()
        if ref.stage in ("evaluate", "rl")
    }
    return write_experiments(Run.of(whole[0].config), config, rows=made)
