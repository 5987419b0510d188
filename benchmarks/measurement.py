"""What a benchmark returns."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Measurement(NamedTuple):
    """One number; `better` says in which direction."""

    value: float
    unit: str
    better: Literal["lower", "higher"]
