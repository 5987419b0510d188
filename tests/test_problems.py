"""Problem sets: sources, columns, golds, de-duplication, drawing; on rows of the hub's shape and on the shared copies."""

import json
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from parallel_r1.config import FilesSource, HubSource, ProceduralSource
from parallel_r1.cleaning import clean_answer
from parallel_r1.problems import Problem, draw, from_rows, read_problems, read_source, write_problems
from parallel_r1.tables import SourceError

DATA = Path(__file__).parents[1].parent / "shared" / "data"
VERL_ROWS = [
    {
        "data_source": "math_dapo",
        "prompt": [{"content": f"What is 2+{n}?", "role": "user"}],
        "reward_model": {"ground_truth": str(2 + n), "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"i{n}"},
    }
    for n in range(3)
]
VERL = {"problem_column": "prompt.0.content", "answer_column": "reward_model.ground_truth"}


def jsonl(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    "value, expected, reason",
    [
        ("She has 2*21=<<2*21=42>>42.\n#### 42", "42", "GSM8K solution"),
        ("...\n#### 1,234,567", "1234567", "GSM8K thousands commas"),
        ("...\n#### -7", "-7", "GSM8K negative"),
        ("(1,234)", "(1,234)", "a plain gold isn't touched: this is a point"),
        (70, "70", "integer column"),
        (70.0, "70", "float column, as csv readers make of integers"),
        (0.5, "0.5", "a true fraction"),
        ("so we add: $\\boxed{\\frac{1}{2}}$.", "\\frac{1}{2}", "MATH solution"),
        ("First \\boxed{1}, then \\boxed{2}", "2", "the last box of a solution"),
        ("  \\frac{1}{2} ", "\\frac{1}{2}", "surrounding white space"),
        (None, "", "missing"),
    ],
)
def test_golds(value: object, expected: str, reason: str) -> None:
    assert clean_answer(value) == expected, reason


def test_rows_of_the_verl_layout() -> None:
    problems, counts, _ = from_rows(VERL_ROWS, HubSource(name="x/dapo", **VERL), "hub data set x/dapo", "x/dapo")
    assert problems[1] == Problem("x/dapo-00001", "What is 2+1?", "3", "x/dapo") and counts == {}


def test_rows_of_the_gsm8k_layout() -> None:
    rows = [{"question": "How much?", "answer": "It is 1,000.\n#### 1,000"}]
    problems, _, _ = from_rows(rows, HubSource(name="openai/gsm8k", problem_column="question"), "here", "openai/gsm8k")
    assert problems[0].answer == "1000"


def test_cleaning_is_counted() -> None:
    rows = [
        {"problem": "What is 2+2?", "answer": "4"},
        {"problem": "what is  2+2? ", "answer": "4"},
        {"problem": "What is ２+2?", "answer": "4"},
        {"problem": "  ", "answer": "4"},
        {"problem": "What is 3+3?", "answer": None},
        {"problem": "What is 4+4?", "answer": 8},
    ]
    problems, counts, _ = from_rows(rows, FilesSource(path="x.jsonl"), "x.jsonl", "x")
    assert [p.problem for p in problems] == ["What is 2+2?", "What is 4+4?"]
    assert counts == {"dropped_duplicates": 2, "dropped_no_problem": 1, "dropped_no_answer": 1}


def test_ids_are_unique_and_kept() -> None:
    rows = [{"id": i, "problem": p, "answer": "1"} for i, p in [("a", "one"), ("a", "two"), (7, "three"), (None, "four")]]
    problems, _, _ = from_rows(rows, FilesSource(path="x.jsonl"), "x.jsonl", "x")
    assert [p.id for p in problems] == ["a", "a#1", "7", "x-00003"]


def test_limit_counts_what_stays() -> None:
    rows = [{"problem": text, "answer": "1"} for text in ("a", "a", "b", "c")]
    assert [p.problem for p in from_rows(rows, FilesSource(path="x.jsonl", limit=2), "x.jsonl", "x").problems] == ["a", "b"]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "csv"])
def test_file_formats(tmp_path: Path, suffix: str) -> None:
    rows = [{"problem": 'Zwei, "drei"\nund ½?', "answer": "5"}, {"problem": "q", "answer": "6"}]
    path = tmp_path / f"set.{suffix}"
    if suffix == "jsonl":
        jsonl(path, rows)
    elif suffix == "parquet":
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text('problem,answer\n"Zwei, ""drei""\nund ½?",5\nq,6\n', encoding="utf-8")
    problems, _, _ = read_source(FilesSource(path=str(path)), seed=0)
    assert [(p.problem, p.answer, p.id) for p in problems] == [(rows[0]["problem"], "5", "set-00000"), ("q", "6", "set-00001")]


def test_nested_columns_of_a_parquet_file(tmp_path: Path) -> None:
    path = tmp_path / "verl.parquet"
    pyarrow.parquet.write_table(pa.Table.from_pylist(VERL_ROWS), path)
    problems, _, _ = read_source(FilesSource(path=f"file://{path}", **VERL), seed=0)
    assert [p.answer for p in problems] == ["2", "3", "4"]


def test_a_hub_data_set(tmp_path: Path) -> None:
    """`load_dataset` itself, on a local folder in a hub layout."""
    jsonl(tmp_path / "train.jsonl", VERL_ROWS)
    source = HubSource(name=str(tmp_path), limit=2, **VERL)
    problems, _, _ = read_source(source, seed=0)
    assert [p.answer for p in problems] == ["2", "3"]
    with pytest.raises(SourceError, match=r"hub data set .*, config None, split test: "):
        read_source(source.model_copy(update={"split": "test"}), seed=0)


def test_a_procedural_source() -> None:
    problems, counts, _ = read_source(ProceduralSource(tier=2, split="heldout", count=5), seed=0)
    assert [p.id for p in problems] == [f"tier2-heldout-{i:04d}" for i in range(5)] and counts == {}


SHARED_SETS = {"aime24": 30, "aime25": 30, "amc23": 40, "math500": 500, "gsm8k_test_200": 200, "dapo_train_500": 500, "math300_ref": 316}


@pytest.mark.parametrize("name, size", SHARED_SETS.items())
def test_shared_data(name: str, size: int) -> None:
    path = DATA / f"{name}.jsonl"
    if not path.exists():
        pytest.skip("no shared data")
    problems, counts, _ = read_source(FilesSource(path=str(path)), seed=0)
    assert len(problems) + sum(count for name, count in counts.items() if name.startswith("dropped_")) == size
    assert len({p.id for p in problems}) == len(problems)


@pytest.mark.parametrize(
    "name, content, columns, message",
    [
        ("none.jsonl", None, {}, r"none\.jsonl: no such file"),
        ("x.txt", "", {}, r"x\.txt: can't tell the format from '\.txt'; the name must end in one of \.jsonl, \.parquet, \.csv"),
        ("x.jsonl", '{"problem": "a"\n', {}, r"x\.jsonl: can't be read as \.jsonl: line 1: "),
        ("x.jsonl", "[1]\n", {}, r"line 1: a row is an object, this is list"),
        ("x.jsonl", "", {}, r"x\.jsonl: no problem in it that could be used; dropped: nothing, it has no rows"),
        ("x.parquet", "no parquet", {}, r"x\.parquet: can't be read as \.parquet"),
        (
            "x.jsonl",
            '{"question": "a", "info": {"gold": [1]}}\n',
            {"problem_column": "question"},
            r"x\.jsonl: answer_column: no column 'answer'; there are: question, info\.gold\.0",
        ),
        ("x.jsonl", '{"problem": ["a"], "answer": "1"}\n', {"problem_column": "problem.1"}, r"problem_column: no column 'problem\.1'"),
    ],
)
def test_errors_name_file_field_and_what_exists(tmp_path: Path, name: str, content: str | None, columns: dict, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(SourceError, match=message):
        read_source(FilesSource(path=str(tmp_path / name), **columns), seed=0)


def numbered(name: str, size: int) -> list[Problem]:
    return [Problem(f"{name}{i}", f"{name}{i}", "1", name) for i in range(size)]


def test_draw_by_weight_without_repeats() -> None:
    sets = {"a": numbered("a", 600), "b": numbered("b", 600), "c": numbered("c", 5)}
    drawn = draw(sets, {"a": 0.6, "b": 0.4}, 800, seed=0)
    counts = Counter(p.source for p in drawn)
    assert len(set(drawn)) == 800 and 430 < counts["a"] < 530 and counts["c"] == 0
    assert drawn == draw(sets, {"a": 0.6, "b": 0.4}, 800, seed=0) != draw(sets, {"a": 0.6, "b": 0.4}, 800, seed=1)


def test_draw_repeats_only_when_a_set_is_exhausted() -> None:
    drawn = draw({"a": numbered("a", 10)}, {"a": 1.0}, 25, seed=0)
    assert set(Counter(drawn[:10]).values()) == {1} and set(Counter(drawn[:20]).values()) == {2}


def test_draw_everything() -> None:
    sets = {"a": numbered("a", 10), "b": numbered("b", 3)}
    assert sorted(p.id for p in draw(sets, {"a": 1, "b": 5}, None, seed=0)) == sorted(p.id for p in sets["a"] + sets["b"])


@pytest.mark.parametrize("sets, message", [({"a": []}, "set 'a' is empty"), ({"b": numbered("b", 1)}, "set 'a' is unknown; there are: b")])
def test_draw_from_nothing(sets: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draw(sets, {"a": 1.0}, 3, seed=0)


def test_round_trip(tmp_path: Path) -> None:
    problems = [Problem("1", "Ä\u2028?", "½", "s"), Problem("2", "b\nc", "2", "s")]
    write_problems(tmp_path / "problems.jsonl", problems)
    assert read_problems(tmp_path / "problems.jsonl") == problems
