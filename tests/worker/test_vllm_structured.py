"""Structured attention in vLLM: what a prompt's tokens are told, what is read from the cache, what the prefix cache may share."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm import SamplingParams

from parallel_r1 import student
from parallel_r1.attention import Layout, Paths, structured_layout
from parallel_r1.markup import TagIds
from parallel_r1.rollout import vllm_structured
from parallel_r1.rollout.engines import open_engine
from parallel_r1.rollout.records import Studio
from parallel_r1.rollout.vllm_structured import cpu, gpu
from parallel_r1.rollout.vllm_structured.visibility import rows_with_holes

from .conftest import ROLLOUT, EngineOf, make_tiny
from .test_exactness import TOLERANCE, disturb, gaps, load, next_token_logprobs, sample, worst

TAGS = TagIds(1, 2, 3, 4, 5, 6, frozenset({0}))
SOUP = st.lists(st.sampled_from([1, 2, 3, 3, 4, 5, 6, 7, 8]), min_size=1, max_size=40)
ONE_PATH = [1, 3, 7, 8, 4]
"""`<Parallel><Path>..</Path>`"""


def layout(ids: list[int], tags: TagIds = TAGS) -> Layout:
    """What vLLM's model makes of a prompt."""
    row = torch.tensor([ids])
    everything = torch.ones_like(row, dtype=torch.bool)
    return structured_layout(Paths.of_ids(row, tags, everything), everything)


# --- the prefix cache -----------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(ids=SOUP, following=SOUP)
@example(ids=[1, 3, 1], following=[3])
def test_where_a_token_sits_and_what_it_sees_follows_from_the_ids_up_to_it(ids: list[int], following: list[int]) -> None:
    """Else vLLM's prefix cache, which knows ids only, would hand out keys of other positions."""
    alone, continued, count = layout(ids), layout(ids + following), len(ids)
    assert torch.equal(alone.positions, continued.positions[:, :count])
    assert torch.equal(alone.visible(), continued.visible()[:, :, :count, :count])  # holes may lie elsewhere where they are empty


@settings(max_examples=100, deadline=None)
@given(
    before=st.lists(st.just(7), max_size=5),
    path=st.lists(st.sampled_from([7, 8]), max_size=10),
    end=st.sampled_from([1, 2, 4, 5, 6, 7]),
)
def test_sampled_tokens_are_laid_out_as_a_prompt_would_lay_them_out(before: list[int], path: list[int], end: int) -> None:
    """vLLM counts positions on from the last prompt token and gives sampled tokens no hole; the stop token may be computed too."""
    prompt = [*before, 1, 3]
    whole = layout([*prompt, *path, end])
    last = int(layout(prompt).positions[0, -1])
    assert whole.positions[0, len(prompt) :].tolist() == [last + 1 + i for i in range(len(path) + 1)]
    assert bool((whole.hole_end <= whole.hole_start).all())


def test_cached_prefixes_are_used_and_right_whatever_was_cached_before(engine_of: EngineOf, tiny: Path) -> None:
    """The same paths alone, first and second, in every order: their texts share prefixes, their keys and values may not be mixed up."""
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tags = TagIds.from_tokenizer(tokenizer)
    model, llm = load(tiny), engine_of("vllm", "structured").llm
    generator = torch.Generator().manual_seed(0)
    prompt, a, b, c = (torch.randint(10, 200, (count,), generator=generator).tolist() for count in (40, 33, 35, 31))

    def block(*paths: list[int]) -> list[int]:
        inside = [token for path in paths for token in (tags.path, *path, tags.path_end)]
        return [*prompt, tags.parallel, *inside, tags.parallel_end, *tokenizer.encode("\n"), tags.summary]

    alone = [[*prompt, tags.parallel, tags.path, *path] for path in (a, b)]
    contexts = [*alone, block(a, b), block(a, c), block(b, a), block(b, a, c), block(a, b), [*block(a, b), *c, tags.summary_end]]
    stop = (tags.parallel, tags.parallel_end, tags.path, tags.path_end, tags.summary, tags.summary_end)
    llm.reset_prefix_cache()
    cached = []
    for ids in [*contexts, *reversed(contexts)]:
        options = SamplingParams(max_tokens=3, logprobs=0, stop_token_ids=list(stop), detokenize=False)
        output = llm.generate({"prompt_token_ids": ids}, options, use_tqdm=False)[0]
        cached.append(output.num_cached_tokens)
        sampled = list(output.outputs[0].token_ids)
        whole = layout([*ids, *sampled], tags)
        row = torch.tensor([[*ids, *sampled]])
        with torch.no_grad():
            logits = model(input_ids=row, attention_mask=whole.visible(), position_ids=whole.positions).logits
        expected = next_token_logprobs(logits, row)[0, -len(sampled) :]
        found = torch.tensor([entry[token].logprob for token, entry in zip(sampled, output.outputs[0].logprobs, strict=True)])
        assert (found - expected).abs().max() <= TOLERANCE
    assert min(cached[1:]) >= 32, "each of them shares the prompt with the one before"
    assert cached[len(contexts)] >= 128, "a context seen before comes from the cache, holes and all"


def test_the_model_tells_vllm_the_layout(engine_of: EngineOf, tiny_tags: TagIds) -> None:
    """Three channels per token, and how far the next token's position is from its index."""
    worker = engine_of("vllm", "structured").llm.llm_engine.model_executor.driver_worker
    model = worker.model_runner.get_model()
    prompts = ([7], [7, 1, 3], [7, *ONE_PATH, 2, 6], [7, 8, *ONE_PATH, 3, 8, 4], [*ONE_PATH, 3, 4, 3, 7, 7, 4, 2, 5, 8, *ONE_PATH, 3])
    for prompt in prompts:
        ids = [{1: tiny_tags.parallel, 2: tiny_tags.parallel_end, 3: tiny_tags.path, 4: tiny_tags.path_end}.get(i, i + 20) for i in prompt]
        channels, delta = model.get_mrope_input_positions(ids)
        expected = layout(ids, tiny_tags)
        assert torch.equal(channels[0], expected.positions[0])
        holes = [set(range(*map(int, pair))) for pair in zip(channels[1], channels[2], strict=True)]
        assert holes == [set(range(*map(int, pair))) for pair in zip(expected.hole_start[0], expected.hole_end[0], strict=True)]
        assert len(ids) + delta == channels[0, -1] + 1


# --- prompts --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "fine", "reason"),
    [
        ([7, 8, 7], True, "no tags"),
        ([7, 1, 7, 3, 8, 4, 2], True, "our own prompts: they name the tags with text between"),
        ([7, 3, 8, 4, 1], True, "paths without a block, a block without paths"),
        ([7, *ONE_PATH, 2, 8], False, "a whole block"),
        ([7, *ONE_PATH], False, "one that is left open"),
    ],
)
def test_prompts_with_a_block_are_refused(prompt: list[int], fine: bool, reason: str) -> None:
    if fine:
        vllm_structured.refuse_blocks(prompt, TAGS)
        assert layout(prompt).positions[0].tolist() == list(range(len(prompt))), reason
    else:
        with pytest.raises(ValueError, match="prompt token 1: <Parallel><Path> .* rollout.engine: transformers"):
            vllm_structured.refuse_blocks(prompt, TAGS)


def test_the_engine_refuses_them_under_structured_attention_only(engine_of: EngineOf, tiny: Path) -> None:
    studio = Studio(AutoTokenizer.from_pretrained(tiny), ROLLOUT)
    prompt = studio.tokenizer.encode("Like <Parallel><Path>this</Path></Parallel>?")
    with pytest.raises(ValueError, match="spelled out in a prompt"):
        list(engine_of("vllm", "structured").run([studio.rollout(prompt, "0")]))
    assert len(list(engine_of("vllm", "causal").run([studio.rollout(prompt, "0")]))) == 1


def test_other_models_are_refused() -> None:
    with pytest.raises(ValueError, match="Qwen3ForCausalLM in vLLM, the checkpoint is a LlamaForCausalLM: set rollout.engine"):
        vllm_structured.hf_overrides("LlamaForCausalLM")


# --- embeddings -----------------------------------------------------------------------------------------------------------


def test_untied_embeddings_and_new_weights(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "tied")
    tied = load(folder)
    untied = AutoModelForCausalLM.from_config(type(tied.config)(**{**tied.config.to_dict(), "tie_word_embeddings": False}))
    untied.load_state_dict(tied.state_dict())
    student.save(untied, AutoTokenizer.from_pretrained(folder), tmp_path / "untied")
    model = load(tmp_path / "untied")
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()
    engine = open_engine(tmp_path / "untied", ROLLOUT.model_copy(update={"engine": "vllm", "attention": "structured"}), seed=0)
    before = sample(engine, tmp_path / "untied", prompts=24)
    assert max(worst(gaps(model, before, "structured")).values()) <= TOLERANCE
    disturb(model)
    engine.sync(model)
    after = sample(engine, tmp_path / "untied", prompts=24)
    assert any(t.blocks for t in after)
    assert max(worst(gaps(model, after, "structured")).values()) <= TOLERANCE


# --- rows with a hole -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("computed", [(0, 0, 0), (3, 9, 1), (10, 2, 11), (14, 0, 5)])
def test_rows_of_any_piece_of_a_prompt(computed: tuple[int, ...]) -> None:
    """A prompt comes in pieces where its beginning is cached or the step is full: rows, keys and holes must still line up."""
    prompts = [[7, *ONE_PATH, 3, 8, 8, 8, 4, 2, 5, 7, 7], [7] * 12, [8, 8, *ONE_PATH, 3, 7, 4, 3, 8, 4, 2]]
    layouts = [layout(ids) for ids in prompts]
    starts = torch.tensor([0, *(len(ids) - done for ids, done in zip(prompts, computed, strict=True))]).cumsum(0)
    metadata = SimpleNamespace(
        num_actual_tokens=int(starts[-1]),
        query_start_loc=starts,
        seq_lens=torch.tensor([len(ids) for ids in prompts]),
        block_table=torch.arange(12).view(3, 4),
    )
    padding = torch.tensor([5, 9])
    holes = [
        torch.cat([*(getattr(found, field)[0, done:] for found, done in zip(layouts, computed, strict=True)), padding[i : i + 1]])
        for i, field in enumerate(("hole_start", "hole_end"))
    ]
    expected = {
        int(starts[owner]) + index - done: (owner, found.visible()[0, 0, index])
        for owner, (found, done) in enumerate(zip(layouts, computed, strict=True))
        for index in range(done, found.positions.shape[1])
        if found.hole_end[0, index] > found.hole_start[0, index]
    }
    found = rows_with_holes(*holes, metadata)
    seen = {int(row): (int(part.blocks[0]) // 4, part.visible[i]) for part in found for i, row in enumerate(part.rows)}
    assert seen.keys() == expected.keys()
    assert all(seen[row][0] == owner and torch.equal(seen[row][1], visible) for row, (owner, visible) in expected.items())


# --- reading caches -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "head_size"), [(torch.float32, 32), (torch.float32, 64), (torch.bfloat16, 64), (torch.bfloat16, 128)])
@pytest.mark.parametrize("block_size", [32, 128])
def test_packed_caches_of_this_processor_can_be_read(dtype: torch.dtype, head_size: int, block_size: int) -> None:
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa, ops

    isa, heads, tokens = _get_attn_isa(dtype, block_size, head_size), 2, 3 * block_size
    keys, values = torch.randn(2, tokens, heads, head_size).to(dtype)
    cache = torch.zeros(5, heads, block_size, 2 * head_size, dtype=dtype)
    order = torch.tensor([4, 1, 3])
    slots = (order[:, None] * block_size + torch.arange(block_size)).flatten()
    packed = cache.view(5, heads, 2 * block_size, head_size).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(keys, values, *packed, slots, isa)
    found = cpu.read_packed(cache, order, isa, head_size)
    assert torch.equal(found[0], keys)
    assert torch.equal(found[1], values)


def test_flash_attentions_cache_can_be_read() -> None:
    """(blocks, heads, tokens, keys beside values), as FlashAttentionImpl.forward documents and splits it."""
    keys, values = torch.randn(2, 3, 16, 2, 8)
    cache = torch.zeros(5, 2, 16, 16)
    order = torch.tensor([4, 1, 3])
    cache[order] = torch.cat([keys, values], -1).transpose(1, 2)
    found = gpu.read_paged(cache, order, 8)
    assert torch.equal(found[0], keys.flatten(0, 1))
    assert torch.equal(found[1], values.flatten(0, 1))


def test_rows_attend_over_shared_key_value_heads() -> None:
    """What `_again` asks of sdpa: a (rows, keys) mask for all heads, queries in groups per key-value head."""
    queries, keys, values = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    visible = torch.rand(3, 9) > 0.4
    visible[:, 0] = True
    found = scaled_dot_product_attention(queries, keys, values, attn_mask=visible, enable_gqa=True)
    repeated = keys.repeat_interleave(2, 1), values.repeat_interleave(2, 1)
    weights = (queries @ repeated[0].transpose(-1, -2) / 8**0.5).masked_fill(~visible, -torch.inf).softmax(-1)
    assert torch.allclose(found, weights @ repeated[1], atol=1e-5)
