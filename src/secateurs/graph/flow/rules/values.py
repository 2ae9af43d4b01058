"""Rules of ops on values at the same place: activations, arithmetic, dropout, sums, products, concatenation."""

from __future__ import annotations

import math
import operator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from secateurs.graph.channels import call_word
from secateurs.graph.flow.kinds import Channelwise, Concat, Contracted, Flow, Join, Moved, Opaque, ZeroIf
from secateurs.graph.flow.table import RULES, Op, call_on, channelwise, opaque, rule
from secateurs.graph.layers import Align, Offset
from secateurs.graph.node_info import info
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
    *(torch.abs, torch.neg, torch.square, torch.sqrt, torch.exp, torch.log1p, torch.expm1, torch.sin, torch.cos, torch.erf),
    *(torch.rsqrt, torch.reciprocal, torch.log, torch.log2, torch.log10, "rsqrt", "reciprocal", "log", torch.logical_not),
    *(
        torch.exp2,
        torch.sinh,
        torch.cosh,
        torch.tan,
        torch.asinh,
        torch.erfc,
        torch.trunc,
        torch.frac,
        torch.nan_to_num,
        torch.ones_like,
    ),
    *(operator.gt, operator.lt, operator.ge, operator.le, operator.eq, operator.ne, torch.gt, torch.lt, torch.ge, torch.le),
    *("gt", "lt", "ge", "le", "eq", "ne", "nan_to_num", "logical_not", "bool", "int", "long"),
    *(torch.atan, torch.sign, torch.floor, torch.ceil, torch.round, torch.pow, operator.neg, operator.pow, operator.abs, abs),
    *("abs", "neg", "square", "sqrt", "exp", "log1p", "expm1", "sin", "cos", "erf", "atan", "sign", "pow"),
    *("floor", "ceil", "round"),
)


@rule(*ACTIVATIONS)
def activation(op: Op) -> Flow:
    """Keeps zeros if f(0) is 0, which a call shows."""
    return _pointwise(op, activation=True)


@rule(*POINTWISE)
def pointwise(op: Op) -> Flow:
    """Like an activation, without being one."""
    return _pointwise(op, activation=False)


def _pointwise(op: Op, *, activation: bool) -> Flow:
    if len(op.inputs) != 1:
        compared = call_word(op.node) in ("gt", "lt", "ge", "le", "eq", "ne") and len(op.inputs) == 2
        joined = _join(op, "all") if compared else opaque(op, "has a tensor among its arguments")
        return replace(joined, revives=True) if isinstance(joined, Join) else joined
    at_zero = call_on(op.node, op.module, torch.zeros(1), op.size)
    return channelwise(op, keeps_zero=bool((at_zero == 0).all()), pointwise=True, activation=activation)


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
    *("contiguous", "clone", "detach", "to", "float", "double", "half", "type_as", torch.clone, torch.detach, torch.as_tensor),
    torch.zeros_like,
)
def leaves_values(op: Op) -> Flow:
    """Values are unchanged (dropout in eval mode), or all zero, so zeros stay."""
    return channelwise(op, keeps_zero=True, pointwise=True)


@rule(nn.AlphaDropout, nn.FeatureAlphaDropout, F.alpha_dropout, F.feature_alpha_dropout)
def alpha_dropout(op: Op) -> Flow:
    """In train mode zeros change, so none is kept."""
    return channelwise(op, keeps_zero=False, pointwise=True)


@rule("torchvision.ops.stochastic_depth:stochastic_depth", "torchvision.ops.stochastic_depth:StochasticDepth")
def stochastic_depth(op: Op) -> Flow:
    """Drops whole examples of a batch while training; the identity in eval mode."""
    return channelwise(op, keeps_zero=True, pointwise=True)


@rule(Offset)
def offset(op: Op) -> Flow:
    """Revives the channels that it covers, whatever its values are now."""
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
    """A product is zero where any factor is, so a gate's channels are removed with those that it gates."""
    if len(op.inputs) == 1 and op.axis is not None:
        factor = next((v for v in (op.argument(0, "input"), op.argument(1, "other")) if isinstance(v, int | float)), math.nan)
        return channelwise(op, keeps_zero=math.isfinite(factor), pointwise=True)
    return _join(op, "any")


@rule("reshape_as", "view_as")
def reshape_as(op: Op) -> Flow:
    """Channels that stay whole, in a shape whose channels are the same."""
    first, second, axis = op.shapes[0], op.shapes[1], op.axes[1]
    if op.axis is None or axis is None or first[op.axis] != second[axis]:
        return opaque(op, "takes its sizes from a tensor with other channels")
    if math.prod(first[: op.axis]) != math.prod(second[:axis]):
        return opaque(op, "mixes the channels with the axes before them")
    return Join(axis, (op.axis, axis), second[axis], "first", (second[axis], second[axis]), broadcasts=False)


@rule(operator.truediv, torch.div, torch.true_divide, "div", "true_divide")
def division(op: Op) -> Flow:
    """Of zeros by a number; a quotient with a zero denominator is no number, so masks are applied again behind it."""
    if len(op.inputs) == 1:
        divisor = op.argument(1, "other")
        return channelwise(op, keeps_zero=isinstance(divisor, int | float) and divisor != 0, pointwise=True)
    found = _join(op, "any")
    return replace(found, revives=True) if isinstance(found, Join) else found


@rule(torch.where, "masked_fill", torch.masked_fill)
def choice(op: Op) -> Flow:
    """Zero where the values to choose from are; a number among them that is not zero revives the channels."""
    given = op.node.args
    if len(given) != 3:
        return opaque(op, "chooses between values that are not given one by one")
    values = given[1:] if op.node.target is torch.where else (given[0], given[2])
    numbers = [v for v in values if isinstance(v, int | float)]
    if len(op.inputs) != 3 - len(numbers) or len(numbers) == 2:
        return opaque(op, "chooses between values that have no channels")
    chosen = op.node.target is torch.where
    found = _join(op, "rest" if chosen else "first")
    return replace(found, revives=any(numbers) or not (chosen or numbers)) if isinstance(found, Join) else found


@rule(torch.addcmul, "addcmul", torch.lerp, "lerp")
def combination(op: Op) -> Flow:
    """A sum of products, or a mixture of two tensors: zero where all of its tensors are."""
    return _join(op, "all")


@rule("expand_as")
def expand_as(op: Op) -> Flow:
    """Values of the first input, shape of the second."""
    return _join(op, "first")


@rule(torch.matmul, operator.matmul, "matmul", torch.bmm, "bmm", F.scaled_dot_product_attention)
def matrix_product(op: Op) -> Flow:
    """Matrices of each channel are multiplied, as in the heads of attention.

    Rows of the first factor and columns of the second stay apart, too; where products are summed, all channels are needed.
    """
    attention = F.scaled_dot_product_attention in (op.node.target, getattr(op.module, "function", None))
    from_right = [None if a is None else len(s) - a for s, a in zip(op.shapes, op.axes, strict=True)]
    if len(op.inputs) > 1 and (from_right[:3] == [1, 1, 1] if attention else from_right == [1, 2]):
        return _contracted(op, attention=attention)
    rows, columns = from_right[0] == 2, len(from_right) > 1 and from_right[1] == 1
    if not attention and len(op.inputs) == 2 and (rows or columns) and len(set(map(len, op.shapes))) == 1:
        columns = columns and (not rows or op.shape[-1] > 1)  # with both, the second factor's channels are followed
        axis = len(op.shape) - (1 if columns else 2)
        width = op.shape[axis]
        return Join(axis, (None, axis) if columns else (axis, None), width, "any", (1, width) if columns else (width, 1), False)
    if len(op.inputs) < 2 + attention or any(n is not None and n < 3 for n in from_right):
        return opaque(op, "multiplies along the axis of the channels")
    found = _join(op, "third" if attention else "any")
    return replace(found, broadcasts=False) if isinstance(found, Join) else found


def _contracted(op: Op, *, attention: bool) -> Flow:
    """Return the flow of a product that sums over the channels of both factors, and of attention by such a product."""
    inputs = op.shapes[0][-1]
    if not attention:
        return Contracted(None, op.axes, inputs)

    def keep_scale(node: fx.Node, width: int) -> None:
        """Torch would take the scale from the number of queries' features that are left."""
        if node.kwargs.get("scale") is None:
            node.kwargs = {**node.kwargs, "scale": inputs**-0.5}

    return Contracted(len(op.shape) - 1, op.axes, inputs, op.shape[-1], keep_scale)


@rule(torch.einsum)
def einsum(op: Op) -> Flow:
    """Channels that every input with channels and the output call by the same letter are treated one by one."""
    equation = op.argument(0, "equation")
    terms, arrow, result = equation.replace(" ", "").partition("->") if isinstance(equation, str) else ("", "", "")
    letters = terms.split(",")
    if "..." in terms and len(letters) == len(op.inputs):
        rest = [len(shape) - len(term.replace("...", "")) for term, shape in zip(letters, op.shapes, strict=True)]
        unnamed = "".join(chr(ord("α") + i) for i in range(max(rest)))
        letters = [t.replace("...", unnamed[len(unnamed) - n :]) for t, n in zip(letters, rest, strict=True)]
        result = result.replace("...", unnamed)
    if not arrow:
        result = "".join(sorted(c for c in {*terms} - {","} if terms.count(c) == 1))
    named = {term[a] for term, a in zip(letters, op.axes, strict=False) if a is not None and a < len(term)}
    summed = len(named) == 1 and not named <= set(result) and all(named <= set(term) for term in letters)
    if summed and len(letters) == len(op.inputs) == 2 and None not in op.axes:
        return Contracted(None, op.axes, op.width)
    if (not arrow and "..." in terms) or len(letters) != len(op.inputs) or len(named) != 1 or not named <= set(result):
        return opaque(op, "sums over the channels, or names them by several letters")
    (letter,) = named
    in_axes = tuple(term.index(letter) if letter in term else None for term in letters)
    widths = tuple(1 if a is None else s[a] for s, a in zip(op.shapes, in_axes, strict=True))
    axis = result.index(letter)
    return Join(axis, in_axes, op.shape[axis], "any", widths, broadcasts=False)


@rule(torch.stack)
def stack(op: Op) -> Flow:
    """Along a new axis; the inputs' channels must agree."""
    dim, known = op.argument(1, "dim", 0), {a for a in op.axes if a is not None}
    listed = op.node.args[0] if op.node.args else op.node.kwargs["tensors"]
    if len(known) != 1 or not isinstance(dim, int) or not isinstance(listed, list | tuple) or list(listed) != list(op.inputs):
        return opaque(op, "joins tensors whose channels are unknown, or lie along different axes")
    (axis,) = known
    count, width = len(op.inputs), op.shapes[0][axis]
    return Join(axis + (dim % len(op.shape) <= axis), (axis,) * count, width, "all", (width,) * count, broadcasts=False)


def _join(op: Op, zero_if: ZeroIf) -> Flow:
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


@rule(torch.cat, torch.concat, torch.concatenate, torch.hstack, torch.vstack)
def concatenation(op: Op) -> Flow:
    """Along the channels the inputs follow one another; along another axis their channels must agree."""
    dim = op.argument(1, "dim", op.node.kwargs.get("axis", 0))
    if op.node.target in (torch.hstack, torch.vstack):
        dim = int(op.node.target is torch.hstack)
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
    """An alignment that an earlier cut inserted; in the place of a slice of the model's own it leaves channels unread, too."""
    layer: Any = op.module
    if op.axis not in (None, layer.axis):
        return opaque(op, "aligns another axis than the channels'")
    added = not info(op.node).get("part")
    return Moved(layer.axis, layer.axis, op.shapes[0][layer.axis], torch.tensor(layer.take), "gather", added=added)
