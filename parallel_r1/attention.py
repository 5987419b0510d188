"""Which keys a token may see, and at which position it sits, when a response is scored (method.md section 6).

**causal** (Seen): paths >= 2 were sampled without their siblings, while everything after the block read the plain concatenation. One
forward gives both: the plain sequence, plus copies of the paths >= 2 that see only the keys before the block and themselves, at the
positions they had when they were sampled.

**structured** (Unseen): siblings never see each other, each path restarts at the position after `<Parallel>`, the token after the paths
sits behind the longest of them, and later tokens see everything. All of it is one contiguous hole per query: key k is visible to query q
if and only if k <= q and not hole_start[q] <= k < hole_end[q].

Masks are boolean and for sdpa or FlexAttention. Eager attention would add them to the scores as 0 and 1, silently wrong: `check_backend`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from parallel_r1.config import Attention
from parallel_r1.markup import TagIds
from parallel_r1.trajectory import Trajectory

OUTSIDE = -1
COLUMN = torch.int32
"""Type of column numbers and positions while they are computed: half the memory traffic of int64 and several times its speed."""


# --- where paths begin ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Paths:
    """Where each token's block of paths and own path begin, as (batch, width) int32 columns; OUTSIDE for tokens in no path."""

    block_start: Tensor
    """First token of the block's first path."""
    path_start: Tensor
    """First token of the token's own path: its `<Path>`."""

    @classmethod
    def of_trajectories(cls, trajectories: Sequence[Trajectory], width: int) -> Paths:
        """From recorded spans; columns count response tokens."""
        block_start = torch.full((len(trajectories), width), OUTSIDE, dtype=COLUMN)
        path_start = torch.full((len(trajectories), width), OUTSIDE, dtype=COLUMN)
        for row, trajectory in enumerate(trajectories):
            first: dict[int | None, int] = {}
            for span in trajectory.spans:
                if span.kind == "path":
                    block_start[row, span.start : span.end] = first.setdefault(span.block, span.start)
                    path_start[row, span.start : span.end] = span.start
        return cls(block_start, path_start)

    @classmethod
    def of_ids(cls, ids: Tensor, tags: TagIds, response: Tensor) -> Paths:
        """From token ids, (batch, width), for texts that were never rollouts: paths lie between `<Parallel><Path>` and `</Parallel>`.

        `response`: bool, where tags count; a prompt that names the tags must be left out. Expects valid, canonical markup.
        """
        # the column after each: 0 can mean nowhere, and products serve as selections
        after = torch.arange(1, ids.shape[1] + 1, device=ids.device, dtype=COLUMN)
        starts_path = (ids == tags.path) & response
        opens = (ids == tags.parallel) & nn.functional.pad(starts_path[:, 1:], (0, 1)) & response
        closes = (ids == tags.parallel_end) & response
        opened = (opens * after).cummax(1).values
        closed = (closes * after).cummax(1).values
        inside = (opened > closed) & (after > opened)
        path = ((starts_path & inside) * after).cummax(1).values
        return cls((opened + 1) * inside + OUTSIDE, path * inside + OUTSIDE)

    def to(self, device: torch.device) -> Paths:
        """The same on another device."""
        return Paths(self.block_start.to(device), self.path_start.to(device))

    def shifted(self, columns: int) -> Paths:
        """The same with so many columns before, such as those of a prompt."""
        before = (columns, 0)
        block, path = (torch.where(start >= 0, start + columns, start) for start in (self.block_start, self.path_start))
        return Paths(nn.functional.pad(block, before, value=OUTSIDE), nn.functional.pad(path, before, value=OUTSIDE))


# --- structured -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """Positions and visibility of the structured variant; all (batch, length)."""

    positions: Tensor
    hole_start: Tensor
    hole_end: Tensor
    real: Tensor
    """bool: no padding."""

    def visible(self) -> Tensor:
        """(batch, 1, length, length) bool for sdpa, True where a query may see a key. Padding sees itself, so that no row is empty."""
        keys = torch.arange(self.real.shape[1], device=self.real.device)
        open_ = (keys < self.hole_start[..., None]) | (keys >= self.hole_end[..., None])
        visible = open_ & (keys <= keys[:, None]) & self.real[:, None, :]
        return (visible | (keys == keys[:, None]))[:, None]

    def block_mask(self, block_size: int = 128) -> Any:
        """The same for FlexAttention on a GPU (torch.nn.attention.flex_attention), without a dense mask. Not run on a GPU so far."""
        from torch.nn.attention.flex_attention import create_block_mask

        hole_start, hole_end, real = self.hole_start, self.hole_end, self.real

        def may_see(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            open_ = (key < hole_start[row, query]) | (key >= hole_end[row, query])
            return (open_ & (key <= query) & real[row, key]) | (key == query)

        batch, length = real.shape
        return create_block_mask(may_see, batch, None, length, length, device=str(real.device), BLOCK_SIZE=block_size)


def structured_layout(paths: Paths, real: Tensor) -> Layout:
    """Positions and holes of sequences whose paths are known; `real`: (batch, length) bool, False for padding."""
    inside = paths.path_start >= 0
    columns = torch.arange(inside.shape[1], device=inside.device, dtype=COLUMN)
    block = (inside & (paths.block_start == columns)).cumsum(1)
    reach = (columns + 1 - paths.path_start) * inside
    trunk = (real & ~inside).cumsum(1, dtype=COLUMN)
    before = trunk + _longest_paths(paths, inside, block, reach).cumsum(1, dtype=COLUMN).gather(1, block - inside.long())
    positions = (before + reach - 1).clamp_(min=0) * real
    return Layout(positions.long(), paths.block_start * inside, paths.path_start * inside, real)


def _longest_paths(paths: Paths, inside: Tensor, block: Tensor, reach: Tensor) -> Tensor:
    """Tokens of each block's longest path, (batch, blocks + 1); blocks count from 1."""
    longest = torch.zeros(len(inside), int(block.max()) + 1 if block.numel() else 1, dtype=COLUMN, device=inside.device)
    starts_next = nn.functional.pad(paths.path_start[:, 1:], (0, 1), value=OUTSIDE)
    row, last = (inside & (starts_next != paths.path_start)).nonzero(as_tuple=True)
    return longest.view(-1).scatter_reduce_(0, row * longest.shape[1] + block[row, last], reach[row, last], "amax").view_as(longest)


def structure_forward(model: nn.Module, tags: TagIds) -> None:
    """Make every training forward of `model` structured: the hook puts positions and mask in place of the plain attention mask.

    Expects `input_ids`, `attention_mask` (batch, length) and `labels`; tags count where labels do, never in the prompt.
    """
    check_backend(model.config._attn_implementation)

    def structure(_model: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        paths = Paths.of_ids(options["input_ids"], tags, options["labels"] != -100)
        layout = structured_layout(paths, options["attention_mask"].bool())
        return arguments, {**options, "attention_mask": layout.visible(), "position_ids": layout.positions}

    model.register_forward_pre_hook(structure, with_kwargs=True)


def check_backend(implementation: str | None) -> None:
    """Refuse attention implementations that would take our boolean masks wrongly. Raises ValueError."""
    if implementation not in ("sdpa", "flex_attention"):
        raise ValueError(
            f"attn_implementation {implementation!r} can't take the masks of parallel thinking: eager attention adds a boolean mask to the "
            "scores as 0 and 1, which is silently wrong, and flash attention ignores it. Load the model with attn_implementation='sdpa'."
        )


# --- scoring in the context of sampling -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScoringInputs:
    """A batch laid out for scoring. Shapes have `length + copies` columns; `length` is the plain sequence's, copies are appended."""

    input_ids: Tensor
    """(batch, columns)"""
    positions: Tensor
    """(batch, columns)"""
    visible: Tensor
    """(batch, 1, columns, columns) bool, True where a query may see a key."""
    labels: Tensor
    """(batch, columns): the token where its log-prob counts, else -100."""
    copied: Tensor
    """(batch, copies): the plain column that a copy stands for; where there is none, `is_copy` is False."""
    is_copy: Tensor
    """(batch, copies) bool"""
    length: int

    def gather_back(self, values: Tensor) -> Tensor:
        """Per-token values of all columns, (batch, columns), as those of the plain sequence, (batch, length): copies replace originals."""
        plain, copies = values[:, : self.length], values[:, self.length :]
        rows = torch.arange(len(values), device=values.device)[:, None].expand_as(self.copied)
        return plain.index_put((rows[self.is_copy], self.copied[self.is_copy]), copies[self.is_copy])


def scoring_inputs(attention: Attention, input_ids: Tensor, attention_mask: Tensor, paths: Paths) -> ScoringInputs:
    """Lay out left-padded prompts and right-padded responses so that every token is scored in the context in which it was sampled.

    input_ids, attention_mask: (batch, length); paths: of the response, (batch, response length).
    """
    prompt = input_ids.shape[1] - paths.path_start.shape[1]
    if attention == "structured":
        return _structured_inputs(input_ids, attention_mask, paths.shifted(prompt), prompt)
    return _causal_inputs(input_ids, attention_mask, paths.shifted(prompt), prompt)


def _response_labels(input_ids: Tensor, attention_mask: Tensor, prompt: int) -> Tensor:
    labels = input_ids.masked_fill(attention_mask == 0, -100)
    labels[:, :prompt] = -100
    return labels


def _structured_inputs(input_ids: Tensor, attention_mask: Tensor, paths: Paths, prompt: int) -> ScoringInputs:
    layout = structured_layout(paths, attention_mask.bool())
    return ScoringInputs(
        input_ids=input_ids,
        positions=layout.positions,
        visible=layout.visible(),
        labels=_response_labels(input_ids, attention_mask, prompt),
        copied=input_ids[:, :0],
        is_copy=input_ids[:, :0].bool(),
        length=input_ids.shape[1],
    )


def _causal_inputs(input_ids: Tensor, attention_mask: Tensor, paths: Paths, prompt: int) -> ScoringInputs:
    length = input_ids.shape[1]
    needs_copy = paths.path_start > paths.block_start
    count = needs_copy.sum(1)
    copies = int(count.max()) if len(count) else 0
    is_copy = torch.arange(copies, device=input_ids.device)[None] < count[:, None]
    copied = needs_copy.int().argsort(dim=1, descending=True, stable=True)[:, :copies]
    block, path = paths.block_start.gather(1, copied), paths.path_start.gather(1, copied)

    positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
    copy_positions = (positions.gather(1, block.clamp(min=0).long()) + copied - path).clamp(min=0)
    labels = _response_labels(input_ids, attention_mask, prompt).masked_fill(needs_copy, -100)
    copy_ids = input_ids.gather(1, copied)
    return ScoringInputs(
        input_ids=torch.cat([input_ids, copy_ids], 1),
        positions=torch.cat([positions, copy_positions], 1),
        visible=_visible_with_copies(attention_mask.bool(), is_copy, copied, block, path)[:, None],
        labels=torch.cat([labels, copy_ids.masked_fill(~is_copy | (copied == path), -100)], 1),
        copied=copied,
        is_copy=is_copy,
        length=length,
    )


def _visible_with_copies(real: Tensor, is_copy: Tensor, copied: Tensor, block: Tensor, path: Tensor) -> Tensor:
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
