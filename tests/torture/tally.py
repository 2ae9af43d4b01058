"""What a part of the torture reports."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tally:
    """How many cases a part tried, how each ended (by kind), and a line for every failure."""

    part: str
    tried: int
    outcomes: dict[str, int]
    failures: tuple[str, ...]
    seconds: float
