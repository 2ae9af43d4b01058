"""Runs a network over examples and gathers what the readers of a site see, and what they are to give."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from secateurs.data.examples import Examples
from secateurs.errors import InvalidInput
from secateurs.evaluate import Device, evaluating, on_device
from secateurs.flow.liveness import mentioned
from secateurs.graph import Graph, shape_of
from secateurs.masking import Masks, masked
from secateurs.readers import LayerReader, SumReader, find_readers
from secateurs.repair.matrix import feature_source, gram_features, groups_of, matrix_of
from secateurs.repair.reconstruction import LayerFit, Reconstruction, SumFit
from secateurs.repair.tally import LayerTally, SumTally
from secateurs.repair.taps import node_called, sum_of, tapped
from secateurs.sites import Site, resolve
from secateurs.sums import spread_sums

ROWS = 2**17
GRAM_BYTES = 2**31

Convert = Callable[[Tensor], Tensor]


def observe(
    graph: Graph,
    site: Site | str,
    examples: Examples,
    *,
    original: Graph | None = None,
    masks: Masks | None = None,
    batch: int = 256,
    device: Device = None,
    rows: int | None = ROWS,
    gram_bytes: int = GRAM_BYTES,
    seed: int = 0,
) -> Reconstruction:
    """Second moments, in float64, of what the site's readers see in `graph`, and of what they give in `original`.

    Without `original` they are to give what they give now. `masks` are cuts at other sites that are decided but not made yet.
    At most `rows` places of a reader's output are looked at (None: all), equally many of each example. A layer whose Gram
    matrices would take more than `gram_bytes` is skipped, with the reason. No network is changed.
    """
    place = site if isinstance(site, Site) and _is_current(graph, site) else next(iter(resolve(graph, [site]).values()))
    if len(examples) == 0:
        raise InvalidInput(f"repair of site {place.name!r}: no examples, wanted at least one.")
    seen = _Observed.of(graph, place, masks or {}, gram_bytes)
    targets = None if original is None else _Targets.of(graph, original, seen)
    tallies = {r.node: LayerTally(seen.layer(r), examples=len(examples), rows=rows, seed=seed) for r in seen.layers}
    sums = {r.node: SumTally() for r in seen.sums}
    first = 0
    with ExitStack() as stack:
        taps = seen.taps()
        where = stack.enter_context(running(taps, device))
        if targets is not None:
            stack.enter_context(running(targets.taps, where))
        for inputs, _ in examples.batches(batch, device=where):
            values = iter(taps(inputs))
            wanted = {} if targets is None else targets.run(inputs)
            for reader in seen.layers:
                tallies[reader.node].add(next(values), wanted.get(reader.node), first)
            for total in seen.sums:
                node = seen.node(total)
                terms = [next(values) for _ in mentioned(node)]
                there = sum_of(node, terms)
                sums[total.node].add(there, sum_of(node, terms, total), wanted.get(total.node, there), total.axis)
            first += len(inputs)
    layers = tuple(layer_fit(graph, r, tallies[r.node]) for r in seen.layers)
    return Reconstruction(place, layers, tuple(_sum_fit(graph, r, sums[r.node]) for r in seen.sums), seen.skipped)


def _is_current(graph: Graph, site: Site) -> bool:
    """Whether a site still lies where it was found, with as many channels."""
    for node in graph.module.graph.nodes:
        if node.name == site.node:
            return (shape_of(node).dims or ())[site.axis : site.axis + 1] == (site.channels,)
    return False


@contextmanager
def running(module: fx.GraphModule, device: Device) -> Iterator[torch.device]:
    """The module on the device and in eval mode inside the block."""
    with on_device(module, device) as place, evaluating(module):
        yield place


@dataclass(frozen=True)
class _Observed:
    """A network, with the cuts that are decided, and the readers of one site in it."""

    module: fx.GraphModule
    layers: tuple[LayerReader, ...]
    sums: tuple[SumReader, ...]
    skipped: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of(graph: Graph, site: Site, masks: Masks, gram_bytes: int) -> _Observed:
        readers = find_readers(graph, site)
        skipped = dict(readers.others)
        layers = []
        for reader in readers.layers:
            layer: Any = graph.module.get_submodule(reader.module)
            size = 2 * 8 * groups_of(layer) * gram_features(layer) ** 2
            if size <= gram_bytes:
                layers.append(reader)
            else:
                skipped[reader.node] = (
                    f"layer {reader.module!r} reads {gram_features(layer) - 1} features, whose Gram matrices would take "
                    f"{size / 2**30:.3g} GiB: more than gram_bytes={gram_bytes}"
                )
        module = spread_sums(masked(graph, masks) if masks else graph.module)
        return _Observed(module, tuple(layers), readers.sums, skipped)

    def layer(self, reader: LayerReader) -> Any:
        return self.module.get_submodule(reader.module)

    def node(self, reader: LayerReader | SumReader) -> fx.Node:
        return node_called(self.module, reader.node)

    def taps(self) -> fx.GraphModule:
        """Gives the input of every layer, then the terms of every sum."""
        ends = [self.node(reader).all_input_nodes[0] for reader in self.layers]
        for total in self.sums:
            ends += mentioned(self.node(total))
        return tapped(self.module, ends)


@dataclass(frozen=True)
class _Targets:
    """What the readers gave in the untouched network, brought into the channels and the scale of the cut one."""

    taps: fx.GraphModule
    converts: Mapping[str, Convert]

    @staticmethod
    def of(graph: Graph, original: Graph, seen: _Observed) -> _Targets:
        module = spread_sums(original.module)
        readers: list[LayerReader | SumReader] = [*seen.layers, *seen.sums]
        nodes = [node_called(module, r.node, whose="original") for r in readers]
        converts = {r.node: converted(graph, original, r) for r in readers}
        return _Targets(tapped(module, nodes), converts)

    def run(self, inputs: Tensor) -> dict[str, Tensor]:
        """The targets of a batch, by reader."""
        values = self.taps(inputs)
        return {name: convert(value) for (name, convert), value in zip(self.converts.items(), values, strict=True)}


def converted(graph: Graph, original: Graph, reader: LayerReader | SumReader) -> Convert:
    """Takes the channels that are left, and in front of a BatchNorm the values of which it makes what the original's makes."""
    chosen = picked(graph, original, reader.node)
    if isinstance(reader, SumReader):
        return lambda value: _pick(value, chosen, reader.axis)
    layer: Any = graph.module.get_submodule(reader.module)
    axis = channel_axis(layer)
    if reader.norm is None:
        return lambda value: _pick(value, chosen, axis)
    ours: Any = graph.module.get_submodule(reader.norm)
    theirs: Any = original.module.get_submodule(reader.norm)
    gain, shift = affine(ours)
    their_gain, their_shift = (t if chosen is None else t[chosen.to(t.device)] for t in affine(theirs))
    steady = gain.abs() > 1e-12 * gain.abs().max()  # a norm that gives a constant takes anything
    scale = torch.where(steady, their_gain / torch.where(steady, gain, 1.0), 1.0)
    moved = torch.where(steady, (their_shift - shift) / torch.where(steady, gain, 1.0), 0.0)

    def convert(value: Tensor) -> Tensor:
        shape = [-1] + [1] * (-1 - axis)
        return _pick(value, chosen, axis) * scale.to(value).view(shape) + moved.to(value).view(shape)

    return convert


def channel_axis(layer: Any) -> int:
    """The axis of a layer's output along which its filters lie, from the right."""
    return -1 - len(getattr(layer, "kernel_size", ()))


def affine(norm: Any) -> tuple[Tensor, Tensor]:
    """A BatchNorm in eval mode as gain · x + shift, (C,) each, float64."""
    gain = (norm.running_var.detach().double() + norm.eps).rsqrt()
    if norm.weight is not None:
        gain = gain * norm.weight.detach().double()
    shift = -gain * norm.running_mean.detach().double()
    return gain, shift if norm.bias is None else shift + norm.bias.detach().double()


def picked(graph: Graph, original: Graph, node: str) -> Tensor | None:
    """Positions in the original of the channels that a node still has; None for all of them."""
    ours, theirs = graph.ids.get(node), original.ids.get(node)
    if ours is None or theirs is None:
        if theirs is not None:
            raise InvalidInput(f"original has fewer channels at {node!r} than the graph: it must be the less cut of the two.")
        return ours
    matches = ours[:, None] == theirs
    if not bool(matches.any(1).all()):
        raise InvalidInput(f"original lacks channels at {node!r} that the graph has: it must be the less cut of the two.")
    return matches.long().argmax(1)


def _pick(value: Tensor, picked: Tensor | None, axis: int) -> Tensor:
    return value if picked is None else value.index_select(axis, picked.to(value.device))


def layer_fit(graph: Graph, reader: LayerReader, tally: LayerTally) -> LayerFit:
    """What was tallied for a reader, with its weights as they are."""
    layer: Any = graph.module.get_submodule(reader.module)
    start = matrix_of(layer).cpu()
    total, held = tally.moments(start)
    assert total is not None
    bias, mean = (None if layer.bias is None else f"{reader.module}.bias"), None
    if bias is None and reader.norm is not None:
        norm: Any = graph.module.get_submodule(reader.norm)
        bias, mean = f"{reader.norm}.running_mean", norm.running_mean.detach().cpu().double()
    return LayerFit(reader.module, layer, start, feature_source(layer, reader.source), total, held, bias, mean)


def _sum_fit(graph: Graph, reader: SumReader, tally: SumTally) -> SumFit:
    assert tally.sums is not None
    lack, part, lack_squared, part_squared, lack_part, target, target_squared = tally.sums.cpu()
    value, name, like = torch.zeros_like(lack), None, lack
    if reader.offset is not None:
        offset: Any = graph.module.get_submodule(reader.offset)
        name, like = f"{reader.offset}.value", offset.value.detach()
        value = like.cpu().double().where(reader.covered, 0)
    spread = max(float((target_squared - target**2 / tally.count).sum()), 1e-300)
    moments = (tally.count, lack, part, lack_squared, part_squared, lack_part)
    return SumFit(reader.node, reader.source, *moments, spread, name, value, reader.covered, like)
