"""Stage `evaluate`: one checkpoint on every evaluation set (paper section 4.1)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from parallel_r1 import prompts
from parallel_r1.config import EvaluateConfig
from parallel_r1.jobs import RESULTS, ROLLOUTS, read_lines
from parallel_r1.store import ArtifactRef, Manifest
from tasks.rollouts import show_rollouts
from tasks.show import show_table
from tasks.stage import Metrics, Work, stage

SHOWN_PROBLEMS = 30
SHARES = ("mean", "pass@k", "maj@k", "best@k", "parallel_ratio", "valid_ratio", "truncated_ratio")
MUCH_TRUNCATED = 0.1


def show_results(title: str, ref: ArtifactRef, folder: Path) -> None:
    """Sets as rows, metrics as columns, with 95 % intervals."""
    results = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
    rows = []
    for name, entry in results["sets"].items():
        size = {"set": name, "problems": entry["problems"], "samples": entry["samples"]}
        rows.append(size | {metric: interval(entry["metrics"][metric]) for metric in SHARES})
        if entry.get("clean", {}).get("problems"):
            clean = entry["clean"]
            size |= {"set": f"{name}, clean", "problems": clean["problems"]}
            rows.append(size | {metric: interval(clean["metrics"][metric]) for metric in SHARES})
    cut = [name for name, entry in results["sets"].items() if entry["metrics"]["truncated_ratio"]["value"] > MUCH_TRUNCATED]
    warning = f" **Cut at the token limit in more than 10 % of rollouts: {', '.join(cut)}.**" if cut else ""
    text = f"{results['engine']}, {ref.metrics['tokens_per_second']:.0f} tokens/s. Percent, 95 % intervals over problems.{warning}"
    show_table(title, rows, ref, text)
    samples = read_lines(folder / ROLLOUTS)
    show_table(f"{title} problems", list(by_problem(samples)), ref, f"the hardest {SHOWN_PROBLEMS} problems first")
    if odd := list(disagreements(samples)):
        show_table(f"{title} grader", odd[:SHOWN_PROBLEMS], ref, f"{len(odd)} verdicts differ from comparing the answers as text")
    show_rollouts(title, ref, folder)


def by_problem(samples: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """One row per problem, the least solved first: how often it was solved, and what was answered."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in samples:
        groups.setdefault((row["set"], row["problem_id"]), []).append(row)
    ordered = sorted(groups.items(), key=lambda item: sum(row["correct"] for row in item[1]) / len(item[1]))
    for (name, problem), rows in ordered[:SHOWN_PROBLEMS]:
        answers = Counter(row["extracted"] or "none" for row in rows).most_common(3)
        yield {
            "set": name, "problem": problem, "text": rows[0]["problem"], "right": f"{sum(row['correct'] for row in rows)} of {len(rows)}",
            "answer": rows[0]["answer"], "given": ", ".join(f"{answer} ({count})" for answer, count in answers),
            "with blocks": sum(row["blocks"] > 0 for row in rows),
        }  # fmt: skip


def disagreements(samples: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Responses that the grader judged otherwise than a comparison of the texts would: the ones to look at when in doubt of it."""
    for row in samples:
        same_text = (row["extracted"] or "").strip() == row["answer"].strip()
        if same_text != row["correct"]:
            verdict = {"grader": "right" if row["correct"] else "wrong", "as text": "same" if same_text else "different"}
            yield {"problem": row["problem_id"], "answer": row["answer"], "given": row["extracted"], **verdict}


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


@stage("evaluate", version=3, show=show_results, gpu=True)
def evaluate(
    work: Work, config: EvaluateConfig, checkpoint: ArtifactRef, sets: Mapping[str, ArtifactRef], overlap: Mapping[str, ArtifactRef]
) -> Metrics:
    """Roll out every problem k times, grade, and summarise with intervals, over all problems and over those that no training set gives
    away."""
    refuse_another_prompt(work.manifest(checkpoint), config)
    given_away = {"overlap": ref for ref in overlap.values()}
    metrics = work.run_program("parallel_r1.evaluation", config, {"checkpoint": checkpoint, **given_away, **sets})
    work.versions["engine"] = json.loads((work.out / RESULTS).read_text(encoding="utf-8"))["engine"]
    return metrics
