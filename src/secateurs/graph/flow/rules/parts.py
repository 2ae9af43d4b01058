"""Rules of ops that take a part of a tensor: items, slices, splits."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from secateurs.graph.channels import call_word
from secateurs.graph.flow.kinds import Channelwise, Flow, Moved, Opaque, Recurrent, Reduced
from secateurs.graph.flow.rules.layers import reduced_first
from secateurs.graph.flow.table import Op, channelwise, describe, opaque, rule
from secateurs.graph.node_info import Shape
from secateurs.graph.recurrent import recurrent_call


@rule(torch.select, "select")
def select(op: Op) -> Flow:
    """One place along another axis than the channels'."""
    dim, rank = op.argument(1, "dim"), len(op.shapes[0])
    if op.axis is None or not isinstance(dim, int) or dim % rank == op.axis:
        return opaque(op, "picks a single channel")
    return Channelwise(op.axis - (dim % rank < op.axis), op.axis, op.width, keeps_zero=True)


UNBINDS = (torch.unbind, "unbind")
EXTREMA = (torch.max, torch.min, "max", "min")  # along an axis: the values and where they are
ORDERED = (torch.topk, "topk", torch.sort, "sort", torch.median, "median", torch.kthvalue, "kthvalue")  # the same, in an order
MOMENTS = (torch.var_mean, torch.std_mean)
PARTED = (*EXTREMA, *ORDERED, *MOMENTS)
SPLITS = (torch.chunk, torch.split, torch.tensor_split, "chunk", "split", "tensor_split", *UNBINDS)


@rule(*SPLITS)
def split(op: Op) -> Flow:
    """A single part (x[i]) is treated as a slice of the whole; a split that is used otherwise is opaque."""
    return opaque(op, "hands its parts on as a whole")


@rule(operator.getitem)
def getitem(op: Op) -> Flow:
    """A part of a split, or a slice; an index that picks single channels or uses a tensor is opaque."""
    source, index = op.node.args[0], op.argument(1, "index")
    assert isinstance(source, fx.Node)
    if not op.shape_of(source).is_tensor:
        return _part(op, source, index)
    if op.axis is None:
        return opaque(op, "takes a part of a tensor whose channels are unknown")
    items = _expanded(index, len(op.shapes[0])) if isinstance(index, tuple) else [index]
    listed = items[op.axis] if len(items) == len(op.shapes[0]) else None
    if isinstance(listed, tuple | list) and all(isinstance(i, int) for i in listed):
        others = (item for place, item in enumerate(items) if place != op.axis)
        if all(item == slice(None) for item in others):
            return Moved(op.axis, op.axis, op.width, torch.arange(op.width)[list(listed)], "gather")
    if not _is_plain(index):
        return opaque(op, "is indexed by something else than slices")
    items = _expanded(index, len(op.shapes[0]))
    position = axis = out_axis = 0
    for place, item in enumerate(items):
        if item is None:
            out_axis += 1
            continue
        if axis == op.axis:
            position = place
            break
        out_axis += isinstance(item, slice)
        axis += 1
    chosen = items[position]
    if not isinstance(chosen, slice):
        return opaque(op, "picks a single channel")
    written = _expanded(op.node.args[1], len(op.shapes[0]))  # sizes that were computed stay computed
    if any(isinstance(end, fx.Node) for end in (written[position].start, written[position].stop, written[position].step)):
        return opaque(op, "takes as many channels as another tensor has")
    picked = torch.arange(op.width)[chosen]
    if len(picked) == op.width:
        return Channelwise(out_axis, op.axis, op.width, keeps_zero=True)
    plain = tuple(slice(None) if place == position else item for place, item in enumerate(written))

    def whole(node: fx.Node, width: int) -> None:
        node.args = (node.args[0], plain)

    return Moved(out_axis, op.axis, op.width, picked, "before", whole)


def _is_plain(index: Any) -> bool:
    """Whether an index holds nothing but numbers, slices between numbers, None and the ellipsis."""
    items = index if isinstance(index, tuple) else (index,)
    if any(isinstance(part, fx.Node) for i in items if isinstance(i, slice) for part in (i.start, i.stop, i.step)):
        return False
    return all((isinstance(i, int | slice) or i is None or i is Ellipsis) and not isinstance(i, bool) for i in items)


def _expanded(index: Any, rank: int) -> list[Any]:
    """Return an index as one slice, number or None for each axis."""
    items = list(index) if isinstance(index, tuple) else [index]
    used = sum(i is not None and i is not Ellipsis for i in items)
    if Ellipsis not in items:
        items.append(Ellipsis)
    at = items.index(Ellipsis)
    return [*items[:at], *[slice(None)] * (rank - used), *items[at + 1 :]]


def _part(op: Op, source: fx.Node, index: Any) -> Flow:
    """Return part `index` of a chunk or split as a slice of the whole, or the values of a maximum along an axis."""
    given = op.shape_of(source).value
    call = recurrent_call(op.node)
    if call is not None:
        return _hidden_units(op, call)
    if source.target in PARTED and op.axis is not None:
        return _reduced_part(op, source, index)
    if source.target not in SPLITS or not isinstance(index, int) or not isinstance(given, tuple) or op.axis is None:
        return opaque(op, "takes a part of what no rule describes")
    whole = op.shapes[0]
    parts = [part.dims for part in given if isinstance(part, Shape) and part.dims is not None]
    if source.target in UNBINDS:
        at = source.args[1] if len(source.args) > 1 else source.kwargs.get("dim", 0)
        if not isinstance(at, int) or at % len(whole) == op.axis:
            return opaque(op, "picks a single channel")
        return Channelwise(op.axis - (at % len(whole) < op.axis), op.axis, op.width, keeps_zero=True)
    dim = next((d for d, n in enumerate(whole) if parts and parts[0][d] != n), None)
    if dim is None or len(parts) != len(given):
        return opaque(op, "splits into a single part")
    index %= len(parts)
    sizes = [p[dim] for p in parts]
    if dim != op.axis:
        return Channelwise(op.axis, op.axis, op.width, keeps_zero=True)
    start = sum(sizes[:index])
    return Moved(op.axis, op.axis, op.width, torch.arange(start, start + sizes[index]), "gather")


def _hidden_units(op: Op, call: fx.Node) -> Flow:
    """Return the flow of an output or a state of a recurrent module, whose units lie along the last axis."""
    owner, path = op.node.graph.owning_module, str(call.target)
    assert owner is not None
    module: Any = owner.get_submodule(path)
    if module.proj_size:
        return Opaque(f"{describe(call, module)} projects its hidden units (proj_size), so that its outputs are others")
    if sum(str(n.target) == path for n in op.node.graph.nodes if n.op == "call_module") > 1:
        return Opaque(f"{describe(call, module)} is called several times")
    if len(call.args) + len(call.kwargs) > 1:
        return Opaque(f"{describe(call, module)} starts from a state that it is given")
    in_axis, axis = len(op.shapes[0]) - 1, len(op.shape) - 1
    if op.axis not in (None, in_axis):
        return opaque(op, "reads along another axis than the channels'")
    return Recurrent(axis, in_axis, module.input_size, module.hidden_size, op.shape[axis] // module.hidden_size)


def _reduced_part(op: Op, source: fx.Node, index: Any) -> Flow:
    """Return the flow of the values, or their places, that an op such as max gives along one axis or several."""
    word, rank, axis = call_word(source), len(op.shapes[0]), op.axis
    assert axis is not None
    position = 2 if word in ("topk", "kthvalue") else 1
    given: Any = (
        source.args[position] if len(source.args) > position else source.kwargs.get("dim", -1 if word == "sort" else None)
    )
    given = -1 if given is None and word in ("topk", "kthvalue") else given
    dims = given if isinstance(given, tuple | list) else (given,)
    if not all(isinstance(d, int) for d in dims):
        return opaque(op, f"takes a part of {word} over axes that are not fixed")
    over = {d % rank for d in dims}
    if axis in over and word in ("max", "min") and index == 0 and len(over) == 1:
        resize = reduced_first(word, axis, op.width)

        def before_source(node: fx.Node, left: int) -> None:
            resize(source, left)

        return Reduced(axis if len(op.shape) == rank else None, axis, op.width, before_source)
    if axis in over or (index != 0 and source.target in ORDERED):  # where equal values lie is not specified
        return opaque(op, f"takes a part of {word} over the channels, or asks where equal values are")
    removed = sum(d < axis for d in over) if len(op.shape) < rank else 0
    return Channelwise(axis - removed, axis, op.width, keeps_zero=True)


@rule("narrow", torch.narrow)
def narrow(op: Op) -> Flow:
    """A range of one axis."""
    dim, start, length = op.argument(1, "dim"), op.argument(2, "start"), op.argument(3, "length")
    if op.axis is None or not all(isinstance(v, int) for v in (dim, start, length)):
        return opaque(op, "takes a part that is not fixed")
    if dim % len(op.shape) != op.axis:
        return channelwise(op, keeps_zero=True)
    return Moved(op.axis, op.axis, op.width, torch.arange(op.width)[start:][:length], "gather")
