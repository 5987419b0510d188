"""How alike the paths of a rollout are (paper section 5: path diversity, pairwise BLEU), by sacrebleu."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import permutations
from statistics import fmean

from sacrebleu.metrics import BLEU


def path_similarity(blocks: Sequence[Sequence[str]]) -> float:
    """Mean pairwise sentence BLEU of the paths within each block, 0..1: each path against the others of its block; 0 without a block."""
    pairs = [pair for paths in blocks for pair in permutations(paths, 2)]
    return fmean(_bleu(*pair) for pair in pairs) if pairs else 0.0


def _bleu(path: str, other: str) -> float:
    if path == other:
        return 1.0
    return min(1.0, _metric().sentence_score(path, [other]).score / 100)


@cache
def _metric() -> BLEU:
    # paths may be shorter than four words, so only the n-grams that exist count
    return BLEU(effective_order=True)
