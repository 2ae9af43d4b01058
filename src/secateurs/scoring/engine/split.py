"""The two parts of a split network as private copies: in eval mode, BatchNorm folded, nothing shared with the user's module."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from secateurs._util.modules import Device, device_of
from secateurs.errors import InvalidInput
from secateurs.graph.channels import free_name
from secateurs.graph.masking import Split
from secateurs.graph.trace import Shape

READERS = (nn.Conv2d, nn.Linear)


@dataclass(frozen=True)
class SplitNetwork:
    """Prefix and suffix of a network, prepared once for a site; `names` are the parameters and buffers of the suffix."""

    prefix: fx.GraphModule
    suffix: fx.GraphModule
    axis: int
    channels: int
    device: torch.device
    batching: Batching
    names: Mapping[str, Tensor]  # as the user's module names them, before any folding
    dtype: torch.dtype
    layout: torch.memory_format  # of images
    fill: Tensor | None = None  # (C,) what a masked channel holds instead of zero

    def laid_out(self, value: Any) -> Any:
        """Images in the layout of the network's weights; anything else as it is."""
        is_image = isinstance(value, Tensor) and value.ndim == 4
        return value.contiguous(memory_format=self.layout) if is_image else value


def prepare(
    split: Split, inputs: Tensor, *, channels: int, device: Device, unfolded: Collection[str], fill: Tensor | None
) -> SplitNetwork:
    """Copy both parts to `device` and fold what can be folded; `inputs` are a few examples as the network takes them."""
    prefix, suffix = (copy.deepcopy(part).eval().requires_grad_(False) for part in (split.prefix, split.suffix))
    place = _home(split) if device is None else torch.device(device)
    dtype = _dtype(split)
    layout = _layout(place, dtype)
    for part in (prefix, suffix):
        part.to(place)
    names = {**dict(suffix.named_parameters(remove_duplicate=False)), **dict(suffix.named_buffers(remove_duplicate=False))}
    with torch.no_grad():
        batching = probe(prefix, suffix, inputs.to(place))
        for part in (prefix, suffix):
            fold_norms_(part, unfolded)
            part.to(memory_format=layout)  # type: ignore[call-overload]  # the stubs know only the form with a dtype
    fill = None if fill is None else fill.detach().to(place)
    return SplitNetwork(prefix, suffix, split.axis, channels, place, batching, names, dtype, layout, fill)


def _home(split: Split) -> torch.device:
    """Where the network lies: a part without weights lies where the other one does."""
    owner = split.suffix if any(True for _ in split.suffix.parameters()) else split.prefix
    return device_of(owner)


def _dtype(split: Split) -> torch.dtype:
    """Of the network's first floating-point weight; float32 if it has none."""
    tensors = (*split.suffix.parameters(), *split.prefix.parameters())
    return next((t.dtype for t in tensors if t.is_floating_point()), torch.float32)


def _layout(device: torch.device, dtype: torch.dtype) -> torch.memory_format:
    """Channels next to each other where convolutions want that: oneDNN on a CPU, tensor cores for half precision."""
    on_cpu = device.type == "cpu" and dtype != torch.float64 and has_onednn()
    halves = device.type == "cuda" and dtype in (torch.float16, torch.bfloat16)
    return torch.channels_last if on_cpu or halves else torch.contiguous_format


def shallow_clone(module: fx.GraphModule) -> fx.GraphModule:
    """A copy with modules and graph of its own and the same tensors, for a thread of its own or to be rewritten."""
    tensors: list[Tensor] = [*module.parameters(), *module.buffers()]
    copied = copy.deepcopy(module, {id(t): t for t in tensors})
    for old, new in zip(module.graph.nodes, copied.graph.nodes, strict=True):
        new.meta = dict(old.meta)
    return copied


def readers(suffix: fx.GraphModule, axis: int) -> list[fx.Node]:
    """The layers that alone read the site, if each takes its channels by one axis of its weight; otherwise none."""
    site = next(iter(suffix.graph.nodes))
    nodes = list(site.users)
    return nodes if nodes and all(_reads_by_weight(suffix, node, axis) for node in nodes) else []


def _reads_by_weight(suffix: fx.GraphModule, node: fx.Node, axis: int) -> bool:
    layer = called(suffix, node)
    if type(layer) not in READERS or len(node.args) != 1 or node.kwargs or layer._forward_hooks or layer._forward_pre_hooks:
        return False
    dims = dims_of(node.all_input_nodes[0])
    if dims is None or (isinstance(layer, nn.Conv2d) and layer.groups != 1):
        return False
    wanted = 1 if isinstance(layer, nn.Conv2d) else len(dims) - 1
    return axis == wanted and len(_owners(suffix, layer.weight)) == 1 and _calls(suffix, layer) == 1


def _owners(suffix: fx.GraphModule, tensor: Tensor) -> set[int]:
    """The modules that hold `tensor` among those that the graph calls."""
    found = {id(m) for node in suffix.graph.nodes for m in _modules(suffix, node) if any(t is tensor for t in _own(m))}
    read = any(n.op == "get_attr" and _attribute(suffix, str(n.target)) is tensor for n in suffix.graph.nodes)
    return found | ({0} if read else set())


def _calls(suffix: fx.GraphModule, layer: nn.Module) -> int:
    return sum(any(m is layer for m in _modules(suffix, node)) for node in suffix.graph.nodes)


def _modules(suffix: fx.GraphModule, node: fx.Node) -> list[nn.Module]:
    module = called(suffix, node)
    return [] if module is None else list(module.modules())


def _own(module: nn.Module) -> Iterator[Tensor]:
    yield from (t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None)


def _attribute(module: nn.Module, path: str) -> Any:
    owner, _, name = path.rpartition(".")
    return getattr(module.get_submodule(owner), name)


Slots = list[tuple[nn.Module, str]]


def slots_of(module: nn.Module, tensor: Tensor) -> Slots:
    """Where in `module` that very tensor is held."""
    return [(m, name) for m in module.modules() for name, t in (*m._parameters.items(), *m._buffers.items()) if t is tensor]


@contextmanager
def swapped_tensors(given: list[tuple[Slots, Tensor]]) -> Iterator[None]:
    """Put each tensor into its slots inside the block; what was there comes back, even after an error."""
    before = [(store, name, store[name]) for slots, _ in given for store, name in map(_store, slots)]
    try:
        for slots, tensor in given:
            for store, name in map(_store, slots):
                store[name] = tensor
        yield
    finally:
        for store, name, tensor in before:
            store[name] = tensor


def _store(slot: tuple[nn.Module, str]) -> tuple[dict[str, Any], str]:
    module, name = slot
    return (module._parameters if name in module._parameters else module._buffers), name


def replacements(parts: SplitNetwork, suffix: fx.GraphModule, given: Mapping[str, Tensor]) -> list[tuple[Slots, Tensor]]:
    """Slots in `suffix`, a twin of the prepared one, for tensors named as in the user's module."""
    return [(slots_of(suffix, parts.names[name]), tensor) for name, tensor in given.items()]


def check_replacements(parts: SplitNetwork, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the network's device and in its precision; `InvalidInput` for names that cannot be replaced."""
    checked = {}
    for name, tensor in given.items():
        known = parts.names.get(name)
        if known is None:
            raise InvalidInput(
                f"weights: {name!r} is no parameter or buffer of what lies behind the site, so no mask can change it. "
                f"Give names of graph.module.state_dict()."
            )
        if not _owners(parts.suffix, known):
            raise InvalidInput(
                f"weights: {name!r} has been folded with its BatchNorm and has no value of its own. Name its module, and the "
                f"BatchNorm's, in split_for(..., unfolded=[...])."
            )
        if tensor.shape != known.shape:
            raise InvalidInput(f"weights: {name!r} of shape {tuple(tensor.shape)}, wanted {tuple(known.shape)}.")
        checked[name] = tensor.detach().to(known.device, known.dtype)
    return checked


TOLERANCE = {torch.float64: 1e-9}  # of the largest output; 1e-4 in other precisions


@dataclass(frozen=True)
class Batching:
    """What was seen when two and three examples were run."""

    carried: tuple[bool, ...]  # which of the carried values have a row for every example
    apart: bool  # every example can be run apart from the others: all outputs have its row, which no other one changes


def probe(prefix: fx.GraphModule, suffix: fx.GraphModule, inputs: Tensor) -> Batching:
    """Run the first two and the first three of `inputs` (at least one) and see what changes; notes shapes at all nodes."""
    rows = torch.arange(3, device=inputs.device) % len(inputs)
    try:
        seen = [_Seen(prefix, suffix, inputs[rows[:count]]) for count in (2, 3)]
    except Exception:  # made for batches of one size only: whatever it raised, it is run as it is asked for and no other way
        return Batching((), False)
    two, three = seen
    carried = tuple(_is_row(a, 2) and _is_row(b, 3) for a, b in zip(two.carried, three.carried, strict=True))
    fixed = all(isinstance(c, Tensor) for c in three.carried)  # a size that is carried is that of the whole batch
    return Batching(carried, fixed and _is_row(two.activations, 2) and _same_rows(two.outputs, three.outputs))


class _Seen:
    def __init__(self, prefix: fx.GraphModule, suffix: fx.GraphModule, inputs: Tensor) -> None:
        self.activations, *self.carried = _Noting(prefix).run(inputs)
        self.outputs = _Noting(suffix).run(self.activations, *self.carried)


class _Noting(fx.Interpreter):
    """Runs a graph and writes down the shape of what each node gives."""

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        n.meta["shape"] = Shape(tuple(result.shape) if isinstance(result, Tensor) else None)
        return result


def _is_row(value: Any, count: int) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and len(value) == count


def _same_rows(two: Any, three: Any) -> bool:
    """Whether both are made of tensors with a row for each example, and the first two rows agree."""
    pairs = list(zip(pytree.tree_leaves(two), pytree.tree_leaves(three), strict=True))
    return all(_is_row(a, 2) and _is_row(b, 3) and close(a, b[:2]) for a, b in pairs)


def close(one: Any, other: Any) -> bool:
    """Whether all tensors in two outputs are the same up to rounding."""
    pairs = zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True)
    return all(_close(a, b) for a, b in pairs)


def _close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or not one.is_floating_point():
        return one.shape == other.shape and bool(torch.equal(one, other))
    finite = other[torch.isfinite(other)].abs()
    scale = float(finite.max()) if finite.numel() else 1.0
    return torch.allclose(one, other, rtol=0, atol=TOLERANCE.get(one.dtype, 1e-4) * scale, equal_nan=True)


def cut(values: tuple[Any, ...], rowed: tuple[bool, ...], start: int, stop: int) -> tuple[Any, ...]:
    """The rows from `start` to `stop` of each value that has rows; the others whole."""
    return tuple(v[start:stop] if has else v for v, has in zip(values, rowed, strict=True))


def stacked(values: tuple[Any, ...], rowed: tuple[bool, ...], times: int) -> tuple[Any, ...]:
    """Each value that has rows repeated as a whole `times` times."""
    return tuple(_repeated(v, times) if has else v for v, has in zip(values, rowed, strict=True))


def _repeated(value: Tensor, times: int) -> Tensor:
    return value.expand(times, *value.shape).flatten(0, 1)


def joined(parts: list[Any]) -> Any:
    """Outputs for some examples each, as the outputs for all of them."""
    if len(parts) == 1:
        return parts[0]
    return _over_leaves(lambda leaves: torch.cat(leaves), parts)


def unstacked(outputs: Any, times: int) -> list[Any]:
    """Outputs of `times` stacked batches, batch by batch."""
    if times == 1:
        return [outputs]
    return [pytree.tree_map(lambda leaf, k=k: leaf.unflatten(0, (times, -1))[k], outputs) for k in range(times)]


def _over_leaves(function: Callable[[list[Tensor]], Tensor], parts: list[Any]) -> Any:
    leaves = [pytree.tree_leaves(part) for part in parts]
    return pytree.tree_unflatten([function(list(row)) for row in zip(*leaves, strict=True)], pytree.tree_structure(parts[0]))


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
    shallow_clone = _with_bias(layer)
    with torch.no_grad():
        shallow_clone.weight = nn.Parameter((weight.double() * scale.view(along)).to(weight.dtype), requires_grad=False)
        shallow_clone.bias = nn.Parameter(shift.to(weight.dtype), requires_grad=False)
    return shallow_clone.eval()


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
