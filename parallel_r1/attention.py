"""Which keys a token may see, and at which position it sits, when a response is scored.

**Seen** (causal; method.md section 6): paths >= 2 were sampled without their siblings, while everything after the block read the plain
concatenation. One forward gives both: the plain sequence, plus copies of the paths >= 2 that see only the keys before the block and
themselves, at the positions they had when they were sampled.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from parallel_r1.trajectory import Trajectory

OUTSIDE = -1


def path_layout(trajectories: list[Trajectory], width: int) -> tuple[Tensor, Tensor]:
    """Where each response token's block of paths and own path begin.

    Returns two (batch, width) tensors of response indices, `block_start` (first token of the block's first path) and `path_start` (first
    token of the token's own path), OUTSIDE for tokens in no path and for padding.
    """
    block_start = torch.full((len(trajectories), width), OUTSIDE)
    path_start = torch.full((len(trajectories), width), OUTSIDE)
    for row, trajectory in enumerate(trajectories):
        first: dict[int | None, int] = {}
        for span in trajectory.spans:
            if span.kind == "path":
                block_start[row, span.start : span.end] = first.setdefault(span.block, span.start)
                path_start[row, span.start : span.end] = span.start
    return block_start, path_start


@dataclass(frozen=True)
class ExactInputs:
    """A batch with the copies appended. `length` is the plain part's; all shapes have `length + copies` columns."""

    input_ids: Tensor
    """(batch, columns)"""
    positions: Tensor
    """(batch, columns)"""
    visible: Tensor
    """(batch, 1, columns, columns) bool, True where a query may see a key; for sdpa: eager attention would add it as 0 and 1."""
    labels: Tensor
    """(batch, columns): the token where its log-prob counts, else -100."""
    copied: Tensor
    """(batch, copies): the plain column that a copy stands for; where there is none, `is_copy` is False."""
    is_copy: Tensor
    """(batch, copies) bool"""
    length: int

    def gather_back(self, values: Tensor) -> Tensor:
        """Per-token values of all columns, (batch, columns), as those of the plain sequence, (batch, length): copies replace their originals."""
        plain, copies = values[:, : self.length], values[:, self.length :]
        rows = torch.arange(len(values), device=values.device)[:, None].expand_as(self.copied)
        return plain.index_put((rows[self.is_copy], self.copied[self.is_copy]), copies[self.is_copy])


def exact_inputs(input_ids: Tensor, attention_mask: Tensor, block_start: Tensor, path_start: Tensor) -> ExactInputs:
    """Lay out left-padded prompts and right-padded responses for scoring in the context of sampling (Seen).

    input_ids, attention_mask: (batch, length); block_start, path_start: (batch, response length), from `path_layout`.
    """
    batch, length = input_ids.shape
    prompt = length - path_start.shape[1]
    needs_copy = path_start > block_start
    count = needs_copy.sum(1)
    copies = int(count.max()) if batch else 0
    is_copy = torch.arange(copies, device=input_ids.device)[None] < count[:, None]
    response_column = needs_copy.int().argsort(dim=1, descending=True, stable=True)[:, :copies]
    copied = response_column + prompt
    block = block_start.gather(1, response_column) + prompt
    path = path_start.gather(1, response_column) + prompt

    positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
    copy_positions = positions.gather(1, block.clamp(0, length - 1)) + copied - path
    labels = input_ids.masked_fill(attention_mask == 0, -100)
    labels[:, :prompt] = -100
    labels[:, prompt:][needs_copy] = -100
    copy_ids = input_ids.gather(1, copied)
    copy_labels = copy_ids.masked_fill(~is_copy | (copied == path), -100)
    return ExactInputs(
        input_ids=torch.cat([input_ids, copy_ids], 1),
        positions=torch.cat([positions, copy_positions.clamp(min=0)], 1),
        visible=_visible(attention_mask.bool(), is_copy, copied, block, path)[:, None],
        labels=torch.cat([labels, copy_labels], 1),
        copied=copied,
        is_copy=is_copy,
        length=length,
    )


def _visible(real: Tensor, is_copy: Tensor, copied: Tensor, block: Tensor, path: Tensor) -> Tensor:
    """(batch, columns, columns) bool: plain causal among the real; a copy sees what lies before its block, and its own path so far."""
    batch, length = real.shape
    copies = copied.shape[1]
    columns = torch.arange(length, device=real.device)
    plain = real[:, None, :] & (columns[None, :] <= columns[:, None])[None]
    to_plain = real[:, None, :] & (columns[None, None, :] < block[:, :, None])
    same_path = (path[:, :, None] == path[:, None, :]) & is_copy[:, None, :] & (copied[:, None, :] <= copied[:, :, None])
    top = torch.cat([plain, plain.new_zeros(batch, length, copies)], 2)
    bottom = torch.cat([to_plain, same_path], 2)
    visible = torch.cat([top, bottom], 1)
    return visible | torch.eye(length + copies, dtype=torch.bool, device=real.device)
