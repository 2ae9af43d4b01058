"""What a cut writes into the model's own modules: narrower tensors, and the attributes that count them."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from secateurs.compaction.additions import add_bias_
from secateurs.compaction.stored_widths import Write
from secateurs.errors import NotInPlace
from secateurs.graph.plan import Plan
from secateurs.graph.trace import Graph


def find_writes(network: nn.Module, before: Graph, after: Graph, *, everything: bool) -> list[Write]:
    """List what a cut changes in the modules of the graph: other tensors (or all), and the attributes that count them."""
    homes = _homes(network, before.module)
    writes: list[Write] = []
    for path, part in after.module.named_modules():
        old = submodule(before.module, path)
        if old is None:
            continue  # an alignment, which the model has no need of if the trial succeeds
        for name, tensor in [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]:
            there = getattr(old, name, None)
            same = isinstance(there, Tensor) and there.shape == tensor.shape
            home = homes.get(f"{path}.{name}".lstrip("."), (path, name) if there is None else None)  # a bias that was added
            if home is None and not (same and name in part._buffers):  # a constant, which the model computes
                raise NotInPlace(
                    f"{type(network).__name__} cannot be cut in place: it has no parameter {path}.{name} that could be "
                    f"narrowed; its forward computes it. Leave that layer alone (ignore=...), or use the compacted one."
                )
            if home is not None and not same and isinstance(submodule(network, home[0]), nn.MultiheadAttention):
                raise NotInPlace(
                    f"{type(network).__name__} cannot be cut in place: {home[0]!r} is an nn.MultiheadAttention, which "
                    f"computes the width of a head from embed_dim and num_heads. Leave it alone, or use the compacted one."
                )
            # of a normed weight, the norms change where inputs go, and keep their shape
            unchanged = isinstance(there, Tensor) and same and torch.equal(there, tensor)
            if home is not None and (everything or not unchanged):
                writes.append(Write(home[0], home[1], tensor.detach()))
        owner = submodule(network, path)
        for name, value in vars(part).items():
            changed = isinstance(value, int | tuple) and name in vars(old) and vars(old)[name] != value
            if changed and name != "training" and hasattr(owner, name):
                writes.append(Write(path, name, value))
    return writes


def submodule(network: nn.Module, path: str) -> nn.Module | None:
    """The submodule at a path; None where there is none."""
    try:
        return network.get_submodule(path)
    except AttributeError:
        return None


def _homes(network: nn.Module, traced: nn.Module) -> dict[str, tuple[str, str]]:
    """Return where the model holds each tensor of the traced network: under the same name, or the only one of equal values.

    Tracing makes layers of functions that are called with parameters, and parts of torch's attention.
    """
    state = dict([*network.named_parameters(remove_duplicate=False), *network.named_buffers(remove_duplicate=False)])
    ours = dict([*traced.named_parameters(remove_duplicate=False), *traced.named_buffers(remove_duplicate=False)])
    names = {name: name for name in ours if name in state}
    for name in ours.keys() - names.keys():
        alike = [
            n for n in state.keys() - names.keys() if state[n].shape == ours[name].shape and torch.equal(state[n], ours[name])
        ]
        if len(alike) == 1:
            names[name] = alike[0]
    return {name: (home.rpartition(".")[0], home.rpartition(".")[2]) for name, home in names.items()}


def write_(network: nn.Module, writes: list[Write], plan: Plan) -> None:
    """Write tensors and attributes into the model; one of the same shape is copied into the old one, which may be shared."""
    for cut in itertools.chain(*plan.steps):
        for path in cut.biases:
            add_bias_(network, path)
    for write in writes:
        owner: Any = network.get_submodule(write.path)
        old: Any = getattr(owner, write.name, None)
        if not isinstance(write.value, Tensor):
            setattr(owner, write.name, write.value)
        elif isinstance(old, Tensor) and old.shape == write.value.shape:
            with torch.no_grad():
                old.copy_(write.value)
        elif isinstance(old, nn.Parameter):
            narrower = write.value.to(old.device, old.dtype, copy=True)
            setattr(owner, write.name, nn.Parameter(narrower, requires_grad=old.requires_grad))
        else:
            narrower = write.value.to(old.device, old.dtype, copy=True)
            owner.register_buffer(write.name, narrower, persistent=write.name not in owner._non_persistent_buffers_set)
