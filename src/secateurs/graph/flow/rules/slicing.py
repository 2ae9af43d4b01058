"""Rules of ops that take parts of a tensor or reorder channels: slices, chunks, shuffles."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from secateurs.graph.flow.kinds import Channelwise, Flow, Moved
from secateurs.graph.flow.rules.common import channelwise, opaque
from secateurs.graph.flow.table import Op, rule
from secateurs.graph.trace import Shape

SPLITS = (torch.chunk, torch.split, torch.tensor_split, "chunk", "split", "tensor_split")


@rule(*SPLITS)
def split(op: Op) -> Flow:
    """Read through: whoever takes a part (x[i]) is treated as a slice of the whole."""
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
    picked = torch.arange(op.width)[chosen]
    if len(picked) == op.width:
        return Channelwise(out_axis, op.axis, op.width, keeps_zero=True)
    written = _expanded(op.node.args[1], len(op.shapes[0]))  # sizes that were computed stay computed
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
    """An index as one slice, number or None for each axis."""
    items = list(index) if isinstance(index, tuple) else [index]
    used = sum(i is not None and i is not Ellipsis for i in items)
    if Ellipsis not in items:
        items.append(Ellipsis)
    at = items.index(Ellipsis)
    return [*items[:at], *[slice(None)] * (rank - used), *items[at + 1 :]]


def _part(op: Op, source: fx.Node, index: Any) -> Flow:
    """Part `index` of a chunk or split, as a slice of what was split."""
    given = op.shape_of(source).value
    if source.target not in SPLITS or not isinstance(index, int) or not isinstance(given, tuple) or op.axis is None:
        return opaque(op, "takes a part of what no rule describes")
    whole = op.shapes[0]
    parts = [part.dims for part in given if isinstance(part, Shape) and part.dims is not None]
    dim = next((d for d, n in enumerate(whole) if parts and parts[0][d] != n), None)
    if dim is None or len(parts) != len(given):
        return opaque(op, "splits into a single part")
    index %= len(parts)
    sizes = [p[dim] for p in parts]
    if dim != op.axis:
        return Channelwise(op.axis, op.axis, op.width, keeps_zero=True)
    start = sum(sizes[:index])
    return Moved(op.axis, op.axis, op.width, torch.arange(start, start + sizes[index]), "gather")


@rule("narrow", torch.narrow)
def narrow(op: Op) -> Flow:
    """A range of one axis."""
    dim, start, length = op.argument(1, "dim"), op.argument(2, "start"), op.argument(3, "length")
    if op.axis is None or not all(isinstance(v, int) for v in (dim, start, length)):
        return opaque(op, "takes a part that is not fixed")
    if dim % len(op.shape) != op.axis:
        return channelwise(op, keeps_zero=True)
    return Moved(op.axis, op.axis, op.width, torch.arange(op.width)[start:][:length], "gather")


@rule(nn.ChannelShuffle, F.channel_shuffle, torch.channel_shuffle)
def channel_shuffle(op: Op) -> Flow:
    """Deals the channels out in another order."""
    groups = op.module.groups if isinstance(op.module, nn.ChannelShuffle) else op.argument(1, "groups")
    if op.axis not in (None, 1) or not isinstance(groups, int):
        return opaque(op, "shuffles another axis than the channels'")
    index = torch.arange(op.shape[1]).view(groups, -1).t().flatten()
    return Moved(1, 1, op.shape[1], index, "gather")
