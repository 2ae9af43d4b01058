"""Channels as bool vectors over an axis, and the index arithmetic between a wide axis and a narrow one.

A layout says which channels of the original axis a tensor still carries, in ascending order: bool (C,), True = present.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import torch
from torch import Tensor, fx, nn

from secateurs.graph.node_info import info

Index = Tensor | None
"""Kept positions along one dimension of a tensor; None keeps all of them."""

Kept = tuple[Index, ...]
"""One index a dimension (see `take`)."""


def ids(layout: Tensor) -> Tensor:
    """Return the ascending positions of the True entries of a bool vector."""
    return layout.nonzero().flatten()


def none_of(count: int) -> Tensor:
    """Return a vector of `count` channels, none of them set."""
    return torch.zeros(count, dtype=torch.bool)


def all_of(count: int) -> Tensor:
    """Return a vector of `count` channels, all of them set."""
    return torch.ones(count, dtype=torch.bool)


def positions(source: Tensor, target: Tensor) -> Tensor:
    """Return the position of each channel of the layout `target` in a tensor of layout `source`, -1 where it is missing."""
    place = torch.cumsum(source.long(), 0) - 1
    return torch.where(source, place, torch.full_like(place, -1))[target]


def take(tensor: Tensor, kept: Kept) -> Tensor:
    """Select the entries `kept` of `tensor`, dimension by dimension.

    A 1-d index selects along its dimension. A 2-d index, allowed for dimension 1, gives every row (after selection)
    its own columns: a grouped convolution needs it if its groups keep different channels.
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
    """Return original ids after two selections: `first` from the original axis (None: all), `then` from its result."""
    then = torch.as_tensor(then, dtype=torch.long)
    return then if first is None else first[then]


def compose_kept(first: Kept, then: Kept) -> Kept:
    """Return what two selections of entries of a tensor select together: `first`, and `then` from its result."""
    composed: list[Index] = []
    for dim, (one, other) in enumerate(zip_longest(first, then)):
        if one is not None and one.dim() == 2 and then and then[0] is not None:
            one = one[then[0]]  # columns of each row that is left
        if one is None or other is None:
            composed.append(other if one is None else one)
        elif one.dim() == 1:
            composed.append(one[other])
        else:
            composed.append(one[:, other] if other.dim() == 1 else one.gather(dim, other))
    return tuple(composed)


def module_path(node: fx.Node) -> str:
    """Return the path of the submodule whose forward made `node`, '' for the model itself."""
    stack = info(node).get("nn_module_stack") or {}
    paths = [str(entry[0]) if isinstance(entry, tuple) else str(entry) for entry in stack.values()]
    return paths[-1] if paths else ""


def call_word(node: fx.Node) -> str:
    """Return the bare name of the function or method that a node calls: 'add', 'view'."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "op")


def name_of_alignment(source: fx.Node, user: fx.Node | None = None) -> str:
    """Return the name of an alignment of `source` (for `user`); the name of an alignment of an alignment does not grow."""
    name = source.name
    while name.startswith("align_"):
        name = name.removeprefix("align_").partition("_to_")[0]
    return f"align_{name}" if user is None else f"align_{name}_to_{user.name}"


def free_name(module: nn.Module, wanted: str) -> str:
    """Return `wanted`, with a number appended if the path is taken."""
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
