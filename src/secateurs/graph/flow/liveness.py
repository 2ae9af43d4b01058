"""Dead-channel analysis, as in a compiler: forward, what is zero for every input; backward, what nobody reads.

Both passes visit only what the masks reach: a node that is not mentioned has no zero and no dead channel.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

from secateurs.graph.channels import all_of, none_of
from secateurs.graph.flow import rules
from secateurs.graph.flow.kinds import Channelwise, Flow, Layer, Opaque, Source
from secateurs.graph.flow.table import Op, describe, rule_for
from secateurs.graph.trace import shape_of


@dataclass(frozen=True)
class Flows:
    """The flow of every node of a graph, and the tensor inputs that it speaks of, in order."""

    of: Mapping[fx.Node, Flow]
    inputs: Mapping[fx.Node, tuple[fx.Node, ...]]
    users: Mapping[fx.Node, tuple[fx.Node, ...]]

    def width(self, node: fx.Node) -> int:
        """Channels of what `node` gives."""
        axis = self.of[node].axis
        dims = shape_of(node).dims
        assert axis is not None and dims is not None
        return dims[axis]


@dataclass(frozen=True)
class Liveness:
    """For the nodes that masks reach: channels that are always zero, and channels that somebody needs."""

    zero: Mapping[fx.Node, Tensor]
    need: Mapping[fx.Node, Tensor]

    def live(self, node: fx.Node, width: int) -> Tensor:
        """Needed by somebody and not always zero, bool (width,)."""
        need = self.need.get(node)
        zero = self.zero.get(node)
        live = all_of(width) if need is None else need.clone()
        return live if zero is None else live & ~zero


def find_flows(module: fx.GraphModule) -> Flows:
    """Apply the table of rules to every node, in order: a rule sees where its inputs' channels lie."""
    shared = _shared_modules(module)
    flows: dict[fx.Node, Flow] = {}
    inputs: dict[fx.Node, tuple[fx.Node, ...]] = {}
    users: dict[fx.Node, list[fx.Node]] = {}
    for node in module.graph.nodes:
        if _is_size_query(node, flows) or _is_read_through(node) or not _touches_tensors(node):
            continue
        inputs[node] = tuple(_tensor_inputs(node))
        axes = tuple(flows[i].axis for i in inputs[node])
        called = module.get_submodule(str(node.target)) if node.op == "call_module" else None
        flows[node] = _flow_at_all_sizes(Op(node, called, inputs[node], axes), shared)
        for source in inputs[node]:
            users.setdefault(source, []).append(node)
    return Flows(flows, inputs, {node: tuple(found) for node, found in users.items()})


def _flow_at_all_sizes(op: Op, shared: Mapping[str, str]) -> Flow:
    """The flow of an op, which must be the same for every size of input; where it is not, that is noted for good."""
    varies = op.node.meta.get("varies")
    if varies is None:
        flow = _flow(op, shared)
        sizes = 0 if isinstance(flow, Opaque | Source) else len(op.node.meta.get("other_shapes", ()))
        if all(_same(flow, _flow(replace(op, size=size), shared)) for size in range(1, sizes + 1)):
            return flow
        varies = op.node.meta["varies"] = f"{op.label} treats channels differently for another batch or image size"
    return Opaque(varies)


def _same(one: Flow, other: Flow) -> bool:
    """Whether two flows say the same of channels; how arguments are corrected is not compared."""
    if type(one) is not type(other):
        return False
    for field in fields(one):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if field.name != "resize" and not (torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b):
            return False
    return True


def _flow(op: Op, shared: Mapping[str, str]) -> Flow:
    node = op.node
    if node.op in ("placeholder", "get_attr") or (node.op != "output" and not op.inputs):
        return Source()
    if node.op == "output":
        return Opaque("it is the network's output")
    if op.module is not None:
        obstacle = shared.get(str(node.target)) or _obstacle(op.module)
        if obstacle:
            return Opaque(f"{op.label} {obstacle}")
    found = rule_for(node, op.module)
    if found is None:
        return Opaque(f"no rule for {describe(node, op.module)}")
    if not shape_of(node).is_tensor:
        return Opaque(f"{op.label} does not give a single tensor")
    return found(op)


def _obstacle(module: nn.Module) -> str:
    """Why a module's weights must be left alone even though its class has a rule."""
    if parametrize.is_parametrized(module):
        return "computes its weights (torch.nn.utils.parametrize)"
    if module._forward_hooks or module._forward_pre_hooks:
        return "has forward hooks, which may change what it computes"
    return ""


def _shared_modules(module: fx.GraphModule) -> dict[str, str]:
    """Modules with weights that are called twice, or whose weights belong to another module or call as well."""
    calls: dict[str, int] = {}
    owners: dict[int, set[str]] = {}
    for node in module.graph.nodes:
        if node.op == "call_module":
            name = str(node.target)
            calls[name] = calls.get(name, 0) + 1
            for tensor in module.get_submodule(name).parameters():
                owners.setdefault(id(tensor), set()).add(name)
        elif node.op == "get_attr":
            owners.setdefault(id(_attribute(module, str(node.target))), set()).add(str(node.target))
    found: dict[str, str] = {}
    for name, count in calls.items():
        called = module.get_submodule(name)
        twins = {other for t in called.parameters() for other in owners[id(t)]} - {name}
        if count > 1 and (any(True for _ in called.parameters()) or any(True for _ in called.buffers())):
            found[name] = f"is called {count} times: its filters would have to go from all its calls at once"
        elif twins:
            found[name] = f"shares its weights with {', '.join(map(repr, sorted(twins)))}"
    return found


def _attribute(module: nn.Module, path: str) -> object:
    *parents, name = path.split(".")
    return getattr(module.get_submodule(".".join(parents)), name)


def _touches_tensors(node: fx.Node) -> bool:
    return shape_of(node).is_tensor or any(True for _ in _tensor_inputs(node))


def _tensor_inputs(node: fx.Node) -> Iterator[fx.Node]:
    """The tensors that `node` reads, once for each mention; a part of a split reads what was split."""
    for source in mentioned(node):
        if _asks_kind_or_size(source):
            continue
        if _is_read_through(source):
            yield from _tensor_inputs(source)
        elif shape_of(source).is_tensor or not _is_plain(shape_of(source).value):
            yield source


def mentioned(node: fx.Node) -> list[fx.Node]:
    """The nodes among a node's arguments, once for each mention."""
    found: list[fx.Node] = []

    def note(argument: fx.Node) -> fx.Node:
        found.append(argument)
        return argument

    fx.map_arg((node.args, node.kwargs), note)
    return found


def _is_plain(value: object) -> bool:
    """A number, or a size: nothing that holds tensors."""
    if isinstance(value, tuple):
        return all(_is_plain(v) for v in value)
    return isinstance(value, int | float | bool | str)


def _asks_kind_or_size(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in ("size", "dim", "ndimension")
    return node.op == "call_function" and node.target is getattr and node.args[1] in ("shape", "ndim", "dtype", "device")


def _is_size_query(node: fx.Node, flows: Mapping[fx.Node, Flow]) -> bool:
    """Asks for kinds or single sizes, not for values: x.dtype, x.shape[0], x.size(0), x.shape[2:]; nothing is read then.

    Who takes all sizes at once, the channels' among them, reads the tensor as it is.
    """
    if not _asks_kind_or_size(node):
        return False
    takes_all = node.target == "size" and len(node.args) == 1 and not node.kwargs
    if not takes_all and not (node.target is getattr and node.args[1] == "shape"):
        return True
    (source,) = node.all_input_nodes
    axis, dims = flows[source].axis, shape_of(source).dims
    rank = len(dims or ())
    return all(_leaves_out(user, axis, rank) for user in node.users)


def _leaves_out(user: fx.Node, axis: int | None, rank: int) -> bool:
    """Takes a single size, or a range of them without the channels'."""
    if user.target is not operator.getitem:
        return axis is None
    item = user.args[1]
    return isinstance(item, int) or (isinstance(item, slice) and axis not in range(rank)[item])


def _is_read_through(node: fx.Node) -> bool:
    """A split of which only single parts are taken."""
    if node.op not in ("call_function", "call_method") or node.target not in rules.SPLITS:
        return False
    return all(user.target is operator.getitem and isinstance(user.args[1], int) for user in node.users)


def analyse(flows: Flows, masks: Mapping[fx.Node, Tensor]) -> Liveness:
    """What masks (True = kept) behind the given nodes make zero further on, and unneeded further back.

    A channel that nothing reads even without masks stays: only what the masks make dead is dead, so that the masks
    say all that there is to say about a cut.
    """
    zero = _find_zeros(flows, masks)
    return Liveness(zero, _find_needs(flows, masks, zero))


def _find_zeros(flows: Flows, masks: Mapping[fx.Node, Tensor]) -> dict[fx.Node, Tensor]:
    zero: dict[fx.Node, Tensor] = {}
    for node, flow in flows.of.items():
        if flow.axis is None:
            continue
        ins = flows.inputs[node]
        reached = any(i in zero for i in ins) or _makes_zeros(flow)
        found = flow.zeros([zero.get(i) for i in ins]) if reached else None
        if node in masks:
            found = ~masks[node] if found is None else found | ~masks[node]
        if found is not None and bool(found.any()):
            zero[node] = found
    return zero


def _makes_zeros(flow: Flow) -> bool:
    """A pad of channels gives zeros of its own."""
    index = getattr(flow, "index", None)
    return index is not None and bool((index < 0).any())


def _find_needs(flows: Flows, masks: Mapping[fx.Node, Tensor], zero: Mapping[fx.Node, Tensor]) -> dict[fx.Node, Tensor]:
    need: dict[fx.Node, Tensor] = {}
    for node in reversed(list(flows.of)):
        flow = flows.of[node]
        users = flows.users.get(node, ())
        if flow.axis is None or not (users or node in masks):
            continue
        if node not in masks and not any(u in need or u in zero or _narrows(flows.of[u]) for u in users):
            continue
        width = flows.width(node)
        wanted, read = none_of(width), none_of(width)
        for user in users:
            wanted = wanted | _wanted_by(flows, user, node, need, zero, width)
            added = getattr(flows.of[user], "added", False)
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
    """The channels of `node` that one of its users needs."""
    flow, ins = flows.of[user], flows.inputs[user]
    if isinstance(flow, Opaque | Source) or flow.axis is None:
        return all_of(width)
    if user not in need and user not in zero and not _narrows(flow):
        return all_of(width)
    out = need.get(user)
    made = flows.width(user)
    answers = flow.needs(
        all_of(made) if out is None else out,
        [zero.get(i) for i in ins],
        zero.get(user, none_of(made)),
    )
    total = none_of(width)
    for position, source in enumerate(ins):
        if source is node:
            answer = answers[position] if position < len(answers) else None
            if answer is None or len(answer) != width:
                return all_of(width)
            total = total | answer
    return total


def _narrows(flow: Flow) -> bool:
    """Takes only some of its input's channels, whatever happens elsewhere: a slice."""
    return hasattr(flow, "index")


def revivals(flows: Flows, start: fx.Node) -> Iterator[tuple[fx.Node, str]]:
    """Where a channel that is zero behind `start` stops being zero without having been read, or meets an opaque op.

    Filters that mix channels read them, so the search ends there; a depthwise filter only hands its channel on.
    """
    zero = {start: all_of(flows.width(start))}
    for node, flow in flows.of.items():
        ins = flows.inputs[node]
        if not any(i in zero for i in ins) or node in zero:
            continue
        if isinstance(flow, Opaque):
            yield node, flow.reason
        elif isinstance(flow, Layer) and flow.reads_all:
            yield node, f"{node.target!s} reads along another axis than the channels'"
        elif isinstance(flow, Layer) and not node.meta.get("filters_a_channel", flow.depthwise):
            continue
        elif flow.axis is not None:
            found = flow.zeros([zero.get(i) for i in ins])
            if _revives(flow, zero.get(ins[0]), found):
                yield node, f"{node.meta.get('name', node.target)!s} turns zero channels into something else"
            if bool(found.any()):
                zero[node] = found


def _revives(flow: Flow, before: Tensor | None, after: Tensor) -> bool:
    """Whether an op that hands channels on one by one makes something of a zero one."""
    if isinstance(flow, Layer):
        return bool((before is not None) and before.any()) and flow.bias
    return isinstance(flow, Channelwise) and before is not None and bool((before & ~after).any())
