"""The filter: what stays, what goes and why, and the counts."""

import json
import random
from pathlib import Path

import pytest

from parallel_r1 import config
from parallel_r1.config import FilterConfig
from parallel_r1.filtering import select
from parallel_r1.markup import canonicalise, validate
from parallel_r1.procedural import make_problems
from parallel_r1.teacher import ScriptedTeacher

DATA = Path(__file__).parents[1].parent / "shared" / "data"
GOOD = "<Parallel>\n<Path>a</Path>\n<Path>b</Path></Parallel>\n\n<Summary>s</Summary>\nFinal Answer: 5"


def row(text: str, answer: str = "5") -> dict:
    return {"id": "x", "problem": "p", "answer": answer, "source": "s", "text": text}


@pytest.mark.parametrize(
    "text, settings, expected, reason",
    [
        (GOOD, {}, [], "well-formed and right"),
        ("Sum is 5.\nFinal Answer: 5", {}, [], "no block is fine"),
        (GOOD.replace("r: 5", "r: 6"), {}, ["wrong_answer"], "wrong"),
        (GOOD.replace("r: 5", "r: 6"), {"answer": False}, [], "wrong, but nobody asks (released code)"),
        (GOOD.replace("</Path>", "", 1), {}, ["unclosed_path"], "malformed, right"),
        (GOOD.replace("</Path>", "", 1), {"markup": False}, [], "malformed, but nobody asks"),
        (GOOD.split("<Summary>")[0], {}, ["missing_summary", "missing_answer", "wrong_answer"], "cut off: all faults are named"),
        (GOOD, {"max_chars": 50}, ["too_long"], "too long"),
    ],
)
def test_verdicts(text: str, settings: dict, expected: list[str], reason: str) -> None:
    selection = select([row(text)], FilterConfig(**settings))
    found = [fault["code"] for rejected in selection.rejected for fault in rejected["faults"]]
    assert found == expected, reason
    assert len(selection.kept) == (not expected)


def test_kept_rows_are_canonical_and_complete() -> None:
    selection = select([{**row(GOOD), "attempt": 2}], FilterConfig())
    assert selection.kept == [{**row(canonicalise(GOOD)), "attempt": 2}]


def test_rejected_rows_come_as_they_were() -> None:
    broken = GOOD.replace("<Summary>", "")
    rejected = select([row(broken)], FilterConfig()).rejected[0]
    assert rejected["text"] == broken
    fault = rejected["faults"][0]
    assert fault["code"] == "missing_summary" and broken[: fault["position"]].endswith("</Parallel>")
    assert set(fault) == {"code", "position", "message"}
    json.dumps(rejected)


def test_the_funnel_adds_up() -> None:
    rows = [row(GOOD), row(GOOD.replace("r: 5", "r: 6")), row(GOOD.replace("</Path>", "")), row("")]
    funnel = select(iter(rows), FilterConfig()).funnel
    assert funnel.metrics() == {
        "seen": 4,
        "kept": 1,
        "rejected": 3,
        "rejected_missing_answer": 1,
        "rejected_unclosed_path": 1,
        "rejected_wrong_answer": 2,
    }


def test_the_scripted_teacher_gives_real_work() -> None:
    teacher = ScriptedTeacher(config.ScriptedTeacher())
    problems = make_problems(1, "train", 2500, seed=0)
    rows = [{**row(teacher.trajectory(p, random.Random(p.id)), p.answer), "id": p.id} for p in problems]
    selection = select(rows, FilterConfig())
    assert 0.80 < len(selection.kept) / len(rows) < 0.90
    assert {"wrong_answer", "missing_answer", "unclosed_path", "near_miss_tag", "empty_path"} <= set(selection.funnel.by_code)
    assert all(validate(kept["text"]) == [] and kept["text"].endswith(f" {kept['answer']}") for kept in selection.kept)
    assert [r["id"] for r in selection.kept] == [r["id"] for r in rows if r["id"] in {k["id"] for k in selection.kept}], "in order"


def test_real_trajectories_all_stay() -> None:
    path = DATA / "teacher_trajectories_200.jsonl"
    if not path.exists():
        pytest.skip("no shared data")
    selection = select([json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()], FilterConfig())
    assert selection.funnel.metrics() == {"seen": 200, "kept": 200, "rejected": 0}
