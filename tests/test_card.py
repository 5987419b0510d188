"""The card of a checkpoint that began on the hub: lineage, licences, what was taken out, structured attention; from manifests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from parallel_r1.config import (
    DecontaminateConfig,
    EvaluateConfig,
    FilterConfig,
    GenerateConfig,
    HubSource,
    HubStudent,
    LoraConfig,
    OpenAITeacher,
    PipelineConfig,
    RolloutConfig,
    SftConfig,
    parse,
)
from parallel_r1.lineage import Inventory
from parallel_r1.provenance import History
from parallel_r1.report.card import Facts, Measured, build
from parallel_r1.store import ArtifactRef, Store, StoreError, identity

METRIC = {"value": 0.5, "low": 0.4, "high": 0.6}
SET = {"problems": 40, "samples": 16, "metrics": {"mean": METRIC, "pass@k": METRIC, "parallel_ratio": METRIC, "valid_ratio": METRIC}}
RESULTS = {"engine": "vllm 0.31.0", "sets": {"AMC23": SET | {"clean": {"problems": 17, "metrics": SET["metrics"]}}}}
FACTS = Facts("my-model", 4_022_468_096, "Qwen3ForCausalLM", True, None)


class Shelf:
    """A store with the artifacts of a run on real data."""

    def __init__(self, folder: Path) -> None:
        self.store, self.folder = Store(folder / "store"), folder

    def put(self, stage: str, section: object, metrics: dict[str, float], **inputs: ArtifactRef) -> ArtifactRef:
        made = self.folder / "made"
        made.mkdir(exist_ok=True)
        (made / "file").write_text(stage + json.dumps(identity(section)))
        named = {name.replace("__", "."): ref for name, ref in inputs.items()}
        told = {"config": identity(section), "metrics": metrics, "seconds": 90, "versions": {"torch": "2.13.0"}}
        return self.store.commit(stage, f"{stage}0123456789", made, inputs=named, **told)


@pytest.fixture
def history(tmp_path: Path) -> History:
    shelf = Shelf(tmp_path)
    counts = {"problems": 7400, "dropped_duplicate": 70, "dropped_no_answer": 0, "repaired_control": 3}
    problems = shelf.put("prepare", HubSource(preset="gsm8k"), counts)
    clean = shelf.put("decontaminate", DecontaminateConfig(), {"seen": 7400, "kept": 7390, "copies": 10}, training=problems)
    teacher = OpenAITeacher(attempts=3, base_url="http://10.0.0.7:8000/v1", api_key_env="TEAM_KEY")
    written = shelf.put("generate", GenerateConfig(teacher=teacher), {"trajectories": 7390, "answers": 9000}, sets__gsm8k=clean)
    kept = shelf.put("filter", FilterConfig(), {"seen": 7390, "kept": 6000, "rejected_wrong_answer": 1390}, trajectories=written)
    base = shelf.put("base", HubStudent(), {"parameters": 4e9})
    sft = SftConfig(attention="structured", lora=LoraConfig(r=8))
    trained = shelf.put("sft", sft, {"steps": 47, "loss": 0.1}, base=base, trajectories=kept)
    measured = EvaluateConfig(rollout=RolloutConfig(attention="structured"))
    shelf.put("evaluate", measured, {}, checkpoint=trained, sets__AMC23=problems)
    return History.of(Inventory.of(shelf.store), "sft/sft0123")


def test_a_card_of_real_data(history: History, tmp_path: Path) -> None:
    rollouts = tmp_path / "rollouts.jsonl"
    rollouts.write_text("")
    text = build(history, history.prompt(PipelineConfig()), Measured(RESULTS, rollouts), FACTS)
    (tmp_path / "README.md").write_text(text)
    data = ModelCard.load(tmp_path / "README.md").data
    assert (data.base_model, data.datasets, data.license) == ("Qwen/Qwen3-4B-Base", ["openai/gsm8k"], None)
    for part in (
        "A Qwen3ForCausalLM with 4,022,468,096 parameters: [Qwen/Qwen3-4B-Base](https://huggingface.co/Qwen/Qwen3-4B-Base), trained by sft.",
        "| gsm8k | [openai/gsm8k](https://huggingface.co/datasets/openai/gsm8k), train | mit | 7,390 problems | 70 duplicate, 10 copies of",
        "| trajectories | deepseek-ai/DeepSeek-R1-0528-Qwen3-8B | mit | 6,000 trajectories | 1,390 by the filter |",
        "47 steps of 128 trajectories, learning rate 1e-05, LoRA of rank 8, merged",
        "Test items that a training set gives away: 23 of AMC23.",
        "50.0 (40.0 to 60.0",
        "a plain `generate` runs it causally",
        'ASK="--prompt parallel" SET="attention=structured"',
        "The chat template is the base model's own.",
    ):
        assert part in text
    assert "by transformers alone" not in text, "plain transformers can't mask the paths from each other"
    assert 'RolloutConfig(attention="structured", engine="transformers", num_paths=2' in text


def test_the_recipe_can_be_run_again(history: History) -> None:
    config = parse(history.recipe())
    assert "10.0.0.7" not in str(history.recipe()) and "TEAM_KEY" not in str(history.recipe()), "where it was asked stays here"
    assert config.sft and config.sft.lora == LoraConfig(r=8) and config.attention == "structured"
    assert isinstance(config.generate.teacher, OpenAITeacher) and config.generate.teacher.attempts == 3
    assert config.prepare.train == {"gsm8k": HubSource(preset="gsm8k")}


def test_a_prompt_from_a_file_has_to_be_named(tmp_path: Path) -> None:
    wording = tmp_path / "prompt.txt"
    wording.write_text("Solve {problem} now.")
    prompt = {"type": "file", "path": str(wording)}
    shelf = Shelf(tmp_path)
    base = shelf.put("base", HubStudent(), {})
    shelf.put("sft", SftConfig.model_validate({"prompt": prompt}), {}, base=base)
    history = History.of(Inventory.of(shelf.store), "sft/sft0123")
    with pytest.raises(StoreError, match=r"was trained with the prompt \{'type': 'file', 'path': 'sha256:.*name the CONFIG"):
        history.prompt(PipelineConfig())
    same = PipelineConfig.model_validate({"evaluate": {"prompt": prompt}, "sft": {"prompt": prompt}, "rl": []})
    assert history.prompt(same).path == str(wording)


def test_a_story_with_a_missing_chapter_is_not_told(history: History) -> None:
    rest = {name: manifest for name, manifest in history.inventory.artifacts.items() if name[0] != "base"}
    with pytest.raises(StoreError, match="base/base0123456789, which is no longer in the store"):
        _ = History(Inventory(rest), history.name).chain
