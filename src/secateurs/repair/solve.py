"""Layers as matrices: for one place of its output a layer reads a row of features, which its weight matrix multiplies.

G groups, p features in a group (the last one is 1, for the bias), O filters in a group. A transposed convolution is an ordinary
one over its input with zeros in between, with its kernel flipped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secateurs._util.modules import accumulation_dtype
from secateurs.graph.channels import ids
from secateurs.graph.flow import ELSEWHERE

_WHOLE = 160  # features whose Gram matrix is one product


@dataclass(frozen=True)
class Patches:
    """Inputs of a layer for each place of its output: a view (N, *places, G, inputs in a group, *kernel)."""

    view: Tensor
    places: tuple[int, ...]

    def rows(self, images: Tensor, places: Tensor) -> Tensor:
        """Return the features at flat place numbers in images, each (R,): (G, R, p) in the device's finest type."""
        found = self.view[(images, *torch.unravel_index(places, self.places))] if self.places else self.view[images]
        found = found.flatten(2).transpose(0, 1)
        rows = found.new_ones((*found.shape[:2], found.shape[2] + 1), dtype=accumulation_dtype(found.device))
        rows[..., :-1] = found
        return rows


def gram(features: Tensor) -> Tensor:
    """Return the Gram matrices (G, p, p) of rows (G, R, p): what is right of the diagonal is not computed a second time."""
    p = features.shape[-1]
    if p <= _WHOLE:
        return features.mT @ features
    left, right = features[..., : p // 2], features[..., p // 2 :]
    across = left.mT @ right
    return torch.cat([torch.cat([gram(left), across], -1), torch.cat([across.mT, gram(right)], -1)], -2)


def patches(layer: Any, x: Tensor) -> Patches:
    """Return the patches that the layer reads of its input `x`."""
    x, rank = _channels_second(layer, x), len(_kernel(layer))
    if not rank:
        stride: tuple[int, ...] = ()
    elif layer.transposed:
        x, stride = _spread_out(layer, x), (1,) * rank
    else:
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        x, stride = F.pad(x, layer._reversed_padding_repeated_twice, mode=mode), layer.stride
    for dim, size in enumerate(_kernel(layer)):
        x = x.unfold(2 + dim, layer.dilation[dim] * (size - 1) + 1, stride[dim])[..., :: layer.dilation[dim]]
    x = torch.unflatten(x, 1, (groups_of(layer), -1))
    ends = x.dim() - rank  # places lie between the channels and the kernel
    view = x.permute(0, *range(3, ends), 1, 2, *range(ends, x.dim()))
    return Patches(view, tuple(x.shape[3:ends]))


def _channels_second(layer: Any, x: Tensor) -> Tensor:
    """The input or output of a layer as (N, channels, *places): a linear layer is a convolution without a kernel."""
    if isinstance(layer, nn.Linear):
        return (x if x.dim() > 1 else x[None]).movedim(-1, 1)
    return x if x.dim() > len(layer.kernel_size) + 1 else x[None]


def _spread_out(layer: Any, x: Tensor) -> Tensor:
    """Return the input of a transposed convolution with `stride` - 1 zeros between its values, and its margins."""
    sizes = [(n - 1) * s + 1 for n, s in zip(x.shape[2:], layer.stride, strict=True)]
    wide = x.new_zeros(*x.shape[:2], *sizes)
    between = tuple(slice(None, None, s) for s in layer.stride)
    wide[:, :, *between] = x
    margins: list[int] = []
    for dim in reversed(range(len(sizes))):
        margin = layer.dilation[dim] * (layer.kernel_size[dim] - 1) - layer.padding[dim]
        margins += [margin, margin + layer.output_padding[dim]]
    return F.pad(wide, margins)


def target_rows(layer: Any, y: Tensor, images: Tensor, places: Tensor) -> Tensor:
    """Return the layer's output `y` at flat place numbers in images, each (R,): (G, R, O) in the device's finest type."""
    y = _channels_second(layer, y)
    found = y.reshape(*y.shape[:2], -1).transpose(1, 2)[images, places].to(accumulation_dtype(y.device))
    return torch.unflatten(found, 1, (groups_of(layer), -1)).transpose(0, 1)


def matrix_of(layer: Any) -> Tensor:
    """Return the layer's weights with the bias (0 if there is none) in the last row: (G, p, O) in float64, on the CPU."""
    grouped = torch.unflatten(layer.weight.detach().cpu().double(), 0, (groups_of(layer), -1))
    kernel = range(3, grouped.dim())
    if _is_transposed(layer):  # (G, inputs, O, *kernel)
        features = grouped.flip(tuple(kernel)).permute(0, 1, *kernel, 2).flatten(1, -2)
    else:  # (G, O, inputs, *kernel)
        features = grouped.permute(0, 2, *kernel, 1).flatten(1, -2)
    bias = torch.zeros_like(features[:, :1]) if layer.bias is None else layer.bias.detach().cpu().double()
    return torch.cat([features, bias.view(groups_of(layer), 1, -1)], 1)


def weight_from(layer: Any, matrix: Tensor) -> Tensor:
    """Return the layer's weight from a matrix (G, p, O), in the layer's dtype and on its device."""
    blocks = torch.unflatten(matrix[:, :-1], 1, (-1, *_kernel(layer)))  # (G, inputs, *kernel, O)
    kernel = range(2, blocks.dim() - 1)
    if _is_transposed(layer):
        found = blocks.flip(tuple(kernel)).permute(0, 1, blocks.dim() - 1, *kernel).flatten(0, 1)
    else:
        found = blocks.permute(0, blocks.dim() - 1, 1, *kernel).flatten(0, 1)
    return found.to(layer.weight).contiguous()


def bias_from(layer: Any, matrix: Tensor) -> Tensor:
    """Return the bias of all filters from a matrix (G, p, O), in the layer's dtype."""
    return matrix[:, -1].flatten().to(layer.weight)


def feature_source(layer: Any, source: Tensor) -> Tensor:
    """Return the site's channel that each feature comes from, -1 for elsewhere and for the bias: (G, p)."""
    each = source.view(groups_of(layer), -1).repeat_interleave(math.prod(_kernel(layer)), 1)
    return F.pad(each, (0, 1), value=ELSEWHERE)


def gram_features(layer: Any) -> int:
    """Return the number of features in a group, with the bias."""
    inputs: int = layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels // layer.groups
    return inputs * math.prod(_kernel(layer)) + 1


def groups_of(layer: Any) -> int:
    """Return the number of groups of a layer; a linear layer has one."""
    return int(getattr(layer, "groups", 1))


def _kernel(layer: Any) -> tuple[int, ...]:
    return tuple(getattr(layer, "kernel_size", ()))


def _is_transposed(layer: Any) -> bool:
    return bool(getattr(layer, "transposed", False))


RIDGES = (1e-10, 1e-3, 1e-1, 10.0, math.inf)
"""Tried in this order, on examples held back, until one is no better than the one before: mostly two."""

ROUNDS = 3
WORTH = 1e-3  # a larger ridge must lower the error by this share: below it, exactness counts for more
ROUNDING = 1e-13  # share of the targets' energy below which errors are rounding


@dataclass(frozen=True)
class Moments:
    """Sums over examples and places of products of features x (p,), the last of which is 1, and targets y (O,), by group."""

    gram: Tensor  # (G, p, p): Σ x xᵀ
    cross: Tensor  # (G, p, O): Σ x yᵀ
    energy: Tensor  # (G, O): Σ y²

    def __sub__(self, other: Moments) -> Moments:
        """Return the moments without the examples of `other`."""
        return Moments(self.gram - other.gram, self.cross - other.cross, self.energy - other.energy)

    @property
    def count(self) -> float:
        """Number of examples times places."""
        return float(self.gram[0, -1, -1])

    @property
    def spread(self) -> Tensor:
        """Sums of squared distances of the targets from their means, (G, O)."""
        return self.energy - self.cross[:, -1] ** 2 / max(self.count, 1.0)

    def errors(self, weights: Tensor, kept: Tensor) -> Tensor:
        """Return the squared errors of `weights` (G, p, O) on the features in `kept` (G, p) alone, for each filter (G, O)."""
        used = weights * kept[..., None]
        squares = ((self.gram @ used) * used).sum(1)
        return (self.energy - 2 * (self.cross * used).sum(1) + squares).clamp_min(0.0)


def solve(moments: Moments, start: Tensor, kept: Tensor, ridge: float) -> Tensor:
    """Return weights (G, p, O) that fit the targets from the features in `kept` (G, p); other rows stay as in `start`."""
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
    """Factorise the correlations plus a ridge, which grows until the factorisation succeeds."""
    while True:
        regular = gram.clone()
        regular.diagonal().add_(ridge)
        factor, failed = torch.linalg.cholesky_ex(regular)
        if not bool(failed):
            found: Tensor = factor
            return found
        ridge = max(10 * ridge, 1e-12)


def choose_ridge(fitted: Moments, held: Moments, start: Tensor, kept: Tensor) -> float:
    """Return the ridge of `RIDGES` whose fit has the smallest error on examples held back."""
    least = ROUNDING * float(held.energy.sum())
    best, error = RIDGES[0], math.inf
    for ridge in RIDGES:
        found = float(held.errors(solve(fitted, start, kept, ridge), kept).sum())
        if found > error * (1 - WORTH) - least:
            break
        best, error = ridge, found
    return best
