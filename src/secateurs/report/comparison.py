"""The page of several runs side by side: outcomes, frontiers, widths at each site, and where their recipes differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from string import Template

from secateurs._util.files import write_text
from secateurs._util.format import NOTHING, Metric, clock, count, percent, plural
from secateurs.report.charts.allocation import frontier
from secateurs.report.charts.figure import (
    Child,
    Figure,
    Frame,
    Html,
    Scale,
    asset,
    axes,
    digits,
    dot,
    el,
    join,
    line,
    mark,
    padded,
    ticks,
)
from secateurs.report.records import RunRecord
from secateurs.report.verdicts import verdict
from secateurs.report.widgets import copyable, figure, panel, section, table, warnings


def title(runs: Sequence[RunRecord]) -> str:
    """What the page is called."""
    return f"{len(runs)} runs compared"


def page(runs: Sequence[RunRecord]) -> Html:
    """The body of the comparison."""
    notes = [f"{run.name}: {note}" for run in runs for note in run.notes]
    unfinished = [
        f"{run.name} is not finished ({run.at}): its figures are of its last step." for run in runs if run.end is None
    ]
    return join(
        el(
            "header",
            el("p", el("b", "secateurs"), " · comparison", class_="eyebrow"),
            el("h1", title(runs)),
            el("p", *_headline(runs), class_="headline"),
            warnings([*_unlike(runs), *unfinished, *notes]),
        ),
        el("main", _outcomes(runs), _frontier(runs), _widths(runs), _recipes(runs)),
        el("footer", "Each run's own report: secateurs report RUN"),
    )


def _headline(runs: Sequence[RunRecord]) -> list[Html | str]:
    done = [run for run in runs if run.end is not None]
    if not done:
        return ["None of them is finished yet."]
    most = max(done, key=lambda run: run.end.macs.removed if run.end else 0.0)
    best = max(done, key=lambda run: run.end.test.after if run.end else 0.0)
    assert most.end is not None
    assert best.end is not None
    if len({run.metric for run in runs}) > 1:
        return [el("b", most.name), f" removes the most MACs ({percent(most.end.macs.removed)})."]
    if most is best:
        shares = f"{percent(most.end.macs.removed)} of the MACs removed"
        return [
            el("b", most.name),
            f" leads in both: {shares}, test {most.metric.name} {most.metric.value(most.end.test.after)}.",
        ]
    return [
        el("b", most.name),
        f" removes the most MACs ({percent(most.end.macs.removed)}), ",
        el("b", best.name),
        f" keeps the highest test {best.metric.name} ({best.metric.value(best.end.test.after)}).",
    ]


def _metric(runs: Sequence[RunRecord]) -> Metric:
    """The metric that all runs were measured by; where there are several, a word for any of them."""
    return runs[0].metric if len({run.metric for run in runs}) == 1 else Metric("metric")


def _unlike(runs: Sequence[RunRecord]) -> list[str]:
    """What makes the comparison lame."""
    found = []
    digests = {str((run.provenance.get("data") or {}).get("sha256")) for run in runs}
    if len(digests) > 1:
        found.append("The runs saw different data or splits: compare their changes, not their accuracies.")
    if len({str((run.provenance.get("model") or {}).get("weights_sha256")) for run in runs}) > 1:
        found.append("The runs started from different weights.")
    if len({run.metric for run in runs}) > 1:
        found.append("The runs were measured by different metrics.")
    return found


def _outcomes(runs: Sequence[RunRecord]) -> Html:
    name = _metric(runs).name
    columns = (
        "Run",
        "Network",
        f"Test {name} before",
        "after",
        "change",
        "MACs removed",
        "Parameters removed",
        "Filters",
        "Drop",
        "Time",
    )
    rows = [_outcome(place, run) for place, run in enumerate(runs)]
    return section("outcomes", "What came out", "", copyable(table(columns, rows)))


def _outcome(place: int, run: RunRecord) -> list[Child]:
    kept = {True: "kept", False: "exceeded", None: NOTHING}[verdict(run).kept]
    gone = count(sum(len(step.removed) for step in run.steps))
    if run.end is not None:
        test, macs, parameters = run.end.test, run.end.macs.removed, run.end.parameters.removed
        measured = (run.metric.value(test.before), run.metric.value(test.after), run.metric.change(test.change))
        return [_name(place, run), run.model, *measured, percent(macs), percent(parameters), gone, kept, clock(run.end.seconds)]
    last = run.steps[-1] if run.steps else None
    shares = (NOTHING, NOTHING) if last is None else (percent(last.macs_removed), percent(last.parameters_removed))
    time = clock(sum(step.seconds for step in run.steps))
    return [_name(place, run), run.model, NOTHING, NOTHING, NOTHING, *shares, gone, kept, time]


def _name(place: int, run: RunRecord) -> Html:
    """The run's name with the colour of its line."""
    swatch = el("svg", el("circle", cx=6, cy=6, r=5, class_=f"point r{place % 8}"), class_="figure swatch", viewBox="0 0 12 12")
    return join(swatch, run.name)


def _frontier(runs: Sequence[RunRecord]) -> Html | None:
    drawn = []
    for metric in dict.fromkeys(run.metric for run in runs):  # different metrics have no axis in common
        places = [place for place, run in enumerate(runs) if run.metric == metric]
        drawn.append(figure(frontier([runs[place] for place in places], places)))
    drawn = [one for one in drawn if one is not None]
    if not drawn:
        return None
    key = el("ul", *(el("li", _name(place, run)) for place, run in enumerate(runs)), class_="scale")
    lead = "Every step of every run; filled points are beaten by no other of their run."
    return section("frontier", f"{_metric(runs).title} against MACs", lead, panel(*drawn, key))


def _widths(runs: Sequence[RunRecord]) -> Html | None:
    """Filters left in every layer that all runs have."""
    known = [{layer.name: layer for layer in run.layers} for run in runs]
    names = [name for name in known[0] if all(name in layers for layers in known)]
    if not names:
        return None
    columns = ("Layer", "Filters", *(f"left in {run.name}" for run in runs))
    rows = [[name, count(known[0][name].filters), *(count(layers[name].left) for layers in known)] for name in names]
    return section("widths", "Filters left in each layer", "", copyable(table(columns, rows)))


def _recipes(runs: Sequence[RunRecord]) -> Html:
    """The fields that differ, training settings included."""
    tables = {name for run in runs for name, value in run.recipe.items() if isinstance(value, dict)}
    lacking = {name for name in tables if any(name not in run.recipe for run in runs)}
    flat = [_flat({n: _in_short(v) if n in lacking else v for n, v in run.recipe.items()}) for run in runs]
    names = [
        name for name in dict.fromkeys(key for one in flat for key in one) if len({str(one.get(name)) for one in flat}) > 1
    ]
    if not names:
        return section("recipes", "Recipes", "All runs had the same recipe.")
    columns = ("Field", *(run.name for run in runs))
    rows = [[name, *(str(one.get(name, NOTHING)) for one in flat)] for name in names]
    return section("recipes", "Where the recipes differ", "", copyable(table(columns, rows)))


def _in_short(settings: dict[str, object]) -> str:
    """A training that not all runs have: all of its settings would drown what else differs."""
    return ", ".join(f"{name} {settings[name]}" for name in ("epochs", "batch", "lr") if name in settings) or "as by default"


def _flat(fields: object, prefix: str = "") -> dict[str, object]:
    if not isinstance(fields, dict):
        return {prefix: fields}
    found: dict[str, object] = {}
    for key, value in fields.items():
        found |= _flat(value, f"{prefix}.{key}" if prefix else str(key))
    return found


_WIDTH, _HEIGHT = 540.0, 360.0
_COLOURS = 8  # that the page's style has; further curves are dashed, with hollow points
_ACCURACY = Metric()


@dataclass(frozen=True)
class CurvePoint:
    """Networks of one method at one target. Shares are fractions."""

    macs_removed: float
    accuracy: float
    spread: float  # standard deviation over seeds; 0 of one
    seeds: int


@dataclass(frozen=True)
class MethodCurve:
    """One method's networks, MACs removed rising."""

    name: str
    points: tuple[CurvePoint, ...]


@dataclass(frozen=True)
class ContestTable:
    """A table in words."""

    title: str
    columns: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Round:
    """One budget: what it was, who led, its curves and tables."""

    name: str
    budget: str  # in words
    leads: str
    curves: tuple[MethodCurve, ...]
    tables: tuple[ContestTable, ...]


@dataclass(frozen=True)
class Contest:
    """All that the page says."""

    title: str
    headline: str
    start: float  # test accuracy of the untouched network
    notes: tuple[str, ...]  # how to read it
    troubles: tuple[str, ...]  # what is missing or lame
    rounds: tuple[Round, ...]
    every: ContestTable  # all rows

    @property
    def methods(self) -> tuple[str, ...]:
        """Of all rounds, in the order they first come; a method has one colour on the whole page."""
        return tuple(dict.fromkeys(curve.name for one in self.rounds for curve in one.curves))


def write_contest(contest: Contest, path: Path) -> Path:
    """Write the page as one HTML file that needs nothing else, whole or not at all; gives its path."""
    text = Template(asset("page.html")).substitute(
        title=escape(contest.title),
        generator=f"secateurs {version('secateurs')}",
        style=asset("page.css") + asset("figure.css"),
        script=asset("page.js"),
        body=_page(contest),
    )
    write_text(path, text)
    return path


def closer_look(start: float, curves: Sequence[Sequence[float]]) -> float | None:
    """From which accuracy on a second figure shows the better half of the curves; None where the first one suffices."""
    lowest = sorted((min(curve) for curve in curves if curve), reverse=True) or [start]
    whole, better = start - lowest[-1], start - lowest[(len(lowest) - 1) // 2]
    shown = max(1.25 * better, 0.02)
    return start - shown if shown < 0.6 * whole else None


def curves(contest: Contest, one: Round, floor: float | None = None) -> Figure:
    """Test accuracy against MACs removed: a line for each method, bars of one standard deviation; only from `floor` up."""
    found = [point for curve in one.curves for point in curve.points]
    reach = [p.accuracy + sign * p.spread for p in found for sign in (-1, 1)]
    low, high = padded([contest.start, *(value for value in reach if floor is None or value >= floor)], least=1e-3)
    low = low if floor is None else floor
    right = max((p.macs_removed for p in found), default=0.5) * 1.04
    frame = Frame(Scale(0.0, right, 52, _WIDTH - 12), Scale(low, min(high, 1.02), _HEIGHT - 44, 26))
    body = join(
        axes(
            frame,
            x_title="MACs removed",
            y_title="accuracy on the test set",
            x_ticks=ticks(0.0, right, 6),
            y_ticks=ticks(low, min(high, 1.0), 6),
            x_text=lambda v: percent(v, 0),
            y_text=lambda v: percent(v, digits(high - low)),
        ),
        line(frame.left, frame.y(contest.start), frame.right, frame.y(contest.start), "diagonal"),
        *(_way(frame, contest, curve, low) for curve in one.curves),
    )
    words = (
        f"{plural(len(one.curves), 'method')}, {plural(len(found), 'point')}; the untouched network {percent(contest.start, 2)}"
    )
    part = "" if floor is None else ", the upper part"
    return Figure(f"Accuracy against MACs removed, budget {one.name}{part}", words, _WIDTH, _HEIGHT, body, "medium")


def _page(contest: Contest) -> Html:
    return join(
        el(
            "header",
            el("p", el("b", "secateurs"), " · comparison of methods", class_="eyebrow"),
            el("h1", contest.title),
            el("p", contest.headline, class_="headline"),
            warnings(contest.troubles),
            el("nav", *(el("a", f"Budget {one.name}", href=f"#{_anchor(one)}") for one in contest.rounds)),
        ),
        el(
            "main",
            *(_round(contest, one) for one in contest.rounds),
            section("every", "Every network", "", copyable(_table(contest.every))),
            section("reading", "How to read this", "", el("ul", *(el("li", note) for note in contest.notes))),
        ),
        el("footer", "Made from rows.jsonl alone: secateurs compare --render FOLDER"),
    )


def _round(contest: Contest, one: Round) -> Html:
    floor = closer_look(contest.start, [[point.accuracy for point in curve.points] for curve in one.curves])
    drawn = [figure(curves(contest, one))]
    drawn += [] if floor is None else [figure(curves(contest, one, floor), "The upper part, enlarged.")]
    key = el("ul", *(el("li", _swatch(contest, curve.name), curve.name) for curve in one.curves), class_="scale")
    budget = f"{one.budget[:1].upper()}{one.budget[1:]}"
    lead = f"{budget}. Means over seeds; bars: one standard deviation; dashed: the untouched network."
    return section(
        _anchor(one),
        f"Budget {one.name}",
        lead,
        panel(el("div", *drawn, class_="pair top"), key),
        el("p", f"Highest mean when so much of the MACs is gone: {one.leads}.") if one.leads else None,
        *(join(el("h3", found.title, style="margin-top:28px"), copyable(_table(found))) for found in one.tables),
    )


def _table(found: ContestTable) -> Html:
    return table(found.columns, found.lines)


def _way(frame: Frame, contest: Contest, curve: MethodCurve, low: float) -> Html:
    place = contest.methods.index(curve.name)
    colour, further = f"r{place % _COLOURS}", place >= _COLOURS
    shown = [p for p in curve.points if p.accuracy >= low]
    bars = [
        line(
            frame.x(p.macs_removed),
            frame.y(max(p.accuracy - p.spread, low)),
            frame.x(p.macs_removed),
            frame.y(p.accuracy + p.spread),
            "whisker",
        )
        for p in shown
        if p.spread
    ]
    kind = f"point {'hollow ' if further else ''}{colour}"
    dots = [mark(dot(frame.x(p.macs_removed), frame.y(p.accuracy), 4, kind), _tip(curve.name, p)) for p in shown]
    dashes = "5 3" if further else None
    corners = [(0.0, contest.start), *((p.macs_removed, p.accuracy) for p in curve.points)]
    ways = [
        el("polyline", points=frame.points(piece), class_=f"way {colour}", stroke_dasharray=dashes)
        for piece in _above(corners, low)
    ]
    return join(*ways, *bars, *dots)


def _above(corners: Sequence[tuple[float, float]], low: float) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """The parts of a line through the corners that do not lie below `low`, piece by piece."""
    pieces = []
    for one, other in pairwise(corners):
        if max(one[1], other[1]) >= low:
            pieces.append((_lifted(one, other, low), _lifted(other, one, low)))
    return pieces


def _lifted(end: tuple[float, float], other: tuple[float, float], low: float) -> tuple[float, float]:
    """An end of a piece, or where the piece crosses `low` if that end lies below it."""
    if end[1] >= low:
        return end
    share = (low - end[1]) / (other[1] - end[1])
    return end[0] + share * (other[0] - end[0]), low


def _tip(name: str, point: CurvePoint) -> str:
    spread = f" ± {100 * point.spread:.2f} points ({plural(point.seeds, 'seed')})" if point.seeds > 1 else ""
    return f"{name}: {_ACCURACY.value(point.accuracy)}{spread}, {percent(point.macs_removed)} of the MACs removed"


def _swatch(contest: Contest, name: str) -> Html:
    place = contest.methods.index(name)
    kind = f"point {'hollow ' if place >= _COLOURS else ''}r{place % _COLOURS}"
    return el("svg", el("circle", cx=6, cy=6, r=4.5, class_=kind), class_="figure swatch", viewBox="0 0 12 12")


def _anchor(one: Round) -> str:
    return f"budget-{one.name}"
