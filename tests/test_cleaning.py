"""Cleaning: every step on one row that needs it, and what it does to the shared real rows, in the shapes they have on the hub."""

import json
from pathlib import Path

import pytest

from parallel_r1.cleaning import TEMPLATES, gold_key, mend, normalise, unwrap
from parallel_r1.config import PRESETS, FilesSource, HubSource
from parallel_r1.problems import from_rows, read_source

DATA = Path(__file__).parents[1].parent / "shared" / "data"


def shared(name: str) -> list[dict]:
    path = DATA / f"{name}.jsonl"
    if not path.exists():
        pytest.skip("no shared data")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(
    ("damaged", "expected", "reason"),
    [
        ("\frac{1}{2}", "\\frac{1}{2}", "form feed"),
        ("x \times y", "x \\times y", "tab of a command"),
        ("\text{ cm}", "\\text{ cm}", "tab of text"),
        ("a\tb", "a b", "a tab between words"),
        ("\tan apple", " an apple", "a word, not the tangent"),
        ("\begin{cases}", "\\begin{cases}", "backspace"),
        ("\right)", "\\right)", "carriage return of a command"),
        ("one\r\ntwo\rthree", "one\ntwo\nthree", "line ends"),
        ("a \neq b", "a \\neq b", "newline of a command"),
        ("so\nequal", "so\nequal", "a new line"),
        ("\vec{v} and \angle A", "\\vec{v} and \\angle A", "vertical tab, bell"),
        ("\ufeffone\u200b", "one", "invisible characters"),
        ("\\frac{1}{2}", "\\frac{1}{2}", "whole"),
    ],
)
def test_lost_commands_come_back(damaged: str, expected: str, reason: str) -> None:
    assert mend(damaged) == expected, reason


@pytest.mark.parametrize("template", TEMPLATES)
def test_verl_templates_come_off(template: str) -> None:
    assert unwrap(template.replace("{problem}", "What is 2+2?"), None) == "What is 2+2?"
    assert unwrap("What is 2+2?", None) == "What is 2+2?"


def test_an_own_template_comes_off() -> None:
    assert unwrap("Question: What is 2+2?\nAnswer:", "Question: {problem}\nAnswer:") == "What is 2+2?"


@pytest.mark.parametrize(
    ("one", "other", "same", "reason"),
    [
        ("What is  2 + 2?", "what is 2+2?", True, "case and spaces"),
        ("What is $2+2$?", "What is \\(2+2\\)?", True, "maths delimiters"),
        ("Find $\\dfrac{1}{2}$.", "Find $\\frac{1}{2}$", True, "layout, full stop"),
        ("What is 2+3?", "What is 2-3?", False, "another sign is another problem"),
        ("What is 1 2?", "What is 12?", False, "a space between digits counts"),
    ],
)
def test_the_same_problem(one: str, other: str, same: bool, reason: str) -> None:
    assert (normalise(one) == normalise(other)) is same, reason


def test_golds_agree_by_value() -> None:
    assert gold_key("0.5") == gold_key("\\frac{1}{2}") == gold_key("$\\dfrac12$") != gold_key("0.51")


@pytest.mark.parametrize(
    ("problem", "answer", "options", "counts", "reason"),
    [
        ("Find \frac{a}{b}.", "1", {}, {"repaired_control": 1}, "repaired rows stay"),
        ("Find \x01 it.", "1", {}, {"dropped_control": 1}, "damage that can't be undone"),
        ("  ", "1", {}, {"dropped_no_problem": 1}, "blank"),
        ("Find it.", None, {}, {"dropped_no_answer": 1}, "no gold"),
        ("Find it.", "1000000000000000000", {}, {"dropped_huge_gold": 1}, "19 digits"),
        ("Find it.", "999999999999999", {}, {}, "15 digits are exact in a float"),
        ("Find it.", "0.30000000000000004", {}, {"dropped_rounded_gold": 1}, "went through a float"),
        ("Find it.", "1e+20", {}, {"dropped_rounded_gold": 1}, "exponent"),
        ("Find it.", "3.14159", {}, {}, "a decimal"),
        ("求最小的正整数 n。", "1", {"script": "latin"}, {"dropped_script": 1}, "Chinese"),
        ("求最小的正整数 n。", "1", {}, {}, "any language by default"),
        ("Find α+β for $\\alpha$.", "1", {"script": "latin"}, {}, "Greek is mathematics"),
        ("Find it, " * 10, "1", {"max_chars": 50}, {"dropped_too_long": 1}, "too long"),
        (TEMPLATES[0].replace("{problem}", "Find it."), "1", {}, {"repaired_template": 1}, "template"),
    ],
)
def test_every_step_is_counted(problem: str, answer: str | None, options: dict, counts: dict, reason: str) -> None:
    rows = [{"problem": "A clean one.", "answer": "1"}, {"problem": problem, "answer": answer}]
    found = from_rows(rows, FilesSource(path="x.jsonl", **options), "x.jsonl", "x")
    assert found.counts == counts, reason
    assert len(found.problems) == 2 - sum(name.startswith("dropped_") for name in counts)
    assert [f"dropped_{row['reason']}" for row in found.dropped] == [name for name in counts if name.startswith("dropped_")]


def test_contradicting_golds_drop_the_problem_and_agreeing_ones_keep_the_first() -> None:
    rows = [{"problem": p, "answer": a} for p, a in [("One?", "1"), ("one? ", "2"), ("Two?", "0.5"), ("Two?", "\\frac12"), ("ONE?", "1")]]
    problems, counts, dropped = from_rows(rows, FilesSource(path="x.jsonl"), "x.jsonl", "x")
    assert [(p.problem, p.answer) for p in problems] == [("Two?", "0.5")]
    assert counts == {"dropped_conflicting_golds": 3, "dropped_duplicates": 1}
    assert [(row["reason"], row["rows"], row["answer"]) for row in dropped] == [("conflicting_golds", 3, "1 | 2"), ("duplicates", 1, "0.5")]


# --- the shared rows, in the hub's shapes ---------------------------------------------------------------------------------

SHAPES = {
    "gsm8k": ("gsm8k_test_200", lambda row: {"question": row["problem"], "answer": f"Some steps.\n#### {row['answer']}"}),
    "dapo": (
        "dapo_train_500",
        lambda row: {
            "data_source": "math_dapo",
            "prompt": [{"role": "user", "content": TEMPLATES[0].replace("{problem}", row["problem"])}],
            "reward_model": {"ground_truth": row["answer"], "style": "rule-lighteval/MATH_v2"},
        },
    ),
    "dapo_processed": ("dapo_train_500", lambda row: {"prompt": row["problem"], "solution": row["answer"]}),
    "math500": ("math500", lambda row: row),
    "math_train": ("math500", lambda row: {"problem": row["problem"], "solution": f"Thus $\\boxed{{{row['answer']}}}$."}),
    "amc23": ("amc23", lambda row: {"question": row["problem"], "answer": float(row["answer"])}),
    "aime24": ("aime24", lambda row: row),
    "aime25": ("aime25", lambda row: row),
}
MEASURED = {
    "dapo": {"repaired_template": 500, "repaired_control": 1},
    "dapo_processed": {"repaired_control": 1},
    "math500": {"repaired_control": 2},
    "math_train": {"repaired_control": 2},
    "aime25": {"repaired_control": 1},
}


@pytest.mark.parametrize("preset", SHAPES)
def test_presets_read_the_shared_rows_in_the_hubs_shape(preset: str, tmp_path: Path) -> None:
    """`load_dataset` itself, on a local folder that has the hub's columns: the preset fits, golds and problems are the shared ones."""
    name, shape = SHAPES[preset]
    rows = shared(name)
    split = PRESETS[preset].get("split", "train")
    (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(shape(row)) + "\n" for row in rows), encoding="utf-8")
    source = HubSource(preset=preset, name=str(tmp_path), config=None)
    problems, counts, _ = read_source(source, seed=0)
    assert [(p.problem, p.answer) for p in problems] == [(mend(row["problem"]).strip(), row["answer"].strip()) for row in rows]
    assert counts == MEASURED.get(preset, {}), "as measured"


def test_the_published_file_with_its_faults() -> None:
    """The faults of the DAPO file, put into the shared real rows in verl's shape: each is found, and the rest stays as it is."""
    plain = shared("dapo_train_500")
    twice = [{**row, "problem": row["problem"].replace(" ", "  ").replace("$", "")} for row in plain[:20]]
    contradicted = [{**row, "answer": "123456"} for row in plain[20:25]]
    huge = [{"problem": f"Variant. {row['problem']}", "answer": "1" + "0" * 30} for row in plain[30:33]]
    rows = map(SHAPES["dapo"][1], [*plain, *twice, *contradicted, *huge])
    found = from_rows(rows, HubSource(preset="dapo"), "here", "dapo")
    dropped = {name: count for name, count in found.counts.items() if name.startswith("dropped_")}
    assert dropped == {"dropped_duplicates": 20, "dropped_conflicting_golds": 10, "dropped_huge_gold": 3}
    assert len(found.problems) == 495
