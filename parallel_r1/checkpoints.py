"""Find a checkpoint by what a person calls it: a folder, stage/key or the beginning of one, with the stage or without, or `latest`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parallel_r1.store import MANIFEST, ArtifactRef, Manifest, Store

STAGES = ("rl", "sft", "base")
"""Stages that make checkpoints, the most trained first."""
LATEST = "latest"


class NotFound(LookupError):
    """No such checkpoint: says what was looked for, where, and the way out."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on this machine."""

    folder: Path
    """With config.json, weights and tokenizer."""
    name: str
    """For people, such as `rl 3f2a90c1`."""
    config: dict[str, Any] = field(default_factory=dict)
    """The config section that made it; empty where that isn't known."""


def find(name: str, store: Store, cache: Path) -> Checkpoint:
    """The checkpoint called `name`; one in a remote store is downloaded under `cache`. Raises NotFound."""
    if Path(name).is_dir():
        return in_folder(Path(name))
    if is_elsewhere(name):
        raise NotFound(f"{name}: no such folder. A checkpoint of the hub: `hf download {name} --local-dir FOLDER`, then MODEL=FOLDER")
    ref = named(name, store)
    manifest = store.manifest(ref.stage, ref.key)
    return Checkpoint(store.localise(ref, cache) / "checkpoint", f"{ref.stage} {ref.key[:8]}", (manifest and manifest.config) or {})


def is_elsewhere(name: str) -> bool:
    """Whether a name that is no folder means none of the store: owner/name on the hub, or a path."""
    stage, slash, _ = name.rpartition("/")
    return bool(slash) and stage not in STAGES


def named(name: str, store: Store) -> ArtifactRef:
    """The whole checkpoint of a store with this name. Raises NotFound, with a list of those that there are."""
    return _newest(store) if name == LATEST else _by_key(store, name)


def in_folder(folder: Path) -> Checkpoint:
    """The checkpoint of a folder, its own or that of an artifact. Raises NotFound."""
    inside = folder if (folder / "config.json").exists() else folder / "checkpoint"
    if not (inside / "config.json").exists():
        raise NotFound(f"{folder}: no checkpoint in it: neither config.json nor checkpoint/config.json")
    mark = inside.parent / MANIFEST
    if inside.name != "checkpoint" or not mark.exists():
        return Checkpoint(inside, str(folder))
    manifest = Manifest.model_validate_json(mark.read_text(encoding="utf-8"))
    return Checkpoint(inside, f"{manifest.stage} {manifest.key[:8]}", manifest.config or {})


def _newest(store: Store) -> ArtifactRef:
    """Of the most trained kind that there is, what is whole."""
    for stage in STAGES:
        for manifest in sorted(store.manifests(stage), key=lambda manifest: manifest.committed_at, reverse=True):
            if ref := store.load(stage, manifest.key):
                return ref
    raise NotFound(f'{store.root}: no checkpoint yet. `make demo` makes some; CONFIG=... and SET="store=..." say which store is meant')


def _by_key(store: Store, name: str) -> ArtifactRef:
    only, _, prefix = name.rpartition("/")
    stages = [stage for stage in STAGES if only in ("", stage)]
    found = [ref for stage in stages for ref in store.find(stage, prefix)] if prefix.isalnum() else []
    if len(found) == 1:
        return found[0]
    known = [manifest for stage in STAGES for manifest in store.manifests(stage)]
    alike = [manifest for manifest in known if manifest.stage in stages and manifest.key.startswith(prefix)]
    if alike and not found:
        raise NotFound(f"{store.uri_of(alike[0].stage, alike[0].key)} is not whole: run `make demo` again, it is rebuilt")
    lines = [f"\n  {manifest.stage:4} {manifest.key}  {manifest.committed_at}" for manifest in alike or known]
    listed = "".join(lines) or "\n  none: `make demo` makes some"
    problem = "begins more than one key" if alike else "is no folder and begins no key"
    raise NotFound(f"{name!r} {problem} in {store.root}. Checkpoints there:{listed}\nOr take the newest: MODEL={LATEST}")
