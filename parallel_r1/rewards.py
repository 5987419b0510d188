"""What a rollout is worth (paper section 3.4; method.md section 5).

`correct` is the grader's verdict, `blocks` the number of opened blocks, `well_formed` whether the markup is without fault. The step comes
from the trainer's state, so a resumed run stays in phase.
"""

from __future__ import annotations

from parallel_r1.config import RlConfig


def accuracy(correct: bool) -> float:
    """+1 for a right answer, -1 for any other (S1, and the hard stage of Seen)."""
    return 1.0 if correct else -1.0


def accuracy_and_parallel(correct: bool, blocks: int, well_formed: bool) -> float:
    """+1 for a right answer that used at least one block and no faulty markup, else -1 (Seen's easy stage)."""
    return 1.0 if correct and blocks and well_formed else -1.0


def alternating(step: int, correct: bool, blocks: int, well_formed: bool, window: int = 10, bonus_steps: int = 2) -> float:
    """Accuracy in most steps; in the last `bonus_steps` of each window 1.2 for a right answer that used parallel thinking (S2).

    `step` counts from 0. A right answer with a faulty block counts as wrong in those steps, as in the released code.
    """
    if step % window < window - bonus_steps:
        return accuracy(correct)
    if not correct or (blocks and not well_formed):
        return -1.0
    return 1.2 if blocks else 1.0


def reward_of(config: RlConfig, step: int, correct: bool, blocks: int, well_formed: bool) -> float:
    """The configured reward of one rollout at an optimiser step, counted from 0."""
    if config.reward == "accuracy":
        return accuracy(correct)
    if config.reward == "accuracy_and_parallel":
        return accuracy_and_parallel(correct, blocks, well_formed)
    return alternating(step, correct, blocks, well_formed, config.alternating_window, config.alternating_bonus_steps)
