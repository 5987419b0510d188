"""Look into the artifact store, and tidy it.

    python -m flows.artifacts list [CONFIG] [--set FIELD=VALUE ...] [--deep]
    python -m flows.artifacts lineage ARTIFACT [CONFIG] ...
    python -m flows.artifacts gc [CONFIG] ... [--keep ARTIFACT ...] [--younger-than HOURS] [--apply]

The config says where the store is. `gc` keeps what the newest page of each run name was made from, what --keep names, and what is
younger than a day, and so with checkpoints of trainings that were never finished; without --apply it only says what it would remove.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta

from parallel_r1.config import ConfigError, load
from parallel_r1.lineage import Inventory, Name, size_of, spelled
from parallel_r1.store import ArtifactRef, Manifest, Store, StoreError
from tasks.places import PROJECT, store_root
from tasks.uploads import FOLDER


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; gives the exit code."""
    options = _parser().parse_args(arguments)
    try:
        config = load(PROJECT / options.recipe, options.overrides)
        store = Store(store_root(config.store))
        inventory = Inventory.of(store)
        match options.command:
            case "list":
                return _list(store, inventory, options.deep)
            case "lineage":
                print("\n".join(inventory.tree(inventory.named(options.artifact))))
            case "gc":
                _collect(store, inventory, options)
    except (ConfigError, StoreError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m flows.artifacts")
    commands = parser.add_subparsers(dest="command", required=True)
    lister = commands.add_parser("list", help="what is in the store")
    lister.add_argument("--deep", action="store_true", help="hash every file; what is damaged is named, and built again by the next run")
    lineage = commands.add_parser("lineage", help="what an artifact was made from")
    lineage.add_argument("artifact", help="stage/key, or a unique beginning of the key")
    collector = commands.add_parser("gc", help="remove what no kept run reaches")
    collector.add_argument("--keep", nargs="*", default=[], metavar="ARTIFACT", help="keep these too, with all that they were made from")
    collector.add_argument("--younger-than", type=float, default=24, metavar="HOURS", help="keep what is younger; 24 when left out")
    collector.add_argument("--apply", action="store_true", help="remove; without it nothing is touched")
    for command in (lister, lineage, collector):
        command.add_argument("recipe", nargs="?", default="pipeline_config.yaml", help="config that names the store")
        command.add_argument("--set", dest="overrides", nargs="*", action="extend", default=[], metavar="FIELD=VALUE")
    return parser


def _list(store: Store, inventory: Inventory, deep: bool) -> int:
    """Every artifact with size, age and what was made from it; exit code 1 when a deep check found damage."""
    print(f"{len(inventory.artifacts)} artifacts in {store.root}")
    damaged = 0
    for name, manifest in sorted(inventory.artifacts.items(), key=lambda item: item[1].committed_at):
        used = ", ".join(sorted({user[0] for user in inventory.users.get(name, [])})) or "nothing"
        fault = store.check(ArtifactRef(stage=name[0], key=name[1], uri=store.uri_of(*name), digest=manifest.digest), deep)
        print(f"{spelled(name):<46} {_in_words(size_of(manifest)):>9} {_age(manifest.committed_at):>8}  used by {used}")
        if fault:
            damaged += 1
            store.invalidate(*name)
            print(f"  damaged: {fault}. The next run that needs it builds it again")
    return 1 if damaged else 0


def _collect(store: Store, inventory: Inventory, options: argparse.Namespace) -> None:
    kept = {run: spelled(name) for run, name in inventory.kept_runs().items()}
    print("kept runs: " + (", ".join(f"{run} ({name})" for run, name in kept.items()) or "none"))
    garbage: list[Name] = inventory.garbage(options.keep, timedelta(hours=options.younger_than))
    for name in garbage:
        print(f"{'removed' if options.apply else 'would remove'} {spelled(name)}  {_in_words(size_of(inventory.artifacts[name]))}")
        if options.apply:
            store.remove(*name)
    for manifest in _stale_checkpoints(store, inventory.artifacts.keys() - set(garbage), timedelta(hours=options.younger_than)):
        print(f"{'removed' if options.apply else 'would remove'} {FOLDER}/{manifest.stage}/{manifest.key}  {_in_words(size_of(manifest))}")
        if options.apply:
            Store(f"{store.root}/{FOLDER}").remove(manifest.stage, manifest.key)
    total = _in_words(sum(size_of(inventory.artifacts[name]) for name in garbage))
    print(f"{len(garbage)} of {len(inventory.artifacts)} artifacts, {total}" + ("" if options.apply else "; APPLY=1 removes them"))


def _stale_checkpoints(store: Store, kept: set[Name], younger_than: timedelta) -> Iterator[Manifest]:
    """Uploaded checkpoints (tasks/uploads.py) of no artifact that is kept, which no run has added to for a while."""
    for manifest in list(Store(f"{store.root}/{FOLDER}").manifests()):
        old = datetime.now(UTC) - datetime.fromisoformat(manifest.committed_at) > younger_than
        if old and (manifest.stage, manifest.key.rsplit("-", 1)[0]) not in kept:
            yield manifest


def _in_words(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _age(committed_at: str) -> str:
    seconds = (datetime.now(UTC) - datetime.fromisoformat(committed_at)).total_seconds()
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


if __name__ == "__main__":
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:  # `make artifacts | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code)
