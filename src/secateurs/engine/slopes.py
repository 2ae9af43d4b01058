"""Slopes of the loss along all channels of a site at once: one pass back through the suffix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from secateurs.data.examples import map_targets
from secateurs.engine.chunks import Chunk
from secateurs.engine.forms import Arrival, Way
from secateurs.errors import InvalidInput
from secateurs.evaluate import Measure


@dataclass(frozen=True, eq=False)
class Slopes:
    """Losses under masks, and how each changes with the mask's own values."""

    losses: Tensor  # (N,) float64: example n under mask n
    slopes: Tensor  # (N, C) float64: dloss_n / dmask_nc, for kept and masked channels alike


def joined(parts: Sequence[Slopes]) -> Slopes:
    """Those of several chunks, one after the other."""
    return Slopes(torch.cat([part.losses for part in parts]), torch.cat([part.slopes for part in parts]))


def slopes_of(way: Way, chunk: Chunk, masks: Tensor, loss_fn: Measure) -> Slopes:
    """Losses and slopes of a chunk's n examples, each under its own of `masks` (n, C)."""
    losses, slopes, start = [], [], 0
    for piece in way.pieces(chunk.arrival):
        rows = slice(start, start + len(piece.activations))
        factors = masks[rows].to(piece.activations.dtype).requires_grad_()
        with torch.enable_grad():
            outputs = way.differentiable(_masked(way, piece, factors), *piece.carried)
            targets = map_targets(lambda part, rows=rows: part[rows], chunk.targets)  # type: ignore[misc]  # bound at once
            found = per_example(loss_fn(outputs, targets), len(factors))
            slopes.append(_backward(found.sum(), factors))
        losses.append(found.detach())
        start = rows.stop
    return Slopes(torch.cat(losses).cpu(), torch.cat(slopes).cpu().double())


def per_example(values: Tensor, count: int) -> Tensor:
    """One float64 value for each of `count` examples, the mean over further dimensions."""
    if values.ndim == 0 or len(values) != count:
        raise InvalidInput(
            f"a loss or metric gave a tensor of shape {tuple(values.shape)} for {count} examples: wanted one value for each "
            f"example, not their mean. A loss of torch does that with reduction='none'; one that gives only a mean works with "
            f"estimator = 'losses', adaptive = false and scoring_examples = 'all' or a number."
        )
    return values.double().reshape(count, -1).mean(1)


def _masked(way: Way, piece: Arrival, factors: Tensor) -> Tensor:
    """Each example times its own mask, with the fill where the mask is zero."""
    shape = [len(factors)] + [1] * (piece.activations.ndim - 1)
    shape[way.parts.axis] = -1
    masked = piece.activations * factors.view(shape)
    fill = way.parts.fill
    return masked if fill is None else masked + ((1 - factors) * fill.to(factors.dtype)).view(shape)


def _backward(loss: Tensor, factors: Tensor) -> Tensor:
    if not loss.requires_grad:
        raise InvalidInput("the loss has no slope: it does not depend on the outputs in a differentiable way.")
    (found,) = torch.autograd.grad(loss, factors, materialize_grads=True)
    return found
