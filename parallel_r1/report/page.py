"""Puts the report together. HTML comes from report.html.j2 with everything escaped but our own SVG."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from parallel_r1.config import PipelineConfig, ScratchStudent
from parallel_r1.config import ScriptedTeacher as ScriptedTeacherConfig
from parallel_r1.report import analysis, outcome, rollouts, tables
from parallel_r1.report.inputs import ReportInput
from parallel_r1.report.numbers import Estimate, estimate, number
from parallel_r1.report.tables import Table, as_markdown, escape_markdown

NOT_SHOWN_AT_THIS_SCALE = (
    "That parallel thinking beats sequential rl. In trial runs of this recipe, GRPO without any block was more accurate "
    "after as many steps; this run has no such twin to compare with.",
    "That the alternating reward keeps the parallel ratio up while accuracy grows. "
    "In trial runs the ratio fell as it does under accuracy alone.",
    "That blocks move to a later place in the response as training goes on. In trial runs they moved to its very start.",
    "A level to count on: models of this size differ by up to 30 points between seeds after sft. "
    "Look at gains within a run, not at levels.",
)


@dataclass(frozen=True)
class Report:
    """The finished report: two texts and strict JSON data (no NaN)."""

    html: str
    markdown: str
    results: dict[str, Any]


@dataclass(frozen=True)
class _Samples:
    label: str
    right: int
    seen: int
    rollouts: list[rollouts.SampleRollout]


def build(report: ReportInput) -> Report:
    """Make the report of a run. Raises ValueError naming file and line where a jsonl file of a stage is broken."""
    from parallel_r1.report import curves  # matplotlib takes half a second to load, and cached runs draw nothing

    indexes = [rollouts.index(one.rollouts) for one in report.evaluations]
    found = outcome.changes(report.evaluations, indexes)
    seconds = math.fsum(value for stage in report.stages if math.isfinite(value := number(stage.seconds)))
    shown = {
        "name": rollouts.shown(report.name),
        "facts": _facts(report.config),
        "summary": outcome.summary(report.evaluations, found, seconds),
        "tables": _tables(report, found, indexes),
        "analysis": analysis.tables(report.analysis) if report.analysis else [],
        "analysed": analysis.summary(report.analysis) if report.analysis else [],
        "limits": NOT_SHOWN_AT_THIS_SCALE if isinstance(report.config.student, ScratchStudent) else (),
        "config": config_yaml(report.config),
    }
    pictures = {
        "accuracy": curves.accuracy_panels(report.evaluations),
        "supervised": curves.supervised_panels(report.curves),
        "rl": curves.rl_panels(report.curves),
        "gap": curves.largest_gap(report.curves),
        "trends": curves.trend_panels(report.analysis["trends"]) if report.analysis else [],
        "budget": curves.budget_panels(report.analysis["budget"], analysis.sequential(report.analysis)) if report.analysis else [],
        "pairs": analysis.samples(report.analysis) if report.analysis else [],
        "samples": [_samples(report, place, found_rows) for place, found_rows in enumerate(indexes)],
    }
    html, markdown = template("report.html.j2").render(**shown, **pictures), _markdown(**shown)
    return Report(rollouts.encodable(html), rollouts.encodable(markdown), results(report))


def results(report: ReportInput) -> dict[str, Any]:
    """Every measured number as a row; None where a number is unknown."""
    rows = []
    for evaluation in report.evaluations:
        for name, entry in (evaluation.results.get("sets") or {}).items():
            size = {"problems": entry.get("problems"), "samples": entry.get("samples")}
            for metric in entry.get("metrics") or {}:
                values = _finite(estimate(entry["metrics"], metric))
                rows.append({"checkpoint": evaluation.label, "set": name, "metric": metric, **values, **size})
    return {"name": report.name, "rows": rows}


def config_yaml(config: PipelineConfig) -> str:
    """The whole resolved config; credentials inside URLs are left out."""
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=110)
    return re.sub(r"(\w://)[^/\s@]+@", r"\1***@", text)


def _finite(one: Estimate) -> dict[str, float | None]:
    return {part: value if math.isfinite(value := getattr(one, part)) else None for part in ("value", "low", "high")}


def _tables(report: ReportInput, found: list[outcome.Change], indexes: list[rollouts.RolloutIndex]) -> dict[str, Table | None]:
    evaluated = outcome.set_names(report.evaluations)
    return {
        "results": tables.results(report.evaluations) if evaluated else None,
        "paper": tables.paper(report.evaluations, report.config),
        "estimators": tables.estimators(report.evaluations) if evaluated else None,
        "differences": tables.differences(found) if found else None,
        "by_set": tables.by_set(report.evaluations, indexes) if evaluated else None,
        "funnel": tables.funnel(report.funnel) if report.funnel else None,
        "stages": tables.stages(report.stages, report.evaluations) if report.stages else None,
    }


def _facts(config: PipelineConfig) -> list[tuple[str, str]]:
    student = config.student
    scratch = isinstance(student, ScratchStudent)
    facts = [("seed", str(config.seed)), ("student", "a small model trained from scratch" if scratch else rollouts.shown(student.name))]
    if config.generate:
        teacher = config.generate.teacher
        scripted = isinstance(teacher, ScriptedTeacherConfig)
        facts.append(("teacher", "a script, not a model" if scripted else rollouts.shown(getattr(teacher, "model", None) or teacher.type)))
    if config.rl:
        facts.append(("rl", ", then ".join(f"{stage.name} ({stage.reward.replace('_', ' ')}, {stage.steps} steps)" for stage in config.rl)))
    return facts


def _samples(report: ReportInput, place: int, found: rollouts.RolloutIndex) -> _Samples:
    evaluation = report.evaluations[place]
    outcomes = [right for problems in found.correct.values() for rows in problems.values() for right in rows]
    chosen = rollouts.samples(evaluation.rollouts, found, report.config.report.sample_rollouts)
    return _Samples(rollouts.shown(evaluation.label), sum(outcomes), len(outcomes), chosen)


def _markdown(
    name: str,
    facts: list[tuple[str, str]],
    summary: list[str],
    tables: dict[str, Table | None],
    analysis: list[Table],
    analysed: list[str],
    limits: tuple[str, ...],
    config: str,
) -> str:
    listed = "\n".join(f"- {escape_markdown(title)}: {escape_markdown(text)}" for title, text in facts)
    parts = [f"# {escape_markdown(name)}", escape_markdown(" ".join(summary)), listed]
    for key in ("results", "paper", "differences", "estimators", "by_set"):
        parts += _markdown_section(tables[key])
    if limits:
        parts += ["## What this scale does not show", "\n".join(f"- {escape_markdown(limit)}" for limit in limits)]
    parts += ["## What the blocks are good for", escape_markdown(" ".join(analysed))] if analysed else []
    for table in analysis:
        parts += _markdown_section(table)
    for key in ("funnel", "stages"):
        parts += _markdown_section(tables[key])
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", config)), default=0))
    return "\n\n".join([*parts, "## Config", f"{fence}yaml\n{config}{fence}"]) + "\n"


def _markdown_section(table: Table | None) -> list[str]:
    return [f"## {escape_markdown(table.caption)}", as_markdown(table)] if table else []


@cache
def template(name: str) -> Template:
    """A page's template, with everything escaped but our own SVG."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["svg"] = Markup
    environment.tests["block"] = lambda part: isinstance(part, rollouts.Block)
    return environment.get_template(name)
