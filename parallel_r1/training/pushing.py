"""A trainer's weights to the engine that samples for it.

In process, each process of the trainer gives its own engine the weights. vLLM servers are shared by all of them: the first process pushes,
through a folder that the servers see or over NCCL, and the others help to gather what they hold a part of.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn

from parallel_r1 import adapters
from parallel_r1.config import RolloutConfig
from parallel_r1.rollout.engines import Engine, model_dtype

if TYPE_CHECKING:
    from parallel_r1.rollout.nccl_push import NcclPush


class Push:
    """Pushes the weights of `model`; every process calls it at the same time."""

    def __init__(self, engine: Engine, rollout: RolloutConfig, accelerator: Accelerator, model: nn.Module) -> None:
        self._engine, self._rollout, self._accelerator = engine, rollout, accelerator
        self._model = accelerator.unwrap_model(model)

    def __call__(self) -> None:
        """The engine, or all servers, have the weights afterwards; a server that one process lost is left out by all."""
        if self._rollout.engine != "http":
            self._engine.sync(self._model)
        elif self._over_nccl:
            self._over_nccl.push()
        else:
            self._to_servers()
        self._accelerator.wait_for_everyone()

    def _to_servers(self) -> None:
        if self._accelerator.is_main_process:
            self._engine.sync(self._model)
        else:
            for _ in adapters.weights(self._model):
                pass
        self._engine.leave_out(gather_object(self._engine.lost))  # type: ignore[attr-defined]

    @cached_property
    def _over_nccl(self) -> NcclPush | None:
        """From GPU to GPU; the processes meet the servers at the first push."""
        if self._rollout.push == "disk" or (self._rollout.push == "auto" and not torch.cuda.is_available()):
            return None
        from parallel_r1.rollout.nccl_push import NcclPush, Source

        source = Source(lambda: adapters.weights(self._model), model_dtype())
        return NcclPush(self._rollout.endpoints, source, self._accelerator.process_index)
