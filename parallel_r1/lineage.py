"""What is in a store, what was made from what, and what nobody needs any more. Read from the manifests alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any

from parallel_r1.store import Manifest, Store, StoreError

Name = tuple[str, str]
"""Stage and key of an artifact."""

PAGES = ("report", "experiments")
"""Stages whose artifact a person reads at the end of a run."""


def spelled(name: Name) -> str:
    """`sft/3fa9...`"""
    return "/".join(name)


@dataclass(frozen=True)
class Inventory:
    """The artifacts of a store by name."""

    artifacts: Mapping[Name, Manifest]

    @classmethod
    def of(cls, store: Store) -> Inventory:
        """Read every manifest of a store."""
        return cls({(manifest.stage, manifest.key): manifest for manifest in store.manifests()})

    def inputs(self, name: Name) -> dict[str, Name]:
        """What an artifact was made from, by the name that its stage gives it."""
        manifest = self.artifacts.get(name)
        return {label: (given["stage"], given["key"]) for label, given in manifest.inputs.items()} if manifest else {}

    @cached_property
    def users(self) -> dict[Name, list[Name]]:
        """What was made from an artifact directly."""
        found: dict[Name, list[Name]] = {}
        for name in self.artifacts:
            for given in self.inputs(name).values():
                found.setdefault(given, []).append(name)
        return found

    def named(self, text: str) -> Name:
        """The artifact that `stage/key`, `key`, a unique beginning of either, or a URI means. Raises StoreError otherwise."""
        wanted = text.rstrip("/").split("/")[-2:]
        found = [name for name in self.artifacts if name[1].startswith(wanted[-1]) and (len(wanted) < 2 or name[0] == wanted[0])]
        if len(found) != 1:
            listed = f": {', '.join(map(spelled, found[:5]))}" if found else ""
            raise StoreError(f"{text!r}: {len(found)} artifacts of the store are called so{listed}. `make artifacts` lists them")
        return found[0]

    def tree(self, name: Name, label: str = "", depth: int = 0) -> Iterator[str]:
        """An artifact and what it was made from, one line each, indented; a branch that was shown already is not shown again."""
        yield from self._tree(name, label, depth, set())

    def _tree(self, name: Name, label: str, depth: int, shown: set[Name]) -> Iterator[str]:
        manifest = self.artifacts.get(name)
        called = f"{label}: " if label else ""
        if manifest is None:
            yield f"{'  ' * depth}{called}{spelled(name)}  (no longer in the store)"
        elif name in shown:
            yield f"{'  ' * depth}{called}{spelled(name)}  (see above)"
        else:
            shown.add(name)
            yield f"{'  ' * depth}{called}{spelled(name)}  digest {manifest.digest[:12]}  {manifest.committed_at}  {manifest.seconds:.0f} s"
            for inner, given in self.inputs(name).items():
                yield from self._tree(given, inner, depth + 1, shown)

    def reached(self, roots: Iterable[Name]) -> set[Name]:
        """The roots and all that they were made from, however indirectly."""
        found: set[Name] = set()
        waiting = list(roots)
        while waiting:
            name = waiting.pop()
            if name not in found:
                found.add(name)
                waiting += self.inputs(name).values()
        return found

    def kept_runs(self) -> dict[str, Name]:
        """The newest page of each run name."""
        newest: dict[str, Manifest] = {}
        for (stage, _), manifest in self.artifacts.items():
            name = run_name(manifest)
            if stage in PAGES and (name not in newest or manifest.committed_at > newest[name].committed_at):
                newest[name] = manifest
        return {name: (manifest.stage, manifest.key) for name, manifest in newest.items()}

    def garbage(self, keep: Iterable[str], younger_than: timedelta) -> list[Name]:
        """What no kept run reaches. Kept are the newest page of each run name, whatever `keep` names, and whatever is younger than
        `younger_than`, as a run that is at work now may need it."""
        now = datetime.now(UTC)
        young = [name for name, manifest in self.artifacts.items() if now - datetime.fromisoformat(manifest.committed_at) < younger_than]
        reached = self.reached([*self.kept_runs().values(), *map(self.named, keep), *young])
        return sorted(name for name in self.artifacts if name not in reached)


def run_name(manifest: Manifest) -> str:
    """What the run of a page is called."""
    config: Any = manifest.config
    return config.get("name", "") if isinstance(config, dict) else ""


def size_of(manifest: Manifest) -> int:
    """Bytes of all files."""
    return sum(entry.size for entry in manifest.files.values())
