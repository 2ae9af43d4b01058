"""Rules of ops where several tensors meet: sums, products, concatenation."""

from __future__ import annotations

import math
import operator
from typing import Any, Literal

import torch

from secateurs.graph.flow.kinds import Concat, Flow, Join, Moved
from secateurs.graph.flow.rules.common import channelwise, opaque
from secateurs.graph.flow.table import Op, rule
from secateurs.graph.layers import Align


@rule(operator.add, torch.add, "add", operator.sub, torch.sub, torch.subtract, "sub", torch.rsub)
def addition(op: Op) -> Flow:
    """A sum is zero where all its terms are; adding a number revives zeros."""
    if len(op.inputs) == 1:
        return channelwise(op, keeps_zero=False, pointwise=True)
    return _join(op, "all")


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


def _join(op: Op, zero_if: Literal["all", "any", "first"]) -> Flow:
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
    if op.axis not in (None, layer.axis):
        return opaque(op, "aligns another axis than the channels'")
    return Moved(layer.axis, layer.axis, op.shapes[0][layer.axis], torch.tensor(layer.take), "gather", added=True)
