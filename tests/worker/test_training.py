"""The training programs as a task starts them: real processes, real TRL, a tiny model; killed and resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoTokenizer

from parallel_r1 import jobs
from parallel_r1.config import LoraConfig, OptimizerConfig, RlConfig, SftConfig
from parallel_r1.markup import TAGS
from parallel_r1.training import runs

from .conftest import ROLLOUT

ROOT = Path(__file__).parents[2]
OPTIMIZER = OptimizerConfig(learning_rate=1e-3, schedule="constant", warmup_ratio=0)
RL = RlConfig(
    problems={"sums": 1.0}, prompt="bare", steps=4, prompts_per_step=2, rollouts_per_prompt=4, micro_batch_size=4, checkpoint_every=1,
    optimizer=OPTIMIZER, rollout=ROLLOUT.model_copy(update={"engine": "transformers"}), sample_rollouts=2,
)  # fmt: skip


def write_job(folder: Path, config: Any, inputs: dict[str, Path]) -> Path:
    job = jobs.Job(stage="test", config=config.model_dump(mode="json"), seed=1, inputs=inputs, out=folder / "out", work=folder / "work")
    path = folder / "job.json"
    path.write_text(job.model_dump_json())
    return path


def events(module: str, job: Path, kill_after_step: int | None = None) -> Iterator[dict[str, Any]]:
    """Run a program; give its events. With `kill_after_step`, kill -9 as soon as that step is reported."""
    command = [sys.executable, "-W", "ignore", "-m", module, str(job)]
    environment = {**os.environ, "TRL_EXPERIMENTAL_SILENCE": "1", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.startswith('{"event"'):
                event = json.loads(line)
                yield event
                if kill_after_step and event.get("step") == kill_after_step:
                    process.send_signal(signal.SIGKILL)
        errors = process.stderr.read()
    assert kill_after_step or process.returncode == 0, errors[-3000:]


@pytest.fixture
def inputs(tmp_path: Path, tiny: Path) -> dict[str, Path]:
    """A checkpoint artifact and a problem set artifact."""
    checkpoint, problems = tmp_path / "start", tmp_path / "sums"
    checkpoint.mkdir()
    (checkpoint / "checkpoint").symlink_to(tiny)
    problems.mkdir()
    jobs.write_lines(
        problems / "problems.jsonl", [{"id": f"s{n}", "problem": f"{n}+1=?", "answer": str(n + 1), "source": "test"} for n in range(9)]
    )
    return {"checkpoint": checkpoint, "sums": problems}


def test_rl_goes_on_from_its_last_whole_checkpoint_after_kill_9(tmp_path: Path, inputs: dict[str, Path]) -> None:
    job = write_job(tmp_path, RL, inputs)
    before = list(events("parallel_r1.training.grpo", job, kill_after_step=2))
    assert before[-1]["step"] >= 2
    torn = tmp_path / "work" / "checkpoint-9"
    torn.mkdir()
    (torn / "model.safetensors").write_bytes(b"half")

    after = list(events("parallel_r1.training.grpo", job))
    notes = [event["text"] for event in after if event["event"] == "note"]
    assert any("goes on from the checkpoint of step" in text for text in notes), notes
    assert [event["step"] for event in after if event["event"] == "progress"][-1] == 4
    rows = jobs.read_lines(tmp_path / "out" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4], "every step once, the lost ones made again"
    assert not torn.exists(), "a half-written checkpoint is removed, not resumed from"
    assert {row["step"] for row in jobs.read_lines(tmp_path / "out" / "rollouts.jsonl")} == {1, 2, 3, 4}
    assert [event.step for event in curve(tmp_path / "out", "train/loss")] == [1, 2, 3, 4], "TensorBoard too shows every step once"
    assert after[-1]["metrics"]["steps"] == 4


def curve(folder: Path, name: str) -> list[Any]:
    """What TensorBoard shows of an artifact."""
    files = EventAccumulator(str(folder / "tensorboard"), purge_orphaned_data=True)
    files.Reload()
    return files.Scalars(name)


def test_a_tracker_that_is_not_installed_is_named(tmp_path: Path, inputs: dict[str, Path]) -> None:
    job = jobs.Job(stage="rl", config={}, seed=1, inputs=inputs, out=tmp_path, work=tmp_path, tracking="wandb")
    with pytest.raises(ValueError, match="resources.tracking: wandb: the package is missing: `make tracking` installs it"):
        runs.tracked(job)


def test_rl_measures_the_gap_in_every_step_and_fails_where_it_is_too_large(tmp_path: Path, inputs: dict[str, Path]) -> None:
    job = write_job(tmp_path, RL.model_copy(update={"steps": 1, "max_rollout_gap": 1e-9}), inputs)
    command = [sys.executable, "-W", "ignore", "-m", "parallel_r1.training.grpo", str(job)]
    ended = subprocess.run(command, cwd=ROOT, env={**os.environ, "TRL_EXPERIMENTAL_SILENCE": "1"}, capture_output=True, text=True)
    assert ended.returncode != 0
    assert "disagree by up to" in ended.stderr and "max_rollout_gap" in ended.stderr
    (row,) = jobs.read_lines(tmp_path / "work" / "metrics.jsonl")
    assert {f"rollout_gap/{region}/max" for region in ("main", "path_1", "path_n", "summary")} <= set(row)


def test_sft_learns_the_form_and_changes_the_weights(tmp_path: Path, tiny: Path, inputs: dict[str, Path]) -> None:
    text = "<Parallel><Path>In order. 12+5=17.</Path><Path>12+5=17.</Path></Parallel>\n<Summary>Both.</Summary>\nFinal Answer: 17"
    trajectories = tmp_path / "trajectories"
    trajectories.mkdir()
    jobs.write_lines(trajectories / "trajectories.jsonl", [{"problem": f"Tom has {n} apples.", "text": text} for n in range(64)])
    config = SftConfig(
        prompt="bare", max_steps=30, epochs=9, batch_size=16, micro_batch_size=8, max_tokens=200, optimizer=OPTIMIZER, checkpoint_every=10
    )
    job = write_job(tmp_path, config, {"base": inputs["checkpoint"], "trajectories": trajectories})
    seen = list(events("parallel_r1.training.sft", job))
    losses = [row["loss"] for row in jobs.read_lines(tmp_path / "out" / "metrics.jsonl")]
    assert [event.value for event in curve(tmp_path / "out", "train/loss")] == pytest.approx(losses, rel=1e-3)
    assert losses[-1] < 0.5 * losses[0]
    assert seen[-1]["metrics"]["examples"] == 64 and seen[-1]["metrics"]["too_long"] == 0
    start, end = (load_file(folder / "model.safetensors") for folder in (tiny, tmp_path / "out" / "checkpoint"))
    assert not torch.equal(start["model.embed_tokens.weight"], end["model.embed_tokens.weight"])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "checkpoint")
    assert [len(tokenizer.encode(tag, add_special_tokens=False)) for tag in TAGS] == [1] * 6
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text, "tags are plain tokens: they survive every decoding"


@pytest.mark.fault
def test_rl_with_adapters_samples_the_merged_model_and_goes_on_after_kill_9(tmp_path: Path, tiny: Path, inputs: dict[str, Path]) -> None:
    """The gap would show an engine that was given the weights without their adapters, or adapters that a resume lost."""
    optimizer = OPTIMIZER.model_copy(update={"learning_rate": 1e-2})
    config = RL.model_copy(update={"lora": LoraConfig(r=4), "kl_coefficient": 0.01, "optimizer": optimizer})
    job = write_job(tmp_path, config, inputs)
    list(events("parallel_r1.training.grpo", job, kill_after_step=2))
    list(events("parallel_r1.training.grpo", job))
    rows = jobs.read_lines(tmp_path / "out" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert max(row["rollout_gap/main/max"] for row in rows) < 1e-3
    assert rows[0]["kl"] < 1e-6 < rows[-1]["kl"], "the adapters begin as nothing, and the reference is the model without them"
    start, end = (load_file(folder / "model.safetensors") for folder in (tiny, tmp_path / "out" / "checkpoint"))
    assert set(start) == set(end) and not torch.equal(start["model.layers.0.mlp.up_proj.weight"], end["model.layers.0.mlp.up_proj.weight"])
    ids = AutoTokenizer.from_pretrained(tiny).convert_tokens_to_ids(list(TAGS))
    assert not torch.equal(start["model.embed_tokens.weight"][ids], end["model.embed_tokens.weight"][ids])
