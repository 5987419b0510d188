"""Checkpoints in the store, copied there while training goes on, so that a stage killed on one machine goes on from them on another.

They lie beside the artifacts, at `{store}/.checkpoints/{stage}/{key}-{step}/`, each with a manifest that is written last: what an upload
that broke off left behind is no checkpoint. They may hold pickles, which artifacts never do: PyTorch's optimiser state is one, and is read
with `weights_only`. When the stage is done only those of `keep_every` and `keep_best` stay.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from parallel_r1 import resuming
from parallel_r1.config import CheckpointConfig
from parallel_r1.resuming import Mark
from parallel_r1.store import Store, StoreError

FOLDER = ".checkpoints"
LEFT_OUT = "training_args.bin"
"""A pickle that nothing reads again."""


def wanted(rule: CheckpointConfig, store: Store) -> bool:
    """Whether checkpoints are copied into this store."""
    return rule.upload == "always" or (rule.upload == "remote" and not store.is_local)


class Uploads:
    """The uploaded checkpoints of one stage. In a `with` block, `offer` each one as soon as it is whole; leaving the block waits for what
    is under way, unless an interrupt ends it."""

    def __init__(self, store: Store, stage: str, key: str, rule: CheckpointConfig, note: Callable[[str], None]) -> None:
        self._store = Store(f"{store.root}/{FOLDER}")
        self._stage, self._key, self._rule, self._note = stage, key, rule, note
        self._next: Path | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._carry, daemon=True)

    def __enter__(self) -> Uploads:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        if kind is None or issubclass(kind, Exception):
            self._thread.join()

    def marks(self) -> dict[int, Mark]:
        """The whole checkpoints in the store, by step."""
        found = {}
        for ref in self._store.find(self._stage, f"{self._key}-"):
            manifest = self._store.manifest(ref.stage, ref.key)
            if manifest is not None:
                mark = Mark.model_validate(manifest.config)
                found[mark.step] = mark
        return found

    def fetch(self, work: Path, cache: Path) -> None:
        """Put the newest one into a work folder that has none as new."""
        marks = self.marks()
        if not marks or max(marks) <= max(resuming.whole(work), default=-1):
            return
        step = max(marks)
        ref = self._store.load(self._stage, self._name(step))
        if ref is None:
            return
        shutil.copytree(self._store.localise(ref, cache), work, dirs_exist_ok=True, ignore=shutil.ignore_patterns("MANIFEST.json"))
        self._note(f"the checkpoint of step {step} was fetched from {ref.uri}")

    def offer(self, work: Path, step: int) -> None:
        """Upload a whole checkpoint, and what is logged beside it. While another upload is under way the newest waits, and those between
        are passed over.

        The upload reads hard links of its own, so that the training may remove the checkpoint meanwhile."""
        uploading = work.parent / "uploading"
        uploading.mkdir(exist_ok=True)
        links = Path(tempfile.mkdtemp(dir=uploading))
        _link(resuming.folder_of(work, step), links / resuming.folder_of(work, step).name)
        for log in work.glob("*.jsonl"):
            shutil.copyfile(log, links / log.name)
        with self._changed:
            passed_over, self._next = self._next, links
            self._changed.notify()
        if passed_over:
            shutil.rmtree(passed_over)

    def tidy(self) -> None:
        """The stage is done: remove all but those that are kept to be looked at."""
        marks = self.marks()
        for step in marks.keys() - resuming.lasting(marks, self._rule):
            self._store.remove(self._stage, self._name(step))

    def _name(self, step: int) -> str:
        return f"{self._key}-{step:08d}"

    def _carry(self) -> None:
        while links := self._take():
            try:
                self._upload(links)
            except (StoreError, OSError) as error:
                self._note(f"a checkpoint could not be uploaded, training goes on: {error}")
            finally:
                shutil.rmtree(links)

    def _take(self) -> Path | None:
        with self._changed:
            self._changed.wait_for(lambda: self._next or self._closed)
            links, self._next = self._next, None
        return links

    def _upload(self, links: Path) -> None:
        for step, mark in resuming.whole(links).items():  # one, or none where the training had removed it already
            self._commit(links, step, mark)

    def _commit(self, links: Path, step: int, mark: Mark) -> None:
        names = [path.relative_to(links).as_posix() for path in sorted(links.rglob("*")) if path.is_file()]
        config = mark.model_dump(mode="json")
        self._store.commit(self._stage, self._name(step), links, config=config, metrics=mark.metrics, names=names, on_progress=self._note)
        for old in resuming.surplus(self.marks(), self._rule):
            self._store.remove(self._stage, self._name(old))


def _link(folder: Path, target: Path) -> None:
    """The mark last: links of a folder that is being removed meanwhile have none."""
    target.mkdir(parents=True)
    for path in sorted(folder.rglob("*"), key=lambda path: path.name == resuming.MARK):
        if path.is_dir():
            (target / path.relative_to(folder)).mkdir(parents=True, exist_ok=True)
        elif path.name != LEFT_OUT:
            try:
                os.link(path, target / path.relative_to(folder))
            except FileNotFoundError:
                return
