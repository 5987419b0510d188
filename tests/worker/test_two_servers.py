"""Programs against two vLLM servers at once, one of which is killed in the middle: they finish on the other, nothing is lost or doubled.

Greedy sampling, so that a text doesn't depend on which server wrote it: vLLM's CPU sampler takes no seed per request.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from parallel_r1 import jobs
from parallel_r1.config import EvaluateConfig, RolloutConfig
from parallel_r1.rollout.serve import Server, serve

from .conftest import ROLLOUT
from .test_distributed import RL_MODULE, Program, inputs  # noqa: F401
from .test_training import RL

pytestmark = pytest.mark.fault
PROBLEMS, SAMPLES = 40, 3
GREEDY = 1e-6
"""top_p that leaves the likeliest token; vLLM takes a temperature for 0.01 at least."""


@pytest.fixture
def servers(tiny: Path) -> Iterator[tuple[Server, Server]]:
    """Two servers, started side by side; each test may kill one."""
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        starting = [pool.submit(stack.enter_context, serve(tiny, ROLLOUT)) for _ in range(2)]
        yield tuple(server.result() for server in starting)


def over_http(servers: tuple[Server, ...], **changes: Any) -> RolloutConfig:
    endpoints = [server.url for server in servers]
    return RolloutConfig.model_validate(ROLLOUT.model_dump() | {"engine": "http", "endpoints": endpoints, "max_in_flight": 8} | changes)


class KillsAServer(Program):
    """A program that loses a server as soon as it has done a step."""

    def run_and_kill(self, server: Server, step: int) -> None:
        append = self.events.append

        def listen(event: dict[str, Any]) -> None:
            append(event)
            if event.get("step", 0) >= step and server.process.poll() is None:
                server.kill()

        self.listen = listen
        self.run()
        assert server.process.poll() is not None


def evaluation(rollout: RolloutConfig) -> EvaluateConfig:
    return EvaluateConfig(samples=SAMPLES, prompt="bare", base_prompt="bare", rollout=rollout, bootstrap=100)


def test_evaluation_goes_on_with_one_server(tmp_path: Path, servers: tuple[Server, Server], inputs: dict[str, Path]) -> None:  # noqa: F811
    problems = [{"id": f"s{n}", "problem": f"{n}+1=?", "answer": str(n + 1), "source": "test"} for n in range(PROBLEMS)]
    (tmp_path / "sums").mkdir()
    jobs.write_lines(tmp_path / "sums" / "problems.jsonl", problems)
    given = {"checkpoint": inputs["checkpoint"], "sums": tmp_path / "sums"}
    undisturbed = KillsAServer(tmp_path / "one", "parallel_r1.evaluation", evaluation(over_http(servers[:1], top_p=GREEDY)), given)
    undisturbed.run()
    robbed = KillsAServer(tmp_path / "two", "parallel_r1.evaluation", evaluation(over_http(servers, top_p=GREEDY)), given)
    robbed.run_and_kill(servers[1], step=20)

    rows = {program: jobs.read_lines(program.folder / "out" / "rollouts.jsonl") for program in (undisturbed, robbed)}
    names = [(row["problem_id"], row["sample"]) for row in rows[robbed]]
    assert names == [(f"s{n}", sample) for n in range(PROBLEMS) for sample in range(SAMPLES)], "each once, none missing, in order"
    assert [row["text"] for row in rows[robbed]] == [row["text"] for row in rows[undisturbed]], "whichever server wrote it"


def test_reinforcement_by_two_processes_goes_on_with_one_server(
    tmp_path: Path,
    servers: tuple[Server, Server],
    inputs: dict[str, Path],  # noqa: F811
) -> None:
    changes = {"steps": 5, "reward": "parallel_only", "micro_batch_size": 2, "sample_rollouts": 8}
    config = RL.model_copy(update={**changes, "rollout": over_http(servers)})
    program = KillsAServer(tmp_path / "rl", RL_MODULE, config, inputs, processes=2)
    program.run_and_kill(servers[1], step=2)
    assert [row["step"] for row in program.rows] == [1, 2, 3, 4, 5]
    assert max(row["rollout_gap/main/max"] for row in program.rows) < 1e-3, "every rollout was sampled with the weights of its step"
    kept = [(row["step"], row["problem_id"], row["sample"]) for row in jobs.read_lines(program.folder / "out" / "rollouts.jsonl")]
    assert len(kept) == len(set(kept)) == 5 * 8, "none lost, none doubled"
