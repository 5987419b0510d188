"""Checkpoints in the store while training goes on: on a local folder and on an S3 server on loopback."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from parallel_r1 import resuming
from parallel_r1.config import CheckpointConfig
from parallel_r1.jobs import append_lines, read_lines
from parallel_r1.lineage import Inventory
from parallel_r1.store import MANIFEST, Store
from tasks.uploads import FOLDER, Uploads, wanted

from .test_resuming import MARKS, write
from .test_store import s3_endpoint, store  # noqa: F401

RULE = CheckpointConfig(upload="always", keep_last=1)
KEY = "0123456789abcdef"


def new(store: Store, notes: list[str], rule: CheckpointConfig = RULE) -> Uploads:  # noqa: F811
    return Uploads(store, "rl", KEY, rule, notes.append)


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A work folder as a training program leaves it after step 20: two whole checkpoints, with a pickle, and a log."""
    work = tmp_path / "stage" / "work"
    for step in (10, 20):
        folder = write(work, step, MARKS[step].model_dump_json())
        (folder / "optimizer.pt").write_bytes(b"o" * 3 * step)
        (folder / "training_args.bin").write_bytes(b"pickle")
        (folder / "sub").mkdir()
        (folder / "sub" / "part").write_bytes(b"p")
        append_lines(work / "metrics.jsonl", [{"step": step}])
    return work


def test_another_machine_goes_on_from_the_newest(store: Store, work: Path, tmp_path: Path) -> None:  # noqa: F811
    notes: list[str] = []
    with new(store, notes) as uploads:
        uploads.offer(work, 10)
    with new(store, notes) as uploads:
        uploads.offer(work, 20)
    assert list(uploads.marks()) == [20], "the rule counts in the store too"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    new(store, notes).fetch(elsewhere, tmp_path / "cache")
    (mark,) = resuming.whole(elsewhere).values()
    there = elsewhere / "checkpoint-20"
    assert (mark, (there / "optimizer.pt").read_bytes(), (there / "sub" / "part").read_bytes()) == (MARKS[20], b"o" * 60, b"p")
    assert read_lines(elsewhere / "metrics.jsonl") == [{"step": 10}, {"step": 20}], "what was logged until then"
    assert not (there / "training_args.bin").exists() and not (elsewhere / MANIFEST).exists()
    assert not list((work.parent / "uploading").iterdir()), "nothing is left behind here"

    write(elsewhere, 30, MARKS[30].model_dump_json())
    new(store, notes).fetch(elsewhere, tmp_path / "cache")
    assert len(notes) == 1, f"what is newer here is not replaced: {notes}"


def test_an_upload_that_broke_off_is_no_checkpoint(store: Store, work: Path, tmp_path: Path) -> None:  # noqa: F811
    both = RULE.model_copy(update={"keep_last": 2})
    for step in (10, 20):
        with new(store, [], both) as uploads:
            uploads.offer(work, step)
    Store(f"{store.root}/{FOLDER}").invalidate("rl", f"{KEY}-00000020")  # the mark comes last
    assert list(uploads.marks()) == [10]
    elsewhere = tmp_path / "elsewhere"
    new(store, []).fetch(elsewhere, tmp_path / "cache")
    assert list(resuming.whole(elsewhere)) == [10]


def test_a_checkpoint_may_be_removed_while_it_is_uploaded(store: Store, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    offered, removed = threading.Event(), threading.Event()
    commit = Store.commit

    def slow_commit(*args: object, **options: object) -> object:
        offered.set()
        assert removed.wait(20)
        return commit(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Store, "commit", slow_commit)
    with new(store, []) as uploads:
        uploads.offer(work, 10)
        assert offered.wait(20)
        for path in sorted((work / "checkpoint-10").rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        uploads.offer(work, 10)  # already gone: there is nothing to upload
        uploads.offer(work, 20)
        removed.set()
    assert list(uploads.marks()) == [20]


def test_while_one_is_uploaded_only_the_newest_waits(store: Store, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    for step in (30, 40):
        write(work, step, MARKS[step].model_dump_json())
    begun, go_on, uploaded = threading.Event(), threading.Event(), []
    commit = Store.commit

    def slow_commit(self: Store, stage: str, key: str, *args: object, **options: object) -> object:
        begun.set()
        assert go_on.wait(20)
        uploaded.append(int(key[-8:]))
        return commit(self, stage, key, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Store, "commit", slow_commit)
    with new(store, []) as uploads:
        uploads.offer(work, 10)
        assert begun.wait(20)
        for step in (20, 30, 40):
            uploads.offer(work, step)
        go_on.set()
    assert uploaded == [10, 40]


def test_a_store_that_refuses_does_not_end_the_training(work: Path, tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file where the store's folder would be")
    notes: list[str] = []
    with new(Store(tmp_path / "store"), notes) as uploads:
        uploads.offer(work, 20)
    assert len(notes) == 1 and "could not be uploaded, training goes on" in notes[0]


def test_when_the_stage_is_done_those_to_be_looked_at_stay(store: Store, work: Path) -> None:  # noqa: F811
    for step in (30, 40):
        write(work, step, MARKS[step].model_dump_json())
    rule = RULE.model_copy(update={"keep_best": "reward", "keep_every": 30})
    for step in MARKS.keys() - {50}:
        with new(store, [], rule) as uploads:
            uploads.offer(work, step)
    uploads.tidy()
    assert list(uploads.marks()) == [20, 30]
    assert not Inventory.of(store).artifacts, "they are no artifacts"


def test_where_checkpoints_are_copied(tmp_path: Path) -> None:
    local = Store(tmp_path)
    assert [wanted(CheckpointConfig(upload=upload), local) for upload in ("remote", "always", "never")] == [False, True, False]
