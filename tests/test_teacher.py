"""The teachers: the scripted one's texts, rates and faults; files and hub data sets that exist already; a real local endpoint."""

import random
from collections import Counter

import pytest

from parallel_r1 import config
from parallel_r1.markup import validate
from parallel_r1.problems import Problem
from parallel_r1.procedural import make_problems
from parallel_r1.teacher import ANSWER_FAULTS, MARKUP_FAULTS, ScriptedTeacher

MIXED = Problem("p", "Tom has 12 apples. He loses 3. Then he buys 5. How many apples now?", "14", "test")
CALM = {"slip_rate": 0.0, "fault_rate": 0.0, "lead_share": 0.0, "parallel_share": 1.0}


def scripted(**rates: float) -> ScriptedTeacher:
    return ScriptedTeacher(config.ScriptedTeacher(**{**CALM, **rates}))


def texts(teacher: ScriptedTeacher, count: int = 400, tier: int = 3) -> list[tuple[Problem, str]]:
    return [(p, teacher.trajectory(p, random.Random(p.id))) for p in make_problems(tier, "train", count, seed=1)]


def test_a_block_shows_two_methods() -> None:
    seen = {scripted().trajectory(MIXED, random.Random(seed)) for seed in range(20)}
    a, b = "<Path>In order. 12-3=9;9+5=14.</Path>", "<Path>Gains first. 12+5=17;17-3=14.</Path>"
    end = "</Parallel>\n<Summary>Both give 14.</Summary>\nFinal Answer: 14"
    assert seen == {f"<Parallel>{a}{b}{end}", f"<Parallel>{b}{a}{end}"}


def test_leads() -> None:
    seen = {scripted(lead_share=1).trajectory(MIXED, random.Random(seed)).split("<Parallel>")[0] for seed in range(20)}
    assert seen == {"First 12-3=9.\n", "Start 12, -3, +5.\n"}
    worked = [text for text in (scripted(lead_share=1).trajectory(MIXED, random.Random(s)) for s in range(20)) if text.startswith("First")]
    assert all("<Path>In order. 9+5=14.</Path>" in text for text in worked), "the work goes on from the first step"


def test_sequential_solutions_are_right_and_have_no_block() -> None:
    teacher = scripted(slip_rate=1, fault_rate=1, lead_share=0.4)
    for problem in make_problems(3, "train", 200, seed=1):
        text = teacher.sequential(problem, random.Random(problem.id))
        assert "<" not in text and text.endswith(f"\nFinal Answer: {problem.answer}")
        assert validate(text) == []


def test_a_slip_is_carried_on_and_the_right_path_is_taken() -> None:
    seen = Counter()
    for problem, text in texts(scripted(slip_rate=0.5)):
        final = text.rsplit(" ", 1)[1]
        right_paths = text.count(f"={problem.answer}.</Path>")
        seen[right_paths] += 1
        assert validate(text) == []
        if right_paths:
            assert final == problem.answer, "where one path is right, it is taken"
        if "One gives" in text:
            assert f"Take {final}.</Summary>" in text
        else:
            assert f"Both give {final}." in text
    assert min(seen[0], seen[1], seen[2]) > 50


def test_rates() -> None:
    rows = texts(ScriptedTeacher(config.ScriptedTeacher()), count=3000)
    blocks = sum("<Parallel>" in text for _, text in rows) / len(rows)
    kept = sum(not validate(text) and text.endswith(f"Final Answer: {problem.answer}") for problem, text in rows) / len(rows)
    assert 0.92 < blocks < 0.97, "parallel_share 0.95, less what was cut off before the block"
    assert 0.80 < kept < 0.88, "fault_rate 0.15, and slips that both paths or a sequential solution made"


EXPECTED_FAULT = {
    "wrong_answer": None,
    "missing_path_end": "unclosed_path",
    "missing_parallel_end": "unclosed_parallel",
    "missing_summary_start": "missing_summary",
    "single_path": "too_few_paths",
    "empty_path": "empty_path",
    "text_between_paths": "text_between_paths",
    "text_before_summary": "text_before_summary",
    "near_miss_tag": "near_miss_tag",
    "cut_off": "missing_answer",
}


@pytest.mark.parametrize("kind, breaker", (ANSWER_FAULTS | MARKUP_FAULTS).items())
def test_each_fault_is_what_it_is_called(kind: str, breaker) -> None:
    for problem, text in texts(scripted(), count=100):
        broken = breaker(text, random.Random(problem.id))
        found = [fault.code for fault in validate(broken)]
        expected = EXPECTED_FAULT[kind]
        assert (expected in found) if expected else (found == [] and not broken.endswith(f" {problem.answer}")), broken


def test_all_faults_come_equally_often() -> None:
    counts = Counter()
    for problem, text in texts(scripted(fault_rate=1), count=3000):
        found = {fault.code for fault in validate(text)}
        kind = next((k for k, code in EXPECTED_FAULT.items() if code and (code in found if k != "cut_off" else False)), None)
        counts["cut_off" if "Final Answer" not in text else kind or "wrong_answer"] += 1
    assert set(counts) == set(EXPECTED_FAULT) and all(220 < count < 380 for count in counts.values()), counts


def test_other_problems_are_refused() -> None:
    with pytest.raises(ValueError, match="not a procedural problem"):
        scripted().trajectory(Problem("x", "What is 2+2?", "4", "test"), random.Random(0))
