"""Rows of a vLLM batch whose query has a hole, and their attention computed again."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from vllm.forward_context import get_forward_context

HOLES = "parallel_r1_holes"
"""Key in the forward context's additional_kwargs, laid there by the model for its attention layers."""


@dataclass(frozen=True)
class RowsWithHoles:
    """The rows of one request whose query has a hole."""

    rows: Tensor
    """Indices into the batch's tokens."""
    blocks: Tensor
    """The request's blocks of the KV cache, in order."""
    visible: Tensor
    """(rows, keys) bool: True where a query may see a key."""


def rows_with_holes(hole_start: Tensor, hole_end: Tensor, metadata: Any) -> list[RowsWithHoles]:
    """The rows to compute again in a batch, request by request; none in a batch that only samples. `metadata`: vLLM's, of any backend."""
    count = metadata.num_actual_tokens
    hole_start, hole_end = hole_start[:count], hole_end[:count]
    rows = (hole_end > hole_start).nonzero()[:, 0]
    if not len(rows):
        return []
    starts = metadata.query_start_loc
    owners = torch.searchsorted(starts, rows, right=True) - 1
    found = []
    for owner in owners.unique().tolist():
        own = rows[owners == owner]
        length = int(metadata.seq_lens[owner])
        queries = (length - starts[owner + 1] + own)[:, None]
        keys = torch.arange(length, device=own.device)
        visible = (keys <= queries) & ((keys < hole_start[own, None]) | (keys >= hole_end[own, None]))
        found.append(RowsWithHoles(own, metadata.block_table[owner], visible))
    return found


class SeesHoles:
    """Mixed in before a vLLM attention implementation: its `forward`, then the rows with a hole again, from the cache's keys and values."""

    num_heads: int
    head_size: int
    scale: float

    @abstractmethod
    def read_cache(self, layer: Any, cache: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values that lie in `blocks`, both (tokens, key-value heads, head size)."""

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        *scales: Any,
        **named_scales: Any,
    ) -> Tensor:
        """vLLM's AttentionImpl.forward. The batch's keys and values are in the cache already."""
        done = super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *scales, **named_scales)
        if attn_metadata is not None:
            for part in get_forward_context().additional_kwargs.get(HOLES, ()):
                self._again(layer, query, kv_cache, output, part)
        return done

    def _again(self, layer: Any, query: Tensor, kv_cache: Tensor, output: Tensor, part: RowsWithHoles) -> None:
        length = part.visible.shape[1]
        needed = -(-length // kv_cache.shape[2])
        keys, values = (kept[:length].transpose(0, 1)[None] for kept in self.read_cache(layer, kv_cache, part.blocks[:needed].long()))
        queries = query.view(-1, self.num_heads, self.head_size)[part.rows].transpose(0, 1)[None]
        attended = scaled_dot_product_attention(queries, keys, values, attn_mask=part.visible, scale=self.scale, enable_gqa=True)
        output.view(-1, self.num_heads, self.head_size)[part.rows] = attended[0].transpose(0, 1)
