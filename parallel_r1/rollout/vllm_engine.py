"""vLLM in process, stepped by hand: a finished request's successors enter at the next step, nobody waits for the slowest.

Settings for the CPU as measured (shared/poc/README.md): block_size 32, eager, float32, prefix caching on. Per-request seeds are left
out there, since vLLM's CPU sampler fails on them with chunked prefill; the engine as a whole is seeded.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import torch
import vllm
from torch import distributed, nn
from transformers import AutoConfig, AutoTokenizer
from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind

from parallel_r1 import adapters
from parallel_r1.config import RolloutConfig
from parallel_r1.markup import TagIds
from parallel_r1.rollout import vllm_structured
from parallel_r1.rollout.machine import NEVER, Completion, Request, Rollout
from parallel_r1.rollout.reload import repack_tied_head


class VllmEngine:
    """Spawn-join over vLLM's engine loop. In a training of several processes each has an engine of its own, on its own device; beside a
    trainer on a GPU it can sleep (parallel_r1/rollout/turns.py)."""

    def __init__(self, checkpoint: Path, config: RolloutConfig, seed: int, beside_trainer: bool = False) -> None:
        self.name = f"vllm {vllm.__version__}"
        self._config = config
        self._on_gpu = torch.cuda.is_available()
        self._sleeps = self._on_gpu and beside_trainer
        place: dict[str, Any] = {"gpu_memory_utilization": 0.5} if self._on_gpu else {"block_size": 32, "enforce_eager": True}
        rank = 0
        if distributed.is_initialized() and distributed.get_world_size() > 1:  # an engine in this process has a group of its own, of one
            place["distributed_executor_backend"] = "external_launcher"  # joins the processes that there are
            rank = distributed.get_rank()
        self.llm = LLM(
            model=str(checkpoint),
            dtype="auto" if self._on_gpu else "float32",
            max_model_len=config.max_prompt_tokens + config.max_response_tokens,
            max_num_seqs=config.max_in_flight,
            enable_prefix_caching=True,
            seed=seed + rank,
            enable_sleep_mode=self._sleeps,
            **place,
            **self._semantics(checkpoint),
        )
        self._tags = TagIds.from_tokenizer(AutoTokenizer.from_pretrained(checkpoint)) if config.attention == "structured" else None
        self._next_id = 0
        self.on_finished: Callable[[Request, int], None] | None = None
        """Told every finished request, and how many tokens of its context the prefix cache had, for those who measure."""

    def _semantics(self, checkpoint: Path) -> dict[str, Any]:
        if self._config.attention == "causal":
            return {}
        vllm_structured.register()
        backend = {"attention_config": {"backend": "FLASH_ATTN"}} if self._on_gpu else {}
        return {"hf_overrides": vllm_structured.hf_overrides(AutoConfig.from_pretrained(checkpoint).architectures[0]), **backend}

    def run(self, rollouts: Iterable[Rollout]) -> Iterator[Rollout]:
        """Carry all rollouts to their end; give each as soon as it is done. At most `max_in_flight` requests at once."""
        engine = self.llm.llm_engine
        waiting = iter(rollouts)
        ready: deque[tuple[Rollout, Request]] = deque()
        in_flight: dict[str, tuple[Rollout, Request]] = {}
        more = True
        while more or ready or in_flight:
            while (more or ready) and len(in_flight) < self._config.max_in_flight:
                if ready:
                    self._submit(*ready.popleft(), in_flight)
                elif (rollout := next(waiting, None)) is not None:
                    ready.extend(self._begin(rollout))
                else:
                    more = False
            for output in engine.step() if in_flight else ():
                if not output.finished:
                    continue
                rollout, request = in_flight.pop(output.request_id)
                if self.on_finished:
                    self.on_finished(request, output.num_cached_tokens or 0)
                ready.extend((rollout, following) for following in rollout.receive(request.slot, _completion(output.outputs[0])))
                if rollout.done:
                    yield rollout

    def _begin(self, rollout: Rollout) -> list[tuple[Rollout, Request]]:
        if self._tags:
            vllm_structured.refuse_blocks(rollout.trajectory.prompt_ids, self._tags)
        return [(rollout, request) for request in rollout.begin()]

    def _submit(self, rollout: Rollout, request: Request, in_flight: dict[str, tuple[Rollout, Request]]) -> None:
        identifier = str(self._next_id)
        self._next_id += 1
        in_flight[identifier] = (rollout, request)
        self.llm.llm_engine.add_request(identifier, {"prompt_token_ids": request.token_ids}, self._sampling(request))

    def _sampling(self, request: Request) -> SamplingParams:
        return SamplingParams(
            temperature=self._config.temperature,
            top_p=self._config.top_p,
            max_tokens=request.max_tokens,
            stop_token_ids=list(request.stop),
            ignore_eos=True,  # request.stop has it
            logit_bias=dict.fromkeys(request.banned, NEVER) or None,
            logprobs=0,
            detokenize=False,
            seed=request.seed if self._on_gpu else None,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def sleep(self) -> None:
        """Give up weights and cache; the weights are not kept."""
        if self._sleeps:
            self.llm.sleep(level=2)

    def wake_for_weights(self) -> None:
        """Have memory for weights again, with nothing in it that counts."""
        if self._sleeps:
            torch.cuda.empty_cache()  # what the trainer has freed
            self.llm.wake_up(tags=["weights"])

    def wake_for_requests(self) -> None:
        """Have memory for the cache again; the weights are there."""
        if self._sleeps:
            self.llm.wake_up(tags=["kv_cache"])

    def sync(self, model: nn.Module) -> None:
        """Take over `model`'s weights."""
        runner = self.llm.llm_engine.model_executor.driver_worker.model_runner
        runner.reload_weights(weights_iterator=((name, weight.clone()) for name, weight in adapters.weights(model)))
        if not self._on_gpu:
            repack_tied_head(runner.get_model())
        self.llm.reset_prefix_cache()


def _completion(output: Any) -> Completion:
    ids = list(output.token_ids)
    return Completion(ids, [entry[token].logprob for token, entry in zip(ids, output.logprobs, strict=True)])
