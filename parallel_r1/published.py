"""The paper's numbers (arXiv 2509.07980), once, as data: percents as printed, never recomputed.

Source: the paper's results tables, as the project's method notes give them (section 2). `CAVEATS` says what to mind beside ours.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from parallel_r1.config import PipelineConfig

SOURCE = "arXiv 2509.07980"
STUDENT = "Qwen/Qwen3-4B-Base"
BENCHMARKS = ("AIME25", "AIME24", "AMC23", "MATH")
SAMPLES = {"AIME25": 16, "AIME24": 16, "AMC23": 16, "MATH": 1}
PROBLEMS = {"AIME25": 30, "AIME24": 30, "AMC23": 40, "MATH": 316}
BUDGET = 3000

CAVEATS = (
    "its pass@16 is a bootstrap with replacement (one right of 16 counts 0.644); ours is the unbiased estimator, which is higher",
    "its MATH is 311 integer-answer problems of MATH-500 and 5 more with broken golds; ours is what prepare.evaluation names",
    "it prints no intervals; a mean over the 30 problems of an AIME has a standard error of up to 7 points",
)
"""Why a published number and ours of the same name are not the same measurement."""


@dataclass(frozen=True)
class Published:
    """One row of the paper: percents. `mean` is the mean of the four mean@k; None where the paper prints nothing."""

    recipe: str
    scores: dict[str, float] = field(default_factory=dict)
    pass_at_16: dict[str, float] = field(default_factory=dict)
    mean: float | None = None
    parallel_ratio: float | None = None
    note: str = ""


def _row(
    recipe: str, scores: tuple[float, ...], mean: float, ratio: float | None, passes: tuple[float, ...] = (), note: str = ""
) -> Published:
    by_set, passed = dict(zip(BENCHMARKS, scores, strict=True)), dict(zip(BENCHMARKS, passes, strict=False))
    return Published(recipe, by_set, passed, mean, ratio, note)


ROWS = (
    _row("base", (1.3, 2.9, 8.1, 13.9), 6.6, None, (10.2, 16.5, 51.2), "first version"),
    _row("base", (5.5, 10.0, 39.3, 54.0), 27.2, None, note="ICLR version: the first extraction of answers was wrong"),
    _row("sft_seen", (8.0, 10.6, 48.9, 76.6), 36.0, 95.6, (29.8, 26.4, 79.2)),
    _row("sft_unseen", (5.2, 8.5, 41.7, 71.5), 31.7, 95.6, (20.9, 26.7, 80.1)),
    _row("grpo_dapo", (14.8, 18.5, 63.6, 83.5), 45.1, 0.0, (32.4, 30.6, 85.1), "baseline without blocks"),
    _row("grpo_gsm8k_dapo", (13.3, 18.8, 66.4, 82.6), 45.3, 0.0, (26.3, 34.9, 82.2), "baseline without blocks"),
    _row("parallel_r1_seen", (19.2, 19.4, 70.5, 86.7), 48.9, 27.3, (38.9, 37.1, 85.0)),
    _row("parallel_r1_unseen_s1", (17.7, 18.3, 69.7, 82.6), 47.1, 13.6, (37.8, 33.2, 88.9)),
    _row("parallel_r1_unseen_s2", (19.0, 16.3, 67.5, 84.5), 46.8, 63.0, (42.2, 31.8, 91.5)),
)
"""The main table, in the paper's order of benchmarks."""

ABLATIONS = (
    Published("parallel_only", {"AMC23": 59.4, "MATH": 81.7}, parallel_ratio=80.3, note="unseen, parallel-only reward"),
    Published("seen_without_rl_easy", mean=46.6),
    Published("unseen_with_rl_easy", mean=38.5),
    Published("without_parallel_prompt", mean=47.1),
    Published("scaffold", {"AIME25": 25.6}, note="peak over the run"),
)

COLD_START = {"causal": "sft_seen", "structured": "sft_unseen"}


def row_for(label: str, last: bool, config: PipelineConfig) -> Published | None:
    """The row of the main table that a checkpoint repeats: base, the cold start, or the run's last by the run's name."""
    recipe = {"base": "base", "sft": COLD_START[config.attention]}.get(label, config.name if last else None)
    return next((row for row in reversed(ROWS) if row.recipe == recipe), None)


def row_of(recipe: str) -> Published | None:
    """The paper's row of a recipe, ablations included; of two versions the later."""
    rows = (*reversed(ROWS), *ABLATIONS)
    return next((row for row in rows if row.recipe == recipe), None)


def other_run(config: PipelineConfig) -> list[str]:
    """Why no number of a run can be compared with the paper's."""
    rollout = config.evaluate.rollout
    checks = {
        f"another student than {STUDENT}": getattr(config.student, "name", None) != STUDENT,
        f"budget of {rollout.max_response_tokens} tokens, the paper's is {BUDGET}": rollout.max_response_tokens != BUDGET,
        f"temperature {rollout.temperature:g}, top_p {rollout.top_p:g}; the paper's are 1": (rollout.temperature, rollout.top_p) != (1, 1),
        f"{rollout.num_paths} paths, {rollout.max_blocks} blocks; the paper's are 2, 4": (rollout.num_paths, rollout.max_blocks) != (2, 4),
    }
    return [reason for reason, applies in checks.items() if applies]


def other_set(name: str, problems: int | None, samples: int | None) -> list[str]:
    """Why a number of one benchmark can't be compared with the paper's."""
    reasons = []
    if problems != PROBLEMS[name]:
        reasons.append(f"{name}: {problems} problems, the paper's has {PROBLEMS[name]}{', a broken subset' * (name == 'MATH')}")
    if samples != SAMPLES[name]:
        reasons.append(f"{name}: {samples} samples, the paper took {SAMPLES[name]}")
    return reasons


PATH_DIVERSITY_BLEU = 0.063
"""Pairwise BLEU of the paths of a block."""
