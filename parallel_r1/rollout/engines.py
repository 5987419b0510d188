"""Engines sample what the state machine asks for. Three of one interface: vLLM in process, vLLM servers, transformers."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

import torch
from torch import nn
from transformers import AutoConfig

from parallel_r1.config import RolloutConfig
from parallel_r1.rollout.machine import Rollout


class Engine(Protocol):
    """Something that can sample from a checkpoint."""

    name: str
    """Library and version, such as `vllm 0.31.0`."""

    def run(self, rollouts: Iterable[Rollout]) -> Iterator[Rollout]:
        """Carry all rollouts to their end; give each as soon as it is done."""

    def sync(self, model: nn.Module) -> None:
        """Take over the weights of `model`, of the architecture that the engine was started with."""


def open_engine(checkpoint: Path, config: RolloutConfig, seed: int, beside_trainer: bool = False) -> Engine:
    """Start the engine that `config.engine` names; `auto` takes vLLM where it is installed. `beside_trainer`: it has to share a GPU."""
    _check_length(checkpoint, config)
    kind = config.engine
    if kind == "auto":
        kind = "vllm" if importlib.util.find_spec("vllm") else "transformers"
    if kind == "vllm":
        from parallel_r1.rollout.vllm_engine import VllmEngine

        return VllmEngine(checkpoint, config, seed, beside_trainer)
    if kind == "http":
        from parallel_r1.rollout.http_engine import HttpEngine

        return HttpEngine(checkpoint, config)
    from parallel_r1.rollout.interleaved_engine import InterleavedEngine
    from parallel_r1.rollout.transformers_engine import TransformersEngine

    return (InterleavedEngine if config.attention == "structured" else TransformersEngine)(checkpoint, config, seed)


def _check_length(checkpoint: Path, config: RolloutConfig) -> None:
    longest = AutoConfig.from_pretrained(checkpoint).max_position_embeddings
    asked = config.max_prompt_tokens + config.max_response_tokens
    if asked > longest:
        raise ValueError(
            f"max_prompt_tokens {config.max_prompt_tokens} + max_response_tokens {config.max_response_tokens} = {asked}: the model takes "
            f"{longest} tokens at most; lower one of them in the stage's `rollout` (evaluate.rollout, rl.N.rollout)"
        )


def model_dtype() -> torch.dtype:
    """What models are run in: bfloat16 where a GPU has it, else float32."""
    return torch.bfloat16 if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else torch.float32
