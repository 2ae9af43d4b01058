"""The charts of a report: each function maps the data of a run to marks on a `Plot`, or gives None where there is none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from secateurs._util.format import SPACE, Metric, percent, plain, plural, short
from secateurs.graph.structure import Node
from secateurs.pruning.results import Change, Step
from secateurs.report.load import Event, LayerChange, RunReport, SiteImportances
from secateurs.report.svg import (
    COLOURS,
    MEDIUM,
    SMALL,
    Axis,
    Dot,
    Figure,
    Plot,
    circle,
    digits,
    el,
    join,
    line,
    mark,
    number,
    padded,
    rect,
    ring,
    square,
    text,
    ticks,
)

# ---- one site -----------------------------------------------------------------------------------------------------------


def importances(step: Step, found: SiteImportances | None) -> Figure | None:
    """The importance of each filter of a site, sorted, with error bars; kept and removed filters differ in colour."""
    if found is None:
        return None
    order = sorted(range(len(found.coef)), key=lambda i: found.coef[i])
    ids, coef = [found.ids[i] for i in order], [found.coef[i] for i in order]
    errors = [found.stderr[i] for i in order] if found.stderr else []
    kinds = ["removed" if i in step.removed else "kept" for i in ids]
    finite = [e if math.isfinite(e) else 0.0 for e in errors or [0.0] * len(coef)]
    low, high = padded([0.0, *(c + s * e for c, e in zip(coef, finite, strict=True) for s in (-1, 1))], share=0.05)
    plot = Plot(
        SMALL, Axis(0, 1, "filters, least important first"), Axis(low, high, "importance", ticks(low, high), short), right=4
    )
    plot.bars(coef, errors, kinds)
    plot.legend(*((square(kind), f"{kind} {kinds.count(kind)}") for kind in ("removed", "kept")))
    spreads = [f" ± {short(e)}" for e in errors] or [""] * len(coef)
    tips = [f"filter {i}, {k}: {short(c)}{e}" for i, k, c, e in zip(ids, kinds, coef, spreads, strict=True)]
    plot.tips(tips, f"Filter {ids[0]} is least important, filter {ids[-1]} most")
    words = f"Importances of {plural(len(ids), 'filter')} of {step.site}, of which {kinds.count('removed')} were removed"
    return plot.figure("Importance of each filter", words)


def accuracy(step: Step, metric: Metric, max_drop: float | None) -> Figure | None:
    """Accuracy against filters removed, as the search for the cut measured it, with the allowed drop and the chosen number."""
    points = sorted({(0, step.accuracy_before), *step.evaluated})
    if len(points) < 2:
        return None
    allowed = None if max_drop is None else step.baseline - max_drop
    chosen = len(step.removed)
    low, high = padded([a for _, a in points] + ([] if allowed is None else [allowed]), least=1e-4)
    most = points[-1][0]
    plot = Plot(
        SMALL,
        Axis(0, most, "filters removed", [t for t in ticks(0, most, 5) if t == int(t)], lambda v: f"{v:.0f}"),
        _metric_axis(metric, low, high),
    )
    if allowed is not None:
        y = plot.y(allowed)
        plot.add(line(plot.left, y, plot.right, y, "allowed"), text(plot.right, y - 5, "allowed", "note end"))
        plot.add(mark(line(plot.left, y, plot.right, y, "hit-line"), f"lowest allowed: {metric.value(allowed)}"))
    x = plot.x(chosen)
    plot.add(line(x, plot.top, x, plot.bottom, "chosen"))
    dots = [
        Dot(
            m,
            a,
            f"{plural(m, 'filter')} removed{', chosen' if m == chosen else ''}: {metric.value(a)} "
            f"({metric.change(a - step.baseline)})",
            "point chosen-point" if m == chosen else "point",
            5 if m == chosen else 3,
        )
        for m, a in points
    ]
    plot.curve(points, dots)
    near_end = x > plot.right - 60
    label = f"m = {chosen} of {step.channels}"
    plot.add(text(x - 8 if near_end else x + 8, plot.top + 10, label, f"note strong{' end' if near_end else ''}"))
    words = f"{plural(chosen, 'filter')} of {step.channels} removed, {metric.name} then {metric.value(step.accuracy_cut)}"
    return plot.figure(f"{metric.title} against filters removed", words)


def agreement(step: Step, found: SiteImportances | None) -> Figure | None:
    """Predicted against measured scores of a site's masks."""
    if found is None or not found.agreement:
        return None
    pairs = found.agreement
    low, high = padded([v for pair in pairs for v in pair], share=0.04, least=1e-3)
    at = ticks(low, high)
    plot = Plot(SMALL, Axis(low, high, "predicted score", at, short), Axis(low, high, "measured score of each mask", at, short))
    plot.add(line(plot.left, plot.bottom, plot.right, plot.top, "diagonal"))
    plot.scatter(pairs, f"{len(pairs)} masks; on the line the prediction is right", class_="dots")
    return plot.figure(
        "Predicted against measured score", f"{len(pairs)} masks of {step.site}; held-out r² {plain(step.r2_held_out)}"
    )


# ---- the run ------------------------------------------------------------------------------------------------------------


def timeline(run: RunReport) -> Figure | None:
    """Accuracy after every cut and epoch above, MACs left below, on one axis; None before the second measurement."""
    events, metric = run.events, run.metric
    if len(events) < 2:
        return None
    # only a budget for the whole run has one lowest accuracy
    allowed = []
    if run.start is not None and run.recipe is not None and run.recipe.budget == "run":
        allowed = [run.start.accuracy - run.recipe.max_drop]
    low, high = padded([e.accuracy for e in events] + allowed, least=1e-3)
    first, last, split = -0.5, len(events) - 0.5, 192.0
    upper = Plot(MEDIUM, Axis(first, last), _metric_axis(metric, low, high), bottom=MEDIUM[1] - split)
    step = (upper.right - upper.left) / len(events)
    size = min(max(step * 0.4, 1.6), 4.5)
    upper.add(*(line(upper.left, upper.y(a), upper.right, upper.y(a), "allowed") for a in allowed))
    upper.curve([(place, e.accuracy) for place, e in enumerate(events)])
    epochs = [(place, e.accuracy) for place, e in enumerate(events) if e.what != "cut"]
    upper.scatter(epochs, size=size * 1.3, class_="dots solid")
    cuts = [(upper.x(place), upper.y(e.accuracy)) for place, e in enumerate(events) if e.what == "cut"]
    upper.add(el("path", d="".join(_triangle(x, y - size, size) for x, y in cuts), class_="cut"))
    upper.legend(
        *([(lambda x: line(x - 12, 7.5, x + 4, 7.5, "allowed"), "allowed")] if allowed else []),
        (lambda x: el("path", d=_triangle(x - 0.5, 4, 4.5), class_="cut"), "cut"),
        (lambda x: el("path", d=f"M{number(x)} 7.5h0", class_="dots solid", style="stroke-width:6"), "epoch"),
    )
    below = Plot(
        MEDIUM,
        Axis(
            first,
            last,
            "measurements in order, by step",
            _step_ticks(events),
            lambda v: "retrain" if events[round(v)].what == "retrain" else str(events[round(v)].step),
        ),
        Axis(0, 1, "MACs left", (0, 0.5, 1), lambda v: percent(v, 0)),
        top=split + 42,
    )
    area = "".join(f"V{number(below.y(e.macs_left))}H{number(below.left + (n + 1) * step)}" for n, e in enumerate(events))
    start = f"M{number(below.left)} {number(below.bottom)}"
    below.add(el("path", d=f"{start}{area}V{number(below.bottom)}z", class_="area"))
    tips = [f"{e.label}: {metric.value(e.accuracy)}, {percent(e.macs_left)} of the MACs left" for e in events]
    below.tips(tips, f"{metric.title} and MACs over the run", top=upper.top)
    words = (
        f"{plural(len(events), 'measurement')}, from {metric.value(events[0].accuracy)} to {metric.value(events[-1].accuracy)}"
    )
    return Figure("The run over time", words, *MEDIUM, join(upper.body, below.body), "medium")


def _triangle(x: float, top: float, size: float) -> str:
    """A path that points down."""
    return f"M{number(x - size)} {number(top)}h{number(2 * size)}l{number(-size)} {number(1.7 * size)}z"


def _step_ticks(events: Sequence[Event], most: int = 9) -> list[float]:
    """Places of at most about `most` cuts, and of the retraining."""
    cuts = [place for place, event in enumerate(events) if event.what == "cut"]
    retraining = [place for place, event in enumerate(events) if event.what == "retrain"][:1]
    return [float(place) for place in cuts[:: max(1, -(-len(cuts) // most))]] + [
        float(min(place + 1, len(events) - 1)) for place in retraining
    ]


@dataclass(frozen=True)
class Point:
    """A network of a run: its cost and its accuracy."""

    macs_left: float
    accuracy: float
    label: str


def points_of(run: RunReport) -> tuple[Point, ...]:
    """The start, the network after every step that cut something, and the final one; accuracies on the validation set."""
    found = [] if run.start is None else [Point(1.0, run.start.accuracy, "start")]
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


def frontier(runs: Sequence[RunReport], colours: Sequence[int] | None = None) -> Figure | None:
    """Accuracy against MACs left after every step; None while no filter is removed.

    Several runs, of one metric, differ in colour, by the numbers `colours`.
    """
    everything = [p for run in runs for p in points_of(run)]
    if len(everything) < 2:
        return None
    metric = runs[0].metric
    low, high = padded([p.accuracy for p in everything], least=1e-3)
    left = max(padded([p.macs_left for p in everything], share=0.05, least=0.01)[0], 0.0)
    x = Axis(left, 1.01, "MACs left", ticks(left, 1.0, 6), lambda v: percent(v, digits(1 - left)))
    plot = Plot(MEDIUM, x, _metric_axis(metric, low, high, about=5), right=12)
    for place, run in enumerate(runs):
        points = points_of(run)
        front, last = best(points), len(points) - 1
        name = "" if colours is None else f"{run.name}, "
        colour = "" if colours is None else f" r{colours[place] % COLOURS}"
        dots = [
            Dot(
                p.macs_left,
                p.accuracy,
                f"{name}{p.label}: {metric.value(p.accuracy)} at {percent(p.macs_left)} of the MACs",
                f"point{'' if p in front else ' hollow'}{colour}{' chosen-point' if n == last and not colour else ''}",
                5.5 if n == last else 4,
            )
            for n, p in enumerate(points)
        ]
        plot.curve([(p.macs_left, p.accuracy) for p in points], dots, f"way{colour}")
    if colours is None:
        plot.legend(
            (ring("point"), "on the frontier"), (ring("point hollow"), "beaten"), (ring("point chosen-point"), "latest")
        )
    words = f"{len(everything)} networks, the smallest with {percent(min(p.macs_left for p in everything))} of the MACs"
    return plot.figure(f"{metric.title} against MACs", words)


def allocation(run: RunReport) -> Figure | None:
    """Predicted rise of the loss against savings, with the allocations that were tried; None where cuts were not allocated."""
    found = run.allocation
    if found is None or len(found.frontier) < 2:
        return None
    reach = 1.6 * max(found.saved, found.by_estimate) or found.frontier[-1][0]
    shown = [point for point in found.frontier if point[0] <= reach]
    if len(shown) < 2:
        return None
    right, high = shown[-1][0], padded([rise for _, rise in shown])[1]
    title = f"{run.saving} removed, summed over the sites' curves"
    plot = Plot(
        MEDIUM,
        Axis(0.0, right, title, ticks(0.0, right, 6), lambda v: percent(v, digits(right))),
        Axis(0.0, high, "predicted rise of the loss", ticks(0.0, high, 5), lambda v: f"{v:.3g}"),
        left=58,
        right=12,
    )
    plot.add(line(plot.x(found.saved), plot.top, plot.x(found.saved), plot.bottom, "chosen"))
    plot.add(text(plot.x(found.saved) - 8, plot.top + 10, "chosen", "note strong end"))
    dots = []
    for saved, measured, accepted in found.tried:
        if saved <= right:
            rise = min(found.frontier, key=lambda point: abs(point[0] - saved))[1]
            tip = f"{percent(saved)}: {run.metric.name} {run.metric.value(measured)} measured, loss +{plain(rise)} predicted"
            dots.append(Dot(saved, rise, tip, "point" if accepted else "point hollow", 4.5))
    plot.curve(shown, dots)
    plot.legend((ring("point"), "within the drop"), (ring("point hollow"), "beyond it"))
    words = f"{len(found.frontier)} allocations, of which {len(found.tried)} were made; {percent(found.saved)} was chosen"
    return plot.figure(f"Predicted loss against {run.saving} removed", words)


def _metric_axis(metric: Metric, low: float, high: float, *, about: int = 4) -> Axis:
    title = f"{metric.name} on the validation set"
    return Axis(low, high, title, ticks(low, high, about), lambda v: metric.value(v, digits(high - low)))


# ---- classes ------------------------------------------------------------------------------------------------------------


def class_changes(run: RunReport) -> list[tuple[str, Change]]:
    """Test accuracy of all classes that have test examples, by name, the largest loss first."""
    measured = [] if run.end is None else zip(run.end.classes.names, run.end.classes.changes(), strict=False)
    return sorted(((name, one) for name, one in measured if math.isfinite(one.change)), key=lambda pair: pair[1].change)


def classes(run: RunReport) -> Figure | None:
    """Test accuracy before and after of the 30 classes that lost most; None where the run did not measure classes."""
    shown, metric = class_changes(run)[:30], run.metric
    if not shown:
        return None
    row = 22.0
    size = (MEDIUM[0], 62 + row * len(shown))
    names = [name if len(name) <= 20 else f"{name[:19]}…" for name, _ in shown]
    low, high = padded([v for _, one in shown for v in (one.before, one.after)], share=0.06, least=0.005)
    high = min(high, 1.01) if metric.share else high
    plot = Plot(
        size,
        Axis(low, high, "", ticks(low, high, 5), lambda v: metric.value(v, digits(high - low))),
        Axis(len(shown), 0, f"test {metric.name} by class"),
        left=min(max(6.6 * max(map(len, names)), 30), 150) + 14,
        right=62,
        top=22,
        bottom=40,
    )
    for place, (name, one) in enumerate(shown):
        y, before, after = plot.y(place + 0.5), plot.x(one.before), plot.x(one.after)
        worse = one.change < 0
        written = metric.change(one.change, 1).split(SPACE)[0] if one.change else "0"
        shape = join(
            rect(0, y - row / 2, size[0], row, "hit"),
            line(plot.left, y, plot.right, y, "grid"),
            line(before, y, after, y, "loss" if worse else "gain"),
            circle(before, y, 4, "point hollow"),
            circle(after, y, 4.5, "point worse" if worse else "point"),
            text(plot.left - 10, y, names[place], "tick end"),
            text(size[0] - 4, y, written, "tick end strong" if place == 0 else "tick end"),
        )
        plot.add(mark(shape, f"{name}: {metric.value(one.before)} → {metric.value(one.after)}"))
    plot.legend((ring("point hollow"), "before"), (ring("point"), "after"), (ring("point worse"), "after, worse"))
    return plot.figure(f"{metric.title} by class", f"{shown[0][0]} changes by {metric.change(shown[0][1].change)}")


# ---- the network --------------------------------------------------------------------------------------------------------

_TALLEST = 140.0
_ROOM = 20.0  # above the bars, for their numbers
_MARGIN, _LONGEST = 14.0, 20


def network(run: RunReport) -> Figure | None:
    """Every layer's width before and after, with shortcuts as arcs; None where the widths are not known."""
    layers = {layer.name: layer for layer in run.layers}
    if not layers:
        return None
    nodes = run.nodes
    shown = [place for place, node in enumerate(nodes) if node.kind != "input" and (not node.is_layer or node.name in layers)]
    pitch = min(max(1070 / len(shown), 12.4), 96.0)
    places = {place: _MARGIN + (k + 0.5) * pitch for k, place in enumerate(shown)}
    lanes = _lanes(_shortcuts(nodes, shown))
    base = _ROOM + 12 + (max(lanes.values(), default=-1) + 1) * 13 + _TALLEST
    longest = 6.3 * max(len(_short(layer.name)) for layer in run.layers)
    # labels lie flat where the longest fits, slant where they are not too dense, and stand otherwise
    angle = 0 if longest < pitch else 45 if pitch >= 24 else 90
    tallest = max(layer.filters for layer in run.layers)
    body = join(
        line(_MARGIN, base, places[shown[-1]] + pitch / 2, base, "axis"),
        *(_arc(places[a] + 3, places[b] - 3, base - _TALLEST - _ROOM, lane) for (a, b), lane in lanes.items()),
        *(
            _bar(layers[nodes[place].name], x, base, pitch, _TALLEST / tallest, angle)
            if nodes[place].is_layer
            else mark(
                join(line(x, base - _TALLEST - _ROOM, x, base, "join-line"), circle(x, base, min(4.5, pitch * 0.28), "join")),
                f"{nodes[place].name}: sum or concatenation",
            )
            for place, x in places.items()
        ),
    )
    width = max(2 * _MARGIN + pitch * len(shown), 300.0)
    filters, left = sum(layer.filters for layer in run.layers), sum(layer.left for layer in run.layers)
    words = f"{len(layers)} layers, {filters - left} of {filters} filters removed"
    height = base + 24 + longest * math.sin(math.radians(angle))
    return Figure("Widths of the layers before and after", words, width, height, body, "network")


def _shortcuts(nodes: Sequence[Node], shown: Sequence[int]) -> list[tuple[int, int]]:
    """Edges that skip a layer."""
    return [
        (source, place)
        for place in shown
        for source in nodes[place].sources
        if source in shown and any(source < k < place and nodes[k].is_layer for k in shown)
    ]


def _lanes(arcs: Sequence[tuple[int, int]]) -> dict[tuple[int, int], int]:
    """Heights above the bars, so that arcs over the same layers do not cross; short ones lie lowest."""
    lanes: dict[tuple[int, int], int] = {}
    for a, b in sorted(arcs, key=lambda arc: arc[1] - arc[0]):
        taken = {lane for (c, d), lane in lanes.items() if a < d and c < b}
        lanes[a, b] = next(k for k in range(len(lanes) + 1) if k not in taken)
    return lanes


def _arc(start: float, end: float, floor: float, lane: int) -> Markup:
    """An arrow over the bars."""
    top = floor - 8 - 13 * lane
    bend = min(8.0, (end - start) / 3)
    way = (
        f"M{number(start)} {number(floor)}V{number(top + bend)}q0 {number(-bend)} {number(bend)} {number(-bend)}"
        f"H{number(end - bend)}q{number(bend)} 0 {number(bend)} {number(bend)}V{number(floor)}"
    )
    return el("path", d=f"{way}M{number(end - 3)} {number(floor - 5)}l3 5l3 -5", class_="shortcut")


def _bar(layer: LayerChange, x: float, base: float, pitch: float, scale: float, angle: int) -> Markup:
    wide, full, left = min(pitch * 0.66, 44.0), scale * layer.filters, scale * layer.left
    removed = layer.share_removed
    shade = 0 if removed <= 0 else min(int(removed * 5) + 1, 5)  # 0: nothing removed, then a fifth each
    widths = f"{layer.filters} → {layer.left}"
    label_y = base + (11 if angle else 14)
    shape = join(
        rect(x - pitch / 2, base - _TALLEST, pitch, _TALLEST, "hit"),
        rect(x - wide / 2, base - full, wide, full, "before"),
        rect(x - wide / 2, base - left, wide, left, f"s{shade}"),
        # numbers where there is room for them: before and after, or only what is left
        text(x, base - full - 6, widths if pitch >= 60 and left != full else str(layer.left), "count middle")
        if pitch >= 24
        else None,
        el(
            "text",
            _short(layer.name),
            x=x,
            y=label_y,
            class_="label" if angle else "label middle",
            transform=f"rotate({angle} {number(x)} {number(label_y)})" if angle else None,
        ),
    )
    shares = f"({percent(removed, 0)} removed), {percent(layer.weights_removed, 0)} of its weights removed"
    return mark(shape, f"{layer.name}: {widths} filters {shares}")


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST else f"…{name[1 - _LONGEST :]}"
