"""Pages that compare: several runs side by side, and methods under the same budgets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from secateurs._util.files import write_text
from secateurs._util.format import NOTHING, Metric, clock, count, percent, plural
from secateurs._util.tables import Sheet
from secateurs.config import recipe_fields
from secateurs.report.charts import frontier
from secateurs.report.load import RunReport
from secateurs.report.page import render
from secateurs.report.svg import COLOURS, Axis, Dot, Figure, Plot, colour_of, digits, line, padded, swatch, ticks
from secateurs.report.verdicts import verdict

# ---- runs ---------------------------------------------------------------------------------------------------------------


def runs_page(runs: Sequence[RunReport]) -> str:
    """The comparison of several runs."""
    metrics = list(dict.fromkeys(run.metric for run in runs))
    finished = [(run, run.end) for run in runs if run.end is not None]
    names = [swatch(place % COLOURS) + run.name for place, run in enumerate(runs)]
    # runs of different metrics have no axis in common
    places = [[place for place, run in enumerate(runs) if run.metric == metric] for metric in metrics]
    drawn = [frontier([runs[place] for place in some], some) for some in places]
    widths = [{layer.name: layer for layer in run.layers} for run in runs]
    return render(
        "runs.html",
        f"{len(runs)} runs compared",
        runs=runs,
        metric=metrics[0] if len(metrics) == 1 else Metric("metric"),
        most=max(finished, key=lambda one: one[1].macs.removed)[0] if finished else None,
        best=max(finished, key=lambda one: one[1].test.after)[0] if finished and len(metrics) == 1 else None,
        cautions=_cautions(runs),
        names=names,
        results=[[name, *_result(run)] for name, run in zip(names, runs, strict=True)],
        frontiers=[figure for figure in drawn if figure is not None],
        widths_columns=[f"left in {run.name}" for run in runs],
        widths=[
            [name, count(layer.filters), *(count(layers[name].left) for layers in widths)]
            for name, layer in widths[0].items()
            if all(name in layers for layers in widths)
        ],
        recipes=_recipe_differences(runs),
    )


def _cautions(runs: Sequence[RunReport]) -> list[str]:
    """Differences between the runs that make the comparison unfair, and what is wrong with each of them."""
    found = []
    if len({run.provenance.get("data", {}).get("sha256") for run in runs}) > 1:
        found.append("The runs saw different data or splits: compare their changes, not their accuracies.")
    if len({run.provenance.get("model", {}).get("weights_sha256") for run in runs}) > 1:
        found.append("The runs started from different weights.")
    if len({run.metric for run in runs}) > 1:
        found.append("The runs were measured by different metrics.")
    found += [f"{run.name} is not finished ({run.at}): its figures are of its last step." for run in runs if run.end is None]
    return found + [f"{run.name}: {note}" for run in runs for note in run.notes]


def _result(run: RunReport) -> list[str]:
    """What a run reached; an unfinished one, up to its last step."""
    drop = {True: "kept", False: "exceeded", None: NOTHING}[verdict(run).kept]
    filters = count(sum(len(step.removed) for step in run.steps))
    if run.end is not None:
        test, shares, seconds = run.end.test, (run.end.macs.removed, run.end.parameters.removed), run.end.seconds
        measured = [run.metric.value(test.before), run.metric.value(test.after), run.metric.change(test.change)]
        return [run.model, *measured, *map(percent, shares), filters, drop, clock(seconds)]
    removed = [percent(s) for step in run.steps[-1:] for s in (step.macs_removed, step.parameters_removed)] or [NOTHING] * 2
    return [run.model, *[NOTHING] * 3, *removed, filters, drop, clock(run.seconds)]


def _recipe_differences(runs: Sequence[RunReport]) -> list[list[str]]:
    """The fields that differ, with the value of each run; settings of training that all runs have one by one."""
    recipes = [{} if run.recipe is None else recipe_fields(run.recipe) for run in runs]
    common = {name for name in recipes[0] if all(isinstance(one.get(name), Mapping) for one in recipes)}
    flat = [_flat(one, common) for one in recipes]
    names = dict.fromkeys(name for one in flat for name in one)
    rows = [[name, *(str(one.get(name, NOTHING)) for one in flat)] for name in names]
    return [row for row in rows if len(set(row[1:])) > 1]


def _flat(recipe: Mapping[str, Any], common: set[str]) -> dict[str, Any]:
    """The fields of a recipe; a training that not all runs have is one field, or its settings would hide other differences."""
    found: dict[str, Any] = {}
    for name, value in recipe.items():
        if name in common:
            found |= {f"{name}.{key}": one for key, one in value.items()}
        elif isinstance(value, Mapping):
            shown = [f"{key} {value[key]}" for key in ("epochs", "batch", "lr") if key in value]
            found[name] = ", ".join(shown) or "as by default"
        else:
            found[name] = value
    return found


# ---- methods ------------------------------------------------------------------------------------------------------------


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
    plot = Plot(
        (540.0, 360.0),
        Axis(0.0, right, "MACs removed", ticks(0.0, right, 6), lambda v: percent(v, 0)),
        Axis(low, high, "accuracy on the test set", ticks(low, min(high, 1.0), 6), lambda v: percent(v, digits(high - low))),
        right=12,
    )
    plot.add(line(plot.left, plot.y(comparison.start), plot.right, plot.y(comparison.start), "diagonal"))
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
