"""Print the stages that a recipe leads to, in order, and what of them is in the store already. Nothing is run, no server is needed.

    python -m flows.dry_run recipes/parallel_r1_seen.yaml --set rl.0.steps=5

A stage's key depends on what it reads, so it is known as far as the stages before it are in the store. Exit codes: 0 printed, 2 the config
can't be used.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flows.command_line import add_recipe, config_named, parser_of
from flows.pipeline import tell
from flows.steps import Steps
from parallel_r1.config import ConfigError, PipelineConfig
from parallel_r1.store import ArtifactRef, StoreError, flatten
from tasks.stage import Call, Stage


@dataclass(frozen=True)
class Planned:
    """A stage of a run that was not run."""

    title: str
    key: str
    """Empty where the stage reads something that does not exist yet."""
    cached: bool
    reads: list[str]
    """Titles of what it reads."""


@dataclass(frozen=True)
class _Now:
    """Something that was begun and is finished: an artifact as a future."""

    ref: ArtifactRef

    def result(self) -> ArtifactRef:
        """The artifact."""
        return self.ref


class DrySteps(Steps):
    """Steps that look into the store and build nothing: what isn't there is an artifact without a key."""

    def __init__(self, config: PipelineConfig) -> None:
        super().__init__(config)
        self.planned: list[Planned] = []
        self._titles: dict[str, str] = {}

    def _make(self, title: str, stage: Stage, config: Any, label: str = "", **inputs: Any) -> ArtifactRef:
        return self._keep(title, self._look(stage.call(self.run, config, label, **inputs)))

    def _start(self, stage: Stage, config: Any, label: str, chosen: Mapping[str, Any], **inputs: Any) -> _Now:
        return _Now(self._look(stage.call(self.run, config, label, **inputs)))

    def _look(self, call: Call) -> ArtifactRef:
        reads = flatten(call.inputs).values()
        known = all(ref.key for ref in reads)
        found = call.load() if known else None
        titles = [self._titles[ref.uri] for ref in reads]
        self.planned.append(Planned(call.title, call.key if known else "", found is not None, titles))
        ref = found or ArtifactRef(stage=call.stage.name, key="", uri=f"not built: {call.title}", digest="")
        self._titles[ref.uri] = call.title
        return ref


def plan(config: PipelineConfig, story: Callable[[Steps], object] = tell) -> list[Planned]:
    """The stages of a run, or of a part of its story, in order. Raises ConfigError or StoreError as the run itself would."""
    steps = DrySteps(config)
    story(steps)
    return steps.planned


def as_text(config: PipelineConfig, stages: Sequence[Planned]) -> str:
    """One line per stage: its title, whether it is cached, its key, and what it reads."""
    lines = [("stage", "", "key", "reads")]
    for place, one in enumerate(stages):
        reads = "all of the above" if place > 1 and len(one.reads) == place else _grouped(one.reads)
        lines.append((one.title, "cached" if one.cached else "to build", one.key[:12] or "not known yet", reads))
    widths = [max(len(line[column]) for line in lines) for column in range(3)]
    rows = ["  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[3]]).rstrip() for line in lines]
    cached = sum(one.cached for one in stages)
    return "\n".join([f"{config.name}: {len(stages)} stages, {cached} cached in {config.store}", "", *rows])


def _grouped(titles: Sequence[str]) -> str:
    """`base, prepare train tier1 tier2`"""
    groups: dict[str, list[str]] = {}
    for title in titles:
        first, _, last = title.rpartition(" ")
        groups.setdefault(first, []).append(last)
    return ", ".join(f"{first} {' '.join(lasts)}".strip() if first else ", ".join(lasts) for first, lasts in groups.items())


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; gives the exit code."""
    parser = parser_of("flows.dry_run", __doc__)
    add_recipe(parser)
    options = parser.parse_args(arguments)
    try:
        config = config_named(options.recipe, options.overrides)
        print(as_text(config, plan(config)))
    except (ConfigError, StoreError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
