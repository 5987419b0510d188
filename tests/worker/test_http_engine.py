"""The HTTP driver against real vLLM servers: exact, and nothing lost or doubled when servers fail."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import aiohttp
import pytest
import torch
from aiohttp import web
from transformers import AutoTokenizer

from parallel_r1.config import RolloutConfig
from parallel_r1.rollout import http_engine
from parallel_r1.rollout.engines import open_engine
from parallel_r1.rollout.http_engine import HttpEngine, HttpError
from parallel_r1.rollout.machine import Rollout
from parallel_r1.rollout.records import Studio
from parallel_r1.rollout.serve import Server, serve

from .conftest import ROLLOUT, make_tiny
from .test_exactness import TOLERANCE, gaps, load, sample, worst


def over_http(*urls: str, **changes: object) -> RolloutConfig:
    return RolloutConfig.model_validate(ROLLOUT.model_dump() | {"engine": "http", "endpoints": list(urls)} | changes)


@pytest.fixture(scope="module")
def servers(tiny: Path) -> Iterator[tuple[Server, Server]]:
    """Two servers, started side by side; the last test that uses the second may kill it."""
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        starting = [pool.submit(stack.enter_context, serve(tiny, ROLLOUT)) for _ in range(2)]
        yield tuple(server.result() for server in starting)


@pytest.fixture
def rollouts(tiny: Path) -> list[Rollout]:
    studio = Studio(AutoTokenizer.from_pretrained(tiny), ROLLOUT)
    return [studio.rollout(studio.prompt_ids("bare", f"Tom has {n} apples. How many?"), str(n)) for n in range(64)]


def assert_each_once(finished: list[Rollout], rollouts: list[Rollout]) -> None:
    """None lost, none doubled, each whole."""
    assert sorted(map(id, finished)) == sorted(map(id, rollouts))
    assert all(rollout.done and len(r.completion_ids) <= ROLLOUT.max_response_tokens for rollout in finished for r in [rollout.trajectory])


class Flaky:
    """A proxy that fails: the n-th request gets the n-th fault of a cycle, and `None` lets one through. What is `hidden` is not found."""

    def __init__(self, target: str, faults: list[int | str | None], hidden: str | None = None) -> None:
        self.target, self.faults, self.hidden, self.seen = target, faults, hidden, 0

    def __enter__(self) -> str:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        return asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _start(self) -> str:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        if request.path == self.hidden:
            return web.Response(status=404)
        fault = None
        if request.method == "POST" and request.path in (http_engine.GENERATE, http_engine.COMPLETIONS):
            fault = self.faults[self.seen % len(self.faults)]
            self.seen += 1
        if isinstance(fault, int):
            return web.Response(status=fault, text="told to fail")
        async with aiohttp.ClientSession() as session:
            sent = {"data": await request.read(), "headers": {"Content-Type": "application/json"}}
            async with session.request(request.method, self.target + request.path, **sent) as answer:
                body = await answer.read()
        if fault == "cut":
            request.transport.close()
        return web.Response(status=answer.status, body=body, content_type=answer.content_type)


def test_http_is_exact_in_every_region_before_and_after_new_weights(servers: tuple[Server, Server], tiny: Path) -> None:
    model = load(tiny)
    engine = open_engine(tiny, over_http(servers[0].url), seed=0)
    assert engine.name.startswith("vllm 0.")
    found = gaps(model, sample(engine, tiny), "causal")
    assert all(len(values) > 20 for values in found.values())
    assert max(worst(found).values()) <= TOLERANCE

    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=generator)
    engine.sync(model)
    assert max(worst(gaps(model, sample(engine, tiny), "causal")).values()) <= TOLERANCE


def test_a_server_that_is_asked_for_completions_is_exact_too(servers: tuple[Server, Server], tiny: Path) -> None:
    with Flaky(servers[0].url, [None], hidden=http_engine.GENERATE) as url:
        found = gaps(load(tiny), sample(open_engine(tiny, over_http(url), seed=0), tiny), "causal")
    assert max(worst(found).values()) <= TOLERANCE


@pytest.mark.fault
def test_a_structured_server_is_exact_in_every_region(tiny: Path) -> None:
    """The server's engine process finds the model class through the installed plugin."""
    structured = RolloutConfig.model_validate(ROLLOUT.model_dump() | {"attention": "structured"})
    with serve(tiny, structured) as server:
        found = gaps(load(tiny), sample(open_engine(tiny, over_http(server.url, attention="structured"), seed=0), tiny), "structured")
    assert all(len(values) > 20 for values in found.values())
    assert max(worst(found).values()) <= TOLERANCE


def test_an_engine_makes_its_servers_load_its_checkpoint(servers: tuple[Server, Server], tmp_path: Path, tiny: Path) -> None:
    other = make_tiny(tmp_path / "other", seed=5)
    model = load(other)
    engine = HttpEngine(other, over_http(servers[0].url))
    assert max(worst(gaps(model, sample(engine, other), "causal")).values()) <= TOLERANCE
    HttpEngine(tiny, over_http(servers[0].url))


@pytest.mark.parametrize("faults, reason", [
    ([503, None, 429, None, None], "server errors and overload are asked again"),
    (["cut", None, None], "an answer lost on its way: the request is made again, its completion counted once"),
])  # fmt: skip
def test_failing_answers_are_asked_again(
    faults: list[int | str | None],
    reason: str,
    servers: tuple[Server, Server],
    tiny: Path,
    rollouts: list[Rollout],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_engine, "FIRST_PAUSE", 0.01)
    flaky = Flaky(servers[0].url, faults)
    with flaky as url:
        assert_each_once(list(HttpEngine(tiny, over_http(url)).run(rollouts)), rollouts)
    assert flaky.seen > len(rollouts)


def test_a_refused_request_is_an_error_at_once(servers: tuple[Server, Server], tiny: Path, rollouts: list[Rollout]) -> None:
    flaky = Flaky(servers[0].url, [400])
    with flaky as url, pytest.raises(HttpError, match="status 400: told to fail"):
        list(HttpEngine(tiny, over_http(url, max_in_flight=1)).run(rollouts))
    assert flaky.seen == 1


def test_a_dead_server_is_left_out_and_the_other_does_its_work(servers: tuple[Server, Server], tiny: Path, rollouts: list[Rollout]) -> None:
    engine = HttpEngine(tiny, over_http(*(server.url for server in servers), max_in_flight=8))
    running = engine.run(rollouts)
    finished = [next(running) for _ in range(16)]
    servers[1].kill()
    assert_each_once(finished + list(running), rollouts)


def test_no_server_left_is_said_with_what_each_did(
    servers: tuple[Server, Server], tiny: Path, rollouts: list[Rollout], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_engine, "FIRST_PAUSE", 0.01)
    with Flaky(servers[0].url, [500]) as url:
        with pytest.raises(HttpError, match="no server is left. http://127.0.0.1:.*status 500: told to fail.*run again"):
            list(HttpEngine(tiny, over_http(url)).run(rollouts))
    with pytest.raises(HttpError, match="Is the vLLM server up"):
        HttpEngine(tiny, over_http(url))


def test_a_server_that_is_too_short_is_refused(servers: tuple[Server, Server], tiny: Path) -> None:
    with pytest.raises(HttpError, match="takes 320 tokens.*larger --max-model-len"):
        HttpEngine(tiny, over_http(servers[0].url, max_response_tokens=400))


def test_a_server_of_the_other_attention_is_refused(servers: tuple[Server, Server], tiny: Path) -> None:
    with pytest.raises(HttpError, match="runs the model with attention causal, rollout.attention is structured"):
        HttpEngine(tiny, over_http(servers[0].url, attention="structured"))


@pytest.mark.parametrize("changes, message", [
    ({"engine": "http"}, "needs endpoints"),
    ({"engine": "vllm", "endpoints": ["http://127.0.0.1:1"]}, "used by engine: http alone"),
    ({"engine": "http", "endpoints": ["127.0.0.1:8000"]}, "should match pattern"),
])  # fmt: skip
def test_endpoints_and_engine_go_together(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RolloutConfig.model_validate(changes)
