"""What a person sees while a stage works: lines in the terminal, a progress artifact in the UI, batched log lines of the run."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping
from logging import Logger, LoggerAdapter
from typing import Any
from uuid import UUID

from httpx import TransportError
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.exceptions import PrefectHTTPStatusError

SECONDS_BETWEEN_LINES = 3.0
SECONDS_BETWEEN_UPDATES = 2.0
SHOWN_METRICS = {"loss": "loss", "reward": "reward", "accuracy": "accuracy", "parallel_ratio": "parallel", "valid_ratio": "valid"}
"""Metrics that fit a terminal line, in this order, and their short names."""

_terminal = threading.Lock()


def say(text: str) -> None:
    """One line in the terminal, whole even when two stages speak at once."""
    with _terminal:
        print(text, flush=True)


def slug(text: str) -> str:
    """An artifact key as Prefect wants it: small letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


class Progress:
    """The progress of one stage."""

    def __init__(self, title: str, logger: Logger | LoggerAdapter[Any]) -> None:
        self.title = title
        self.logger = logger
        self._start = time.monotonic()
        self._said = self._updated = self._logged = -1e9
        self._artifact: UUID | None = None
        self._lines: list[str] = []

    def report(self, step: int, of: int, metrics: Mapping[str, float] | None = None) -> None:
        """Step `step` of `of` is done; the newest metrics. Cheap: most calls do nothing."""
        now, last = time.monotonic(), step >= of
        if last or now - self._said > SECONDS_BETWEEN_LINES:
            self._said = now
            say(self.line(step, of, metrics or {}))
        if last or now - self._updated > SECONDS_BETWEEN_UPDATES:
            self._updated = now
            self._update(100.0 * step / max(of, 1))

    def line(self, step: int, of: int, metrics: Mapping[str, float]) -> str:
        """`rl easy            7/10   reward 0.42  accuracy 0.71  12 s`"""
        shown = [f"{short} {metrics[name]:.2f}" for name, short in SHOWN_METRICS.items() if name in metrics]
        count = f"{step:>{len(str(of))}}/{of}"
        return "  ".join([f"  {self.title:<26}{count:>11}", *shown, f"{time.monotonic() - self._start:.0f} s"])

    def note(self, text: str) -> None:
        """Something a person should read, in the terminal and in the run's log."""
        say(f"  {self.title:<26} {text}")
        self.logger.info(text)

    def text(self, line: str) -> None:
        """A line of a program's log, for the run's log: sent in batches, as each call costs half a millisecond."""
        self._lines.append(line)
        if time.monotonic() - self._logged > SECONDS_BETWEEN_UPDATES or len(self._lines) > 200:
            self.flush()

    def flush(self) -> None:
        """Send the log lines that wait."""
        if self._lines:
            self._logged = time.monotonic()
            self.logger.info("\n".join(self._lines))
            self._lines.clear()

    def _update(self, percent: float) -> None:
        """The bar in the UI. A server that is away for a while, as when it is restarted, doesn't end hours of training."""
        try:
            if self._artifact is None:
                self._artifact = create_progress_artifact(percent, key=f"progress-{slug(self.title)}", description=self.title)
            else:
                update_progress_artifact(self._artifact, progress=percent)
        except (TransportError, PrefectHTTPStatusError) as error:
            say(f"  {self.title:<26} the Prefect server doesn't answer ({type(error).__name__}); the stage goes on")
