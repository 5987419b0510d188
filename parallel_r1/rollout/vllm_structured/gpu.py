"""vLLM's FlashAttention with holes. Written for vLLM 0.31 and **not run on a GPU so far**. tests/worker/test_vllm_structured.py runs on
the CPU what needs none: reading the cache's layout, and the attention of the rows, which the CPU backend shares.

FlashAttention's kernel takes no mask, so rows with a hole go through sdpa over keys gathered from the cache. Those are the paths >= 2 of
the requests that join in this step, each once; everything else stays with the stock kernel.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionImpl, FlashAttentionMetadataBuilder

from parallel_r1.rollout.vllm_structured.visibility import SeesHoles


class FlashImplementation(SeesHoles, FlashAttentionImpl):
    """vLLM's FlashAttention with holes."""

    def read_cache(self, layer: Any, cache: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values that lie in `blocks`, both (tokens, key-value heads, head size)."""
        if self.kv_cache_dtype not in ("auto", "float16", "bfloat16"):
            raise NotImplementedError(f"structured attention: kv_cache_dtype {self.kv_cache_dtype!r} can't be read; leave it at auto")
        return read_paged(cache, blocks, self.head_size)


class FlashMetadataBuilder(FlashAttentionMetadataBuilder):
    """Keeps whole forwards out of CUDA graphs: a replayed graph never looks for holes, and a prompt's last piece can look like sampling."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER


class FlashBackend(FlashAttentionBackend):
    """Takes the place of vLLM's FLASH_ATTN."""

    @staticmethod
    def get_impl_cls() -> type[FlashImplementation]:
        """The implementation with holes."""
        return FlashImplementation

    @staticmethod
    def get_builder_cls() -> type[FlashMetadataBuilder]:
        """The builder without whole-forward CUDA graphs."""
        return FlashMetadataBuilder


def read_paged(cache: Tensor, blocks: Tensor, head_size: int) -> tuple[Tensor, Tensor]:
    """Keys and values of some blocks of a cache that is (blocks, heads, tokens, keys beside values)."""
    keys, values = cache[blocks].transpose(1, 2).flatten(0, 1).split(head_size, dim=-1)
    return keys, values
