"""Tags enter any causal checkpoint as plain single tokens with rows of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from parallel_r1 import prompts, student
from parallel_r1.config import HubStudent
from parallel_r1.markup import TAGS, TagIds


def checkpoint_without_tags(folder: Path, tied: bool) -> Path:
    """A small causal model of the usual kind, from a tokenizer that has never heard of tags."""
    tokenizer = student.train_tokenizer(["a plain text of 12 words"], 300)
    kept = student.PreTrainedTokenizerFast(
        tokenizer_object=type(tokenizer.backend_tokenizer).from_str(without_tags(tokenizer.backend_tokenizer.to_str())),
        pad_token=student.PAD, eos_token=student.EOS,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(vocab_size=len(kept), hidden_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
                    intermediate_size=64, tie_word_embeddings=tied, pad_token_id=kept.pad_token_id, eos_token_id=kept.eos_token_id)
    )  # fmt: skip
    student.save(model, kept, folder)
    return folder


def without_tags(serialised: str) -> str:
    data = json.loads(serialised)
    data["added_tokens"] = [token for token in data["added_tokens"] if token["content"] not in TAGS]
    return json.dumps(data)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_checkpoint_gets_its_tags(tied: bool, tmp_path: Path) -> None:
    start = checkpoint_without_tags(tmp_path / "start", tied)
    before = AutoModelForCausalLM.from_pretrained(start).get_input_embeddings().weight
    model, tokenizer, new = student.hub_student(HubStudent(name=str(start)), seed=0)
    assert new == list(TAGS)
    student.save(model, tokenizer, tmp_path / "with_tags")

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "with_tags")
    again = AutoTokenizer.from_pretrained(tmp_path / "with_tags")
    ids = [again.encode(tag, add_special_tokens=False) for tag in TAGS]
    assert all(len(one) == 1 for one in ids) and not set(TAGS) & set(again.all_special_tokens)
    assert TagIds.from_tokenizer(again).parallel == ids[0][0]
    for table in (loaded.get_input_embeddings().weight, loaded.get_output_embeddings().weight):
        rows = table[[one[0] for one in ids]]
        apart = torch.cdist(rows, rows) + torch.eye(6) * 1e9
        assert apart.min() > 1e-3, "each tag starts from a row of its own: identical rows hardly learn"
    assert torch.equal(loaded.get_input_embeddings().weight[: len(before)], before), "what was there stays"
    assert loaded.config.tie_word_embeddings == tied
    pieces = AutoTokenizer.from_pretrained(start).encode(TAGS[0], add_special_tokens=False)
    mean = before[pieces].mean(0)
    row = loaded.get_input_embeddings().weight[ids[0][0]]
    assert (row - mean).norm() < 0.5 * before.std() * 64**0.5, "near the mean of the pieces that spell the tag"


def test_tags_marked_special_are_refused(tmp_path: Path) -> None:
    start = checkpoint_without_tags(tmp_path / "start", tied=True)
    tokenizer = AutoTokenizer.from_pretrained(start)
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken(TAGS[0], special=True)]})
    with pytest.raises(ValueError, match="would vanish from decoded texts"):
        student.add_tags(tokenizer)


def test_any_text_can_be_encoded_and_read_back() -> None:
    tokenizer = student.train_tokenizer(["a plain text of 12 words"], 300)
    for text in ("Ünïcode ≤ 3 \\frac{1}{2}\n\t", "<Parallel><Path>x</Path>", "日本語"):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_a_base_model_gets_a_chat_template_that_changes_no_token(tmp_path: Path) -> None:
    start = checkpoint_without_tags(tmp_path / "start", tied=True)
    assert AutoTokenizer.from_pretrained(start).chat_template is None
    _, tokenizer, _ = student.hub_student(HubStudent(name=str(start)), seed=0)
    for style in ("bare", "plain", "parallel"):
        prompt = prompts.render(style, "What is 2+3?")
        assert prompts.encode(tokenizer, prompt) == tokenizer.encode(prompt, add_special_tokens=False)
    chat = [{"role": "user", "content": "1+1?\n"}, {"role": "assistant", "content": "2"}, {"role": "user", "content": "2+2?\n"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "1+1?\n2<eos>2+2?\n"


def test_a_chat_template_that_there_is_stays(tmp_path: Path) -> None:
    start = checkpoint_without_tags(tmp_path / "start", tied=True)
    tokenizer = AutoTokenizer.from_pretrained(start)
    tokenizer.chat_template = "{{ messages[0]['content'] }}!"
    tokenizer.save_pretrained(start)
    assert student.hub_student(HubStudent(name=str(start)), seed=0)[1].chat_template == "{{ messages[0]['content'] }}!"
