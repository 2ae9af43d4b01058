"""Solve every layer again, in network order: from its input in the cut network it is to give its output in the original.

A layer whose output is a term of a sum makes up for everything that the sum lacks, so errors do not add up along shortcuts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from secateurs._util.modules import Device, eval_mode, on_device
from secateurs.data.dataset import Examples
from secateurs.distributed import active
from secateurs.errors import InvalidInput
from secateurs.graph.add_fusion import spread_sums
from secateurs.graph.consumers import LastTerm, LayerConsumer, find_layers
from secateurs.graph.features import kept_positions, select
from secateurs.graph.masking import network_between
from secateurs.graph.trace import Graph
from secateurs.repair.observe import GRAM_BYTES, ROWS, LayerTally, Take, gram_size, layer_fit, tally_batches, worth_sharing
from secateurs.repair.reconstruction import Errors, write_
from secateurs.repair.solve import matrix_of
from secateurs.repair.targets import affine, channel_axis, converted, find_node

KEPT_BYTES = 2**31  # of activations between one layer and the next, for all examples

Target = Callable[..., Tensor]
"""From the original's output, and for a term of a sum the layer's output and the sum, to the target of the layer's output."""


def refit_(
    graph: Graph,
    original: Graph,
    examples: Examples,
    *,
    layers: Collection[str] | None = None,
    batch: int = 256,
    device: Device = None,
    rows: int | None = ROWS,
    gram_bytes: int = GRAM_BYTES,
    kept_bytes: int = KEPT_BYTES,
    seed: int = 0,
) -> Mapping[str, Errors]:
    """Refit every layer of `graph`, in place, to its output in `original`, the network that `graph` was cut from.

    With `layers` only those, by the names of their modules. Returns the errors before and after by layer. Layers without a
    bias or a BatchNorm behind them, which cannot represent a mean, and layers whose Gram matrices would take more than
    `gram_bytes` stay as they are and are not in the result. Both networks are run once from layer to layer, as long as the
    activations on the way take no more than `kept_bytes`.
    """
    if len(examples) == 0:
        raise InvalidInput("refit: got no examples, wanted at least one.")
    ours, theirs = spread_sums(graph.module), spread_sums(original.module)
    solved: list[_Solved] = []
    for consumer, term in find_layers(graph):
        layer: Any = graph.module.get_submodule(consumer.module)
        if (layer.bias is None and consumer.norm is None) or gram_size(layer) > gram_bytes:
            continue
        if layers is not None and consumer.module not in layers:
            continue
        node = find_node(ours, consumer.node)
        seen, wanted = [node.all_input_nodes[0]], consumer.node
        if term is not None:
            seen, wanted = [*seen, node, find_node(ours, term.end)], term.node
        solved.append(_Solved(consumer, term, node, seen, find_node(theirs, wanted, whose="original")))
    errors = {}
    count, workers = -(-len(examples) // batch), active()
    own = range(workers.rank, count, workers.size)  # batches whose activations this process keeps, from layer to layer
    with on_device(ours, device) as where, on_device(theirs, where), eval_mode(ours, theirs):
        modules = [graph.module.get_submodule(each.consumer.module) for each in solved]
        share = all(worth_sharing([module], batch, len(examples), rows, where) for module in modules)
        here = _Stretches(ours, [each.node for each in solved], kept_bytes // 2 // count)
        there = _Stretches(theirs, [each.wanted for each in solved], kept_bytes // 2 // count)
        for number, (consumer, term, _, seen, wanted_node) in enumerate(solved):
            layer = graph.module.get_submodule(consumer.module)
            target: Target = (
                converted(graph, original, consumer) if term is None else _target_of_term(graph, original, consumer, term)
            )
            tally = LayerTally(layer, examples=len(examples), rows=rows, seed=seed)
            here.go_on(number, seen)
            there.go_on(number, [wanted_node])

            def run(place: int, take: Take, tally: LayerTally = tally, target: Target = target) -> None:
                inputs = examples.batch(slice(place * batch, (place + 1) * batch), device=where).args
                (read, *others), (given,) = here.at(place, inputs), there.at(place, inputs)
                take(tally, tally.terms(read, target(given, *others), place * batch))

            tally_batches("refitted layer", count, [tally], run, share=share, own=own)
            fit = layer_fit(graph, consumer, *tally.moments(matrix_of(layer)))
            weights, errors[consumer.module], _ = fit.mend(fit.kept(torch.ones(0, dtype=torch.bool)), None)
            write_(graph, weights)
    return errors


class _Solved(NamedTuple):
    """A layer to be solved: what of our network it is solved from, and the node of the original that it is to give."""

    consumer: LayerConsumer
    term: LastTerm | None
    node: fx.Node
    seen: list[fx.Node]
    wanted: fx.Node


class _Stretches:
    """A network run from stop to stop over the same batches: what later nodes need is kept at each stop, and read again.

    Where that would take more than `budget` bytes for a batch, its next run starts from an earlier stop.
    """

    def __init__(self, module: fx.GraphModule, stops: Sequence[fx.Node], budget: int) -> None:
        self.module, self.budget = module, budget
        self.place = {node: number for number, node in enumerate(module.graph.nodes)}
        # nothing before a stop is needed again, nor anything that is computed from weights that may change
        ahead = [self.place[node] for node in stops]
        self.ends = [min(ahead[number:]) for number in range(len(ahead))]
        self.inputs: list[fx.Node] = [node for node in self.place if node.op == "placeholder"]
        self.kept: dict[int, tuple[list[fx.Node], tuple[Any, ...]]] = {}  # nodes and their values, by batch
        self.wanted: Sequence[fx.Node] = ()
        self.live: list[fx.Node] = []
        self.parts: dict[tuple[fx.Node, ...], fx.GraphModule] = {}

    def go_on(self, number: int, wanted: Sequence[fx.Node]) -> None:
        """Go on to the stop of that number, on the way to which the values of `wanted` are read."""
        end = self.ends[number]
        self.wanted, self.parts = wanted, {}
        self.live = [
            node
            for node, at in self.place.items()
            if at < end and node.op != "get_attr" and any(self.place[user] >= end for user in node.users)
        ]

    def at(self, place: int, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """The values of the wanted nodes for the batch of that number, whose inputs these are."""
        starts, values = self.kept.get(place, (self.inputs, inputs))
        ends = list(dict.fromkeys([*self.live, *self.wanted]))
        key = tuple(starts)
        if key not in self.parts:
            self.parts[key] = network_between(self.module, starts, ends)
        found = dict(zip(ends, self.parts[key](*values), strict=True))
        kept = tuple(found[node] for node in self.live)
        if _bytes_of(kept) <= self.budget:
            self.kept[place] = self.live, kept
        return tuple(found[node] for node in self.wanted)


def _bytes_of(values: Sequence[Any]) -> int:
    return sum(t.nbytes for t in pytree.tree_leaves(values) if isinstance(t, Tensor))


def _target_of_term(graph: Graph, original: Graph, consumer: LayerConsumer, term: LastTerm) -> Target:
    """Return the function of the original's sum, the layer's output and the graph's sum that gives the layer's target."""
    chosen = kept_positions(graph, original, term.end)
    layer: Any = graph.module.get_submodule(consumer.module)
    axis = channel_axis(layer)
    gain = torch.ones(layer.weight.shape[0], dtype=torch.float64)
    if consumer.norm is not None:
        gain, _ = affine(graph.module.get_submodule(consumer.norm))
        gain = torch.where(gain.abs() > 1e-12 * gain.abs().max(), gain, torch.inf)  # a constant channel cannot be corrected

    def target(wanted: Tensor, own: Tensor, total: Tensor) -> Tensor:
        lack = (select(wanted, chosen, axis) - total).index_select(axis, term.place.to(total.device))
        return own + lack / gain.to(own).view([-1] + [1] * (-1 - axis))

    return target
