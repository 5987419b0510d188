"""The `structured` (Unseen) semantics in vLLM 0.31, through its public extension points alone: nothing of vLLM is patched.

- **Positions and holes**: an out-of-tree Qwen3 (model.py). vLLM asks M-RoPE models for three position channels per prompt token; this one
  answers [position, hole_start, hole_end] of parallel_r1/attention.py. Tokens sampled later get the next position on all three channels:
  an empty hole, which is right, since what is sampled sees all of its context.
- **Visibility**: attention backends (cpu.py, gpu.py) that let the stock kernel do its work, then compute again the rows with a hole:
  the paths >= 2 of a prompt, when a block is joined (visibility.py).

Prefix caching stays on. vLLM shares cached keys between requests that begin with the same token ids, which is right as long as a token's
position and hole follow from the ids up to it. They do: the layout looks at no later token, and a *sampled* token never lies in a
path >= 2, because every request ends at the first tag it samples. So a client must stop at all six tags, as the state machine does.

No more is known of a prompt than its ids, so a block spelled out in the user's text would be taken for one: `refuse_blocks` says no.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parallel_r1.markup import CLOSE_PARALLEL, OPEN_PARALLEL, OPEN_PATH, TagIds

ARCHITECTURE = "Qwen3StructuredForCausalLM"
STOCK_ARCHITECTURE = "Qwen3ForCausalLM"


def register() -> None:
    """Make vLLM know the model and the backends; the `vllm.general_plugins` entry point, called in every vLLM process, perhaps repeatedly.

    Models that don't ask for holes run as before.
    """
    from vllm import ModelRegistry
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.cpu.CpuBackend")
    register_backend(AttentionBackendEnum.FLASH_ATTN, f"{__name__}.gpu.FlashBackend")
    ModelRegistry.register_model(ARCHITECTURE, f"{__name__}.model:{ARCHITECTURE}")


def hf_overrides(architecture: str) -> dict[str, Any]:
    """What vLLM (`hf_overrides`, `--hf-overrides`) is to read in place of a checkpoint's own config. Raises ValueError for other models."""
    if architecture != STOCK_ARCHITECTURE:
        raise ValueError(
            f"attention: structured is there for {STOCK_ARCHITECTURE} in vLLM, the checkpoint is a {architecture}: "
            "set rollout.engine: transformers, or attention: causal"
        )
    return {"architectures": [ARCHITECTURE], "mrope_section": [1, 1, 1]}


def refuse_blocks(prompt_ids: Sequence[int], tags: TagIds) -> None:
    """Raise ValueError for a prompt that holds a block's beginning as tag tokens: it would be laid out as if it were the response's."""
    for index, pair in enumerate(zip(prompt_ids, prompt_ids[1:], strict=False)):
        if pair == (tags.parallel, tags.path):
            raise ValueError(
                f"prompt token {index}: {OPEN_PARALLEL}{OPEN_PATH} spelled out in a prompt would be taken for a block of the response. Put "
                f"something between the two tags, or leave out what lies up to {CLOSE_PARALLEL}, or set rollout.engine: transformers"
            )
