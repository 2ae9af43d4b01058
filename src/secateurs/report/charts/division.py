"""What other divisions of the cuts would cost: predicted loss against saving, and the networks that were tried."""

from __future__ import annotations

from secateurs.report.figure import (
    WIDE_LETTER,
    Figure,
    Frame,
    Scale,
    axes,
    digits,
    dot,
    legend,
    line,
    mark,
    padded,
    ring,
    text,
    ticks,
)
from secateurs.report.markup import Html, el, join
from secateurs.report.records import DivisionRecord, RunRecord
from secateurs.report.words import percent, plain

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
