"""Prompts: the built-in ones, those recovered from files and from real rows, and the refusal of a checkpoint trained with another one."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from parallel_r1.config import ConfigError, EvaluateConfig, FilePrompt, RowsPrompt, SftConfig, load
from parallel_r1.prompts import PARALLEL, fingerprint, render, template
from parallel_r1.store import Manifest, identity
from parallel_r1.tables import SourceError
from tasks.evaluate import refuse_another_prompt
from tasks.places import PROJECT

DATA = Path(__file__).parents[1].parent / "shared" / "data"
THEIRS = "Think in parallel with <Parallel> tags.\nQuestion: {problem}\nAssistant:"


def rows_file(path: Path, wordings: list[str]) -> str:
    problems = [f"What is {n}+{n}?" for n in range(len(wordings))]
    shared = DATA / "gsm8k_test_200.jsonl"
    if shared.exists():
        problems = [json.loads(line)["problem"] for line in shared.read_text(encoding="utf-8").splitlines()][: len(wordings)]
    asked = zip(problems, wordings, strict=True)
    rows = [{"problem": p, "prompt": [{"role": "user", "content": w.replace("{problem}", p)}]} for p, w in asked]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_a_wording_is_recovered_from_rows_and_equals_its_file(tmp_path: Path) -> None:
    (tmp_path / "theirs.txt").write_text(THEIRS, encoding="utf-8")
    recovered = RowsPrompt(path=rows_file(tmp_path / "rows.jsonl", [THEIRS] * 20))
    from_file = FilePrompt(path=str(tmp_path / "theirs.txt"))
    assert template(recovered) == template(from_file) == THEIRS
    assert fingerprint(recovered) == fingerprint(from_file) not in {fingerprint(style) for style in ("bare", "plain", "parallel")}
    assert render(recovered, "What is {x}?") == THEIRS.replace("{problem}", "What is {x}?")


@pytest.mark.parametrize(
    ("wordings", "message", "reason"),
    [
        ([THEIRS, "Solve: {problem}"], r"2 different wordings, such as in rows \[1, 2\]", "two wordings"),
        (["Something else", "entirely"], "in no row does prompt.0.content hold the text of problem", "the problem isn't there"),
        (["{problem} I repeat: {problem}"], "in no row", "twice: which of them is the place?"),
    ],
)
def test_rows_that_tell_no_wording(wordings: list[str], message: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=message):
        template(RowsPrompt(path=rows_file(tmp_path / "rows.jsonl", wordings)))


@pytest.mark.parametrize(("content", "message"), [(None, "can't be read"), ("no place", "there 0 times"), ("{problem}" * 2, "2 times")])
def test_files_that_are_no_wording(content: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SourceError, match=message):
        template(FilePrompt(path=str(path)))


def test_the_parallel_prompt_explains_what_a_block_is() -> None:
    ideas = ("two or more independent", "no order", "do not refer to each other", "Right after each block", "as help", "Final Answer:")
    for words in ("<Parallel>", "<Path>", "<Summary>", *ideas):
        assert words in PARALLEL


def test_a_file_counts_by_content_in_keys(tmp_path: Path) -> None:
    for name, text in (("a.txt", THEIRS), ("b.txt", THEIRS), ("c.txt", THEIRS + "!")):
        (tmp_path / name).write_text(text)
    a, b, c = (json.dumps(identity(SftConfig(prompt=FilePrompt(path=str(tmp_path / name))))) for name in ("a.txt", "b.txt", "c.txt"))
    assert a == b != c and str(tmp_path) not in a


def manifest(prompt: str | None) -> Manifest:
    versions = {} if prompt is None else {"prompt": prompt}
    rest = {"files": {}, "config": None, "inputs": {}, "seconds": 0, "metrics": {}, "committed_at": datetime.now(UTC).isoformat()}
    return Manifest(stage="sft", key="0" * 32, digest="d", versions=versions, **rest)


def test_a_checkpoint_trained_with_another_prompt_is_refused_unless_told() -> None:
    config = EvaluateConfig(prompt="plain")
    refuse_another_prompt(manifest(None), config)
    refuse_another_prompt(manifest(fingerprint("plain")), config)
    refuse_another_prompt(manifest(fingerprint("parallel")), config.model_copy(update={"other_prompt": True}))
    with pytest.raises(ValueError, match="sft 000000000000 was trained with the prompt .* or evaluate.other_prompt: true"):
        refuse_another_prompt(manifest(fingerprint("parallel")), config)


@pytest.mark.parametrize(
    ("override", "parts", "reason"),
    [
        ("evaluate.prompt=plain", ["sft.prompt = 'bare'", "evaluate.prompt = 'plain'", "other_prompt: true"], "before hours of work"),
        ("sft.prompt=loud", ["sft.prompt = 'loud'", "'bare', 'plain' or 'parallel'"], "an unknown style, in one line"),
        ("sft.prompt={type: file}", ["sft.prompt.path", "required"], "no path"),
        ("sft.prompt={type: rows, path: x, column: y}", ["sft.prompt.column", "unknown key", "prompt_column"], "an unknown key"),
    ],
)
def test_errors_in_a_config(override: str, parts: list[str], reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(PROJECT / "pipeline_config.yaml", [override])
    assert [part for part in parts if part not in str(caught.value)] == [], f"{reason}: {caught.value}"
    assert len(str(caught.value).splitlines()) == 1


def test_told_so_it_is_allowed() -> None:
    assert load(PROJECT / "pipeline_config.yaml", ["evaluate.prompt=plain", "evaluate.other_prompt=true"]).evaluate.prompt == "plain"
