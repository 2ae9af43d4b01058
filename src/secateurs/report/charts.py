"""The charts of a report: each function maps the data of a run to marks on a `Plot`, or gives None where there is none."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from secateurs._util.format import SPACE, MetricName, percent, plain, plural, removed, short
from secateurs.config import Recipe
from secateurs.errors import InvalidInput, UnknownSite, suggest
from secateurs.graph.structure import Node
from secateurs.pruning.figures import Change
from secateurs.pruning.results import Step
from secateurs.report import svg
from secateurs.report.load import LayerChange, Measured, RunReport, SiteImportances, read_run, run_in_memory
from secateurs.report.svg import MEDIUM, SMALL, Axis, Dot, Figure, Plot, number, padded
from secateurs.selection.allocation import Curve

# ---- one site -----------------------------------------------------------------------------------------------------------


def importances(step: Step, found: SiteImportances | None) -> Figure | None:
    """The importance of each filter of a site, sorted, with error bars; kept and removed filters differ in colour."""
    if found is None:
        return None
    errors = found.stderr or (0.0,) * len(found.coef)
    bars = sorted(zip(found.coef, errors, found.ids, strict=True), key=lambda bar: bar[0])
    kinds = ["removed" if i in step.removed else "kept" for _, _, i in bars]
    reach = [c + s * e for c, e, _ in bars for s in (-1, 0, 1) if math.isfinite(e) or not s]
    y = Axis(*padded([0.0, *(c for c, _, _ in bars), *reach], share=0.05), "importance", lambda v, _: short(v))
    plot = Plot(SMALL, Axis(0, 1, "filters, least important first"), y, right=4)
    plot.bars([c for c, _, _ in bars], [e for _, e, _ in bars], kinds)
    plot.legend(*((kind, f"{kind} {kinds.count(kind)}") for kind in ("removed", "kept")))
    spreads = [f" ± {short(e)}" if found.stderr else "" for _, e, _ in bars]
    tips = [f"filter {i}, {k}: {short(c)}{e}" for (c, _, i), k, e in zip(bars, kinds, spreads, strict=True)]
    plot.tips(tips, f"Filter {bars[0][2]} is least important, filter {bars[-1][2]} most")
    words = f"Importances of {plural(len(bars), 'filter')} of {step.site}, of which {kinds.count('removed')} were removed"
    return plot.figure("Importance of each filter", words)


def accuracy(step: Step, metric: MetricName, max_drop: float | None) -> Figure | None:
    """Accuracy against filters removed, as the search for the cut measured it, with the allowed drop and the chosen number."""
    points = sorted({(0, step.accuracy_before), *step.evaluated})
    allowed = [] if max_drop is None else [step.baseline - max_drop]
    low, high = padded([*(a for _, a in points), *allowed], least=1e-4)

    def tip(value: float) -> str:
        return f"{metric.value(value)} ({metric.change(value - step.baseline)})"

    words = f"{plural(len(step.removed), 'filter')} of {step.channels} removed, {metric.name} {metric.value(step.accuracy_cut)}"
    title = f"{metric.title} against filters removed"
    return _against_filters(step, points, _metric_axis(metric, low, high), tip, (title, words), allowed)


def site_curve(step: Step, curve: Curve | None) -> Figure | None:
    """The rise of the loss when filters are removed at this site alone, by which cuts were allocated to sites."""
    if curve is None:
        return None
    rises = [(m, loss - curve.loss[0]) for m, loss in zip(curve.removed, curve.loss, strict=True) if math.isfinite(loss)]
    reach = max(2 * len(step.removed), 4)  # far beyond the chosen number the curve is so steep that it hides the rest
    points = [point for point in rises if point[0] <= reach]
    y = Axis(*padded([rise for _, rise in points]), "rise of the loss, this site alone", lambda v, _: short(v))
    words = f"{plural(len(step.removed), 'filter')} of {step.channels} removed"
    return _against_filters(step, points, y, lambda rise: f"loss {rise:+.2g}", ("Loss against filters removed", words))


def _against_filters(
    step: Step,
    points: Sequence[tuple[int, float]],
    y: Axis,
    tip: Callable[[float], str],
    titles: tuple[str, str],
    allowed: Sequence[float] = (),
) -> Figure | None:
    """A curve over the number of filters removed at a site, with the chosen number and the lowest value allowed."""
    if len(points) < 2:
        return None
    chosen = len(step.removed)
    most = points[-1][0]
    whole = [value for value in svg.ticks(0, most) if value == int(value)]
    plot = Plot(SMALL, Axis(0, most, "filters removed", lambda v, _: f"{v:.0f}", at=whole), y)
    for lowest in allowed:
        plot.level(lowest, "allowed", "allowed")
    plot.chosen(chosen, f"{chosen} of {step.channels}")
    look = {True: ("point chosen-point", 5.0), False: ("point", 3.0)}
    dots = [
        Dot(m, v, f"{plural(m, 'filter')} removed{', chosen' if m == chosen else ''}: {tip(v)}", *look[m == chosen])
        for m, v in points
    ]
    plot.curve(points, dots)
    return plot.figure(*titles)


def agreement(step: Step, found: SiteImportances | None) -> Figure | None:
    """Predicted against measured scores of a site's masks."""
    if found is None or not found.agreement:
        return None
    low, high = padded([v for pair in found.agreement for v in pair], share=0.04, least=1e-3)
    axes = (Axis(low, high, title, lambda v, _: short(v)) for title in ("predicted score", "measured score of each mask"))
    plot = Plot(SMALL, *axes)
    plot.add(svg.line(plot.left, plot.bottom, plot.right, plot.top, "diagonal"))
    plot.dots(found.agreement, "dots")
    words = f"{len(found.agreement)} masks of {step.site}; held-out r² {plain(step.r2_held_out)}"
    return plot.figure("Predicted against measured score", words)


# ---- the run ------------------------------------------------------------------------------------------------------------


def timeline(run: RunReport) -> Figure | None:
    """Accuracy after every cut and epoch above, MACs removed below, on one axis; None before the second measurement."""
    events, metric = run.events, run.metric
    if len(events) < 2:
        return None
    # only a budget for the whole run has one lowest accuracy
    whole = run.start is not None and run.recipe is not None and run.recipe.budget == "run"
    allowed = [run.start.accuracy - run.recipe.max_drop] if whole and run.start and run.recipe else []
    low, high = padded([*(e.accuracy for e in events), *allowed], least=1e-3)
    split, places = 192.0, (-0.5, len(events) - 0.5)
    upper = Plot(MEDIUM, Axis(*places), _metric_axis(metric, low, high), bottom=MEDIUM[1] - split)
    cuts, epochs = ([(n, e.accuracy) for n, e in enumerate(events) if (e.what == "cut") == cut] for cut in (True, False))
    for lowest in allowed:
        upper.level(lowest, "allowed")
    upper.curve([(n, e.accuracy) for n, e in enumerate(events)])
    step = (upper.right - upper.left) / len(events)
    for points, class_ in ((epochs, "dots solid"), (cuts, "dots cut")):
        upper.dots(points, class_, size=min(max(step * 0.8, 3.2), 9))
    trained = [("point", "after training")] if any(e.what == "epoch" for e in events) else []
    upper.legend(*[("allowed", "allowed")] * len(allowed), ("point worse", "after a cut"), *trained)
    marked = cuts[:: -(-len(cuts) // 9) or 1]  # ticks at nine cuts at most
    x = Axis(*places, "measurements in order, by step", lambda v, _: str(events[round(v)].step), at=[n for n, _ in marked])
    below = Plot(MEDIUM, x, Axis(0, 1, "MACs removed", percent, at=(0, 0.5, 1)), top=split + 42)
    area = "".join(f"V{number(below.y(e.macs_removed))}H{number(below.left + (n + 1) * step)}" for n, e in enumerate(events))
    below.add(svg.el("path", d=f"M{number(below.left)} {number(below.bottom)}{area}V{number(below.bottom)}z", class_="area"))
    tips = [f"{e.label}: {metric.value(e.accuracy)}, {percent(e.macs_removed)} of the MACs removed" for e in events]
    below.tips(tips, f"{metric.title} and MACs over the run", top=upper.top)
    below.marks[:0] = upper.marks
    ends = f"from {metric.value(events[0].accuracy)} to {metric.value(events[-1].accuracy)}"
    return below.figure("The run over time", f"{plural(len(events), 'measurement')}, {ends}")


def best(points: Sequence[Measured]) -> set[Measured]:
    """Those that no other point beats in both MACs and accuracy."""
    pairs = {(p.macs_removed, p.accuracy) for p in points}
    beaten = {(m, a) for m, a in pairs if any(n >= m and b >= a and (n, b) != (m, a) for n, b in pairs)}
    return {p for p in points if (p.macs_removed, p.accuracy) not in beaten}


def frontier(runs: Sequence[RunReport], colours: Sequence[int] | None = None) -> Figure | None:
    """Accuracy against MACs removed after every step; None while no filter is removed.

    Several runs, of one metric, differ in colour, by the numbers `colours`.
    """
    everything = [p for run in runs for p in run.networks]
    if len(everything) < 2:
        return None
    metric = runs[0].metric
    low, high = padded([p.accuracy for p in everything], least=1e-3)
    right = min(padded([p.macs_removed for p in everything], share=0.05, least=0.001)[1], 1.0)
    plot = Plot(MEDIUM, Axis(0, right, "MACs removed", percent, 6), _metric_axis(metric, low, high))
    for place, run in enumerate(runs):
        front, last = best(run.networks), len(run.networks) - 1
        name = "" if colours is None else f"{run.name}, "
        colour = "" if colours is None else f" r{colours[place] % svg.COLOURS}"
        dots = [
            Dot(
                p.macs_removed,
                p.accuracy,
                f"{name}{p.label}: {metric.value(p.accuracy)}, {percent(p.macs_removed)} of the MACs removed",
                f"point{'' if p in front else ' hollow'}{colour}{' chosen-point' if n == last and not colour else ''}",
                5.5 if n == last else 4,
            )
            for n, p in enumerate(run.networks)
        ]
        plot.curve([(p.macs_removed, p.accuracy) for p in run.networks], dots, f"way{colour}")
    if colours is None:
        plot.legend(("point", "best at its size"), ("point hollow", "beaten"), ("point chosen-point", "latest"))
    words = f"{len(everything)} networks, the smallest without {percent(max(p.macs_removed for p in everything))} of the MACs"
    return plot.figure(f"{metric.title} against MACs", words)


def allocation(run: RunReport) -> Figure | None:
    """Predicted rise of the loss against savings, with the allocations that were tried; None where cuts were not allocated."""
    found = run.allocation
    if found is None:
        return None
    # shares of the network: a sum over sites, each as if it were cut alone, counts some weights twice
    reach = min(1.6 * run.saving_scale * max(found.saved, found.by_estimate), 1.0) or 1.0
    shown = [(run.saving_scale * saved, rise) for saved, rise in found.frontier if run.saving_scale * saved <= reach]
    if len(shown) < 2:
        return None
    rises = Axis(0.0, padded([rise for _, rise in shown])[1], "predicted rise of the loss", lambda v, _: f"{v:.3g}")
    plot = Plot(MEDIUM, Axis(0.0, shown[-1][0], f"{run.saving} removed, estimated", percent, 6), rises)
    plot.chosen(run.saving_scale * found.saved, "chosen")
    dots = []
    for saved, measured, accepted in found.tried:
        x, y = min(shown, key=lambda point: abs(point[0] - run.saving_scale * saved))
        if run.saving_scale * saved <= reach:
            tip = f"{percent(x)}: {run.metric.name} {run.metric.value(measured)} measured, loss +{plain(y)} predicted"
            dots.append(Dot(x, y, tip, "point" if accepted else "point hollow", 4.5))
    plot.curve(shown, dots)
    plot.legend(("point", "within the allowed drop"), ("point hollow", "beyond it"))
    words = f"{len(found.frontier)} allocations, of which {len(found.tried)} were made"
    return plot.figure(f"Predicted loss against {run.saving} removed", words)


def milliseconds(run: RunReport) -> Figure | None:
    """The metric against predicted milliseconds of the allocations that were made; None where time was not weighed."""
    found, speed, start = run.allocation, None if run.end is None else run.end.latency, run.start
    if found is None or run.saving != "time" or speed is None or speed.original is None or start is None or not found.tried:
        return None
    points = sorted(
        (1e3 * speed.original * (1 - saved), value, "allowed" if accepted else "beyond")
        for saved, value, accepted in {*found.tried, (0.0, start.accuracy, True)}
    )
    chosen = 1e3 * speed.original * (1 - found.saved)
    low, high = padded([value for _, value, _ in points], least=1e-3)
    left, right = padded([ms for ms, _, _ in points], share=0.05)
    x = Axis(
        max(left, 0.0), right, f"ms at batch {speed.batch} in {engine_name(speed.engine)}, predicted", lambda v, _: f"{v:.3g}"
    )
    plot = Plot(MEDIUM, x, _metric_axis(run.metric, low, high))
    plot.chosen(chosen, "chosen")
    dots = [
        Dot(ms, value, f"{ms:.3g} ms: {run.metric.value(value)}", "point" if kind == "allowed" else "point hollow", 4.5)
        for ms, value, kind in points
    ]
    plot.curve([(ms, value) for ms, value, _ in points], dots)
    plot.legend(("point", "within the allowed drop"), ("point hollow", "beyond it"))
    words = f"from {1e3 * speed.original:.3g} to {points[0][0]:.3g} ms, {chosen:.3g} ms chosen"
    return plot.figure(f"{run.metric.title} against milliseconds", words)


def layer_times(run: RunReport) -> list[tuple[str, float, float]]:
    """Seconds of the slowest layers before and after, of all other layers together, and of what is no such layer."""
    found = [] if run.end is None or run.end.latency is None else list(run.end.layer_times)
    layers = sorted((one for one in found if one.name), key=lambda one: -one.before)
    shown = [(one.name, one.before, one.after) for one in layers[:_SLOWEST]]
    if layers[_SLOWEST:]:
        rest = layers[_SLOWEST:]
        shown.append((f"{len(rest)} other layers", sum(one.before for one in rest), sum(one.after for one in rest)))
    return shown + [("between the layers", one.before, one.after) for one in found if not one.name]


_SLOWEST = 15  # layers that are shown one by one


def engine_name(engine: str) -> str:
    """An engine as its users call it."""
    return {"torch": "PyTorch, eager", "compile": "torch.compile", "onnxruntime": "ONNX Runtime"}.get(engine, engine)


def _metric_axis(metric: MetricName, low: float, high: float) -> Axis:
    return Axis(low, high, f"{metric.name} on the validation set", metric.value)


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
    x, y = (
        Axis(low, min(high, 1.01) if metric.share else high, "", metric.value, 5),
        Axis(len(shown), 0, f"test {metric.name} by class"),
    )
    plot = Plot(size, x, y, left=min(max(6.6 * max(map(len, names)), 30), 150) + 14, right=62, top=22, bottom=40)
    for place, (name, one) in enumerate(shown):
        y_at, before, after = plot.y(place + 0.5), plot.x(one.before), plot.x(one.after)
        worse = one.change < 0
        written = metric.change(one.change, 1).split(SPACE)[0] if one.change else "0"
        shape = svg.join(
            svg.rect(0, y_at - row / 2, size[0], row, "hit"),
            svg.line(plot.left, y_at, plot.right, y_at, "grid"),
            svg.line(before, y_at, after, y_at, "loss" if worse else "gain"),
            svg.circle(before, y_at, 4, "point hollow"),
            svg.circle(after, y_at, 4.5, "point worse" if worse else "point"),
            svg.text(plot.left - 10, y_at, names[place], "tick end"),
            svg.text(size[0] - 4, y_at, written, "tick end strong" if place == 0 else "tick end"),
        )
        plot.add(svg.mark(shape, f"{name}: {metric.value(one.before)} → {metric.value(one.after)}"))
    plot.legend(("point hollow", "before"), ("point", "after"), ("point worse", "after, worse"))
    return plot.figure(f"{metric.title} by class", f"{shown[0][0]} changes by {metric.change(shown[0][1].change)}")


# ---- the network --------------------------------------------------------------------------------------------------------

_TALLEST, _ROOM, _MARGIN = 140.0, 20.0, 14.0  # of the bars; above them, for their numbers; at both sides
_LONGEST = 20  # letters of a name


def network(run: RunReport) -> Figure | None:
    """Every layer's width before and after, with shortcuts as arcs; None where the widths are not known."""
    layers = {layer.name: layer for layer in run.layers}
    if not layers:
        return None
    nodes = run.nodes
    shown = [place for place, node in enumerate(nodes) if node.kind != "input" and (not node.is_layer or node.name in layers)]
    pitch = min(max(1070 / len(shown), 12.4), 96.0)
    places = {place: _MARGIN + (k + 0.5) * pitch for k, place in enumerate(shown)}
    lanes = _lanes(nodes, shown)
    floor = 12 + (max(lanes.values(), default=-1) + 1) * 13  # of the arcs
    base = floor + _ROOM + _TALLEST
    longest = 6.3 * min(max(map(len, layers)), _LONGEST)
    # labels lie flat where the longest fits, slant where they are not too dense, and stand otherwise
    angle = 0 if longest < pitch else 45 if pitch >= 24 else 90
    scale = _TALLEST / max(layer.filters for layer in run.layers)
    marks = [svg.line(_MARGIN, base, places[shown[-1]] + pitch / 2, base, "axis")]
    marks += [_arc(places[a] + 3, places[b] - 3, floor, lane) for (a, b), lane in lanes.items()]
    for place, x in places.items():
        if nodes[place].is_layer:
            marks.append(_bar(layers[nodes[place].name], x, base, pitch, scale, angle))
        else:
            shape = svg.line(x, floor, x, base, "join-line") + svg.circle(x, base, min(4.5, pitch * 0.28), "join")
            marks.append(svg.mark(shape, f"{nodes[place].name}: sum or concatenation"))
    filters, left = sum(layer.filters for layer in run.layers), sum(layer.left for layer in run.layers)
    words = f"{len(layers)} layers, {filters - left} of {filters} filters removed"
    width, height = max(2 * _MARGIN + pitch * len(shown), 300.0), base + 24 + longest * math.sin(math.radians(angle))
    return Figure("Widths of the layers before and after", words, width, height, svg.join(*marks), "network")


def _lanes(nodes: Sequence[Node], shown: Sequence[int]) -> dict[tuple[int, int], int]:
    """Edges that skip a layer, with heights at which those over the same layers do not cross; short ones lie lowest."""
    edges = [(source, place) for place in shown for source in nodes[place].sources if source in shown]
    lanes: dict[tuple[int, int], int] = {}
    for a, b in sorted(edges, key=lambda edge: edge[1] - edge[0]):
        if any(a < k < b and nodes[k].is_layer for k in shown):
            taken = {lane for (c, d), lane in lanes.items() if a < d and c < b}
            lanes[a, b] = next(k for k in range(len(lanes) + 1) if k not in taken)
    return lanes


def _arc(start: float, end: float, floor: float, lane: int) -> Markup:
    """An arrow over the bars."""
    bend = min(8.0, (end - start) / 3)
    up, over, r = number(floor - 8 - 13 * lane + bend), number(end - bend), number(bend)
    way = f"M{number(start)} {number(floor)}V{up}q0 -{r} {r} -{r}H{over}q{r} 0 {r} {r}V{number(floor)}"
    return svg.el("path", d=f"{way}M{number(end - 3)} {number(floor - 5)}l3 5l3 -5", class_="shortcut")


def _bar(layer: LayerChange, x: float, base: float, pitch: float, scale: float, angle: int) -> Markup:
    wide, full, left = min(pitch * 0.66, 44.0), scale * layer.filters, scale * layer.left
    gone = removed(layer.filters, layer.left)
    shade = 0 if gone <= 0 else min(int(gone * 5) + 1, 5)  # 0: nothing removed, then a fifth each
    widths = f"{layer.filters} → {layer.left}"
    # numbers where there is room for them: before and after, or only what is left
    count = "" if pitch < 24 else widths if pitch >= 60 and left != full else str(layer.left)
    name = layer.name if len(layer.name) <= _LONGEST else f"…{layer.name[1 - _LONGEST :]}"
    at = base + (11 if angle else 14)
    turn = (
        {"class_": "label", "transform": f"rotate({angle} {number(x)} {number(at)})"} if angle else {"class_": "label middle"}
    )
    shape = svg.join(
        svg.rect(x - pitch / 2, base - _TALLEST, pitch, _TALLEST, "hit"),
        svg.rect(x - wide / 2, base - full, wide, full, "before"),
        svg.rect(x - wide / 2, base - left, wide, left, f"s{shade}"),
        svg.text(x, base - full - 6, count, "count middle") if count else None,
        svg.el("text", name, x=x, y=at, **turn),
    )
    shares = f"({percent(gone, 0)} removed), {percent(layer.weights_removed, 0)} of its weights removed"
    return svg.mark(shape, f"{layer.name}: {widths} filters {shares}")


# ---- for notebooks ------------------------------------------------------------------------------------------------------


def plots(source: str | Path | Sequence[Any], *, recipe: Recipe | None = None) -> Plots:
    """The figures of the run in a folder, or of a run without one: the records of its journal, and its recipe."""
    return Plots(read_run(source) if isinstance(source, str | Path) else run_in_memory(source, recipe))


class Plots:
    """The figures of a run, a method for each; `InvalidInput` says what a run lacks. Of several rounds, the last is shown."""

    def __init__(self, run: RunReport) -> None:
        self.run = run

    def importances(self, site: str) -> Figure:
        """The importance of each filter of a site, sorted, with error bars; kept and removed filters differ in colour."""
        step = self._step(site)
        return _drawn(importances(step, self.run.importances.get(step.number)), f"importances of {site!r} were not kept")

    def accuracy(self, site: str) -> Figure:
        """Accuracy against filters removed at a site, with the allowed drop and the chosen number."""
        return _drawn(accuracy(self._step(site), self.run.metric, self.run.max_drop), f"no cut of {site!r} was measured")

    def agreement(self, site: str) -> Figure:
        """Predicted against measured scores of a site's masks."""
        step = self._step(site)
        return _drawn(agreement(step, self.run.importances.get(step.number)), f"masks and losses of {site!r} were not kept")

    def widths(self) -> Figure:
        """The network: every layer's width before and after, and its shortcuts."""
        return _drawn(network(self.run), "the weights at the start were not kept")

    def timeline(self) -> Figure:
        """Accuracy after every cut and epoch, and MACs removed."""
        return _drawn(timeline(self.run), "fewer than two measurements were made")

    def frontier(self) -> Figure:
        """Accuracy against MACs removed over all steps."""
        return _drawn(frontier([self.run]), "no filter has been removed")

    def classes(self) -> Figure:
        """Test accuracy by class, before and after."""
        return _drawn(classes(self.run), "accuracy by class was not measured")

    def _step(self, site: str) -> Step:
        for step in reversed(self.run.steps):
            if step.site == site:
                return step
        known = dict.fromkeys(step.site for step in self.run.steps)
        raise UnknownSite(f"{self.run.name}: no step at a site {site!r}.{suggest(site, known)}")


def _drawn(figure: Figure | None, reason: str) -> Figure:
    if figure is None:
        raise InvalidInput(f"this figure cannot be drawn: {reason}.")
    return figure
