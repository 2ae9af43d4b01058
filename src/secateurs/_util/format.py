"""Numbers as text, the same in every report and on the command line: shares, counts, times, intervals."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import PurePath

SPACE = "\N{NO-BREAK SPACE}"
MINUS = "\N{MINUS SIGN}"
NOTHING = "–"  # stands for a missing value
_Z = 1.959963984540054  # two-sided 95 % of the normal distribution


@dataclass(frozen=True)
class MetricName:
    """Name of the metric of a run; `share` means that it is a fraction of examples, written as a percentage."""

    name: str = "accuracy"
    share: bool = True

    @staticmethod
    def called(name: str) -> MetricName:
        """The metric of that name: ours, "accuracy", is a share; of a user's own nothing is known, so it stays a number."""
        return MetricName(name, share=name == "accuracy")

    @property
    def title(self) -> str:
        """Name at the beginning of a sentence; a user's own name is not capitalised."""
        return self.name.capitalize() if self.share else self.name

    def value(self, value: float | None, digits: int = 2) -> str:
        """Format a value of the metric."""
        if value is None or not math.isfinite(value):
            return NOTHING
        return percent(value, digits) if self.share else signed(f"{value:.4g}")

    def change(self, value: float | None, digits: int = 2) -> str:
        """Format a difference of two values, with its sign."""
        if value is None or not math.isfinite(value):
            return NOTHING
        return signed(f"{100 * value:+.{digits}f}{SPACE}points" if self.share else f"{value:+.4g}")

    def amount(self, value: float) -> str:
        """Format a difference without a sign: "0.50 points"."""
        return signed(f"{100 * value:.2f}{SPACE}points" if self.share else f"{value:.4g}")


def percent(share: float | None, digits: int = 1) -> str:
    """Format a fraction as a percentage."""
    if share is None or not math.isfinite(share):
        return NOTHING
    return signed(f"{100 * share:.{digits}f}{SPACE}%")


def signed(text: str) -> str:
    """Replace hyphens by minus signs, which are as wide as a plus."""
    return text.replace("-", MINUS)


def plain(value: float | None, digits: int = 2) -> str:
    """Format a number with `digits` decimals."""
    return NOTHING if value is None or not math.isfinite(value) else signed(f"{value:.{digits}f}")


def short(value: float) -> str:
    """Format a number with three significant digits."""
    return signed(f"{value:.3g}") if math.isfinite(value) else "unknown"


def change(value: float | None) -> str | None:
    """Format a difference with its sign and two significant digits; None stays None."""
    return None if value is None else signed(f"{value:+.2g}")


def count(value: float | None) -> str:
    """Format a whole number with thousands separators."""
    return NOTHING if value is None else f"{round(value):,}"


def large(value: float | None) -> str:
    """Format a count with its magnitude: 40.6 M."""
    if value is None:
        return NOTHING
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{SPACE}{letter}" if value < 999.5 * size else f"{value / size:,.0f}{SPACE}{letter}"
    return count(value)


def size(value: float | None) -> str:
    """Format bytes in kB or MB."""
    if value is None:
        return NOTHING
    return f"{large(value)}B" if value >= 1000 else f"{value:.0f}{SPACE}B"


def clock(seconds: float | None) -> str:
    """Format seconds as 4.2 s, 3 min 05 s or 2 h 03 min."""
    if seconds is None or not math.isfinite(seconds):
        return NOTHING
    if seconds < 59.95:
        return f"{seconds:.1f}{SPACE}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}{SPACE}h{SPACE}{minutes:02d}{SPACE}min" if hours else f"{minutes}{SPACE}min{SPACE}{rest:02d}{SPACE}s"


def plural(number: int, word: str) -> str:
    """Format a number with its noun: 1 filter, 2 filters."""
    return f"{number:,}{SPACE}{word}{'' if number == 1 else 's'}"


def interval(share: float, examples: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share measured on `examples` examples."""
    if examples < 1:
        return 0.0, 1.0
    square = _Z * _Z / examples
    middle = (share + square / 2) / (1 + square)
    half = _Z * math.sqrt(share * (1 - share) / examples + square / (4 * examples)) / (1 + square)
    return round(max(0.0, middle - half), 12), round(min(1.0, middle + half), 12)


def removed(before: float, after: float) -> float:
    """Share that was removed; 0 where `before` is 0."""
    return 1 - after / before if before else 0.0


def folder_name(path: PurePath | None) -> str:
    """Name of a run: the last part of its folder."""
    return "a run in memory" if path is None else path.name or str(path)
