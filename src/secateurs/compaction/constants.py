"""What is left of a branch that has no inputs any more: the same value for every input, folded into where the branch ends.

A layer that reads nothing gives its bias everywhere, BatchNorm makes a constant of zero, an activation a constant of a
constant. Added to or multiplied with something that still depends on the input, that value is all that is needed of the branch.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from secateurs.compaction.state import Rewriting
from secateurs.graph.channels import ids
from secateurs.graph.flow import Channelwise, Flow, Join, Layer, Moved
from secateurs.graph.flow.table import call_on
from secateurs.graph.layers import Align, Constant, mask_channels
from secateurs.graph.trace import shape_of


def constant_at(state: Rewriting, node: fx.Node, flow: Flow) -> Tensor | None:
    """What `node` gives for every input, if all that it reads is zero or constant by now and it still matters; else None.

    The value has length 1 along all axes but the channels'. An op that does not treat every place alike is `EmptyLayer`.
    """
    inputs = state.flows.inputs[node]
    if flow.axis is None or not inputs or not all(state.is_empty(i) for i in inputs):
        return None
    if not bool(state.live_at(node).any()):
        return None
    known = any(i in state.constants for i in inputs)
    steady = isinstance(flow, Channelwise) and flow.pointwise and len(inputs) == 1
    gathers = isinstance(flow, Moved) and flow.how == "gather" and flow.axis == flow.in_axis
    if not (steady or gathers or (isinstance(flow, Layer) and not known)) or flow.axis == 0:
        raise state.empty(inputs[0], node)
    state.emptied_by[node] = state.emptied_by.get(inputs[0], str(inputs[0].target))
    if isinstance(flow, Layer):
        bias: Any = state.module.get_submodule(str(node.target)).bias
        return _zero(state, node) if bias is None else bias.detach().view(_thin(state, node)).clone()
    value = state.constants.get(inputs[0])
    if isinstance(flow, Moved):
        return _zero(state, node) if value is None else _gathered(value, flow)
    return _apply(state, node, _zero(state, node) if value is None else value)


def _thin(state: Rewriting, node: fx.Node) -> list[int]:
    """The shape of what `node` gives with length 1 along all axes but the channels'."""
    dims, axis = shape_of(node).dims, state.axis_of(node)
    assert dims is not None
    return [n if dim == axis else 1 for dim, n in enumerate(dims)]


def _zero(state: Rewriting, node: fx.Node) -> Tensor:
    return torch.zeros(_thin(state, node), dtype=state.dtype, device=state.device)


def _apply(state: Rewriting, node: fx.Node, value: Tensor) -> Tensor:
    """What the op gives for `value` in eval mode."""
    called = state.module.get_submodule(str(node.target)) if node.op == "call_module" else None
    training = called is not None and called.training
    with torch.no_grad():
        result = call_on(node, called if called is None else called.eval(), value)
    if called is not None:
        called.train(training)
    assert isinstance(result, Tensor)
    return result


def _gathered(value: Tensor, flow: Moved) -> Tensor:
    """The channels that the flow takes of a constant, zero where it takes none."""
    index = flow.index.to(value.device)
    taken = value.index_select(flow.axis, index.clamp(min=0))
    return mask_channels(taken, index >= 0, flow.axis)


def insert_constant(state: Rewriting, reader: fx.Node, source: fx.Node, wanted: Tensor, flow: Join) -> None:
    """Let `reader` join the value of a folded branch to the rest, which must fill the whole shape by itself."""
    value, axis = state.constants[source], state.axis_of(source)
    rest = [i for i in state.flows.inputs[reader] if i not in state.constants and not state.is_empty(i)]
    if not any(shape_of(i).dims == shape_of(reader).dims for i in rest) or not flow.broadcasts:
        raise state.empty(source, reader)
    if value.shape[axis] == flow.width:
        value = value.index_select(axis, ids(wanted).to(value.device))
    with state.module.graph.inserting_before(reader):
        constant = state.insert(f"constant_{_origin(state, source).name}", Constant(value), ())
    reader.replace_input_with(source, constant)


def _origin(state: Rewriting, node: fx.Node) -> fx.Node:
    """The node whose channels an earlier cut has aligned, so that a constant's name does not tell of the cuts before."""
    while node.op == "call_module" and isinstance(state.module.get_submodule(str(node.target)), Align):
        (node,) = state.flows.inputs[node]
    return node


def fold_sum(state: Rewriting, node: fx.Node, flow: Join, dropped: list[fx.Node]) -> bool:
    """Leave out the terms of a sum that have become zero; True if a single term is left, which then stands for the sum."""
    inputs = state.flows.inputs[node]
    rest = [i for i in inputs if i not in dropped]
    if not rest or not flow.broadcasts or flow.zero_if == "first":
        raise state.empty(dropped[0], node)
    if _is_plain_sum(node, dropped) and rest[0] not in state.constants and shape_of(rest[0]).dims == shape_of(node).dims:
        state.standing_for[node] = state.present(rest[0])
        state.settle(node, state.carried(rest[0], flow.width))
        return True
    for source in dropped:
        state.constants[source] = _zero(state, source)
    return False


def _is_plain_sum(node: fx.Node, dropped: list[fx.Node]) -> bool:
    """a + b, or a - b of which b is dropped."""
    if node.kwargs or len(node.args) != 2:
        return False
    if node.target in (operator.add, torch.add, "add"):
        return True
    return node.target in (operator.sub, torch.sub, "sub") and node.args[1] in dropped
