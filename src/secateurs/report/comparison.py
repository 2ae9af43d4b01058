"""The page that compares methods under the same budgets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from secateurs._util.files import write_text
from secateurs._util.format import percent, plural
from secateurs._util.tables import Sheet
from secateurs.report.page import render
from secateurs.report.svg import COLOURS, Axis, Dot, Figure, Plot, colour_of, padded, swatch, ticks


@dataclass(frozen=True)
class CurvePoint:
    """The networks of one method at one target, over seeds. Shares are fractions."""

    macs_removed: float
    accuracy: float  # mean, on the test set
    spread: float  # standard deviation; 0 for one seed
    seeds: int


@dataclass(frozen=True)
class MethodCurve:
    """The networks of one method, by MACs removed."""

    name: str
    points: tuple[CurvePoint, ...]


@dataclass(frozen=True)
class BudgetComparison:
    """The comparison under one budget."""

    name: str
    budget: str  # in words
    leads: str  # the best methods at each target, in words
    curves: tuple[MethodCurve, ...]
    tables: tuple[Sheet, ...]


@dataclass(frozen=True)
class MethodComparison:
    """A comparison of methods: all that its page says."""

    title: str
    headline: str
    start: float  # test accuracy of the untouched network
    notes: tuple[str, ...]  # how to read it
    warnings: tuple[str, ...]  # what is missing, or makes the comparison unfair
    budgets: tuple[BudgetComparison, ...]
    every: Sheet  # all rows

    @property
    def methods(self) -> tuple[str, ...]:
        """Of all budgets, in the order of their first appearance: a method has one colour on the whole page."""
        return tuple(dict.fromkeys(curve.name for one in self.budgets for curve in one.curves))


def write_method_comparison(comparison: MethodComparison, path: Path) -> Path:
    """Write the page as one HTML file that needs nothing else, whole or not at all, and return its path."""
    budgets = []
    for one in comparison.budgets:
        floor = closer_look(comparison.start, [[point.accuracy for point in curve.points] for curve in one.curves])
        enlarged = None if floor is None else curves(comparison, one, floor)
        names = [swatch(comparison.methods.index(curve.name)) + curve.name for curve in one.curves]
        budgets.append((one, curves(comparison, one), enlarged, names))
    write_text(path, render("methods.html", comparison.title, comparison=comparison, budgets=budgets))
    return path


def closer_look(start: float, curves: Sequence[Sequence[float]]) -> float | None:
    """The lowest accuracy of a second figure that enlarges the better half of the curves; None where one figure suffices."""
    lowest = sorted((min(curve) for curve in curves if curve), reverse=True) or [start]
    whole, better = start - lowest[-1], start - lowest[(len(lowest) - 1) // 2]
    shown = max(1.25 * better, 0.02)
    return start - shown if shown < 0.6 * whole else None


def curves(comparison: MethodComparison, one: BudgetComparison, floor: float | None = None) -> Figure:
    """Test accuracy against MACs removed: a line for each method, bars of one standard deviation; only from `floor` up."""
    found = [point for curve in one.curves for point in curve.points]
    reach = [p.accuracy + sign * p.spread for p in found for sign in (-1, 1)]
    low, high = padded([comparison.start, *(value for value in reach if floor is None or value >= floor)], least=1e-3)
    low, high = low if floor is None else floor, min(high, 1.02)
    right = max((p.macs_removed for p in found), default=0.5) * 1.04
    y = Axis(low, high, "accuracy on the test set", percent, at=ticks(low, min(high, 1.0), 6))
    plot = Plot((540.0, 360.0), Axis(0.0, right, "MACs removed", percent, 6), y)
    plot.level(comparison.start, "diagonal")
    for curve in one.curves:
        place = comparison.methods.index(curve.name)
        colour = colour_of(place)
        dots = [
            Dot(p.macs_removed, p.accuracy, _tip(curve.name, p), f"point {colour}", error=p.spread)
            for p in curve.points
            if p.accuracy >= low
        ]
        points = [(0.0, comparison.start), *((p.macs_removed, p.accuracy) for p in curve.points)]
        plot.curve(points, dots, f"way {'dashed ' if place >= COLOURS else ''}r{place % COLOURS}")
    words = f"{plural(len(one.curves), 'method')}, {plural(len(found), 'point')}; original {percent(comparison.start, 2)}"
    part = "" if floor is None else ", the upper part"
    return plot.figure(f"Accuracy against MACs removed, budget {one.name}{part}", words)


def _tip(name: str, point: CurvePoint) -> str:
    spread = f" ± {100 * point.spread:.2f} points ({plural(point.seeds, 'seed')})" if point.seeds > 1 else ""
    return f"{name}: {percent(point.accuracy, 2)}{spread}, {percent(point.macs_removed)} of the MACs removed"
