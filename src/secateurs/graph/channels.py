"""Channels as bool vectors over an axis, and the index arithmetic between a wide axis and a narrow one.

A layout says which channels of the original axis a tensor still carries, in ascending order: bool (C,), True = there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx, nn

Index = Tensor | None
"""Kept positions along one dimension of a tensor; None keeps all of them."""

Kept = tuple[Index, ...]
"""One index a dimension (see `take`)."""


def ids(layout: Tensor) -> Tensor:
    """Ascending positions of the True entries of a bool vector."""
    return layout.nonzero().flatten()


def none_of(count: int) -> Tensor:
    """A vector of `count` channels, none of them set."""
    return torch.zeros(count, dtype=torch.bool)


def all_of(count: int) -> Tensor:
    """A vector of `count` channels, all of them set."""
    return torch.ones(count, dtype=torch.bool)


def positions(source: Tensor, target: Tensor) -> Tensor:
    """For each channel of the layout `target`: its position in a tensor laid out as `source`, or -1 where it is missing."""
    place = torch.cumsum(source.long(), 0) - 1
    return torch.where(source, place, torch.full_like(place, -1))[target]


def take(tensor: Tensor, kept: Kept) -> Tensor:
    """The part of `tensor` that `kept` names, dimension by dimension.

    A 1-d index selects along its dimension. A 2-d index, allowed for dimension 1, gives every row (after selection)
    its own columns: what a grouped convolution needs whose groups keep different channels.
    """
    for dim, index in enumerate(kept):
        if index is None:
            continue
        index = index.to(tensor.device)
        if index.dim() == 1:
            tensor = tensor.index_select(dim, index)
        else:
            shape = (*index.shape, *tensor.shape[2:])
            tensor = tensor.gather(1, index.reshape(*index.shape, *[1] * (tensor.dim() - 2)).expand(shape))
    return tensor


def compose(first: Tensor | None, then: Sequence[int] | Tensor) -> Tensor:
    """Original ids after two selections: `first` picked from the original axis, `then` from what was left."""
    then = torch.as_tensor(then, dtype=torch.long)
    return then if first is None else first[then]


def module_path(node: fx.Node) -> str:
    """Path of the submodule whose forward made `node`, '' for the model's own."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [str(entry[0]) if isinstance(entry, tuple) else str(entry) for entry in stack.values()]
    return paths[-1] if paths else ""


def call_word(node: fx.Node) -> str:
    """The bare name of what a node calls: 'add', 'view'."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "op")


def name_of_alignment(source: fx.Node, reader: fx.Node | None = None) -> str:
    """What an alignment of `source` (for `reader`) is called; one that takes the place of another does not add to its name."""
    name = source.name
    while name.startswith("align_"):
        name = name.removeprefix("align_").partition("_to_")[0]
    return f"align_{name}" if reader is None else f"align_{name}_to_{reader.name}"


def free_name(module: nn.Module, wanted: str) -> str:
    """`wanted`, or `wanted` with a number behind it where something of that path exists already."""
    name, count = wanted, 0
    while _taken(module, name):
        count += 1
        name = f"{wanted}_{count}"
    return name


def _taken(module: nn.Module, path: str) -> bool:
    for part in path.split("."):
        if not hasattr(module, part):
            return False
        found = getattr(module, part)
        if not isinstance(found, nn.Module):
            return True
        module = found
    return True
