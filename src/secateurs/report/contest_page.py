"""The page of a comparison of methods: curves of accuracy against MACs, and tables. Knows curves and tables, not where from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from string import Template

from secateurs.files import write_text
from secateurs.report.figure import Figure, Frame, Scale, asset, axes, digits, dot, line, mark, padded, ticks
from secateurs.report.markup import Html, el, join
from secateurs.report.parts import copyable, figure, panel, section, table, warnings
from secateurs.report.words import Metric, percent, plural

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
