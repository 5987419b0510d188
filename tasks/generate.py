"""Stage `generate`: the teacher writes one trajectory per problem (paper section 3.1)."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from parallel_r1.config import GenerateConfig, OpenAITeacher, ServedTeacher
from parallel_r1.jobs import PROBLEMS, TRAJECTORIES, append_lines, read_lines
from parallel_r1.markup import validate
from parallel_r1.problems import Problem, read_problems
from parallel_r1.served import Book, Endpoint
from parallel_r1.store import ArtifactRef
from parallel_r1.teacher import ask, generate, written_metrics
from tasks.show import show_table
from tasks.stage import Metrics, Work, stage

SHOWN_TRAJECTORIES = 5
ROWS_PER_WRITE = 500


def show_trajectories(title: str, ref: ArtifactRef, folder: Path) -> None:
    """The first trajectories, how many there are, what they cost, and how many answers were accepted."""
    trajectories = read_lines(folder / TRAJECTORIES)
    rows = [{"problem": row["problem"], "text": row["text"]} for row in trajectories[:SHOWN_TRAJECTORIES]]
    size = f"{ref.metrics['trajectories']:.0f} trajectories, {ref.metrics['mean_characters']:.0f} characters each"
    show_table(title, rows, ref, f"{size}. {expense(ref.metrics)}")
    asked = "answers" in ref.metrics
    by = "every answer, by the grammar and the right result" if asked else "by the grammar alone; `filter` judges answers too"
    show_table(f"{title} acceptance", list(acceptance(trajectories)), ref, by)


def expense(metrics: Mapping[str, float]) -> str:
    """What a teacher took, in words."""
    if "answers" not in metrics:
        return "No tokens were counted: the teacher is a script or a file"
    problems = metrics["trajectories"] + metrics["unasked"]
    text = (
        f"Accepted: {metrics['accepted']:.0f} of {metrics['trajectories']:.0f} ({metrics['accepted'] / metrics['trajectories']:.1%}), "
        f"from {metrics['answers']:.0f} answers; {metrics['prompt_tokens']:,.0f} prompt tokens, {metrics['completion_tokens']:,.0f} answer "
        f"tokens, {metrics['tokens_per_second']:,.0f} tokens/s, cost {metrics['cost']:.4g}"
    )
    if metrics["unasked"]:
        text += f". **Stopped at the spend limit: {metrics['unasked']:.0f} of {problems:.0f} problems were not asked**"
    return text


def acceptance(trajectories: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """How many answers are accepted, and how many have which fault, with an example of each."""
    judged = [(row["id"], faults) for row in trajectories for faults in _judged(row)]
    examples = {fault["code"]: f"{name}: {fault['message']}" for name, found in reversed(judged) for fault in reversed(found)}
    counts = Counter(code for _, found in judged for code in {fault["code"] for fault in found})
    accepted = sum(not found for _, found in judged)
    for what, count in [("accepted", accepted), *counts.most_common()]:
        yield {"fault": what, "answers": count, "share": f"{count / len(judged):.1%}", "example": examples.get(what, "")}


def _judged(row: Mapping[str, Any]) -> list[list[dict[str, Any]]]:
    """The faults of each answer that the teacher gave: noted when it was asked, or found now."""
    if "answers" in row:
        return [answer["faults"] for answer in row["answers"]]
    return [[asdict(fault) for fault in validate(row["text"])]]


@stage("generate", version=1, show=show_trajectories, gpu=lambda config: isinstance(config.teacher, ServedTeacher))
def write_trajectories(work: Work, config: GenerateConfig, sets: Mapping[str, ArtifactRef]) -> Metrics:
    """Ask the teacher, who may be a script, a model at an endpoint or served here, or a file of trajectories that exist already."""
    if isinstance(config.teacher, ServedTeacher):
        return work.run_program("parallel_r1.teaching", config, sets)
    problems = {name: read_problems(work.read(ref) / PROBLEMS) for name, ref in sets.items()}
    if isinstance(config.teacher, OpenAITeacher):
        return _asked(work, config, config.teacher, problems)
    rows = generate(config, problems, work.seed, work.progress.report)
    count = characters = 0
    while chunk := list(itertools.islice(rows, ROWS_PER_WRITE)):
        append_lines(work.out / TRAJECTORIES, chunk)
        count += len(chunk)
        characters += sum(len(row["text"]) for row in chunk)
    return {"trajectories": count, "mean_characters": characters / count}


def _asked(work: Work, config: GenerateConfig, teacher: OpenAITeacher, problems: Mapping[str, Sequence[Problem]]) -> Metrics:
    """Answers are kept beside the store, where every later run finds them: nothing is bought twice."""
    book = Book(work.call.run.state / "answers", work.call.key)
    rows, metrics = ask(config, Endpoint.of(teacher), problems, work.seed, book, work.progress.report)
    append_lines(work.out / TRAJECTORIES, rows)
    if metrics["unasked"]:
        work.progress.note(f"teacher.max_cost {teacher.max_cost:g}: {expense(written_metrics(rows) | metrics)}. Raise it to go on")
    return written_metrics(rows) | metrics
