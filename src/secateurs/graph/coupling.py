"""Coupled sites: channels that must go together so that a cut needs no alignment, and the model's own forward can make it.

A sum as it is written adds tensors of equal widths, a chunk gives equal parts, a grouped layer has as many channels in each
group. Channels that such an op ties to one another form a class; the classes that the same layers write form a site.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, fx, nn

from secateurs.graph.flow import (
    Blocks,
    Channelwise,
    Concat,
    Contracted,
    Flows,
    Join,
    Layer,
    Lookup,
    Moved,
    Norm,
    Opaque,
    Recurrent,
    Reduced,
)
from secateurs.graph.flow.kinds import ELSEWHERE
from secateurs.graph.flow.liveness import mentioned
from secateurs.graph.flow.rules import SPLITS
from secateurs.graph.node_info import info, label_of, shape_of
from secateurs.graph.streams import depending_on_inputs

KEPT_SHAPES = ("expand", "repeat", "to", "contiguous")
RESHAPES = ("view", "reshape", torch.reshape, "unsqueeze", torch.unsqueeze, operator.getitem)
"""Ops through which a parameter or buffer is narrowed with what it joins."""

WHOLE = "all its channels are needed"


@dataclass
class Classes:
    """The class of every channel of every node, a number; and by class why its channels cannot go, where they cannot."""

    flows: Flows
    start: dict[fx.Node, int] = field(default_factory=dict)  # of a node's channels among those of all nodes
    label: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    locked: dict[int, str] = field(default_factory=dict)
    apart: frozenset[int] = frozenset()  # classes with units of a recurrent module, which has a site of its own

    def of(self, node: fx.Node) -> Tensor:
        """Return the classes of the channels of `node`."""
        return self.label[self.numbers(node)]

    def numbers(self, node: fx.Node) -> Tensor:
        """Return the places of a node's channels among those of all nodes."""
        return self.start[node] + torch.arange(self.flows.width(node))

    def with_parameters(self) -> Iterator[fx.Node]:
        """Yield embeddings, sums that add a parameter to a tensor, and concatenations with one: they write channels, too.

        In the place of an embedding that is the same for every input, as one of positions, come the ops that join it with
        others: only there has each example its own channels, which can have a mask of their own.
        """
        varying = depending_on_inputs(self.flows)
        for node, flow in self.flows.of.items():
            if isinstance(flow, Lookup):
                yield from self._where_examples_enter(node, varying)
            terms = zip(self.flows.inputs[node], flow.widths, strict=True) if isinstance(flow, Join) else ()
            own = list(terms)[isinstance(flow, Join) and flow.zero_if == "rest" :]  # the first of where's says which to choose
            # nothing is own unless the flow is a join, which has a width
            joined = [i for i, width in own if width == flow.width and self.flows.of[i].axis is None]  # type: ignore[union-attr]
            if joined and isinstance(flow, Join) and flow.zero_if in ("all", "rest") and all(map(_is_of_the_model, joined)):
                yield node

    def _where_examples_enter(self, node: fx.Node, varying: set[fx.Node]) -> Iterator[fx.Node]:
        """Yield `node` if it depends on the network's inputs, else the first ops behind it that do."""
        if node in varying:
            yield node
        else:
            for user in self.flows.users.get(node, ()):
                if user in self.start:
                    yield from self._where_examples_enter(user, varying)

    def obstacle_of_units(self, parts: Sequence[fx.Node]) -> str:
        """Say why the units of a recurrent module, which are the channels of `parts`, cannot go; empty if they can."""
        unit_of: dict[int, set[int]] = {}
        for part in parts:
            flow = self.flows.of[part]
            assert isinstance(flow, Recurrent)
            for channel, each in enumerate(self.of(part).tolist()):
                unit_of.setdefault(each, set()).add(channel % flow.units)
        others = [n for n, f in self.flows.of.items() if isinstance(f, Layer | Recurrent) and n not in parts]
        joined = any(not unit_of.keys().isdisjoint(self.of(node).tolist()) for node in others)
        joined = joined or any(len(units) > 1 for units in unit_of.values())
        locked = next((self.locked[each] for each in unit_of if each in self.locked), "")
        return locked or ("its units are joined with others, or with channels of other layers" if joined else "")

    def lock(self, classes: Tensor, reason: str) -> None:
        """Keep all channels of these classes."""
        for each in set(classes.tolist()):
            self.locked.setdefault(each, reason)


def find_classes(flows: Flows, ids: Mapping[str, Tensor]) -> Classes:
    """Divide the channels of all nodes into classes that go together; `ids` are those of channels that earlier cuts left."""
    from scipy.sparse import coo_array  # a quarter of a second: only where channels are tied
    from scipy.sparse.csgraph import connected_components

    found = Classes(flows)
    total = 0
    for node, flow in flows.of.items():
        if flow.axis is not None:
            found.start[node] = total
            total += flows.width(node)
    ties = [tie for node in flows.of for tie in _ties(found, node)] + list(_ties_of_calls(found))
    none = torch.zeros(0, dtype=torch.long)
    one, other = (torch.cat([none, *(tie[side] for tie in ties)]).numpy() for side in (0, 1))
    links = coo_array((np.ones(len(one), dtype=np.int8), (one, other)), shape=(total, total))
    found.label = torch.from_numpy(connected_components(links, directed=False)[1].astype(np.int64))
    for node in flows.of:
        for source, channels, reason in _locks(flows, node):
            found.lock(found.of(source)[channels], reason)
    found.lock(_changed(found, ids), "earlier cuts have changed which channels it goes with")
    found.apart = frozenset(
        each for node, flow in flows.of.items() if isinstance(flow, Recurrent) for each in found.of(node).tolist()
    )
    for node, flow in flows.of.items():
        if isinstance(flow, Layer) and _is_inside_attention(node):
            found.lock(found.of(node), "nn.MultiheadAttention computes the width of a head from its number of heads")
    for source, user in _sizes_asked(flows):
        theirs = set(found.of(user).tolist()) if user in found.start else set()
        if theirs != set(found.of(source).tolist()):
            for node in {source, user} & found.start.keys():
                found.lock(found.of(node), f"{label_of(user)} takes its size from {label_of(source)}, which has other channels")
    return found


def remember_classes_(flows: Flows) -> None:
    """Record at the nodes of an uncut network which channels go together, if some do by their place: a cut moves them."""
    if any(isinstance(flow, Moved) or (isinstance(flow, Layer | Norm) and flow.groups > 1) for flow in flows.of.values()):
        found = find_classes(flows, {})
        for node in found.start:
            info(node)["classes"] = flows.of[node].axis, found.of(node)


def _changed(found: Classes, ids: Mapping[str, Tensor]) -> Tensor:
    """Return the classes that are not what is left of one class of the uncut network: they have no number there.

    Where groups of a layer have lost different channels, the first one left in each goes with the first of the others; where
    an op is gone that only tied channels, these go alone.
    """
    pairs = [torch.zeros(2, 0, dtype=torch.long)]
    for node in found.start:
        axis, before = info(node).get("classes", (None, None))
        if before is not None and axis == found.flows.of[node].axis:
            pairs.append(torch.stack([found.of(node), before[ids.get(node.name, slice(None))]]))
    now, then = torch.unique(torch.cat(pairs, 1), dim=1).unbind()
    changed: Tensor = now[(torch.bincount(now)[now] > 1) | (torch.bincount(then)[then] > 1)]
    return changed


def _is_inside_attention(node: fx.Node) -> bool:
    """Whether a layer is a part of torch's attention that makes queries, keys and values."""
    stack = info(node).get("nn_module_stack") or {}
    kinds = [entry[1] for entry in stack.values() if isinstance(entry, tuple)]
    return (
        bool(kinds) and kinds[-1] in (nn.MultiheadAttention, "MultiheadAttention") and not str(node.target).endswith("out_proj")
    )


def _ties(found: Classes, node: fx.Node) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of channels, by their numbers, that one op ties to each other."""
    flow, inputs = found.flows.of[node], found.flows.inputs[node]
    if node not in found.start and not isinstance(flow, Contracted):
        return
    out = found.numbers(node) if node in found.start else torch.zeros(0, dtype=torch.long)
    read = [found.numbers(i) if i in found.start else None for i in inputs]
    first = read[0] if read else None
    if isinstance(flow, Channelwise | Norm) and first is not None and len(first) == len(out):
        yield first, out
        if isinstance(flow, Norm) and flow.groups > 1:
            yield from _in_each(first, flow.groups)
    elif isinstance(flow, Join):
        for numbers, axis, width in zip(read, flow.in_axes, flow.widths, strict=True):
            if numbers is not None and axis is not None and width == flow.width:
                yield numbers, out
    elif isinstance(flow, Concat):
        for numbers, part in zip(read, torch.split(out, list(flow.widths)), strict=True):
            if numbers is not None:
                yield numbers, part
    elif isinstance(flow, Moved) and first is not None:
        there = flow.index >= 0
        yield first[flow.index[there]], out[there]
        groups = _shuffled(flow.index)
        if groups:
            yield from _in_each(first, groups)
        parts = _parts(found.flows, node)
        if parts:
            yield from _in_each(first, parts)
    elif isinstance(flow, Blocks) and first is not None:
        for column in flow.members.t():
            yield first[column], out
    elif isinstance(flow, Contracted) and first is not None and read[1] is not None:
        yield first, read[1]
        if len(read) > 2 and read[2] is not None:
            yield read[2], out
    elif isinstance(flow, Layer) and flow.groups > 1 and first is not None and not flow.reads_all:
        if flow.inputs == flow.groups:
            yield first.repeat_interleave(flow.filters // flow.inputs), out
        else:
            yield from _in_each(first, flow.groups)
            yield from _in_each(out, flow.groups)


def _in_each(numbers: Tensor, parts: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Tie the channels at the same place of equal parts."""
    rows = numbers.view(parts, -1)
    for row in rows[1:]:
        yield rows[0], row


def _shuffled(index: Tensor) -> int:
    """Return the groups of a channel shuffle, 0 if `index` is something else."""
    straight = torch.arange(len(index))
    if torch.equal(index, straight):
        return 0
    divisors = [g for g in range(2, len(index)) if len(index) % g == 0]
    return next((g for g in divisors if torch.equal(index, straight.view(g, -1).t().flatten())), 0)


def _parts(flows: Flows, node: fx.Node) -> int:
    """Return the number of equal parts of the chunk or split that `node` is a part of, 0 if it is something else."""
    whole = node.args[0] if node.target is operator.getitem else None
    if not isinstance(whole, fx.Node) or whole.target not in SPLITS or isinstance(flows.of.get(node), Opaque):
        return 0
    (source,), given = flows.inputs[node], shape_of(whole).value
    axis, width = flows.of[source].axis, flows.width(source)
    sizes = {part.dims[axis] for part in given} if isinstance(given, tuple) and axis is not None else set()
    return len(given) if len(sizes) == 1 and sizes.pop() * len(given) == width else 0


def _ties_of_calls(found: Classes) -> Iterator[tuple[Tensor, Tensor]]:
    """Tie what the calls of one module read and write: its weights are the same in all of them."""
    calls: dict[str, fx.Node] = {}
    for node in found.flows.of:
        flow = found.flows.of[node]
        if node.op != "call_module" or not (
            isinstance(flow, Layer | Lookup) or (isinstance(flow, Channelwise) and flow.params)
        ):
            continue
        first = calls.setdefault(str(node.target), node)
        if first is not node:
            for one, other in ((first, node), (found.flows.inputs[first][0], found.flows.inputs[node][0])):
                if one in found.start and other in found.start and found.flows.width(one) == found.flows.width(other):
                    yield found.numbers(one), found.numbers(other)


def _locks(flows: Flows, node: fx.Node) -> Iterator[tuple[fx.Node, Tensor | slice, str]]:
    """Yield nodes, their channels and why a plain forward needs all of these."""
    flow, inputs = flows.of[node], flows.inputs[node]
    known = [i for i in inputs if flows.of[i].axis is not None]
    everything = slice(None)
    if isinstance(flow, Opaque) or (isinstance(flow, Norm) and flows.calls(node) > 1):
        for source in known:
            yield source, everything, flow.reason
    elif isinstance(flow, Norm) and not known:
        yield node, everything, f"{label_of(node)} takes statistics of a tensor that keeps all its channels"
    elif isinstance(flow, Contracted) and (flow.resize is not None or None in flow.in_axes[:2]):
        reason = f"{label_of(node)} takes its scale from the number of channels, or joins them with a tensor that keeps all"
        yield from ((source, everything, reason) for source in known)
    elif isinstance(flow, Reduced) and flow.resize is not None:
        yield from ((source, everything, f"{label_of(node)} counts channels that are removed") for source in known)
    elif isinstance(flow, Layer) and flow.reads_all:
        yield from ((source, everything, f"{node.target!s} reads along another axis than the channels'") for source in known)
    elif isinstance(flow, Layer) and flow.groups > 1 and not known:
        yield node, everything, f"{node.target!s} is grouped, and what it reads keeps all its channels"
    elif isinstance(flow, Join):
        for source, axis, width in zip(inputs, flow.in_axes, flow.widths, strict=True):
            own = axis is not None and width == flow.width
            if source in known and not own:
                yield source, everything, f"{label_of(node)} spreads it over other channels"
            elif source not in known and own and flow.width > 1 and not _is_of_the_model(source):
                yield node, everything, f"{label_of(node)} joins it with a tensor that keeps all its channels"
    elif isinstance(flow, Concat):
        yield from ((node, slice(*_range(flow, i)), WHOLE) for i, source in enumerate(inputs) if source not in known)
    elif isinstance(flow, Moved):
        yield node, flow.index < 0, f"{label_of(node)} adds a fixed number of channels"
        missing = torch.ones(flow.inputs, dtype=torch.bool)
        missing[flow.index[flow.index >= 0]] = False
        if not known:
            yield node, everything, f"{label_of(node)} moves channels of a tensor that keeps them all"
        elif bool(missing.any()) and not _parts(flows, node):
            yield inputs[0], everything, f"{label_of(node)} takes a fixed part of the channels"


def _is_of_the_model(node: fx.Node) -> bool:
    """Whether a node gives a parameter or buffer, in another shape: it is narrowed with what it joins."""
    while node.op in ("call_method", "call_function") and node.target in (*KEPT_SHAPES, *RESHAPES) and len(node.users) == 1:
        source = node.args[0]
        if not isinstance(source, fx.Node) or (node.target is operator.getitem and mentioned(node) != [source]):
            return False  # rows of a table, taken by numbers
        node = source
    return node.op == "get_attr" and len(node.users) == 1


def _range(flow: Concat, part: int) -> tuple[int, int]:
    return sum(flow.widths[:part]), sum(flow.widths[: part + 1])


def _sizes_asked(flows: Flows) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield each tensor of which the forward asks the number of channels, with the ops that get that number."""
    for source, flow in flows.of.items():
        if flow.axis is None:
            continue
        for query in source.users:
            if query.target == "size" and (len(query.args) > 1 or query.kwargs):
                dim = query.args[1] if len(query.args) > 1 else query.kwargs["dim"]
                asked = isinstance(dim, int) and dim % len(shape_of(source).dims or ()) == flow.axis
                numbers = [query] if asked else []
            elif query.target == "size" or (query.target is getattr and query.args[1] == "shape"):
                numbers = list(_entries(query, flow.axis, len(shape_of(source).dims or ())))
            else:
                continue
            yield from ((source, user) for number in numbers for user in _tensor_users(flows, number))


def _entries(sizes: fx.Node, axis: int, rank: int, offset: int = 0) -> Iterator[fx.Node]:
    """Yield the nodes that hold the size along `axis`, taken from `sizes`, or `sizes` itself where it is used whole."""
    for user in sizes.users:
        item = user.args[1] if user.target is operator.getitem else None
        if isinstance(item, int):
            if range(offset, rank)[item] == axis:
                yield user
        elif isinstance(item, slice):
            left = range(offset, rank)[item]
            if axis in left:
                yield from _entries(user, axis, left.stop, left.start)
        else:
            yield sizes


def _tensor_users(flows: Flows, number: fx.Node) -> Iterator[fx.Node]:
    for user in number.users:
        if user in flows.of:
            if not info(user).get("unused"):
                yield user
        elif user.target is not getattr and number in mentioned(user):
            yield from _tensor_users(flows, user)


@dataclass(frozen=True)
class Group:
    """Classes that the same layers write: `classes` in the order of the first layer's channels."""

    layers: tuple[fx.Node, ...]
    classes: tuple[int, ...]

    def sources(self, classes: Tensor) -> Tensor:
        """Return the place in this group of each of the given classes, `ELSEWHERE` where it is of another group."""
        place = {each: i for i, each in enumerate(self.classes)}
        return torch.tensor([place.get(each, ELSEWHERE) for each in classes.tolist()])


def find_groups(found: Classes) -> tuple[list[Group], dict[str, str]]:
    """Return the groups of classes that can go, in network order, and by layer why its filters cannot, where none can."""
    writers: dict[int, list[fx.Node]] = {}
    reasons: dict[str, str] = {}
    for node, flow in found.flows.of.items():
        if isinstance(flow, Layer):
            for each in dict.fromkeys(found.of(node).tolist()):
                writers.setdefault(each, []).append(node)
    grouped: dict[tuple[fx.Node, ...], list[int]] = {}
    for each, nodes in writers.items():
        reason = found.locked.get(each) or ("it is joined with units of a recurrent module" if each in found.apart else "")
        if reason:
            reasons |= {str(node.target): reason for node in nodes if str(node.target) not in reasons}
        else:
            grouped.setdefault(tuple(nodes), []).append(each)
    groups: list[Group] = []
    for layers, classes in grouped.items():
        if len(classes) < 2:
            reasons |= {str(node.target): "it has one filter only" for node in layers}
            continue
        there = found.of(layers[0]).tolist()
        groups.append(Group(layers, tuple(sorted(classes, key=there.index))))
    return groups, reasons


def channels_of(place: fx.Node, found: Classes, group: Group, ids: Mapping[str, Tensor]) -> list[int]:
    """Return for each class of the group the number, in the uncut network, of its first channel there at `place`."""
    sources, width = group.sources(found.of(place)), found.flows.width(place)
    own = ids.get(place.name, torch.arange(width))
    if "classes" in info(place):
        _, before = info(place)["classes"]
        own = (before == before[own][:, None]).int().argmax(1)  # a cut may have removed the first
    first = {source: channel for channel, source in reversed(list(zip(own.tolist(), sources.tolist(), strict=True)))}
    return [first[each] for each in range(len(group.classes))]
