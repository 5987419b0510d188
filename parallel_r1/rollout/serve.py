"""A vLLM server of one checkpoint on this machine, for as long as a `with` block lasts: a served teacher, tests, benchmarks.

    with serve(checkpoint, config) as server:
        engine = HttpEngine(checkpoint, config.model_copy(update={"engine": "http", "endpoints": [server.url]}))

On the CPU the settings are those of the engine in process (parallel_r1/rollout/vllm_engine.py). `uni`: the default executor would keep a
core busy with waiting. Development mode and the worker extension let a trainer push new weights; so the server is bound to loopback.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from transformers import AutoConfig, AutoTokenizer

from parallel_r1.config import RolloutConfig
from parallel_r1.rollout import VLLM_ENVIRONMENT, reload, vllm_structured
from parallel_r1.student import BASE_TEMPLATE

HOST = "127.0.0.1"
START_SECONDS = 300.0
"""A server that isn't healthy by then has failed."""
END_SECONDS = 15.0
LOG_TAIL = 2000


@dataclass(frozen=True)
class Server:
    """A running server."""

    url: str
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        """End the server and its engine process at once, as a crash would."""
        _signal_group(self.process, signal.SIGKILL)
        self.process.wait()


@contextmanager
def serve(checkpoint: Path, config: RolloutConfig, seed: int = 0, threads: int = 1) -> Iterator[Server]:
    """Start a server, wait until it is healthy, end it and what it started when the block is left. Raises RuntimeError with its log."""
    port = _free_port()
    with tempfile.NamedTemporaryFile(prefix="vllm-server-", suffix=".log") as log:
        streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        process = subprocess.Popen(command(checkpoint, config, port, seed), env=environment(threads), start_new_session=True, **streams)
        try:
            url = f"http://{HOST}:{port}"
            _wait_until_healthy(url, process, log)
            yield Server(url, process)
        finally:
            _end(process)


def command(checkpoint: Path, config: RolloutConfig, port: int, seed: int = 0) -> list[str]:
    """The server's command line. The module, since the `vllm` script looks for a package that the CPU build calls otherwise."""
    arguments = {
        "--model": str(checkpoint),
        "--host": HOST,
        "--port": str(port),
        "--max-model-len": str(config.max_prompt_tokens + config.max_response_tokens),
        "--max-num-seqs": str(config.max_in_flight),
        "--seed": str(seed),
        "--generation-config": "vllm",
        "--worker-extension-cls": reload.EXTENSION,
    }
    switches = ["--enable-prefix-caching", "--enable-prompt-tokens-details", "--disable-uvicorn-access-log", "--disable-log-stats"]
    switches.append("--enable-scale-out")  # token ids in and out without text: see http_engine.py
    if not torch.cuda.is_available():
        arguments |= {"--dtype": "float32", "--block-size": "32", "--distributed-executor-backend": "uni"}
        switches.append("--enforce-eager")
    else:
        arguments["--weight-transfer-config"] = json.dumps({"backend": "nccl"})
    if AutoTokenizer.from_pretrained(checkpoint).chat_template is None:
        arguments["--chat-template"] = BASE_TEMPLATE
    if config.attention == "structured":
        arguments["--hf-overrides"] = json.dumps(vllm_structured.hf_overrides(AutoConfig.from_pretrained(checkpoint).architectures[0]))
        if torch.cuda.is_available():
            arguments["--attention-backend"] = "FLASH_ATTN"
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *(part for pair in arguments.items() for part in pair), *switches]


def environment(threads: int) -> dict[str, str]:
    """This process's environment, with the settings that have no flag."""
    return (
        os.environ
        | VLLM_ENVIRONMENT
        | {
            "OMP_NUM_THREADS": str(threads),
            "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),
            "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
            "VLLM_SERVER_DEV_MODE": "1",
        }
    )


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return listener.getsockname()[1]


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the vLLM server at {url} ended with exit code {process.returncode} while it started:\n{_tail(log)}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise RuntimeError(f"the vLLM server at {url} was not healthy after {START_SECONDS:.0f} s:\n{_tail(log)}")


def _tail(log: IO[bytes]) -> str:
    return Path(log.name).read_text(encoding="utf-8", errors="replace")[-LOG_TAIL:]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask, wait, then kill; the group has the engine's process in it."""
    _signal_group(process, signal.SIGTERM)
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        pass
    _signal_group(process, signal.SIGKILL)
    process.wait()


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """The group bears the leader's id, which nobody else gets while a member lives."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return
