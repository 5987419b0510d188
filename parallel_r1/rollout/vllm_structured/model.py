"""Qwen3 whose position channels carry the structured layout. Weights and names are those of the stock model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.sequence import IntermediateTensors
from vllm.tokenizers import cached_tokenizer_from_config

from parallel_r1.attention import Paths, structured_layout
from parallel_r1.markup import TagIds
from parallel_r1.rollout.vllm_structured.visibility import HOLES, SeesHoles, rows_with_holes


class Qwen3StructuredForCausalLM(Qwen3ForCausalLM):
    """Qwen3 for the Unseen variant (vLLM's interface SupportsMRoPE)."""

    supports_mrope = True

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self._tags = TagIds.from_tokenizer(cached_tokenizer_from_config(vllm_config.model_config))
        blind = {type(m.impl).__name__ for m in self.modules() if isinstance(m, Attention) and not isinstance(m.impl, SeesHoles)}
        if blind:
            raise ValueError(
                f"structured attention isn't there for vLLM's {', '.join(sorted(blind))}: paths would see each other. "
                "On a GPU start vLLM with the attention backend FLASH_ATTN and no plugin that replaces it"
            )

    def get_mrope_input_positions(self, input_tokens: list[int], mm_features: Any = None) -> tuple[Tensor, int]:
        """[position, hole_start, hole_end] of each prompt token, and how far positions are from indices after the prompt."""
        if input_tokens.count(self._tags.path) < 2:  # no siblings: as a causal model would have it, in a tenth of the time
            indices = torch.arange(len(input_tokens))
            return torch.stack([indices, torch.zeros_like(indices), torch.zeros_like(indices)]), 0
        ids = torch.tensor([input_tokens])
        everything = torch.ones_like(ids, dtype=torch.bool)
        layout = structured_layout(Paths.of_ids(ids, self._tags, everything), everything)
        channels = torch.cat([layout.positions, layout.hole_start, layout.hole_end])
        return channels, int(layout.positions[0, -1]) + 1 - len(input_tokens)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor | IntermediateTensors:
        """The stock forward, with the rows that have a hole laid ready for the attention layers."""
        context = get_forward_context()
        if context.attn_metadata:
            metadata = next(iter(context.attn_metadata.values()))
            context.additional_kwargs[HOLES] = rows_with_holes(positions[1], positions[2], metadata)
        return super().forward(input_ids, positions[0], intermediate_tensors, inputs_embeds)
