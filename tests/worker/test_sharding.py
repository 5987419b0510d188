"""Weights that two processes share are gathered whole before an engine gets them (FSDP2, over gloo on the CPU)."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import distributed, multiprocessing
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from parallel_r1.config import RolloutConfig
from parallel_r1.rollout.transformers_engine import TransformersEngine
from parallel_r1.sharding import whole


def _sync_from_two_processes(rank: int, checkpoint: Path, meeting: Path) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    expected = {name: 2 * weight.detach().clone() for name, weight in model.named_parameters()}
    mesh = distributed.init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with torch.no_grad():
        for weight in model.parameters():
            assert isinstance(weight, DTensor) and weight.to_local().numel() < weight.numel(), "each process holds a part"
            weight.mul_(2)
    engine = TransformersEngine(checkpoint, RolloutConfig(engine="transformers"), seed=0)
    engine.sync(model)
    got = dict(engine._model.named_parameters())
    for name, weight in expected.items():
        torch.testing.assert_close(got[name].detach(), weight, atol=0, rtol=0)
    distributed.destroy_process_group()


def test_an_engine_gets_whole_weights_of_a_sharded_model(tiny: Path, tmp_path: Path) -> None:
    multiprocessing.spawn(_sync_from_two_processes, (tiny, tmp_path / "meeting"), nprocs=2)


def test_a_plain_weight_is_whole_already() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    assert whole(weight).data_ptr() == weight.data_ptr() and not whole(weight).requires_grad
