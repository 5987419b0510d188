"""A rollout as data: what was sampled, what was forced, which part of the response each token belongs to.

Nothing is ever re-parsed from text: the state machine in `rollout/machine.py` records the spans while it builds the response.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

SpanKind = Literal["main", "path", "summary", "forced"]
Finish = Literal["eos", "length", "stray_tag"]


@dataclass(frozen=True)
class Span:
    """A run of response tokens, `start` inclusive, `end` exclusive. A path's span holds its tags, a summary's its closing tag."""

    kind: SpanKind
    start: int
    end: int
    block: int | None = None
    path: int | None = None
    """1-based index among the block's paths."""


@dataclass
class Trajectory:
    """One response; all lists but `prompt_ids` and `spans` have one entry per response token, and the spans cover every token once."""

    prompt_ids: list[int]
    completion_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Log-probability under the sampler; 0 for forced tokens."""
    loss_mask: list[int] = field(default_factory=list)
    """1 for sampled tokens, 0 for forced ones."""
    spans: list[Span] = field(default_factory=list)
    finish: Finish = "length"

    def append(
        self, kind: SpanKind, ids: list[int], logprobs: list[float] | None, block: int | None = None, path: int | None = None
    ) -> None:
        """Add tokens to the end; without log-probs they are forced. Joins the last span where it is of the same part."""
        if not ids:
            return
        start = len(self.completion_ids)
        self.completion_ids += ids
        self.logprobs += [0.0] * len(ids) if logprobs is None else logprobs
        self.loss_mask += [0 if logprobs is None else 1] * len(ids)
        last = self.spans[-1] if self.spans else None
        if last and (last.kind, last.block, last.path) == (kind, block, path):
            self.spans[-1] = Span(kind, last.start, len(self.completion_ids), block, path)
        else:
            self.spans.append(Span(kind, start, len(self.completion_ids), block, path))

    @property
    def blocks(self) -> int:
        """Parallel blocks in the response."""
        return len({span.block for span in self.spans if span.kind == "path"})

    @property
    def critical_path_tokens(self) -> int:
        """Tokens on the longest chain of the response: of each block only its longest path counts."""
        lengths: dict[int | None, list[int]] = defaultdict(list)
        for span in self.spans:
            if span.kind == "path":
                lengths[span.block].append(span.end - span.start)
        return len(self.completion_ids) - sum(sum(paths) - max(paths) for paths in lengths.values())

    @property
    def relative_position(self) -> float | None:
        """Index of the first `<Parallel>` over the response's length, None without a block (paper section 5: where blocks open)."""
        first = next((span.start for span in self.spans if span.kind == "path"), None)
        return None if first is None else (first - 1) / len(self.completion_ids)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping; `from_dict` reads it back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Trajectory:
        """The trajectory that `to_dict` wrote."""
        return cls(**{**data, "spans": [Span(**span) for span in data["spans"]]})
