"""Rules of ops that reshape, take parts or reorder channels: flatten, view, permute, squeeze, slices, chunks, shuffles."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from secateurs.graph.channels import call_word
from secateurs.graph.flow.kinds import Blocks, Channelwise, Flow, Moved, ResizeArgs
from secateurs.graph.flow.table import Op, channelwise, opaque, rule
from secateurs.graph.node_info import called_module, info, shape_of
from secateurs.graph.normalise import FollowsMode


@rule(nn.Flatten, torch.flatten, "flatten", torch.reshape, "reshape", "view", nn.Unflatten, torch.unflatten, "unflatten")
def reshaping(op: Op) -> Flow:
    """Each channel stays an axis, is spread over a block of features, or a block of features becomes a channel."""
    if op.axis is None:
        return opaque(op, "reshapes a tensor whose channels are unknown")
    flattens = isinstance(op.module, nn.Flatten) or op.node.target in (torch.flatten, "flatten")
    unflattens = isinstance(op.module, nn.Unflatten) or op.node.target in (torch.unflatten, "unflatten")
    if not (flattens or unflattens or _sizes_are_listed(op.node)):
        return opaque(op, "takes its sizes from elsewhere")
    before, after, axis = op.shapes[0], op.shape, op.axis
    ahead, width = math.prod(before[:axis]), before[axis]
    place = _axis_after(after, ahead)
    if place is None:
        return _merged(op, _unflattened(op) if unflattens else None if flattens else _resizer)
    heads = None if flattens or unflattens else _heads(op, place)
    if heads is not None:
        return heads
    made, inner = after[place], place + 1
    resizer = None if flattens else _unflattened(op) if unflattens else _resizer
    # a cut that left one channel leaves sizes that say nothing; another axis than these two is that of the heads around them
    cut_at = info(op.node).get("channel_axis", place)
    if made == width and not (cut_at == inner and after[inner] == 1):
        return Channelwise(place, axis, width, keeps_zero=True, resize=resizer and resizer(place))
    if made > width and made % width == 0 and made in accumulate(before[axis:], operator.mul):
        index = torch.arange(width).repeat_interleave(made // width)
        return Moved(place, axis, width, index, "same", resizer and resizer(place))
    if made <= width and width % made == 0 and width in accumulate(after[place:], operator.mul):
        meets = cut_at == inner or (_acts_along(op.node, place) and not _acts_along(op.node, inner))
        if made * after[inner] == width and meets:
            members = torch.arange(width).view(made, -1).t().contiguous()  # groups of channels that meet: split attention
            return Blocks(inner, axis, members, resizer and resizer(inner), together=True)
        return Blocks(place, axis, torch.arange(width).view(made, -1), resizer and resizer(place))
    return opaque(op, "divides the channels among several axes")


def _merged(op: Op, resizer: Callable[[int], ResizeArgs] | None) -> Flow:
    """Return the flow of a view that joins the channels with axes before them: each channel is repeated then."""
    before, after, axis = op.shapes[0], op.shape, op.axis
    assert axis is not None
    width, through = before[axis], math.prod(before[: axis + 1])
    product, ahead = 1, 1
    for place, n in enumerate(after):
        ahead, product = product, product * n
        if place and product == through and n % width == 0 and ahead in accumulate((1, *before[:axis]), operator.mul):
            index = torch.arange(width).repeat(n // width)
            return Moved(place, axis, width, index, "same", resizer and resizer(place))
    return opaque(op, "mixes the channels with the axes before them")


def _unflattened(op: Op) -> Callable[[int], ResizeArgs] | None:
    """Return what corrects the sizes of an unflatten along the axis that has the channels."""
    layer: Any = op.module
    dim = op.argument(1, "dim") if layer is None else layer.dim
    if not isinstance(dim, int) or dim % len(op.shapes[0]) != op.axis:
        return None
    first = dim % len(op.shapes[0])

    def resizer(place: int) -> ResizeArgs:
        def resize(target: fx.Node, width: int) -> None:
            if layer is not None:
                sizes = list(layer.unflattened_size)
                sizes[place - first] = width
                layer.unflattened_size = torch.Size(sizes)
                return
            given: Any = target.args[2] if len(target.args) > 2 else target.kwargs["sizes"]
            sizes = list(given)
            if sizes[place - first] != -1:
                sizes[place - first] = width
            target.args, target.kwargs = (target.args[0], dim, tuple(sizes)), {}

        return resize

    return resizer


def _acts_along(node: fx.Node, axis: int) -> bool:
    """Whether an op behind `node`, with nothing but arithmetic and activations between them, treats places along `axis` as one.

    A sum over it, a softmax along it, or a part of it.
    """
    seen, open_nodes = {node}, [(node, axis)]
    rank = len(shape_of(node).dims or ())
    while open_nodes:
        source, along = open_nodes.pop()
        for user in source.users:
            if user in seen or user.op == "output":
                continue
            seen.add(user)
            owner = node.graph.owning_module
            called = None if owner is None else called_module(owner, user)
            given: Any = getattr(called, "dim", None)
            if given is None:
                given = user.args[1] if len(user.args) > 1 else user.kwargs.get("dim")
            word = call_word(user) if called is None else type(called).__name__.lower()
            if word in ALONG:
                dims = given if isinstance(given, tuple | list) else (given,)
                if along in {d % rank for d in dims if isinstance(d, int)}:
                    return True
            elif user.target is operator.getitem and isinstance(given, tuple) and len(given) > along:
                if isinstance(given[along], int):
                    return True
                continue
            shape, turned = shape_of(user).dims, user.args[1:3] if word == "transpose" else ()
            pair = [d % rank for d in turned if isinstance(d, int)]
            if len(pair) == 2:
                open_nodes.append((user, pair[1 - pair.index(along)] if along in pair else along))
            elif shape is not None and len(shape) == rank and word not in ("permute", "view", "reshape", "flatten"):
                open_nodes.append((user, along))
    return False


ALONG = ("sum", "mean", "amax", "amin", "max", "min", "softmax", "log_softmax", "unbind", "select", "logsumexp", "squeeze")


def _heads(op: Op, place: int) -> Flow | None:
    """Return the flow of a view that divides channels among heads of attention: (…, C, …) to (…, h, d, …) or (…, 3, h, d, …).

    A head is a channel then: of the axes that the channels are divided among, the last but one. In (…, h, 3, d, …) it is the
    first of three. Inside heads, and of a single one, a channel is one feature of every head: the last axis of (…, h, d, …).
    """
    before, after, axis = op.shapes[0], op.shape, op.axis
    parts = next((k for k in (3, 2) if math.prod(after[place : place + k]) == op.width and len(after) >= place + k), 0)
    divided = after[place : place + parts]
    if not parts or axis is None or op.module is not None or before[:axis] != after[:place]:
        return None
    # of a single head, unless that is what a cut left of several; heads that a cut left one feature each are heads
    alone = divided[-1] == op.width and info(op.node).get("channel_axis", place + 1) == place + 1
    if not any(map(_is_attended, _followed(op.node))):
        return None
    if op.inside or alone:
        if parts == 3 or after[place] * after[place + 1] != op.width:
            return None if alone else opaque(op, "divides the channels among queries, keys and values at once")
        features = torch.arange(op.width).view(divided).t().contiguous()
        return Blocks(place + 1, axis, features, _resizer(place + 1), together=True)
    first = parts == 3 and after[place] != 3 and after[place + 1] == 3
    head = place if first else place + parts - 2
    features = torch.arange(op.width).view(divided).movedim(head - place, 0)
    return Blocks(head, axis, features.reshape(after[head], -1), _resizer(head), together=True)


def _followed(node: fx.Node) -> list[fx.Node]:
    """Return the first ops behind `node` other than reorderings of axes, parts along an axis, numbers, norms and dropout."""
    found, open_nodes, owner = [], list(node.users), node.graph.owning_module
    while open_nodes:
        user = open_nodes.pop()
        called = None if owner is None else called_module(owner, user)
        if user.target in ATTENTION_STEPS or isinstance(called, nn.Identity | nn.Dropout | nn.LayerNorm | nn.RMSNorm):
            open_nodes += user.users
        else:
            found.append(user)
    return found


ATTENTION_STEPS = (
    *("permute", torch.permute, "transpose", torch.transpose, operator.getitem, "unbind", torch.unbind, "chunk", torch.chunk),
    *(operator.mul, torch.mul, "mul", operator.truediv, "contiguous", "squeeze", torch.squeeze, "movedim", torch.movedim),
)


def _is_attended(node: fx.Node) -> bool:
    owner = node.graph.owning_module
    called = None if owner is None else called_module(owner, node)
    target = called.function if isinstance(called, FollowsMode) else node.target
    return target in (F.scaled_dot_product_attention, torch.matmul, operator.matmul, "matmul", "__matmul__", torch.einsum)


def _axis_after(dims: Sequence[int], ahead: int) -> int | None:
    """Return the axis before which the sizes multiply to `ahead`: where the channels begin. Axes of length 1 stay before it."""
    product = 1
    for place, n in enumerate(dims):
        if product == ahead and not (n == 1 and ahead == 1 and place == 0 and len(dims) > 1):
            return place
        product *= n
    return None


def _sizes_are_listed(node: fx.Node) -> bool:
    sizes = node.args[1] if len(node.args) == 2 and isinstance(node.args[1], tuple | list) else node.args[1:]
    return bool(sizes) and all(
        isinstance(s, int) or (isinstance(s, fx.Node) and isinstance(shape_of(s).value, int)) for s in sizes
    )


def _resizer(place: int) -> ResizeArgs:
    """Return a function that writes the narrower width into the sizes that a view was called with."""

    def resize(target: fx.Node, width: int) -> None:
        listed = len(target.args) == 2 and isinstance(target.args[1], tuple | list)
        sizes = list(target.args[1] if listed else target.args[1:])  # type: ignore[arg-type]
        if sizes[place] != -1:
            sizes[place] = width
        target.args = (target.args[0], tuple(sizes)) if listed else (target.args[0], *sizes)

    return resize


@rule(torch.roll, "roll")
def roll(op: Op) -> Flow:
    """Along other axes than the channels', each channel is treated alone."""
    given = op.argument(2, "dims", ())
    dims = {d % len(op.shape) for d in ((given,) if isinstance(given, int) else given)}
    if op.axis is None or not dims or op.axis in dims:
        return opaque(op, "moves channels")
    return channelwise(op, keeps_zero=True)


@rule("expand", torch.broadcast_to)
def expand(op: Op) -> Flow:
    """Repeats along other axes than the channels'."""
    if op.axis is None or len(op.shape) != len(op.shapes[0]) or op.shape[op.axis] != op.width or not _sizes_are_listed(op.node):
        return opaque(op, "repeats channels")
    return Channelwise(op.axis, op.axis, op.width, keeps_zero=True, resize=_resizer(op.axis))


@rule("permute", torch.permute)
def permute(op: Op) -> Flow:
    """The channel axis moves with the others."""
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
    return Channelwise(axis, op.axis, op.width, keeps_zero=True, pointwise=True)


@rule("squeeze", torch.squeeze, "unsqueeze", torch.unsqueeze)
def squeezing(op: Op) -> Flow:
    """Axes of length 1 are added or removed beside the channels."""
    if op.axis is None:
        return opaque(op, "reshapes a tensor whose channels are unknown")
    dim, rank = op.argument(1, "dim"), len(op.shapes[0])
    if "unsqueeze" in str(op.node.target):
        at = dim % (rank + 1)
        return Channelwise(op.axis + (at <= op.axis), op.axis, op.width, keeps_zero=True, pointwise=True)
    named = range(rank) if dim is None else {d % rank for d in ((dim,) if isinstance(dim, int) else dim)}
    squeezed = {d for d in named if op.shapes[0][d] == 1}
    if op.axis in squeezed:
        return opaque(op, "removes the axis of the channels")

    def spell_out(node: fx.Node, width: int) -> None:
        if width == 1:  # the axis of a single remaining channel must not be squeezed
            node.args, node.kwargs = (node.args[0], tuple(sorted(squeezed))), {}

    return Channelwise(op.axis - sum(d < op.axis for d in squeezed), op.axis, op.width, keeps_zero=True, resize=spell_out)


@rule("movedim", torch.movedim, torch.moveaxis, "moveaxis")
def movedim(op: Op) -> Flow:
    """Axes move to other places."""
    given = op.argument(1, "source"), op.argument(2, "destination")
    if not all(isinstance(g, int | tuple) for g in given):
        return opaque(op, "reorders axes in a way that is not fixed")
    rank = len(op.shape)
    moved = torch.empty(tuple(range(rank)), device="meta").movedim(*given).shape if rank else ()
    return _reordered(op, tuple(moved))


@rule(torch.flip, "flip")
def flip(op: Op) -> Flow:
    """Along other axes each channel is treated alone; along the channels they change places."""
    given = op.argument(1, "dims")
    dims = given if isinstance(given, tuple) else tuple(op.argument(i, "dims") for i in range(1, len(op.node.args)))
    if op.axis is None or not all(isinstance(d, int) for d in dims):
        return opaque(op, "reverses a tensor whose channels are unknown")
    if op.axis not in {d % len(op.shape) for d in dims}:
        return channelwise(op, keeps_zero=True)
    if len(dims) > 1:
        return opaque(op, "reverses the channels and other axes at once")
    return Moved(op.axis, op.axis, op.width, torch.arange(op.width).flip(0), "gather")


@rule("repeat", torch.tile, "tile")
def repeat(op: Op) -> Flow:
    """Copies along axes; copies of all channels follow one another."""
    if op.axis is None or len(op.shape) != len(op.shapes[0]):
        return opaque(op, "repeats a tensor whose channels are unknown, or along new axes")
    times = op.shape[op.axis] // op.width
    if times == 1:
        return channelwise(op, keeps_zero=True)
    return Moved(op.axis, op.axis, op.width, torch.arange(op.width).repeat(times), "same")


@rule(torch.repeat_interleave, "repeat_interleave")
def repeat_interleave(op: Op) -> Flow:
    """Copies of one channel follow one another."""
    times, dim = op.argument(1, "repeats"), op.argument(2, "dim")
    if op.axis is None or not isinstance(times, int) or not isinstance(dim, int):
        return opaque(op, "repeats each value by another number, or without an axis")
    if dim % len(op.shape) != op.axis:
        return channelwise(op, keeps_zero=True)
    return Moved(op.axis, op.axis, op.width, torch.arange(op.width).repeat_interleave(times), "same")


@rule("unfold")
def windows(op: Op) -> Flow:
    """Windows along an axis become a new last axis."""
    dim = op.argument(1, "dimension")
    if op.axis is None or not isinstance(dim, int) or dim % len(op.shapes[0]) == op.axis:
        return opaque(op, "cuts windows along the axis of the channels")
    return channelwise(op, keeps_zero=True)


@rule(nn.ChannelShuffle, F.channel_shuffle, torch.channel_shuffle)
def channel_shuffle(op: Op) -> Flow:
    """Reorders the channels."""
    groups = op.module.groups if isinstance(op.module, nn.ChannelShuffle) else op.argument(1, "groups")
    if op.axis not in (None, 1) or not isinstance(groups, int):
        return opaque(op, "shuffles another axis than the channels'")
    index = torch.arange(op.shape[1]).view(groups, -1).t().flatten()
    return Moved(1, 1, op.shape[1], index, "gather")


@rule(nn.PixelShuffle, F.pixel_shuffle, torch.pixel_shuffle)
def pixel_shuffle(op: Op) -> Flow:
    """Blocks of channels become pixels of one channel."""
    axis = len(op.shape) - 3
    if op.axis not in (None, axis):
        return opaque(op, "works along the axis of the channels")
    return Blocks(axis, axis, torch.arange(op.shapes[0][axis]).view(op.shape[axis], -1), together=True)


@rule(nn.PixelUnshuffle, F.pixel_unshuffle, torch.pixel_unshuffle, nn.Unfold, F.unfold)
def pixel_unshuffle(op: Op) -> Flow:
    """Each channel is spread over a block of channels."""
    axis = 1 if len(op.shape) == 3 and len(op.shapes[0]) == 4 else len(op.shape) - 3  # unfold gives (N, features, places)
    if op.axis not in (None, axis) or op.shape[axis] % op.shapes[0][axis]:
        return opaque(op, "works along the axis of the channels")
    width = op.shapes[0][axis]
    return Moved(axis, axis, width, torch.arange(width).repeat_interleave(op.shape[axis] // width), "same")


@rule(nn.Fold, F.fold)
def fold(op: Op) -> Flow:
    """Blocks of features become the windows of one channel, and are added where those overlap."""
    axis = len(op.shape) - 3
    if op.axis not in (None, axis):
        return opaque(op, "works along the axis of the channels")
    return Blocks(axis, axis, torch.arange(op.shapes[0][axis]).view(op.shape[axis], -1), together=True)


@rule(nn.GLU, F.glu)
def glu(op: Op) -> Flow:
    """Channel j times the sigmoid of channel j of the second half: both halves go together."""
    dim = op.module.dim if isinstance(op.module, nn.GLU) else op.argument(1, "dim", -1)
    dim %= len(op.shape)
    if op.axis not in (None, dim):
        return channelwise(op, keeps_zero=True)
    return Blocks(dim, dim, torch.arange(op.shapes[0][dim]).view(2, -1).t().contiguous(), together=True)
