"""Stage `evaluate`: one checkpoint on every evaluation set (paper section 4.1)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from parallel_r1 import prompts
from parallel_r1.config import EvaluateConfig
from parallel_r1.store import ArtifactRef, Manifest
from tasks.show import show_table
from tasks.stage import Metrics, Work, stage

RESULTS = "results.json"
SHARES = ("mean", "parallel_ratio", "valid_ratio", "truncated_ratio")


def show_results(title: str, ref: ArtifactRef, folder: Path) -> None:
    """Sets as rows, metrics as columns, with 95 % intervals."""
    results = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
    rows = [
        {"set": name, "problems": entry["problems"], "samples": entry["samples"]}
        | {metric: interval(values) for metric, values in entry["metrics"].items() if metric in SHARES or metric.startswith("pass@")}
        for name, entry in results["sets"].items()
    ]
    show_table(title, rows, ref, f"{results['engine']}, {results['tokens_per_second']:.0f} tokens/s. Percent, 95 % intervals.")


def interval(values: Mapping[str, float]) -> str:
    """`71.2 (66.0..76.1)`, in percent."""
    return f"{100 * values['value']:.1f} ({100 * values['low']:.1f}..{100 * values['high']:.1f})"


def refuse_another_prompt(trained: Manifest, config: EvaluateConfig) -> None:
    """Raises ValueError where a checkpoint was trained with another wording than it would be measured with."""
    theirs, ours = trained.versions.get("prompt"), prompts.fingerprint(config.prompt)
    if theirs not in (None, ours) and not config.other_prompt:
        raise ValueError(
            f"{trained.stage} {trained.key[:12]} was trained with the prompt {theirs}, evaluate.prompt = {config.prompt!r} is {ours}: a "
            "checkpoint is measured with the prompt it was trained with. Set that one, or evaluate.other_prompt: true"
        )


@stage("evaluate", version=2, show=show_results, gpu=True)
def evaluate(
    work: Work, config: EvaluateConfig, checkpoint: ArtifactRef, sets: Mapping[str, ArtifactRef], overlap: Mapping[str, ArtifactRef]
) -> Metrics:
    """Roll out every problem k times, grade, and summarise with intervals, over all problems and over those that no training set gives
    away."""
    refuse_another_prompt(work.manifest(checkpoint), config)
    given_away = {"overlap": ref for ref in overlap.values()}
    return work.run_program("parallel_r1.evaluation", config, {"checkpoint": checkpoint, **given_away, **sets})
