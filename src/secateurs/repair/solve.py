"""The weights that best reproduce a layer's former output from fewer features: ridge regression on second moments, float64.

The ridge pulls towards the weights that the layer has, each feature measured by its own size: an infinite one changes nothing.
It is applied a few times over, each time from where the last one ended, so that a small one costs no exactness where the
features determine the weights, and still tames those directions of which the examples tell nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from secateurs.channels import ids

RIDGES = (1e-10, 1e-3, 1e-1, 10.0, math.inf)
"""Tried in this order, on examples held back, until one is no better than the one before: mostly two are."""

ROUNDS = 3
WORTH = 1e-3  # a larger ridge must lower the error by this share: below it, exactness counts for more
ROUNDING = 1e-13  # of the targets' energy: smaller errors are not told apart


@dataclass(frozen=True)
class Moments:
    """Sums over examples and places of products of features x (p,), the last of which is 1, and targets y (O,), by group."""

    gram: Tensor  # (G, p, p): Σ x xᵀ
    cross: Tensor  # (G, p, O): Σ x yᵀ
    energy: Tensor  # (G, O): Σ y²

    def __sub__(self, other: Moments) -> Moments:
        """Without the examples of the other."""
        return Moments(self.gram - other.gram, self.cross - other.cross, self.energy - other.energy)

    @property
    def count(self) -> float:
        """Examples times places."""
        return float(self.gram[0, -1, -1])

    @property
    def spread(self) -> Tensor:
        """Squared distances of the targets from their means, (G, O)."""
        return self.energy - self.cross[:, -1] ** 2 / max(self.count, 1.0)

    def errors(self, weights: Tensor, kept: Tensor) -> Tensor:
        """Squared errors of `weights` (G, p, O) from the features in `kept` (G, p) alone, for each filter (G, O)."""
        used = weights * kept[..., None]
        squares = ((self.gram @ used) * used).sum(1)
        return (self.energy - 2 * (self.cross * used).sum(1) + squares).clamp_min(0.0)


def solve(moments: Moments, start: Tensor, kept: Tensor, ridge: float) -> Tensor:
    """Weights (G, p, O) that fit the targets from the features in `kept` (G, p); the rows of the others are as in `start`."""
    if math.isinf(ridge):
        return start
    result = start.clone()
    for group in range(len(start)):
        chosen = ids(kept[group])
        gram = moments.gram[group][chosen][:, chosen]
        wanted = moments.cross[group][chosen] - gram @ start[group][chosen]
        result[group, chosen] += _ridge_step(gram, wanted, ridge)
    return result


def _ridge_step(gram: Tensor, wanted: Tensor, ridge: float) -> Tensor:
    size = gram.diagonal().clamp_min(0.0).sqrt()
    scale = 1 / torch.where(size > 0, size, 1.0)
    gram = gram * scale[:, None] * scale  # correlations: no feature counts more for being larger
    wanted = wanted * scale[:, None]
    factor = _cholesky(gram, ridge)
    step = torch.zeros_like(wanted)
    for _ in range(ROUNDS):
        step += torch.cholesky_solve(wanted - gram @ step, factor)
    return step * scale[:, None]


def _cholesky(gram: Tensor, ridge: float) -> Tensor:
    """The factor of the correlations plus a ridge, which grows until rounding no longer spoils it."""
    while True:
        regular = gram.clone()
        regular.diagonal().add_(ridge)
        factor, failed = torch.linalg.cholesky_ex(regular)
        if not bool(failed):
            found: Tensor = factor
            return found
        ridge = max(10 * ridge, 1e-12)


def choose_ridge(fitted: Moments, held: Moments, start: Tensor, kept: Tensor) -> float:
    """The ridge of `RIDGES` whose fit has the smallest error on examples held back."""
    least = ROUNDING * float(held.energy.sum())
    best, error = RIDGES[0], math.inf
    for ridge in RIDGES:
        found = float(held.errors(solve(fitted, start, kept, ridge), kept).sum())
        if found > error * (1 - WORTH) - least:
            break
        best, error = ridge, found
    return best
