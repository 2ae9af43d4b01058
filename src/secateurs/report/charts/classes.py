"""Test accuracy of every class before and after, the largest loss on top."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from secateurs.report.figure import (
    WIDE_LETTER,
    Figure,
    Frame,
    Scale,
    axes,
    digits,
    legend,
    line,
    mark,
    padded,
    ring,
    text,
    ticks,
)
from secateurs.report.markup import Html, el, join
from secateurs.report.records import Pair, RunRecord
from secateurs.report.words import SPACE, Metric

_WIDTH, _ROW, _MOST = 540.0, 22.0, 30


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
    frame = Frame(Scale(low, min(high, 1.01), label, _WIDTH - 62), Scale(len(shown), 0, height - 40, 22))
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
            _WIDTH - 4,
            [(ring("point hollow"), "before"), (ring("point"), "after"), (ring("point worse"), "after, worse")],
            letter=WIDE_LETTER,
        ),
    )
    worst = shown[0]
    words = f"{worst.name} changes by {run.metric.change(worst.pair.change)}"
    return Figure(f"{run.metric.title} by class", words, _WIDTH, height, body, "medium")


def _row(frame: Frame, place: int, change: ClassChange, metric: Metric) -> Html:
    y = frame.top + (place + 0.5) * _ROW
    before, after = frame.x(change.pair.before), frame.x(change.pair.after)
    worse = change.pair.change < 0
    shape = join(
        el("rect", x=0.0, y=y - _ROW / 2, width=_WIDTH, height=_ROW, class_="hit"),
        line(frame.left, y, frame.right, y, "grid"),
        line(before, y, after, y, "loss" if worse else "gain"),
        el("circle", cx=before, cy=y, r=4, class_="point hollow"),
        el("circle", cx=after, cy=y, r=4.5, class_="point worse" if worse else "point"),
        text(frame.left - 10, y, _short(change.name), "tick end"),
        text(_WIDTH - 4, y, _written(change.pair, metric), "tick end strong" if place == 0 else "tick end"),
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
