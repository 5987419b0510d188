"""Exports: the folder is the checkpoint and loads by itself, its card is true, its programs run; nothing is overwritten or sent unasked."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from flows.export import main
from parallel_r1.config import load
from parallel_r1.store import Manifest
from tests.conftest import PROJECT, Project

WORKER = PROJECT / ".venv" / "worker" / "bin" / "python"
OFFLINE = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def store(trained: Project) -> Path:
    """A store with an sft checkpoint and its evaluation."""
    return trained.store


def key_of(store: Path, stage: str) -> str:
    [path] = store.glob(f"{stage}/*/MANIFEST.json")
    return path.parent.name


def export(store: Path, artifact: str, to: Path | str, *more: str) -> int:
    return main([artifact, "--to", str(to), *more, "--set", f"store={store}"])


@pytest.fixture(scope="module")
def exported(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sft checkpoint as a folder."""
    folder = tmp_path_factory.mktemp("shelf") / "my-model"
    assert export(store, f"sft/{key_of(store, 'sft')[:8]}", folder, "--licence", "apache-2.0") == 0
    return folder


def in_worker(*arguments: object) -> str:
    command = [str(WORKER), "-W", "ignore", *map(str, arguments)]
    done = subprocess.run(command, cwd="/", env={**os.environ, **OFFLINE}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_folder_is_the_checkpoint_and_loads_by_itself(store: Path, exported: Path) -> None:
    checkpoint = store / "sft" / key_of(store, "sft") / "checkpoint"
    for file in checkpoint.iterdir():
        assert (exported / file.name).read_bytes() == file.read_bytes(), file.name
    found, original = (json.loads(in_worker("-m", "parallel_r1.exported", folder)) for folder in (exported, checkpoint))
    assert found == original and len(found["greedy"]) > 0 and found["architecture"] == "Qwen3ForCausalLM"


def test_the_card_says_what_it_is(store: Path, exported: Path) -> None:
    card = ModelCard.load(exported / "README.md")
    assert (card.data.library_name, card.data.license, card.data.model_name) == ("transformers", "apache-2.0", "my-model")
    [score] = card.data.eval_results
    [path] = store.glob("evaluate/*/results.json")
    mean = json.loads(path.read_text())["sets"]["tier1"]["metrics"]["mean"]
    assert score.dataset_name == "tier1" and score.metric_value == pytest.approx(100 * mean["value"])
    assert f"({100 * mean['low']:.1f} to {100 * mean['high']:.1f}" in card.text, "with its interval"
    kept = Manifest.model_validate_json(next(store.glob("filter/*/MANIFEST.json")).read_text()).metrics
    assert f"{kept['kept']:.0f} of {kept['seen']:.0f} kept" in card.text and "wrong answer" in card.text
    assert "| tier1 | word problems of tier 1, made from a seed | none needed: made on the spot | 200 problems |" in card.text
    assert "```text\n{problem}\n```" in card.text and 'ASK="--prompt bare"' in card.text
    assert "{{" not in card.text and "None" not in card.text


def test_the_programs_of_the_card_run(exported: Path, tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    shutil.copytree(exported, folder)
    programs = re.findall(r"```python\n(.*?)```", (exported / "README.md").read_text(), re.DOTALL)
    assert len(programs) == 2 and "parallel_r1" not in programs[0], "the first needs transformers alone"
    for index, program in enumerate(programs):
        file = folder / f"program_{index}.py"
        file.write_text(program)
        assert in_worker(file).strip(), "it says something"


def test_the_recipe_is_the_run_s(trained: Project, exported: Path) -> None:
    ours, theirs = load(trained.recipe), load(exported / "recipe.yaml")
    for part in ("student", "generate", "filter", "sft", "rl", "evaluate", "attention"):
        assert getattr(theirs, part) == getattr(ours, part), part
    assert theirs.prepare.evaluation == ours.prepare.evaluation
    assert theirs.prepare.train == {"tier1": ours.prepare.train["tier1"]}, "the sets that it read"


def test_a_base_model_s_card_claims_nothing(store: Path, tmp_path: Path) -> None:
    assert export(store, f"base/{key_of(store, 'base')}", tmp_path / "base") == 0
    card = ModelCard.load(tmp_path / "base" / "README.md")
    assert "not trained to use them yet" in card.text and "It was not measured." in card.text and card.data.license is None


def test_nothing_is_overwritten_unasked(store: Path, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there = tmp_path / "there"
    shutil.copytree(exported, there)
    (there / "mine.txt").write_text("kept")
    key = f"sft/{key_of(store, 'sft')}"
    assert export(store, key, there) == 2 and (there / "mine.txt").exists()
    assert "OVERWRITE=1" in capsys.readouterr().err
    assert export(store, key, there, "--overwrite") == 0 and not (there / "mine.txt").exists()
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("five years")
    assert export(store, key, foreign, "--overwrite") == 2 and (foreign / "thesis.txt").exists()
    assert "is no earlier export" in capsys.readouterr().err
    assert export(store, key, foreign / "thesis.txt" / "model") == 2 and "thesis.txt" in capsys.readouterr().err, "a file is no folder"


@pytest.mark.parametrize("artifact, message", [
    ("filter/", "holds no checkpoint; rl, sft, base do"),
    ("sft/ffffffff", "0 artifacts of the store are called so"),
    ("nonsense", "0 artifacts of the store are called so"),
])  # fmt: skip
def test_what_cannot_be_exported_is_said(
    artifact: str, message: str, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(store, f"filter/{key_of(store, 'filter')}" if artifact == "filter/" else artifact, tmp_path / "x") == 2
    assert message in capsys.readouterr().err and not (tmp_path / "x").exists()


class Hub(BaseHTTPRequestHandler):
    """A hub on the loopback that refuses everything, and remembers."""

    asked: list[tuple[str, str | None]] = []

    def refuse(self) -> None:
        self.asked.append((self.path, self.headers["Authorization"]))
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(403)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD = do_POST = refuse

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[dict[str, str]]:
    """The environment of that hub."""
    Hub.asked.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_TOKEN": "hf_planted"}
    server.shutdown()
    server.server_close()


def run(store: Path, to: str, environment: dict[str, str]) -> tuple[int, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    command = [sys.executable, "-m", "flows.export", f"sft/{key_of(store, 'sft')}", "--to", to, "--set", f"store={store}"]
    done = subprocess.run(command, cwd=PROJECT, env={**clean, **environment}, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr


def test_only_hub_uploads(store: Path, hub: dict[str, str], tmp_path: Path) -> None:
    code, said = run(store, str(tmp_path / "folder"), hub)
    assert code == 0 and Hub.asked == [], f"a folder is a folder: {said}"
    code, said = run(store, "hub:me/model", {"HF_ENDPOINT": hub["HF_ENDPOINT"]})
    assert code == 2 and "HF_TOKEN is not set" in said and Hub.asked == []
    code, said = run(store, "hub:me/model", hub)
    assert code == 2 and "hub:me/model: the hub said no" in said and "Traceback" not in said and "hf_planted" not in said, said
    assert ("/api/models/me/model", "Bearer hf_planted") in Hub.asked
