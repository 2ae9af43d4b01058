"""The importances of a site's filters, sorted, with error bars; kept and removed are told apart."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from secateurs._util.format import percent, plural, short
from secateurs.graph.structure import Node
from secateurs.report.charts.figure import (
    SMALL_LETTER,
    Figure,
    Frame,
    Html,
    Scale,
    axes,
    columns,
    el,
    join,
    legend,
    line,
    mark,
    number,
    padded,
    square,
    text,
    ticks,
)
from secateurs.report.records import LayerRecord, RankingRecord, RunRecord, StepRecord

_WIDTH, _HEIGHT = 360.0, 232.0


def importances(step: StepRecord) -> Figure | None:
    """The figure of one step; None where its importances are not known."""
    ranking = step.ranking
    if ranking is None or not ranking.coef:
        return None
    order = sorted(range(len(ranking.coef)), key=lambda i: ranking.coef[i])
    gone = set(step.removed)
    frame = _frame(ranking)
    width = (frame.right - frame.left) / len(order)
    removed = [place for place, i in enumerate(order) if ranking.ids[i] in gone]
    kept = [place for place, i in enumerate(order) if ranking.ids[i] not in gone]
    coef = [ranking.coef[i] for i in order]
    errors = [ranking.stderr[i] for i in order] if ranking.stderr else []
    body = join(
        axes(
            frame,
            x_title="filters, least important first",
            y_title="importance",
            y_ticks=ticks(frame.y.low, frame.y.high),
            y_text=short,
        ),
        el("path", d=_bars(frame, width, kept, coef), class_="kept"),
        el("path", d=_bars(frame, width, removed, coef), class_="removed"),
        el("path", d=_error_bars(frame, width, errors, coef), class_="whisker"),
        legend(
            frame.right,
            [(square("removed"), f"removed {len(removed)}"), (square("kept"), f"kept {len(kept)}")],
            letter=SMALL_LETTER,
        ),
        columns(
            frame,
            [_tip(ranking, i, ranking.ids[i] in gone) for i in order],
            start=frame.left,
            step=width,
            summary=f"Filter {ranking.ids[order[0]]} counts least, filter {ranking.ids[order[-1]]} most",
        ),
    )
    words = f"Importances of {plural(len(order), 'filter')} of {step.site}, of which {len(removed)} were removed"
    return Figure("Importance of each filter", words, _WIDTH, _HEIGHT, body)


def _frame(ranking: RankingRecord) -> Frame:
    errors = ranking.stderr or (0.0,) * len(ranking.coef)
    reach = [e if math.isfinite(e) else 0.0 for e in errors]
    low, high = padded([0.0, *(c + s * e for c, e in zip(ranking.coef, reach, strict=True) for s in (-1, 1))], share=0.05)
    return Frame(Scale(0, 1, 50, _WIDTH - 4), Scale(low, high, _HEIGHT - 42, 26))


def _bars(frame: Frame, width: float, places: list[int], coef: list[float]) -> str:
    """All bars in one path: from zero to the importance, with a gap where there is room for one."""
    gap = min(width * 0.25, 2.0) if width > 3 else 0.0
    zero = frame.y(0.0)
    return "".join(
        f"M{number(frame.left + place * width + gap / 2)} {number(zero)}v{number(frame.y(coef[place]) - zero)}"
        f"h{number(width - gap)}V{number(zero)}z"
        for place in places
    )


def _error_bars(frame: Frame, width: float, errors: list[float], coef: list[float]) -> str:
    return "".join(
        f"M{number(frame.left + (place + 0.5) * width)} {number(frame.y(c - e))}V{number(frame.y(c + e))}"
        for place, (c, e) in enumerate(zip(coef, errors, strict=False))
        if math.isfinite(e)
    )


def _tip(ranking: RankingRecord, i: int, gone: bool) -> str:
    error = f" ± {short(ranking.stderr[i])}" if ranking.stderr else ""
    return f"filter {ranking.ids[i]}, {'removed' if gone else 'kept'}: {short(ranking.coef[i])}{error}"


_TALLEST = 140.0
_ROOM = 20.0  # above the bars, for their numbers
_LEFT, _RIGHT, _LONGEST = 14.0, 14.0, 20


def network(run: RunRecord) -> Figure | None:
    """The figure; None where the widths are not known. Without the network's picture, layers stand by name and without arcs."""
    layers = {layer.name: layer for layer in run.layers}
    if not layers:
        return None
    nodes = run.nodes or tuple(
        Node(layer.name, "layer", (place - 1,) if place else ()) for place, layer in enumerate(run.layers)
    )
    shown = [place for place, node in enumerate(nodes) if node.kind != "input" and (not node.is_layer or node.name in layers)]
    pitch = min(max(1070 / len(shown), 12.4), 96.0)
    places = {place: _LEFT + (k + 0.5) * pitch for k, place in enumerate(shown)}
    arcs = _shortcuts(nodes, shown)
    lanes = _lanes(arcs)
    depth = max(lanes.values(), default=-1) + 1
    base = _ROOM + 12 + depth * 13 + _TALLEST
    tallest = max(layer.filters for layer in layers.values())
    names = [_short(nodes[place].name) for place in shown if nodes[place].is_layer]
    angle = _angle(names, pitch)
    labels = 24 + 6.3 * max(map(len, names)) * math.sin(math.radians(angle))
    body = join(
        line(_LEFT, base, places[shown[-1]] + pitch / 2, base, "axis"),
        *(_arc(places[a], places[b], base - _TALLEST - _ROOM, lanes[a, b]) for a, b in arcs),
        *(_drawn(nodes[place], layers, places[place], base, pitch, tallest, angle) for place in shown),
    )
    width = max(_LEFT + _RIGHT + pitch * len(shown), 300.0)
    gone = sum(layer.filters - layer.left for layer in layers.values())
    words = f"{len(layers)} layers, {gone} of {sum(layer.filters for layer in layers.values())} filters removed"
    return Figure("Widths of the layers before and after", words, width, base + labels, body, "network")


def _shortcuts(nodes: Sequence[Node], shown: Sequence[int]) -> list[tuple[int, int]]:
    """Edges that jump over a layer: the rest join neighbours. A way round no layer at all is a neighbour's too."""
    visible = set(shown)
    found = []
    for place in shown:
        for source in nodes[place].sources:
            between = [k for k in shown if source < k < place and nodes[k].is_layer]
            if source in visible and between:
                found.append((source, place))
    return found


def _lanes(arcs: Sequence[tuple[int, int]]) -> dict[tuple[int, int], int]:
    """Lanes above the bars, so that arcs over the same layers do not cross; short ones lie lowest."""
    lanes: dict[tuple[int, int], int] = {}
    for a, b in sorted(arcs, key=lambda arc: arc[1] - arc[0]):
        taken = {lane for (c, d), lane in lanes.items() if a < d and c < b}
        lanes[a, b] = next(k for k in range(len(lanes) + 1) if k not in taken)
    return lanes


def _arc(start: float, end: float, floor: float, lane: int) -> Html:
    start, end = start + 3, end - 3  # where one arc ends, the next begins
    top = floor - 8 - 13 * lane
    bend = min(8.0, (end - start) / 3)
    way = (
        f"M{number(start)} {number(floor)}V{number(top + bend)}q0 {number(-bend)} {number(bend)} {number(-bend)}"
        f"H{number(end - bend)}q{number(bend)} 0 {number(bend)} {number(bend)}V{number(floor)}"
    )
    return join(
        el("path", d=way, class_="shortcut"),
        el("path", d=f"M{number(end - 3)} {number(floor - 5)}l3 5l3 -5", class_="shortcut"),
    )


def _drawn(node: Node, layers: dict[str, LayerRecord], x: float, base: float, pitch: float, tallest: int, angle: int) -> Html:
    if not node.is_layer:
        shape = join(
            line(x, base - _TALLEST - _ROOM, x, base, "join-line"),
            el("circle", cx=x, cy=base, r=min(4.5, pitch * 0.28), class_="join"),
        )
        return mark(shape, f"{node.name}: ways join")
    layer = layers[node.name]
    wide = min(pitch * 0.66, 44.0)
    full, left = _TALLEST * layer.filters / tallest, _TALLEST * layer.left / tallest
    shape = join(
        el("rect", x=x - pitch / 2, y=base - _TALLEST, width=pitch, height=_TALLEST, class_="hit"),
        el("rect", x=x - wide / 2, y=base - full, width=wide, height=full, class_="before"),
        el("rect", x=x - wide / 2, y=base - left, width=wide, height=left, class_=f"s{_bin(layer.share_removed)}"),
        _counts(layer, x, base - full, pitch),
        _label(_short(node.name), x, base, angle),
    )
    return mark(
        shape,
        f"{node.name}: {layer.filters} → {layer.left} filters ({percent(layer.share_removed, 0)} removed), "
        f"{percent(layer.weights_removed, 0)} of its weights removed",
    )


def _counts(layer: LayerRecord, x: float, top: float, pitch: float) -> Html | None:
    """The width above the bar, where there is room for digits: before and after, or only what is left."""
    if pitch < 24:
        return None
    changed = pitch >= 60 and layer.left != layer.filters
    return text(x, top - 6, f"{layer.filters} → {layer.left}" if changed else str(layer.left), "count middle")


def _angle(names: Iterable[str], pitch: float) -> int:
    """Labels lie flat where the longest fits, slant where they are not too dense, and stand otherwise."""
    longest = 6.3 * max(map(len, names), default=0)
    return 0 if longest < pitch else 45 if pitch >= 24 else 90


def _label(name: str, x: float, base: float, angle: int) -> Html:
    turn = f"rotate({angle} {number(x)} {number(base + 11)})" if angle else None
    return el(
        "text", name, x=x, y=base + (14 if not angle else 11), class_="label" if angle else "label middle", transform=turn
    )


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST else f"…{name[1 - _LONGEST :]}"


def _bin(share: float) -> int:
    """0 for nothing removed, 1 to 5 for a fifth each."""
    return 0 if share <= 0 else min(int(share * 5) + 1, 5)
