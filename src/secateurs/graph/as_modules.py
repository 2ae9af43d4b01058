"""Calls of functions with parameters of a module become modules of their own: F.conv2d with a weight is a convolution."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from secateurs.graph.channels import call_word, free_name, module_path
from secateurs.graph.layers import FrozenNorm
from secateurs.graph.node_info import dims_of, info, shape_of


def call_module_(
    module: fx.GraphModule, node: fx.Node, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> None:
    """Turn `node` into a call of `layer`, which is stored in the submodule that made the call."""
    layer.train(module.training)
    name = _owner_of(module, layer) or free_name(
        module, ".".join(part for part in (module_path(node), call_word(node)) if part)
    )
    if name in dict(module.named_modules()):
        for child, part in module.get_submodule(name).named_children():
            layer.add_module(child, part)  # the owner of the weights may hold other layers too
    module.add_submodule(name, layer)
    node.op, node.target, node.args, node.kwargs = "call_module", name, args, kwargs or {}


def _owner_of(module: fx.GraphModule, layer: nn.Module) -> str:
    """Return the path of the submodule that holds the tensors of a new layer and no others; '' if there is none.

    The layer takes its place, so that parameters keep their names.
    """
    wanted = {id(t): name for name, t in [*layer.named_parameters(), *layer.named_buffers()]}
    for path, part in module.named_modules() if wanted else ():
        own = {**part._parameters, **part._buffers}
        held = {name: t for name, t in own.items() if t is not None and name != "num_batches_tracked"}
        if path and held and type(part) is nn.Module and all(wanted.get(id(t)) == name for name, t in held.items()):
            missing = {name for i, name in wanted.items() if i not in {id(t) for t in held.values()}}
            return path if missing <= {"num_batches_tracked", "bias"} else ""
    return ""


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """An argument of a call, given by position or by name."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def _held(module: fx.GraphModule, value: Any) -> Tensor | None:
    """Return the parameter or buffer that an argument reads from the model; None if it is computed or read elsewhere too."""
    if not isinstance(value, fx.Node) or value.op != "get_attr" or len(value.users) != 1:
        return None
    *path, name = str(value.target).split(".")
    found = getattr(module.get_submodule(".".join(path)), name)
    return found if isinstance(found, Tensor) else None


def _build_conv(kind: type[Any], transposed: bool) -> Callable[[fx.GraphModule, fx.Node], nn.Module | None]:
    names = ["stride", "padding", "dilation", "groups"]
    if transposed:
        names = ["stride", "padding", "output_padding", "groups", "dilation"]
    defaults: dict[str, Any] = {"stride": 1, "padding": 0, "output_padding": 0, "groups": 1, "dilation": 1}

    def build(module: fx.GraphModule, node: fx.Node) -> nn.Module | None:
        weight, bias = _held(module, argument(node, 1, "weight")), argument(node, 2, "bias")
        options = {name: argument(node, 3 + i, name, defaults[name]) for i, name in enumerate(names)}
        held_bias = None if bias is None else _held(module, bias)
        if weight is None or (bias is not None and held_bias is None) or has_nodes(options):
            return None
        inner, outer = weight.shape[1] * options["groups"], weight.shape[0]
        if transposed:
            inner, outer = outer, inner
        layer = kind(inner, outer, tuple(weight.shape[2:]), bias=bias is not None, device="meta", **options)
        return _with_tensors(layer, weight=weight, bias=held_bias)

    return build


def _build_linear(module: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    weight, bias = _held(module, argument(node, 1, "weight")), argument(node, 2, "bias")
    held_bias = None if bias is None else _held(module, bias)
    if weight is None or weight.dim() != 2 or (bias is not None and held_bias is None):
        return None
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    return _with_tensors(layer, weight=weight, bias=held_bias)


def _build_prelu(module: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    weight = _held(module, argument(node, 1, "weight"))
    return None if weight is None else _with_tensors(nn.PReLU(weight.numel(), device="meta"), weight=weight)


def _build_batch_norm(module: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    names = ["running_mean", "running_var", "weight", "bias"]
    if node.target is torch.batch_norm:
        names = [*names[2:], *names[:2]]
    given = {name: argument(node, 1 + i, name) for i, name in enumerate(names)}
    held = {name: None if value is None else _held(module, value) for name, value in given.items()}
    defaults = {"training": False, "momentum": 0.1, "eps": 1e-5}
    options = {name: argument(node, 5 + i, name, default) for i, (name, default) in enumerate(defaults.items())}
    if any(given[n] is not None and held[n] is None for n in names) or has_nodes(options):
        return None
    shape = shape_of(argument(node, 0, "input")).dims or ()
    batch_only = held["running_mean"] is None and held["running_var"] is None
    if not info(node).get("follows_mode") and not batch_only:
        if options["training"] or held["running_mean"] is None or held["running_var"] is None:
            return None  # no module updates statistics in eval mode
        return FrozenNorm(options["eps"], **held)  # type: ignore[arg-type]  # statistics were found above
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}.get(len(shape))
    if kind is None:
        return None  # torch has no module for tensors of more axes
    affine = held["weight"] is not None
    layer = kind(shape[1], options["eps"], options["momentum"], affine, track_running_stats=not batch_only, device="meta")
    if layer.num_batches_tracked is not None and held["running_mean"] is not None:
        layer.num_batches_tracked = torch.zeros((), dtype=torch.long, device=held["running_mean"].device)
    if held["weight"] is not None and held["bias"] is None:
        held["bias"] = torch.zeros_like(held["weight"])
    return _with_tensors(
        layer, **{name: tensor for name, tensor in held.items() if name in ("weight", "bias") or not batch_only}
    )


def _build_instance_norm(module: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    """An nn.InstanceNorm with weights; one without is left to its rule, one with statistics to none."""
    given = {name: argument(node, i, name) for i, name in enumerate(("running_mean", "running_var", "weight", "bias"), 1)}
    weight, bias = _held(module, given["weight"]), _held(module, given["bias"])
    options = {"eps": argument(node, 7, "eps", 1e-5)}
    if given["running_mean"] is not None or weight is None or bias is None or has_nodes(options):
        return None
    rank = len(shape_of(argument(node, 0, "input")).dims or ())
    kind = {3: nn.InstanceNorm1d, 4: nn.InstanceNorm2d, 5: nn.InstanceNorm3d}.get(rank)
    return kind and _with_tensors(kind(len(weight), affine=True, device="meta", **options), weight=weight, bias=bias)


def _build_norm(kind: type[Any], size: str) -> Callable[[fx.GraphModule, fx.Node], nn.Module | None]:
    """`size` is the argument of the function and of the class that comes first: the normalised shape, or the groups."""
    names = ["weight"] if kind is nn.RMSNorm else ["weight", "bias"]

    def build(module: fx.GraphModule, node: fx.Node) -> nn.Module | None:
        given = {name: argument(node, 2 + i, name) for i, name in enumerate(names)}
        held = {name: None if value is None else _held(module, value) for name, value in given.items()}
        first, eps = argument(node, 1, size), argument(node, 2 + len(names), "eps", None if kind is nn.RMSNorm else 1e-5)
        if any(given[n] is not None and held[n] is None for n in names) or has_nodes({"size": first, "eps": eps}):
            return None
        if held["weight"] is None and any(value is not None for value in held.values()):
            return None
        affine = held["weight"] is not None
        if kind is nn.GroupNorm:
            channels = dims_of(argument(node, 0, "input"))[1]
            layer = kind(first, channels, eps, affine, device="meta")
        else:
            layer = kind(tuple(first), eps, affine, device="meta")
        if affine and held.get("bias") is None and "bias" in names:
            layer.register_parameter("bias", None)
        return _with_tensors(layer, **held)

    return build


def has_nodes(options: dict[str, Any]) -> bool:
    """Whether a value, or one in a tuple or list of values, is computed in the graph."""
    return any(isinstance(leaf, fx.Node) for v in options.values() for leaf in (v if isinstance(v, tuple | list) else [v]))


def _with_tensors(layer: nn.Module, **tensors: Tensor | None) -> nn.Module:
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if name in layer._buffers:
            layer._buffers[name] = tensor
        else:
            layer._parameters[name] = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor)
    return layer


BUILDERS: dict[Any, Callable[[fx.GraphModule, fx.Node], nn.Module | None]] = {
    torch.conv1d: _build_conv(nn.Conv1d, False),
    torch.conv2d: _build_conv(nn.Conv2d, False),
    torch.conv3d: _build_conv(nn.Conv3d, False),
    torch.conv_transpose1d: _build_conv(nn.ConvTranspose1d, True),
    torch.conv_transpose2d: _build_conv(nn.ConvTranspose2d, True),
    torch.conv_transpose3d: _build_conv(nn.ConvTranspose3d, True),
    F.linear: _build_linear,
    F.batch_norm: _build_batch_norm,
    torch.batch_norm: _build_batch_norm,
    F.instance_norm: _build_instance_norm,
    **dict.fromkeys((F.layer_norm, torch.layer_norm), _build_norm(nn.LayerNorm, "normalized_shape")),
    **dict.fromkeys((F.group_norm, torch.group_norm), _build_norm(nn.GroupNorm, "num_groups")),
    **dict.fromkeys((F.rms_norm, torch.rms_norm), _build_norm(nn.RMSNorm, "normalized_shape")),
    torch.prelu: _build_prelu,
}
