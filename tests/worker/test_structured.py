"""Structured attention: the layout against its definition token by token, and scores against decoding that forks and joins a cache."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from parallel_r1.attention import Layout, Paths, check_backend, scoring_inputs, structure_forward, structured_layout
from parallel_r1.markup import TagIds
from parallel_r1.trajectory import Trajectory

from .test_exactness import batch, load, next_token_logprobs

TAGS = TagIds(290, 291, 292, 293, 294, 295, frozenset({1}))
SHAPES = st.lists(
    st.tuples(st.integers(1, 4), st.integers(1, 3), st.lists(st.lists(st.integers(0, 4), min_size=2, max_size=4), max_size=3)),
    min_size=1,
    max_size=3,
)
"""Rows of (prompt's length, main thread's length, blocks of path bodies' lengths)."""


def marked_up(prompt: int, main: int, blocks: list[list[int]], tags: TagIds = TAGS) -> Trajectory:
    """A trajectory with real tags and different tokens everywhere else; its prompt names the tags."""
    words = iter(range(20, 200))

    def some(count: int) -> list[int]:
        return [next(words) for _ in range(count)]

    made = Trajectory([tags.path, *some(prompt), tags.parallel])
    made.append("main", some(main), [0.0] * main)
    for block, paths in enumerate(blocks):
        made.append("main", [tags.parallel], [0.0])
        for index, length in enumerate(paths, start=1):
            made.append("path", [tags.path, *some(length), tags.path_end], None, block, index)
        made.append("forced", [tags.parallel_end, tags.summary], None, block)
        made.append("summary", [*some(2), tags.summary_end], [0.0] * 3, block)
        made.append("main", some(1), [0.0])
    return made


def layout_of(made: list[Trajectory]) -> Layout:
    """As the trainer lays them out: left-padded prompts, right-padded responses."""
    ids, mask, width = batch(made)
    return structured_layout(Paths.of_trajectories(made, width).shifted(ids.shape[1] - width), mask.bool())


# --- the definition -------------------------------------------------------------------------------------------------------


def places(t: Trajectory) -> list[tuple[int, tuple[int, int] | None]]:
    """Position, and (block, path) if any, of each token of prompt and response, by the definition in method.md section 6."""
    found: list[tuple[int, tuple[int, int] | None]] = [(index, None) for index in range(len(t.prompt_ids))]
    here, base, longest = len(t.prompt_ids), 0, 0
    for span in t.spans:
        for token in range(span.start, span.end):
            if span.kind == "path":
                base, longest = (here, 0) if span.path == 1 and token == span.start else (base, longest)
                found.append((base + token - span.start, (span.block, span.path)))
                longest = max(longest, token - span.start + 1)
                here = base + longest
            else:
                found.append((here, None))
                here += 1
    return found


def may_see(query: int, key: int, where: list[tuple[int, tuple[int, int] | None]]) -> bool:
    """By the definition: everything before, but siblings."""
    mine, other = where[query][1], where[key][1]
    siblings = mine is not None and other is not None and mine[0] == other[0] and mine[1] != other[1]
    return key <= query and not siblings


@settings(max_examples=30, deadline=None)
@given(SHAPES)
def test_layout_is_its_definition_token_by_token(shapes: list[tuple[int, int, list[list[int]]]]) -> None:
    made = [marked_up(*shape) for shape in shapes]
    before = max(len(t.prompt_ids) for t in made)
    found = layout_of(made)
    visible = found.visible()[:, 0]
    expected = torch.zeros_like(visible)
    for row, t in enumerate(made):
        where, start = places(t), before - len(t.prompt_ids)
        assert found.positions[row, start : start + len(where)].tolist() == [position for position, _ in where]
        for query in range(len(where)):
            for key in range(query + 1):
                expected[row, start + query, start + key] = may_see(query, key, where)
    assert torch.equal(visible[found.real], expected[found.real]), "padding included: no token sees it"
    assert bool(visible.any(-1).all()), "a row that sees nothing makes NaN"


@settings(max_examples=60, deadline=None)
@given(SHAPES)
def test_paths_read_from_ids_are_the_recorded_ones(shapes: list[tuple[int, int, list[list[int]]]]) -> None:
    """Prompts that name the tags shift nothing: tags count in the response only."""
    made = [marked_up(*shape) for shape in shapes]
    ids, mask, width = batch(made)
    before = ids.shape[1] - width
    response = mask.bool() & (torch.arange(ids.shape[1]) >= before)
    read, recorded = Paths.of_ids(ids, TAGS, response), Paths.of_trajectories(made, width).shifted(before)
    real = mask.bool()
    assert torch.equal(read.block_start[real], recorded.block_start[real])
    assert torch.equal(read.path_start[real], recorded.path_start[real])


def test_block_mask_for_flex_attention_is_the_dense_mask() -> None:
    found = layout_of([marked_up(4, 3, [[2, 3, 0], [1, 4]]), marked_up(1, 2, []), marked_up(2, 1, [[4, 1]])])
    rule = found.block_mask(block_size=16).mask_mod
    rows, length = found.real.shape
    row, query, key = torch.meshgrid(torch.arange(rows), torch.arange(length), torch.arange(length), indexing="ij")
    assert torch.equal(rule(row, torch.zeros_like(row), query, key), found.visible()[:, 0])


@pytest.mark.parametrize(
    ("implementation", "fine"), [("sdpa", True), ("flex_attention", True), ("eager", False), ("flash_attention_2", False), (None, False)]
)
def test_backends_that_take_boolean_masks_wrongly_are_refused(implementation: str | None, fine: bool) -> None:
    if fine:
        check_backend(implementation)
    else:
        with pytest.raises(ValueError, match="silently wrong.*attn_implementation='sdpa'"):
            check_backend(implementation)


def test_a_model_with_eager_attention_is_refused(tiny: Path) -> None:
    model = load(tiny)
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="eager"):
        structure_forward(model, TAGS)


# --- scores ---------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def fork_and_join(model: torch.nn.Module, t: Trajectory) -> torch.Tensor:
    """Log-probs of a response without any mask: each path runs on its own copy of the cache, the copies' new keys are put together."""
    cache = DynamicCache(config=model.config)
    here = len(t.prompt_ids)
    logits = [model(input_ids=torch.tensor([t.prompt_ids]), past_key_values=cache, use_cache=True).logits[0]]
    forked: list[DynamicCache] = []
    for span in t.spans:
        ids = torch.tensor([t.completion_ids[span.start : span.end]])
        if span.kind == "path":
            forked.append(copy.deepcopy(cache))
        elif forked:
            here += max(joined.get_seq_length() for joined in forked) - cache.get_seq_length()
            join(cache, forked)
            forked = []
        positions = torch.arange(here, here + ids.shape[1])[None]
        on = forked[-1] if span.kind == "path" else cache
        logits.append(model(input_ids=ids, position_ids=positions, past_key_values=on, use_cache=True).logits[0])
        here += 0 if span.kind == "path" else ids.shape[1]
    return next_token_logprobs(torch.cat(logits)[None], torch.tensor([t.prompt_ids + t.completion_ids]))[0, len(t.prompt_ids) :]


def join(cache: DynamicCache, forked: list[DynamicCache]) -> None:
    """Put what each fork has beyond `cache` behind it, one fork after another."""
    before = cache.get_seq_length()
    for index, layer in enumerate(cache.layers):
        for name in ("keys", "values"):
            new = [getattr(fork.layers[index], name)[:, :, before:] for fork in forked]
            setattr(layer, name, torch.cat([getattr(layer, name), *new], 2))


CASES = [
    ([(5, 3, [[4, 6]])], "one block of two paths"),
    ([(5, 3, [[6, 2, 4]]), (9, 1, [])], "three paths beside a response without a block"),
    ([(3, 2, [[2, 5], [4, 3]]), (8, 4, [[0, 3], [1, 1, 1, 1], [2, 2]])], "two blocks beside three, one path empty"),
]


@pytest.mark.parametrize(("shapes", "reason"), CASES)
def test_scores_are_those_of_decoding_that_forks_and_joins(shapes: list, reason: str, tiny: Path, tiny_tags: TagIds) -> None:
    model = load(tiny)
    made = [marked_up(*shape, tags=tiny_tags) for shape in shapes]
    ids, mask, width = batch(made)
    laid_out = scoring_inputs("structured", ids, mask, Paths.of_trajectories(made, width))
    with torch.no_grad():
        logits = model(input_ids=laid_out.input_ids, attention_mask=laid_out.visible, position_ids=laid_out.positions).logits
    scored = next_token_logprobs(logits, ids)[:, -width:]
    for row, t in enumerate(made):
        assert (scored[row, : len(t.completion_ids)] - fork_and_join(model, t)).abs().max() < 1e-4, reason


@pytest.mark.parametrize(("shapes", "reason"), CASES)
def test_loss_of_a_structured_batch_is_the_mean_over_paths_scored_apart(shapes: list, reason: str, tiny: Path, tiny_tags: TagIds) -> None:
    """The hook, on a batch as the cold start makes it: right-padded, prompts without labels."""
    made = [marked_up(*shape, tags=tiny_tags) for shape in shapes]
    model = load(tiny)
    expected = -torch.cat([fork_and_join(model, t) for t in made]).mean()
    length = max(len(t.prompt_ids) + len(t.completion_ids) for t in made)
    ids = torch.zeros(len(made), length, dtype=torch.long)
    labels, mask = torch.full_like(ids, -100), torch.zeros_like(ids)
    for row, t in enumerate(made):
        start, end = len(t.prompt_ids), len(t.prompt_ids) + len(t.completion_ids)
        ids[row, :end] = torch.tensor(t.prompt_ids + t.completion_ids)
        labels[row, start:end] = ids[row, start:end]
        mask[row, :end] = 1
    plain = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    structure_forward(model, tiny_tags)
    found = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    assert abs(found - expected) < 1e-4, reason
    assert abs(plain - expected) > 1e-3, "a plain forward must show the difference"
