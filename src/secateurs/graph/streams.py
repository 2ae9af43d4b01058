"""Streams: the sums that hand one another the same channels, as those of a stage of residual blocks do.

At the shortcut position "stream" all of them have one mask. The mask follows every add of the stage and every input to it, so
removed channels are neither written nor read, and nothing has to be aligned inside the stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from secateurs.graph.flow import Channelwise, Flows, Join, Moved, Norm
from secateurs.graph.flow.liveness import activation_behind
from secateurs.graph.node_info import label_of

Numbers = Callable[[fx.Node], tuple[Tensor, int]]
"""Gives the ids of a node's channels in the uncut network, and how many there were."""


@dataclass(frozen=True)
class ResidualStream:
    """Sums with the same channels, in network order, and the nodes behind which their mask goes."""

    sums: tuple[fx.Node, ...]
    places: tuple[fx.Node, ...]

    @property
    def name(self) -> str:
        """The path of the innermost module that holds all the sums, and "stream": 'layer1.stream'."""
        paths = [label_of(node).split(".")[:-1] for node in self.sums]
        common = []
        for parts in zip(*paths, strict=False):
            if len(set(parts)) > 1:
                break
            common.append(parts[0])
        return ".".join([*common, "stream"])


def find_streams(flows: Flows, numbers: Numbers) -> list[ResidualStream]:
    """Find all streams of a network, in its order.

    Two sums belong together if ops that keep every channel in its place lead from one to the other. A sum of a tensor and a
    parameter (an embedding of positions), or a concatenation along another axis, belongs to a stream but does not make one.
    Alignments of earlier cuts keep a channel in its place if it has the same number on both sides.
    """
    same = {node: _same_channels(flows, node, numbers) for node in flows.of}
    varying = depending_on_inputs(flows)
    groups: dict[fx.Node, set[fx.Node]] = {}
    for node in flows.of:
        own = groups.setdefault(node, {node})
        for source in same[node]:
            other = groups[source]
            if other is not own:
                own |= other
                groups |= dict.fromkeys(other, own)
    streams = []
    for group in {id(group): group for group in groups.values() if len(group) > 1}.values():
        members = [node for node in flows.of if node in group]
        joins = [node for node in members if _is_sum(flows, node)]
        sums = [n for n in joins if flows.of[n].broadcasts and len(_wide(flows, n) & varying) > 1]  # type: ignore[union-attr]  # all are joins
        if sums and numbers(sums[0])[1] > 1 and not any(_multiplies_matrices(flows, node) for node in members):
            order = {node: place for place, node in enumerate(members)}
            norms = [
                node for node in members if isinstance(flows.of[node], Norm)
            ]  # before a sum, they must leave channels out too
            places = {*_behind(flows, joins, group), *_entries(flows, joins, group & varying, same), *norms}
            streams.append(ResidualStream(tuple(sums), tuple(sorted(places, key=order.__getitem__))))
    return streams


def keeps_numbers(flows: Flows, node: fx.Node, numbers: Numbers) -> bool:
    """Whether an op on single channels, or one that moves them, gives each the number in the uncut network that it had before.

    Where a slice of the model's took nothing away any more, a cut has erased it, and the ops behind it number channels anew.
    """
    flow, source = flows.of[node], flows.inputs[node][0]
    if flows.of[source].axis is None:
        return False
    (ids, wide), (theirs, there) = numbers(node), numbers(source)
    if isinstance(flow, Moved):
        present = flow.index >= 0  # the others are zeros
        ids, theirs = ids[present], theirs[flow.index[present]]
    return wide == there and torch.equal(theirs, ids)


def depending_on_inputs(flows: Flows) -> set[fx.Node]:
    """The nodes whose values depend on the network's inputs, not on parameters alone."""
    found: set[fx.Node] = set()
    for node in flows.of:
        if node.op == "placeholder" or not found.isdisjoint(flows.inputs[node]):
            found.add(node)
    return found


def _wide(flows: Flows, node: fx.Node) -> set[fx.Node]:
    """The inputs of a join that have all its channels, along an axis that is known or not."""
    flow = flows.of[node]
    assert isinstance(flow, Join)
    each = zip(flows.inputs[node], flow.in_axes, flow.widths, strict=True)
    return {source for source, axis, width in each if axis is not None and width == flow.width}


def _same_channels(flows: Flows, node: fx.Node, numbers: Numbers) -> list[fx.Node]:
    """The inputs of which channel i becomes, or is part of, channel i of `node`."""
    flow, found = flows.of[node], set[fx.Node]()
    if isinstance(flow, Channelwise | Norm) or (isinstance(flow, Moved) and flow.added):
        found = {flows.inputs[node][0]} if keeps_numbers(flows, node, numbers) else set()
    elif isinstance(flow, Join) and flow.zero_if != "third" and not _multiplies_matrices(flows, node):
        found = _wide(flows, node) if flow.zero_if in ("all", "any") else {flows.inputs[node][0]}
        found = {s for s in found if flows.of[s].axis is None or numbers(s)[1] == numbers(node)[1]}  # one of one channel is not
    return [source for source in flows.inputs[node] if source in found and flows.of[source].axis is not None]


def _is_sum(flows: Flows, node: fx.Node) -> bool:
    flow = flows.of[node]
    return isinstance(flow, Join) and flow.zero_if == "all"


def _multiplies_matrices(flows: Flows, node: fx.Node) -> bool:
    flow = flows.of[node]
    return isinstance(flow, Join) and flow.zero_if in ("any", "third") and not flow.broadcasts


def _behind(flows: Flows, joins: list[fx.Node], group: set[fx.Node]) -> Iterator[fx.Node]:
    """The places behind the sums, except for those that only another sum of the stream reads."""
    for node in joins:
        place = activation_behind(flows, node)
        place = place if place in group else node  # its channels may have other numbers
        users = flows.users.get(place, ())
        while len(users) == 1 and isinstance(flows.of[users[0]], Channelwise):
            users = flows.users.get(users[0], ())
        if not (len(users) == 1 and users[0] in group and _is_sum(flows, users[0])):
            yield place


def _entries(
    flows: Flows, joins: list[fx.Node], group: set[fx.Node], same: Mapping[fx.Node, list[fx.Node]]
) -> Iterator[fx.Node]:
    """What enters the stream from outside and is read elsewhere too: without a mask there, its readers would keep all of it."""
    made: dict[fx.Node, bool] = {}  # of each member: whether it is made of sums of the stream alone
    for node, flow in flows.of.items():
        if node in group:
            sources = [source for source in same[node] if source in group]
            enough = any if isinstance(flow, Join) and flow.zero_if == "any" else all
            made[node] = node in joins or (bool(sources) and enough(made[source] for source in sources))
    for node in joins:
        for source in _wide(flows, node) & group:
            entry = source
            while len(flows.users[entry]) == 1 and not made[entry] and len(same[entry]) == 1 and same[entry][0] in group:
                (entry,) = same[entry]
            if len(flows.users[entry]) > 1 and not made[entry]:
                yield entry
