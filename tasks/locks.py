"""Prefect's lock manager on flock(2): the kernel frees a lock when its holder dies, kill -9 included.

Prefect's own FileSystemLockManager leaves its files behind then, and the next run waits for ever. The lock files here stay, empty;
only the kernel's lock on them counts. One machine: two machines that share an S3 store may build the same artifact twice, which
costs time but never mixes files, as the manifest is written last.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import threading
import time
from pathlib import Path
from typing import Any

from prefect.locking.protocol import LockManager

POLL_SECONDS = 0.1


class FlockManager(LockManager):
    """One lock file per key under a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._held: dict[str, tuple[str, int]] = {}
        self._guard = threading.Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> FlockManager:
        """Cache policies are copied deeply; the locks held are this process's and stay in one place."""
        return self

    def _try(self, key: str) -> int | None:
        """An open descriptor that holds the lock, or None when somebody else holds it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.folder / f"{key}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        return descriptor

    def acquire_lock(self, key: str, holder: str, acquire_timeout: float | None = None, hold_timeout: float | None = None) -> bool:
        """Take the lock, waiting for at most `acquire_timeout` seconds. `hold_timeout` is not kept: a lock lasts as long as its holder."""
        deadline = None if acquire_timeout is None else time.monotonic() + acquire_timeout
        while not self.is_lock_holder(key, holder):
            if (descriptor := self._try(key)) is not None:
                with self._guard:
                    self._held[key] = (holder, descriptor)
            elif deadline is not None and time.monotonic() >= deadline:
                return False
            else:
                time.sleep(POLL_SECONDS)
        return True

    async def aacquire_lock(self, key: str, holder: str, acquire_timeout: float | None = None, hold_timeout: float | None = None) -> bool:
        """`acquire_lock` in a thread."""
        return await asyncio.to_thread(self.acquire_lock, key, holder, acquire_timeout, hold_timeout)

    def release_lock(self, key: str, holder: str) -> None:
        """Give the lock back. Raises ValueError when `holder` does not hold it."""
        with self._guard:
            if not self.is_lock_holder(key, holder):
                raise ValueError(f"{holder} does not hold the lock {key}")
            _, descriptor = self._held.pop(key)
        os.close(descriptor)

    def is_locked(self, key: str) -> bool:
        """Whether anybody holds the lock."""
        if (descriptor := self._try(key)) is None:
            return True
        os.close(descriptor)
        return False

    def is_lock_holder(self, key: str, holder: str) -> bool:
        """Whether `holder`, in this process, holds the lock."""
        return self._held.get(key, (None,))[0] == holder

    def wait_for_lock(self, key: str, timeout: float | None = None) -> bool:
        """Wait until nobody holds the lock; False when that takes longer than `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.is_locked(key):
            if deadline is not None and time.monotonic() >= deadline:
                return False
            time.sleep(POLL_SECONDS)
        return True

    async def await_for_lock(self, key: str, timeout: float | None = None) -> bool:
        """`wait_for_lock` in a thread."""
        return await asyncio.to_thread(self.wait_for_lock, key, timeout)
