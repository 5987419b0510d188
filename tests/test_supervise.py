"""Supervised programs: events, log, errors, and that nothing outlives the parent. The programs are real processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from parallel_r1.config import LaunchConfig
from tasks.launch import command
from tasks.supervise import LIFELINES, StageFailed, program_environment, programs_end_with_flow, supervise

PROJECT = Path(__file__).resolve().parents[1]
DONE = """print('{"event": "done", "metrics": {"loss": 0.5}}')"""


def run(tmp_path: Path, program: str, hang_seconds: float = 20) -> tuple[dict[str, float], list[dict], str]:
    events: list[dict] = []
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(program))
    metrics = supervise("sft", [sys.executable, script], log=tmp_path / "log.txt", on_event=events.append, hang_seconds=hang_seconds)
    return metrics, events, (tmp_path / "log.txt").read_text()


def alive(mark: str) -> list[int]:
    """Processes whose command line holds `mark`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def wait_until(condition: object, seconds: float = 20) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.05)
    return False


def test_events_log_and_metrics(tmp_path: Path) -> None:
    metrics, events, log = run(tmp_path, f"""
        import sys
        print('{{"event": "progress", "step": 1, "of": 2, "metrics": {{}}}}', flush=True)
        print("plain text"); print("to stderr", file=sys.stderr)
        print('{{"event": torn'); print("bar 10%\\rbar 100%")
        {DONE}
        print("last words without newline", end="")
    """)  # fmt: skip
    assert metrics == {"loss": 0.5}
    assert [event["event"] for event in events] == ["progress", "done"]
    assert {"plain text", "to stderr", '{"event": torn', "bar 100%", "last words without newline"} == set(log.splitlines())


def test_a_failure_has_the_exit_code_and_the_last_lines(tmp_path: Path) -> None:
    with pytest.raises(StageFailed, match=r"(?s)exit code 3.*log\.txt.*the reason") as failure:
        run(tmp_path, "import sys\nfor i in range(100): print('line', i)\nprint('the reason', file=sys.stderr)\nsys.exit(3)")
    assert "line 99" in str(failure.value) and "line 10\n" not in str(failure.value)


RANKS = """
    import sys
    for i in range(40): print(f"[rank 0] zero {i}", flush=True)
    print('[rank 0] {"event": "progress", "step": 1, "of": 2}', flush=True)
    print("[rank 1] one", file=sys.stderr, flush=True)
    print("[rank 0] connection closed by peer", file=sys.stderr)
    print('''torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
    Failures:
    [1]:
      rank      : 0 (local_rank: 0)
      exitcode  : 1 (pid: 11)
    Root Cause (first observed failure):
    [0]:
      time      : 2026-01-01
      rank      : 1 (local_rank: 1)
      exitcode  : -9 (pid: 12)''', file=sys.stderr)
    sys.exit(1)
"""


def test_of_several_processes_the_first_to_fail_is_named_and_all_have_their_last_lines(tmp_path: Path) -> None:
    with pytest.raises(StageFailed, match="exit code 1") as failure:
        run(tmp_path, RANKS)
    head, one, zero = re.split("Last lines of rank .:\n", str(failure.value))
    assert head.endswith("Rank 1 was the first to fail, with exit code -9. "), "as torchrun says, who ends the others"
    assert one == "one\n" and "zero 39" in zero and "zero 5\n" not in zero and "connection closed" in zero
    assert "[rank 0] zero 0" in (tmp_path / "log.txt").read_text()


def test_events_of_the_first_process_are_events(tmp_path: Path) -> None:
    _, events, log = run(tmp_path, f'print(\'[rank 0] {{"event": "progress", "step": 1, "of": 2}}\', flush=True)\n{DONE}')
    assert [event["event"] for event in events] == ["progress", "done"] and not log


LAUNCHED = {"processes": 16, "machines": 2, "main_address": "node1", "prefix": ["srun", "--nodes=2"], "strategy": "fsdp2"}


@pytest.mark.parametrize(("launch", "begins", "holds", "reason"), [
    ({}, ["python", "-m", "stage"], [], "one process: nothing around it"),
    ({"processes": 8}, ["python", "-m", "accelerate.commands.launch"], ["ddp.yaml --num_processes 8", "--main_process_port 0"], "any port"),
    (LAUNCHED, ["srun", "--nodes=2", "python"], ["fsdp2.yaml", "c10d", "--main_process_ip node1", "_port 29500"], "machines meet"),
])  # fmt: skip
def test_the_command_of_a_launch(launch: dict[str, Any], begins: list[str], holds: list[str], reason: str, tmp_path: Path) -> None:
    words = list(map(str, command(["python", "-m", "stage", "job.json"], LaunchConfig(**launch), 1, tmp_path)))
    assert words[: len(begins)] == begins and words[-3:] == ["-m", "stage", "job.json"], reason
    assert [part for part in holds if part not in " ".join(words)] == [], reason


def test_a_signal_shows_in_the_exit_code(tmp_path: Path) -> None:
    with pytest.raises(StageFailed, match="exit code 139"):
        run(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")


def test_an_end_without_the_last_event_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(StageFailed, match="without its last event"):
        run(tmp_path, "print('bye')")


def test_a_silent_program_fails(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(StageFailed, match=r"(?s)hangs: it printed nothing for 1 s.*started"):
        run(tmp_path, "import time; print('started', flush=True); time.sleep(600)", hang_seconds=1)
    assert time.monotonic() - start < 10


def test_a_slow_but_speaking_program_does_not_hang(tmp_path: Path) -> None:
    metrics, _, _ = run(tmp_path, f"import time\nfor i in range(8): print(i, flush=True); time.sleep(0.3)\n{DONE}", hang_seconds=1)
    assert metrics == {"loss": 0.5}


TREE = """
    import subprocess, sys, time
    subprocess.Popen(["setsid", "sleep", "{mark}1"])                         # left its session
    subprocess.Popen(["sh", "-c", "sleep {mark}2 & sleep {mark}3"])          # a grandchild
    subprocess.Popen(["sh", "-c", "(setsid sh -c 'trap \\"\\" TERM; sleep {mark}4; true' &) ; true"])   # forked twice, deaf to SIGTERM
    print("up", flush=True)
"""


def mark_of(number: int) -> str:
    """A number of seconds to sleep that no other process has."""
    return f"{os.getpid()}{number}"


def test_what_a_program_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    mark = mark_of(11)
    run(tmp_path, textwrap.dedent(TREE.format(mark=mark)) + f"time.sleep(0.5)\n{DONE}")
    assert not alive(f"sleep\0{mark}")


def test_kill_9_of_the_parent_ends_the_whole_tree(tmp_path: Path) -> None:
    mark = mark_of(12)
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(TREE.format(mark=mark)) + "time.sleep(600)\n")
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(f"""
        import sys; from pathlib import Path; from tasks.supervise import supervise
        supervise('sft', [sys.executable, {str(program)!r}], log=Path({str(tmp_path / "log.txt")!r}), on_event=print, hang_seconds=600)
    """)], cwd=PROJECT)  # fmt: skip
    assert wait_until(lambda: len(alive(f"sleep\0{mark}")) == 4), "the tree is up"
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert wait_until(lambda: not alive(f"sleep\0{mark}") and not alive(str(program)), 25), "the tree is gone, deaf and detached ones too"


def test_an_interrupted_flow_ends_programs_of_its_other_threads(tmp_path: Path) -> None:
    mark = mark_of(13)
    failures: list[BaseException] = []

    def evaluate() -> None:
        try:
            run(tmp_path, f"import subprocess; subprocess.run(['sleep', '{mark}'])", hang_seconds=600)
        except StageFailed as failure:
            failures.append(failure)

    thread = threading.Thread(target=evaluate)
    with pytest.raises(KeyboardInterrupt), programs_end_with_flow():
        thread.start()
        assert wait_until(lambda: alive(f"sleep\0{mark}"))
        raise KeyboardInterrupt
    thread.join(15)
    assert not thread.is_alive() and not alive(f"sleep\0{mark}")
    assert "from outside" in str(failures[0])


def test_lifelines_do_not_leak(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        run(tmp_path, DONE)
    LIFELINES.cut_all()
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_environment_is_bounded_quiet_and_without_prefect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:4200/api")
    environment = program_environment(threads=2, offline=True)
    assert environment["OMP_NUM_THREADS"] == "2" and environment["HF_HUB_OFFLINE"] == "1"
    assert not any(name.startswith("PREFECT_") for name in environment)
    assert "HF_HUB_OFFLINE" not in program_environment(threads=2, offline=False) or "HF_HUB_OFFLINE" in os.environ
