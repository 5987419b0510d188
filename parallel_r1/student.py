"""The student before its cold start: a small Qwen3 made from scratch, or any causal checkpoint, with the six tags as single tokens.

Tags are added with `special_tokens=False`: marked special, they would vanish from every decoded text, and rewards and evaluators would see
no blocks (the released code's most reported fault). Each tag's row starts from its own value: identical rows hardly learn (method.md 4).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from parallel_r1.config import HubStudent, ScratchStudent
from parallel_r1.markup import TAGS
from parallel_r1.rollout.engines import model_dtype

PAD, EOS = "<pad>", "<eos>"
BASE_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
"""Chat template of a model that came without one: nothing around a message, so that a chat and a plain prompt are the same token ids."""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE with single digits, trained on `texts`, with the six tags added. Any text can be encoded, by bytes if need be."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[PAD, EOS], show_progress=False, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())
    )
    backend.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=PAD, eos_token=EOS, clean_up_tokenization_spaces=False)
    add_tags(tokenizer)
    add_template(tokenizer)
    return tokenizer


def add_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Give a base model a chat template, as chat servers refuse models without; one that there is stays."""
    tokenizer.chat_template = tokenizer.chat_template or BASE_TEMPLATE


def add_tags(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Make every tag one plain token; gives those that were new. Raises ValueError where the tokenizer has one as a special token."""
    special = [tag for tag in TAGS if tag in tokenizer.all_special_tokens]
    if special:
        raise ValueError(
            f"tokenizer: {', '.join(special)} are special tokens and would vanish from decoded texts; use a tokenizer without them"
        )
    new = [tag for tag in TAGS if tag not in tokenizer.get_vocab()]
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in new], special_tokens=False)
    return new


def scratch_model(config: ScratchStudent, tokenizer: PreTrainedTokenizerBase, seed: int) -> Qwen3ForCausalLM:
    """A Qwen3 with fresh weights in float32 and tied embeddings."""
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            intermediate_size=config.intermediate_size,
            max_position_embeddings=config.max_position,
            initializer_range=config.init_std,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )


def hub_student(config: HubStudent, seed: int) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, list[str]]:
    """A causal checkpoint with the tags added, each with a starting row of its own: the mean of its spelled-out pieces, plus small noise.

    Also gives the tags that were new to it.
    """
    options = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
    tokenizer = AutoTokenizer.from_pretrained(config.name, **options)
    model = AutoModelForCausalLM.from_pretrained(config.name, dtype=model_dtype(), use_safetensors=True, **options)
    pieces = {tag: tokenizer.encode(tag, add_special_tokens=False) for tag in TAGS}
    new = add_tags(tokenizer)
    add_template(tokenizer)
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    generator = torch.Generator().manual_seed(seed)
    tables = {table.weight.data_ptr(): table.weight for table in (model.get_input_embeddings(), model.get_output_embeddings())}
    for table in tables.values():
        _start_rows(table.data, tokenizer, {tag: pieces[tag] for tag in new}, generator)
    return model, tokenizer, new


def _start_rows(table: torch.Tensor, tokenizer: PreTrainedTokenizerBase, pieces: dict[str, list[int]], generator: torch.Generator) -> None:
    scale = float(table[: len(tokenizer) - len(pieces)].float().std()) * 0.1
    for tag, ids in pieces.items():
        noise = torch.randn(table.shape[1], generator=generator) * scale
        table[tokenizer.convert_tokens_to_ids(tag)] = (table[ids].float().mean(0).cpu() + noise).to(table)


def save(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, weights: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Write a Hugging Face folder that transformers and vLLM load as it is; `weights` where `model` doesn't hold them all itself."""
    model.save_pretrained(folder, state_dict=weights, safe_serialization=True)
    tokenizer.save_pretrained(folder)
