"""What other divisions of the cuts would cost: predicted loss against saving, and the networks that were tried."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from secateurs._util.format import percent, plain
from secateurs.report.charts.figure import (
    WIDE_LETTER,
    Figure,
    Frame,
    Html,
    Scale,
    axes,
    digits,
    dot,
    el,
    join,
    legend,
    line,
    mark,
    padded,
    ring,
    text,
    ticks,
)
from secateurs.report.records import DivisionRecord, RunRecord

_WIDTH, _HEIGHT = 540.0, 330.0
_BEYOND = 1.6  # how far the picture reaches, as a multiple of what was chosen or nearly so


def division(run: RunRecord) -> Figure | None:
    """The figure; None where cuts were not divided."""
    found = run.division
    if found is None or len(found.frontier) < 2:
        return None
    reach = _BEYOND * max(found.saved, found.by_estimate or 0.0) or found.frontier[-1][0]
    way = [point for point in found.frontier if point[0] <= reach]
    if len(way) < 2:
        return None
    _, high = padded([rise for _, rise in way])
    frame = Frame(Scale(0.0, way[-1][0], 58, _WIDTH - 12), Scale(0.0, high, _HEIGHT - 44, 26))
    shown = [trial for trial in found.tried if trial[0] <= way[-1][0]]
    body = join(
        axes(
            frame,
            x_title=f"{run.saving} removed, as the sites' curves add it up",
            y_title="predicted rise of the loss",
            x_ticks=ticks(0.0, frame.x.high, 6),
            y_ticks=ticks(0.0, high, 5),
            x_text=lambda v: percent(v, digits(frame.x.high)),
            y_text=lambda v: f"{v:.3g}",
        ),
        line(frame.x(found.saved), frame.top, frame.x(found.saved), frame.bottom, "chosen"),
        text(frame.x(found.saved) - 8, frame.top + 10, "taken", "note strong end"),
        el("polyline", points=frame.points(way), class_="way"),
        *(_trial(frame, run, found, trial) for trial in shown),
        legend(frame.right, [(ring("point"), "within the drop"), (ring("point hollow"), "beyond it")], letter=WIDE_LETTER),
    )
    words = f"{len(found.frontier)} divisions, of which {len(found.tried)} were made; {percent(found.saved)} was taken"
    return Figure(f"Predicted loss against {run.saving} removed", words, _WIDTH, _HEIGHT, body, "medium")


def _trial(frame: Frame, run: RunRecord, found: DivisionRecord, trial: tuple[float, float, bool]) -> Html:
    saved, accuracy, fine = trial
    rise = min(found.frontier, key=lambda point: abs(point[0] - saved))[1]
    measured = f"{run.metric.name} {run.metric.value(accuracy)} on the images that steer"
    tip = f"{percent(saved)}: {measured}, loss +{plain(rise)} predicted"
    return mark(dot(frame.x(saved), frame.y(rise), 4.5, "point" if fine else "point hollow"), tip)


_FRONTIER_WIDTH, _FRONTIER_HEIGHT = 540.0, 330.0


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
    frame = Frame(Scale(max(left, 0.0), 1.01, 52, _FRONTIER_WIDTH - 12), Scale(low, high, _FRONTIER_HEIGHT - 44, 26))
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
    return Figure(f"{metric.title} against MACs", words, _FRONTIER_WIDTH, _FRONTIER_HEIGHT, body, "medium")


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
