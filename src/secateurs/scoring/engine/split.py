"""A network split at a site, as private copies: in eval mode, BatchNorm folded, nothing shared with the user's module."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval
from torch.utils import _pytree as pytree

from secateurs._util.modules import Device, device_of
from secateurs.errors import InvalidInput
from secateurs.graph.channels import free_name
from secateurs.graph.masking import Split
from secateurs.graph.node_info import Shape, called_module, copy_info_, info

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
TOLERANCE = {torch.float64: 1e-9}  # of the largest output; 1e-4 in other precisions


@dataclass(frozen=True)
class SplitNetwork:
    """Prefix and suffix of a network, prepared for one site."""

    prefix: fx.GraphModule
    suffix: fx.GraphModule
    axis: int
    channels: int
    device: torch.device
    dtype: torch.dtype
    layout: torch.memory_format  # of images
    names: Mapping[str, Tensor]  # the suffix's parameters and buffers before folding, as the user's module names them
    carried_rows: tuple[bool, ...]  # which of the values that pass by the site have a row for every example
    separable: bool  # every output has a row for every example, and no other example changes it
    rows_each: int  # rows of the activations for every example, one after another: windows, frames; 0 if they lie otherwise
    several: bool  # the mask is applied in several places, by the suffix, which takes factors as its last input

    def laid_out(self, value: Any) -> Any:
        """Images in the layout of the network's weights; anything else unchanged."""
        is_image = isinstance(value, Tensor) and value.ndim == 4
        return value.contiguous(memory_format=self.layout) if is_image else value


def prepare(
    split: Split, inputs: tuple[Tensor, ...], *, channels: int, device: Device, unfolded: Collection[str]
) -> SplitNetwork:
    """Copy both parts to `device` and fold their BatchNorms; `inputs`: its arguments for a few examples."""
    prefix, suffix = (copy.deepcopy(part).eval().requires_grad_(False) for part in (split.prefix, split.suffix))
    weights = [*suffix.parameters(), *prefix.parameters()]
    place = next((t.device for t in weights), device_of(prefix)) if device is None else torch.device(device)
    dtype = next((t.dtype for t in weights if t.is_floating_point()), torch.float32)
    # oneDNN on a CPU and tensor cores in half precision compute convolutions fastest with the channels of a pixel side by side
    onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # torch has no types here
    channels_last = place.type == "cpu" and dtype != torch.float64 and bool(onednn)
    channels_last |= place.type == "cuda" and dtype in (torch.float16, torch.bfloat16)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    for part in (prefix, suffix):
        part.to(place)
    names = {**dict(suffix.named_parameters(remove_duplicate=False)), **dict(suffix.named_buffers(remove_duplicate=False))}
    with torch.no_grad():
        factors = (torch.ones(1, channels, device=place, dtype=dtype),) if split.several else ()
        carried_rows, separable, rows_each = _probe(prefix, suffix, tuple(part.to(place) for part in inputs), factors)
        for part in (prefix, suffix):
            fold_norms_(part, unfolded)
            part.to(memory_format=layout)  # type: ignore[call-overload]  # the stubs know only the form with a dtype
    known = (layout, names, carried_rows, separable, rows_each, split.several)
    return SplitNetwork(prefix, suffix, split.axis, channels, place, dtype, *known)


def shallow_clone(module: fx.GraphModule) -> fx.GraphModule:
    """A copy with its own modules and graph but the same tensors, for another thread or to be rewritten."""
    tensors: list[Tensor] = [*module.parameters(), *module.buffers()]
    cloned = copy.deepcopy(module, {id(t): t for t in tensors})
    copy_info_(module.graph, cloned.graph)
    return cloned


def layer_of(module: fx.GraphModule, node: fx.Node) -> Any:
    """The layer that `node` calls, of whatever class; None if it calls something else."""
    return called_module(module, node)


def dims_of(node: fx.Node) -> tuple[int, ...] | None:
    """The recorded shape of the tensor that `node` gives, or None."""
    shape = info(node).get("shape")
    return None if shape is None else shape.dims


# ---- tensors behind the site -----------------------------------------------------------------------------------------


def consumers(suffix: fx.GraphModule, axis: int) -> list[fx.Node]:
    """The nodes that read the site, if all are layers that take its channels by one axis of their own weight; else none."""
    nodes = list(next(iter(suffix.graph.nodes)).users)
    return nodes if all(_reads_by_weight(suffix, node, axis) for node in nodes) else []


def _reads_by_weight(suffix: fx.GraphModule, node: fx.Node, axis: int) -> bool:
    layer = layer_of(suffix, node)
    if type(layer) not in (nn.Conv2d, nn.Linear) or len(node.args) != 1 or node.kwargs or not _is_plain(layer):
        return False
    dims = dims_of(node.all_input_nodes[0])
    if dims is None or (isinstance(layer, nn.Conv2d) and layer.groups != 1):
        return False
    wanted = 1 if isinstance(layer, nn.Conv2d) else len(dims) - 1
    return axis == wanted and _uses(suffix, layer.weight) == 1


def _uses(suffix: fx.GraphModule, tensor: Tensor) -> int:
    """How many nodes of the graph compute with `tensor`."""

    def reads(node: fx.Node) -> bool:
        if node.op == "get_attr":
            return attrgetter(str(node.target))(suffix) is tensor
        module = layer_of(suffix, node)
        return module is not None and any(t is tensor for t in (*module.parameters(), *module.buffers()))

    return sum(map(reads, suffix.graph.nodes))


def names_in(module: nn.Module, tensor: Tensor) -> list[str]:
    """All names under which `module` holds that very tensor."""
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return [name for name, held in named if held is tensor]


def check_replacements(network: SplitNetwork, replaced: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the network's device and in its precision; `InvalidInput` for names that cannot be replaced."""
    checked = {}
    for name, tensor in replaced.items():
        known = network.names.get(name)
        if known is None:
            raise InvalidInput(
                f"weights: {name!r} is not a parameter or buffer behind the site, so no mask can change it. "
                f"Give names of graph.module.state_dict()."
            )
        if not _uses(network.suffix, known):
            raise InvalidInput(
                f"weights: {name!r} has been folded with its BatchNorm and has no value of its own. Name its module, and the "
                f"BatchNorm's, in split_for(..., unfolded=[...])."
            )
        if tensor.shape != known.shape:
            raise InvalidInput(f"weights: {name!r} of shape {tuple(tensor.shape)}, wanted {tuple(known.shape)}.")
        checked[name] = tensor.detach().to(known.device, known.dtype)
    return checked


# ---- batching --------------------------------------------------------------------------------------------------------


class _ShapeRecorder(fx.Interpreter):
    """Runs a graph and records the shape of what each node gives."""

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        info(n)["shape"] = Shape(tuple(result.shape) if isinstance(result, Tensor) else None)
        return result


def _probe(
    prefix: fx.GraphModule, suffix: fx.GraphModule, inputs: tuple[Tensor, ...], factors: tuple[Tensor, ...]
) -> tuple[tuple[bool, ...], bool, int]:
    """Run two and three of `inputs` (at least one).

    Returns which carried values have rows, whether examples are separable, and how many rows of the activations each has.
    """

    def run(count: int) -> tuple[Any, list[Any], Any]:
        rows = torch.arange(count, device=inputs[0].device) % len(inputs[0])
        activations, *carried = _ShapeRecorder(prefix).run(*(part[rows] for part in inputs))
        return activations, carried, _ShapeRecorder(suffix).run(activations, *carried, *factors)

    try:
        (activations, carried, outputs), (more, more_carried, more_outputs) = run(2), run(3)
    except Exception:  # made for batches of one size only: whatever it raised, it is run only as it is asked for
        return (), False, 1
    rows = tuple(_is_row(a, 2) and _is_row(b, 3) for a, b in zip(carried, more_carried, strict=True))
    fixed = all(isinstance(value, Tensor) for value in more_carried)  # a size that is carried is that of the whole batch
    pairs = list(zip(_leaves(outputs), _leaves(more_outputs), strict=True))
    alike = all(_is_row(a, 2) and _is_row(b, 3) and close(a, b[:2]) for a, b in pairs)
    each = len(activations) // 2
    in_order = len(activations) == 2 * each and len(more) == 3 * each and close(activations, more[: 2 * each])
    if in_order and factors and alike:
        in_order = _takes_masks_of_examples(suffix, (activations, *carried), factors[0].shape[1])
    return rows, fixed and _is_row(activations, 2) and alike, each if in_order else 0


def _takes_masks_of_examples(suffix: fx.GraphModule, inputs: tuple[Any, ...], channels: int) -> bool:
    """Whether two examples may have factors of their own: at each mask point the first axis must hold the examples in order."""
    own = torch.ones(2, channels, device=inputs[0].device, dtype=inputs[0].dtype)
    own[0, ::2] = own[1, 1::2] = 0
    try:
        together = _leaves(suffix(*inputs, own))
        alone = [_leaves(suffix(*inputs, own[row : row + 1])) for row in range(2)]
    except Exception:  # sizes that do not fit, whatever it raised
        return False
    return all(close(whole[row], part[row]) for row in range(2) for whole, part in zip(together, alone[row], strict=True))


def _is_row(value: Any, count: int) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and len(value) == count


def close(one: Any, other: Any) -> bool:
    """Whether all tensors in two outputs are equal up to rounding."""

    def same(a: Tensor, b: Tensor) -> bool:
        if a.shape != b.shape or not a.is_floating_point():
            return a.shape == b.shape and bool(torch.equal(a, b))
        finite = b[torch.isfinite(b)].abs()
        scale = float(finite.max()) if finite.numel() else 1.0
        return torch.allclose(a, b, rtol=0, atol=TOLERANCE.get(a.dtype, 1e-4) * scale, equal_nan=True)

    return all(same(a, b) for a, b in zip(_leaves(one), _leaves(other), strict=True))


def _leaves(outputs: Any) -> list[Any]:
    """What outputs hold; a field that is left empty does not count."""
    return [leaf for leaf in pytree.tree_leaves(outputs) if leaf is not None]


# ---- BatchNorm folding -----------------------------------------------------------------------------------------------


def fold_norms_(module: fx.GraphModule, unfolded: Collection[str] = ()) -> None:
    """Fold each BatchNorm into the convolution or linear layer before it, where nothing else reads that layer.

    The folded layers are new modules, so that tied weights and layers called twice stay what they are. Modules named in
    `unfolded` keep their own parameters. `module` must be private: its graph is rewritten.
    """
    for node in list(module.graph.nodes):
        norm = layer_of(module, node)
        if type(norm) not in NORMS or not _is_plain(norm) or str(node.target) in unfolded or norm.running_mean is None:
            continue
        source = node.all_input_nodes[0]
        layer = layer_of(module, source)
        if len(source.users) != 1 or layer is None or str(source.target) in unfolded or not _folds(layer, norm, source):
            continue
        name = free_name(module, f"folded_{source.name}")
        module.add_submodule(name, _folded(layer, norm))
        source.target = name
        node.replace_all_uses_with(source)
        module.graph.erase_node(node)
    module.recompile()


def _folded(layer: Any, norm: Any) -> nn.Module:
    """One layer that computes `layer` and then `norm` in eval mode."""
    dtype = layer.weight.dtype
    place = layer.weight.device
    layer, norm = (copy.deepcopy(part).cpu().double() for part in (layer, norm))  # rounded once, at the end
    linear = type(layer) is nn.Linear
    fused: nn.Module = fuse_linear_bn_eval(layer, norm) if linear else fuse_conv_bn_eval(layer, norm, type(layer) in TRANSPOSED)
    return fused.to(place, dtype).requires_grad_(False)


def _folds(layer: nn.Module, norm: nn.Module, source: fx.Node) -> bool:
    """Whether the norm scales the layer's own output channels."""
    kind = type(layer)
    if not _is_plain(layer):
        return False
    if kind is nn.Linear:  # of three axes, BatchNorm1d would scale the middle one and not the linear layer's own
        return type(norm) is nn.BatchNorm1d and len(dims_of(source) or ()) == 2
    return kind in CONVOLUTIONS or (kind in TRANSPOSED and bool(layer.groups == 1))


def _is_plain(module: nn.Module) -> bool:
    """Whether no hook would see something else."""
    return not (module._forward_hooks or module._forward_pre_hooks)
