"""Equivalence of LaTeX expressions by math-verify, in processes of its own.

math-verify guards itself with SIGALRM, which fails in threads, and some inputs keep sympy busy for hours or fill the memory. So every
comparison runs in a child process that is kept for the next one, has a memory limit, and is killed by the kernel when its time is up. Time
is processor time, so that a verdict doesn't depend on what else the machine does. Only math-verify's LaTeX reader is used: its other reader
evaluates text as Python.

This file is also the child's program. It imports nothing of the project, so a child starts quickly and alike from every caller.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time

SECONDS = 5.0
"""Processor time for one comparison."""
PATIENCE = 12.0
"""A child that hasn't answered after so many times its processor time is killed from here."""
START_SECONDS = 120.0
"""Time for a child to load math-verify on a busy machine."""
MEMORY_BYTES = 2 << 30
"""Address space of a child."""
DECIMALS = 12
"""Digits to which decimals are compared: a rounded value isn't the exact one."""


class TooSlow(Exception):
    """A comparison that was killed at its time limit, or by the memory limit."""


def equal(prediction: str, gold: str, seconds: float = SECONDS) -> bool:
    """Whether two LaTeX expressions, without dollar signs, mean the same. Raises TooSlow. Works from any thread; sets no signals here."""
    child = POOL.take()
    try:
        answer = child.ask({"prediction": prediction, "gold": gold, "seconds": seconds}, seconds)
    except BaseException:
        child.kill()
        raise
    POOL.give(child)
    return answer


class _Child:
    """One process that compares; loading math-verify takes its first second."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-I", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
        )
        self.ready = False

    def ask(self, question: dict[str, str | float], seconds: float) -> bool:
        """Send a question and wait for the answer. Raises TooSlow."""
        if not self.ready:
            self._line(START_SECONDS)
            self.ready = True
        self.process.stdin.write(json.dumps(question).encode() + b"\n")
        return json.loads(self._line(PATIENCE * seconds))

    def _line(self, seconds: float) -> bytes:
        deadline = time.monotonic() + seconds
        poll = select.poll()
        poll.register(self.process.stdout, select.POLLIN)
        line = b""
        while not line.endswith(b"\n"):
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TooSlow(f"no answer within {seconds:g} s")
            piece = os.read(self.process.stdout.fileno(), 4096)
            if not piece:
                over_time = self.process.wait() == -signal.SIGPROF
                raise TooSlow("no answer within its processor time" if over_time else "the comparing process ended: memory limit or crash")
            line += piece
        return line

    def kill(self) -> None:
        """End the process at once."""
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


class _Pool:
    """Idle children. As many exist as threads compare at once; after a fork the new process starts its own."""

    def __init__(self) -> None:
        self.idle: list[_Child] = []
        self.lock = threading.Lock()

    def take(self) -> _Child:
        """An idle child, or a new one."""
        with self.lock:
            while self.idle:
                child = self.idle.pop()
                if child.process.poll() is None:
                    return child
                child.kill()
        return _Child()

    def give(self, child: _Child) -> None:
        """Keep a child for the next comparison."""
        with self.lock:
            self.idle.append(child)

    def forget(self) -> None:
        """In a forked process: the children belong to the parent."""
        self.__init__()

    def processor_seconds(self) -> float:
        """What the idle children have used, for measuring."""
        ticks = 0
        for child in self.idle:
            with open(f"/proc/{child.process.pid}/stat", encoding="ascii") as file:
                ticks += sum(map(int, file.read().rpartition(")")[2].split()[11:13]))
        return ticks / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """At the interpreter's end."""
        while self.idle:
            self.idle.pop().kill()


POOL = _Pool()


# --- the child ------------------------------------------------------------------------------------------------------------


def _serve() -> None:
    """Answer one JSON line per question until stdin ends. The profiling timer, which nobody handles, ends the process."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    import math_verify

    math_verify.parser.logger.disabled = math_verify.grader.logger.disabled = True  # they say at each call that there is no time limit
    gc.freeze()
    gc.set_threshold(100_000)
    print("ready", flush=True)
    reader = [math_verify.LatexExtractionConfig()]
    for line in sys.stdin:
        question = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, question["seconds"])
        gold, prediction = (
            math_verify.parse(f"${question[name]}$", reader, parsing_timeout=None, raise_on_error=False) for name in ("gold", "prediction")
        )
        same = bool(gold and prediction) and math_verify.verify(
            gold, prediction, float_rounding=DECIMALS, allow_set_relation_comp=True, timeout_seconds=None, raise_on_error=False
        )
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(bool(same)), flush=True)


if __name__ == "__main__":
    _serve()
else:
    atexit.register(POOL.close)
    os.register_at_fork(after_in_child=POOL.forget)
