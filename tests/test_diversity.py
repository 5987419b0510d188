"""Path similarity: pairwise BLEU within blocks."""

from __future__ import annotations

import pytest

from parallel_r1.diversity import path_similarity

A, B = "First add five to twelve, then take three away.", "Both changes together are plus two, so twelve becomes fourteen."


@pytest.mark.parametrize(
    ("blocks", "low", "high", "reason"),
    [
        ([], 0, 0, "no block"),
        ([[A, A]], 1, 1, "copies"),
        ([[A, A], [A, B]], 0.4, 0.6, "a mean over pairs, so one honest block of two halves it"),
        ([[A, B]], 0, 0.1, "different wordings"),
        ([[A, A.replace("five", "six")]], 0.5, 0.95, "one word changed"),
        ([["17", "17"]], 1, 1, "short paths"),
        ([["", "x"]], 0, 0, "an empty path is like nothing"),
        ([[A, B], [B, A]], 0, 0.1, "paths of different blocks are not compared"),
    ],
)
def test_path_similarity(blocks: list[list[str]], low: float, high: float, reason: str) -> None:
    assert low <= path_similarity(blocks) <= high, reason


def test_order_does_not_matter() -> None:
    assert path_similarity([[A, B]]) == pytest.approx(path_similarity([[B, A]]))
