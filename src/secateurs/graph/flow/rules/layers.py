"""Rules of layers with filters, of normalisation, and of ops over space: pools, resizing, reductions, padding."""

from __future__ import annotations

import math
import operator
import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from secateurs.graph.channels import call_word
from secateurs.graph.flow.kinds import Channelwise, Flow, Join, Layer, Lookup, Moved, Norm, Reduced, ResizeArgs
from secateurs.graph.flow.table import Op, channelwise, opaque, rule
from secateurs.graph.layers import FrozenNorm
from secateurs.graph.node_info import pass_on_


@rule(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
def convolution(op: Op) -> Flow:
    """Filters lie along the axis before the spatial ones."""
    conv: Any = op.module
    axis = len(op.shape) - len(conv.kernel_size) - 1
    sizes = (conv.in_channels, conv.out_channels, conv.groups)
    return Layer(axis, axis, *sizes, conv.bias is not None, conv.transposed, reads_all=op.axis not in (None, axis))


@rule(nn.Linear)
def linear(op: Op) -> Flow:
    """Neurons lie along the last axis."""
    layer: Any = op.module
    axis, sizes = len(op.shape) - 1, (layer.in_features, layer.out_features, 1)
    return Layer(axis, axis, *sizes, layer.bias is not None, reads_all=op.axis not in (None, axis))


@rule(nn.Embedding)
def embedding(op: Op) -> Flow:
    """Features lie along a new last axis; `max_norm` divides rows by what all features make."""
    table: Any = op.module
    if op.axis is not None or table.max_norm is not None:
        return opaque(op, "takes rows by channels, or divides them by their norm")
    return Lookup(len(op.shape) - 1, table.embedding_dim)


@rule(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, FrozenNorm, "torchvision.ops.misc:FrozenBatchNorm2d")
def batch_norm(op: Op) -> Flow:
    """A zero channel becomes a constant of bias and mean, so it counts as revived whatever the weights are now."""
    norm: Any = op.module
    return _norm(op, keeps_zero=False, pointwise=norm.running_mean is not None)


@rule(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
def instance_norm(op: Op) -> Flow:
    """Without weights and running statistics a zero channel stays zero."""
    norm: Any = op.module
    return _norm(op, keeps_zero=not norm.affine and not norm.track_running_stats, pointwise=False)


@rule(F.instance_norm)
def functional_instance_norm(op: Op) -> Flow:
    """Without weights and running statistics each channel is treated alone, and a zero stays zero."""
    if len(op.inputs) > 1 or op.axis not in (None, 1):
        return opaque(op, "has weights or statistics among its arguments, or normalises along another axis than the channels'")
    return Channelwise(1, 1, op.shape[1], keeps_zero=True)


def _norm(op: Op, *, keeps_zero: bool, pointwise: bool) -> Flow:
    axis = 1 if len(op.shape) > 1 else 0
    if op.axis not in (None, axis):
        return opaque(op, "normalises along another axis than the channels'")
    norm: Any = op.module
    count = "num_features" if hasattr(norm, "num_features") else None
    if (norm.num_features if count else len(norm.weight)) != op.shape[axis]:
        return opaque(op, "takes an input without a batch dimension")
    params = ("weight", "bias", "running_mean", "running_var")
    return Channelwise(axis, axis, op.shape[axis], keeps_zero, pointwise, params=params, count=count)


@rule(nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
def norm_over_channels(op: Op) -> Flow:
    """Statistics over several channels: a mask behind it makes them statistics over the others."""
    norm: Any = op.module
    grouped = isinstance(norm, nn.GroupNorm)
    first = 1 if grouped else len(op.shape) - len(norm.normalized_shape)
    axis = first if op.axis is None else op.axis
    if axis < first:
        return Channelwise(axis, axis, op.shape[axis], keeps_zero=False)
    if (grouped and axis != 1) or (op.axis is None and first != len(op.shape) - 1 and not grouped):
        return opaque(op, NEEDS_ALL)
    return Norm(axis, op.shape[axis], norm.num_groups if grouped else 1, axis - first, f"{op.label} {NEEDS_ALL}")


NEEDS_ALL = "takes statistics over several channels, so it needs all of them"


@rule(nn.LocalResponseNorm, nn.CrossMapLRN2d, F.group_norm, F.layer_norm, F.rms_norm, F.local_response_norm)
def mixes_channels(op: Op) -> Flow:
    """Each channel is divided by what its neighbours hold, or weights are computed: no mask leaves a channel out."""
    return opaque(op, NEEDS_ALL)


@rule(
    *(nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.Softmax2d, F.softmax, F.log_softmax, F.normalize),
    *(torch.softmax, torch.log_softmax, "softmax", "log_softmax"),
)
def normalises_channels(op: Op) -> Flow:
    """Sums over an axis: along the channels, a zero channel counts too; along another, each channel is treated alone."""
    divides = op.node.target is F.normalize
    softmax = isinstance(op.module, nn.Softmax | nn.LogSoftmax | nn.Softmin)
    dim = op.module.dim if softmax else op.argument(2, "dim", 1) if divides else op.argument(1, "dim")  # type: ignore[union-attr]  # a module has `dim` here
    if op.axis is not None and isinstance(dim, int) and dim % len(op.shape) != op.axis:
        return channelwise(op, keeps_zero=divides)
    return opaque(op, "sums over an axis in which removed channels would count")


@rule(
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
    *(F.max_pool1d, F.max_pool2d, F.max_pool3d, F.avg_pool1d, F.avg_pool2d, F.avg_pool3d),
    *(torch.max_pool1d, torch.max_pool2d, torch.max_pool3d),
    *(F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d),
    *(F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d),
    *(nn.LPPool1d, nn.LPPool2d, nn.LPPool3d, F.lp_pool1d, F.lp_pool2d, F.lp_pool3d),
    *(nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d, F.interpolate, F.upsample),
)
def over_space(op: Op) -> Flow:
    """Pooling and resizing treat each channel alone; the channels must lie before the spatial axes."""
    if op.axis is not None and (op.axis >= len(op.shape) - _spatial(op) or len(op.shape) != len(op.shapes[0])):
        return opaque(op, "works along the axis of the channels")
    return channelwise(op, keeps_zero=True)


def _spatial(op: Op) -> int:
    """Return the number of spatial axes: from the op's name (max_pool2d), or all axes but two."""
    name = type(op.module).__name__ if op.module is not None else getattr(op.node.target, "__name__", "")
    found = re.search(r"(\d)d", name)
    return int(found[1]) if found else len(op.shape) - 2


@rule(
    *(torch.mean, torch.sum, torch.amax, torch.amin, torch.std, torch.var, torch.argmax, torch.argmin, torch.logsumexp),
    *("mean", "sum", "amax", "amin", "std", "var", "argmax", "argmin", "logsumexp"),
    *(torch.norm, "norm", torch.linalg.vector_norm),
)
def reduction(op: Op) -> Flow:
    """Over space each channel is reduced alone; over the channels, zero ones do not count in a sum, a mean or a norm."""
    word, rank = call_word(op.node).removeprefix("linalg_"), len(op.shapes[0])
    dims = op.argument(2 if "norm" in word else 1, "dim")
    keepdim = len(op.shape) == rank
    if op.axis is None:
        return opaque(op, "has no channels to keep apart")
    listed = (dims,) if isinstance(dims, int) and not isinstance(dims, bool) else dims
    if listed is not None and (not isinstance(listed, tuple) or not all(isinstance(d, int) for d in listed)):
        return opaque(op, "reduces over axes that are not fixed")
    over = {d % rank for d in listed or range(rank)}  # torch takes an empty list of axes for all of them
    if op.axis in over:
        return _over_channels(op, word, keepdim=keepdim)
    axis = op.axis if keepdim else op.axis - sum(d < op.axis for d in over)
    return Channelwise(axis, op.axis, op.width, keeps_zero=word != "logsumexp")


def _over_channels(op: Op, word: str, *, keepdim: bool) -> Flow:
    """Return the flow of a reduction over the channels, and maybe other axes."""
    order = op.argument(1, "ord" if word == "vector_norm" else "p", 2)
    counts = "norm" in word and order not in (1, 2, math.inf, "fro")
    if counts or word not in ("sum", "mean", "amax", "amin", "norm", "vector_norm"):
        return opaque(op, "reduces over the channels, and zero ones count")
    assert op.axis is not None
    resize = None if word == "sum" or "norm" in word else reduced_first(word, op.axis, op.width)
    return Reduced(op.axis if keepdim else None, op.axis, op.width, resize)


def reduced_first(word: str, axis: int, width: int) -> ResizeArgs:
    """Return a function that reduces the channels which are left before the op: their mean, largest or smallest value.

    The channels that are gone were zero, and the op counted them: a mean is a sum divided by the number of all channels.
    """

    def resize(node: fx.Node, left: int) -> None:
        graph, source = node.graph, node.args[0]
        with graph.inserting_before(node):
            if word == "mean":
                total = graph.call_method("sum", (source, axis, True))
                alone = graph.call_function(operator.truediv, (total, width))
            else:
                extreme = graph.call_method("amin" if "min" in word else "amax", (source, axis, True))
                alone = graph.call_method("clamp_max" if "min" in word else "clamp_min", (extreme, 0))
        for added in (alone, alone.all_input_nodes[0]):
            pass_on_(node, added, "nn_module_stack", "unused")
        node.args = (alone, *node.args[1:])

    return resize


@rule(
    *(torch.cumsum, "cumsum", torch.cumprod, "cumprod", torch.logcumsumexp, "logcumsumexp"),
)
def cumulative(op: Op) -> Flow:
    """Along another axis than the channels', each channel is treated alone."""
    dim = op.argument(1, "dim")
    if op.axis is None or not isinstance(dim, int) or dim % len(op.shape) == op.axis:
        return opaque(op, "accumulates over the channels")
    return channelwise(op, keeps_zero="logcumsumexp" not in str(op.node.target))


@rule(F.grid_sample, torch.grid_sampler)
def grid_sample(op: Op) -> Flow:
    """Each channel is sampled at the same places, which come from elsewhere; places outside give zero or a value inside."""
    if op.axis not in (None, 1) or len(op.inputs) != 2 or op.axes[1] is not None:
        return opaque(op, "samples at places that depend on its channels")
    width = op.shapes[0][1]
    return Join(1, (1, None), width, "first", (width, 1), broadcasts=False)


@rule(
    *(F.pad, nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d),
    *(nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d, nn.CircularPad1d, nn.CircularPad2d, nn.CircularPad3d),
    *(nn.ReplicationPad1d, nn.ReplicationPad2d, nn.ReplicationPad3d),
)
def pad(op: Op) -> Flow:
    """Padding in space keeps zeros if it adds zeros; padding of channels adds channels that are known to be zero."""
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

    written: Any = op.node.args[1] if len(op.node.args) > 1 else op.node.kwargs["pad"]
    if isinstance(written, fx.Node):
        return opaque(op, "takes the amounts of its padding from elsewhere")

    def without_channels(node: fx.Node, width: int) -> None:
        kept = list(written)  # amounts that were computed stay computed
        kept[2 * from_right : 2 * from_right + 2] = [0, 0]
        node.args = (node.args[0], tuple(kept), "constant", value)
        node.kwargs = {}

    return Moved(op.axis, op.axis, op.width, index, "before", without_channels)


def _padding(op: Op) -> tuple[str, float, tuple[int, ...]]:
    """Return mode, fill value, and amounts in torch's order: last axis first, before and after."""
    if op.module is None:
        return op.argument(2, "mode", "constant"), op.argument(3, "value", None) or 0, tuple(op.argument(1, "pad"))
    padding: Any = op.module
    amounts = padding.padding
    constant = "Constant" in type(padding).__name__ or "Zero" in type(padding).__name__
    return ("constant" if constant else "other"), getattr(padding, "value", 0), tuple(amounts)
