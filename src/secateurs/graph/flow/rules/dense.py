"""Rules of layers with filters that read all channels, and of normalisation."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from secateurs.graph.flow.kinds import Channelwise, Flow, Layer
from secateurs.graph.flow.rules.common import opaque
from secateurs.graph.flow.table import Op, rule


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
