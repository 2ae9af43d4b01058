"""Second moments of what a reader sees and is to give, summed over examples a little at a time: memory stays bounded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from secateurs._util.modules import Device, eval_mode, on_device
from secateurs.data.dataset import Examples
from secateurs.errors import InvalidInput
from secateurs.graph.add_fusion import spread_sums
from secateurs.graph.consumers import ELSEWHERE, LayerConsumer, SumConsumer, find_consumers
from secateurs.graph.flow.liveness import mentioned
from secateurs.graph.layers import mask_channels
from secateurs.graph.masking import Masks, masked
from secateurs.graph.sites import Site, resolve
from secateurs.graph.trace import Graph, shape_of
from secateurs.repair.reconstruction import LayerFit, Reconstruction, SumFit
from secateurs.repair.solve import Moments, feature_source, gram_features, groups_of, matrix_of, patches, target_rows

CHUNK_BYTES = 2**25
"""Features that are spread out at once."""

HELD = 3
"""Every third example is held back to choose a ridge by."""


class LayerTally:
    """Moments of a layer's features, and of its targets if they are given, over all examples and over those held back.

    With more than `rows` places over `examples` examples, each example gets equally many, drawn from a seed: how the examples
    are batched changes nothing.
    """

    def __init__(self, layer: Any, *, examples: int, rows: int | None, seed: int) -> None:
        self.layer = layer
        self.each = None if rows is None else math.ceil(rows / max(examples, 1))
        self.generator = torch.Generator().manual_seed(seed)
        self.sums: list[list[Tensor]] = [[], []]  # of all, of those held back
        self.chunk = max(1, CHUNK_BYTES // (8 * groups_of(layer) * gram_features(layer)))

    def add(self, x: Tensor, y: Tensor | None, first: int) -> None:
        """Take in a batch, of which the first example is number `first`: its input, and what the layer should give."""
        patched = patches(self.layer, x)
        images, places = self._choose(len(patched.view), math.prod(patched.places))
        is_held = (images + first) % HELD == HELD - 1
        for held in (False, True):
            chosen = (is_held == held).nonzero().flatten()
            for part in torch.split(chosen, self.chunk):
                image, place = images[part].to(x.device), places[part].to(x.device)
                features = patched.rows(image, place)
                self._sum(held, features, None if y is None else target_rows(self.layer, y, image, place))

    def _choose(self, count: int, places: int) -> tuple[Tensor, Tensor]:
        """Numbers of images and of their places that are taken in."""
        each = places if self.each is None else min(places, self.each)
        if each == places:
            return torch.arange(count).repeat_interleave(places), torch.arange(places).repeat(count)
        drawn = [torch.randperm(places, generator=self.generator)[:each] for _ in range(count)]
        return torch.arange(count).repeat_interleave(each), torch.cat(drawn)

    def _sum(self, held: bool, features: Tensor, targets: Tensor | None) -> None:
        found = [features.mT @ features]
        if targets is not None:
            found += [features.mT @ targets, (targets**2).sum(1)]
        for kind in (0, 1) if held else (0,):
            if self.sums[kind]:
                for total, new in zip(self.sums[kind], found, strict=True):
                    total += new
            else:
                self.sums[kind] = [f.clone() for f in found]

    def moments(self, start: Tensor) -> Iterator[Moments | None]:
        """Those of all examples, then those of the ones held back (None without any), on the CPU.

        Without targets the layer is to give what its weights `start` (G, p, O) make of all features.
        """
        for found in self.sums:
            if not found:
                yield None
            elif len(found) == 1:
                gram = found[0].cpu()
                cross = gram @ start
                yield Moments(gram, cross, (start * cross).sum(1))
            else:
                gram, cross, energy = (f.cpu() for f in found)
                yield Moments(gram, cross, energy)


class SumTally:
    """First and second moments, channel by channel, of what a sum lacks and of what the site adds to it."""

    def __init__(self) -> None:
        self.sums: Tensor | None = None
        self.count = 0

    def add(self, there: Tensor, without: Tensor, target: Tensor, axis: int) -> None:
        """Take in the sum as it is, without the site, and as it should be; channels lie along `axis`."""
        there, without, target = (_by_channel(t, axis) for t in (there, without, target))
        lacking, part = target - there, there - without
        terms = [lacking, part, lacking**2, part**2, lacking * part, target, target**2]
        found = torch.stack([t.sum(1) for t in terms])
        self.sums = found if self.sums is None else self.sums + found
        self.count += there.shape[1]


def _by_channel(value: Tensor, axis: int) -> Tensor:
    return value.transpose(0, axis).flatten(1).double()


def node_called(module: fx.GraphModule, name: str, *, whose: str = "the graph") -> fx.Node:
    """The node of that name."""
    nodes: list[fx.Node] = list(module.graph.nodes)
    for node in nodes:
        if node.name == name:
            return node
    raise InvalidInput(f"{whose} has no node {name!r}: give the untouched network that the graph was cut from.")


def tapped(module: fx.GraphModule, nodes: Iterable[fx.Node]) -> fx.GraphModule:
    """A network that shares its weights with `module` and gives the values of `nodes` as a tuple."""
    ends = list(nodes)
    needed: set[fx.Node] = set()
    open_nodes = list(ends)
    while open_nodes:
        node = open_nodes.pop()
        if node not in needed:
            needed.add(node)
            open_nodes += node.all_input_nodes
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        if node in needed or node.op == "placeholder":
            env[node] = graph.node_copy(node, lambda n: env[n])
    graph.output(tuple(env[node] for node in ends))
    return fx.GraphModule(module, graph, class_name="Tapped")


def sum_of(node: fx.Node, values: Sequence[Any], reader: SumConsumer | None = None) -> Tensor:
    """What the sum at `node` gives for the values of its `mentioned` nodes; with `reader`, without what comes from the site."""
    terms = iter(reader.sources if reader is not None else ())
    given = []
    for value in values:
        source = next(terms, None) if isinstance(value, Tensor) else None
        if source is not None and reader is not None:
            from_right = len(shape_of(node).dims or ()) - reader.axis  # a term of lower rank is broadcast
            value = mask_channels(value, source == ELSEWHERE, value.dim() - from_right)
        given.append(value)
    remaining = iter(given)
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: next(remaining))
    if isinstance(node.target, str):
        result = getattr(args[0], node.target)(*args[1:], **kwargs)
    else:
        assert callable(node.target)
        result = node.target(*args, **kwargs)
    assert isinstance(result, Tensor)
    return result


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
    with on_device(module, device) as place, eval_mode(module):
        yield place


@dataclass(frozen=True)
class _Observed:
    """A network, with the cuts that are decided, and the readers of one site in it."""

    module: fx.GraphModule
    layers: tuple[LayerConsumer, ...]
    sums: tuple[SumConsumer, ...]
    skipped: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of(graph: Graph, site: Site, masks: Masks, gram_bytes: int) -> _Observed:
        readers = find_consumers(graph, site)
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

    def layer(self, reader: LayerConsumer) -> Any:
        return self.module.get_submodule(reader.module)

    def node(self, reader: LayerConsumer | SumConsumer) -> fx.Node:
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
        readers: list[LayerConsumer | SumConsumer] = [*seen.layers, *seen.sums]
        nodes = [node_called(module, r.node, whose="original") for r in readers]
        converts = {r.node: converted(graph, original, r) for r in readers}
        return _Targets(tapped(module, nodes), converts)

    def run(self, inputs: Tensor) -> dict[str, Tensor]:
        """The targets of a batch, by reader."""
        values = self.taps(inputs)
        return {name: convert(value) for (name, convert), value in zip(self.converts.items(), values, strict=True)}


def converted(graph: Graph, original: Graph, reader: LayerConsumer | SumConsumer) -> Convert:
    """Takes the channels that are left, and in front of a BatchNorm the values of which it makes what the original's makes."""
    chosen = picked(graph, original, reader.node)
    if isinstance(reader, SumConsumer):
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


def layer_fit(graph: Graph, reader: LayerConsumer, tally: LayerTally) -> LayerFit:
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


def _sum_fit(graph: Graph, reader: SumConsumer, tally: SumTally) -> SumFit:
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
