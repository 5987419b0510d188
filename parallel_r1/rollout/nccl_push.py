"""A trainer's weights to vLLM servers over NCCL, by vLLM's own weight transfer; for trainer and servers on GPUs.

Servers are started with `--weight-transfer-config '{"backend": "nccl"}'` and VLLM_SERVER_DEV_MODE=1 (parallel_r1/rollout/serve.py does
so on a GPU). The trainer's first process and the workers of one server are a group of their own, so a server has any size; they get the
weights one after the other. All processes of the trainer have to push at the same time: they gather what they hold a part of.

Not run yet: it takes two GPUs. docs/distributed.md says what was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import requests
import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine
from vllm.utils.network_utils import get_ip, get_open_port

SECONDS = 300
"""A server that doesn't answer a call of the transfer for so long has failed."""

Weights = Callable[[], Iterable[tuple[str, Tensor]]]


class Source(WeightSource):
    """The trainer's weights as the servers load them: by name, whole, in the servers' dtype."""

    def __init__(self, weights: Weights, dtype: torch.dtype) -> None:
        self._weights, self._dtype = weights, dtype
        self._metadata: list[ParamMeta] = []

    def metadata(self) -> list[ParamMeta]:
        """What iteration yields; looked up once."""
        self._metadata = self._metadata or [ParamMeta(name, weight.dtype, tuple(weight.shape)) for name, weight in self]
        return self._metadata

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, weight in self._weights():
            yield name, weight.to(self._dtype)


class Transfer(Protocol):
    """A group that is open between the trainer and one server."""

    def send_weights(self) -> None:
        """Send all weights and have the server load them."""


Open = Callable[[str, Source, int], Transfer]


def open_transfer(url: str, source: Source, rank: int) -> Transfer:
    """Meet the workers of one server; `rank` is this process's among the trainer's."""
    workers = 0
    if rank == 0:
        answer = requests.get(f"{url}/get_world_size", timeout=SECONDS)
        answer.raise_for_status()
        workers = answer.json()["world_size"]
    meeting = NCCLTrainerInitInfo(master_address=get_ip(), master_port=get_open_port(), world_size=1 + workers, rank=rank)
    return NCCLTrainerWeightTransferEngine.trainer_init(meeting, client=HTTPVLLMWeightSyncClient(url, SECONDS), source=source)


class NcclPush:
    """Pushes weights to all servers. Groups are opened at the first push, as the servers wait in them."""

    def __init__(self, urls: Sequence[str], source: Source, rank: int, open_one: Open = open_transfer) -> None:
        self._urls = [url.rstrip("/") for url in urls]
        self._source, self._rank, self._open = source, rank, open_one
        self._transfers: list[Transfer] = []

    def push(self) -> None:
        """Send to one server after the other, and make it forget the keys of the old weights. Every process calls this."""
        if not self._transfers:
            self._transfers = [self._open(url, self._source, self._rank) for url in self._urls]
        for url, transfer in zip(self._urls, self._transfers, strict=True):
            transfer.send_weights()
            if self._rank == 0:
                requests.post(f"{url}/reset_prefix_cache", timeout=SECONDS).raise_for_status()
