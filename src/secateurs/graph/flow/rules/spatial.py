"""Rules of ops over space: pools, resizing, reductions, padding."""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from secateurs.graph.flow.kinds import Channelwise, Flow, Moved
from secateurs.graph.flow.rules.common import channelwise, opaque
from secateurs.graph.flow.table import Op, rule


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
    if op.axis is not None and (op.axis >= len(op.shape) - _spatial(op) or len(op.shape) != len(op.shapes[0])):
        return opaque(op, "works along the axis of the channels")
    return channelwise(op, keeps_zero=True)


def _spatial(op: Op) -> int:
    """How many axes at the end the op works along: its name says so (max_pool2d), or it takes all but two."""
    name = type(op.module).__name__ if op.module is not None else getattr(op.node.target, "__name__", "")
    found = re.search(r"(\d)d", name)
    return int(found[1]) if found else len(op.shape) - 2


@rule(torch.mean, torch.sum, torch.amax, torch.amin, torch.std, torch.var, "mean", "sum", "amax", "amin", "std", "var")
def reduction(op: Op) -> Flow:
    """Over space each channel stays by itself; over the channels all are needed (a mean counts zeros too)."""
    dims, rank = op.argument(1, "dim"), len(op.shapes[0])
    keepdim = len(op.shape) == rank
    if op.axis is None:
        return opaque(op, "has no channels to keep apart")
    if dims is None or isinstance(dims, bool):
        return opaque(op, "reduces over the channels")
    listed = (dims,) if isinstance(dims, int) else dims
    if not isinstance(listed, tuple) or not all(isinstance(d, int) for d in listed):
        return opaque(op, "reduces over axes that are not fixed")
    over = {d % rank for d in listed}
    if not over or op.axis in over:  # torch takes an empty list of axes for all of them
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
    """Mode, fill value, and amounts in torch's order: last axis first, before and after."""
    if op.module is None:
        return op.argument(2, "mode", "constant"), op.argument(3, "value", None) or 0, tuple(op.argument(1, "pad"))
    padding: Any = op.module
    amounts = padding.padding
    constant = "Constant" in type(padding).__name__ or "Zero" in type(padding).__name__
    return ("constant" if constant else "other"), getattr(padding, "value", 0), tuple(amounts)
