"""Stage programs as supervised processes in the worker environment.

A program prints JSON events on stdout (parallel_r1/jobs.py); everything else it prints is log text. Where it is several processes
(tasks/launch.py), each line says in front whose it is. The whole process tree ends when `supervise` returns or raises, and when this
process dies, however it dies (tasks/warden.py).
"""

from __future__ import annotations

import json
import os
import re
import selectors
import subprocess
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from parallel_r1.rollout import VLLM_ENVIRONMENT

WARDEN = Path(__file__).with_name("warden.py")
TAIL_LINES = 30
ENDED_FROM_OUTSIDE = 143
WARDEN_SECONDS = 25.0
RANK = re.compile(r"\[rank (\d+)\] ")
"""What a line of one of several processes begins with."""
FIRST_TO_FAIL = re.compile(r"Root Cause.*?rank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)", re.DOTALL)
"""What torchrun says of the process that died first."""

OnEvent = Callable[[dict[str, Any]], None]
OnText = Callable[[str], None]


class StageFailed(RuntimeError):
    """A stage program ended with an error, hung, or broke off without its last event."""


class Tail:
    """The last lines of a program, of each of its processes if it has several."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[str]] = defaultdict(lambda: deque(maxlen=TAIL_LINES))

    def add(self, rank: str, line: str) -> None:
        """Keep a line of the process `rank`, or of the program itself where that is empty."""
        self._lines[rank].append(line)

    def __str__(self) -> str:
        if set(self._lines) <= {""}:
            return "Its last lines:\n" + "\n".join(self._lines[""])
        first = FIRST_TO_FAIL.search("\n".join(self._lines[""]))
        said = f"Rank {first[1]} was the first to fail, with exit code {first[2]}. " if first else "\n".join([*self._lines[""], ""])
        ranks = sorted(filter(None, self._lines), key=lambda rank: (not first or rank != first[1], int(rank)))
        return said + "".join(f"Last lines of rank {rank}:\n" + "\n".join(self._lines[rank]) + "\n" for rank in ranks)


class Lifelines:
    """The lifelines of the programs that run now, so that a leaving flow can end programs of its other threads."""

    def __init__(self) -> None:
        self._ends: set[int] = set()
        self._lock = threading.Lock()

    def open(self) -> tuple[int, int]:
        """A new pipe: the warden's end and ours."""
        theirs, ours = os.pipe()
        with self._lock:
            self._ends.add(ours)
        return theirs, ours

    def cut(self, ours: int) -> None:
        """Close our end, which tells the warden to end its tree. Once only: the number may be reused afterwards."""
        with self._lock:
            if ours in self._ends:
                self._ends.remove(ours)
                os.close(ours)

    def cut_all(self) -> None:
        """End every program that runs now."""
        with self._lock:
            ends = list(self._ends)
        for ours in ends:
            self.cut(ours)


LIFELINES = Lifelines()


@contextmanager
def programs_end_with_flow() -> Iterator[None]:
    """Ends all running programs when the block is left by an error, an interrupt or a cancellation."""
    try:
        yield
    except BaseException:
        LIFELINES.cut_all()
        raise


def program_environment(threads: int, offline: bool) -> dict[str, str]:
    """The environment of a stage program: this process's, without Prefect's settings, with quiet and bounded libraries."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment |= VLLM_ENVIRONMENT | {
        "OMP_NUM_THREADS": str(threads),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "DO_NOT_TRACK": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    if offline:
        environment["HF_HUB_OFFLINE"] = "1"
    return environment


def supervise(
    name: str,
    command: Sequence[str | os.PathLike[str]],
    *,
    log: Path,
    on_event: OnEvent,
    on_text: OnText = lambda text: None,
    hang_seconds: float,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> dict[str, float]:
    """Run a stage program, called `name` in errors, to its end and return the metrics of its `done` event.

    Every line that is no event goes to the file `log` and to `on_text`. Raises StageFailed with the exit code and the last lines
    of the log when the program fails, prints nothing for `hang_seconds`, or ends without `done`.
    """
    theirs, ours = LIFELINES.open()
    warden = subprocess.Popen(
        [sys.executable, "-S", "-E", str(WARDEN), str(theirs), *map(os.fspath, command)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=environment, cwd=folder, pass_fds=(theirs,), start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    tail = Tail()
    done: dict[str, Any] | None = None
    try:
        with log.open("a", encoding="utf-8") as file:
            for line in _lines(warden, hang_seconds, name, tail):
                whose = RANK.match(line)
                own = line[whose.end() :] if whose else line
                event = _event(own)
                if event is None:
                    tail.add(whose[1] if whose else "", own)
                    print(line, file=file, flush=True)
                    on_text(line)
                elif event["event"] == "done":
                    done = event
                    on_event(event)
                else:
                    on_event(event)
        code = warden.wait()
    finally:
        LIFELINES.cut(ours)
        _await_end(warden)
    if code != 0 or done is None:
        how = "without its last event" if code == 0 else "from outside" if code == ENDED_FROM_OUTSIDE else f"with exit code {code}"
        raise StageFailed(f"{name} ended {how}. Full log: {log}. {tail}")
    return done["metrics"]


def _event(line: str) -> dict[str, Any] | None:
    if not line.startswith('{"event"'):
        return None
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return None


def _lines(warden: subprocess.Popen[bytes], hang_seconds: float, name: str, tail: Tail) -> Iterator[str]:
    """The lines of both streams as they come, until both are closed. Two pipes, so that an event is never mixed with log text."""
    with selectors.DefaultSelector() as selector:
        for stream in (warden.stdout, warden.stderr):
            selector.register(_checked_stream(stream), selectors.EVENT_READ, data=bytearray())
        last = time.monotonic()
        while selector.get_map():
            ready = selector.select(timeout=min(1.0, hang_seconds))
            if ready:
                last = time.monotonic()
            elif time.monotonic() - last > hang_seconds:
                raise StageFailed(f"{name} hangs: it printed nothing for {hang_seconds:g} s. {tail}")
            for key, _ in ready:
                chunk = os.read(key.fd, 1 << 16)
                if not chunk:
                    selector.unregister(key.fileobj)
                yield from _split(key.data, chunk)


def _split(buffer: bytearray, chunk: bytes) -> Iterator[str]:
    """Whole lines of the buffer plus the chunk; the rest stays in the buffer. An empty chunk means the end: give the rest."""
    buffer += chunk or (b"\n" if buffer else b"")
    *lines, rest = bytes(buffer).split(b"\n")
    buffer[:] = rest
    for line in lines:
        # A progress bar repaints its line with carriage returns: keep what a person would see last.
        yield line.decode("utf-8", "replace").rstrip("\r").rsplit("\r", 1)[-1]


def _checked_stream(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream


def _await_end(warden: subprocess.Popen[bytes]) -> None:
    try:
        warden.wait(WARDEN_SECONDS)
    except subprocess.TimeoutExpired:
        warden.kill()
        warden.wait()
    for stream in (warden.stdout, warden.stderr):
        _checked_stream(stream).close()
