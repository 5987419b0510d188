"""Stage `analysis`: what the blocks of a run are good for, and how their use changes over training (paper section 5)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from parallel_r1.config import AnalysisConfig
from parallel_r1.jobs import METRICS, ROLLOUTS
from parallel_r1.store import ArtifactRef
from tasks.rollouts import laid_out
from tasks.show import curves_image, show_image, show_markdown, show_table
from tasks.stage import Metrics, Work, stage

ANALYSIS = "analysis.json"
CURVES = ("position", "blocks", "parallel_ratio", "similarity", "agreement")
SHARES = {
    "similarity": "BLEU of paths", "agreement": "paths agree", "right_where_agreed": "right where they agree",
    "right_where_split": "right where they don't", "right": "right", "any_path_right": "a path is right",
}  # fmt: skip


def show_analysis(title: str, ref: ArtifactRef, folder: Path) -> None:
    """The paths of every checkpoint, what was done and what it earned, the curves, early and late rollouts."""
    found = json.loads((folder / ANALYSIS).read_text(encoding="utf-8"))
    paths = [
        {"checkpoint": label, "blocks": entry["blocks"]} | {name: _percent(entry[key]) for key, name in SHARES.items()}
        for label, entry in found["paths"].items()
    ]
    show_table(title, paths, ref, "what the paths of a block come to. Percent, 95 % intervals over problems")
    if found["depth"]:
        within = "points of accuracy over the sequential one within a budget of tokens"
        show_table(f"{title} depth", list(_depth_rows(found["depth"])), ref, within)
    if found["behaviour"]:
        show_table(f"{title} behaviour", list(_behaviour_rows(found["behaviour"])), ref, "what rollouts did in rl, and what it earned")
    rows, ends = _points(found["trends"])
    if names := [name for name in CURVES if any(name in row for row in rows)]:
        show_image(f"{title} curves", curves_image(rows, names, ends), ", ".join(names))
    if any(any(pair.values()) for pair in found["samples"].values()):
        show_markdown(f"{title} samples", "\n\n".join(_samples(found["samples"])), ref)


def _percent(estimate: Mapping[str, float | None]) -> str:
    if estimate["value"] is None:
        return "none"
    value = f"{100 * estimate['value']:.1f}"
    return value if estimate["low"] is None else f"{value} ({100 * estimate['low']:.1f}..{100 * estimate['high']:.1f})"


def _depth_rows(entries: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for entry in entries:
        names = {"set": entry["set"], "checkpoint": entry["checkpoint"], "sequential": entry["sequential"], "budget": entry["budget"]}
        yield names | {"at equal critical path": _percent(entry["critical_path"]), "at equal tokens": _percent(entry["tokens"])}


def _behaviour_rows(stages: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[dict[str, Any]]:
    for stage_title, entries in stages.items():
        for entry in entries:
            did = f"{'right' if entry['correct'] else 'wrong'}, {entry['form']}"
            reward = "" if entry["reward"]["value"] is None else f"{entry['reward']['value']:.2f}"
            shares = {f"{when} steps": f"{entry[when]:.1%}" for when in ("early", "late")}
            yield {"stage": stage_title, "rollout": did, **shares, "reward": reward, "seen": entry["n"]}


def _points(stages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, float]], list[int]]:
    """The middle of every window as a row with its step over all stages, and the steps at which stages end."""
    rows, ends = [], [0]
    for entry in stages:
        for window in entry["windows"]:
            values = {name: window[name]["value"] for name in CURVES if window[name]["value"] is not None}
            rows.append({"step": ends[-1] + (window["first"] + window["last"]) / 2, **values})
        ends.append(ends[-1] + entry["steps"])
    return rows, ends[1:-1]


def _samples(stages: Mapping[str, Mapping[str, Sequence[dict[str, Any]]]]) -> Iterator[str]:
    for stage_title, pair in stages.items():
        for when, rows in pair.items():
            yield f"## {stage_title}, {when}"
            yield from map(laid_out, rows)


@stage("analysis", version=1, show=show_analysis)
def analyse_run(work: Work, config: AnalysisConfig, training: Mapping[str, ArtifactRef], evaluations: Mapping[str, ArtifactRef]) -> Metrics:
    """Follow the blocks over training, and compare their paths with each other and with sequential thinking."""
    from parallel_r1.analysis import analyse  # numpy and more, which a cached run does without

    stages = {title: work.read(ref, METRICS, ROLLOUTS) for title, ref in training.items()}
    checkpoints = {label: work.read(ref, ROLLOUTS) for label, ref in evaluations.items()}
    found = analyse(stages, checkpoints, config)
    (work.out / ANALYSIS).write_text(json.dumps(found, ensure_ascii=False, indent=1), encoding="utf-8")
    agreements = {label: entry["agreement"]["value"] for label, entry in found["paths"].items()}
    return {f"{label}/agreement": value for label, value in agreements.items() if value is not None}
