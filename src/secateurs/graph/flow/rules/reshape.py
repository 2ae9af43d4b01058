"""Rules of ops that change the shape: flatten, view, permute, squeeze."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from secateurs.graph.flow.kinds import Blocks, Channelwise, Flow, Moved
from secateurs.graph.flow.rules.common import opaque
from secateurs.graph.flow.table import Op, rule
from secateurs.graph.trace import shape_of


@rule(nn.Flatten, torch.flatten, "flatten", torch.reshape, "reshape", "view")
def reshaping(op: Op) -> Flow:
    """Each channel stays an axis, is spread over a block of features, or a block of features becomes a channel."""
    if op.axis is None:
        return opaque(op, "reshapes a tensor whose channels are unknown")
    if op.module is None and op.node.target not in (torch.flatten, "flatten") and not _sizes_are_listed(op.node):
        return opaque(op, "takes its sizes from elsewhere")
    before, after, axis = op.shapes[0], op.shape, op.axis
    ahead, width = math.prod(before[:axis]), before[axis]
    place = _axis_after(after, ahead)
    if place is None:
        return opaque(op, "mixes the channels with the axes before them")
    resize = None if op.module is not None or op.node.target in (torch.flatten, "flatten") else _resizer(op.node, place)
    made = after[place]
    if made == width:
        return Channelwise(place, axis, width, keeps_zero=True, resize=resize)
    if made > width and made % width == 0 and _runs_to(before, axis, made):
        return Moved(place, axis, width, torch.arange(width).repeat_interleave(made // width), "same", resize)
    if made < width and width % made == 0 and _runs_to(after, place, width):
        return Blocks(place, axis, made, width // made, resize)
    return opaque(op, "divides the channels among several axes")


def _axis_after(dims: Sequence[int], ahead: int) -> int | None:
    """The axis behind which `ahead` values lie: where the channels begin again. Axes of length 1 stay ahead of it."""
    product = 1
    for place, n in enumerate(dims):
        if product == ahead and not (n == 1 and ahead == 1 and place == 0 and len(dims) > 1):
            return place
        product *= n
    return None


def _runs_to(dims: Sequence[int], start: int, size: int) -> bool:
    """Whether the product of the axes from `start` on reaches `size` exactly."""
    product = 1
    for n in dims[start:]:
        product *= n
        if product == size:
            return True
    return False


def _sizes_are_listed(node: fx.Node) -> bool:
    sizes = node.args[1] if len(node.args) == 2 and isinstance(node.args[1], tuple | list) else node.args[1:]
    return bool(sizes) and all(
        isinstance(s, int) or (isinstance(s, fx.Node) and isinstance(shape_of(s).value, int)) for s in sizes
    )


def _resizer(node: fx.Node, place: int) -> Any:
    """Writes the narrower width into the sizes that a view was called with."""

    def resize(target: fx.Node, width: int) -> None:
        listed = len(target.args) == 2 and isinstance(target.args[1], tuple | list)
        sizes = list(target.args[1] if listed else target.args[1:])  # type: ignore[arg-type]
        if sizes[place] != -1:
            sizes[place] = width
        target.args = (target.args[0], tuple(sizes)) if listed else (target.args[0], *sizes)

    return resize


@rule("expand", torch.broadcast_to)
def expand(op: Op) -> Flow:
    """Repeats along other axes than the channels'."""
    if op.axis is None or len(op.shape) != len(op.shapes[0]) or op.shape[op.axis] != op.width or not _sizes_are_listed(op.node):
        return opaque(op, "repeats channels")
    return Channelwise(op.axis, op.axis, op.width, keeps_zero=True, resize=_resizer(op.node, op.axis))


@rule("permute", torch.permute)
def permute(op: Op) -> Flow:
    """The channel axis goes where it is told to."""
    given = op.argument(1, "dims")
    dims = given if isinstance(given, tuple) else tuple(a for a in op.node.args[1:])
    return _reordered(op, dims)


@rule("transpose", torch.transpose, "swapaxes", torch.swapaxes, "swapdims", torch.swapdims)
def transpose(op: Op) -> Flow:
    """Two axes change places."""
    rank = len(op.shape)
    a, b = op.argument(1, "dim0"), op.argument(2, "dim1")
    if not isinstance(a, int) or not isinstance(b, int):
        return opaque(op, "reorders axes in a way that is not fixed")
    order = list(range(rank))
    order[a % rank], order[b % rank] = order[b % rank], order[a % rank]
    return _reordered(op, tuple(order))


def _reordered(op: Op, dims: tuple[Any, ...]) -> Flow:
    if op.axis is None or not all(isinstance(d, int) for d in dims):
        return opaque(op, "reorders axes of a tensor whose channels are unknown")
    axis = [d % len(dims) for d in dims].index(op.axis)
    return Channelwise(axis, op.axis, op.width, keeps_zero=True)


@rule("squeeze", torch.squeeze, "unsqueeze", torch.unsqueeze)
def squeezing(op: Op) -> Flow:
    """Axes of length 1 come and go beside the channels."""
    if op.axis is None:
        return opaque(op, "reshapes a tensor whose channels are unknown")
    dim, rank = op.argument(1, "dim"), len(op.shapes[0])
    if "unsqueeze" in str(op.node.target):
        at = dim % (rank + 1)
        return Channelwise(op.axis + (at <= op.axis), op.axis, op.width, keeps_zero=True)
    gone = (
        {d for d in range(rank) if op.shapes[0][d] == 1}
        if dim is None
        else {d % rank for d in ((dim,) if isinstance(dim, int) else dim)}
    )
    gone = {d for d in gone if op.shapes[0][d] == 1}
    if op.axis in gone:
        return opaque(op, "removes the axis of the channels")

    def spell_out(node: fx.Node, width: int) -> None:
        if width == 1:  # a single channel left must not vanish too; else the op stays as it is, for a batch of one too
            node.args, node.kwargs = (node.args[0], tuple(sorted(gone))), {}

    return Channelwise(op.axis - sum(d < op.axis for d in gone), op.axis, op.width, keeps_zero=True, resize=spell_out)
