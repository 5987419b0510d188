"""What every training program needs from transformers' Trainer: arguments, progress, and going on from the last whole checkpoint.

A program may run in several processes (config section `launch`). Each trains on its share of every batch; files are written and events are
printed by the first one.
"""

from __future__ import annotations

import importlib.util
import os
import resource
import shutil
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from datasets import Dataset
from torch import distributed
from transformers import PreTrainedTokenizerBase, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import TensorBoardCallback

from parallel_r1 import jobs, resuming, student
from parallel_r1.config import CheckpointConfig, LaunchConfig, OptimizerConfig, Section
from parallel_r1.resuming import Mark, Origin, digest
from parallel_r1.store import identity

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


def join(launch: LaunchConfig) -> None:
    """Meet the other processes of this program, if it has any; before anything else could do so with bounds of its own.

    A process that waits for another one for longer than `launch.collective_minutes` fails, and the launcher ends all.
    """
    if not distributed.is_torchelastic_launched():
        return
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:  # accelerate calls the device cpu:0, where torch.load expects cpu
        torch.serialization.register_package(1, lambda storage: None, lambda storage, place: storage if place.startswith("cpu:") else None)
    backend = "cuda:nccl,cpu:gloo" if on_gpu else "gloo"
    distributed.init_process_group(backend, timeout=timedelta(minutes=launch.collective_minutes))
    print(f"process {distributed.get_rank()} of {distributed.get_world_size()}, {socket.gethostname()} pid {os.getpid()}")


def leave() -> None:
    """The end of what `join` began."""
    if distributed.is_torchelastic_launched():
        distributed.barrier()
        distributed.destroy_process_group()


def processes() -> int:
    """How many processes this program is."""
    return distributed.get_world_size() if distributed.is_initialized() else 1


def trainer_arguments(
    work: Path, optimizer: OptimizerConfig, steps: int, checkpoint_every: int, seed: int, micro_batch: int, batch: int
) -> dict[str, Any]:
    """Arguments that SFTConfig and GRPOConfig share. A batch is micro_batch x processes x accumulated passes, however many processes."""
    on_gpu = torch.cuda.is_available()
    schedule: dict[str, Any] = {"lr_scheduler_type": "constant_with_warmup"}
    if optimizer.schedule == "cosine":
        schedule = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": optimizer.min_lr_ratio}}
    return {
        "output_dir": str(work),
        "max_steps": steps,
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": batch // (micro_batch * processes()),
        "learning_rate": optimizer.learning_rate,
        "weight_decay": optimizer.weight_decay,
        "adam_beta1": optimizer.beta1,
        "adam_beta2": optimizer.beta2,
        "max_grad_norm": optimizer.max_grad_norm,
        "warmup_steps": round(optimizer.warmup_ratio * steps),
        **schedule,
        "save_strategy": "steps",
        "save_steps": checkpoint_every,
        "use_cpu": not on_gpu,
        "bf16": on_gpu and torch.cuda.is_bf16_supported(),
        "gradient_checkpointing": on_gpu,
        "disable_tqdm": True,
        "seed": seed,
        "data_seed": seed,
        "dataloader_pin_memory": on_gpu,
        "ddp_find_unused_parameters": False,
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


class Checkpoints(TrainerCallback):
    """Marks each checkpoint that the trainer wrote as whole, tells the task of it, and removes those that no rule keeps."""

    def __init__(self, job: jobs.Job, section: Section, examples: Dataset) -> None:
        launch = getattr(section, "launch", LaunchConfig())
        self._work = job.work
        self._rule = getattr(section, "checkpoints", CheckpointConfig())
        self._origin = Origin(recipe=identity(section), data=digest(examples), processes=processes(), strategy=launch.strategy)

    def last(self) -> str | None:
        """The newest whole checkpoint, from which this run goes on; what a kill left half-written is removed.

        Raises ValueError where it was made by another recipe, from other data, or by processes that kept its state in another way.
        """
        marks = resuming.whole(self._work)
        if jobs.is_first():
            for folder in self._work.glob(f"{resuming.PREFIX}*"):
                if folder not in {resuming.folder_of(self._work, step) for step in marks}:
                    shutil.rmtree(folder)
        if not marks:
            return None
        step, mark = max(marks.items())
        folder = resuming.folder_of(self._work, step)
        if found := resuming.differences(mark.origin, self._origin):
            raise ValueError(f"{folder} can't be gone on from: {'; '.join(found)}. Put that back, or remove {self._work} to begin anew")
        if mark.origin.processes != self._origin.processes:
            then, now = mark.origin.processes, self._origin.processes
            jobs.note(f"the checkpoint of step {step} was written by {then} processes, {now} go on with it")
        return str(folder)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """The trainer has written a checkpoint, each process its part."""
        if distributed.is_initialized():
            distributed.barrier()
        if not state.is_world_process_zero:
            return
        folder = resuming.folder_of(self._work, state.global_step)
        logged = jobs.finite(state.log_history[-1]) if state.log_history else {}
        mark = Mark(step=state.global_step, origin=self._origin, metrics=logged)
        jobs.write_durably(folder / resuming.MARK, mark.model_dump_json())
        jobs.checkpoint(state.global_step)
        for step in resuming.surplus(resuming.whole(self._work), self._rule):
            gone = resuming.folder_of(self._work, step)
            (gone / resuming.MARK).unlink()
            shutil.rmtree(gone)


class Progress(TrainerCallback):
    """Every log entry goes to metrics.jsonl and to the task; after a resume, entries past the checkpoint are dropped first."""

    def __init__(self, work: Path, show: tuple[str, ...]) -> None:
        self.path = work / jobs.METRICS
        self._show = show
        self._started = time.monotonic()

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Forget what was logged after the checkpoint from which the run goes on."""
        if not state.is_world_process_zero:
            return
        rows = [row for row in jobs.read_lines(self.path) if row["step"] <= state.global_step]
        jobs.write_lines(self.path, rows)
        if state.global_step:
            jobs.note(f"goes on from the checkpoint of step {state.global_step} of {state.max_steps}")

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        """Write one entry."""
        row = {name: value for name, value in jobs.finite(logs or {}).items() if not name.startswith(UNKEPT)}
        if "loss" not in row or not state.is_world_process_zero:
            return
        jobs.append_lines(self.path, [{"step": state.global_step, **row, "seconds": round(time.monotonic() - self._started, 3)}])
        jobs.report_progress(state.global_step, state.max_steps, {name: row[name] for name in self._show if name in row})


def save(trainer: Trainer, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the trained model: adapters merged in, and all of it where processes hold a part each."""
    from parallel_r1 import adapters  # peft takes a second to load, and evaluation needs none

    model = trainer.accelerator.unwrap_model(trainer.model)
    weights = {}
    for name, weight in adapters.weights(model):
        if jobs.is_first():
            weights[name] = weight.cpu()
    if jobs.is_first():
        student.save(adapters.below(model), tokenizer, folder, weights)


def publish(work: Path, out: Path) -> dict[str, float]:
    """Copy the metrics into the artifact, without their clocks, so that equal runs give equal files, and the TensorBoard files; gives the
    last entry, with the speed."""
    if not jobs.is_first():
        return {}
    logged = jobs.read_lines(work / jobs.METRICS)
    rows = [{name: value for name, value in row.items() if name not in CLOCKS} for row in logged]
    jobs.write_lines(out / jobs.METRICS, rows)
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
