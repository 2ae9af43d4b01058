"""Folding of branches whose inputs were all removed: their output is the same for every input.

A layer without inputs gives its bias everywhere, BatchNorm turns zero into a constant, an activation a constant into another.
Where that value is added to or multiplied with something that depends on the input, it replaces the branch.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from secateurs._util.modules import device_of, eval_mode
from secateurs.compaction.state import Rewriting
from secateurs.graph.channels import ids, name_of_alignment, positions
from secateurs.graph.flow import Channelwise, Flow, Join, Layer, Moved
from secateurs.graph.flow.table import call_on
from secateurs.graph.layers import Align, Constant, Fixed, mask_channels
from secateurs.graph.node_info import called_module, dims_of, shape_of
from secateurs.graph.trace import dtype_of


def constant_at(state: Rewriting, node: fx.Node, flow: Flow) -> Tensor | None:
    """Return the output of `node` if all its inputs are zero or constant and it has live channels; otherwise None.

    The value has length 1 along all axes but the channels'. `EmptyLayer` for an op that does not treat every place alike.
    """
    inputs = state.flows.inputs[node]
    held = {i: value for i in inputs if not state.is_empty(i) and (value := _held(state, i)) is not None}
    if flow.axis is None or not inputs or not all(state.is_empty(i) or i in held for i in inputs) or len(held) == len(inputs):
        return None
    if not bool(state.live_at(node).any()):
        return None
    if isinstance(flow, Join) and len(inputs) == len(node.args) and flow.broadcasts:
        return _combined(state, node, held)
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
        if value is None:
            return _zero(state, node)
        index = flow.index.to(value.device)
        return mask_channels(value.index_select(flow.axis, index.clamp(min=0)), index >= 0, flow.axis)
    called = called_module(state.module, node)
    with eval_mode(*([] if called is None else [called])):
        result = call_on(node, called, _zero(state, node) if value is None else value)
    assert isinstance(result, Tensor)
    return result


def _held(state: Rewriting, node: fx.Node) -> Tensor | None:
    """Return the value of a node that hangs on parameters, buffers and constants of earlier cuts alone; None if it does not."""
    called = called_module(state.module, node)
    if isinstance(called, Constant | Fixed):
        return called.value.detach()
    if isinstance(called, Align):
        value = _held(state, node.all_input_nodes[0]) if node in state.flows.of else None
        return None if value is None else called(value)
    if node.op == "get_attr":
        found = operator.attrgetter(str(node.target))(state.module)
        return found.detach() if isinstance(found, Tensor) else None
    if node.op not in ("call_method", "call_function") or node.kwargs or not node.args:
        return None
    source, *rest = node.args
    if not isinstance(source, fx.Node) or any(isinstance(i, fx.Node) for i in rest):
        return None
    value = _held(state, source)
    result = None if value is None else call_on(node, None, value)
    return result if isinstance(result, Tensor) else None


def _combined(state: Rewriting, node: fx.Node, held: dict[fx.Node, Tensor]) -> Tensor:
    """Return the sum or product of constants and parameters; `EmptyLayer` where it is not the same at every place."""
    inputs = state.flows.inputs[node]
    first = next(i for i in inputs if i not in held)
    state.emptied_by[node] = state.emptied_by.get(first, str(first.target))
    values = {i: held[i] if i in held else state.constants.get(i, _zero(state, i)) for i in inputs}
    args = fx.map_arg(node.args, values.__getitem__)
    try:
        result = getattr(args[0], node.target)(*args[1:]) if isinstance(node.target, str) else node.target(*args)
    except RuntimeError:  # a tensor with a value for each place, brought to the shape of one without
        result = None
    if node.kwargs or not isinstance(result, Tensor) or list(result.shape) != _thin(state, node):
        raise state.empty(first, node)
    return result


def _thin(state: Rewriting, node: fx.Node) -> list[int]:
    """Return the output shape of `node` with length 1 along all axes but the channels'."""
    return [n if dim == state.axis_of(node) else 1 for dim, n in enumerate(dims_of(node))]


def _zero(state: Rewriting, node: fx.Node) -> Tensor:
    return torch.zeros(_thin(state, node), dtype=dtype_of(state.module), device=device_of(state.module))


def insert_constant(state: Rewriting, user: fx.Node, source: fx.Node, wanted: Tensor, flow: Join) -> None:
    """Replace the input `source` of a join by its constant; the other inputs must have the full shape of the output.

    The constant holds live channels alone. An alignment adds the others, so that a later cut sees that they are zero.
    """
    value, axis = state.constants[source], state.axis_of(source)
    rest = [i for i in state.flows.inputs[user] if i not in state.constants and not state.is_empty(i)]
    if not any(shape_of(i).dims == shape_of(user).dims for i in rest) or not flow.broadcasts:
        raise state.empty(source, user)
    filled = wanted
    if value.shape[axis] == flow.width:
        filled = state.live_at(source) & wanted
        value = value.index_select(axis, ids(filled).to(value.device))
    origin = source  # a constant's name must not depend on alignments of earlier cuts
    while isinstance(called_module(state.module, origin), Align):
        (origin,) = state.flows.inputs[origin]
    with state.module.graph.inserting_before(user):
        if bool(filled.any()):
            constant = state.insert(f"constant_{origin.name}", Constant(value), ())
        else:  # zeros that no training changes
            constant = state.insert(f"zero_{origin.name}", Fixed(_zero(state, source).narrow(axis, 0, 1)), ())
        if not torch.equal(filled, wanted):
            take = positions(filled, wanted)
            constant = state.insert(name_of_alignment(constant, user), Align(take, axis), (constant,))
    user.replace_input_with(source, constant)


def fold_sum(state: Rewriting, node: fx.Node, flow: Join, dropped: list[fx.Node]) -> bool:
    """Leave out the terms of a join that became zero; True if a single term of a sum remains, which then replaces it."""
    inputs = state.flows.inputs[node]
    rest = [i for i in inputs if i not in dropped]
    if not rest:
        raise state.empty(dropped[0], node)
    if _is_plain_sum(node, dropped) and rest[0] not in state.constants and shape_of(rest[0]).dims == shape_of(node).dims:
        state.replaced_by[node] = state.present(rest[0])
        state.settle(node, state.carried(rest[0], flow.width))
        return True
    for source in [i for i in dropped if state.before_zeros(i) is None]:
        if not flow.broadcasts or flow.zero_if in ("first", "third"):
            raise state.empty(source, node)
        state.constants[source] = _zero(state, source)
    return False


def _is_plain_sum(node: fx.Node, dropped: list[fx.Node]) -> bool:
    """Whether the node is a + b, or a - b of which b is dropped."""
    if node.kwargs or len(node.args) != 2:
        return False
    if node.target in (operator.add, torch.add, "add"):
        return True
    return node.target in (operator.sub, torch.sub, "sub") and node.args[1] in dropped
