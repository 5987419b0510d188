"""The rewards: their tables are their specification."""

import itertools

import pytest

from parallel_r1.config import RlConfig
from parallel_r1.rewards import accuracy, accuracy_and_parallel, alternating, reward_of


@pytest.mark.parametrize("correct, expected", [(True, 1.0), (False, -1.0)])
def test_accuracy(correct: bool, expected: float) -> None:
    assert accuracy(correct) == expected


@pytest.mark.parametrize(
    "correct, blocks, well_formed, expected, reason",
    [
        (True, 1, True, 1.0, "right, and thought in parallel"),
        (True, 3, True, 1.0, "more blocks earn no more"),
        (True, 0, True, -1.0, "right without a block: the easy stage teaches the form"),
        (True, 1, False, -1.0, "a faulty block is no block (empty paths, unclosed tags)"),
        (True, 0, False, -1.0, "stray tags without a block"),
        (False, 1, True, -1.0, "a block doesn't make up for a wrong answer"),
        (False, 0, True, -1.0, "neither"),
    ],
)
def test_accuracy_and_parallel(correct: bool, blocks: int, well_formed: bool, expected: float, reason: str) -> None:
    assert accuracy_and_parallel(correct, blocks, well_formed) == expected, reason


@pytest.mark.parametrize(
    "step, correct, blocks, well_formed, expected, reason",
    [
        (0, True, 1, True, 1.0, "accuracy phase: parallel earns nothing"),
        (0, True, 1, False, 1.0, "accuracy phase: markup isn't looked at"),
        (7, False, 1, True, -1.0, "last step of the accuracy phase"),
        (8, True, 1, True, 1.2, "bonus phase, right and parallel"),
        (9, True, 1, True, 1.2, "last step of the window"),
        (8, True, 1, False, -1.0, "bonus phase, right but malformed (released code)"),
        (8, True, 0, True, 1.0, "bonus phase, right without a block keeps its reward"),
        (8, False, 1, True, -1.0, "bonus phase, wrong"),
        (10, True, 1, True, 1.0, "the next window begins with accuracy"),
        (18, True, 0, True, 1.0, "window repeats; sequential right answers keep their reward"),
    ],
)
def test_alternating(step: int, correct: bool, blocks: int, well_formed: bool, expected: float, reason: str) -> None:
    assert alternating(step, correct, blocks, well_formed) == expected, reason


@pytest.mark.parametrize("window, bonus_steps, paid", [(10, 2, {8, 9}), (4, 1, {3, 7}), (5, 3, {2, 3, 4, 7, 8, 9})])
def test_the_window_is_configurable(window: int, bonus_steps: int, paid: set[int]) -> None:
    assert {s for s in range(10) if alternating(s, True, 1, True, window, bonus_steps) > 1} == paid


ROLLOUTS = list(itertools.product((True, False), (0, 1, 4), (True, False)))


@pytest.mark.parametrize("name", ["accuracy", "accuracy_and_parallel", "alternating"])
@pytest.mark.parametrize("step", [0, 9])
def test_no_bonus_lets_a_wrong_answer_win(name: str, step: int) -> None:
    config = RlConfig(reward=name)
    worth = {rollout: reward_of(config, step, *rollout) for rollout in ROLLOUTS}
    wrong = {value for (correct, _, _), value in worth.items() if not correct}
    right = {value for (correct, _, _), value in worth.items() if correct}
    assert wrong == {-1.0} and min(right) >= -1.0
    faulty = max(worth[True, blocks, False] for blocks in (1, 4))
    assert faulty <= worth[True, 1, True], "degenerate blocks never win over honest ones"


def test_the_config_chooses() -> None:
    config = RlConfig(reward="alternating", alternating_window=4, alternating_bonus_steps=1)
    assert [reward_of(config, step, True, 1, True) for step in range(5)] == [1.0, 1.0, 1.0, 1.2, 1.0]
    assert reward_of(RlConfig(reward="accuracy_and_parallel"), 0, True, 0, True) == -1.0
    assert reward_of(RlConfig(), 9, True, 1, True) == 1.0
