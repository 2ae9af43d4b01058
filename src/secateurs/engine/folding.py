"""BatchNorm folded into the layer before it: one op less, the same function in eval mode up to rounding."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx, nn

from secateurs.graph import Shape
from secateurs.naming import free_name

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def fold_norms_(module: fx.GraphModule, unfolded: Collection[str] = ()) -> None:
    """Let each convolution or linear layer whose output only a BatchNorm reads do that BatchNorm's work as well.

    The folded layers are new modules, so that tied weights and layers called twice stay what they are. Modules named in
    `unfolded` keep their own parameters. `module` must be private: its graph is rewritten.
    """
    for node in list(module.graph.nodes):
        norm = called(module, node)
        if type(norm) not in NORMS or not _is_plain(norm) or str(node.target) in unfolded or norm.running_mean is None:
            continue
        source = node.all_input_nodes[0]
        layer = called(module, source)
        if len(source.users) != 1 or layer is None or str(source.target) in unfolded or not _takes(layer, norm, source):
            continue
        name = free_name(module, f"folded_{source.name}")
        module.add_submodule(name, folded(layer, norm))
        source.target = name
        node.replace_all_uses_with(source)
        module.graph.erase_node(node)
    module.recompile()


def has_onednn() -> bool:
    """Whether convolutions on the CPU are oneDNN's."""
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]  # torch has no types here


def called(module: fx.GraphModule, node: fx.Node) -> Any:
    """The submodule that `node` calls, or None."""
    return module.get_submodule(str(node.target)) if node.op == "call_module" else None


def dims_of(node: fx.Node) -> tuple[int, ...] | None:
    """The noted shape of the tensor that `node` gives; None if none was noted."""
    shape = node.meta.get("shape")
    return shape.dims if isinstance(shape, Shape) else None


def folded(layer: nn.Module, norm: nn.Module) -> nn.Module:
    """A layer that does what `layer` and then `norm` do in eval mode; worked out in float64."""
    weight, bias = _tensor(layer.weight), getattr(layer, "bias", None)
    mean, variance = _tensor(norm.running_mean).double(), _tensor(norm.running_var).double()
    scale = torch.rsqrt(variance + float(norm.eps))  # type: ignore[arg-type]  # modules hold untyped attributes
    scale = scale if norm.weight is None else scale * _tensor(norm.weight).double()
    shift = (0 if bias is None else bias.double()) - mean
    shift = shift * scale if norm.bias is None else shift * scale + _tensor(norm.bias).double()
    along = [1] * weight.ndim
    along[1 if type(layer) in TRANSPOSED else 0] = -1
    twin = _with_bias(layer)
    with torch.no_grad():
        twin.weight = nn.Parameter((weight.double() * scale.view(along)).to(weight.dtype), requires_grad=False)
        twin.bias = nn.Parameter(shift.to(weight.dtype), requires_grad=False)
    return twin.eval()


def _with_bias(layer: nn.Module) -> nn.Module:
    """A layer of the same kind and size on the meta device, with a bias; its weights are still to be set."""
    if isinstance(layer, nn.Linear):
        return nn.Linear(layer.in_features, layer.out_features, device="meta")
    names = ["in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode"]
    names += ["output_padding"] if type(layer) in TRANSPOSED else []
    options = {name: getattr(layer, name) for name in names}
    return type(layer)(**options, device="meta")


def _takes(layer: nn.Module, norm: nn.Module, source: fx.Node) -> bool:
    """Whether the norm scales what are the layer's own output channels."""
    kind = type(layer)
    if not _is_plain(layer):
        return False
    if kind is nn.Linear:  # of three axes, BatchNorm1d would scale the middle one and not the linear layer's own
        return type(norm) is nn.BatchNorm1d and len(dims_of(source) or ()) == 2
    return kind in CONVOLUTIONS or (kind in TRANSPOSED and bool(layer.groups == 1))


def _is_plain(module: nn.Module) -> bool:
    """No hooks that would see something else."""
    return not (module._forward_hooks or module._forward_pre_hooks)


def _tensor(value: object) -> Tensor:
    assert isinstance(value, Tensor)
    return value.detach()
