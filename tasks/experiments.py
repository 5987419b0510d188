"""Stage `experiments`: one page about the rows of a results table, each a recipe at several seeds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from parallel_r1.config import PipelineConfig, Section
from parallel_r1.experiments import RowRun
from parallel_r1.jobs import METRICS, RESULTS, ROLLOUTS
from parallel_r1.report.combined import Experiments, build
from parallel_r1.store import ArtifactRef
from tasks.report import PAGE, TEXT, show_report
from tasks.stage import Metrics, Work, stage


class ExperimentsConfig(Section):
    """What the page is about. `failed`: why a row has no results, by `recipe, seed N`."""

    name: str
    """What the table is called; the newest page of each name is kept by `make gc`."""
    recipes: dict[str, PipelineConfig]
    seeds: list[int]
    failed: dict[str, str] = {}


def input_name(recipe: str, seed: int, title: str) -> str:
    """What an artifact of a row is called among the inputs of the page: `parallel_r1_seen/0/rl hard`."""
    return f"{recipe}/{seed}/{title}"


@stage("experiments", version=2, show=show_report)
def write_experiments(work: Work, config: ExperimentsConfig, rows: Mapping[str, ArtifactRef]) -> Metrics:
    """One self-contained page of all rows, the same as Markdown, and the numbers as data."""
    runs = list(_row_runs(work, config, rows))
    seconds = sum(work.manifest(ref).seconds for ref in {ref.uri: ref for ref in rows.values()}.values())
    report = build(Experiments(runs, config.failed, seconds))
    (work.out / PAGE).write_text(report.html, encoding="utf-8")
    (work.out / TEXT).write_text(report.markdown, encoding="utf-8")
    (work.out / RESULTS).write_text(json.dumps(report.results, indent=1), encoding="utf-8")
    return {"rows": len({run.recipe for run in runs}), "runs": len(runs), "failed": len(config.failed)}


def _row_runs(work: Work, config: ExperimentsConfig, rows: Mapping[str, ArtifactRef]) -> list[RowRun]:
    evaluations: dict[tuple[str, int], dict[str, Path]] = {}
    training: dict[tuple[str, int], dict[str, Path]] = {}
    for name, ref in rows.items():
        recipe, seed, title = name.split("/", 2)
        row = recipe, int(seed)
        if ref.stage == "evaluate":
            evaluations.setdefault(row, {})[title.removeprefix("evaluate ")] = work.read(ref, RESULTS, ROLLOUTS)
        else:
            training.setdefault(row, {})[title] = work.read(ref, METRICS, ROLLOUTS)
    return [
        RowRun(recipe, seed, config.recipes[recipe].model_copy(update={"seed": seed}), found, training.get((recipe, seed), {}))
        for (recipe, seed), found in evaluations.items()
    ]
