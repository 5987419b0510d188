"""What the student is asked: the problem alone, plainly, or with an explanation of parallel thinking (paper, appendix; our own words)."""

from __future__ import annotations

from typing import Any

from parallel_r1.config import PromptStyle
from parallel_r1.markup import CLOSE_PARALLEL, CLOSE_PATH, CLOSE_SUMMARY, OPEN_PARALLEL, OPEN_PATH, OPEN_SUMMARY

PLAIN = "Solve the problem step by step. End with a line `Final Answer:` followed by the answer alone.\n\nProblem: {problem}\n"

PARALLEL = (
    "Solve the problem step by step. Wherever looking at it from several sides would help, think in parallel: write "
    f"{OPEN_PARALLEL}, then two or more independent lines of thought, each as {OPEN_PATH}...{CLOSE_PATH}, then {CLOSE_PARALLEL}. "
    "The paths have no order and do not refer to each other. "
    f"Right after each block write {OPEN_SUMMARY}...{CLOSE_SUMMARY} with what the paths found, compared and weighed, and go on from there. "
    "Use as many blocks as help. End with a line `Final Answer:` followed by the answer alone.\n\nProblem: {problem}\n"
)


def render(style: PromptStyle, problem: str) -> str:
    """The prompt's text."""
    if style == "bare":
        return f"{problem}\n"
    return (PLAIN if style == "plain" else PARALLEL).replace("{problem}", problem)


def encode(tokenizer: Any, prompt: str) -> list[int]:
    """Token ids of a rendered prompt, through the tokenizer's chat template where it has one.

    The template's own special tokens are kept; nothing else is added.
    """
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": prompt}]
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    return tokenizer.encode(prompt, add_special_tokens=False)
