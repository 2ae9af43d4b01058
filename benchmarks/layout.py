"""What the order and the number of channels do to speed: ResNet-20 with half of its channels, for `benchmarks.exports`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from secateurs import Graph, Site, compact, cost, find_sites, trace
from secateurs.export import Exported, Prepared, prepared, to_onnx, to_source
from secateurs.export.plain import plain_module
from secateurs.export.prepare import PROFILED_BATCH, measure_alignment, resized
from secateurs.graph.latency import SpeedUp
from secateurs.models import build, example_input

Shortcut = Literal["before", "after"]
POSITIONS: tuple[Shortcut, ...] = ("before", "after")


@dataclass(frozen=True)
class Cut:
    """What is left of every site of a network, chosen at random."""

    words: str
    kept: Callable[[int], int]  # of so many channels


HALF = Cut("half", lambda channels: channels // 2)
ONE_LESS = Cut("one less", lambda channels: channels // 2 - 1)


def randomly(graph: Graph, cut: Cut, shortcut: Shortcut = "before") -> Graph:
    """The network with `cut.kept(C)` of the C channels of every site left; the same choice every time."""
    generator = torch.Generator().manual_seed(0)
    keep: dict[str | Site, Tensor] = {}
    for site in find_sites(graph, shortcut=shortcut):
        chosen = torch.randperm(site.channels, generator=generator)[: cut.kept(site.channels)]
        keep[site.name] = torch.zeros(site.channels, dtype=torch.bool).index_fill(0, chosen, True)
    return compact(graph, keep)


def whole_network() -> Graph:
    """ResNet-20 for CIFAR, untrained: speed does not depend on the weights."""
    torch.manual_seed(0)
    return trace(build("resnet20").eval(), example_input("resnet20"))


def measure_order(repeats: int) -> dict[str, Any]:
    """The halved network with its channels as they come, and ordered so that gathers become slices, in turns."""
    small, x = randomly(whole_network(), HALF), example_input("resnet20", PROFILED_BATCH)
    ordered = prepared(small, x)
    as_they_come = Prepared(ordered.name, plain_module(small).cpu(), ordered.batches, ordered.wanted, ordered.given)
    found = {
        name: asdict(measure_alignment(one.module, resized(one.inputs, PROFILED_BATCH)))
        for name, one in (("as_they_come", as_they_come), ("ordered", ordered))
    }
    return {**found, "faster": _both_runtimes(ordered, as_they_come, repeats)}


def measure_widths(repeats: int) -> list[dict[str, Any]]:
    """Multiples of eight, and a filter less than that everywhere, each beside the whole network."""
    graph, x, rows = whole_network(), example_input("resnet20", PROFILED_BATCH), []
    whole = prepared(graph, x)
    for shortcut in POSITIONS:
        for cut in (HALF, ONE_LESS):
            small = randomly(graph, cut, shortcut)
            faster = _both_runtimes(prepared(small, x), whole, repeats)
            macs = cost(graph).macs / cost(small).macs
            rows.append({"shortcut": shortcut, "kept": cut.words, "macs": macs, "faster": faster})
    return rows


def _both_runtimes(network: Prepared, other: Prepared, repeats: int) -> dict[str, dict[str, Any]]:
    """How much faster than `other` the network is: by runtime, then by batch."""
    with tempfile.TemporaryDirectory() as folder:
        exports: tuple[Exported, ...] = (
            to_source(network, Path(folder), original=other, repeats=repeats),
            to_onnx(network, Path(folder) / "model.onnx", original=other, repeats=repeats),
        )
    return {speed.runtime: {str(s.batch): asdict(s.speedup) for s in one.speeds} for one in exports for speed in one.speeds[:1]}


def render_order(found: dict[str, Any]) -> str:
    """What ordering channels brought, in a paragraph."""
    come, ordered = found["as_they_come"], found["ordered"]
    faster = {name: SpeedUp(**by_batch["64"]).summary() for name, by_batch in found["faster"].items()}
    return (
        "### Channels in an order that needs fewer gathers\n\n"
        "ResNet-20 as above. Channels as they come need "
        f"{come['gathers']} gathers and {come['slices']} slices or pads, which take {100 * come['share']:.1f} % of the time in "
        f"PyTorch at batch {come['batch']}; in an export's order: {ordered['gathers']} gathers, {ordered['slices']} slices "
        f"or pads, {100 * ordered['share']:.1f} %. The whole network beside its unordered self, batch 64: "
        + "; ".join(f"{words} in {name}" for name, words in faster.items())
        + "."
    )


def render_widths(rows: list[dict[str, Any]]) -> str:
    """The table of widths."""
    columns = [(runtime, batch) for runtime in rows[0]["faster"] for batch in rows[0]["faster"][runtime]]
    lines = [
        "### Multiples of eight, and a filter less\n",
        "ResNet-20 with 8, 16 and 32 filters left in the layers of its stages, and with 7, 15 and 31: fewer MACs, but no "
        "multiples of eight. Speeds are beside the whole network.\n",
        f"| left | masks | MACs | {' | '.join(f'{runtime}, batch {batch}' for runtime, batch in columns)} |",
        f"| --- | --- | ---: | {' | '.join('---' for _ in columns)} |",
    ]
    for row in rows:
        speeds = " | ".join(SpeedUp(**row["faster"][runtime][batch]).summary() for runtime, batch in columns)
        lines.append(f"| {row['kept']} | {row['shortcut']} the add | {row['macs']:.2f}x fewer | {speeds} |")
    return "\n".join(lines)
