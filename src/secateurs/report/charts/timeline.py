"""The run over time: accuracy after every cut and epoch above, MACs left below, on one axis."""

from __future__ import annotations

from collections.abc import Sequence

from secateurs._util.format import percent, plural
from secateurs.report.charts.figure import (
    WIDE_LETTER,
    Figure,
    Frame,
    Html,
    Scale,
    axes,
    columns,
    digits,
    el,
    join,
    legend,
    line,
    number,
    padded,
    text,
    ticks,
)
from secateurs.report.records import Event, RunRecord

_WIDTH, _HEIGHT = 540.0, 330.0
_SPLIT = 192.0  # where the upper panel ends


def timeline(run: RunRecord) -> Figure | None:
    """The figure; None before the second measurement."""
    events = run.events
    if len(events) < 2:
        return None
    floor = _floor(run)
    low, high = padded([e.accuracy for e in events] + ([] if floor is None else [floor]), least=1e-3)
    across = Scale(-0.5, len(events) - 0.5, 52, _WIDTH - 8)
    upper = Frame(across, Scale(low, high, _SPLIT, 26))
    lower = Frame(across, Scale(0, 1, _HEIGHT - 44, _SPLIT + 42))
    step = (across.end - across.start) / len(events)
    tips = [f"{e.label}: {run.metric.value(e.accuracy)}, {percent(e.macs_left)} of the MACs left" for e in events]
    whole = Frame(across, Scale(0, 1, lower.bottom, upper.top))
    body = join(
        axes(
            upper,
            x_title="",
            y_title=f"{run.metric.name} on the search set",
            y_ticks=ticks(low, high),
            y_text=lambda v: run.metric.value(v, digits(high - low)),
        ),
        None if floor is None else line(upper.left, upper.y(floor), upper.right, upper.y(floor), "allowed"),
        el("polyline", points=upper.points((k, e.accuracy) for k, e in enumerate(events)), class_="way"),
        _marks(upper, events, step),
        legend(
            upper.right,
            [*([] if floor is None else [(_dash, "allowed")]), (_triangle, "cut"), (_spot, "epoch")],
            letter=WIDE_LETTER,
        ),
        axes(
            lower,
            x_title="measurements in order, by step",
            y_title="",
            x_ticks=_tick_places(events, 9),
            x_text=lambda v: "retrain" if events[round(v)].what == "retrain" else str(events[round(v)].step),
            y_ticks=(0, 0.5, 1),
            y_text=lambda v: percent(v, 0),
        ),
        text(2, _SPLIT + 30, "MACs left", "name"),
        el("path", d=_area(lower, events, step), class_="area"),
        columns(whole, tips, start=across.start, step=step, summary="Accuracy and MACs over the run"),
    )
    first, last = (run.metric.value(event.accuracy) for event in (events[0], events[-1]))
    words = f"{plural(len(events), 'measurement')}, from {first} to {last}"
    return Figure("The run over time", words, _WIDTH, _HEIGHT, body, "medium")


def _floor(run: RunRecord) -> float | None:
    """The lowest accuracy that a budget for the whole run allows; a budget by site has no single one."""
    if run.start is None or run.max_drop is None or run.recipe.get("budget") != "run":
        return None
    return run.start - run.max_drop


def _marks(frame: Frame, events: Sequence[Event], step: float) -> Html:
    """Cuts as triangles, epochs as dots; smaller where there are many."""
    size = min(max(step * 0.4, 1.6), 4.5)
    cuts, epochs = [], []
    for place, event in enumerate(events):
        x, y = frame.x(place), frame.y(event.accuracy)
        if event.what == "cut":
            cuts.append(f"M{number(x - size)} {number(y - size)}h{number(2 * size)}l{number(-size)} {number(1.7 * size)}z")
        else:
            epochs.append(f"M{number(x)} {number(y)}h0")
    return join(
        el("path", d="".join(epochs), class_="dots solid", style=_thick(size * 1.3)),
        el("path", d="".join(cuts), class_="cut"),
    )


def _thick(pixels: float) -> str:
    """As a style: the page's own would win over an attribute."""
    return f"stroke-width:{number(pixels)}"


def _triangle(x: float) -> Html:
    return el("path", d=f"M{number(x - 5)} 4h9l-4.5 7.6z", class_="cut")


def _spot(x: float) -> Html:
    return el("path", d=f"M{number(x)} 7.5h0", class_="dots solid", style=_thick(6))


def _dash(x: float) -> Html:
    return line(x - 12, 7.5, x + 4, 7.5, "allowed")


def _tick_places(events: Sequence[Event], most: int) -> list[float]:
    """Places of the cuts, thinned out, and of the retraining."""
    cuts = [place for place, event in enumerate(events) if event.what == "cut"]
    every = max(1, -(-len(cuts) // most))
    retraining = next((place for place, event in enumerate(events) if event.what == "retrain"), None)
    return [float(place) for place in [*cuts[::every], *([] if retraining is None else [min(retraining + 1, len(events) - 1)])]]


def _area(frame: Frame, events: Sequence[Event], step: float) -> str:
    parts = [f"M{number(frame.left)} {number(frame.bottom)}"]
    for place, event in enumerate(events):
        parts.append(f"V{number(frame.y(event.macs_left))}H{number(frame.left + (place + 1) * step)}")
    return "".join(parts) + f"V{number(frame.bottom)}z"
