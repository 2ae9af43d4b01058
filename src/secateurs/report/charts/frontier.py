"""Accuracy against MACs left after every step, for one run or several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from secateurs.report.figure import WIDE_LETTER, Figure, Frame, Scale, axes, digits, dot, legend, mark, padded, ring, ticks
from secateurs.report.markup import Html, el, join
from secateurs.report.records import RunRecord
from secateurs.report.words import percent

_WIDTH, _HEIGHT = 540.0, 330.0


@dataclass(frozen=True)
class Point:
    """A network on the way: what it costs and what it can do."""

    macs_left: float
    accuracy: float
    label: str


def points_of(run: RunRecord) -> tuple[Point, ...]:
    """The start, the network after every step that cut something, and the one at the end; accuracies on the search set."""
    found = [] if run.start is None else [Point(1.0, run.start, "start")]
    found += [
        Point(1 - s.macs_removed, s.accuracy, f"step {s.number}, {s.site}: {s.channels} → {s.kept}")
        for s in run.steps
        if s.removed
    ]
    if run.end is not None and len(found) > 1:
        found.append(Point(1 - run.end.macs.removed, run.end.search.after, "the end"))
    return tuple(found)


def best(points: Sequence[Point]) -> set[Point]:
    """Those that no other point beats in both MACs and accuracy."""

    def beaten(p: Point) -> bool:
        return any(
            q.macs_left <= p.macs_left and q.accuracy >= p.accuracy and (q.macs_left, q.accuracy) != (p.macs_left, p.accuracy)
            for q in points
        )

    return {p for p in points if not beaten(p)}


def frontier(runs: Sequence[RunRecord], colours: Sequence[int] | None = None) -> Figure | None:
    """The figure; None while no filter is gone. Several runs, of one metric, are told apart by colours, numbered from 0."""
    ways = [(run, points_of(run)) for run in runs]
    everything = [p for _, way in ways for p in way]
    if len(everything) < 2:
        return None
    metric = runs[0].metric
    low, high = padded([p.accuracy for p in everything], least=1e-3)
    left, _ = padded([p.macs_left for p in everything], share=0.05, least=0.01)
    frame = Frame(Scale(max(left, 0.0), 1.01, 52, _WIDTH - 12), Scale(low, high, _HEIGHT - 44, 26))
    body = join(
        axes(
            frame,
            x_title="MACs left",
            y_title=f"{metric.name} on the search set",
            x_ticks=ticks(frame.x.low, 1.0, 6),
            y_ticks=ticks(low, high, 5),
            x_text=lambda v: percent(v, digits(1 - frame.x.low)),
            y_text=lambda v: metric.value(v, digits(high - low)),
        ),
        *(_way(frame, run, way, None if colours is None else colours[place]) for place, (run, way) in enumerate(ways)),
        _legend(frame) if colours is None else None,
    )
    words = f"{len(everything)} networks, the smallest with {percent(min(p.macs_left for p in everything))} of the MACs"
    return Figure(f"{metric.title} against MACs", words, _WIDTH, _HEIGHT, body, "medium")


def _way(frame: Frame, run: RunRecord, way: Sequence[Point], colour: int | None) -> Html:
    front = best(way)
    name = "" if colour is None else f"{run.name}, "
    line_class = "way" if colour is None else f"way r{colour % 8}"
    dots = []
    for place, point in enumerate(way):
        last = place == len(way) - 1
        kind = "point" if point in front else "point hollow"
        kind += "" if colour is None else f" r{colour % 8}"
        kind += " chosen-point" if last and colour is None else ""
        tip = f"{name}{point.label}: {run.metric.value(point.accuracy)} at {percent(point.macs_left)} of the MACs"
        dots.append(mark(dot(frame.x(point.macs_left), frame.y(point.accuracy), 5.5 if last else 4, kind), tip))
    return join(el("polyline", points=frame.points((p.macs_left, p.accuracy) for p in way), class_=line_class), *dots)


def _legend(frame: Frame) -> Html:
    items = [(ring("point"), "on the frontier"), (ring("point hollow"), "beaten"), (ring("point chosen-point"), "latest")]
    return legend(frame.right, items, letter=WIDE_LETTER)
