"""The page that compares methods under the same budgets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from secateurs._util.files import write_text
from secateurs._util.format import percent, plural
from secateurs.report.page import render
from secateurs.report.svg import COLOURS, Axis, Dot, Figure, Plot, colour_of, padded, swatch, ticks
from secateurs_lab.sheets import Sheet


@dataclass(frozen=True)
class Summary:
    """One method under one budget at one target, over its seeds. Shares are fractions."""

    method: str
    target: float
    macs_removed: float
    test: float
    test_spread: float  # standard deviation over seeds; 0 for one
    seeds: int
    reached: bool


@dataclass(frozen=True)
class BudgetComparison:
    """The comparison under one budget."""

    name: str
    budget: str  # in words
    leads: str  # the best methods at each target, in words
    points: tuple[Summary, ...]
    tables: tuple[Sheet, ...]

    @property
    def curves(self) -> dict[str, list[Summary]]:
        """The points by method, in the order of their first appearance."""
        return {name: [p for p in self.points if p.method == name] for name in dict.fromkeys(p.method for p in self.points)}


@dataclass(frozen=True)
class MethodComparison:
    """A comparison of methods: all that its page says."""

    title: str
    headline: str
    start: float  # test accuracy of the untouched network
    notes: tuple[str, ...]  # how to read it
    warnings: tuple[str, ...]  # what is missing, or makes the comparison unfair
    budgets: tuple[BudgetComparison, ...]
    across: tuple[Sheet, ...]  # what several budgets make together
    every: Sheet  # all rows

    @property
    def methods(self) -> tuple[str, ...]:
        """Of all budgets, in the order of their first appearance: a method has one colour on the whole page."""
        return tuple(dict.fromkeys(name for one in self.budgets for name in one.curves))


def write_method_comparison(comparison: MethodComparison, path: Path) -> Path:
    """Write the page as one HTML file that needs nothing else, whole or not at all, and return its path."""
    budgets = []
    for one in comparison.budgets:
        floor = closer_look(comparison.start, [[point.test for point in points] for points in one.curves.values()])
        enlarged = None if floor is None else curves(comparison, one, floor)
        names = [swatch(comparison.methods.index(name)) + name for name in one.curves]
        budgets.append((one, curves(comparison, one), enlarged, names))
    write_text(
        path, render("methods.html", comparison.title, package="secateurs_lab.compare", comparison=comparison, budgets=budgets)
    )
    return path


def closer_look(start: float, curves: Sequence[Sequence[float]]) -> float | None:
    """The lowest accuracy of a second figure that enlarges the better half of the curves; None where one figure suffices."""
    lowest = sorted((min(curve) for curve in curves if curve), reverse=True) or [start]
    whole, better = start - lowest[-1], start - lowest[(len(lowest) - 1) // 2]
    shown = max(1.25 * better, 0.02)
    return start - shown if shown < 0.6 * whole else None


def curves(comparison: MethodComparison, one: BudgetComparison, floor: float | None = None) -> Figure:
    """Test accuracy against MACs removed: a line for each method, bars of one standard deviation; only from `floor` up."""
    reach = [p.test + sign * p.test_spread for p in one.points for sign in (-1, 1)]
    low, high = padded([comparison.start, *(value for value in reach if floor is None or value >= floor)], least=1e-3)
    low, high = low if floor is None else floor, min(high, 1.02)
    right = max((p.macs_removed for p in one.points), default=0.5) * 1.04
    y = Axis(low, high, "accuracy on the test set", percent, at=ticks(low, min(high, 1.0), 6))
    plot = Plot((540.0, 360.0), Axis(0.0, right, "MACs removed", percent, 6), y)
    plot.level(comparison.start, "diagonal")
    for name, points in one.curves.items():
        place = comparison.methods.index(name)
        dots = [
            Dot(p.macs_removed, p.test, _tip(p), f"point {colour_of(place)}", error=p.test_spread)
            for p in points
            if p.test >= low
        ]
        way = [(0.0, comparison.start), *((p.macs_removed, p.test) for p in points)]
        plot.curve(way, dots, f"way {'dashed ' if place >= COLOURS else ''}r{place % COLOURS}")
    words = f"{plural(len(one.curves), 'method')}, {plural(len(one.points), 'point')}; original {percent(comparison.start, 2)}"
    part = "" if floor is None else ", the upper part"
    return plot.figure(f"Accuracy against MACs removed, budget {one.name}{part}", words)


def _tip(point: Summary) -> str:
    spread = f" ± {100 * point.test_spread:.2f} points ({plural(point.seeds, 'seed')})" if point.seeds > 1 else ""
    return f"{point.method}: {percent(point.test, 2)}{spread}, {percent(point.macs_removed)} of the MACs removed"
