"""The table from ops of torch.export to the functions and methods of torch that rules are written for.

An op that is not listed is called under its own name in `torch`, as a method of a tensor, or as the op itself.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

Given = dict[str, Any]
"""The arguments of an op by the names in its schema, defaults included, with nodes of the new graph in place of tensors."""

Emit = Callable[[fx.Graph, Given], fx.Node]

FUNCTIONAL = {
    *("relu6", "elu", "selu", "celu", "gelu", "silu", "mish", "hardswish", "hardtanh", "hardsigmoid", "softplus", "leaky_relu"),
    *("softshrink", "linear", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "pixel_shuffle"),
    *("pixel_unshuffle", "glu", "one_hot", "scaled_dot_product_attention", "pad"),
}
"""Ops whose function in torch.nn.functional takes the arguments of the op by the same names."""

OPERATORS = {
    **{"add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv, "pow": operator.pow},
    **{"floor_divide": operator.floordiv, "remainder": operator.mod, "matmul": operator.matmul},
    **{"__and__": operator.and_, "__or__": operator.or_, "__xor__": operator.xor},
    **{name: getattr(operator, name) for name in ("gt", "ge", "lt", "le", "eq", "ne", "neg")},
}

METHODS = {
    *(
        "view",
        "reshape",
        "expand",
        "permute",
        "transpose",
        "flatten",
        "unflatten",
        "contiguous",
        "clone",
        "squeeze",
        "unsqueeze",
    ),
    *("mean", "sum", "amax", "amin", "std", "var", "repeat", "type_as", "expand_as", "masked_fill", "narrow", "t", "new_zeros"),
    *("new_ones", "new_full", "new_empty"),
}

RESIZED = {
    **{"upsample_nearest1d": "nearest", "upsample_nearest2d": "nearest", "upsample_nearest3d": "nearest"},
    **{"upsample_linear1d": "linear", "upsample_bilinear2d": "bilinear", "upsample_trilinear3d": "trilinear"},
    **{"upsample_bicubic2d": "bicubic", "_upsample_bilinear2d_aa": "bilinear", "_upsample_bicubic2d_aa": "bicubic"},
}

DROPPED = ("_assert", "sym_constrain", "_check", "assert")
"""Beginnings of the names of ops that only check."""


def word_of(op: Any) -> str:
    """Return the bare name of an op or function: 'conv2d'."""
    return str(op._schema.name.split("::")[-1]) if hasattr(op, "_schema") else getattr(op, "__name__", str(op))


def emit(graph: fx.Graph, op: Any, given: Given) -> fx.Node:
    """Append the call that does what `op` does."""
    name, overload = word_of(op), op._overloadname
    special = SPECIAL.get(name)
    if special is not None:
        return special(graph, given)
    if name in RESIZED:
        return _resize(graph, given, RESIZED[name], antialias=name.endswith("_aa"))
    schema = [a for a in op._schema.arguments if a.name in given]
    plain = [given[a.name] for a in schema if not a.kwarg_only]
    named = {a.name: given[a.name] for a in schema if a.kwarg_only and given[a.name] != a.default_value}
    for redundant in ("layout", "pin_memory", "memory_format"):
        named.pop(redundant, None)
    kept = 6 if name == "scaled_dot_product_attention" else 1  # its rate of dropout may depend on the mode
    while len(plain) > kept and _is_default(plain[-1], [a for a in schema if not a.kwarg_only][len(plain) - 1]):
        plain.pop()
    if name in OPERATORS and not named and overload not in ("Tensor_mode", "Scalar_mode"):
        return graph.call_function(OPERATORS[name], tuple(plain))
    if name in FUNCTIONAL:
        return graph.call_function(getattr(F, name), tuple(plain), named)
    if name in METHODS or (name.endswith("_") and not name.startswith("_")):
        return graph.call_method(name, tuple(plain), named)
    public = getattr(torch, name, None)
    if callable(public) and not name.startswith("_"):
        return graph.call_function(public, tuple(plain), named)
    if hasattr(Tensor, name) and not name.startswith("_"):
        return graph.call_method(name, tuple(plain), named)
    return graph.call_function(op, tuple(plain), named)


def _is_default(value: Any, argument: Any) -> bool:
    return argument.has_default_value() and not isinstance(value, fx.Node) and value == argument.default_value


def _resize(graph: fx.Graph, given: Given, mode: str, *, antialias: bool) -> fx.Node:
    """Resizing, by sizes or by factors."""
    size, factors = given.get("output_size"), given.get("scale_factors")
    named: dict[str, Any] = {"size": size} if size is not None else {"scale_factor": tuple(factors or ())}
    if mode != "nearest":
        named["align_corners"] = given.get("align_corners") or None
    if antialias:
        named["antialias"] = True
    return graph.call_function(F.interpolate, (given["input"],), {**named, "mode": mode})


def _by_order(function: Any, *names: str) -> Emit:
    """Call `function` with the arguments `names` of the op, in this order."""
    return lambda graph, given: graph.call_function(function, tuple(given[name] for name in names))


def _part(graph: fx.Graph, given: Given) -> fx.Node:
    """x[..., start:end:step] along one axis; torch writes a large number for an open end."""
    end, start = given.get("end"), given.get("start")
    end = None if isinstance(end, int) and end >= 2**62 else end
    item = slice(start or None, end, None if given.get("step", 1) == 1 else given["step"])
    return _indexed(graph, given["self"], given.get("dim", 0), item)


def _indexed(graph: fx.Graph, tensor: Any, dim: int, item: Any) -> fx.Node:
    index = (Ellipsis, item, *[slice(None)] * (-1 - dim)) if dim < 0 else (*[slice(None)] * dim, item)
    return graph.call_function(operator.getitem, (tensor, index))


def _convert(graph: fx.Graph, given: Given) -> fx.Node:
    """x.to(...) of another dtype, device, or both."""
    if "other" in given:
        return graph.call_method("to", (given["self"], given["other"]))
    named = {name: given[name] for name in ("dtype", "device") if given.get(name) is not None}
    return graph.call_method("to", (given["self"],), named)


def _softmax(function: Any) -> Emit:
    def softmax(graph: fx.Graph, given: Given) -> fx.Node:
        named = {} if given.get("dtype") is None else {"dtype": given["dtype"]}
        return graph.call_function(function, (given["self"], given["dim"]), named)

    return softmax


def _pool(function: Any) -> Emit:
    """Pooling with the largest value; the indices that some ops give besides are not used."""
    names = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")

    def pool(graph: fx.Graph, given: Given) -> fx.Node:
        if "output_size" in given:
            return graph.call_function(function, (given["self"], given["output_size"]))
        named = {name: given[name] for name in names if name in given and given[name] != []}
        return graph.call_function(function, (given["self"],), named)

    return pool


NORM = ("momentum", "eps")

SPECIAL: dict[str, Emit] = {
    "batch_norm": _by_order(F.batch_norm, "input", "running_mean", "running_var", "weight", "bias", "training", *NORM),
    "instance_norm": _by_order(
        F.instance_norm, "input", "running_mean", "running_var", "weight", "bias", "use_input_stats", *NORM
    ),
    "layer_norm": _by_order(F.layer_norm, "input", "normalized_shape", "weight", "bias", "eps"),
    "group_norm": _by_order(F.group_norm, "input", "num_groups", "weight", "bias", "eps"),
    "embedding": _by_order(F.embedding, "indices", "weight"),
    "relu": _by_order(F.relu, "self"),
    "sigmoid": _by_order(torch.sigmoid, "self"),
    "tanh": _by_order(torch.tanh, "self"),
    "log_sigmoid": _by_order(F.logsigmoid, "self"),
    "dropout": _by_order(F.dropout, "input", "p", "train"),
    "feature_dropout": _by_order(F.dropout2d, "input", "p", "train"),
    "alpha_dropout": _by_order(F.alpha_dropout, "input", "p", "train"),
    "feature_alpha_dropout": _by_order(F.feature_alpha_dropout, "input", "p", "train"),
    "softmax": _softmax(F.softmax),
    "log_softmax": _softmax(F.log_softmax),
    "max_pool1d": _pool(F.max_pool1d),
    "max_pool2d": _pool(F.max_pool2d),
    "max_pool3d": _pool(F.max_pool3d),
    "max_pool2d_with_indices": _pool(F.max_pool2d),
    "adaptive_max_pool1d": _pool(F.adaptive_max_pool1d),
    "adaptive_max_pool2d": _pool(F.adaptive_max_pool2d),
    "split_with_sizes": lambda graph, given: graph.call_function(
        torch.split, (given["self"], given["split_sizes"], given.get("dim", 0))
    ),
    "slice": _part,
    "select": lambda graph, given: _indexed(graph, given["self"], given["dim"], given["index"]),
    "index": lambda graph, given: graph.call_function(
        operator.getitem, (given["self"], tuple(slice(None) if i is None else i for i in given["indices"]))
    ),
    "im2col": _by_order(F.unfold, "self", "kernel_size", "dilation", "padding", "stride"),
    "col2im": _by_order(F.fold, "self", "output_size", "kernel_size", "dilation", "padding", "stride"),
    "linalg_vector_norm": _by_order(torch.linalg.vector_norm, "self", "ord", "dim", "keepdim"),
    "to": _convert,
    "_to_copy": _convert,
    "rsub": lambda graph, given: graph.call_function(operator.sub, (given["other"], given["self"])),
    "sym_size": lambda graph, given: graph.call_method("size", (given["self"], given["dim"])),
}

POOLS_WITH_INDICES = ("max_pool2d_with_indices", "adaptive_max_pool1d", "adaptive_max_pool2d")
