"""The rewards: their tables are their specification."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest

from parallel_r1.config import Reward, RlConfig
from parallel_r1.diversity import path_similarity
from parallel_r1.markup import validate
from parallel_r1.rewards import (
    Outcome,
    accuracy,
    accuracy_and_parallel,
    accuracy_plus_parallel,
    alternating,
    diversity,
    efficiency,
    emphasis,
    parallel_only,
    reward_of,
)

RIGHT, WRONG = Outcome(correct=True), Outcome(correct=False)
HONEST = Outcome(correct=True, blocks=1, tokens=80, critical_path_tokens=60, path_similarity=0.1)
HONEST_WRONG = Outcome(correct=False, blocks=1, tokens=80, critical_path_tokens=60, path_similarity=0.1)
FAULTY = Outcome(correct=True, blocks=1, well_formed=False, tokens=80, critical_path_tokens=60)
COPIED = Outcome(correct=True, blocks=1, tokens=80, critical_path_tokens=60, path_similarity=1.0)
SPAM = Outcome(correct=True, blocks=4, tokens=200, critical_path_tokens=120, path_similarity=0.1)
STRAY = Outcome(correct=True, blocks=0, well_formed=False)


@pytest.mark.parametrize(
    ("outcome", "expected", "reason"),
    [(RIGHT, 1, "right"), (WRONG, -1, "wrong"), (FAULTY, 1, "markup isn't looked at"), (HONEST_WRONG, -1, "a block doesn't help")],
)
def test_accuracy(outcome: Outcome, expected: float, reason: str) -> None:
    assert accuracy(outcome) == expected, reason


@pytest.mark.parametrize(
    ("outcome", "expected", "reason"),
    [
        (HONEST, 1, "right, and thought in parallel"),
        (Outcome(correct=True, blocks=3), 1, "more blocks earn no more"),
        (RIGHT, -1, "right without a block: the easy stage teaches the form"),
        (FAULTY, -1, "a faulty block is no block (empty paths, unclosed tags)"),
        (STRAY, -1, "stray tags without a block"),
        (HONEST_WRONG, -1, "a block doesn't make up for a wrong answer"),
        (WRONG, -1, "neither"),
    ],
)
def test_accuracy_and_parallel(outcome: Outcome, expected: float, reason: str) -> None:
    assert accuracy_and_parallel(outcome) == expected, reason


@pytest.mark.parametrize(
    ("outcome", "expected", "reason"),
    [(HONEST_WRONG, 1, "the ablation: the answer isn't looked at"), (RIGHT, -1, "no block"), (FAULTY, -1, "a faulty block")],
)
def test_parallel_only(outcome: Outcome, expected: float, reason: str) -> None:
    assert parallel_only(outcome) == expected, reason


@pytest.mark.parametrize(
    ("step", "outcome", "expected", "reason"),
    [
        (0, HONEST, 1.0, "accuracy phase: parallel earns nothing"),
        (0, FAULTY, 1.0, "accuracy phase: markup isn't looked at"),
        (7, HONEST_WRONG, -1.0, "last step of the accuracy phase"),
        (8, HONEST, 1.2, "bonus phase, right and parallel"),
        (9, HONEST, 1.2, "last step of the window"),
        (8, FAULTY, -1.0, "bonus phase, right but malformed (released code)"),
        (8, RIGHT, 1.0, "bonus phase, right without a block keeps its reward"),
        (8, HONEST_WRONG, -1.0, "bonus phase, wrong"),
        (10, HONEST, 1.0, "the next window begins with accuracy"),
        (18, RIGHT, 1.0, "window repeats; sequential right answers keep their reward"),
    ],
)
def test_alternating(step: int, outcome: Outcome, expected: float, reason: str) -> None:
    assert alternating(outcome, step) == expected, reason


@pytest.mark.parametrize(("window", "bonus_steps", "paid"), [(10, 2, {8, 9}), (4, 1, {3, 7}), (5, 3, {2, 3, 4, 7, 8, 9})])
def test_the_window_is_configurable(window: int, bonus_steps: int, paid: set[int]) -> None:
    assert {step for step in range(10) if alternating(HONEST, step, window, bonus_steps) > 1} == paid


@pytest.mark.parametrize(
    ("reward", "outcome", "expected", "reason"),
    [
        (emphasis, HONEST, 1.2, "the bonus in every step"),
        (emphasis, RIGHT, 1.0, "no block, no bonus, no loss"),
        (emphasis, FAULTY, -1.0, "as in the released code"),
        (accuracy_plus_parallel, HONEST, 1.5, "right and parallel"),
        (accuracy_plus_parallel, FAULTY, 1.0, "a faulty block earns nothing, the right answer stays"),
        (accuracy_plus_parallel, HONEST_WRONG, -0.5, "wrong and parallel stays far below right and sequential"),
        (efficiency, RIGHT, 1.0, "nothing saved"),
        (efficiency, HONEST, 1.225, "a quarter off the critical path, paths a tenth alike"),
        (efficiency, COPIED, 1.0, "copied paths save nothing"),
        (efficiency, SPAM, 1.09, "four blocks save 40 %, 10 % each"),
        (efficiency, HONEST_WRONG, -1.0, "cheap and wrong"),
        (diversity, HONEST, 1.18, "different paths"),
        (diversity, COPIED, 1.0, "copies earn what no block does"),
        (diversity, RIGHT, 1.0, "no block"),
    ],
)
def test_further_published_forms(reward, outcome: Outcome, expected: float, reason: str) -> None:
    assert reward(outcome) == pytest.approx(expected), reason


OUTCOMES = [
    Outcome(correct, blocks, well_formed, 100, 100 - 40 * (blocks > 0), similarity)
    for correct, blocks, well_formed, similarity in itertools.product((True, False), (0, 1, 4), (True, False), (0.0, 0.5, 1.0))
    if blocks or not similarity
]
REWARDS = get_args(Reward)


@pytest.mark.parametrize("name", [name for name in REWARDS if name != "parallel_only"])
@pytest.mark.parametrize("step", [0, 9])
def test_no_bonus_lets_a_wrong_answer_win(name: str, step: int) -> None:
    config = RlConfig(reward=name)
    wrong = max(reward_of(config, step, outcome) for outcome in OUTCOMES if not outcome.correct)
    sequential = name != "accuracy_and_parallel"
    honest = [outcome for outcome in OUTCOMES if outcome.correct and (outcome.parallel or (not outcome.blocks and sequential))]
    assert wrong < min(reward_of(config, step, outcome) for outcome in honest)


@pytest.mark.parametrize("name", REWARDS)
@pytest.mark.parametrize("step", [0, 9])
@pytest.mark.parametrize("correct", [True, False])
def test_degenerate_blocks_never_win_over_an_honest_one(name: str, step: int, correct: bool) -> None:
    config = RlConfig(reward=name)
    honest = reward_of(config, step, Outcome(correct, 1, True, 100, 60, 0.0))
    degenerate = [o for o in OUTCOMES if o.correct == correct and o.blocks and (not o.well_formed or o.path_similarity == 1.0)]
    assert max(reward_of(config, step, outcome) for outcome in degenerate) <= honest


# --- what a completion can try ----------------------------------------------------------------------------------------------

ONE, OTHER = "In order. 12+5=17;17-3=14.", "Losses first. 12-3=9;9+5=14."
BLOCK = f"<Parallel><Path>{ONE}</Path><Path>{OTHER}</Path></Parallel>\n<Summary>Both give 14.</Summary>"
HONEST_TEXT = f"Start with 12.\n{BLOCK}\nFinal Answer: 14"
DEGENERATE = {
    "an empty path": HONEST_TEXT.replace(OTHER, ""),
    "a blank path": HONEST_TEXT.replace(OTHER, " \n "),
    "no paths at all": "<Parallel></Parallel>\n<Summary>14</Summary>\nFinal Answer: 14",
    "a single path": "<Parallel><Path>12+5-3=14</Path></Parallel>\n<Summary>14</Summary>\nFinal Answer: 14",
    "copied paths": HONEST_TEXT.replace(OTHER, ONE),
    "long copied paths": HONEST_TEXT.replace(OTHER, "a b c d " * 50).replace(ONE, "a b c d " * 50),
    "an empty summary": HONEST_TEXT.replace("Both give 14.", ""),
    "no summary": HONEST_TEXT.replace("\n<Summary>Both give 14.</Summary>", ""),
    "the same block again and again": "\n".join([BLOCK] * 8) + "\nFinal Answer: 14",
    "tags in prose": "I will use <Parallel> with a <Path> and </Path>, then </Parallel>.\nFinal Answer: 14",
    "a lone opener": "<Parallel>\nFinal Answer: 14",
    "closers without openers": "</Path></Parallel></Summary>\nFinal Answer: 14",
    "an unclosed path": HONEST_TEXT.replace("</Path></Parallel>", "</Parallel>"),
    "an unclosed block": HONEST_TEXT.replace("</Parallel>", ""),
    "an unclosed summary": HONEST_TEXT.replace("</Summary>", ""),
    "a block in a path": HONEST_TEXT.replace("In order.", BLOCK),
    "prose between paths": HONEST_TEXT.replace("</Path><Path>", "</Path> and now <Path>"),
    "prose before the summary": HONEST_TEXT.replace("\n<Summary>", " so it is 14\n<Summary>"),
    "the answer inside the block": HONEST_TEXT.replace("Both give 14.", "Final Answer: 14"),
    "a good block, and then a broken one": HONEST_TEXT.replace("Final", "<Parallel><Path>x</Path></Parallel>\nFinal"),
}  # fmt: skip


def outcome_of(text: str, correct: bool) -> Outcome:
    """What a completion comes to, with words for tokens: as the engine's records have it, from the text alone."""
    inside = [block.split("</Parallel>")[0] for block in text.split("<Parallel>")[1:]]
    blocks = [paths for block in inside if (paths := [path.split("</Path>")[0] for path in block.split("<Path>")[1:]])]
    words = [[len(path.split()) for path in paths] for paths in blocks]
    tokens = len(text.split())
    off_the_critical_path = sum(sum(counts) - max(counts) for counts in words)
    similarity = path_similarity(blocks)
    return Outcome(correct, text.count("<Parallel>"), not validate(text), tokens, tokens - off_the_critical_path, similarity)


@pytest.mark.parametrize("name", REWARDS)
@pytest.mark.parametrize("step", [0, 9])
@pytest.mark.parametrize("trick", DEGENERATE)
def test_no_trick_earns_more_than_an_honest_completion(name: str, step: int, trick: str) -> None:
    config = RlConfig(reward=name)
    for correct in (True, False):
        honest = reward_of(config, step, outcome_of(HONEST_TEXT, correct))
        assert reward_of(config, step, outcome_of(DEGENERATE[trick], correct)) <= honest
    if name != "parallel_only":  # which doesn't look at the answer, as published
        assert reward_of(config, step, outcome_of(DEGENERATE[trick], False)) < reward_of(config, step, outcome_of(HONEST_TEXT, True))


def test_the_tricks_are_what_they_say() -> None:
    """Only copies and repetitions have sound markup; the honest completion has, too."""
    assert outcome_of(HONEST_TEXT, True).parallel and outcome_of(HONEST_TEXT, True).path_similarity < 0.5
    sound = {trick for trick, text in DEGENERATE.items() if outcome_of(text, True).well_formed}
    assert sound == {"copied paths", "long copied paths", "the same block again and again"}


def test_the_config_chooses() -> None:
    config = RlConfig(reward="alternating", alternating_window=4, alternating_bonus_steps=1)
    assert [reward_of(config, step, HONEST) for step in range(5)] == [1.0, 1.0, 1.0, 1.2, 1.0]
    assert reward_of(RlConfig(reward="accuracy_and_parallel"), 0, RIGHT) == -1.0
    assert reward_of(RlConfig(), 9, HONEST) == 1.0
