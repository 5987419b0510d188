"""Measured numbers with their 95 % intervals, and how they are written."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NOTHING = "–"


def number(value: object) -> float:
    """A float; NaN for everything that is no number."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


@dataclass(frozen=True)
class Estimate:
    """A value and its 95 % interval, in the metric's own unit (shares are 0..1). NaN where unknown."""

    value: float = math.nan
    low: float = math.nan
    high: float = math.nan

    @property
    def known(self) -> bool:
        """There is a value to show."""
        return math.isfinite(self.value)

    @property
    def bounded(self) -> bool:
        """There is an interval to show."""
        return self.known and math.isfinite(self.low) and math.isfinite(self.high)

    @property
    def half(self) -> float:
        """Half the width of the interval."""
        return (self.high - self.low) / 2

    def percent(self) -> str:
        """The value in percent, without the sign: 75.0."""
        return written(self.value * 100)

    def percents(self) -> str:
        """The interval in percent: 70.3 to 79.7."""
        return f"{written(self.low * 100)} to {written(self.high * 100)}" if self.bounded else ""


def estimate(metrics: Mapping[str, Any], name: str) -> Estimate:
    """The metric `name` of a set in results.json; an unknown one where it is missing."""
    entry = metrics.get(name)
    if isinstance(entry, Mapping):
        return Estimate(*(number(entry.get(part)) for part in ("value", "low", "high")))
    return Estimate(number(entry))


def mean_of(estimates: Sequence[Estimate]) -> Estimate:
    """The mean over independent sets, every set with equal weight; the interval's arms add in squares."""
    known = [one for one in estimates if one.known]
    if not known:
        return Estimate()
    value = math.fsum(one.value for one in known) / len(known)
    below = math.sqrt(math.fsum((one.value - one.low) ** 2 for one in known)) / len(known)
    above = math.sqrt(math.fsum((one.high - one.value) ** 2 for one in known)) / len(known)
    return Estimate(value, value - below, value + above)


def written(value: float, digits: int = 1) -> str:
    """A number with fixed digits, a true minus, and no minus zero."""
    if not math.isfinite(value):
        return NOTHING
    text = f"{value:,.{digits}f}"
    return text.lstrip("-") if float(text.replace(",", "")) == 0 else text.replace("-", "−")


def signed(value: float) -> str:
    """A difference: +3.0 or −3.0."""
    text = written(value)
    return f"+{text}" if value > 0 and text.strip("0.") else text


def duration(seconds: float) -> str:
    """Seconds as a person says them: 4.2 s, 3 min 20 s, 2 h 05 min."""
    if not math.isfinite(seconds):
        return NOTHING
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
