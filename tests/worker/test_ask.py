"""`make ask`: real programs on the tiny model, for programs, for files and for a terminal."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from parallel_r1 import checkpoints
from parallel_r1.store import Store

ROOT = Path(__file__).parents[2]
PROBLEM = "Tom has $5 and 12 apples. How many?"


@pytest.fixture
def store(tmp_path: Path, tiny: Path) -> Store:
    """A store with the tiny model as an sft and two rl checkpoints, the second the newest."""
    store = Store(tmp_path / "store")
    content = tmp_path / "artifact"
    content.mkdir()
    (content / "checkpoint").mkdir()
    for file in tiny.iterdir():
        (content / "checkpoint" / file.name).write_bytes(file.read_bytes())
    for stage, key in (("sft", "aa11"), ("rl", "bb22"), ("rl", "bb33")):
        store.commit(stage, key, content, config={"prompt": "bare", "rollout": {"attention": "causal"}})
    return store


def ask(store: Store, model: str, *options: str, **streams: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "parallel_r1.ask", model, "--set", f"store={store.root}", *options]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "ASK_PROBLEM": PROBLEM}, text=True, **{"capture_output": True, **streams})


def test_json_is_one_object(store: Store) -> None:
    (first,) = [json.loads(line) for line in ask(store, "bb2", "--json", "--paths", "3", "--seed", "3").stdout.splitlines()]
    assert first["model"] == "rl bb22" and first["problem"] == PROBLEM and first["engine"].startswith("transformers")
    assert first["critical_path_tokens"] <= first["tokens"] and {"answer", "text", "segments", "blocks"} <= set(first)


def test_a_terminal_sees_the_response_grow(store: Store) -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "wb") as terminal:
        ended = ask(store, "latest", "--pace", "0", "--seed", "3", capture_output=False, stdout=terminal, stderr=subprocess.PIPE)
    drawn = b""
    while chunk := _read(ours):
        drawn += chunk
    assert ended.returncode == 0, ended.stderr
    assert b"tokens" in drawn and b"critical path" in drawn and "▌".encode() in drawn


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:  # the other end is closed
        return b""


@pytest.mark.parametrize("name, expected, reason", [
    ("latest", ("rl bb33", "rl bb22"), "the newest rl checkpoint, whatever else is there (both may have been made in one second)"),
    ("aa", ("sft aa11",), "the beginning of a key is enough"),
    ("sft/aa", ("sft aa11",), "with its stage, as `make artifacts` prints it"),
])  # fmt: skip
def test_names_of_checkpoints(name: str, expected: tuple[str, ...], reason: str, store: Store, tmp_path: Path) -> None:
    found = checkpoints.find(name, store, tmp_path)
    assert found.name in expected, reason
    assert (found.folder / "config.json").exists() and found.config["prompt"] == "bare"


@pytest.mark.parametrize("name, message", [
    ("bb", "begins more than one key.*rl   bb22.*rl   bb33.*MODEL=latest"),
    ("sft/bb", "begins no key"),
    ("zz", "begins no key.*sft  aa11.*MODEL=latest"),
    ("some/where", "no such folder.*hf download"),
    (".", "neither config.json nor checkpoint/config.json"),
])  # fmt: skip
def test_names_that_say_nothing_list_what_there_is(name: str, message: str, store: Store, tmp_path: Path) -> None:
    with pytest.raises(checkpoints.NotFound, match=f"(?s){message}"):
        checkpoints.find(name, store, tmp_path)


def test_an_empty_store_says_how_to_fill_it(tmp_path: Path) -> None:
    with pytest.raises(checkpoints.NotFound, match="no checkpoint yet. `make demo`"):
        checkpoints.find("latest", Store(tmp_path / "empty"), tmp_path)
