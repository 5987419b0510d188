"""What a rollout is worth (paper section 3.4; method.md section 5).

A reward is a plain function of what the rollout came to; its table of cases in tests/test_rewards.py is its specification. Two rules hold
for all of them: a right answer never loses to a wrong one through a bonus, and a degenerate one (faulty markup, copied paths, the same
block again and again) never wins over an honest one. The step comes from the trainer's state, so a resumed run stays in phase.
"""

from __future__ import annotations

from dataclasses import dataclass

from parallel_r1.config import RlConfig

BONUS = 0.2
"""What the published bonuses add to a right answer: 1.2 in all."""


@dataclass(frozen=True)
class Outcome:
    """What a rollout came to: the grader's verdict, its markup, its cost."""

    correct: bool
    blocks: int = 0
    well_formed: bool = True
    tokens: int = 1
    """All tokens of the response."""
    critical_path_tokens: int = 1
    """Of each block only the longest path counts."""
    path_similarity: float = 0.0
    """Mean pairwise BLEU of the paths of its blocks, 0..1; 1 for copies."""

    @property
    def parallel(self) -> bool:
        """At least one valid block, and no faulty markup."""
        return self.blocks > 0 and self.well_formed

    @property
    def malformed(self) -> bool:
        """A block was opened and not well made."""
        return self.blocks > 0 and not self.well_formed


def accuracy(outcome: Outcome) -> float:
    """+1 for a right answer, -1 for any other (S1, and the hard stage of Seen)."""
    return 1.0 if outcome.correct else -1.0


def parallel_only(outcome: Outcome) -> float:
    """+1 for parallel thinking, whatever the answer (the paper's ablation)."""
    return 1.0 if outcome.parallel else -1.0


def accuracy_and_parallel(outcome: Outcome) -> float:
    """+1 for a right answer that thought in parallel, else -1 (Seen's easy stage)."""
    return 1.0 if outcome.correct and outcome.parallel else -1.0


def emphasis(outcome: Outcome) -> float:
    """1.2 for a right answer that thought in parallel, 1 for one without block, -1 for wrong ones. A right one with a faulty block counts
    as wrong, as in the released code."""
    if not outcome.correct or outcome.malformed:
        return -1.0
    return 1.0 + BONUS if outcome.parallel else 1.0


def alternating(outcome: Outcome, step: int, window: int = 10, bonus_steps: int = 2) -> float:
    """Accuracy in most steps, emphasis in the last `bonus_steps` of each window (S2); `step` counts from 0."""
    return accuracy(outcome) if step % window < window - bonus_steps else emphasis(outcome)


def accuracy_plus_parallel(outcome: Outcome) -> float:
    """Accuracy, and 0.5 more for parallel thinking: a wrong answer with it (-0.5) stays far below a right one without (1)."""
    return accuracy(outcome) + 0.5 * outcome.parallel


def efficiency(outcome: Outcome) -> float:
    """A right answer earns up to twice as much, by the share of its tokens off the critical path (1 - critical path / all tokens). Copied
    paths save nothing: the share counts by how much the paths differ. It is shared by the blocks, so that repeating one earns nothing."""
    if not outcome.correct or outcome.malformed:
        return -1.0
    saved = (1.0 - outcome.critical_path_tokens / outcome.tokens) / max(1, outcome.blocks)
    return 1.0 + saved * (1.0 - outcome.path_similarity)


def diversity(outcome: Outcome) -> float:
    """A right answer that thought in parallel earns 1.2 - 0.2 x BLEU between its paths: copies earn what no block does."""
    if not outcome.correct or outcome.malformed:
        return -1.0
    return 1.0 + BONUS - BONUS * outcome.path_similarity if outcome.parallel else 1.0


_PLAIN = {
    "accuracy": accuracy,
    "parallel_only": parallel_only,
    "accuracy_and_parallel": accuracy_and_parallel,
    "emphasis": emphasis,
    "accuracy_plus_parallel": accuracy_plus_parallel,
    "efficiency": efficiency,
    "diversity": diversity,
}


def reward_of(config: RlConfig, step: int, outcome: Outcome) -> float:
    """The configured reward of one rollout at an optimiser step, counted from 0."""
    if config.reward == "alternating":
        return alternating(outcome, step, config.alternating_window, config.alternating_bonus_steps)
    return _PLAIN[config.reward](outcome)
