"""Structured Optimal Brain Surgeon: filters are eliminated one by one, each time the one that the others best make up for.

Pure maths: one quadratic for every layer that reads the filters. Eliminating a filter fixes the weights of its features at zero
and lets all others take their best values. The error that this adds follows from the inverse Gram matrix, which a block update
then corrects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from secateurs.errors import InvalidInput


@dataclass(frozen=True)
class Quadratic:
    """The error of a layer's weights W around their best values: tr((W - weight)ᵀ gram (W - weight)).

    gram (p, p) must be positive definite, weight is (p, O). `source` (p,) is the filter of each feature; -1 is never removed.
    """

    gram: Tensor
    weight: Tensor
    source: Tensor


@dataclass(frozen=True)
class Elimination:
    """`order` (C,): filters, least important first. `increases` (C,): the error that each elimination added."""

    order: Tensor
    increases: Tensor


def obs_order(quadratics: Sequence[Quadratic], channels: int, *, alone: Tensor | None = None) -> Elimination:
    """Eliminate all `channels` filters greedily by the increase in the sum of the quadratics, float64.

    `alone` (C,) is a further cost of each filter that others cannot make up for.
    """
    for quadratic in quadratics:
        _check(quadratic, channels)
    fixed = torch.zeros(channels, dtype=torch.float64) if alone is None else alone.double()
    surgeons = [_Surgeon(q, channels) for q in quadratics]
    left = torch.ones(channels, dtype=torch.bool)
    order, increases = [], []
    for _ in range(channels):
        costs = fixed + sum((s.costs(left) for s in surgeons), torch.zeros(channels, dtype=torch.float64))
        chosen = int(costs.masked_fill(~left, torch.inf).argmin())
        order.append(chosen)
        increases.append(float(costs[chosen]))
        left[chosen] = False
        for surgeon in surgeons:
            surgeon.eliminate_(chosen)
    return Elimination(torch.tensor(order), torch.tensor(increases, dtype=torch.float64))


def _check(quadratic: Quadratic, channels: int) -> None:
    size = len(quadratic.source)
    if quadratic.gram.shape != (size, size) or len(quadratic.weight) != size:
        raise InvalidInput(
            f"obs: gram of shape {tuple(quadratic.gram.shape)} and weight of shape {tuple(quadratic.weight.shape)} for {size} "
            f"features: wanted ({size}, {size}) and ({size}, filters)."
        )
    if size and not -1 <= int(quadratic.source.min()) <= int(quadratic.source.max()) < channels:
        raise InvalidInput(f"obs: features come from filters -1 (none) to {channels - 1}, got {quadratic.source.tolist()}.")


class _Surgeon:
    """One quadratic during elimination: its inverse Gram matrix and its weights, on the remaining features."""

    def __init__(self, quadratic: Quadratic, channels: int) -> None:
        self.weight = quadratic.weight.double().clone()
        self.inverse = torch.linalg.inv(quadratic.gram.double())
        features = [(quadratic.source == c).nonzero().flatten() for c in range(channels)]
        self.features = features
        # filters with equally many features are solved together
        self.alike = [
            torch.tensor([c for c in range(channels) if len(features[c]) == size])
            for size in sorted({len(f) for f in features} - {0})
        ]

    def costs(self, left: Tensor) -> Tensor:
        """Return tr(W_cᵀ (inverse_cc)⁻¹ W_c) for every remaining filter, (C,); 0 for the others."""
        costs = torch.zeros(len(left), dtype=torch.float64)
        for alike in self.alike:
            present = alike[left[alike]]
            if len(present):
                blocks = torch.stack([self.features[c] for c in present.tolist()])  # (n, k)
                weights = self.weight[blocks]  # (n, k, O)
                inner = self.inverse[blocks[:, :, None], blocks[:, None, :]]
                costs[present] = (weights * torch.linalg.solve(inner, weights)).sum((1, 2))
        return costs

    def eliminate_(self, channel: int) -> None:
        """Fix the filter's features at zero, and update the others."""
        removed = self.features[channel]
        if not len(removed):
            return
        columns = self.inverse[:, removed]
        rows = torch.cat([self.weight[removed], self.inverse[removed]], 1)
        gain = torch.linalg.solve(self.inverse[removed][:, removed], rows)
        filters = self.weight.shape[1]
        self.weight -= columns @ gain[:, :filters]
        self.inverse -= columns @ gain[:, filters:]
