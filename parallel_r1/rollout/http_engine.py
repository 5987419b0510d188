"""Spawn-join over vLLM servers: token ids in and out, any number of servers, nothing lost and nothing doubled.

Ids go to `/inference/v1/generate` where a server was started with `--enable-scale-out`: it makes no text and spares the server a third of
its work. Else to `/v1/completions`, which every vLLM server has.

A request is answered once or asked again from its beginning; the state machine hears of whole completions only. A server that can't be
reached, is overloaded (429) or fails (5xx) gets a pause that doubles; its requests go to the others meanwhile. After `STRIKES` pauses in a
row it is left out for good. Any other answer is an error at once: asking again would not help.

Per-request seeds are sent to GPU servers only: vLLM's CPU sampler fails on them with chunked prefill.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Collection, Coroutine, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
from safetensors.torch import save_file
from torch import nn
from transformers import AutoTokenizer

from parallel_r1 import adapters
from parallel_r1.config import Attention, RolloutConfig
from parallel_r1.markup import TagIds
from parallel_r1.rollout import vllm_structured
from parallel_r1.rollout.machine import NEVER, Completion, Request, Rollout

GENERATE, COMPLETIONS = "/inference/v1/generate", "/v1/completions"
AHEAD = 1.5
"""Requests asked at once for each that a server runs: successors come over the wire, and its batch stays full only if others wait there."""
FIRST_PAUSE = 0.25
"""Seconds before a failing server is asked again; each further pause is twice as long."""
STRIKES = 6
"""Failures in a row, a pause between each, after which a server is left out: about 8 s."""
ATTEMPTS = 20
"""Failures after which a request is given up, however well the servers answer others."""
TIMEOUT = aiohttp.ClientTimeout(total=None, connect=10, sock_read=600)

Result = TypeVar("Result")


class HttpError(RuntimeError):
    """Servers can't be used: names them, what they said, and the way out."""


class _Unavailable(Exception):
    """A failure that another attempt, or another server, may not have."""


class _Server:
    """One endpoint, and how it has behaved."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.model = ""
        self.seeded = False
        self.ids_only = False
        """Whether it answers at `/inference/v1/generate`."""
        self.attention: Attention = "causal"
        self.in_flight = 0
        self.strikes = 0
        self.retry_at = 0.0
        self.failure = ""

    @property
    def lost(self) -> bool:
        return self.strikes >= STRIKES

    def fail(self, began: float, failure: str) -> None:
        """Note a failure of a request that was sent at `began`; those sent before the present pause began say nothing new."""
        self.failure = failure
        if began >= self.retry_at:
            self.strikes += 1
            self.retry_at = time.monotonic() + FIRST_PAUSE * 2 ** (self.strikes - 1)

    def succeed(self) -> None:
        """Note an answer."""
        self.strikes = 0
        self.retry_at = 0.0


class HttpEngine:
    """Spawn-join over one or several OpenAI-compatible vLLM servers."""

    def __init__(self, checkpoint: Path, config: RolloutConfig) -> None:
        """Connect, and make all servers load `checkpoint`. Raises HttpError where one can't."""
        self._config = config
        self._servers = [_Server(url) for url in config.endpoints]
        self._tags = TagIds.from_tokenizer(AutoTokenizer.from_pretrained(checkpoint)) if config.attention == "structured" else None
        version = asyncio.run(self._connect(checkpoint.resolve()))
        self.name = f"vllm {version} over HTTP" + (f", {len(self._servers)} servers" if len(self._servers) > 1 else "")

    # starting, weights

    async def _connect(self, checkpoint: Path) -> str:
        async with aiohttp.ClientSession(timeout=TIMEOUT) as session:
            versions = await asyncio.gather(*(self._meet(session, server, checkpoint) for server in self._servers))
        return versions[0]

    async def _meet(self, session: aiohttp.ClientSession, server: _Server, checkpoint: Path) -> str:
        """Learn what a server serves, make it load the checkpoint; gives vLLM's version."""
        try:
            (model,) = (await _get(session, f"{server.url}/v1/models"))["data"]
            version = (await _get(session, f"{server.url}/version"))["version"]
            async with session.get(f"{server.url}{GENERATE}") as response:
                server.ids_only = response.status == 405  # there, but not to get; 404: not there
        except (aiohttp.ClientError, TimeoutError) as error:
            raise HttpError(f"{server.url}: no answer ({_describe(error)}). Is the vLLM server up? rollout.endpoints names it") from None
        server.model = model["id"]
        asked = self._config.max_prompt_tokens + self._config.max_response_tokens
        if model["max_model_len"] < asked:
            raise HttpError(
                f"{server.url} takes {model['max_model_len']} tokens, rollout.max_prompt_tokens + max_response_tokens = {asked}: "
                "start it with a larger --max-model-len, or lower one of them"
            )
        served_already = Path(model["root"]).resolve() == checkpoint
        if not await self._load(session, server, checkpoint) and not served_already:
            raise HttpError(f"{server.url} serves {model['root']}, not {checkpoint}. {_NEW_WEIGHTS}")
        if server.attention != self._config.attention:
            raise HttpError(
                f"{server.url} runs the model with attention {server.attention}, rollout.attention is {self._config.attention}: "
                "parallel_r1/rollout/serve.py starts servers of either"
            )
        return version

    async def _load(self, session: aiohttp.ClientSession, server: _Server, checkpoint: Path) -> bool:
        """Make a server take a checkpoint's weights; False where it was not started for that."""
        order = {"method": "load_checkpoint", "args": [str(checkpoint)]}
        async with session.post(f"{server.url}/collective_rpc", json=order) as response:
            text = await response.text()
            if response.status == 404 or "load_checkpoint" in text:
                return False
            if response.status != 200:
                raise HttpError(f"{server.url} can't load {checkpoint}: {text[:500]}. Does it see that folder, of the same architecture?")
            worker = (await response.json())["results"][0]
        server.seeded, server.attention = worker["device"] != "cpu", worker["attention"]
        async with session.post(f"{server.url}/reset_prefix_cache") as response:
            if response.status != 200:
                raise HttpError(f"{server.url} keeps keys of the old weights: {await response.text()}")
        return True

    def sync(self, model: nn.Module) -> None:
        """Take over `model`'s weights, through a folder that the servers can read. Raises HttpError where one was not started for that."""
        folder = Path(tempfile.mkdtemp(prefix="parallel-r1-weights-"))
        try:
            save_file({name: weight.cpu().contiguous() for name, weight in adapters.weights(model)}, folder / "model.safetensors")
            asyncio.run(self._push(folder))
        finally:
            shutil.rmtree(folder)

    async def _push(self, folder: Path) -> None:
        async with aiohttp.ClientSession(timeout=TIMEOUT) as session:
            await asyncio.gather(*(self._renew(session, server, folder) for server in self._living()))
        self._living()

    async def _renew(self, session: aiohttp.ClientSession, server: _Server, folder: Path) -> None:
        """Give a server new weights. One that doesn't answer is left out for good, as it would go on with the old ones."""
        try:
            loaded = await self._load(session, server, folder)
        except (aiohttp.ClientError, TimeoutError) as error:
            server.failure, server.strikes = f"no answer to new weights ({_describe(error)})", STRIKES
            return
        if not loaded:
            raise HttpError(f"{server.url} can't take new weights. {_NEW_WEIGHTS}")

    @property
    def lost(self) -> list[str]:
        """Servers that were left out for good."""
        return [server.url for server in self._servers if server.lost]

    def leave_out(self, urls: Collection[str]) -> None:
        """Use these no more: another process that shares the servers has lost them. Raises HttpError when none is left."""
        for server in self._servers:
            if server.url in urls and not server.lost:
                server.failure, server.strikes = "lost by another process of the training", STRIKES
        self._living()

    # rollouts

    def run(self, rollouts: Iterable[Rollout]) -> Iterator[Rollout]:
        """Carry all rollouts to their end; give each as soon as it is done. Each server runs `max_in_flight` requests at once."""
        with asyncio.Runner() as runner:
            finished = self._carry_out(iter(rollouts))
            try:
                while (rollout := runner.run(_next(finished))) is not None:
                    yield rollout
            finally:
                runner.run(_as_coroutine(finished.aclose()))

    async def _carry_out(self, waiting: Iterator[Rollout]) -> AsyncIterator[Rollout]:
        """Successors go before new rollouts: what their contexts share is still in the prefix cache."""
        ready: deque[tuple[Rollout, Request]] = deque()
        in_flight: dict[asyncio.Task[Completion], tuple[Rollout, Request]] = {}
        more = True
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=TIMEOUT) as session:
            try:
                while more or ready or in_flight:
                    while (more or ready) and len(in_flight) < int(AHEAD * self._config.max_in_flight) * len(self._living()):
                        if not ready and (rollout := next(waiting, None)) is not None:
                            self._admit(rollout)
                            ready.extend((rollout, request) for request in rollout.begin())
                        elif not ready:
                            more = False
                        if ready:
                            rollout, request = ready.popleft()
                            in_flight[asyncio.create_task(self._complete(session, request))] = (rollout, request)
                    done, _ = await asyncio.wait(in_flight, return_when=asyncio.FIRST_COMPLETED) if in_flight else ((), ())
                    for task in done:
                        rollout, request = in_flight.pop(task)
                        ready.extend((rollout, following) for following in rollout.receive(request.slot, task.result()))
                        if rollout.done:
                            yield rollout
            finally:
                for task in in_flight:
                    task.cancel()
                await asyncio.gather(*in_flight, return_exceptions=True)

    def _admit(self, rollout: Rollout) -> None:
        if self._tags:
            vllm_structured.refuse_blocks(rollout.trajectory.prompt_ids, self._tags)

    def _living(self) -> list[_Server]:
        living = [server for server in self._servers if not server.lost]
        if not living:
            said = "; ".join(f"{server.url}: {server.failure}" for server in self._servers)
            raise HttpError(f"no server is left. {said}. Finished rollouts are kept: start the servers and run again to go on")
        return living

    async def _complete(self, session: aiohttp.ClientSession, request: Request) -> Completion:
        """Ask until one server answers."""
        for _ in range(ATTEMPTS):
            server = await self._choose()
            began = time.monotonic()
            server.in_flight += 1
            try:
                completion = await self._ask(session, server, request)
            except (_Unavailable, aiohttp.ClientError, TimeoutError) as error:
                server.fail(began, _describe(error))
            else:
                server.succeed()
                return completion
            finally:
                server.in_flight -= 1
        raise HttpError(f"a request failed {ATTEMPTS} times while others were answered, the last time at {server.url}: {server.failure}")

    async def _choose(self) -> _Server:
        """The least busy server that makes no pause; waits for one. Raises HttpError when none is left."""
        while True:
            living, now = self._living(), time.monotonic()
            if usable := [server for server in living if server.retry_at <= now]:
                return min(usable, key=lambda server: server.in_flight)
            await asyncio.sleep(min(server.retry_at for server in living) - now)

    async def _ask(self, session: aiohttp.ClientSession, server: _Server, request: Request) -> Completion:
        path, body = (GENERATE, self._ids_only(server, request)) if server.ids_only else (COMPLETIONS, self._as_completion(server, request))
        async with session.post(f"{server.url}{path}", json=body) as response:
            if response.status == 429 or response.status >= 500:
                raise _Unavailable(f"status {response.status}: {(await response.text())[:300]}")
            if response.status != 200:
                raise HttpError(f"{server.url}: status {response.status}: {(await response.text())[:500]}")
            answer = await response.json()
        try:
            (choice,) = answer["choices"]
            logprobs = choice["logprobs"]
            listed = [token["logprob"] for token in logprobs["content"]] if server.ids_only else logprobs["token_logprobs"]
            return Completion(choice["token_ids"], listed)
        except (KeyError, TypeError, ValueError):
            raise HttpError(f"{server.url}: no token ids or log-probs; is it vLLM, 0.11 or later? {str(answer)[:300]}") from None

    def _ids_only(self, server: _Server, request: Request) -> dict[str, Any]:
        sampling = self._sampling(server, request) | {"detokenize": False}
        return {"model": server.model, "token_ids": request.token_ids, "sampling_params": sampling}

    def _as_completion(self, server: _Server, request: Request) -> dict[str, Any]:
        body = {"model": server.model, "prompt": request.token_ids, "return_token_ids": True, "return_tokens_as_token_ids": True}
        return body | self._sampling(server, request)

    def _sampling(self, server: _Server, request: Request) -> dict[str, Any]:
        """All that a checkpoint's generation config could change is said."""
        sampling = {
            "max_tokens": request.max_tokens,
            "temperature": self._config.temperature,
            "top_p": self._config.top_p,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": request.stop,
            "ignore_eos": True,  # request.stop has it
            "logprobs": 0,
            "skip_special_tokens": False,
        }
        if request.banned:
            sampling["logit_bias"] = {str(token): NEVER for token in request.banned}
        return sampling | ({"seed": request.seed} if server.seeded else {})


_NEW_WEIGHTS = (
    "It takes other weights only with VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls parallel_r1.rollout.reload.Reload "
    "(parallel_r1/rollout/serve.py starts such a server): start it so, or with the right --model"
)


async def _get(session: aiohttp.ClientSession, url: str) -> Any:
    async with session.get(url) as response:
        response.raise_for_status()
        return await response.json()


async def _next(finished: AsyncIterator[Rollout]) -> Rollout | None:
    return await anext(finished, None)


async def _as_coroutine(awaitable: Coroutine[Any, Any, Result]) -> Result:
    return await awaitable


def _describe(error: BaseException) -> str:
    return str(error) if isinstance(error, _Unavailable) else f"{type(error).__name__} {error}".strip()
