"""vLLM in process, stepped by hand: a finished request's successors enter at the next step, nobody waits for the slowest.

Settings for the CPU as measured (shared/poc/README.md): block_size 32, eager, float32, prefix caching on. Per-request seeds are left
out there, since vLLM's CPU sampler fails on them with chunked prefill; the engine as a whole is seeded.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import torch
import vllm
from torch import nn
from transformers import AutoConfig, AutoTokenizer
from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind

from parallel_r1.config import RolloutConfig
from parallel_r1.markup import TagIds
from parallel_r1.rollout import vllm_structured
from parallel_r1.rollout.machine import Completion, Request, Rollout

NEVER = -100.0
"""Logit bias of banned tokens."""


class VllmEngine:
    """Spawn-join over vLLM's engine loop."""

    def __init__(self, checkpoint: Path, config: RolloutConfig, seed: int) -> None:
        self.name = f"vllm {vllm.__version__}"
        self._config = config
        self._on_gpu = torch.cuda.is_available()
        place: dict[str, Any] = {"gpu_memory_utilization": 0.5} if self._on_gpu else {"block_size": 32, "enforce_eager": True}
        self._llm = LLM(
            model=str(checkpoint),
            dtype="auto" if self._on_gpu else "float32",
            max_model_len=config.max_prompt_tokens + config.max_response_tokens,
            max_num_seqs=config.max_in_flight,
            enable_prefix_caching=True,
            seed=seed,
            **place,
            **self._semantics(checkpoint),
        )
        self._tags = TagIds.from_tokenizer(AutoTokenizer.from_pretrained(checkpoint)) if config.attention == "structured" else None
        self._next_id = 0

    def _semantics(self, checkpoint: Path) -> dict[str, Any]:
        if self._config.attention == "causal":
            return {}
        vllm_structured.register()
        backend = {"attention_config": {"backend": "FLASH_ATTN"}} if self._on_gpu else {}
        return {"hf_overrides": vllm_structured.hf_overrides(AutoConfig.from_pretrained(checkpoint).architectures[0]), **backend}

    def run(self, rollouts: Iterable[Rollout]) -> Iterator[Rollout]:
        """Carry all rollouts to their end; give each as soon as it is done. At most `max_in_flight` requests at once."""
        engine = self._llm.llm_engine
        waiting = iter(rollouts)
        in_flight: dict[str, tuple[Rollout, Request]] = {}
        more = True
        while more or in_flight:
            while more and len(in_flight) < self._config.max_in_flight:
                rollout = next(waiting, None)
                if rollout is None:
                    more = False
                else:
                    if self._tags:
                        vllm_structured.refuse_blocks(rollout.trajectory.prompt_ids, self._tags)
                    self._submit(rollout, rollout.begin(), in_flight)
            for output in engine.step() if in_flight else ():
                if not output.finished:
                    continue
                rollout, request = in_flight.pop(output.request_id)
                self._submit(rollout, rollout.receive(request.slot, _completion(output.outputs[0])), in_flight)
                if rollout.done:
                    yield rollout

    def _submit(self, rollout: Rollout, requests: list[Request], in_flight: dict[str, tuple[Rollout, Request]]) -> None:
        for request in requests:
            identifier = str(self._next_id)
            self._next_id += 1
            in_flight[identifier] = (rollout, request)
            self._llm.llm_engine.add_request(identifier, {"prompt_token_ids": request.token_ids}, self._sampling(request))

    def _sampling(self, request: Request) -> SamplingParams:
        return SamplingParams(
            temperature=self._config.temperature,
            top_p=self._config.top_p,
            max_tokens=request.max_tokens,
            stop_token_ids=list(request.stop),
            logit_bias=dict.fromkeys(request.banned, NEVER) or None,
            logprobs=0,
            detokenize=False,
            seed=request.seed if self._on_gpu else None,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def sync(self, model: nn.Module) -> None:
        """Take over `model`'s weights. A tied lm_head keeps a packed copy on the CPU that a reload leaves stale: packed again here."""
        runner = self._llm.llm_engine.model_executor.driver_worker.model_runner
        runner.reload_weights(weights_iterator=((name, weight.detach().clone()) for name, weight in model.named_parameters()))
        served = runner.get_model()
        if getattr(served.config, "tie_word_embeddings", False) and not self._on_gpu:
            served.lm_head.quant_method.process_weights_after_loading(served.lm_head)
        self._llm.reset_prefix_cache()


def _completion(output: Any) -> Completion:
    ids = list(output.token_ids)
    return Completion(ids, [entry[token].logprob for token, entry in zip(ids, output.logprobs, strict=True)])
