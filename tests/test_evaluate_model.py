"""Any model measured on its own: which sources, which prompt, with or without blocks; on a real checkpoint with tags and without."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from flows.evaluate_model import BENCHMARKS, artifact_of, config_for, knows_tags, longest_of, settings, sources, trained_as
from parallel_r1.config import ConfigError, HubSource
from parallel_r1.markup import TAGS
from parallel_r1.store import Store
from tests.conftest import PROJECT, Project

RECIPE = "pipeline_config.yaml"


def test_benchmarks_come_from_the_hub_or_from_files(tmp_path: Path) -> None:
    (tmp_path / "gsm8k_test_200.jsonl").write_text("")
    (tmp_path / "amc23.parquet").write_text("")
    found = sources(["GSM8K", "AMC23"], str(tmp_path))
    assert [Path(source["path"]).name for source in found.values()] == ["gsm8k_test_200.jsonl", "amc23.parquet"]
    config = config_for(RECIPE, "owner/name", sources(list(BENCHMARKS), None), [], [])
    assert all(isinstance(source, HubSource) for source in config.prepare.evaluation.values())
    assert config.prepare.evaluation["GSM8K"].split == "test" and config.evaluate.samples_of("AIME24") == 16


@pytest.mark.parametrize(
    ("benchmarks", "message"), [(["AMC24"], "no 'AMC24'; there are: AIME24"), ([], "name some"), (["MATH"], r"no file math500\*")]
)
def test_what_is_missing_is_named(benchmarks: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        sources(benchmarks, str(tmp_path))


@pytest.mark.parametrize(
    ("trained", "tags", "expected", "reason"),
    [
        ({}, True, ("parallel", 4, "causal"), "a foreign model that knows the tags"),
        ({}, False, ("plain", 0, "causal"), "a causal model without tags"),
        ({"attention": "structured", "prompt": "bare"}, True, ("bare", 4, "structured"), "sft tells its attention and prompt"),
        ({"rollout": {"attention": "structured"}, "prompt": "plain"}, True, ("plain", 4, "structured"), "rl tells it in its rollouts"),
    ],
)
def test_settings_fit_the_checkpoint(trained: dict, tags: bool, expected: tuple, reason: str) -> None:
    config = config_for(RECIPE, "x", sources(["AMC23"], None), settings(trained, tags), ["evaluate.samples=2"])
    assert (config.evaluate.prompt, config.evaluate.rollout.max_blocks, config.attention) == expected, reason
    assert config.evaluate.base_prompt == config.evaluate.prompt and config.evaluate.samples == 2


@pytest.mark.parametrize(("longest", "expected"), [(None, (2000, 3000)), (32768, (2000, 3000)), (4096, (1024, 3000)), (512, (128, 384))])
def test_budgets_fit_the_model(longest: int | None, expected: tuple[int, int]) -> None:
    rollout = config_for(RECIPE, "x", sources(["AMC23"], None), settings({}, True, longest), []).evaluate.rollout
    assert (rollout.max_prompt_tokens, rollout.max_response_tokens) == expected


def test_a_wording_of_its_own_has_to_be_named() -> None:
    trained = {"prompt": {"type": "file", "file": "sha256:0"}}
    with pytest.raises(ConfigError, match="trained with a wording of its own"):
        settings(trained, True)
    assert "evaluate.prompt=parallel" in settings(trained, True, chosen=["evaluate.prompt=bare"]), "which the user's own then replaces"


def test_own_budgets_are_left_alone() -> None:
    assert settings({}, False, 4096, ["evaluate.rollout.max_prompt_tokens=900"]) == settings({}, False)


def test_a_folder_is_measured_as_it_was_trained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no checkpoint in it"):
        trained_as(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert trained_as(str(tmp_path)) == {}
    (tmp_path / "recipe.yaml").write_text("attention: structured\nsft: {prompt: plain}\nrl: [{prompt: parallel}, {prompt: bare}]\n")
    assert trained_as(str(tmp_path)) == {"attention": "structured", "prompt": "bare"}
    (tmp_path / "recipe.yaml").write_text("sft: {prompt: plain}\n")
    assert trained_as(str(tmp_path))["prompt"] == "plain"


def test_an_artifact_s_folder_is_that_artifact(trained: Project) -> None:
    [key] = trained.keys("sft")
    for folder in (trained.store / "sft" / key, trained.store / "sft" / key / "checkpoint"):
        assert trained_as(str(folder))["prompt"] == "bare"


@pytest.mark.parametrize("config, longest", [
    ({"max_position_embeddings": 4096}, 4096), ({"n_positions": 1024}, 1024), ({}, None),
    ({"text_config": {"max_position_embeddings": 8}}, 8),
])  # fmt: skip
def test_how_long_a_model_s_sequences_are(config: dict, longest: int | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert longest_of(tmp_path) == longest


def test_own_overrides_win() -> None:
    assert config_for(RECIPE, "x", sources(["AMC23"], None), settings({}, False), ["evaluate.prompt=bare"]).evaluate.prompt == "bare"


@pytest.mark.parametrize("place", ["added_tokens", "vocab"])
def test_a_tokenizer_tells_whether_it_knows_the_tags(place: str, tmp_path: Path) -> None:
    vocab = {tag: n for n, tag in enumerate(TAGS)} if place == "vocab" else {}
    added = [{"content": tag} for tag in TAGS] if place == "added_tokens" else []
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": added}))
    assert knows_tags(tmp_path)
    path.write_text(json.dumps({"model": {"vocab": [["<Path>", 0.0]]}, "added_tokens": []}))
    assert not knows_tags(tmp_path), "a Unigram model"
    path.unlink()
    assert not knows_tags(tmp_path)
    (tmp_path / "added_tokens.json").write_text(json.dumps({tag: n for n, tag in enumerate(TAGS)}))
    assert knows_tags(tmp_path), "a slow tokenizer"


def test_names_of_models(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    (tmp_path / "model").mkdir()
    assert artifact_of(str(tmp_path / "model"), store) is None and artifact_of("owner/name", store) is None
    with pytest.raises(ConfigError, match="'nothing' is no folder and begins no key"):
        artifact_of("nothing", store)
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "file").write_text("x")
    ref = store.commit("sft", "0123456789ab", tmp_path / "made")
    for name in ("sft/0123456789ab", "sft/012345", "0123456789ab", "012345"):
        assert artifact_of(name, store) == ref
    store.commit("rl", "012345ffffff", tmp_path / "made")
    with pytest.raises(ConfigError, match="(?s)'012345' begins more than one key.*rl .*sft "):
        artifact_of("012345", store)


def without_tags(checkpoint: Path, folder: Path) -> Path:
    """A copy whose tokenizer never heard of the tags."""
    shutil.copytree(checkpoint, folder)
    path = folder / "tokenizer.json"
    words = json.loads(path.read_text())
    words["added_tokens"] = [token for token in words["added_tokens"] if token["content"] not in TAGS]
    path.write_text(json.dumps(words))
    return folder


def test_a_model_without_tags_generates_plainly(project: Project, trained: Project, tmp_path: Path) -> None:
    [key] = trained.keys("base")
    rows = [{"problem": f"What is {n}+{n}?", "answer": str(2 * n)} for n in range(3)]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "amc23.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    untagged = without_tags(trained.store / "base" / key / "checkpoint", tmp_path / "untagged")
    small = ["evaluate.samples=2", "evaluate.rollout.max_response_tokens=64", "evaluate.rollout.engine=transformers"]
    command = [sys.executable, "-m", "flows.evaluate_model", str(untagged), "--benchmarks", "AMC23", "--data", str(tmp_path / "data")]
    command += ["--set", *small, f"store={project.store}"]
    done = subprocess.run(command, cwd=PROJECT, env=project.environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "plain generation without blocks" in done.stdout and "bootstrap best@k" in done.stdout
    [results] = project.store.glob("evaluate/*/results.json")
    entry = json.loads(results.read_text())["sets"]["AMC23"]
    assert (entry["problems"], entry["samples"], entry["metrics"]["parallel_ratio"]["value"]) == (3, 2, 0)


def test_a_model_of_the_hub_is_measured_as_its_recipe_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without network too: then nothing is known of it."""

    def fetch(repository: str, file: str) -> str:
        if repository == "owner/foreign":
            raise LocalEntryNotFoundError("neither there nor in the cache")
        (tmp_path / file).write_text("attention: structured\nsft: {prompt: bare}\n")
        return str(tmp_path / file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetch)
    assert trained_as("owner/exported") == {"attention": "structured", "prompt": "bare"}
    assert trained_as("owner/foreign") == {}
