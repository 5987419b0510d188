"""The teachers: who writes the trajectories of the cold start (paper section 3.1).

`ScriptedTeacher` stands in for a strong model on procedural problems: it solves them by two right methods and makes realistic faults at set
rates, so that the filter has real work. The others read trajectories that exist already, or ask a served model (`parallel_r1/served.py`).
A trajectory row is {"id", "problem", "answer", "source", "text", "teacher"}.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from parallel_r1 import config
from parallel_r1.markup import (
    BLOCK_CLOSER,
    CLOSE_PARALLEL,
    CLOSE_PATH,
    CLOSE_SUMMARY,
    FINAL_ANSWER,
    OPEN_PARALLEL,
    OPEN_PATH,
    OPEN_SUMMARY,
    TAGS,
)
from parallel_r1.cleaning import clean_answer
from parallel_r1.problems import Problem, draw
from parallel_r1.procedural import Numbers, parse
from parallel_r1.served import Book, Endpoint, TeacherError, ask_all, totals
from parallel_r1.tables import SourceError, cell, read_file, read_hub

"""What the stage writes."""
Progress = Callable[[int, int], None]
"""Called with (finished, of how many)."""


def generate(
    generation: config.GenerateConfig, sets: Mapping[str, Sequence[Problem]], seed: int, on_progress: Progress
) -> Iterator[dict[str, Any]]:
    """Trajectories of a teacher that is a script or a file, one row at a time. `sets` are the training problems by name."""
    teacher = generation.teacher
    if isinstance(teacher, config.FilesTeacher | config.HubTeacher):
        yield from _existing(teacher, generation.count, on_progress)
        return
    problems = draw(sets, generation.problems, generation.count, seed)
    for problem, text in zip(problems, _scripted(teacher, problems, seed, on_progress), strict=True):
        yield {**asdict(problem), "text": text, "teacher": teacher.type}


def ask(
    generation: config.GenerateConfig,
    endpoint: Endpoint,
    sets: Mapping[str, Sequence[Problem]],
    seed: int,
    book: Book,
    on_progress: Progress,
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Trajectories of a model at an endpoint, and headline numbers. A row also holds what it took: "answers", tokens and cost.

    Raises TeacherError where the endpoint can't be used. A spend limit leaves out the problems that the money didn't reach.
    """
    problems = draw(sets, generation.problems, generation.count, seed)
    asked = ask_all(generation.teacher, endpoint, problems, seed, book, on_progress)
    rows = [
        {**asdict(problem), "teacher": generation.teacher.type, **vars(written)}
        for problem, written in zip(problems, asked.written, strict=True) if written
    ]  # fmt: skip
    if not rows:
        raise TeacherError(f"{endpoint.url}: max_cost {endpoint.max_cost:g} does not pay for one request: raise it, or lower max_tokens")
    return rows, {**totals(asked.written), "tokens_per_second": asked.tokens_per_second}


def written_metrics(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """How many trajectories there are, and how long."""
    return {"trajectories": len(rows), "mean_characters": sum(len(row["text"]) for row in rows) / len(rows)}


# --- trajectories that exist already --------------------------------------------------------------------------------------


def _existing(teacher: config.FilesTeacher | config.HubTeacher, count: int | None, on_progress: Progress) -> Iterator[dict[str, Any]]:
    if isinstance(teacher, config.FilesTeacher):
        rows, where, name = read_file(teacher.path), teacher.path, PurePosixPath(teacher.path).stem
    else:
        rows, where, name = read_hub(teacher.name, None, teacher.split, teacher.revision), f"hub data set {teacher.name}", teacher.name
    chosen = list(islice(rows, count))
    if not chosen:
        raise SourceError(f"{where}: holds no trajectories")
    for index, row in enumerate(chosen):
        yield {
            "id": str(row.get("id") or f"{name}-{index:05d}"),
            "problem": str(cell(row, teacher.problem_column, f"{where}: problem_column")),
            "answer": clean_answer(cell(row, teacher.answer_column, f"{where}: answer_column")),
            "source": str(row.get("source") or name),
            "text": str(cell(row, teacher.text_column, f"{where}: text_column")),
            "teacher": teacher.type,
        }
        on_progress(index + 1, len(chosen))


# --- the scripted teacher -------------------------------------------------------------------------------------------------


def _scripted(teacher: config.ScriptedTeacher, problems: Sequence[Problem], seed: int, on_progress: Progress) -> Iterator[str]:
    writer = ScriptedTeacher(teacher)
    for index, problem in enumerate(problems):
        yield writer.trajectory(problem, random.Random(f"scripted/{seed}/{index}/{problem.id}"))
        on_progress(index + 1, len(problems))


class _Work(NamedTuple):
    """A line of work: what is written, and the result that it comes to."""

    text: str
    result: int


class _Slip(NamedTuple):
    """One wrong step: which, and by how much it is off."""

    step: int
    off_by: int


_METHODS = ("In order.", "Gains first.")


class ScriptedTeacher:
    """Solves procedural problems in words, at the rates of its config section. Raises ValueError for any other problem."""

    def __init__(self, rates: config.ScriptedTeacher) -> None:
        self.rates = rates

    def sequential(self, problem: Problem, rng: random.Random) -> str:
        """A right solution without a block: what the base model learns from."""
        lead, left = self._lead(parse(problem.problem), rng)
        return _answered(lead, _solve(rng.choice(_METHODS), left))

    def trajectory(self, problem: Problem, rng: random.Random) -> str:
        """What a teacher writes when asked for parallel thinking: mostly a block, with slips and faults at the set rates."""
        lead, left = self._lead(parse(problem.problem), rng)
        works = [_solve(method, left, self._slip(left, rng)) for method in rng.sample(_METHODS, len(_METHODS))]
        if rng.random() < self.rates.parallel_share:
            text, faults = _block(lead, works, int(problem.answer)), ANSWER_FAULTS | MARKUP_FAULTS
        else:
            text, faults = _answered(lead, works[0]), ANSWER_FAULTS
        if rng.random() < self.rates.fault_rate:
            text = rng.choice(list(faults.values()))(text, rng)
        return text

    def _lead(self, numbers: Numbers, rng: random.Random) -> tuple[str, Numbers]:
        """What is written before the work, and the work that is left: the first step done, the numbers once more, or nothing."""
        if rng.random() >= self.rates.lead_share:
            return "", numbers
        if len(numbers.events) > 1 and rng.random() < 0.5:
            first = _steps(Numbers(numbers.start, numbers.events[:1]), None)
            return f"First {first.text}.\n", Numbers(first.result, numbers.events[1:])
        changes = "".join(f", {event:+d}" for event in numbers.events)
        return f"Start {numbers.start}{changes}.\n", numbers

    def _slip(self, numbers: Numbers, rng: random.Random) -> _Slip | None:
        if rng.random() >= self.rates.slip_rate:
            return None
        step = rng.randrange(len(numbers.events))
        count = numbers.start + sum(numbers.events[: step + 1])
        return _Slip(step, rng.choice([off for off in (-10, -2, -1, 1, 2, 10) if count + off >= 0]))


def _solve(method: str, numbers: Numbers, slip: _Slip | None = None) -> _Work:
    """The work by one of the two methods; they differ where gains and losses are mixed."""
    if method == "Gains first.":
        numbers = Numbers(numbers.start, tuple(sorted(numbers.events, key=lambda event: event < 0)))
    work = _steps(numbers, slip)
    return _Work(f"{method} {work.text}.", work.result)


def _steps(numbers: Numbers, slip: _Slip | None) -> _Work:
    """One sum per event; a slip is carried on."""
    count, steps = numbers.start, []
    for index, event in enumerate(numbers.events):
        before = count
        count += event + (slip.off_by if slip and slip.step == index else 0)
        steps.append(f"{before}{event:+d}={count}")
    return _Work(";".join(steps), count)


def _answered(lead: str, work: _Work) -> str:
    return f"{lead}{work.text}\n{FINAL_ANSWER} {work.result}"


def _block(lead: str, works: Sequence[_Work], right: int) -> str:
    """Two paths and what follows; where they differ, the right one is taken if there is one (no student can know which)."""
    first, second = works
    if first.result == second.result:
        final, summary = first.result, f"Both give {first.result}."
    else:
        final = right if right in (first.result, second.result) else first.result
        summary = f"One gives {first.result}, one gives {second.result}. Take {final}."
    paths = "".join(f"{OPEN_PATH}{work.text}{CLOSE_PATH}" for work in works)
    return f"{lead}{OPEN_PARALLEL}{paths}{BLOCK_CLOSER}{summary}{CLOSE_SUMMARY}\n{FINAL_ANSWER} {final}"


# --- faults ---------------------------------------------------------------------------------------------------------------


def _wrong_answer(text: str, rng: random.Random) -> str:
    body, mark, answer = text.rpartition(FINAL_ANSWER)
    return f"{body}{mark} {int(answer) + rng.choice((-2, -1, 1, 2))}"


def _cut_off(text: str, rng: random.Random) -> str:
    return text[: rng.randrange(10, text.index(FINAL_ANSWER) + 1)]


def _without_path_end(text: str, rng: random.Random) -> str:
    return text.replace(CLOSE_PATH, "", 1)


def _without_parallel_end(text: str, rng: random.Random) -> str:
    return text.replace(CLOSE_PARALLEL, "")


def _without_summary_start(text: str, rng: random.Random) -> str:
    return text.replace(OPEN_SUMMARY, "")


def _single_path(text: str, rng: random.Random) -> str:
    return text[: text.rindex(OPEN_PATH)] + text[text.index(CLOSE_PARALLEL) :]


def _empty_path(text: str, rng: random.Random) -> str:
    return text[: text.rindex(OPEN_PATH) + len(OPEN_PATH)] + text[text.rindex(CLOSE_PATH) :]


def _text_between_paths(text: str, rng: random.Random) -> str:
    between = f"{CLOSE_PATH}{OPEN_PATH}"
    return text.replace(between, f"{CLOSE_PATH} Now the other way. {OPEN_PATH}")


def _text_before_summary(text: str, rng: random.Random) -> str:
    return text.replace(BLOCK_CLOSER, f"{CLOSE_PARALLEL} Now compare.\n{OPEN_SUMMARY}")


def _near_miss_tag(text: str, rng: random.Random) -> str:
    tag = rng.choice(TAGS)
    spellings = (tag.upper(), tag.lower(), f"{tag[:-1]} >", f"{tag[:-1]} 1>", f"＜{tag[1:-1]}＞")
    return text.replace(tag, rng.choice(spellings), 1)


Breaker = Callable[[str, random.Random], str]
"""Makes one fault in a faultless trajectory."""

ANSWER_FAULTS: dict[str, Breaker] = {"wrong_answer": _wrong_answer, "cut_off": _cut_off}
"""Faults that any trajectory can have."""

MARKUP_FAULTS: dict[str, Breaker] = {
    "missing_path_end": _without_path_end,
    "missing_parallel_end": _without_parallel_end,
    "missing_summary_start": _without_summary_start,
    "single_path": _single_path,
    "empty_path": _empty_path,
    "text_between_paths": _text_between_paths,
    "text_before_summary": _text_before_summary,
    "near_miss_tag": _near_miss_tag,
}
"""Faults of a block, as real teachers make them (method.md section 4)."""
