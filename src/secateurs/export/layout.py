"""Lays channels out so that alignments become slices and pads: the same network with its filters in another order.

Filters may stand in any order as long as all who read them agree. Where live channels differ between the terms of a sum, the
order decides whether a term is put in its place by a pad (its channels lie together) or by a gather. One order is chosen for
all tensors that are tied together by ops that keep channels apart; tensors whose order means something outside the network, or
to an op that is not understood, stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, fx, nn

from secateurs.graph.add_fusion import fuse_sums_, spread_sums
from secateurs.graph.flow import Channelwise, Flow, Flows, Join, Layer, Moved, find_flows
from secateurs.graph.layers import Align
from secateurs.graph.masking import copy_module
from secateurs.graph.trace import Graph, shape_of

Order = Sequence[int]


def lay_out(graph: Graph) -> Graph:
    """The same network up to rounding, with its filters ordered so that fewer alignments need a gather.

    Only for taking away: `ids`, `kept` and the plan speak of the old order, so the result must not be cut further or saved.
    """
    module = spread_sums(copy_module(graph))
    ties = _tie(module, find_flows(module))
    for group in ties.groups():
        ranks = _ranks(ties, group)
        for node in group:
            _reorder_(module, ties.flows, node, ties, ranks)
    fuse_sums_(module)
    return graph.with_module(module)


@dataclass(frozen=True)
class Wish:
    """An alignment that would be a slice or a pad if `together` lay side by side within each of `within`."""

    together: frozenset[int]
    within: tuple[frozenset[int], ...]
    cost: int  # values that it moves


class Ties:
    """Which channels of which tensors are one and the same place (a token), and which places must not move."""

    def __init__(self, flows: Flows) -> None:
        self.flows = flows
        self.first: dict[fx.Node, int] = {}
        count = 0
        for node in flows.of:
            if flows.of[node].axis is not None:
                self.first[node] = count
                count += flows.width(node)
        self.parent = list(range(count))
        self.fixed: set[fx.Node] = set()
        self.wishes: dict[fx.Node, Align] = {}

    def tie(self, one: fx.Node, other: fx.Node, pairs: Iterable[tuple[int, int]]) -> None:
        """Channel i of `one` is channel j of `other`."""
        for i, j in pairs:
            self.parent[self._root(self.first[one] + i)] = self._root(self.first[other] + j)

    def fix(self, nodes: Iterable[fx.Node]) -> None:
        """The order of these tensors' channels means something."""
        self.fixed.update(node for node in nodes if node in self.first)

    def tokens(self, node: fx.Node) -> list[int]:
        """The place of each channel of `node`, in order."""
        return [self._root(self.first[node] + i) for i in range(self.flows.width(node))]

    def _root(self, token: int) -> int:
        while self.parent[token] != token:
            self.parent[token] = self.parent[self.parent[token]]
            token = self.parent[token]
        return token

    def groups(self) -> list[list[fx.Node]]:
        """Tensors that share places, or are aligned with each other, and may be reordered together."""
        owner: dict[object, list[fx.Node]] = {}
        for node in self.first:
            marks = [node, *self.tokens(node), *(self.flows.inputs[node] if node in self.wishes else ())]
            known = {id(owner[mark]): owner[mark] for mark in marks if mark in owner}
            group = [node, *(other for found in known.values() for other in found)]
            for mark in [*marks, *(m for other in group for m in (other, *self.tokens(other)))]:
                owner[mark] = group
        distinct = {id(group): group for group in owner.values()}.values()
        return [group for group in distinct if self._may_move(group) and any(node in self.wishes for node in group)]

    def _may_move(self, group: list[fx.Node]) -> bool:
        apart = all(len(set(self.tokens(node))) == self.flows.width(node) for node in group)
        return apart and not self.fixed.intersection(group)


def _tie(module: fx.GraphModule, flows: Flows) -> Ties:
    ties = Ties(flows)
    for node, flow in flows.of.items():
        inputs = flows.inputs[node]
        layer = module.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(layer, Align):
            ties.wishes[node] = layer
            ties.tie(inputs[0], node, ((i, j) for j, i in enumerate(layer.take) if i >= 0))
        elif _keeps_apart(flow, inputs, flows):
            for source in inputs:
                if source in ties.first and flows.width(source) == flows.width(node):
                    ties.tie(source, node, ((i, i) for i in range(flows.width(node))))
        elif not (isinstance(flow, Layer) and flow.groups == 1 and not flow.reads_all):
            ties.fix([node, *inputs])
    return ties


def _keeps_apart(flow: Flow, inputs: Sequence[fx.Node], flows: Flows) -> bool:
    """Whether the op gives the same in another order when all its inputs come in that order."""
    match flow:
        case Channelwise():
            return flow.in_axis is not None and len(inputs) == 1 and flow.resize is None
        case Join():
            # a tensor of the network's own that is broadcast would have to be reordered too
            return all(w == 1 or flows.of[i].axis is not None for i, w in zip(inputs, flow.widths, strict=True))
        case Moved():
            return flow.how == "same" and torch.equal(flow.index, torch.arange(flow.inputs))
        case Layer():
            return flow.depthwise and flow.filters == flow.inputs
    return False


def _ranks(ties: Ties, group: list[fx.Node]) -> dict[int, int]:
    """The place of every token in one order that grants as many wishes as a greedy choice can, dearest first."""
    places = list(dict.fromkeys(token for node in group for token in sorted(ties.tokens(node))))
    blocks: list[list[int]] = [places]
    wishes = [_wish(ties, node) for node in group if node in ties.wishes]
    for wish in sorted(wishes, key=lambda w: -w.cost):
        refined: list[list[int]] | None = blocks
        for within in wish.within:
            refined = None if refined is None else _together(refined, wish.together, within)
        blocks = refined or blocks
    return {token: rank for rank, token in enumerate(token for block in blocks for token in block)}


def _wish(ties: Ties, node: fx.Node) -> Wish:
    (source,) = ties.flows.inputs[node]
    before, after = frozenset(ties.tokens(source)), frozenset(ties.tokens(node))
    return Wish(before & after, (before, after), prod(shape_of(node).dims or ()))


def _together(blocks: list[list[int]], wanted: frozenset[int], within: frozenset[int]) -> list[list[int]] | None:
    """Blocks of free order inside, split so that `wanted` lies together among the tokens of `within`; None if it cannot."""
    touched = [n for n, block in enumerate(blocks) if not wanted.isdisjoint(block)]
    if not touched:
        return blocks
    first, last = touched[0], touched[-1]
    if any(token in within and token not in wanted for block in blocks[first + 1 : last] for token in block):
        return None
    parts = [([t for t in blocks[n] if t in wanted], [t for t in blocks[n] if t not in wanted]) for n in (first, last)]
    if first == last:
        inside = [parts[0][0], parts[0][1]]
    else:
        inside = [parts[0][1], parts[0][0], *blocks[first + 1 : last], parts[1][0], parts[1][1]]
    return [block for block in [*blocks[:first], *inside, *blocks[last + 1 :]] if block]


def _reorder_(module: fx.GraphModule, flows: Flows, node: fx.Node, ties: Ties, ranks: Mapping[int, int]) -> None:
    """Bring what `node` calls, and the layers that read it, into the new order of its channels."""
    order = _order(ties, node, ranks)
    layer: Any = module.get_submodule(str(node.target)) if node.op == "call_module" else None
    flow = flows.of[node]
    if isinstance(layer, Align):
        (source,) = flows.inputs[node]
        place = {old: new for new, old in enumerate(_order(ties, source, ranks))} | {-1: -1}
        take = torch.tensor([place[layer.take[j]] for j in order], device=layer.index.device)
        module.add_submodule(str(node.target), Align(take, layer.axis).train(layer.training))
    elif isinstance(flow, Channelwise):
        for name in flow.params:
            _permute_(layer, name, 0, order)
    elif isinstance(flow, Layer):
        _permute_(layer, "weight", 1 if flow.transposed and flow.groups == 1 else 0, order)
        _permute_(layer, "bias", 0, order)
    for reader in flows.users.get(node, ()):
        reading = flows.of[reader]
        if isinstance(reading, Layer) and reading.groups == 1:
            _permute_(module.get_submodule(str(reader.target)), "weight", 0 if reading.transposed else 1, order)


def _order(ties: Ties, node: fx.Node, ranks: Mapping[int, int]) -> Order:
    """Old positions of the channels of `node`, in the new order."""
    tokens = ties.tokens(node)
    return sorted(range(len(tokens)), key=lambda i: ranks[tokens[i]])


def _permute_(layer: nn.Module, name: str, dim: int, order: Order) -> None:
    found: Tensor | None = getattr(layer, name, None)
    if found is None:
        return
    permuted = found.detach().index_select(dim, torch.tensor(order, device=found.device))
    if isinstance(found, nn.Parameter):
        setattr(layer, name, nn.Parameter(permuted, requires_grad=found.requires_grad))
    else:
        setattr(layer, name, permuted)
