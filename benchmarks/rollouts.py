"""What spawn-join costs over plain generation of the same number of sampled tokens, at the same number of requests in flight.

Every ratio is the mean over alternations in one run (plain, parallel, plain, ...), since single runs differ by 15 % on a small machine;
the same ratio by this process's processor seconds is printed beside it: neighbours on the machine disturb it less.
All kinds return log-probs of the sampled tokens, as training needs them.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from benchmarks.plans import Plan, PlannedRollout, make_plans, rollout_config
from parallel_r1 import student
from parallel_r1.config import RolloutConfig, ScratchStudent
from parallel_r1.markup import TagIds
from parallel_r1.rollout.engines import Engine
from parallel_r1.rollout.http_engine import HttpEngine
from parallel_r1.rollout.machine import Completion, Request, Rollout
from parallel_r1.rollout.serve import serve
from parallel_r1.rollout.vllm_engine import VllmEngine

PROMPTS, SAMPLES, CAP = 64, 4, 64
ALTERNATIONS, ALTERNATIONS_OF_TABLE = 3, 1
TABLE = Path(__file__).with_name("rollouts.md")
Speeds = dict[str, list[float]]
"""Sampled tokens per second, by kind, one for each alternation; of the wall clock and of the processor."""


@dataclass
class Bench:
    """A model of the demo's size, an engine on it, and the work."""

    checkpoint: Path
    config: RolloutConfig
    engine: VllmEngine
    tags: TagIds
    newline_ids: list[int]
    plans: list[Plan]

    @classmethod
    def of(cls, folder: Path, num_paths: int = 2, cap: int = CAP, prompts: int = PROMPTS, samples: int = SAMPLES) -> Bench:
        """Random weights: what is sampled doesn't matter, and no run of the demo is needed."""
        tokenizer = student.train_tokenizer(["Tom has 12 apples. He buys 5. How many apples now?", "In order. 12+5=17."], 512)
        if not (folder / "config.json").exists():
            student.save(student.scratch_model(ScratchStudent(problems={"any": 1.0}), tokenizer, seed=0), tokenizer, folder)
        config = rollout_config(num_paths, cap)
        tags = TagIds.from_tokenizer(tokenizer)
        plans = make_plans(prompts, samples, num_paths, tags, range(10, 200))
        newline_ids = tokenizer.encode("\n", add_special_tokens=False)
        return cls(folder, config, VllmEngine(folder, config, seed=0), tags, newline_ids, plans)

    @property
    def sampled(self) -> int:
        """Tokens that one pass over all plans samples."""
        return sum(plan.sampled for plan in self.plans)

    def rollouts(self) -> list[PlannedRollout]:
        """Fresh ones."""
        return [PlannedRollout(plan, self.config, self.tags, self.newline_ids) for plan in self.plans]

    def plain(self) -> None:
        """One request per plan, of as many tokens, by vLLM's own loop."""
        prompts = [{"prompt_token_ids": plan.prompt_ids} for plan in self.plans]
        self.engine.llm.generate(prompts, [_free_running(plan.sampled) for plan in self.plans], use_tqdm=False)

    def parallel(self, engine: Engine | None = None) -> None:
        """Spawn-join on the given engine, by default the one in process."""
        finished = list((engine or self.engine).run(self.rollouts()))
        assert sum(sum(rollout.trajectory.loss_mask) for rollout in finished) == self.sampled, "both sides sample the same number of tokens"

    def lockstep(self) -> None:
        """Spawn-join as a loop of rounds: as many rollouts as the cap at a time, all waiting for the slowest request of each round."""
        rollouts = self.rollouts()
        for start in range(0, len(rollouts), self.config.max_in_flight):
            pending: list[tuple[Rollout, Request]] = []
            for rollout in rollouts[start : start + self.config.max_in_flight]:
                pending += [(rollout, request) for request in rollout.begin()]
            while pending:
                prompts = [{"prompt_token_ids": request.token_ids} for _, request in pending]
                outputs = self.engine.llm.generate(prompts, [_free_running(request.max_tokens) for _, request in pending], use_tqdm=False)
                following = []
                for (rollout, request), output in zip(pending, outputs, strict=True):
                    ids = output.outputs[0].token_ids
                    logprobs = [entry[token].logprob for token, entry in zip(ids, output.outputs[0].logprobs, strict=True)]
                    following += [(rollout, successor) for successor in rollout.receive(request.slot, Completion(ids, logprobs))]
                pending = following

    def speeds(self, kinds: dict[str, Callable[[], None]], alternations: int = ALTERNATIONS) -> Speeds:
        """Alternate between the kinds, each from an empty prefix cache, after one pass that isn't counted."""
        found: Speeds = defaultdict(list)
        for alternation in range(-1, alternations):
            for name, work in kinds.items():
                self.engine.llm.reset_prefix_cache()
                began, busy = time.perf_counter(), time.process_time()
                work()
                if alternation >= 0:
                    found[name].append(self.sampled / (time.perf_counter() - began))
                    found[f"{name}, per processor second"].append(self.sampled / (time.process_time() - busy))
        return found

    def join_hit_share(self) -> float:
        """Share of the prompt tokens of summaries, the requests after a join, that the prefix cache had."""
        prompt = cached = 0

        def count(request: Request, cached_tokens: int) -> None:
            nonlocal prompt, cached
            if request.token_ids[-1] == self.tags.summary:
                prompt, cached = prompt + len(request.token_ids), cached + cached_tokens

        self.engine.on_finished = count
        self.engine.llm.reset_prefix_cache()
        self.parallel()
        self.engine.on_finished = None
        return cached / prompt


def _free_running(tokens: int) -> SamplingParams:
    return SamplingParams(
        temperature=1.0, max_tokens=tokens, ignore_eos=True, logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
    )


def ratio(speeds: Speeds, name: str, to: str) -> float:
    """Mean over the alternations of one kind's speed over another's."""
    return statistics.mean(a / b for a, b in zip(speeds[name], speeds[to], strict=True))


def in_process() -> dict[str, float]:
    """rollout_vs_plain and rollout_vs_lockstep."""
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench.of(Path(folder))
        speeds = bench.speeds({"plain": bench.plain, "parallel": bench.parallel, "lockstep": bench.lockstep})
    _show(speeds)
    return {"rollout_vs_plain": ratio(speeds, "parallel", "plain"), "rollout_vs_lockstep": ratio(speeds, "parallel", "lockstep")}


def over_http() -> dict[str, float]:
    """rollout_http_vs_plain: over one server, against plain generation in process, the stricter of the two baselines."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        bench = Bench.of(Path(folder))
        server = stack.enter_context(serve(bench.checkpoint, bench.config))
        engine = HttpEngine(bench.checkpoint, bench.config.model_copy(update={"engine": "http", "endpoints": [server.url]}))
        speeds = bench.speeds({"plain": bench.plain, "http": lambda: bench.parallel(engine)})
    _show(speeds)
    return {"rollout_http_vs_plain": ratio(speeds, "http", "plain")}


def table(command: str, at: str) -> dict[str, float]:
    """benchmarks/rollouts.md: the ratio and the prefix cache's hit share at the join by paths and requests in flight."""
    rows = []
    shares = []
    with tempfile.TemporaryDirectory() as folder:
        for num_paths in (2, 4):
            for cap in (16, 64, 256):
                bench = Bench.of(Path(folder), num_paths, cap, prompts=max(8, cap // 4))
                speeds = bench.speeds({"plain": bench.plain, "parallel": bench.parallel}, ALTERNATIONS_OF_TABLE)
                shares.append(bench.join_hit_share())
                plain, parallel = (statistics.mean(speeds[kind]) for kind in ("plain", "parallel"))
                rows.append(f"| {num_paths} | {cap} | {len(bench.plans)} | {bench.sampled:,} | {plain:,.0f} | {parallel:,.0f} "
                            f"| {ratio(speeds, 'parallel', 'plain'):.2f} | {shares[-1]:.0%} |")  # fmt: skip
                print(rows[-1], flush=True)
                del bench
    TABLE.write_text(_PAGE.format(at=at, command=command, alternations=ALTERNATIONS_OF_TABLE, rows="\n".join(rows)), encoding="utf-8")
    return {"join_prefix_hit_share": statistics.mean(shares)}


_PAGE = """\
# Parallel rollouts over plain generation

Measured {at} by `{command}`, which writes this file.

Sampled tokens per second of spawn-join (vLLM stepped in process, causal) and of plain vLLM generation of the same number of sampled tokens
at the same number of requests in flight; {alternations} pass of each after one that isn't counted, from an empty prefix cache. Model of the demo's size,
float32, CPU. The last column is the share of the summaries' prompt tokens, the requests after a join, that the prefix cache had.

| paths | in flight | rollouts | sampled tokens | plain, tokens/s | parallel, tokens/s | ratio | cached at the join |
|--:|--:|--:|--:|--:|--:|--:|--:|
{rows}
"""


def _show(speeds: Speeds) -> None:
    for name, values in speeds.items():
        print(f"  {name}: {statistics.mean(values):,.0f} tokens/s ({', '.join(f'{value:,.0f}' for value in values)})", flush=True)
