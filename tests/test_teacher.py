"""The teachers: the scripted one's texts, rates and faults; files and hub data sets that exist already."""

import json
import random
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from parallel_r1 import config
from parallel_r1.markup import FINAL_ANSWER, validate
from parallel_r1.problems import Problem
from parallel_r1.procedural import make_problems
from parallel_r1.tables import SourceError
from parallel_r1.teacher import ANSWER_FAULTS, MARKUP_FAULTS, Breaker, ScriptedTeacher, generate

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
def test_each_fault_is_what_it_is_called(kind: str, breaker: Breaker) -> None:
    for problem, text in texts(scripted(), count=100):
        broken = breaker(text, random.Random(problem.id))
        found = [fault.code for fault in validate(broken)]
        expected = EXPECTED_FAULT[kind]
        assert (expected in found) if expected else (found == [] and not broken.endswith(f" {problem.answer}")), broken


def kind_of(text: str) -> str:
    """Which fault a scripted trajectory has, told by its looks."""
    found = {fault.code for fault in validate(text)}
    if FINAL_ANSWER not in text:
        return "cut_off"
    return next((kind for kind, code in EXPECTED_FAULT.items() if code in found), "wrong_answer")


def test_all_faults_come_equally_often() -> None:
    counts = Counter(kind_of(text) for _, text in texts(scripted(fault_rate=1), count=3000))
    assert set(counts) == set(EXPECTED_FAULT) and all(230 < count < 370 for count in counts.values()), counts


def test_other_problems_are_refused() -> None:
    with pytest.raises(ValueError, match="not a procedural problem"):
        scripted().trajectory(Problem("x", "What is 2+2?", "4", "test"), random.Random(0))


# --- generate: all four types ---------------------------------------------------------------------------------------------


Run = tuple[list[dict], list[tuple[int, int]]]


def run(teacher: config.Teacher, tmp_path: Path, count: int | None = None, sets: dict | None = None) -> Run:
    progress: list[tuple[int, int]] = []
    generation = config.GenerateConfig(problems={"tier": 1.0}, count=count, teacher=teacher)
    rows = list(generate(generation, sets or {"tier": [MIXED]}, 0, lambda i, of: progress.append((i, of))))
    return rows, progress


def test_generate_scripted(tmp_path: Path) -> None:
    sets = {"tier": make_problems(2, "train", 50, seed=0)}
    rows, progress = run(config.ScriptedTeacher(), tmp_path, 20, sets)
    assert rows == run(config.ScriptedTeacher(), tmp_path, 20, sets)[0] and len({row["id"] for row in rows}) == 20
    assert set(rows[0]) == {"id", "problem", "answer", "source", "text", "teacher"} and rows[0]["teacher"] == "scripted"
    assert progress[-1] == (20, 20)
    repeated, _ = run(config.ScriptedTeacher(), tmp_path, 3, {"tier": [MIXED]})
    assert [row["problem"] for row in repeated] == [MIXED.problem] * 3 and len({row["text"] for row in repeated}) > 1


ROWS = [{"question": f"q{n}", "gold": {"value": n}, "answer_text": f"Final Answer: {n}", "id": f"t{n}"} for n in range(3)]
COLUMNS = {"problem_column": "question", "answer_column": "gold.value", "text_column": "answer_text"}


def test_generate_from_files(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pa.Table.from_pylist(ROWS), path)
    rows, progress = run(config.FilesTeacher(path=str(path), **COLUMNS), tmp_path)
    assert rows[2] == {"id": "t2", "problem": "q2", "answer": "2", "source": "rows", "text": "Final Answer: 2", "teacher": "files"}
    assert progress == [(1, 3), (2, 3), (3, 3)]
    assert len(run(config.FilesTeacher(path=str(path), **COLUMNS), tmp_path, count=2)[0]) == 2


def test_generate_from_a_hub_data_set(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    rows, _ = run(config.HubTeacher(name=str(tmp_path), **COLUMNS), tmp_path)
    assert [row["text"] for row in rows] == [row["answer_text"] for row in ROWS] and rows[0]["teacher"] == "hub"


def test_real_trajectories(tmp_path: Path) -> None:
    path = Path(__file__).parents[1].parent / "shared" / "data" / "teacher_trajectories_200.jsonl"
    if not path.exists():
        pytest.skip("no shared data")
    rows, _ = run(config.FilesTeacher(path=str(path)), tmp_path)
    assert len(rows) == 200 and all(row["problem"] and row["answer"] and row["text"] for row in rows)


@pytest.mark.parametrize(
    "content, columns, message",
    [
        (None, {}, r"rows\.jsonl: no such file"),
        ("", {}, r"rows\.jsonl: holds no trajectories"),
        (
            '{"problem": "q", "answer": "1", "out": "x"}\n',
            {},
            r"rows\.jsonl: text_column: no column 'text'; there are: problem, answer, out",
        ),
    ],
)
def test_errors_name_file_and_field(tmp_path: Path, content: str | None, columns: dict, message: str) -> None:
    if content is not None:
        (tmp_path / "rows.jsonl").write_text(content)
    with pytest.raises(SourceError, match=message):
        run(config.FilesTeacher(path=str(tmp_path / "rows.jsonl"), **columns), tmp_path)
