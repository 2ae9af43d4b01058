"""One op, one rule: how channels flow through each op that secateurs knows.

Every op stands here once, in module, functional and method form together. An op that is not here is opaque: it gets its
inputs at full width, and what it touches is not pruned. Users add rules with the same decorator.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import fx, nn

from secateurs.flow.kinds import Blocks, Channelwise, Concat, Flow, Join, Layer, Moved, Opaque
from secateurs.flow.table import RULES, Op, call_on, rule
from secateurs.graph import Shape, shape_of
from secateurs.layers import Align
from secateurs.normalise import FollowsMode


def channelwise(op: Op, *, keeps_zero: bool, pointwise: bool = False, activation: bool = False) -> Flow:
    """The flow of an op without weights that treats every channel alone, wherever the channels lie."""
    return Channelwise(op.axis, op.axis, op.width, keeps_zero, pointwise, activation)


def opaque(op: Op, why: str) -> Opaque:
    """The flow of an op that needs all channels of its inputs; `why` completes the sentence that begins with its name."""
    return Opaque(f"{op.label} {why}")


# ---- layers: filters that read all channels ----------------------------------------------------------------------------


@rule(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
def convolution(op: Op) -> Flow:
    """Filters lie along the axis before the spatial ones."""
    conv: Any = op.module
    axis = len(op.shape) - len(conv.kernel_size) - 1
    return Layer(
        axis,
        axis,
        conv.in_channels,
        conv.out_channels,
        conv.groups,
        conv.bias is not None,
        transposed=conv.transposed,
        reads_all=op.axis not in (None, axis),
    )


@rule(nn.Linear)
def linear(op: Op) -> Flow:
    """Neurons lie along the last axis."""
    layer: Any = op.module
    axis = len(op.shape) - 1
    reads_all = op.axis not in (None, axis)
    return Layer(axis, axis, layer.in_features, layer.out_features, 1, layer.bias is not None, reads_all=reads_all)


# ---- normalisation -----------------------------------------------------------------------------------------------------


@rule(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
def batch_norm(op: Op) -> Flow:
    """A zero channel becomes its bias less its mean: revived, whatever today's weights are."""
    norm: Any = op.module
    return _norm(op, keeps_zero=False, pointwise=norm.running_mean is not None)


@rule(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
def instance_norm(op: Op) -> Flow:
    """Without weights and running statistics a zero channel stays zero."""
    norm: Any = op.module
    return _norm(op, keeps_zero=not norm.affine and not norm.track_running_stats, pointwise=False)


def _norm(op: Op, *, keeps_zero: bool, pointwise: bool) -> Flow:
    axis = 1 if len(op.shape) > 1 else 0
    if op.axis not in (None, axis):
        return opaque(op, "normalises along another axis than the channels'")
    norm: Any = op.module
    if norm.num_features != op.shape[axis]:
        return opaque(op, "takes an input without a batch dimension")
    params = ("weight", "bias", "running_mean", "running_var")
    return Channelwise(axis, axis, op.shape[axis], keeps_zero, pointwise, params=params, count="num_features")


@rule(
    nn.GroupNorm,
    nn.LayerNorm,
    nn.LocalResponseNorm,
    nn.CrossMapLRN2d,
    F.group_norm,
    F.layer_norm,
    F.local_response_norm,
)
def mixes_channels(op: Op) -> Flow:
    """Statistics over several channels: a removed channel would change the others."""
    return opaque(op, "takes statistics over several channels, so it needs all of them")


@rule(
    nn.Softmax,
    nn.LogSoftmax,
    nn.Softmin,
    nn.Softmax2d,
    F.softmax,
    F.log_softmax,
    F.normalize,
    torch.softmax,
    torch.log_softmax,
    "softmax",
    "log_softmax",
)
def normalises_channels(op: Op) -> Flow:
    """Sums over an axis: fine along space, but over channels a zero counts too."""
    return opaque(op, "sums over an axis in which removed channels would count")


# ---- activations and other ops on single values ------------------------------------------------------------------------

ACTIVATIONS = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.RReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish),
    *(nn.Hardtanh, nn.Tanh, nn.Sigmoid, nn.Hardsigmoid, nn.LogSigmoid, nn.Softplus, nn.Softsign, nn.Softshrink),
    *(nn.Hardshrink, nn.Tanhshrink, nn.Threshold),
    *(F.relu, F.relu6, F.leaky_relu, F.rrelu, F.elu, F.selu, F.celu, F.gelu, F.silu, F.mish, F.hardswish, F.hardtanh),
    *(F.tanh, F.sigmoid, F.hardsigmoid, F.logsigmoid, F.softplus, F.softsign, F.softshrink, F.hardshrink, F.tanhshrink),
    *(F.threshold, torch.relu, torch.sigmoid, torch.tanh, torch.selu, torch.celu, torch.rrelu, torch.threshold),
    *("relu", "sigmoid", "tanh", "hardshrink"),
    *(torch.clamp, torch.clamp_min, torch.clamp_max, torch.clip, "clamp", "clamp_min", "clamp_max", "clip"),
)

POINTWISE = (
    *(
        torch.abs,
        torch.neg,
        torch.square,
        torch.sqrt,
        torch.exp,
        torch.log1p,
        torch.expm1,
        torch.sin,
        torch.cos,
        torch.erf,
    ),
    *(torch.atan, torch.sign, torch.floor, torch.ceil, torch.round, torch.pow, operator.neg, operator.pow, operator.abs, abs),
    *("abs", "neg", "square", "sqrt", "exp", "log1p", "expm1", "sin", "cos", "erf", "atan", "sign", "pow"),
    *("floor", "ceil", "round"),
)


@rule(*ACTIVATIONS)
def activation(op: Op) -> Flow:
    """Keeps zeros if f(0) is 0, found out by calling it."""
    return _pointwise(op, activation=True)


@rule(*POINTWISE)
def pointwise(op: Op) -> Flow:
    """Like an activation, without being one."""
    return _pointwise(op, activation=False)


def _pointwise(op: Op, *, activation: bool) -> Flow:
    if len(op.inputs) != 1:
        return opaque(op, "has a tensor among its arguments")
    return channelwise(op, keeps_zero=_keeps_zero(op), pointwise=True, activation=activation)


def _keeps_zero(op: Op) -> bool:
    """Probe f(0): an op of single values that gives 0 for 0 keeps zero channels zero."""
    return bool((call_on(op.node, op.module, torch.zeros(1)) == 0).all())


@rule(nn.PReLU)
def prelu(op: Op) -> Flow:
    """One slope for all channels, or one each along axis 1."""
    slopes: Any = op.module
    if slopes.num_parameters == 1:
        return channelwise(op, keeps_zero=True, pointwise=True, activation=True)
    axis = 1 if len(op.shape) > 1 else 0
    if op.axis not in (None, axis):
        return opaque(op, "has its slopes along another axis than the channels'")
    width = op.shape[axis]
    return Channelwise(axis, axis, width, True, True, True, params=("weight",), count="num_parameters")


@rule(
    *(nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, torch.dropout),
    *("contiguous", "clone", "detach", "to", "float", "double", "half", "type_as", torch.clone, torch.detach),
)
def leaves_values(op: Op) -> Flow:
    """Values pass as they are (dropout in eval mode), so zeros stay."""
    return channelwise(op, keeps_zero=True, pointwise=True)


@rule(nn.AlphaDropout, nn.FeatureAlphaDropout, F.alpha_dropout, F.feature_alpha_dropout)
def alpha_dropout(op: Op) -> Flow:
    """In train mode it moves zeros, so they do not count as zero."""
    return channelwise(op, keeps_zero=False, pointwise=True)


@rule("torchvision.ops.stochastic_depth:stochastic_depth")
def stochastic_depth(op: Op) -> Flow:
    """Drops whole examples of a batch while training; the identity in eval mode."""
    return channelwise(op, keeps_zero=True, pointwise=False)


@rule(FollowsMode)
def follows_mode(op: Op) -> Flow:
    """The rule of the function that it calls."""
    function: Any = getattr(op.module, "function", None)
    found = RULES.get(function) or RULES.get(f"{function.__module__}:{function.__name__}")
    return found(op) if found else Opaque(f"no rule for {function.__name__} at node {op.node.name!r}")


# ---- space: pools, resizing, padding -----------------------------------------------------------------------------------


@rule(
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
    *(F.max_pool1d, F.max_pool2d, F.max_pool3d, F.avg_pool1d, F.avg_pool2d, F.avg_pool3d),
    *(torch.max_pool1d, torch.max_pool2d, torch.max_pool3d),
    *(F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d),
    *(F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d),
    *(nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d, F.interpolate, F.upsample),
)
def over_space(op: Op) -> Flow:
    """Pools and resizes each channel alone; the channels must lie before the spatial axes."""
    if op.axis is not None and (op.axis > 1 or len(op.shape) != len(op.shapes[0])):
        return opaque(op, "works along the axis of the channels")
    return channelwise(op, keeps_zero=True)


@rule(torch.mean, torch.sum, torch.amax, torch.amin, torch.std, torch.var, "mean", "sum", "amax", "amin", "std", "var")
def reduction(op: Op) -> Flow:
    """Over space each channel stays by itself; over the channels all are needed (a mean counts zeros too)."""
    dims, rank = op.argument(1, "dim"), len(op.shapes[0])
    keepdim = len(op.shape) == rank
    if op.axis is None:
        return opaque(op, "has no channels to keep apart")
    if dims is None or isinstance(dims, bool):
        return opaque(op, "reduces over the channels")
    over = {d % rank for d in ((dims,) if isinstance(dims, int) else dims)}
    if op.axis in over:
        return opaque(op, "reduces over the channels")
    axis = op.axis if keepdim else op.axis - sum(d < op.axis for d in over)
    return Channelwise(axis, op.axis, op.width, keeps_zero=True)


@rule(
    *(F.pad, nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d),
    *(nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d, nn.CircularPad1d, nn.CircularPad2d, nn.CircularPad3d),
    *(nn.ReplicationPad1d, nn.ReplicationPad2d, nn.ReplicationPad3d),
)
def pad(op: Op) -> Flow:
    """Pads of space keep zeros if they add zeros; pads of channels add channels that are known to be zero."""
    mode, value, amounts = _padding(op)
    if op.axis is None:
        return channelwise(op, keeps_zero=False)
    from_right = len(op.shape) - 1 - op.axis
    before, after = amounts[2 * from_right : 2 * from_right + 2] if len(amounts) > 2 * from_right else (0, 0)
    adds_zeros = mode != "constant" or value == 0
    if before == 0 and after == 0:
        space = any(amounts)
        return channelwise(op, keeps_zero=adds_zeros or not space)
    if mode != "constant" or not adds_zeros or before < 0 or after < 0 or op.module is not None:
        return opaque(op, "pads the channels with something else than zeros")
    index = torch.cat([torch.full((before,), -1), torch.arange(op.width), torch.full((after,), -1)])

    def without_channels(node: fx.Node, width: int) -> None:
        kept = list(amounts)
        kept[2 * from_right : 2 * from_right + 2] = [0, 0]
        node.args = (node.args[0], tuple(kept), "constant", value)
        node.kwargs = {}

    return Moved(op.axis, op.axis, op.width, index, "before", without_channels)


def _padding(op: Op) -> tuple[str, float, tuple[int, ...]]:
    """Mode, fill value, and amounts in torch's order: last axis first, before and after."""
    if op.module is None:
        return op.argument(2, "mode", "constant"), op.argument(3, "value", None) or 0, tuple(op.argument(1, "pad"))
    padding: Any = op.module
    amounts = padding.padding
    constant = "Constant" in type(padding).__name__ or "Zero" in type(padding).__name__
    return ("constant" if constant else "other"), getattr(padding, "value", 0), tuple(amounts)


# ---- where several tensors meet ----------------------------------------------------------------------------------------


@rule(operator.add, torch.add, "add", operator.sub, torch.sub, torch.subtract, "sub", torch.rsub)
def addition(op: Op) -> Flow:
    """A sum is zero where all its terms are; adding a number revives zeros."""
    return _join(op, "all" if len(op.inputs) > 1 else "never")


@rule(torch.maximum, torch.minimum, torch.max, torch.min)
def extremum(op: Op) -> Flow:
    """The larger of two zeros is zero; the form that reduces a single tensor is opaque."""
    return _join(op, "all") if len(op.inputs) > 1 else opaque(op, "reduces over an axis")


@rule(operator.mul, torch.mul, torch.multiply, "mul", "multiply")
def multiplication(op: Op) -> Flow:
    """A product is zero where any factor is: what makes a gate's channels go with those it gates."""
    if len(op.inputs) == 1 and op.axis is not None:
        factor = next((v for v in (op.argument(0, "input"), op.argument(1, "other")) if isinstance(v, int | float)), math.nan)
        return channelwise(op, keeps_zero=math.isfinite(factor), pointwise=True)
    return _join(op, "any")


@rule(operator.truediv, torch.div, torch.true_divide, "div")
def division(op: Op) -> Flow:
    """By a number only: a tensor of denominators may hold zeros."""
    divisor = op.argument(1, "other")
    if len(op.inputs) == 1 and isinstance(divisor, int | float) and divisor:
        return channelwise(op, keeps_zero=True, pointwise=True)
    return opaque(op, "divides by a tensor, whose zeros would give NaN")


@rule("expand_as")
def expand_as(op: Op) -> Flow:
    """Takes the values of the first, the shape of the second."""
    return _join(op, "first")


def _join(op: Op, zero_if: Literal["all", "any", "first", "never"]) -> Flow:
    """Match the channel axes of the inputs from the right, as broadcasting does."""
    known = [len(s) - a for s, a in zip(op.shapes, op.axes, strict=True) if a is not None]
    if not known:
        return opaque(op, "joins tensors whose channels are unknown")
    from_right = known[0]
    if any(k != from_right for k in known):
        return opaque(op, "joins tensors whose channels lie along different axes")
    axis = len(op.shape) - from_right
    width = op.shape[axis]
    in_axes = tuple(len(s) - from_right if len(s) >= from_right else None for s in op.shapes)
    widths = tuple(1 if a is None else s[a] for s, a in zip(op.shapes, in_axes, strict=True))
    if any(a is not None and w not in (1, width) for a, w in zip(in_axes, widths, strict=True)):
        return opaque(op, "joins tensors of different widths")
    return Join(axis, in_axes, width, zero_if, widths)


@rule(torch.cat, torch.concat, torch.concatenate)
def concatenation(op: Op) -> Flow:
    """Along the channels the inputs stand one behind the other; along another axis they must agree."""
    dim = op.argument(1, "dim", op.node.kwargs.get("axis", 0))
    known = [a for a in op.axes if a is not None]
    if not isinstance(dim, int) or not known:
        return opaque(op, "joins tensors whose channels are unknown")
    dim %= len(op.shape)
    if any(a != known[0] for a in known):
        return opaque(op, "joins tensors whose channels lie along different axes")
    listed = op.node.args[0] if op.node.args else op.node.kwargs["tensors"]
    if not isinstance(listed, list | tuple) or list(listed) != list(op.inputs):
        return opaque(op, "joins a list that was made elsewhere")
    if dim != known[0]:
        count, width = len(op.inputs), op.shape[known[0]]
        return Join(known[0], (known[0],) * count, width, "all", (width,) * count, broadcasts=False)
    return Concat(dim, tuple(s[dim] for s in op.shapes))


@rule(Align)
def align(op: Op) -> Flow:
    """An alignment of an earlier cut, to be merged with what comes now."""
    layer: Any = op.module
    return Moved(layer.axis, layer.axis, op.shapes[0][layer.axis], torch.tensor(layer.take), "gather")


# ---- parts: slices, chunks ---------------------------------------------------------------------------------------------

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
    if not shape_of(source).is_tensor:
        return _part(op, source, index)
    if op.axis is None:
        return opaque(op, "takes a part of a tensor whose channels are unknown")
    items = _expanded(index, len(op.shapes[0]))
    if items is None:
        return opaque(op, "is indexed by something else than slices")
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
    plain = tuple(slice(None) if place == position else item for place, item in enumerate(items))

    def whole(node: fx.Node, width: int) -> None:
        node.args = (node.args[0], plain)

    return Moved(out_axis, op.axis, op.width, picked, "before", whole)


def _expanded(index: Any, rank: int) -> list[Any] | None:
    """An index as one slice, number or None for each axis; None where it holds anything else."""
    items = list(index) if isinstance(index, tuple) else [index]
    if any(not (isinstance(i, int | slice) or i is None or i is Ellipsis) or isinstance(i, bool) for i in items):
        return None
    if any(isinstance(part, fx.Node) for i in items if isinstance(i, slice) for part in (i.start, i.stop, i.step)):
        return None
    used = sum(i is not None and i is not Ellipsis for i in items)
    if Ellipsis not in items:
        items.append(Ellipsis)
    at = items.index(Ellipsis)
    return [*items[:at], *[slice(None)] * (rank - used), *items[at + 1 :]]


def _part(op: Op, source: fx.Node, index: Any) -> Flow:
    """Part `index` of a chunk or split, as a slice of what was split."""
    given = shape_of(source).value
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


# ---- shape: flatten, view, permute -------------------------------------------------------------------------------------


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
        node.args, node.kwargs = (node.args[0], tuple(sorted(gone))), {}  # a single channel left must not vanish too

    return Channelwise(op.axis - sum(d < op.axis for d in gone), op.axis, op.width, keeps_zero=True, resize=spell_out)
