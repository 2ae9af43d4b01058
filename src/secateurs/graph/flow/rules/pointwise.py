"""Rules of ops on single values: activations, arithmetic with numbers, dropout."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from secateurs.graph.flow.kinds import Channelwise, Flow, Opaque
from secateurs.graph.flow.rules.common import channelwise, opaque
from secateurs.graph.flow.table import RULES, Op, call_on, rule
from secateurs.graph.layers import Offset
from secateurs.graph.normalise import FollowsMode

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
    return bool((call_on(op.node, op.module, torch.zeros(1), op.size) == 0).all())


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


@rule(Offset)
def offset(op: Op) -> Flow:
    """Revives the channels that it covers, whatever today's values are."""
    layer: Any = op.module
    covered = layer.covered.detach().cpu()
    if op.axis not in (None, layer.axis):
        return opaque(op, "adds along another axis than the channels'")
    params = ("value", "covered")
    return Channelwise(layer.axis, layer.axis, len(covered), False, pointwise=True, params=params, revived=covered)


@rule(FollowsMode)
def follows_mode(op: Op) -> Flow:
    """The rule of the function that it calls."""
    function: Any = getattr(op.module, "function", None)
    found = RULES.get(function) or RULES.get(f"{function.__module__}:{function.__name__}")
    return found(op) if found else Opaque(f"no rule for {function.__name__} at node {op.node.name!r}")
