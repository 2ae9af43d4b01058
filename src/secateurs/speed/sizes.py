"""The sizes that cuts leave the layers of a network, the sums that they make align channels, and what is left of other ops.

What one cut of one site changes follows from the graph, which takes an analysis of all of it. Cuts of several sites add up:
their channels are different ones. A knapsack asks for thousands of combinations, so each site is analysed alone, once a width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, fx, nn

from secateurs.compaction.narrowing import balanced
from secateurs.graph.add_fusion import spread_sums
from secateurs.graph.channels import all_of, none_of
from secateurs.graph.flow import Join, Layer, Moved, Source, analyse, find_flows
from secateurs.graph.sites import Site, node_masks
from secateurs.graph.trace import Graph, shape_of

Size = tuple[int, int, int]
"""Inputs, filters and groups of a layer, which determine its time."""
Widths = Mapping[str, int]
"""Numbers of filters kept, by site; a site that is not named keeps all."""


@dataclass(frozen=True, eq=False)
class NarrowedLayer:
    """A layer as cuts leave it: `inputs` and `outputs` are layouts with equal numbers of channels in each of `groups`."""

    flow: Layer
    inputs: Tensor
    outputs: Tensor
    groups: int

    @cached_property
    def size(self) -> Size:
        """What determines its time; all 0 for one that is folded away."""
        inputs, outputs = int(self.inputs.sum()), int(self.outputs.sum())
        return (inputs, outputs, self.groups) if inputs and outputs else GONE


GONE: Size = (0, 0, 0)


@dataclass(frozen=True)
class AlignedSum:
    """A sum with terms that carry other channels than it does."""

    terms: int  # that have to be aligned
    width: int  # of the sum


@dataclass(frozen=True, eq=False)
class Narrowing:
    """What a cut of one site makes of a network."""

    layers: Mapping[fx.Node, NarrowedLayer]  # those whose size changes
    sums: Mapping[fx.Node, AlignedSum]  # those that align channels
    between: Between  # what is gone of ops between the layers


@dataclass(frozen=True)
class Between:
    """Ops between the layers: activations, norms, pooling, attention, sums."""

    calls: float  # how many are made, or a share of them
    work: float  # what they do besides, or a share of it: see `Sizing.weigh`


class Sizing:
    """Sizes of the layers of `graph` under cuts of `sites`."""

    def __init__(self, graph: Graph, sites: Sequence[Site]) -> None:
        self.graph, self.sites = graph, {site.name: site for site in sites}
        module = spread_sums(graph.module)
        self._flows = find_flows(module)
        self._within = find_flows(module, inside=True) if any(site.inside for site in sites) else None  # features of heads
        self._nodes = {node.name: node for node in module.graph.nodes}
        self._changes: dict[tuple[str, int], Narrowing] = {}
        self.full, self.sums = self._layers(live := self._live({})), self._sums(live)
        self._between = {
            node: float(math.prod(dims))
            for node, flow in self._flows.of.items()
            if not isinstance(flow, Layer | Moved | Source)
            and node.op != "output"
            and (dims := shape_of(node).dims) is not None
        }

    def weigh(self, seconds: Mapping[str, float]) -> None:
        """Count the work of ops between the layers in these seconds, by the name of their nodes, not in numbers written.

        A maximum over windows takes 50 times as long for every number as a ReLU.
        """
        self._between = {node: seconds.get(node.name, 0.0) for node in self._between}
        self._changes.clear()

    def change(self, name: str, width: int) -> Narrowing:
        """What changes where the site alone keeps `width` filters, evenly spread."""
        if (name, width) not in self._changes:
            live = self._live({name: spread(width, self.sites[name].channels)})
            layers = {node: layer for node, layer in self._layers(live).items() if layer.size != self.full[node].size}
            sums = {node: found for node, found in self._sums(live).items() if found.terms > self.sums[node].terms}
            self._changes[name, width] = Narrowing(layers, sums, self._gone_between(live))
        return self._changes[name, width]

    def sizes(self, widths: Widths) -> dict[fx.Node, Size]:
        """The sizes of all layers that the cuts change."""
        left: dict[fx.Node, tuple[list[int], list[int]]] = {}
        for name, width in self._cut(widths):
            for node, layer in self.change(name, width).layers.items():
                full, size = self.full[node].size, layer.size
                sums = left.setdefault(node, (list(full), list(full)))[self.sites[name].inside]
                for i in range(3):
                    sums[i] -= full[i] - size[i]
        found = {}
        for node, (outside, inside) in left.items():  # whole heads, and features of those that are left: their shares multiply
            inputs, outputs, groups = (a * b // c for a, b, c in zip(outside, inside, self.full[node].size, strict=True))
            found[node] = (inputs, outputs, max(groups, 1)) if inputs > 0 and outputs > 0 else GONE
        return found

    def alignments(self, widths: Widths) -> dict[fx.Node, AlignedSum]:
        """The sums whose terms have to be aligned because of the cuts."""
        found: dict[fx.Node, AlignedSum] = {}
        for name, width in self._cut(widths):
            for node, one in self.change(name, width).sums.items():
                other = found.get(node, AlignedSum(0, self.sums[node].width))
                terms = min(one.terms + other.terms, len(self._flows.inputs[node]))
                found[node] = AlignedSum(terms, min(one.width, other.width))
        return found

    def left_between(self, widths: Widths) -> Between:
        """The shares that are left of the ops between the layers."""
        gone, work = [self.change(name, width).between for name, width in self._cut(widths)], math.fsum(self._between.values())
        return Between(
            max(1 - math.fsum(one.calls for one in gone) / max(len(self._between), 1), 0.0),
            max(1 - math.fsum(one.work for one in gone) / work, 0.0) if work else 1.0,
        )

    def _cut(self, widths: Widths) -> list[tuple[str, int]]:
        return [(name, width) for name, width in widths.items() if width < self.sites[name].channels]

    def wanted(self, widths: Mapping[str, Iterable[int]]) -> dict[fx.Node, dict[Size, NarrowedLayer]]:
        """For every layer the sizes that it has when each site alone keeps each of its widths; the full one first."""
        found = {node: {layer.size: layer} for node, layer in self.full.items()}
        for name, each in widths.items():
            for width in each:
                for node, layer in self.change(name, width).layers.items():
                    if any(layer.size):
                        found[node].setdefault(layer.size, layer)
        return found

    def layer(self, node: fx.Node, size: Size) -> NarrowedLayer:
        """A layer of that size."""
        full = self.full[node]
        return NarrowedLayer(full.flow, spread(size[0], len(full.inputs)), spread(size[1], len(full.outputs)), size[2])

    def module(self, node: fx.Node) -> nn.Module | None:
        """The layer of a node."""
        return self.graph.module.get_submodule(str(node.target)) if node.op == "call_module" else None

    def sum_shape(self, node: fx.Node) -> tuple[tuple[int, ...], int | None]:
        """The shape of a sum for the graph's example, and the axis of its channels."""
        dims = shape_of(node).dims
        assert dims is not None
        return tuple(dims), self._flows.of[node].axis

    # ---- the analysis ----------------------------------------------------------------------------------------------------

    def _live(self, masks: Mapping[str, Tensor]) -> Callable[[fx.Node, int], Tensor]:
        """The live channels of each node under the masks, which are applied behind all points of their sites."""
        found = []
        for flows, inside in ((self._flows, False), (self._within, True)):
            if flows is not None:
                cuts = ((self.sites[name], keep) for name, keep in masks.items() if self.sites[name].inside is inside)
                behind = {self._nodes[name]: mask for name, (_, mask) in node_masks(cuts).items()}
                found.append((flows.of, analyse(flows, behind).live))

        def live(node: fx.Node, width: int) -> Tensor:
            """Of both kinds of cuts, where they are of one axis."""
            axis, known = self._flows.of[node].axis, all_of(width)
            for of, each in found:
                known = known & each(node, width) if node in of and of[node].axis == axis else known
            return known

        return live

    def _layers(self, live: Callable[[fx.Node, int], Tensor]) -> dict[fx.Node, NarrowedLayer]:
        """All layers as compaction leaves them."""
        found = {}
        for node, flow in self._flows.of.items():
            if isinstance(flow, Layer) and isinstance(self.module(node), nn.Linear | nn.modules.conv._ConvNd):
                inputs = all_of(flow.inputs) if flow.reads_all else live(self._flows.inputs[node][0], flow.inputs)
                outputs, groups = live(node, flow.filters), flow.groups
                if groups > 1 and bool(outputs.any()):
                    inputs, outputs, groups = balanced(flow, inputs, outputs)
                found[node] = NarrowedLayer(flow, inputs, outputs, groups)
        return found

    def _sums(self, live: Callable[[fx.Node, int], Tensor]) -> dict[fx.Node, AlignedSum]:
        """All sums of channels, with the terms that carry other channels than the sum."""
        found = {}
        for node, flow in self._flows.of.items():
            if isinstance(flow, Join) and flow.width > 1 and shape_of(node).dims is not None:
                wanted = live(node, flow.width)
                terms = [live(i, w) for i, w in zip(self._flows.inputs[node], flow.widths, strict=True) if w == flow.width]
                differ = sum(bool(term.any()) and not torch.equal(term, wanted) for term in terms)
                found[node] = AlignedSum(differ, int(wanted.sum()))
        return found

    def _gone_between(self, live: Callable[[fx.Node, int], Tensor]) -> Between:
        """What is not computed any more of the ops between the layers."""
        calls, work = 0, 0.0
        for node, whole in self._between.items():
            if self._flows.of[node].axis is not None:
                width = self._flows.width(node)
                left = 0 if self._folds(node, live) else int(live(node, width).sum())
                calls, work = calls + (not left), work + (1 - left / width) * whole
        return Between(calls, work)

    def _folds(self, node: fx.Node, live: Callable[[fx.Node, int], Tensor]) -> bool:
        """Whether a sum has a single term left, which then takes its place."""
        flow, terms = self._flows.of[node], self._flows.inputs[node]
        if not isinstance(flow, Join) or len(terms) < 2:
            return False
        left = [bool(live(i, w).any()) for i, w in zip(terms, flow.widths, strict=True) if w == flow.width]
        return len(left) == len(terms) and sum(left) < 2


def spread(width: int, channels: int) -> Tensor:
    """A mask (C,) that keeps `width` evenly spread channels, so that grouped layers keep as many per group as possible."""
    keep = none_of(channels)
    keep[torch.arange(width) * channels // max(width, 1)] = True
    return keep
