"""Rewrites a graph, node by node, so that only live channels exist: narrows modules, aligns layouts, folds constants."""

from __future__ import annotations

import operator
from functools import partial, singledispatch

import torch
import torch.nn.functional as F
from torch import fx

from secateurs.compaction.constants import constant_at, fold_sum, insert_constant
from secateurs.compaction.narrowing import balanced, narrow_channelwise_, narrow_embedding_, narrow_layer_, narrow_norm_
from secateurs.compaction.state import Rewriting
from secateurs.graph.channels import all_of, name_of_alignment, none_of, positions
from secateurs.graph.flow import (
    Blocks,
    Channelwise,
    Concat,
    Contracted,
    Flow,
    Join,
    Layer,
    Lookup,
    Moved,
    Norm,
    Opaque,
    Recurrent,
    Reduced,
    Source,
)
from secateurs.graph.layers import Align, mask_channels
from secateurs.graph.node_info import info, shape_of
from secateurs.graph.recurrent import narrow_units_, recurrent_call
from secateurs.graph.streams import keeps_numbers


def rewrite_(state: Rewriting) -> None:
    """Rewrite the whole graph in place, node by node in order; it is not compiled yet."""
    state.unused |= {node for node in state.module.graph.nodes if not node.users}
    for node in list(state.module.graph.nodes):
        if node in state.flows.of:
            _visit(state, node, state.flows.of[node])
        _fix_sizes(state, node)
    for path, narrowed in state.narrowing.items():  # only now: a folded call of the same module reads it as it was
        state.keep(path, narrowed())
    _erase_unused(state)
    left = set(state.module.graph.nodes)
    for node, source in state.asked:  # an assertion about a removed tensor is removed too, and so is what lies in its branch
        if node in left and not info(node).get("unused"):
            raise state.empty(source, node)
    state.module.graph.lint()
    state.module.delete_all_unused_submodules()


def _visit(state: Rewriting, node: fx.Node, flow: Flow) -> None:
    inputs = state.flows.inputs[node]
    touched = node in state.live.zero or node in state.live.need
    if not touched and not any(state.changed(i) for i in inputs):
        return
    if info(node).get("unused") and any(state.is_empty(i) for i in inputs):
        if any(node in calls for calls in state.flows.counted):  # in train mode it changes the statistics of other calls
            raise state.empty(inputs[0], node)
        state.vanish(node)  # no output depends on it, so no constant has to replace its inputs
        return
    if flow.axis is None and not isinstance(flow, Opaque | Reduced | Contracted):
        for source in inputs:
            state.redirect(node, source)
        return
    constant = constant_at(state, node, flow)
    if constant is not None:
        if node in state.masks:
            constant = mask_channels(constant, state.masks[node], state.axis_of(node))
        state.constants[node] = constant
        state.layout[node] = none_of(constant.numel())
    elif flow.axis is not None and not bool(state.live_at(node).any()):
        state.vanish(node)
    else:
        narrow_node(flow, node, state)
        if node in state.masks:
            _drop_masked(state, node)


def _drop_masked(state: Rewriting, node: fx.Node) -> None:
    """Insert a gather behind a site whose node still carries masked channels, which it had to keep."""
    carried = state.carried(node, state.flows.width(node))
    wanted = carried & state.masks[node]
    if torch.equal(carried, wanted):
        return
    state.physical[node] = carried
    current = state.present(node)
    with state.module.graph.inserting_after(current):
        take = positions(carried, wanted)
        gather = state.insert(name_of_alignment(node), Align(take, state.axis_of(node)), (current,))
    state.inserted[gather] = node, wanted
    _end_site_at(node, gather)
    if node in state.unused:
        state.unused.add(gather)
        info(gather)["unused"] = True
    state.replaced_by[node] = gather
    state.layout[node] = wanted


def _end_site_at(node: fx.Node, gather: fx.Node) -> None:
    """Record that the site at `node` ends behind `gather` from now on."""
    info(gather)["ends_site"] = True
    info(gather)["site_names"] = dict(info(node).get("site_names", {}))


def _erase_unused(state: Rewriting) -> None:
    """Erase nodes that lost all their users. One that never had users stays, unless it or one of its inputs is empty."""
    nodes = list(state.module.graph.nodes)
    empty = {node for node in nodes if state.is_empty(node)}
    for node in nodes:
        if info(node).get("unused") and not empty.isdisjoint(node.all_input_nodes):
            empty.add(node)
    stays = state.unused - empty - state.replaced_by.keys()
    for node in reversed(nodes):
        if not node.users and node.op not in ("placeholder", "output") and node not in stays:
            if node in state.unused and node not in empty:  # an unused shuffle is erased; its inputs stay, without users
                stays |= set(node.all_input_nodes)
            state.module.graph.erase_node(node)
            if node.op == "get_attr":
                _delete_unread_(state.module, str(node.target))


def _delete_unread_(module: fx.GraphModule, target: str) -> None:
    """Delete a parameter or buffer that no node and no submodule reads any more, such as the layer scale of a folded branch."""
    path, _, name = target.rpartition(".")
    read = any(n.op == "get_attr" and n.target == target for n in module.graph.nodes)
    called = any(n.op == "call_module" and f"{target}.".startswith(f"{n.target}.") for n in module.graph.nodes)
    if not read and not called:
        delattr(module.get_submodule(path), name)


def _fix_sizes(state: Rewriting, node: fx.Node) -> None:
    """If `node` asks for the number of channels of a tensor that was narrowed, replace it by the original number."""
    source = next(iter(node.all_input_nodes), None)
    if source is None:
        return
    word = node.target if node.op == "call_method" else (node.args[1] if node.target is getattr else None)
    if word in ("size", "shape") and state.changed(source):
        _fix_call(state, node, source)
    elif word in ("dim", "ndimension", "ndim", "dtype", "device") and state.changed(source):
        if not state.is_empty(source):
            state.redirect(node, source)
        elif word in ("dim", "ndimension", "ndim"):
            _substitute(node)
        else:
            state.asked.append((node, source))
    elif node.target is operator.getitem and source in state.size_queries:
        item, (asked, axes) = node.args[1], state.size_queries[source]
        if isinstance(item, slice):
            state.size_queries[node] = asked, axes[item]
        elif isinstance(item, int) and axes[item] == state.flows.of[asked].axis:
            _substitute(node)


def _fix_call(state: Rewriting, node: fx.Node, source: fx.Node) -> None:
    if state.is_empty(source):
        state.asked.append((node, source))
        return
    state.redirect(node, source)
    if source not in state.layout:
        return
    dim = node.args[1] if len(node.args) > 1 and node.op == "call_method" else node.kwargs.get("dim")
    if dim is None:
        state.size_queries[node] = source, range(_rank(source))
    elif not isinstance(dim, int) or dim % _rank(source) == state.flows.of[source].axis:
        _substitute(node)


def _rank(node: fx.Node) -> int:
    return len(shape_of(node).dims or ())


def _substitute(node: fx.Node) -> None:
    """Replace `node` by its value for the example, which depends on the network alone."""
    value = shape_of(node).value

    def swap(argument: fx.Node) -> object:
        return value if argument is node else argument

    for user in list(node.users):
        user.args = fx.map_arg(user.args, swap)  # type: ignore[arg-type]
        user.kwargs = fx.map_arg(user.kwargs, swap)  # type: ignore[arg-type]


@singledispatch
def narrow_node(flow: Flow, node: fx.Node, state: Rewriting) -> None:
    """Rewrite `node` for the channels that its inputs still carry, and record the layout of its output."""
    raise AssertionError(f"no function narrows {flow}")


@narrow_node.register
def _source(flow: Source, node: fx.Node, state: Rewriting) -> None:
    return


@narrow_node.register
def _lookup(flow: Lookup, node: fx.Node, state: Rewriting) -> None:
    shared = state.live_in_any_call(node)
    wanted = state.live_at(node) if shared is None else shared[1]
    state.settle(node, wanted)
    if not bool(wanted.all()):
        target = state.module.get_submodule(str(node.target))
        state.narrowing[str(node.target)] = partial(narrow_embedding_, target, wanted)


@narrow_node.register
def _opaque(flow: Opaque, node: fx.Node, state: Rewriting) -> None:
    for source in dict.fromkeys(state.flows.inputs[node]):
        axis = state.flows.of[source].axis
        if axis is None:
            state.redirect(node, source)
        else:
            state.align(node, source, all_of(state.flows.width(source)), axis)


@narrow_node.register
def _channelwise(flow: Channelwise, node: fx.Node, state: Rewriting) -> None:
    (source, *others) = state.flows.inputs[node]
    assert flow.in_axis is not None
    carried = state.carried(source, flow.width)
    # an op that revives zeros needs the zero channels of its input in place
    wanted = carried if flow.keeps_zero else carried | state.live_at(node)
    shared = state.live_in_any_call(node) if flow.params else None
    wanted = wanted if shared is None else shared[1]
    state.align(node, source, wanted, flow.in_axis)
    for other in others:
        state.redirect(node, other)
    state.settle(node, wanted)
    if node.op == "call_module" and flow.params and not bool(wanted.all()):
        target = state.module.get_submodule(str(node.target))
        state.narrowing[str(node.target)] = partial(narrow_channelwise_, target, flow, wanted)
    if flow.resize is not None:
        flow.resize(node, int(wanted.sum()))


@narrow_node.register
def _norm(flow: Norm, node: fx.Node, state: Rewriting) -> None:
    (source,) = dict.fromkeys(state.flows.inputs[node])
    wanted = state.masks.get(node, all_of(flow.width))  # the channels that its statistics are about, needed or not
    state.align(node, source, wanted, flow.axis)
    state.settle(node, wanted)
    if not bool(wanted.all()):
        info(node).setdefault("norm_groups", flow.groups)
        target = state.module.get_submodule(str(node.target))
        state.narrowing[str(node.target)] = partial(narrow_norm_, target, flow, wanted)


@narrow_node.register
def _layer(flow: Layer, node: fx.Node, state: Rewriting) -> None:
    (source,) = dict.fromkeys(state.flows.inputs[node])
    live = state.live_at(node)
    carried = all_of(flow.inputs) if flow.reads_all else state.carried(source, flow.inputs)
    if flow.reads_all:
        state.align(node, source, all_of(state.flows.width(source)), state.axis_of(source))
    shared = state.live_in_any_call(node)
    if shared is not None:
        read, live = shared
        carried = all_of(flow.inputs) if read is None or flow.reads_all else read
    inputs, outputs, groups = carried, live, flow.groups
    if flow.groups > 1:
        inputs, outputs, groups = balanced(flow, carried, live)
    if (flow.groups > 1 or shared is not None) and not flow.reads_all:
        state.align(node, source, inputs, flow.in_axis)
    elif not flow.reads_all:
        state.redirect(node, source)
    state.settle(node, outputs)
    if not (bool(inputs.all()) and bool(outputs.all())):
        target = state.module.get_submodule(str(node.target))
        state.narrowing[str(node.target)] = partial(narrow_layer_, target, flow, inputs, outputs, groups)


@narrow_node.register
def _join(flow: Join, node: fx.Node, state: Rewriting) -> None:
    inputs = state.flows.inputs[node]
    dropped = [i for i in dict.fromkeys(inputs) if state.is_empty(i) and i not in state.constants]
    if dropped and fold_sum(state, node, flow, dropped):
        return
    wide = [
        state.carried(i, flow.width)
        for i, w in zip(inputs, flow.widths, strict=True)
        if w == flow.width and i not in state.constants
    ]
    live = state.live_at(node)
    same = bool(wide) and all(torch.equal(w, wide[0]) for w in wide[1:]) and not any(i in state.constants for i in inputs)
    # a term that is broadcast over the channels (a scalar, a one-channel map) revives absent channels
    wanted = wide[0] if same and not bool((live & ~wide[0]).any()) else live
    for source, axis, width in dict.fromkeys(zip(inputs, flow.in_axes, flow.widths, strict=True)):  # a node may be two inputs
        if source in state.constants:
            insert_constant(state, node, source, wanted, flow)
        elif axis is not None and width == flow.width and flow.width > 1:
            state.align(node, source, wanted, axis)
        elif (own := state.flows.of[source].axis) is not None:  # its channels are others than the output's, or a single one
            state.align(node, source, all_of(state.flows.width(source)), own)
        else:
            state.redirect(node, source)
    state.settle(node, wanted)


@narrow_node.register
def _concat(flow: Concat, node: fx.Node, state: Rewriting) -> None:
    parts = []
    carried = []
    for source, width in zip(state.flows.inputs[node], flow.widths, strict=True):
        if source in state.constants:
            raise state.empty(source, node)
        layout = state.carried(source, width)
        carried.append(layout)
        if bool(layout.any()):
            parts.append(state.present(source))
    node.target, node.args, node.kwargs = torch.cat, (parts, flow.axis), {}
    state.settle(node, torch.cat(carried))


@narrow_node.register
def _moved(flow: Moved, node: fx.Node, state: Rewriting) -> None:
    (source,) = dict.fromkeys(state.flows.inputs[node])
    carried = state.carried(source, flow.inputs)
    if flow.how == "same":
        state.redirect(node, source)
        wanted = carried[flow.index]
        state.settle(node, wanted)
        if flow.resize is not None:
            flow.resize(node, int(wanted.sum()))
        return
    place = torch.cumsum(carried.long(), 0) - 1
    # if the channels that are carried come in order, nothing has to be moved
    wanted = torch.cat([carried, none_of(1)])[flow.index]
    straight = torch.equal(place[flow.index[wanted]], torch.arange(int(carried.sum())))
    if not straight:
        wanted = state.live_at(node)
    take = place[flow.index[wanted]]
    current = state.present(source)
    aligned = not straight or (flow.how == "gather" and _enters_stream(state, node))
    if aligned:
        with state.module.graph.inserting_before(node):
            current = state.insert(name_of_alignment(node), Align(take, flow.in_axis), (current,))
    if flow.how == "gather":
        state.replaced_by[node] = current
        if aligned:
            state.inserted[current] = node, wanted
            info(current)["part"] = not flow.added
            if info(node).get("ends_site"):
                _end_site_at(node, current)
    else:
        node.replace_input_with(source, current)
        assert flow.resize is not None
        flow.resize(node, int(wanted.sum()))
        if _pads_nothing(node) and not info(node).get("ends_site") and not _enters_stream(state, node):
            state.replaced_by[node] = current
    state.settle(node, wanted)


def _pads_nothing(node: fx.Node) -> bool:
    """Whether it is a pad that is left with nothing to add: torch would copy its input."""
    amounts = node.args[1] if len(node.args) > 1 else node.kwargs.get("pad")
    return node.target is F.pad and isinstance(amounts, tuple | list) and not any(amounts)


def _enters_stream(state: Rewriting, node: fx.Node) -> bool:
    """Whether a stream may enter at `node`, and channels have other numbers there than before it: its site goes by these."""
    users = state.flows.users.get(node, ())
    members = [user for user in users if isinstance(state.flows.of[user], Join | Channelwise | Norm)]
    return len(users) > 1 and bool(members) and not keeps_numbers(state.flows, node, state.numbers)


@narrow_node.register
def _blocks(flow: Blocks, node: fx.Node, state: Rewriting) -> None:
    (source,) = dict.fromkeys(state.flows.inputs[node])
    wanted = state.carried(source, flow.members.numel())[flow.members].any(1)
    state.align(node, source, flow.features(wanted), flow.in_axis)
    state.settle(node, wanted)
    if flow.resize is not None:
        flow.resize(node, int(wanted.sum()))


@narrow_node.register
def _reduced(flow: Reduced, node: fx.Node, state: Rewriting) -> None:
    (source,) = dict.fromkeys(state.flows.inputs[node])
    if state.is_empty(source):
        raise state.empty(source, node)
    state.redirect(node if source in node.all_input_nodes else node.all_input_nodes[0], source)
    if source in state.layout and flow.resize is not None:
        flow.resize(node, int(state.layout[source].sum()))


@narrow_node.register
def _contracted(flow: Contracted, node: fx.Node, state: Rewriting) -> None:
    inputs = state.flows.inputs[node]
    known = [state.carried(i, flow.inputs) for i, axis in zip(inputs[:2], flow.in_axes, strict=False) if axis is not None]
    both = torch.stack(known).all(0)
    if not bool(both.any()):
        raise state.empty(inputs[0], node)
    for place, source in enumerate(inputs):
        axis = flow.in_axes[place]
        if axis is not None and place < 2:
            state.align(node, source, both, axis)
        elif state.is_empty(source):
            raise state.empty(source, node)
        elif axis is not None and place != 2:
            state.align(node, source, all_of(state.flows.width(source)), axis)
        else:
            state.redirect(node, source)
    if flow.axis is not None:
        state.settle(node, state.carried(inputs[2], flow.width))
    if flow.resize is not None and not bool(both.all()):
        flow.resize(node, int(both.sum()))


@narrow_node.register
def _recurrent(flow: Recurrent, node: fx.Node, state: Rewriting) -> None:
    call = recurrent_call(node)
    assert call is not None
    (source,) = dict.fromkeys(state.flows.inputs[node])
    if state.is_empty(source):
        raise state.empty(source, node)
    state.redirect(call, source)
    inputs, units = state.carried(source, flow.inputs), state.masks.get(node, all_of(flow.width))[: flow.units]
    state.settle(node, units.repeat(flow.copies))
    if not (bool(inputs.all()) and bool(units.all())):
        path = str(call.target)
        state.narrowing[path] = partial(narrow_units_, state.module.get_submodule(path), inputs, units)
