"""Trainer and engine take turns in one order. The engine here only writes down what it is asked; vLLM's own sleep needs a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from parallel_r1 import jobs
from parallel_r1.rollout.machine import Rollout
from parallel_r1.rollout.records import Studio
from parallel_r1.rollout.transformers_engine import TransformersEngine
from parallel_r1.rollout.turns import OutOfTurn, Turns
from parallel_r1.training import grpo, runs

from .conftest import ROLLOUT
from .test_training import RL


class Recording:
    """An engine of the same interface that writes down what it is asked, and samples with another one if it has one."""

    name = "recording"

    def __init__(self, sampler: TransformersEngine | None = None) -> None:
        self.asked: list[str] = []
        self._sampler = sampler

    def sleep(self) -> None:
        self.asked.append("sleep")

    def wake_for_weights(self) -> None:
        self.asked.append("wake for weights")

    def wake_for_requests(self) -> None:
        self.asked.append("wake for requests")

    def sync(self, model: nn.Module) -> None:
        self.asked.append("sync")
        if self._sampler:
            self._sampler.sync(model)

    def run(self, rollouts: Iterable[Rollout]) -> Iterator[Rollout]:
        self.asked.append("generate")
        yield from self._sampler.run(rollouts) if self._sampler else ()


ONE_STEP = ["wake for weights", "sync", "wake for requests", "generate", "sleep"]


def take_turn(engine: Recording, turns: Turns, step: int) -> None:
    turns.wake()
    turns.sync(step, lambda: engine.sync(nn.Identity()))
    turns.generate(step, [])
    turns.sleep()


def test_the_engine_sleeps_from_the_start_and_between_turns() -> None:
    engine = Recording()
    turns = Turns(engine)
    for step in (0, 1):
        take_turn(engine, turns, step)
    assert engine.asked == ["sleep", *ONE_STEP, *ONE_STEP]


OUT_OF_TURN: list[tuple[list[Callable[[Turns], None]], str, str]] = [
    ([lambda t: t.generate(0, [])], "generate: the engine is asleep", "no weights, no memory"),
    ([lambda t: t.sync(0, lambda: None)], "sync: the engine is asleep", "weights into memory that is not there"),
    ([Turns.wake, lambda t: t.generate(0, [])], "generate: the engine is awake, not in sync", "no weights since it slept"),
    ([Turns.wake, Turns.wake], "wake: the engine is awake", "twice"),
    ([Turns.wake, Turns.sleep], "sleep: the engine is awake", "half awake"),
    ([Turns.wake, lambda t: t.sync(3, lambda: None), lambda t: t.generate(4, [])], "step 4: .* weights of step 3", "another step"),
    ([Turns.wake, lambda t: t.sync(0, lambda: None), lambda t: t.generate(0, []), lambda t: t.generate(0, [])], "is generated", "twice"),
]


@pytest.mark.parametrize(("calls", "said", "reason"), OUT_OF_TURN, ids=[case[2] for case in OUT_OF_TURN])
def test_any_other_order_is_refused(calls: list[Callable[[Turns], None]], said: str, reason: str) -> None:
    engine = Recording()
    turns = Turns(engine)
    for call in calls[:-1]:
        call(turns)
    before = list(engine.asked)
    with pytest.raises(OutOfTurn, match=said):
        calls[-1](turns)
    assert engine.asked == before, "the engine was not asked"


def test_a_push_that_fails_leaves_the_engine_without_weights() -> None:
    turns = Turns(Recording())
    turns.wake()

    def fail() -> None:
        raise OSError("connection lost")

    with pytest.raises(OSError, match="connection lost"):
        turns.sync(0, fail)
    with pytest.raises(OutOfTurn):
        turns.generate(0, [])


def test_the_trainer_keeps_the_order_and_pushes_first_after_a_resume(tmp_path: Path, tiny: Path) -> None:
    problems = [{"id": f"s{n}", "problem": f"{n}+1=?", "answer": str(n + 1), "source": "test"} for n in range(4)]
    dataset = grpo.Dataset.from_list([{"prompt": row["problem"], "row": json.dumps(row)} for row in problems])
    config = RL.model_copy(update={"steps": 2, "rollout": RL.rollout.model_copy(update={"max_response_tokens": 64})})
    job = jobs.Job(stage="rl", config={}, seed=1, inputs={}, out=tmp_path / "out", work=tmp_path / "work")

    def train(steps: int) -> list[str]:
        engine = Recording(TransformersEngine(tiny, ROLLOUT, seed=0))
        tokenizer = AutoTokenizer.from_pretrained(tiny, padding_side="left")
        stage = config.model_copy(update={"steps": steps})
        checkpoints = runs.Checkpoints(job, config, dataset)
        trainer = grpo.ParallelGRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32, attn_implementation="sdpa"),
            args=grpo._arguments(job, stage), train_dataset=dataset, processing_class=tokenizer, callbacks=[checkpoints],
            settings=stage, engine=engine, studio=Studio(tokenizer, config.rollout), samples_path=tmp_path / "samples.jsonl",
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=checkpoints.last())
        return engine.asked

    assert train(1) == ["sleep", *ONE_STEP]
    assert train(2) == ["sleep", *ONE_STEP], "goes on from step 1: its weights are pushed before anything is sampled"
