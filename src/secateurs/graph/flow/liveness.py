"""Dead-channel analysis, as in a compiler: forward, which channels are zero for every input; backward, which are not needed.

Both passes visit only nodes that the masks reach: a node without an entry has no zero and no dead channel.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

import torch
from torch import Tensor, fx

from secateurs.graph.channels import all_of, none_of
from secateurs.graph.flow import rules
from secateurs.graph.flow.kinds import (
    ELSEWHERE,
    Channelwise,
    Contracted,
    Flow,
    Join,
    Layer,
    Moved,
    Norm,
    Opaque,
    Recurrent,
    Reduced,
    Source,
)
from secateurs.graph.flow.table import Op, describe, rule_for
from secateurs.graph.node_info import called_module, dims_of, info, label_of, shape_of
from secateurs.graph.recurrent import recurrent_call
from secateurs.graph.weight_norm import computed_weights


@dataclass(frozen=True)
class Flows:
    """The flow of every node of a graph, with the tensor inputs that it refers to, in order, and their users."""

    of: Mapping[fx.Node, Flow]
    inputs: Mapping[fx.Node, tuple[fx.Node, ...]]
    users: Mapping[fx.Node, tuple[fx.Node, ...]]
    counted: tuple[tuple[fx.Node, ...], ...] = ()  # the calls of each module that takes statistics of all of them together

    @cached_property
    def backwards(self) -> tuple[tuple[fx.Node, tuple[fx.Node, ...], bool], ...]:
        """The nodes with channels, last first, with their users, and whether one of these may need less even without masks."""
        return tuple(
            (node, users, any(isinstance(self.of[user], Moved | Contracted) for user in users))
            for node, flow in reversed(list(self.of.items()))
            for users in [self.users.get(node, ())]
            if flow.axis is not None
        )

    def width(self, node: fx.Node) -> int:
        """Return the number of channels of the output of `node`."""
        axis = self.of[node].axis
        assert axis is not None
        return dims_of(node)[axis]

    def calls(self, node: fx.Node) -> int:
        """Return how many nodes call the module that `node` calls."""
        return sum(other.op == node.op == "call_module" and other.target == node.target for other in self.of)


@dataclass(frozen=True)
class Liveness:
    """For the nodes that masks reach: channels that are always zero, and channels that some consumer needs."""

    zero: Mapping[fx.Node, Tensor]
    need: Mapping[fx.Node, Tensor]

    def live(self, node: fx.Node, width: int) -> Tensor:
        """Return which channels are needed and not always zero, bool (width,)."""
        live = self.need.get(node, all_of(width))
        return live & ~self.zero[node] if node in self.zero else live.clone()


def find_flows(module: fx.GraphModule, *, inside: bool = False) -> Flows:
    """Apply the table of rules to every node, in order: a rule sees the channel axes of its inputs.

    With `inside`, the channels of attention are the features within its heads, the same in every head; otherwise its heads.
    """
    shared = _shared_modules(module)
    flows: dict[fx.Node, Flow] = {}
    inputs: dict[fx.Node, tuple[fx.Node, ...]] = {}
    users: dict[fx.Node, list[fx.Node]] = {}
    for node in module.graph.nodes:
        sources = tuple(_tensor_inputs(node))
        if _is_size_query(node, flows) or _is_read_through(node) or not (shape_of(node).is_tensor or sources):
            continue
        inputs[node] = sources
        axes = tuple(flows[i].axis for i in inputs[node])
        flows[node] = _flow_at_all_sizes(Op(node, called_module(module, node), inputs[node], axes, inside=inside), shared)
        for source in inputs[node]:
            users.setdefault(source, []).append(node)
    calls: dict[str, list[fx.Node]] = {}
    for node, flow in flows.items():
        if isinstance(flow, Channelwise) and "running_mean" in flow.params:
            calls.setdefault(str(node.target), []).append(node)
    counted = tuple(tuple(found) for found in calls.values() if len(found) > 1)
    return Flows(flows, inputs, {node: tuple(found) for node, found in users.items()}, counted)


def _flow_at_all_sizes(op: Op, shared: Mapping[str, str]) -> Flow:
    """Return the flow of an op if it is the same for every size of input; otherwise opaque, which is recorded at the node."""
    varies = info(op.node).get("varies")
    if varies is None:
        flow = _flow(op, shared)
        sizes = 0 if isinstance(flow, Opaque | Source) else len(info(op.node).get("other_shapes", ()))
        if all(_same(flow, _flow(replace(op, size=size), shared)) for size in range(1, sizes + 1)):
            return flow
        varies = f"{op.label} treats channels differently for another batch or image size"
        if not op.inside:
            info(op.node)["varies"] = varies
    return Opaque(varies)


def _same(one: Flow, other: Flow) -> bool:
    """Whether two flows treat channels alike; how arguments are corrected is not compared."""
    if type(one) is not type(other):
        return False
    for each in fields(one):
        a, b = getattr(one, each.name), getattr(other, each.name)
        if each.name != "resize" and not (torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b):
            return False
    return True


def _flow(op: Op, shared: Mapping[str, str]) -> Flow:
    node = op.node
    if node.op in ("placeholder", "get_attr") or (node.op != "output" and not op.inputs):
        return Source()
    if node.op == "output" or isinstance(node.target, type):  # a dataclass or mapping that the network returns
        return Opaque("it is the network's output")
    if op.module is not None:
        obstacle = shared.get(str(node.target)) or computed_weights(op.module)
        if obstacle:
            return Opaque(f"{op.label} {obstacle}")
    found = rule_for(node, op.module)
    if found is None:
        return Opaque(f"no rule for {describe(node, op.module)}")
    if not shape_of(node).is_tensor:
        return Opaque(f"{op.label} does not give a single tensor")
    return found(op)


def _shared_modules(module: fx.GraphModule) -> dict[str, str]:
    """Return why modules are opaque that share weights with another module or call."""
    calls: set[str] = set()
    owners: dict[int, set[str]] = {}
    for node in module.graph.nodes:
        if node.op == "call_module":
            name = str(node.target)
            calls.add(name)
            for tensor in module.get_submodule(name).parameters():
                owners.setdefault(id(tensor), set()).add(name)
        elif node.op == "get_attr":
            tensor = operator.attrgetter(str(node.target))(module)
            owners.setdefault(id(tensor), set()).add(str(node.target))
    found: dict[str, str] = {}
    for name in calls:
        twins = {other for t in module.get_submodule(name).parameters() for other in owners[id(t)]} - {name}
        if twins:
            found[name] = f"shares its weights with {', '.join(map(repr, sorted(twins)))}"
    return found


def _tensor_inputs(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the tensors that `node` reads, once for each mention; a part of a split reads the whole tensor."""
    for source in mentioned(node):
        if _asks_kind_or_size(source):
            continue
        if _is_read_through(source):
            yield from _tensor_inputs(source)
        elif shape_of(source).is_tensor or not _is_plain(shape_of(source).value):
            yield source


def mentioned(node: fx.Node) -> list[fx.Node]:
    """Return the nodes among a node's arguments, once for each mention."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found


def _is_plain(value: object) -> bool:
    """Whether a value is a number or a size and holds no tensors."""
    if isinstance(value, tuple):
        return all(_is_plain(v) for v in value)
    return isinstance(value, int | float | bool | str)


def _asks_kind_or_size(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in ("size", "dim", "ndimension")
    return node.op == "call_function" and node.target is getattr and node.args[1] in ("shape", "ndim", "dtype", "device")


def _is_size_query(node: fx.Node, flows: Mapping[fx.Node, Flow]) -> bool:
    """Whether a node asks for a dtype, a device or sizes other than the channels', and reads no values: x.dtype, x.shape[2:].

    A node that takes all sizes at once, the channels' among them, counts as a consumer of the tensor.
    """
    if not _asks_kind_or_size(node):
        return False
    takes_all = node.target == "size" and len(node.args) == 1 and not node.kwargs
    if not takes_all and not (node.target is getattr and node.args[1] == "shape"):
        return True
    (source,) = node.all_input_nodes
    axis, rank = flows[source].axis, len(shape_of(source).dims or ())

    def leaves_out_channels(user: fx.Node) -> bool:
        if user.target is not operator.getitem:
            return axis is None
        item = user.args[1]
        if isinstance(item, slice) and axis in range(rank)[item]:  # sizes that are taken from it one by one
            return all(u.target is operator.getitem and isinstance(u.args[1], int) for u in user.users)
        return isinstance(item, int | slice)

    return all(map(leaves_out_channels, node.users))


def _is_read_through(node: fx.Node) -> bool:
    """Whether a node is a split, a maximum along an axis, or a recurrent module, of which only single parts are used."""
    recurrent = not shape_of(node).is_tensor and recurrent_call(node) is not None
    if recurrent:
        return bool(node.users) and all(
            user.target is operator.getitem and isinstance(user.args[1], int) for user in node.users
        )
    if node.op not in ("call_function", "call_method") or node.target not in (*rules.SPLITS, *rules.PARTED):
        return False
    if shape_of(node).is_tensor:  # the larger of two tensors
        return False
    return all(user.target is operator.getitem and isinstance(user.args[1], int) for user in node.users)


def analyse(flows: Flows, masks: Mapping[fx.Node, Tensor]) -> Liveness:
    """Find the channels that masks (True = kept) behind the given nodes make zero downstream and unneeded upstream.

    A channel that has no consumer even without masks stays: only what the masks make dead is dead, so the masks describe a cut
    completely.
    """
    zero = _find_zeros(flows, masks)
    counted: dict[fx.Node, Tensor] = {}
    while True:
        need = _find_needs(flows, masks, zero, counted)
        found: dict[fx.Node, Tensor] = {}
        for calls in flows.counted:  # what one call needs, all calls read: the module's statistics are those of all its inputs
            anywhere = torch.stack([need.get(call, all_of(flows.width(call))) for call in calls]).any(0)
            found |= dict.fromkeys(calls, anywhere)
        if all(node in counted and torch.equal(counted[node], vector) for node, vector in found.items()):
            return Liveness(zero, need)
        counted = found


def _find_zeros(flows: Flows, masks: Mapping[fx.Node, Tensor]) -> dict[fx.Node, Tensor]:
    zero: dict[fx.Node, Tensor] = {}
    for node, flow in flows.of.items():
        if flow.axis is None:
            continue
        ins = flows.inputs[node]
        reached = any(i in zero for i in ins) or (isinstance(flow, Moved) and bool((flow.index < 0).any()))
        found = flow.zeros([zero.get(i) for i in ins]) if reached else None
        if node in masks:
            found = ~masks[node] if found is None else found | ~masks[node]
        if found is not None and bool(found.any()):
            zero[node] = found
    return zero


def _find_needs(
    flows: Flows, masks: Mapping[fx.Node, Tensor], zero: Mapping[fx.Node, Tensor], counted: Mapping[fx.Node, Tensor]
) -> dict[fx.Node, Tensor]:
    """Find the channels that each node's users need; `counted` are those that a node reads even if its output is not needed."""
    need: dict[fx.Node, Tensor] = {}
    for node, users, may_need_less in flows.backwards:
        if not may_need_less and node not in masks:
            for user in users:
                if user in need or user in zero:
                    break
            else:
                continue
        width = flows.width(node)
        wanted, read = none_of(width), none_of(width)
        for user in users:
            if isinstance(flows.of[user], Norm) and user in masks:  # its statistics are those of all channels that are kept
                live = need.get(user, all_of(width)).any()
                wanted = wanted | (masks[user] & live)
            else:
                wanted = wanted | _wanted_by(flows, user, node, need, zero, width)
            if user in counted:
                wanted = wanted | counted[user]
            flow = flows.of[user]
            added = isinstance(flow, Moved) and flow.added
            read = read | (all_of(width) if added else _wanted_by(flows, user, node, {}, {}, width))
        if bool(wanted.any()) or not users:
            wanted = wanted | ~read
        if node in masks:
            wanted = wanted & masks[node]
        if not bool(wanted.all()):
            need[node] = wanted
    return need


def _wanted_by(
    flows: Flows,
    user: fx.Node,
    node: fx.Node,
    need: Mapping[fx.Node, Tensor],
    zero: Mapping[fx.Node, Tensor],
    width: int,
) -> Tensor:
    """Return the channels of `node` that one of its users needs."""
    flow, ins = flows.of[user], flows.inputs[user]
    if isinstance(flow, Opaque | Source) or (flow.axis is None and not isinstance(flow, Contracted)):
        return all_of(width)
    if user not in need and user not in zero and not isinstance(flow, Moved | Contracted):
        return all_of(width)
    made = 0 if flow.axis is None else flows.width(user)
    answers = flow.needs(need.get(user, all_of(made)), [zero.get(i) for i in ins], zero.get(user, none_of(made)))
    total = none_of(width)
    for position, source in enumerate(ins):
        if source is node:
            answer = answers[position] if position < len(answers) else None
            if answer is None or len(answer) != width:
                return all_of(width)
            total = total | answer
    return total


@dataclass(frozen=True)
class Revivals:
    """Where ops make something else of channels that are zero behind a site, before they are read.

    `points` has for each such node the sources of its channels: the channel of the site whose mask has to be applied again, or
    `ELSEWHERE`. `filtered` are channels of the site of which each depthwise layer on the way reads one at least. `obstacle`
    says why the channels cannot be followed; it is empty if they can. `grouped` has the sources of the channels of each
    GroupNorm on the way, whose groups must stay equally large; in the uncut network it had several.
    """

    points: Mapping[fx.Node, Tensor]
    obstacle: str = ""
    filtered: frozenset[int] = frozenset()
    grouped: Mapping[fx.Node, Tensor] = field(default_factory=dict)


def find_revivals(flows: Flows, starts: Mapping[fx.Node, Tensor], *, norms: bool = False) -> Revivals:
    """Follow the channels of a site, zero behind the nodes `starts`, to what reads them; `starts` has the sources of each.

    Filters that mix channels read them, so the search ends there; a depthwise filter passes its channel on. With `norms`, so
    does an op that takes statistics over channels: the mask behind it leaves the others out.
    """
    zero = {node: source != ELSEWHERE for node, source in starts.items()}
    sources, points, filtered, grouped = dict(starts), dict[fx.Node, Tensor](), set[int](), list[fx.Node]()
    for node, flow in flows.of.items():
        ins = flows.inputs[node]
        if isinstance(flow, Norm) and (node in zero or ins[0] in zero):
            source = sources.get(node, sources.get(ins[0]))
            assert source is not None
            if not norms or flows.calls(node) > 1:
                return Revivals({}, flow.reason)
            if info(node).get("norm_groups", flow.groups) > 1:
                grouped.append(node)
            points[node] = sources[node] = source
            zero[node] = source != ELSEWHERE
            if (behind := activation_behind(flows, node)) is not node:
                points[behind] = source
            continue
        if node in zero or not any(i in zero for i in ins):
            continue
        if isinstance(flow, Opaque):
            return Revivals({}, flow.reason)
        if isinstance(flow, Layer) and flow.reads_all:
            return Revivals({}, f"{node.target!s} reads along another axis than the channels'")
        if flow.axis is None or isinstance(flow, Reduced | Recurrent):
            continue
        if isinstance(flow, Layer) and not info(node).get("filters_a_channel", flow.depthwise):
            continue
        found, source = flow.zeros([zero.get(i) for i in ins]), flow.sources([sources.get(i) for i in ins])
        if isinstance(flow, Moved):
            found = found & (flow.index >= 0)  # channels that are added as zeros are not the site's
        if isinstance(flow, Layer) and bool((source != ELSEWHERE).any()):
            filtered.add(int(source[source != ELSEWHERE][0]))
        if isinstance(flow, Channelwise | Layer) or (isinstance(flow, Join) and flow.revives):
            if isinstance(flow, Join):
                revived = source != ELSEWHERE
            else:
                before = zero.get(ins[0], none_of(flow.width if isinstance(flow, Channelwise) else flow.inputs))
                revived = before.repeat_interleave(len(found) // len(before)) & ~found
            if bool((revived & (source == ELSEWHERE)).any()):
                return Revivals({}, f"{label_of(node)} turns zero channels into something else")
            if bool(revived.any()):
                found = (found | revived) & (source != ELSEWHERE)
                node = activation_behind(flows, node)
                points[node] = torch.where(found, source, ELSEWHERE)
        if bool(found.any()):
            zero[node], sources[node] = found, torch.where(found, source, ELSEWHERE)
    uneven = (node for node in grouped if not flows.of[node].groups_stay_equal(sources[node]))  # type: ignore[union-attr]  # all are norms
    obstacle = next((f"{label_of(node)} would have groups of different sizes" for node in uneven), "")
    return Revivals(points, obstacle, frozenset(filtered), {node: sources[node] for node in grouped})


def activation_behind(flows: Flows, node: fx.Node) -> fx.Node:
    """Return the activation that follows `node` with nothing but channelwise ops before it, or `node` itself.

    A mask is applied behind an activation: before a ReLU, the loss would have no slope along it where it is zero.
    """
    last = node
    while len(users := flows.users.get(last, ())) == 1 and isinstance(flow := flows.of[users[0]], Channelwise):
        last = users[0]
        if flow.activation:
            return last
    return node
