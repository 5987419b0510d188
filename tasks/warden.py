"""Runs a command and ends its whole process tree when the command ends, when a SIGTERM comes, or when the parent is gone.

    python warden.py LIFELINE COMMAND...

LIFELINE is the number of an inherited pipe end whose other end only the parent holds: the kernel closes that one however the
parent dies, kill -9 included, and reading here then meets the end of the file. As a child subreaper the warden becomes the
parent of every orphan below it, so processes that called setsid or forked twice are found too. Standard library only.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
GRACE_SECONDS = 5.0
POLL_SECONDS = 0.1
LIBC = ctypes.CDLL(None)


def children() -> Iterator[int]:
    """Ids of this process's direct children, zombies included."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as file:
                    parent = file.read().rsplit(")", 1)[1].split()[1]
            except (OSError, IndexError):
                continue
            if int(parent) == os.getpid():
                yield int(entry)


def send(process: int, number: int) -> None:
    """Signal a process that may be gone already."""
    try:
        os.kill(process, number)
    except ProcessLookupError:
        pass


def reap(command: subprocess.Popen[bytes]) -> None:
    """Collect children that have ended; the command's own exit code stays with `command`."""
    command.poll()
    for process in list(children()):
        if process != command.pid:
            try:
                os.waitpid(process, os.WNOHANG)
            except ChildProcessError:
                pass


def end_tree(command: subprocess.Popen[bytes]) -> None:
    """SIGTERM to every process below, SIGKILL to what is left after the grace time. Ending a parent hands its children to us,
    so this goes on until no child is left."""
    told: set[int] = set()
    deadline = time.monotonic() + GRACE_SECONDS
    while remaining := list(children()):
        for process in remaining:
            if time.monotonic() > deadline:
                send(process, signal.SIGKILL)
            elif process not in told:
                told.add(process)
                send(process, signal.SIGTERM)
        reap(command)
        time.sleep(0.02)


def main() -> None:
    """Run the command; exit as it did, or with 143 when it was ended from outside."""
    lifeline = int(sys.argv[1])
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)
    stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stop.append(number))
    command = subprocess.Popen(sys.argv[2:], start_new_session=True, preexec_fn=lambda: LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL))
    while command.poll() is None and not stop:
        if select.select([lifeline], [], [], POLL_SECONDS)[0]:
            stop.append(signal.SIGTERM)
    code = command.poll()
    end_tree(command)
    if code is None:
        code = 128 + signal.SIGTERM
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
