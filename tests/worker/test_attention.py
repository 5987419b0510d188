"""Exact scoring of Seen rollouts, against one plain forward per context."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from parallel_r1 import attention
from parallel_r1.trajectory import Trajectory

from .test_exactness import batch, next_token_logprobs

SEED = 3


def made_up(prompt: int, main: int, blocks: list[list[int]], generator: torch.Generator) -> Trajectory:
    """A trajectory of random tokens with the given lengths; every block holds its paths and a summary of 3 tokens."""

    def words(count: int) -> list[int]:
        return torch.randint(20, 200, (count,), generator=generator).tolist()

    made = Trajectory(words(prompt))
    made.append("main", words(main), [0.0] * main)
    for block, paths in enumerate(blocks):
        for index, length in enumerate(paths, start=1):
            made.append("path", words(length), [0.0] * length, block, index)
        made.append("forced", words(2), None, block)
        made.append("summary", words(3), [0.0] * 3, block)
        made.append("main", words(2), [0.0] * 2)
    return made


def reference(model: torch.nn.Module, t: Trajectory) -> torch.Tensor:
    """Log-probs of a response, each token in its own context, one forward per path."""
    plain = torch.tensor([t.prompt_ids + t.completion_ids])
    scores = next_token_logprobs(model(input_ids=plain).logits, plain)[0, len(t.prompt_ids) :]
    parts = list(scores)
    for span in t.spans:
        if span.kind == "path" and span.path > 1:
            before = next(s.start for s in t.spans if s.kind == "path" and s.block == span.block)
            alone = torch.tensor([t.prompt_ids + t.completion_ids[:before] + t.completion_ids[span.start : span.end]])
            found = next_token_logprobs(model(input_ids=alone).logits, alone)[0, len(t.prompt_ids) + before :]
            parts[span.start + 1 : span.end] = list(found[1:])
    return torch.stack(parts)


def counted(t: Trajectory) -> list[int]:
    """Response tokens whose score is defined: not the forced first token of a path >= 2."""
    openers = {span.start for span in t.spans if span.kind == "path" and span.path > 1}
    return [i for i in range(len(t.completion_ids)) if i not in openers]


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        ([(5, 3, [[4, 6]])], "one block of two paths"),
        ([(5, 3, [[6, 2, 4]]), (9, 1, [])], "three paths beside a response without a block"),
        ([(3, 2, [[2, 5], [4, 3]]), (8, 4, [[3, 3]])], "two blocks beside one, prompts of different lengths"),
        ([(4, 5, [])], "no block at all: nothing is copied"),
    ],
)
def test_one_forward_scores_and_trains_every_path_in_its_own_context(
    shapes: list[tuple[int, int, list[list[int]]]], reason: str, tiny: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32, attn_implementation="sdpa").eval()
    generator = torch.Generator().manual_seed(SEED)
    made = [made_up(*shape, generator) for shape in shapes]
    ids, mask, width = batch(made)
    laid_out = attention.scoring_inputs("causal", ids, mask, attention.Paths.of_trajectories(made, width))
    logits = model(input_ids=laid_out.input_ids, attention_mask=laid_out.visible, position_ids=laid_out.positions).logits
    scored = laid_out.gather_back(next_token_logprobs(logits, laid_out.input_ids))[:, -width:]
    found = torch.cat([scored[row, counted(t)] for row, t in enumerate(made)])
    expected = torch.cat([reference(model, t)[counted(t)] for t in made])
    assert (found - expected).abs().max() < 1e-4, reason

    weights = torch.rand(len(found), generator=generator)
    parameter = model.get_input_embeddings().weight
    one, many = (torch.autograd.grad((values * weights).sum(), parameter)[0] for values in (found, expected))
    assert (one - many).abs().max() < 1e-3 * many.abs().max(), f"gradients: {reason}"


def test_labels_count_every_scored_token_once() -> None:
    made = [made_up(5, 3, [[4, 6]], torch.Generator().manual_seed(SEED))]
    ids, mask, width = batch(made)
    laid_out = attention.scoring_inputs("causal", ids, mask, attention.Paths.of_trajectories(made, width))
    assert int((laid_out.labels != -100).sum()) == len(counted(made[0]))


def test_copies_sit_where_they_were_sampled() -> None:
    made = [made_up(5, 3, [[4, 6]], torch.Generator().manual_seed(SEED))]
    ids, mask, width = batch(made)
    laid_out = attention.scoring_inputs("causal", ids, mask, attention.Paths.of_trajectories(made, width))
    assert laid_out.positions[0, laid_out.length :].tolist() == list(range(8, 14)), "prompt 5 + main 3: the second path starts at 8 as well"
