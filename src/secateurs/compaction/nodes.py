"""Makes one module narrower in place, and says which entries of each weight survived."""

from __future__ import annotations

from collections.abc import Iterator
from functools import singledispatch
from typing import Any

import torch
from torch import Tensor, fx, nn

from secateurs.compaction.constants import fold_sum, insert_constant
from secateurs.compaction.state import Rewriting, hand_site_on
from secateurs.graph.channels import Kept, all_of, ids, name_of_alignment, none_of, take
from secateurs.graph.flow import Blocks, Channelwise, Concat, Flow, Join, Layer, Moved, Opaque, Source
from secateurs.graph.layers import Align

Survivors = Iterator[tuple[str, Kept]]


def narrow_channelwise_(module: nn.Module, flow: Channelwise, layout: Tensor) -> Survivors:
    """Keep the entries of the channels in `layout`."""
    kept = (ids(layout),)
    for name in flow.params:
        if getattr(module, name, None) is not None:
            _replace_(module, name, kept)
            yield name, kept
    if flow.count is not None:
        setattr(module, flow.count, int(layout.sum()))


def narrow_layer_(module: Any, flow: Layer, inputs: Tensor, outputs: Tensor, groups: int) -> Survivors:
    """Keep the filters in `outputs` and what they read of `inputs`; layouts of a grouped layer hold as many a group."""
    kept = _grouped(flow, inputs, outputs) if flow.groups > 1 else (ids(outputs), ids(inputs))
    if flow.transposed and flow.groups == 1:
        kept = (kept[1], kept[0])
    _replace_(module, "weight", kept)
    yield "weight", kept
    if module.bias is not None:
        _replace_(module, "bias", (ids(outputs),))
        yield "bias", (ids(outputs),)
    into, out = int(inputs.sum()), int(outputs.sum())
    if isinstance(module, nn.Linear):
        module.in_features, module.out_features = into, out
    else:
        module.in_channels, module.out_channels, module.groups = into, out, groups


def _grouped(flow: Layer, inputs: Tensor, outputs: Tensor) -> Kept:
    """Rows of the weight, and for each row the columns of its own group."""
    rows, columns = (inputs, outputs) if flow.transposed else (outputs, inputs)
    a_group = columns.view(flow.groups, -1)
    width = int(a_group.sum(1).max())
    group_of_row = ids(rows) // (len(rows) // flow.groups)
    local = torch.stack([ids(group) if bool(group.any()) else torch.zeros(width, dtype=torch.long) for group in a_group])
    return ids(rows), local[group_of_row]


def _replace_(module: nn.Module, name: str, kept: Kept) -> None:
    tensor = getattr(module, name)
    narrower = take(tensor.detach(), kept).clone(memory_format=torch.contiguous_format)
    if isinstance(tensor, nn.Parameter):
        setattr(module, name, nn.Parameter(narrower, requires_grad=tensor.requires_grad))
    else:
        module.register_buffer(name, narrower, persistent=name not in module._non_persistent_buffers_set)


@singledispatch
def narrow_node(flow: Flow, node: fx.Node, state: Rewriting) -> None:
    """Rewrite `node` for the channels that its inputs still carry, and record the layout of its output."""
    raise AssertionError(f"no way to narrow {flow}")


@narrow_node.register
def _source(flow: Source, node: fx.Node, state: Rewriting) -> None:
    return


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
    state.align(node, source, wanted, flow.in_axis)
    for other in others:
        state.redirect(node, other)
    state.settle(node, wanted)
    if node.op == "call_module" and flow.params and not bool(wanted.all()):
        target = state.module.get_submodule(str(node.target))
        state.keep(node, narrow_channelwise_(target, flow, wanted))
    if flow.resize is not None:
        flow.resize(node, int(wanted.sum()))


@narrow_node.register
def _layer(flow: Layer, node: fx.Node, state: Rewriting) -> None:
    (source,) = dict.fromkeys(state.flows.inputs[node])
    live = state.live_at(node)
    carried = all_of(flow.inputs) if flow.reads_all else state.carried(source, flow.inputs)
    if flow.reads_all:
        axis = state.flows.of[source].axis
        assert axis is not None
        state.align(node, source, all_of(state.flows.width(source)), axis)
    inputs, outputs, groups = carried, live, flow.groups
    if flow.groups > 1:
        inputs, outputs, groups = balanced(flow, carried, live)
    if flow.groups > 1 and not flow.reads_all:
        state.align(node, source, inputs, flow.in_axis)
    elif not flow.reads_all:
        state.redirect(node, source)
    state.settle(node, outputs)
    if not (bool(inputs.all()) and bool(outputs.all())):
        target = state.module.get_submodule(str(node.target))
        state.keep(node, narrow_layer_(target, flow, inputs, outputs, groups))


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
    # a term that is broadcast over the channels (a scalar, a one-channel map) makes something of channels that are absent
    wanted = wide[0] if same and not bool((live & ~wide[0]).any()) else live
    for source, axis, width in dict.fromkeys(zip(inputs, flow.in_axes, flow.widths, strict=True)):  # one may be mentioned twice
        if source in state.constants:
            insert_constant(state, node, source, wanted, flow)
        elif axis is not None and width == flow.width and flow.width > 1:
            state.align(node, source, wanted, axis)
        elif axis is not None and state.flows.of[source].axis is not None:
            state.align(node, source, all_of(width), axis)
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
    node.args, node.kwargs = (parts, flow.axis), {}
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
    # all that is there, if it comes in order: then nothing has to be moved
    wanted = torch.cat([carried, none_of(1)])[flow.index]
    straight = torch.equal(place[flow.index[wanted]], torch.arange(int(carried.sum())))
    if not straight:
        wanted = state.live_at(node)
    take = place[flow.index[wanted]]
    current = state.present(source)
    if not straight:
        with state.module.graph.inserting_before(node):
            current = state.insert(name_of_alignment(node), Align(take, flow.in_axis), (current,))
    if flow.how == "gather":
        state.standing_for[node] = current
        if not straight and node.meta.get("ends_site"):
            hand_site_on(node, current)
    else:
        node.replace_input_with(source, current)
        assert flow.resize is not None
        flow.resize(node, int(wanted.sum()))
    state.settle(node, wanted)


@narrow_node.register
def _blocks(flow: Blocks, node: fx.Node, state: Rewriting) -> None:
    (source,) = dict.fromkeys(state.flows.inputs[node])
    carried = state.carried(source, flow.width * flow.size).view(flow.width, flow.size)
    wanted = carried.any(1)
    state.align(node, source, wanted.repeat_interleave(flow.size), flow.in_axis)
    state.settle(node, wanted)
    if flow.resize is not None:
        flow.resize(node, int(wanted.sum()))


def balanced(flow: Layer, carried: Tensor, live: Tensor) -> tuple[Tensor, Tensor, int]:
    """Layouts of a grouped layer's inputs and outputs with as many channels in every group left, and how many groups are left.

    A group without live filters goes as a whole, unless the layer reads along another axis than its input's channels, which
    cannot be aligned. Elsewhere dead channels stay where another group has more live ones.
    """
    outs, ins = live.view(flow.groups, -1), carried.view(flow.groups, -1)
    alive = all_of(flow.groups) if flow.reads_all else outs.any(1)
    outs, ins = _fill(outs, alive), _fill(ins, alive)
    return ins.flatten(), outs.flatten(), int(alive.sum())


def _fill(layout: Tensor, alive: Tensor) -> Tensor:
    """Rows of the groups that are alive filled up to the fullest row (at least 1) with their first free channels."""
    layout = layout & alive[:, None]
    width = max(int(layout.sum(1).max()), 1)
    result = layout.clone()
    for row in ids(alive).tolist():
        missing = width - int(layout[row].sum())
        result[row, ids(~layout[row])[:missing]] = True
    return result
