"""vLLM's CPU attention with holes."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from parallel_r1.rollout.vllm_structured.visibility import SeesHoles


class CpuImplementation(SeesHoles, CPUAttentionBackendImpl):
    """vLLM's CPU attention with holes."""

    def read_cache(self, layer: Any, cache: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values that lie in `blocks`, both (tokens, key-value heads, head size)."""
        return read_packed(cache, blocks, layer.isa, self.head_size)


class CpuBackend(CPUAttentionBackend):
    """Takes the place of vLLM's CPU_ATTN."""

    @staticmethod
    def get_impl_cls() -> type[CpuImplementation]:
        """The implementation with holes."""
        return CpuImplementation


def read_packed(cache: Tensor, blocks: Tensor, isa: str, head_size: int) -> tuple[Tensor, Tensor]:
    """Keys and values of some blocks. A block and head holds its keys, then its values, in an order that depends on the processor."""
    _, heads, block_size, _ = cache.shape
    packed = cache[blocks].view(len(blocks), heads, 2, block_size * head_size)
    keys, values = (
        packed[:, :, index, where].view(len(blocks), heads, block_size, head_size).transpose(1, 2).flatten(0, 1)
        for index, where in enumerate(packing(isa, block_size, head_size, cache.dtype))
    )
    return keys, values


@lru_cache
def packing(isa: str, block_size: int, head_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Where in a packed block each element of its keys and of its values lies, found by letting vLLM pack their indices, digit by digit.

    Raises NotImplementedError for a cache that holds anything but the elements themselves, such as a quantised one.
    """
    count = block_size * head_size
    digits, base = [], 128
    for power in range(3):
        digit = torch.arange(count) // base**power % base
        plain = digit.to(dtype).view(block_size, 1, head_size)
        cache = torch.zeros(1, 1, 2 * block_size, head_size, dtype=dtype)
        keys, values = cache.chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(plain, plain, keys, values, torch.arange(block_size), isa)
        digits.append(cache.view(2, count).float().round().long() * base**power)
    packed = sum(digits)
    where = packed.argsort(dim=1)
    if not torch.equal(packed.gather(1, where), torch.arange(count).expand(2, count)):
        raise NotImplementedError(f"structured attention: the KV cache of {dtype} is no reordering of its elements; set its dtype to auto")
    return where[0], where[1]
