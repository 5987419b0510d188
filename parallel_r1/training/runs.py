"""What every training program needs from transformers' Trainer: arguments, progress, and going on from the last whole checkpoint."""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import shutil
import time
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import TensorBoardCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from parallel_r1 import jobs
from parallel_r1.config import OptimizerConfig

METRICS_FILE = "metrics.jsonl"
TENSORBOARD = "tensorboard"
TRACKED_AS = "parallel-r1"
"""The project that a tracker files the runs under."""
CLOCKS = ("seconds", "step_time")
UNKEPT = ("rewards/", "completions/", "epoch")
"""Trainer metrics that say again what ours say: the one reward, lengths without forced tokens, and the share of the steps done."""


def quiet(threads: int) -> None:
    """One thread pool of the given size; no progress bars or advice on the terminal."""
    torch.set_num_threads(threads)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()


def trainer_arguments(work: Path, optimizer: OptimizerConfig, steps: int, checkpoint_every: int, seed: int, micro_batch: int, batch: int) -> dict[str, Any]:
    """Arguments that SFTConfig and GRPOConfig share."""
    on_gpu = torch.cuda.is_available()
    schedule: dict[str, Any] = {"lr_scheduler_type": "constant_with_warmup"}
    if optimizer.schedule == "cosine":
        schedule = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": optimizer.min_lr_ratio}}
    return {
        "output_dir": str(work),
        "max_steps": steps,
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": batch // micro_batch,
        "learning_rate": optimizer.learning_rate,
        "weight_decay": optimizer.weight_decay,
        "adam_beta1": optimizer.beta1,
        "adam_beta2": optimizer.beta2,
        "max_grad_norm": optimizer.max_grad_norm,
        "warmup_steps": round(optimizer.warmup_ratio * steps),
        **schedule,
        "save_strategy": "steps",
        "save_steps": checkpoint_every,
        "save_total_limit": 2,
        "use_cpu": not on_gpu,
        "bf16": on_gpu and torch.cuda.is_bf16_supported(),
        "gradient_checkpointing": on_gpu,
        "disable_tqdm": True,
        "seed": seed,
        "data_seed": seed,
        "dataloader_pin_memory": on_gpu,
    }


def tracked(job: jobs.Job) -> dict[str, Any]:
    """Arguments that name the tracker that the config asks for. Raises ValueError where its package isn't installed."""
    if job.tracking != "none" and importlib.util.find_spec(job.tracking) is None:
        raise ValueError(f"resources.tracking: {job.tracking}: the package is missing: `make tracking` installs it")
    os.environ.setdefault("WANDB_PROJECT", TRACKED_AS)
    os.environ.setdefault("WANDB_DIR", str(job.work))
    return {"report_to": job.tracking, "run_name": job.stage, "project": TRACKED_AS}


class TensorBoard(TensorBoardCallback):
    """TensorBoard files in the work folder; after a resume, what was written past the checkpoint is not shown."""

    def __init__(self, work: Path) -> None:
        super().__init__()
        self.logging_dir = str(work / TENSORBOARD)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **options: Any) -> None:
        """Open the files, of the first process only."""
        if state.is_world_process_zero:
            self.tb_writer = self._SummaryWriter(log_dir=self.logging_dir, purge_step=state.global_step + 1)
        super().on_train_begin(args, state, control, **options)


def last_checkpoint(work: Path) -> Path | None:
    """The newest checkpoint that was written whole. Half-written ones, left by a kill, are removed.

    The trainer writes `trainer_state.json` last, so a folder in which it can be read is whole.
    """
    folders = sorted(work.glob(f"{PREFIX_CHECKPOINT_DIR}-*"), key=lambda folder: int(folder.name.rsplit("-", 1)[-1]), reverse=True)
    for folder in folders:
        if _is_whole(folder):
            return folder
        shutil.rmtree(folder)
    return None


def _is_whole(folder: Path) -> bool:
    try:
        json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True


class Progress(TrainerCallback):
    """Every log entry goes to metrics.jsonl and to the task; after a resume, entries past the checkpoint are dropped first."""

    def __init__(self, work: Path, show: tuple[str, ...]) -> None:
        self.path = work / METRICS_FILE
        self._show = show
        self._started = time.monotonic()

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Forget what was logged after the checkpoint from which the run goes on."""
        rows = [row for row in jobs.read_lines(self.path) if row["step"] <= state.global_step]
        jobs.write_lines(self.path, rows)
        if state.global_step:
            jobs.note(f"goes on from the checkpoint of step {state.global_step} of {state.max_steps}")

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Write one entry."""
        row = {name: value for name, value in jobs.finite(logs or {}).items() if not name.startswith(UNKEPT)}
        if "loss" not in row:
            return
        jobs.append_lines(self.path, [{"step": state.global_step, **row, "seconds": round(time.monotonic() - self._started, 3)}])
        jobs.report_progress(state.global_step, state.max_steps, {name: row[name] for name in self._show if name in row})


def publish(work: Path, out: Path) -> dict[str, float]:
    """Copy the metrics into the artifact, without their clocks, so that equal runs give equal files, and the TensorBoard files; gives the
    last entry, with the speed."""
    logged = jobs.read_lines(work / METRICS_FILE)
    rows = [{name: value for name, value in row.items() if name not in CLOCKS} for row in logged]
    jobs.write_lines(out / METRICS_FILE, rows)
    shutil.copytree(work / TENSORBOARD, out / TENSORBOARD, dirs_exist_ok=True)
    last = {name: value for name, value in rows[-1].items() if name != "step"}
    return {**last, "steps": rows[-1]["step"], "peak_memory_gb": peak_memory() / 1e9, **_speed(logged)}


def peak_memory() -> int:
    """The most bytes that this process held: of its GPU, where it has one, else of the machine's memory."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_reserved()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _speed(logged: list[dict[str, Any]]) -> dict[str, float]:
    """Tokens per second of the attempt that ended, prompts counted once per pass, and seconds per step."""
    began = max((i for i, row in enumerate(logged) if i == 0 or row["seconds"] < logged[i - 1]["seconds"]), default=0)
    first, last = logged[began], logged[-1]
    if last["seconds"] <= first["seconds"]:  # a single entry
        first = {"step": first["step"] - 1, "num_tokens": 0, "seconds": 0}
    seconds = max(last["seconds"] - first["seconds"], 1e-9)
    return {
        "tokens_per_second": (last["num_tokens"] - first["num_tokens"]) / seconds,
        "seconds_per_step": seconds / max(1, last["step"] - first["step"]),
    }
