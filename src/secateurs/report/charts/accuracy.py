"""Accuracy against filters removed, as the search for the cut measured it, with the allowed drop and the chosen number."""

from __future__ import annotations

from secateurs.report.figure import Figure, Frame, Scale, axes, digits, dot, line, mark, padded, text, ticks
from secateurs.report.markup import el, join
from secateurs.report.records import StepRecord
from secateurs.report.words import Metric, plural

_WIDTH, _HEIGHT = 360.0, 232.0


def accuracy(step: StepRecord, metric: Metric, max_drop: float | None) -> Figure | None:
    """The figure of one step; None where nothing was measured."""
    points = sorted({(0, step.accuracy_before), *step.evaluated})
    if len(points) < 2:
        return None
    allowed = None if max_drop is None else step.baseline - max_drop
    m = len(step.removed)
    low, high = padded([a for _, a in points] + ([] if allowed is None else [allowed]), least=1e-4)
    frame = Frame(Scale(0, max(x for x, _ in points), 50, _WIDTH - 10), Scale(low, high, _HEIGHT - 42, 26))
    body = join(
        axes(
            frame,
            x_title="filters removed",
            y_title=f"{metric.name} on the search set",
            x_ticks=[t for t in ticks(0, frame.x.high, 5) if t == int(t)],
            y_ticks=ticks(low, high),
            x_text=lambda v: f"{v:.0f}",
            y_text=lambda v: metric.value(v, digits(high - low)),
        ),
        None if allowed is None else _allowed(frame, allowed, metric),
        line(frame.x(m), frame.top, frame.x(m), frame.bottom, "chosen"),
        el("polyline", points=frame.points(points), class_="way"),
        *(mark(dot(frame.x(x), frame.y(a), 5 if x == m else 3, _class(x == m)), _tip(x, a, step, metric)) for x, a in points),
        _chosen_label(frame, m, step.channels),
    )
    words = f"{plural(m, 'filter')} of {step.channels} removed, {metric.name} then {metric.value(step.accuracy_cut)}"
    return Figure(f"{metric.title} against filters removed", words, _WIDTH, _HEIGHT, body)


def _allowed(frame: Frame, allowed: float, metric: Metric) -> str:
    y = frame.y(allowed)
    return join(
        line(frame.left, y, frame.right, y, "allowed"),
        mark(line(frame.left, y, frame.right, y, "hit-line"), f"lowest allowed: {metric.value(allowed)}"),
        text(frame.right, y - 5, "allowed", "note end"),
    )


def _chosen_label(frame: Frame, m: int, channels: int) -> str:
    near_end = frame.x(m) > frame.right - 60
    x = frame.x(m) + (-8 if near_end else 8)
    return text(x, frame.top + 10, f"m = {m} of {channels}", f"note strong{' end' if near_end else ''}")


def _class(chosen: bool) -> str:
    return "point chosen-point" if chosen else "point"


def _tip(x: int, a: float, step: StepRecord, metric: Metric) -> str:
    chosen = ", chosen" if x == len(step.removed) else ""
    return f"{plural(x, 'filter')} removed{chosen}: {metric.value(a)} ({metric.change(a - step.baseline)})"
