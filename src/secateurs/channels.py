"""Channels as bool vectors over an axis, and the index arithmetic between a wide axis and a narrow one.

A layout says which channels of the original axis a tensor still carries, in ascending order: bool (C,), True = there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

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
