"""Where the project and its state lie. Standard library only: read before Prefect is set up."""

from __future__ import annotations

import os
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]


def state_folder() -> Path:
    """What runs keep beside artifacts: Prefect's database, locks, work folders, downloads. PARALLEL_R1_STATE moves it."""
    return Path(os.environ.get("PARALLEL_R1_STATE", PROJECT / ".state")).resolve()


def store_root(store: str) -> str:
    """Where the artifacts of a config's `store` lie: a URL as it is, a folder relative to the project."""
    return store if "://" in store else str((PROJECT / store).resolve())
