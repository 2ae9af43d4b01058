"""The two parts of a split network as private copies: in eval mode, BatchNorm folded, nothing shared with the user's module."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from secateurs.engine.batching import Batching, probe
from secateurs.engine.folding import called, dims_of, fold_norms_, has_onednn
from secateurs.errors import InvalidInput
from secateurs.evaluate import Device
from secateurs.masking import Split, device_of

READERS = (nn.Conv2d, nn.Linear)


@dataclass(frozen=True)
class Parts:
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
) -> Parts:
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
    return Parts(prefix, suffix, split.axis, channels, place, batching, names, dtype, layout, fill)


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


def twin(module: fx.GraphModule) -> fx.GraphModule:
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
def holding(given: list[tuple[Slots, Tensor]]) -> Iterator[None]:
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


def replacements(parts: Parts, suffix: fx.GraphModule, given: Mapping[str, Tensor]) -> list[tuple[Slots, Tensor]]:
    """Slots in `suffix`, a twin of the prepared one, for tensors named as in the user's module."""
    return [(slots_of(suffix, parts.names[name]), tensor) for name, tensor in given.items()]


def check_replacements(parts: Parts, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
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
