"""Weights of which several processes hold a part each (FSDP2, DeepSpeed ZeRO-3)."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def whole(weight: Tensor) -> Tensor:
    """All of a weight, detached. Where processes hold a part each this gathers it, so all of them have to ask for the same weights in the
    same order."""
    if isinstance(weight, DTensor):
        return weight.detach().full_tensor()
    if hasattr(weight, "ds_id"):  # DeepSpeed's mark of a parameter that it has split
        from deepspeed.zero import GatheredParameters

        with GatheredParameters([weight]):
            return weight.detach().clone()
    return weight.detach()
