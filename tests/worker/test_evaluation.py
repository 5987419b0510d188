"""The evaluation program, killed with -9 and run again: every rollout once, the same ones as without the kill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from parallel_r1 import jobs
from parallel_r1.config import EvaluateConfig
from parallel_r1.evaluation import PROGRESS_EVERY

from .conftest import ROLLOUT
from .test_training import events, write_job

PROBLEMS = 2 * PROGRESS_EVERY
CONFIG = EvaluateConfig(
    samples=2, prompt="bare", bootstrap=100, rollout=ROLLOUT.model_copy(update={"engine": "transformers", "max_in_flight": 8})
)


def evaluation(folder: Path, tiny: Path) -> Path:
    """A job over one set."""
    (folder / "start").mkdir(parents=True)
    (folder / "start" / "checkpoint").symlink_to(tiny)
    (folder / "sums").mkdir()
    rows = [{"id": f"s{n}", "problem": f"{n}+1=?", "answer": str(n + 1), "source": "test"} for n in range(PROBLEMS)]
    jobs.write_lines(folder / "sums" / "problems.jsonl", rows)
    return write_job(folder, CONFIG, {"checkpoint": folder / "start", "sums": folder / "sums"})


def rollouts(path: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """Rows by problem and sample; each must be there once."""
    rows = jobs.read_lines(path)
    found = {(row["problem_id"], row["sample"]): row for row in rows}
    assert len(found) == len(rows)
    return found


def test_a_killed_evaluation_goes_on_and_finds_the_same_rollouts(tmp_path: Path, tiny: Path) -> None:
    undisturbed, killed = (evaluation(tmp_path / name, tiny) for name in ("undisturbed", "killed"))
    whole = list(events("parallel_r1.evaluation", undisturbed))

    before = list(events("parallel_r1.evaluation", killed, kill_after_step=PROGRESS_EVERY))
    assert before[-1]["event"] == "progress" and before[-1]["step"] < PROBLEMS, "killed at half"
    shard = tmp_path / "killed" / "work" / jobs.ROLLOUTS
    kept = rollouts(shard)
    one_of_a_problem = jobs.read_lines(shard)[0] | {"problem_id": "s39", "sample": 0}
    with shard.open("a", encoding="utf-8") as file:
        file.write(json.dumps(one_of_a_problem) + "\n" + json.dumps(one_of_a_problem)[:40])

    after = list(events("parallel_r1.evaluation", killed))
    note = next(event["text"] for event in after if event["event"] == "note" and "goes on" in event["text"])
    assert f"{len(kept) // 2} problems were finished before, {PROBLEMS - len(kept) // 2} are left" in note
    found, expected = rollouts(tmp_path / "killed" / "out" / jobs.ROLLOUTS), rollouts(tmp_path / "undisturbed" / "out" / jobs.ROLLOUTS)
    assert found == expected, "a rollout depends on its seed alone, not on its neighbours in a batch"
    assert {key: found[key] for key in kept} == kept, "what was finished was kept, not made again"
    results = [{n: v for n, v in events_[-1]["metrics"].items() if n != "tokens_per_second"} for events_ in (after, whole)]
    assert results[0] == results[1]
    files = [
        [(tmp_path / name / "out" / file).read_bytes() for file in ("results.json", jobs.ROLLOUTS)] for name in ("killed", "undisturbed")
    ]
    assert files[0] == files[1], "the same artifact, byte by byte"
