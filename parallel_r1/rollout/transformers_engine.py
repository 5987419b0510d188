"""Causal spawn-join with transformers alone: for machines without vLLM, and as a second opinion on it.

All pending requests are sampled together in batches, left-padded, with a KV cache; every request keeps its own stop tokens, budget and
seed, so a rollout's tokens don't depend on its neighbours (up to the last bits of a padded batch's arithmetic).

A request's context is computed anew: behind a join the paths after the first are read in other places than they were sampled in.
For the structured attention, where they are not, interleaved_engine.py spares that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from parallel_r1.config import RolloutConfig
from parallel_r1.markup import TagIds
from parallel_r1.rollout.machine import Completion, Request, Rollout


class TransformersEngine:
    """Batched sampling with a KV cache."""

    def __init__(self, checkpoint: Path, config: RolloutConfig, seed: int) -> None:
        from parallel_r1.rollout.engines import model_dtype

        self.name = f"transformers {transformers.__version__}"
        self._config = config
        device = "cuda" if torch.cuda.is_available() else "cpu"
        loaded = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=model_dtype(), attn_implementation="sdpa", use_safetensors=True)
        self._model = loaded.to(device).eval()
        self._tags = TagIds.from_tokenizer(AutoTokenizer.from_pretrained(checkpoint))
        self._seed = seed
        self.on_token: Callable[[Request, int], None] | None = None
        """Told every token as soon as it is sampled, for those who want to watch."""

    def run(self, rollouts: Iterable[Rollout]) -> Iterator[Rollout]:
        """Carry all rollouts to their end, `max_in_flight` of them at a time; give each as soon as it is done."""
        waiting = iter(rollouts)
        while batch := list(islice(waiting, self._config.max_in_flight)):
            pending = [(rollout, request) for rollout in batch for request in rollout.begin()]
            while pending:
                successors = []
                for start in range(0, len(pending), self._config.max_in_flight):
                    now = pending[start : start + self._config.max_in_flight]
                    for (rollout, request), completion in zip(now, self._sample([request for _, request in now]), strict=True):
                        successors += [(rollout, following) for following in rollout.receive(request.slot, completion)]
                        if rollout.done:
                            yield rollout
                pending = successors

    def sync(self, model: nn.Module) -> None:
        """Take over `model`'s weights."""
        from parallel_r1 import adapters  # peft takes a second to load, and who only asks needs none

        with torch.no_grad():
            for name, weight in adapters.weights(model):
                self._model.get_parameter(name).copy_(weight)

    @torch.no_grad()
    def _sample(self, requests: list[Request]) -> list[Completion]:
        device = self._model.device
        ids, mask = _left_pad([request.token_ids for request in requests], device)
        generators = [self._generator(request) for request in requests]
        tokens: list[list[int]] = [[] for _ in requests]
        logprobs: list[list[float]] = [[] for _ in requests]
        running = set(range(len(requests)))
        cache = DynamicCache(config=self._model.config)
        step_ids = ids
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        while running:
            logits = (
                self._model(
                    input_ids=step_ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1
                )
                .logits[:, -1]
                .float()
            )
            chosen = torch.zeros(len(requests), dtype=torch.long, device=device)
            scores = torch.log_softmax(logits / self._config.temperature, -1)
            for row in sorted(running):
                token = self._choose(scores[row], requests[row], generators[row])
                chosen[row] = token
                tokens[row].append(token)
                logprobs[row].append(float(scores[row, token]))
                if self.on_token:
                    self.on_token(requests[row], token)
                if token in requests[row].stop or len(tokens[row]) >= requests[row].max_tokens:
                    running.discard(row)
            step_ids, positions = chosen[:, None], positions[:, -1:] + 1
            mask = torch.cat([mask, mask.new_ones(len(requests), 1)], 1)
        return [Completion(*pair) for pair in zip(tokens, logprobs, strict=True)]

    def _generator(self, request: Request) -> torch.Generator:
        return torch.Generator(self._model.device).manual_seed(hash((self._seed, request.seed)) & 0x7FFFFFFF)

    def _choose(self, scores: Tensor, request: Request, generator: torch.Generator) -> int:
        probabilities = scores.exp()
        if request.banned:
            probabilities = probabilities.index_fill(0, torch.tensor(request.banned, device=scores.device), 0.0)
        if self._config.top_p < 1:
            ordered, order = probabilities.sort(descending=True)
            outside = order[ordered.cumsum(0) - ordered > self._config.top_p * ordered.sum()]
            probabilities = probabilities.index_fill(0, outside, 0.0)
        return int(torch.multinomial(probabilities, 1, generator=generator))


def _left_pad(sequences: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask, both (batch, longest)."""
    longest = max(map(len, sequences))
    ids = torch.zeros(len(sequences), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        ids[row, longest - len(sequence) :] = torch.tensor(sequence)
        mask[row, longest - len(sequence) :] = 1
    return ids.to(device), mask.to(device)
