"""What the student is asked: the problem alone, plainly, or with an explanation of parallel thinking (paper, appendix; our own words).

A published checkpoint was trained with a wording of its own. It is read from a file, or recovered from the rows of the data set that it
was trained on, by taking the problem out of the prompt. A prompt's `fingerprint` stands in the manifest of each checkpoint trained with it.
"""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Any

import fsspec

from parallel_r1.config import FilePrompt, Prompt, RowsPrompt
from parallel_r1.markup import CLOSE_PARALLEL, CLOSE_PATH, CLOSE_SUMMARY, OPEN_PARALLEL, OPEN_PATH, OPEN_SUMMARY
from parallel_r1.tables import SourceError, cell, read_file

PLACE = "{problem}"
BARE = "{problem}\n"

PLAIN = "Solve the problem step by step. End with a line `Final Answer:` followed by the answer alone.\n\nProblem: {problem}\n"

PARALLEL = (
    "Solve the problem step by step. Wherever looking at it from several sides would help, think in parallel: write "
    f"{OPEN_PARALLEL}, then two or more independent lines of thought, each as {OPEN_PATH}...{CLOSE_PATH}, then {CLOSE_PARALLEL}. "
    "The paths have no order and do not refer to each other. "
    f"Right after each block write {OPEN_SUMMARY}...{CLOSE_SUMMARY} with what the paths found, compared and weighed, and go on from there. "
    "Use as many blocks as help. End with a line `Final Answer:` followed by the answer alone.\n\nProblem: {problem}\n"
)


@cache
def template(prompt: Prompt) -> str:
    """The prompt with `{problem}` in the place of the problem. Raises SourceError where it can't be read or recovered."""
    if isinstance(prompt, FilePrompt):
        return _from_file(prompt)
    if isinstance(prompt, RowsPrompt):
        return _from_rows(prompt)
    return {"bare": BARE, "plain": PLAIN, "parallel": PARALLEL}[prompt]


def render(prompt: Prompt, problem: str) -> str:
    """The prompt's text for a problem."""
    return template(prompt).replace(PLACE, problem)


def fingerprint(prompt: Prompt) -> str:
    """What identifies a prompt's wording, wherever it comes from."""
    return hashlib.sha256(template(prompt).encode()).hexdigest()[:16]


def _from_file(prompt: FilePrompt) -> str:
    try:
        with fsspec.open(prompt.path, "r", encoding="utf-8", newline="") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"prompt {prompt.path}: can't be read: {error}") from None
    if text.count(PLACE) != 1:
        raise SourceError(f"prompt {prompt.path}: {PLACE} must stand in it once, it stands there {text.count(PLACE)} times")
    return text


def _from_rows(prompt: RowsPrompt) -> str:
    """What all rows have in common; rows whose prompt doesn't hold the problem word by word, once, tell nothing."""
    found: dict[str, int] = {}
    for number, row in enumerate(read_file(prompt.path), 1):
        text = str(cell(row, prompt.prompt_column, f"{prompt.path}: prompt_column"))
        problem = str(cell(row, prompt.problem_column, f"{prompt.path}: problem_column")).strip()
        if problem and text.count(problem) == 1:
            found.setdefault(text.replace(problem, PLACE), number)
    if len(found) == 1:
        return next(iter(found))
    if not found:
        raise SourceError(f"prompt {prompt.path}: in no row does {prompt.prompt_column} hold the text of {prompt.problem_column}")
    raise SourceError(
        f"prompt {prompt.path}: {len(found)} different wordings, such as in rows {list(found.values())[:3]}: they must be one"
    )


def encode(tokenizer: Any, prompt: str) -> list[int]:
    """Token ids of a rendered prompt, through the tokenizer's chat template where it has one.

    The template's own special tokens are kept; nothing else is added.
    """
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": prompt}]
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    return tokenizer.encode(prompt, add_special_tokens=False)
