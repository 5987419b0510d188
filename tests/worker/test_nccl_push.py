"""The order of a push to servers over NCCL; the transfer itself needs GPUs and is only written down here."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator

import pytest
import torch

from parallel_r1.rollout.nccl_push import NcclPush, Source

asked: list[str] = []


class Answer(http.server.BaseHTTPRequestHandler):
    """A server that writes down what it is asked."""

    def do_POST(self) -> None:
        asked.append(f"{self.server.server_port}{self.path}")  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Silence."""


@pytest.fixture
def servers() -> Iterator[list[int]]:
    running = [http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer) for _ in range(2)]
    for server in running:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    asked.clear()
    yield [server.server_port for server in running]
    for server in running:
        server.shutdown()
        server.server_close()


class Written:
    """A transfer that writes down what it sends."""

    def __init__(self, url: str, source: Source, rank: int) -> None:
        self.port, self.source = url.rsplit(":", 1)[1], source
        asked.append(f"{self.port} met by {rank}")

    def send_weights(self) -> None:
        asked.append(f"{self.port} gets {', '.join(f'{name} {float(weight.sum()):g}' for name, weight in self.source)}")


def source(model: torch.nn.Module) -> Source:
    return Source(model.named_parameters, torch.bfloat16)


def test_each_server_gets_the_weights_then_forgets_its_cache(servers: list[int]) -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    urls = [f"http://127.0.0.1:{port}/" for port in servers]
    push = NcclPush(urls, source(model), rank=0, open_one=Written)
    assert not asked, "nobody is met before there is something to push: the servers would wait"
    for value in (1.0, 3.0):
        torch.nn.init.constant_(model.weight, value)
        push.push()
    a, b = servers
    met = [f"{a} met by 0", f"{b} met by 0"]
    assert asked == met + [
        line for total in (2, 6) for port in (a, b) for line in (f"{port} gets weight {total}", f"{port}/reset_prefix_cache")
    ]


def test_the_other_processes_of_the_trainer_only_gather(servers: list[int]) -> None:
    push = NcclPush([f"http://127.0.0.1:{servers[0]}"], source(torch.nn.Linear(2, 1)), rank=1, open_one=Written)
    push.push()
    assert [line for line in asked if "reset" in line] == []


def test_what_is_announced_is_what_is_sent() -> None:
    """As vLLM demands: the workers cut the stream by what was announced."""
    weights = source(torch.nn.Linear(3, 2))
    announced = [(meta.name, meta.dtype, meta.shape) for meta in weights.metadata()]
    assert announced == [(name, weight.dtype, tuple(weight.shape)) for name, weight in weights]
    assert announced == [("weight", torch.bfloat16, (2, 3)), ("bias", torch.bfloat16, (2,))]
