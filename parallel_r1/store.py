"""The artifact store: every stage's output is a folder `{root}/{stage}/{key}/`, local or on s3:// (fsspec).

`MANIFEST.json` is the commit mark. It is written last and lists size and sha256 of every file: no manifest, no artifact.
The *key* says what was asked for (stage, version, config section, seed, digests of the inputs; no paths, clocks or run ids);
the *digest* says what came out. The endpoint and the keys of s3:// come from the environment (AWS_ENDPOINT_URL_S3 or
AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY).

Two depths of checking. Whether an artifact is there is asked often and answered by the manifest and the sizes of the files. What a
stage reads is hashed first, however big (1.5 GB/s on one core; a stage that reads gigabytes runs for hours): a flipped bit is
found, the commit mark is taken away and the artifact is built again, never served. An S3 server that doesn't answer is asked again
for PATIENCE_SECONDS.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, get_args

import fsspec
from fsspec.callbacks import Callback
from fsspec.implementations.local import LocalFileSystem
from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

from parallel_r1.config import IN_KEY_WHEN_SET, NOT_IN_KEY, FileContent, LocalOrHub

MANIFEST = "MANIFEST.json"
STAGING = ".staging"
NOT_IN_DIGEST = frozenset({"log.txt", "metrics.jsonl", "tensorboard"})
"""Files and folders for people, which analysis and pages draw and no other stage reads: listed in the manifest, but two artifacts that
differ only here have the same digest."""

FILE_CONTENT_MARK = get_args(FileContent)[1]
LOCAL_OR_HUB_MARK = get_args(LocalOrHub)[1]
CHUNK = 1 << 20
PICKLES = frozenset({".pkl", ".pickle", ".pt", ".pth", ".bin", ".joblib"})
"""Suffixes of files that run code when they are loaded: an artifact never holds one. Weights are safetensors."""
PATIENCE_SECONDS = 60.0
"""How long a remote store that doesn't answer is asked again; PARALLEL_R1_STORE_PATIENCE changes it."""
SHA256 = "sha256"
"""Name of the metadata of a remote file that holds its digest, so that an upload goes on where it broke off."""
LOUD_BYTES = 64 << 20
"""Files from this size on say how far their upload is."""


class StoreError(RuntimeError):
    """The store refuses: names the artifact, the file and why."""


class Damaged(StoreError):
    """A file is not what was committed. The artifact's commit mark is gone now: it is built again when it is asked for again."""


class ArtifactRef(BaseModel):
    """A pointer to an artifact: small, JSON, never the bytes. `Store.check` says whether what it points to is whole."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    stage: str
    key: str
    uri: str
    digest: str
    metrics: dict[str, float] = Field(default_factory=dict)


class FileEntry(BaseModel):
    """One file of an artifact."""

    size: int
    sha256: str


class Manifest(BaseModel):
    """What MANIFEST.json holds."""

    format: int = 1
    stage: str
    key: str
    digest: str
    files: dict[str, FileEntry]
    config: Any
    inputs: dict[str, Any]
    versions: dict[str, str]
    seconds: float
    metrics: dict[str, float]
    committed_at: str


# --- identity: from a config section to a key ---------------------------------------------------------------------------------


def identity(section: Any) -> Any:
    """What of a config section decides the outcome, as JSON: fields marked NOT_IN_KEY are dropped, and those marked
    IN_KEY_WHEN_SET where they have their default; FileContent fields, and LocalOrHub fields that name a local folder, become the sha256 of
    what lies there.

    Raises StoreError when such a file can't be read.
    """
    if isinstance(section, BaseModel):
        fields = type(section).model_fields
        return {name: _field_identity(name, value, fields[name].metadata) for name, value in section if not _left_out(fields[name], value)}
    if isinstance(section, Mapping):
        return {str(name): identity(value) for name, value in section.items()}
    if isinstance(section, list | tuple):
        return [identity(value) for value in section]
    return section


def _left_out(field: FieldInfo, value: Any) -> bool:
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, Mapping) else {}
    is_default = value == field.get_default(call_default_factory=True)
    return NOT_IN_KEY.items() <= extra.items() or (IN_KEY_WHEN_SET.items() <= extra.items() and is_default)


def _field_identity(name: str, value: Any, marks: Sequence[Any]) -> Any:
    if FILE_CONTENT_MARK in marks:
        return _file_identity(name, value)
    if LOCAL_OR_HUB_MARK in marks and Path(value).is_dir():
        files = sorted(path for path in Path(value).rglob("*") if path.is_file())
        return f"sha256:{digest_of({path.relative_to(value).as_posix(): _entry(path) for path in files})}"
    return identity(value)


def _file_identity(field: str, path: str) -> str:
    try:
        filesystem, inside = open_filesystem(path)
        return f"sha256:{_sha256(filesystem, inside)}"
    except OSError as error:
        raise StoreError(f"{field} = {path!r}: the file can't be read: {error}") from None


def key_of(stage: str, version: int, config: Any, seed: int, inputs: Mapping[str, str]) -> str:
    """The address of what a stage makes: a hash of its name, its hand-raised version, the identity of its config section, the
    seed and the digests of its inputs by name."""
    question = {"stage": stage, "version": version, "config": config, "seed": seed, "inputs": dict(inputs)}
    return _hash_json(question)[:32]


def digest_of(files: Mapping[str, FileEntry]) -> str:
    """The digest of an artifact: over names, sizes and sha256 of its files."""
    counted = [[name, entry.size, entry.sha256] for name, entry in sorted(files.items()) if name.split("/")[0] not in NOT_IN_DIGEST]
    return _hash_json(counted)


def _hash_json(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _sha256(filesystem: fsspec.AbstractFileSystem, path: str) -> str:
    digest = hashlib.sha256()
    with filesystem.open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def open_filesystem(uri: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """The fsspec file system of a path or URL, and the path inside it."""
    options: dict[str, Any] = {}
    if uri.startswith("s3://"):
        options = {"use_listings_cache": False}
        if endpoint := os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"):
            options["endpoint_url"] = endpoint
    return fsspec.core.url_to_fs(uri, **options)


# --- names that can't leave the store -------------------------------------------------------------------------------------------


def _checked_part(part: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", part):
        raise StoreError(f"{part!r} can't name a stage or key: letters, digits, - and _ only")
    return part


def _checked_name(name: str) -> str:
    """A file name inside an artifact: relative, with forward slashes, without `..`."""
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name or str(path) != name:
        raise StoreError(f"{name!r} can't name a file of an artifact: it must be a plain path inside the folder")
    return name


def list_files(folder: Path) -> list[str]:
    """The files of a folder by relative name, sorted. Raises StoreError for links and other things that are no plain files."""
    names = []
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise StoreError(f"{path}: an artifact holds plain files only, no links or devices")
        if path.suffix in PICKLES:
            raise StoreError(f"{path}: an artifact holds no pickles; write weights as safetensors and data as JSON")
        if path.is_file():
            names.append(_checked_name(path.relative_to(folder).as_posix()))
    return names


# --- a store that doesn't answer for a while -----------------------------------------------------------------------------------


def patiently(what: str, action: Callable[[], Any]) -> Any:
    """Do something with a remote store, and again with growing pauses while it doesn't answer.

    Raises StoreError after PATIENCE_SECONDS. An answer such as `no such file` or `access denied` is an answer, and raised at once.
    """
    patience = float(os.environ.get("PARALLEL_R1_STORE_PATIENCE", PATIENCE_SECONDS))
    deadline, pause = time.monotonic() + patience, 0.5
    while True:
        try:
            return action()
        except Exception as error:
            if not _is_silence(error):
                raise
            if time.monotonic() + pause > deadline:
                raise StoreError(
                    f"{what}: no answer for {patience:g} s: {type(error).__name__}: {error}. "
                    "What was finished is kept: run again when the store is back"
                ) from error
        time.sleep(pause)
        pause = min(2 * pause, 15.0)


def _is_silence(error: Exception) -> bool:
    """Whether an error means that the store could not be reached or broke off, and not that it said no.

    By the names of botocore and aiohttp, as the worker environment has neither."""
    if isinstance(error, OSError):
        answers = FileNotFoundError | FileExistsError | NotADirectoryError | IsADirectoryError | PermissionError
        return not isinstance(error, answers) and error.errno != errno.ENOSPC
    library = type(error).__module__.split(".")[0]
    return library in ("botocore", "aiohttp") and type(error).__name__ not in ("NoCredentialsError", "ParamValidationError", "ClientError")


# --- the store --------------------------------------------------------------------------------------------------------------


class Store:
    """Artifacts under one root: a folder or s3://bucket/prefix."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.filesystem, path = open_filesystem(os.fspath(root))
        self.path = path.rstrip("/")
        self.is_local = isinstance(self.filesystem, LocalFileSystem)
        self.root = self.path if self.is_local else self.filesystem.unstrip_protocol(self.path)

    def uri_of(self, stage: str, key: str) -> str:
        """Where an artifact lies or would lie."""
        return f"{self.root}/{_checked_part(stage)}/{_checked_part(key)}"

    def _folder(self, stage: str, key: str) -> str:
        return f"{self.path}/{_checked_part(stage)}/{_checked_part(key)}"

    def manifest(self, stage: str, key: str) -> Manifest | None:
        """The manifest of an artifact; None when there is none or it can't be understood."""
        path = f"{self._folder(stage, key)}/{MANIFEST}"
        try:
            manifest = Manifest.model_validate_json(self._ask(path, lambda: self.filesystem.cat_file(path)))
            for name in manifest.files:
                _checked_name(name)
        except (FileNotFoundError, NotADirectoryError, ValueError, StoreError):
            return None
        return manifest if (manifest.stage, manifest.key) == (stage, key) else None

    def _ask(self, path: str, action: Callable[[], Any]) -> Any:
        return action() if self.is_local else patiently(self.filesystem.unstrip_protocol(path), action)

    def manifests(self, stage: str = "*") -> Iterator[Manifest]:
        """Every artifact of the store, or of one stage, whole or not."""
        found = self._ask(self.path, lambda: self.filesystem.glob(f"{self.path}/{stage}/*/{MANIFEST}"))
        for path in sorted(found):
            stage, key = path.split("/")[-3:-1]
            if not stage.startswith(".") and (manifest := self.manifest(stage, key)):
                yield manifest

    def load(self, stage: str, key: str) -> ArtifactRef | None:
        """The artifact of this key, when it is whole (shallow check)."""
        manifest = self.manifest(stage, key)
        if manifest is None or self._fault(manifest, deep=False):
            return None
        return self._ref(manifest)

    def find(self, stage: str, beginning: str) -> list[ArtifactRef]:
        """The whole artifacts of a stage whose key begins so."""
        pattern = f"{self.path}/{_checked_part(stage)}/{_checked_part(beginning)}*/{MANIFEST}"
        keys = [path.split("/")[-2] for path in self._ask(pattern, lambda: self.filesystem.glob(pattern))]
        return [ref for key in sorted(keys) if (ref := self.load(stage, key))]

    def check(self, ref: ArtifactRef, deep: bool = False) -> str | None:
        """None when what `ref` points to is whole, else why not. Shallow: manifest, digest and sizes; deep: every sha256 too."""
        manifest = self.manifest(ref.stage, ref.key)
        if manifest is None:
            return f"{self.uri_of(ref.stage, ref.key)}: no manifest"
        if manifest.digest != ref.digest:
            return f"{self.uri_of(ref.stage, ref.key)}: holds {manifest.digest[:12]}, not {ref.digest[:12]}"
        return self._fault(manifest, deep)

    def _fault(self, manifest: Manifest, deep: bool) -> str | None:
        folder = self._folder(manifest.stage, manifest.key)
        if digest_of(manifest.files) != manifest.digest:
            return f"{folder}/{MANIFEST}: the digest is not that of the files it lists"
        there = self._ask(folder, lambda: self.filesystem.find(folder, detail=True))
        found = {path.removeprefix(f"{folder}/"): info["size"] for path, info in there.items()}
        for name, entry in manifest.files.items():
            if name not in found:
                return f"{folder}/{name}: missing"
            if self.is_local and Path(folder, name).resolve() != Path(folder).resolve() / name:
                return f"{folder}/{name}: a link, which leads elsewhere"
            if found[name] != entry.size:
                return f"{folder}/{name}: {found[name]} bytes, the manifest says {entry.size}"
            if deep and _sha256(self.filesystem, f"{folder}/{name}") != entry.sha256:
                return f"{folder}/{name}: the content is not what was committed"
        return None

    def _ref(self, manifest: Manifest) -> ArtifactRef:
        uri = self.uri_of(manifest.stage, manifest.key)
        return ArtifactRef(stage=manifest.stage, key=manifest.key, uri=uri, digest=manifest.digest, metrics=manifest.metrics)

    def commit(
        self,
        stage: str,
        key: str,
        folder: Path,
        *,
        config: Any = None,
        inputs: Mapping[str, ArtifactRef] | None = None,
        versions: Mapping[str, str] | None = None,
        seconds: float = 0.0,
        metrics: Mapping[str, float] | None = None,
        on_progress: Callable[[str], None] = lambda text: None,
        names: Sequence[str] | None = None,
    ) -> ArtifactRef:
        """Make an artifact of a local folder's files, or of those in `names`: first the files, then the manifest. What was there goes.

        `on_progress` hears how far a long upload is. Raises StoreError when the disk is full or the store doesn't answer; what was
        uploaded until then is not uploaded again.
        """
        files = {name: _entry(folder / name) for name in (list_files(folder) if names is None else names)}
        if not files or MANIFEST in files:
            raise StoreError(f"{folder}: {'no files to commit' if not files else f'{MANIFEST} is the name of the commit mark'}")
        manifest = Manifest(
            stage=_checked_part(stage),
            key=_checked_part(key),
            digest=digest_of(files),
            files=files,
            config=config,
            inputs={name: {"stage": ref.stage, "key": ref.key, "digest": ref.digest} for name, ref in (inputs or {}).items()},
            versions=dict(versions or {}),
            seconds=round(seconds, 3),
            metrics=dict(metrics or {}),
            committed_at=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        if self.is_local:
            self._commit_local(folder, manifest)
        else:
            self._commit_remote(folder, manifest, on_progress)
        return self._ref(manifest)

    def _commit_local(self, folder: Path, manifest: Manifest) -> None:
        """Build the folder beside the store's and rename it into place: a reader sees all of it or nothing."""
        staging = Path(self.path) / STAGING / uuid.uuid4().hex
        try:
            self._fill(staging, folder, manifest)
        except OSError as error:
            shutil.rmtree(staging, ignore_errors=True)
            where = self.uri_of(manifest.stage, manifest.key)
            raise StoreError(f"{where}: can't be written: {error}. Nothing is lost: make room and run again") from error
        self._put_in_place(staging, manifest)

    def _fill(self, staging: Path, folder: Path, manifest: Manifest) -> None:
        staging.mkdir(parents=True)
        for name in manifest.files:
            _copy(folder / name, staging / name)
        (staging / MANIFEST).write_text(manifest.model_dump_json(indent=1), encoding="utf-8")
        _fsync(staging / MANIFEST)
        for path in (*(path for path in staging.rglob("*") if path.is_dir()), staging):
            _fsync(path)

    def _put_in_place(self, staging: Path, manifest: Manifest) -> None:
        target = Path(self._folder(manifest.stage, manifest.key))
        target.parent.mkdir(parents=True, exist_ok=True)
        replaced = staging.with_suffix(".replaced")
        if target.exists():
            target.rename(replaced)
        staging.rename(target)
        _fsync(target.parent)
        shutil.rmtree(replaced, ignore_errors=True)

    def _commit_remote(self, folder: Path, manifest: Manifest, on_progress: Callable[[str], None]) -> None:
        """Files one by one, then the mark. A file that lies there already with the same digest, from an upload that broke off, is
        left as it is. Every part carries a checksum that the server compares."""
        target = self._folder(manifest.stage, manifest.key)
        self.invalidate(manifest.stage, manifest.key)
        for count, (name, entry) in enumerate(manifest.files.items(), start=1):
            path = f"{target}/{name}"
            if self._ask(path, partial(self._digest_there, path)) == entry:
                on_progress(f"{name} is uploaded already")
                continue
            said = _Upload(f"uploading {name} ({count} of {len(manifest.files)})", on_progress) if entry.size >= LOUD_BYTES else Callback()
            options = {"Metadata": {SHA256: entry.sha256}} if "s3" in self.filesystem.protocol else {}
            self._ask(path, partial(self.filesystem.put_file, str(folder / name), path, callback=said, **options))
        content = manifest.model_dump_json(indent=1).encode()
        self._ask(target, lambda: self.filesystem.pipe_file(f"{target}/{MANIFEST}", content))

    def _digest_there(self, path: str) -> FileEntry | None:
        if "s3" not in self.filesystem.protocol or not self.filesystem.exists(path):
            return None
        digest = self.filesystem.metadata(path).get(SHA256)
        return FileEntry(size=self.filesystem.size(path), sha256=digest) if digest else None

    def invalidate(self, stage: str, key: str) -> None:
        """Take the commit mark away: the artifact counts as never made."""
        mark = f"{self._folder(stage, key)}/{MANIFEST}"
        if self._ask(mark, lambda: self.filesystem.exists(mark)):
            self._ask(mark, lambda: self.filesystem.rm_file(mark))

    def remove(self, stage: str, key: str) -> None:
        """Delete an artifact, the commit mark first."""
        self.invalidate(stage, key)
        folder = self._folder(stage, key)
        if self._ask(folder, lambda: self.filesystem.exists(folder)):
            self._ask(folder, lambda: self.filesystem.rm(folder, recursive=True))

    def localise(self, ref: ArtifactRef, cache: Path, *only: str) -> Path:
        """A local folder with the artifact's files, or with those named, each hashed now: the store's own folder when it is local,
        else a download under `cache`, which goes on with the files that are left when it was cut.

        Raises StoreError when the artifact is not whole, Damaged when a file is not what was committed.
        """
        manifest = self.manifest(ref.stage, ref.key)
        fault = self.check(ref)
        if manifest is None or fault:
            self.invalidate(ref.stage, ref.key)
            raise Damaged(f"{ref.stage} {ref.key} can't be used: {fault}. Run again: it is rebuilt.")
        target = Path(self._folder(ref.stage, ref.key)) if self.is_local else cache / _checked_part(ref.stage) / _checked_part(ref.digest)
        for name in only or manifest.files:
            if name not in manifest.files:
                continue  # what isn't there is the reader's business: some files are optional
            if not self.is_local and not ((target / name).exists() and _entry(target / name) == manifest.files[name]):
                self._download(ref, name, manifest.files[name], target / name)
            elif self.is_local and _entry(target / name) != manifest.files[name]:
                self._refuse(ref, name, "the content")
        return target

    def _download(self, ref: ArtifactRef, name: str, entry: FileEntry, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
        there = f"{self._folder(ref.stage, ref.key)}/{name}"
        try:
            self._ask(there, lambda: self.filesystem.get_file(there, str(part)))
            if _entry(part) != entry:
                self._refuse(ref, name, "the download")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    def _refuse(self, ref: ArtifactRef, name: str, what: str) -> None:
        self.invalidate(ref.stage, ref.key)
        raise Damaged(f"{ref.uri}/{name}: {what} is not what was committed. Run again: it is rebuilt.")


class _Upload(Callback):
    """Says every few seconds how much of a file is uploaded."""

    def __init__(self, title: str, on_progress: Callable[[str], None]) -> None:
        super().__init__()
        self.title, self.on_progress, self._said = title, on_progress, time.monotonic()

    def call(self, hook_name: str | None = None, **kwargs: Any) -> None:
        """Called by fsspec after every part."""
        if self.size and time.monotonic() - self._said > 3:
            self._said = time.monotonic()
            self.on_progress(f"{self.title}: {100 * self.value / self.size:.0f} %")


def _entry(path: Path) -> FileEntry:
    with path.open("rb") as file:
        return FileEntry(size=path.stat().st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest())


def _copy(source: Path, target: Path) -> None:
    """A copy and no hard link: what a later attempt writes into the work folder must never reach into the store."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    _fsync(target)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flatten(inputs: Mapping[str, ArtifactRef | Mapping[str, ArtifactRef]]) -> dict[str, ArtifactRef]:
    """Inputs by name; those in a mapping are called `mapping.name`."""
    flat: dict[str, ArtifactRef] = {}
    for name, value in inputs.items():
        flat |= {name: value} if isinstance(value, ArtifactRef) else {f"{name}.{inner}": ref for inner, ref in value.items()}
    return flat
