"""LoRA: the tags' rows are trained and survive merging, saving and loading, bit by bit, in transformers and in vLLM; tied and untied."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from trl import SFTConfig, SFTTrainer

from parallel_r1 import adapters, student
from parallel_r1.config import HubStudent, LoraConfig, OptimizerConfig, RolloutConfig, SftConfig
from parallel_r1.jobs import Job
from parallel_r1.markup import TAGS
from parallel_r1.rollout.vllm_engine import VllmEngine
from parallel_r1.training import supervised

from .test_student import checkpoint_without_tags

TEXT = "<Parallel><Path>12+5=17</Path><Path>5+12=17</Path></Parallel>\n<Summary>Both.</Summary>\nFinal Answer: 17"
ROWS = [{"problem": f"Tom has {n} apples.", "text": TEXT} for n in range(8)]
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, schedule="constant", warmup_ratio=0)
Trained = tuple[PreTrainedModel, PreTrainedTokenizerBase, dict[str, torch.Tensor]]


def train(folder: Path, tied: bool, lora: LoraConfig | None) -> Trained:
    """Four steps of sft on a checkpoint that just got its tags; the model in memory, its tokenizer, and the weights that it began with."""
    start = checkpoint_without_tags(folder / "start", tied)
    model, tokenizer, _ = student.hub_student(HubStudent(name=str(start)), seed=0)
    before = {name: weight.clone() for name, weight in adapters.weights(model)}
    job = Job(stage="sft", config={}, seed=0, inputs={}, out=folder / "out", work=folder / "work")
    job.out.mkdir()
    job.work.mkdir()
    dataset, _ = supervised.examples(tokenizer, ROWS, "bare", 512)
    config = SftConfig(optimizer=OPTIMIZER, batch_size=4, micro_batch_size=4, checkpoint_every=4, lora=lora)
    supervised.train(job, model, tokenizer, dataset, config, steps=4, micro_batch_size=4)
    return model, tokenizer, before


def rows_of(weights: dict[str, torch.Tensor], tokenizer: PreTrainedTokenizerBase) -> dict[str, torch.Tensor]:
    """The tags' rows of each table."""
    ids = tokenizer.convert_tokens_to_ids(list(TAGS))
    tables = ("model.embed_tokens.weight", "lm_head.weight")
    return {name: weights[name][ids] for name in tables if name in weights}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("lora", [LoraConfig(r=4), None], ids=["lora", "full"])
def test_tags_survive_training_merging_saving_and_loading(lora: LoraConfig | None, tied: bool, tmp_path: Path) -> None:
    model, tokenizer, before = train(tmp_path, tied, lora)
    ours = dict(adapters.weights(model))
    assert set(ours) == set(before), "merged: a plain model, with the names it had"
    for name, rows in rows_of(ours, tokenizer).items():
        assert (rows - rows_of(before, tokenizer)[name]).abs().amax(1).min() > 1e-3, f"every tag's row in {name} is trained"
        apart = torch.cdist(rows, rows) + torch.eye(6) * 1e9
        assert apart.min() > 1e-3, "and stays its own"
    if lora:
        others = [row for row in range(len(tokenizer)) if row not in tokenizer.convert_tokens_to_ids(list(TAGS))]
        assert torch.equal(ours["model.embed_tokens.weight"][others], before["model.embed_tokens.weight"][others]), "no other row moves"
        assert not torch.equal(ours["model.layers.0.mlp.up_proj.weight"], before["model.layers.0.mlp.up_proj.weight"])

    folder = tmp_path / "out" / "checkpoint"
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = dict(adapters.weights(loaded))
    assert set(theirs) == set(ours) and all(torch.equal(theirs[name], ours[name]) for name in ours), "bit by bit"
    assert loaded.config.tie_word_embeddings == tied == ("lm_head.weight" not in ours)
    again = AutoTokenizer.from_pretrained(folder)
    assert [len(again.encode(tag, add_special_tokens=False)) for tag in TAGS] == [1] * 6
    assert not set(TAGS) & set(again.all_special_tokens)
    assert again.decode(again.encode(TEXT), skip_special_tokens=True) == TEXT
    _check_vllm(folder, rows_of(ours, tokenizer), tokenizer)


def _check_vllm(folder: Path, ours: dict[str, torch.Tensor], tokenizer: PreTrainedTokenizerBase) -> None:
    engine = VllmEngine(folder, RolloutConfig(max_prompt_tokens=64, max_response_tokens=64, max_in_flight=4), seed=0)
    model = engine.llm.llm_engine.model_executor.driver_worker.model_runner.get_model()
    theirs = rows_of(dict(model.named_parameters()), tokenizer)
    assert set(ours) <= set(theirs)
    assert all(torch.equal(theirs[name], rows) for name, rows in ours.items())
    prompt = tokenizer.encode("Tom has 3 apples.\n", add_special_tokens=False)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = plain.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :].tolist()
    (output,) = engine.llm.generate({"prompt_token_ids": prompt}, _greedy(len(expected)), use_tqdm=False)
    assert list(output.outputs[0].token_ids) == expected


def _greedy(tokens: int) -> object:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=tokens)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_weights_of_a_model_with_adapters_are_those_of_the_merged_one(tied: bool, tmp_path: Path) -> None:
    """What an engine is given in rl; reading it leaves the adapters alone."""
    start = checkpoint_without_tags(tmp_path / "start", tied)
    model, tokenizer, _ = student.hub_student(HubStudent(name=str(start)), seed=0)
    dataset, _ = supervised.examples(tokenizer, ROWS, "bare", 512)
    trainer = SFTTrainer(
        model=model, processing_class=tokenizer, train_dataset=dataset, peft_config=adapters.peft_config(LoraConfig(r=4), model, tokenizer),
        args=SFTConfig(output_dir=str(tmp_path / "work"), max_steps=2, learning_rate=1e-2, use_cpu=True, report_to="none", save_strategy="no"),
    )  # fmt: skip
    adapters.show_bias(trainer.model)
    trainer.train()
    early = {name: weight.clone() for name, weight in adapters.weights(trainer.model)}
    again = dict(adapters.weights(trainer.model))
    assert all(torch.equal(again[name], early[name]) for name in early)
    plain = dict(adapters.weights(trainer.model.merge_and_unload()))
    assert set(plain) == set(early) and all(torch.equal(plain[name], early[name]) for name in plain)
