"""Stage `report`: the page that a person reads after a run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallel_r1.config import PipelineConfig
from parallel_r1.jobs import METRICS, RESULTS, ROLLOUTS
from parallel_r1.store import ArtifactRef
from tasks.analysis import ANALYSIS
from tasks.show import show_markdown
from tasks.stage import Metrics, Work, stage

if TYPE_CHECKING:
    from parallel_r1.report import Curve, Evaluation, StageRun

PAGE = "report.html"
TEXT = "report.md"
TABLE = "results.txt"
TRAINING = ("base", "sft", "rl")


def show_report(title: str, ref: ArtifactRef, folder: Path) -> None:
    """The Markdown twin of the page, with a pointer to the page."""
    text = (folder / TEXT).read_text(encoding="utf-8")
    show_markdown(title, f"The page with pictures: `{ref.uri}/{PAGE}`\n\n{text}", ref)


def label_of(title: str) -> str:
    """What a stage is called in the report: `rl easy` for the training and for its evaluation."""
    return title.removeprefix("evaluate ").removeprefix("prepare ")


@stage("report", version=5, show=show_report)
def write_report(work: Work, config: PipelineConfig, stages: Mapping[str, ArtifactRef]) -> Metrics:
    """One self-contained page of everything that this run made, the same as Markdown, and the results as data and for a terminal."""
    from parallel_r1.report import ReportInput, build, results_table  # a third of a second, and cached runs write no report

    evaluations = list(_evaluations(work, stages))
    report = build(
        ReportInput(
            name=config.name,
            config=config,
            stages=list(_stage_runs(work, stages)),
            evaluations=evaluations,
            curves=list(_curves(work, stages)),
            funnel=next((ref.metrics for ref in stages.values() if ref.stage == "filter"), None),
            analysis=_analysis(work, stages),
        )
    )
    (work.out / PAGE).write_text(report.html, encoding="utf-8")
    (work.out / TEXT).write_text(report.markdown, encoding="utf-8")
    (work.out / RESULTS).write_text(json.dumps(report.results, indent=1), encoding="utf-8")
    (work.out / TABLE).write_text(results_table(evaluations), encoding="utf-8")
    return {"characters": len(report.html)}


def _stage_runs(work: Work, stages: Mapping[str, ArtifactRef]) -> Iterator[StageRun]:
    from parallel_r1.report import StageRun

    for title, ref in stages.items():
        made = work.manifest(ref)
        yield StageRun(ref.stage, label_of(title), ref.key, made.seconds, made.versions, ref.metrics)


def _evaluations(work: Work, stages: Mapping[str, ArtifactRef]) -> Iterator[Evaluation]:
    from parallel_r1.report import Evaluation

    for title, ref in stages.items():
        if ref.stage == "evaluate":
            folder = work.read(ref, RESULTS, ROLLOUTS)
            yield Evaluation(label_of(title), json.loads((folder / RESULTS).read_text(encoding="utf-8")), folder / ROLLOUTS)


def _analysis(work: Work, stages: Mapping[str, ArtifactRef]) -> dict[str, Any] | None:
    found = [work.read(ref, ANALYSIS) / ANALYSIS for ref in stages.values() if ref.stage == "analysis"]
    return json.loads(found[-1].read_text(encoding="utf-8")) if found else None


def _curves(work: Work, stages: Mapping[str, ArtifactRef]) -> Iterator[Curve]:
    from parallel_r1.report import Curve

    for title, ref in stages.items():
        if ref.stage in TRAINING and METRICS in work.manifest(ref).files:
            yield Curve(label_of(title), work.read(ref, METRICS) / METRICS)
