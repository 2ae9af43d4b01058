"""Accuracy against filters removed, as the search for the cut measured it, with the allowed drop and the chosen number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from secateurs._util.format import SPACE, Metric, plain, plural, short
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
    number,
    padded,
    ring,
    text,
    ticks,
)
from secateurs.report.records import Pair, RunRecord, StepRecord

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


_AGREEMENT_WIDTH, _AGREEMENT_HEIGHT = 360.0, 232.0


def agreement(step: StepRecord) -> Figure | None:
    """The figure of one step; None where its masks and losses were not kept."""
    pairs = step.ranking.agreement if step.ranking else ()
    if not pairs:
        return None
    low, high = padded([v for pair in pairs for v in pair], share=0.04, least=1e-3)
    frame = Frame(Scale(low, high, 50, _AGREEMENT_WIDTH - 10), Scale(low, high, _AGREEMENT_HEIGHT - 42, 26))
    marks = ticks(low, high)
    # one path of round-capped lines of no length: a dot costs ten bytes
    dots = "".join(f"M{number(frame.x(p))} {number(frame.y(r))}h0" for p, r in pairs)
    body = join(
        axes(
            frame,
            x_title="score that the model predicts",
            y_title="realised score of each mask",
            x_ticks=marks,
            y_ticks=marks,
            x_text=lambda v: short(v),
            y_text=lambda v: short(v),
        ),
        line(frame.x(low), frame.y(low), frame.x(high), frame.y(high), "diagonal"),
        el("path", el("title", f"{len(pairs)} masks; on the line the prediction is right"), d=dots, class_="dots"),
    )
    words = f"{len(pairs)} masks of {step.site}; held-out r² {plain(step.r2)}"
    return Figure("Predicted against realised score", words, _AGREEMENT_WIDTH, _AGREEMENT_HEIGHT, body)


_CLASSES_WIDTH, _ROW, _MOST = 540.0, 22.0, 30


@dataclass(frozen=True)
class ClassChange:
    """One class, by name, with its test accuracy before and after."""

    name: str
    pair: Pair


def changes(run: RunRecord) -> tuple[ClassChange, ...]:
    """All classes that have test examples, the largest loss first."""
    pairs = () if run.end is None else run.end.classes
    names = run.class_names
    found = [
        ClassChange(names[place] if place < len(names) else f"class {place}", pair)
        for place, pair in enumerate(pairs)
        if math.isfinite(pair.before) and math.isfinite(pair.after)
    ]
    return tuple(sorted(found, key=lambda change: change.pair.change))


def classes(run: RunRecord) -> Figure | None:
    """The figure, of the `_MOST` classes that lost most; None where the run did not measure classes."""
    shown = changes(run)[:_MOST]
    if not shown:
        return None
    height = 62 + _ROW * len(shown)
    low, high = padded([v for c in shown for v in (c.pair.before, c.pair.after)], share=0.06, least=0.005)
    label = min(max(6.6 * max(len(_short(c.name)) for c in shown), 30), 150) + 14
    frame = Frame(Scale(low, min(high, 1.01), label, _CLASSES_WIDTH - 62), Scale(len(shown), 0, height - 40, 22))
    body = join(
        axes(
            frame,
            x_title="",
            y_title=f"test {run.metric.name} by class",
            x_ticks=ticks(low, frame.x.high, 5),
            x_text=lambda v: run.metric.value(v, digits(high - low)),
        ),
        *(_row(frame, place, change, run.metric) for place, change in enumerate(shown)),
        legend(
            _CLASSES_WIDTH - 4,
            [(ring("point hollow"), "before"), (ring("point"), "after"), (ring("point worse"), "after, worse")],
            letter=WIDE_LETTER,
        ),
    )
    worst = shown[0]
    words = f"{worst.name} changes by {run.metric.change(worst.pair.change)}"
    return Figure(f"{run.metric.title} by class", words, _CLASSES_WIDTH, height, body, "medium")


def _row(frame: Frame, place: int, change: ClassChange, metric: Metric) -> Html:
    y = frame.top + (place + 0.5) * _ROW
    before, after = frame.x(change.pair.before), frame.x(change.pair.after)
    worse = change.pair.change < 0
    shape = join(
        el("rect", x=0.0, y=y - _ROW / 2, width=_CLASSES_WIDTH, height=_ROW, class_="hit"),
        line(frame.left, y, frame.right, y, "grid"),
        line(before, y, after, y, "loss" if worse else "gain"),
        el("circle", cx=before, cy=y, r=4, class_="point hollow"),
        el("circle", cx=after, cy=y, r=4.5, class_="point worse" if worse else "point"),
        text(frame.left - 10, y, _short(change.name), "tick end"),
        text(_CLASSES_WIDTH - 4, y, _written(change.pair, metric), "tick end strong" if place == 0 else "tick end"),
    )
    return mark(shape, f"{change.name}: {metric.value(change.pair.before)} → {metric.value(change.pair.after)}")


def _written(pair: Pair, metric: Metric) -> str:
    """The change without its unit; no sign where there is none."""
    return metric.change(pair.change, 1).split(SPACE)[0] if pair.change else "0"


def _short(name: str) -> str:
    return name if len(name) <= 20 else f"{name[:19]}…"


def worst(changes: Sequence[ClassChange]) -> ClassChange | None:
    """The class that lost most; None where none lost anything."""
    return changes[0] if changes and changes[0].pair.change < 0 else None
