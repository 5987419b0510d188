"""Stage `evaluate`: k rollouts per problem of every set, graded, with intervals (paper section 4.1).

Rollouts are kept per problem as they finish, so a killed evaluation goes on with the problems that are left.
"""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from parallel_r1 import jobs
from parallel_r1.config import EvaluateConfig
from parallel_r1.metrics import summarise
from parallel_r1.problems import Problem, read_problems
from parallel_r1.rollout.engines import Engine, open_engine
from parallel_r1.rollout.machine import Rollout
from parallel_r1.rollout.records import Studio
from parallel_r1.training import runs

PROGRESS_EVERY = 20
MUCH_TRUNCATED = 0.1
NO_SETS = ("checkpoint", "overlap")
"""Inputs of the job that are no problem sets."""


@dataclass
class _Pending:
    """A problem whose rollouts are under way."""

    set_name: str
    problem: Problem
    prompt_ids: list[int]
    samples: int
    finished: list[tuple[int, Rollout]] = field(default_factory=list)


def main() -> None:
    """Run one job: inputs `checkpoint` and the evaluation sets by name."""
    job = jobs.read_job()
    runs.quiet(job.threads)
    config = EvaluateConfig.model_validate(job.config)
    checkpoint = job.inputs["checkpoint"] / "checkpoint"
    studio = Studio(AutoTokenizer.from_pretrained(checkpoint), config.rollout)
    names = [name for name in job.inputs if name not in NO_SETS]
    sets = {name: read_problems(job.inputs[name] / jobs.PROBLEMS)[: config.limit] for name in names}

    shard = job.work / jobs.ROLLOUTS
    done = {(row["set"], row["problem_id"]) for row in _whole_problems(shard, config)}
    pending, too_long = _pending(studio, config, sets, done)
    if done:
        jobs.note(f"goes on: {len(done)} problems were finished before, {len(pending)} are left")
    began = time.monotonic()
    engine = open_engine(checkpoint, config.rollout, job.seed)
    jobs.note(f"engine: {engine.name}")
    total = sum(map(len, sets.values())) - too_long
    right = seen = 0
    for count, rows in enumerate(_carry_out(engine, studio, pending, job.seed), start=len(done) + 1):
        jobs.append_lines(shard, rows)
        right += sum(row["correct"] for row in rows)
        seen += len(rows)
        if count % PROGRESS_EVERY == 0 or count == total:
            jobs.report_progress(count, total, {"accuracy": right / seen})
    seconds = time.monotonic() - began
    rows = _in_order(_whole_problems(shard, config), sets)
    results = _results(rows, config, job.seed, names, _given_away(job))
    results |= {"engine": engine.name, "prompts_too_long": too_long, "sampled_tokens": sum(row["sampled_tokens"] for row in rows)}
    jobs.append_lines(job.out / jobs.ROLLOUTS, rows)
    (job.out / jobs.RESULTS).write_text(json.dumps(results, indent=2), encoding="utf-8")
    sampled = sum(row["sampled_tokens"] for row in rows if (row["set"], row["problem_id"]) not in done)
    jobs.finish({**_headline(results), "tokens_per_second": round(sampled / seconds, 1), "prompts_too_long": too_long})


def _whole_problems(shard: Path, config: EvaluateConfig) -> list[dict[str, Any]]:
    """The rows of problems that have all their samples; the file afterwards holds nothing else."""
    by_problem: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in jobs.read_lines(shard):
        by_problem[row["set"], row["problem_id"]].append(row)
    rows = [row for (name, _), found in by_problem.items() if len(found) == config.samples_of(name) for row in found]
    jobs.write_lines(shard, rows)
    return rows


def _pending(
    studio: Studio, config: EvaluateConfig, sets: dict[str, list[Problem]], done: set[tuple[str, str]]
) -> tuple[list[_Pending], int]:
    pending, too_long = [], 0
    for name, problems in sets.items():
        for problem in problems:
            prompt_ids = studio.prompt_ids(config.prompt, problem.problem)
            if prompt_ids is None:
                too_long += 1
            elif (name, problem.id) not in done:
                pending.append(_Pending(name, problem, prompt_ids, config.samples_of(name)))
    return pending, too_long


def _carry_out(engine: Engine, studio: Studio, pending: list[_Pending], seed: int) -> Iterator[list[dict[str, Any]]]:
    """The rows of one problem after another, as they finish."""
    owners: dict[int, tuple[_Pending, int]] = {}

    def rollouts() -> Iterator[Rollout]:
        for entry in pending:
            for sample in range(entry.samples):
                rollout = studio.rollout(entry.prompt_ids, f"{seed}/{entry.set_name}/{entry.problem.id}/{sample}")
                owners[id(rollout)] = (entry, sample)
                yield rollout

    for rollout in engine.run(rollouts()):
        entry, sample = owners.pop(id(rollout))
        entry.finished.append((sample, rollout))
        if len(entry.finished) == entry.samples:
            entry.finished.sort(key=lambda pair: pair[0])
            done = [finished for _, finished in entry.finished]
            yield studio.records(done, [entry.problem] * entry.samples, entry.set_name, range(entry.samples))
            entry.finished = []


def _in_order(rows: list[dict[str, Any]], sets: dict[str, list[Problem]]) -> list[dict[str, Any]]:
    """Rows in the order of sets and problems, whatever finished first: equal evaluations give equal files."""
    places = {(name, problem.id): (rank, place) for rank, name in enumerate(sets) for place, problem in enumerate(sets[name])}
    return sorted(rows, key=lambda row: (places[row["set"], row["problem_id"]], row["sample"]))


def _given_away(job: jobs.Job) -> dict[str, list[str]] | None:
    """The items of each set that a training set of the run holds, or nearly; None where nothing was compared."""
    if "overlap" not in job.inputs:
        return None
    return json.loads((job.inputs["overlap"] / "overlap.json").read_text(encoding="utf-8"))


def _results(
    rows: list[dict[str, Any]], config: EvaluateConfig, seed: int, names: list[str], given_away: dict[str, list[str]] | None
) -> dict[str, Any]:
    """Scores of every set: of all its problems, and under "clean" of those that no training set gives away."""
    sets = {}
    for name in names:
        samples = config.samples_of(name)
        of_set = [row for row in rows if row["set"] == name]
        if not of_set:
            continue
        sets[name] = _entry(of_set, samples, config, seed)
        if given_away is not None:
            clean = [row for row in of_set if row["problem_id"] not in given_away.get(name, ())]
            sets[name]["clean"] = _entry(clean, samples, config, seed) if clean else {"problems": 0, "samples": samples, "metrics": {}}
        cut = sets[name]["metrics"]["truncated_ratio"]["value"]
        if cut > MUCH_TRUNCATED:
            jobs.note(f"{name}: {cut:.0%} of the rollouts were cut at {config.rollout.max_response_tokens} tokens: the score is too low")
    return {"sets": sets}


def _entry(rows: list[dict[str, Any]], samples: int, config: EvaluateConfig, seed: int) -> dict[str, Any]:
    return {"problems": len(rows) // samples, "samples": samples, "metrics": summarise(rows, samples, config.bootstrap, seed)}


def _headline(results: dict[str, Any]) -> dict[str, float]:
    """The numbers that stand in the artifact's manifest."""
    return {
        f"{name}/{metric}": values["value"]
        for name, entry in results["sets"].items()
        for metric, values in entry["metrics"].items()
        if not re.fullmatch(r"pass@\d+", metric)
    } | {f"{name}/clean_mean": entry["clean"]["metrics"]["mean"]["value"] for name, entry in results["sets"].items() if _has_clean(entry)}


def _has_clean(entry: dict[str, Any]) -> bool:
    return entry.get("clean", {}).get("problems", 0) > 0


if __name__ == "__main__":
    main()
