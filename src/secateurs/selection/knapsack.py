"""Multiple-choice knapsack: one number of filters for each site, so that the saving is reached at the least loss. Pure maths.

Dynamic programming over the sites with the saving cut into buckets (Frantar and Alistarh, SPDY, 2022). Unlike the convex
frontier of `allocation`, it also finds choices that lie inside a site's hull, as the steps of measured times do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from secateurs.errors import InvalidInput
from secateurs.selection.allocation import Allocation, Curve

BUCKETS = 4096  # of the largest saving
MOST = 256  # allocations: a bisection asks about eight of them


def best_allocations(curves: Sequence[Curve], *, buckets: int = BUCKETS, most: int = MOST) -> tuple[Allocation, ...]:
    """The allocations of least predicted loss for every saving, from nothing removed on; each saves more than the last.

    Savings add up over the sites, and so do losses. A choice that saves nothing, or whose loss is unknown, is never made.
    No allocation of the same saving has a smaller loss, up to one bucket for each site; where there are more than `most`,
    those nearest to evenly spaced savings are given, the largest saving among them.
    """
    sites = [curve.site for curve in curves]
    if not sites or len(set(sites)) < len(sites):
        raise InvalidInput(f"curves: got sites {sites}, wanted one curve for each of one or more sites.")
    choices = [_choices(curve) for curve in curves]
    largest = math.fsum(max(saved for saved, _, _ in found) for found in choices)
    if largest <= 0:
        return (Allocation(dict.fromkeys(sites, 0), 0.0, 0.0),)
    losses, chosen = _solve(choices, largest, buckets)
    reachable = [b for b in range(1, buckets + 1) if math.isfinite(losses[b])]
    reachable = _undominated(reachable, losses)
    found = {0: Allocation(dict.fromkeys(sites, 0), 0.0, 0.0)}
    for bucket in _spaced(reachable, most - 1):
        picks = _picked(chosen, choices, bucket, largest / buckets)
        found[bucket] = Allocation(
            removed={site: pick[2] for site, pick in zip(sites, picks, strict=True)},
            saved=math.fsum(pick[0] for pick in picks),
            predicted_loss=math.fsum(pick[1] for pick in picks),
        )
    return ascending(list(found.values()))


def ascending(allocations: Sequence[Allocation]) -> tuple[Allocation, ...]:
    """Those of the allocations that save more than nothing and than every one of smaller loss, after one that saves nothing."""
    first, kept = allocations[0], list[Allocation]()
    for one in sorted(allocations[1:], key=lambda one: (-one.saved, one.predicted_loss)):
        if one.saved > first.saved and (not kept or one.predicted_loss < kept[-1].predicted_loss):
            kept.append(one)
    return (first, *reversed(kept))


Choice = tuple[float, float, int]
"""Saved, loss, filters removed."""


def _choices(curve: Curve) -> list[Choice]:
    """What a site can lose; nothing comes first."""
    entries = zip(curve.saved, curve.loss, curve.removed, strict=True)
    found = [(saved, loss - curve.loss[0], removed) for saved, loss, removed in entries]
    return [found[0], *(choice for choice in found[1:] if choice[0] > 0 and math.isfinite(choice[1]))]


def _bucket(saved: float, size: float) -> int:
    return math.floor(saved / size + 1e-9)  # rounded down: no allocation saves less than its bucket says


def _solve(choices: Sequence[Sequence[Choice]], largest: float, buckets: int) -> tuple[Tensor, list[Tensor]]:
    """Least losses (buckets + 1,) by saving, and for every site the choice that leads to each of them."""
    losses = torch.full((buckets + 1,), math.inf, dtype=torch.float64)
    losses[0] = 0.0
    chosen = []
    for found in choices:
        rows = torch.full((len(found), buckets + 1), math.inf, dtype=torch.float64)
        for row, (saved, loss, _) in zip(rows, found, strict=True):
            by = min(_bucket(saved, largest / buckets), buckets)
            row[by:] = losses[: buckets + 1 - by] + loss
        losses, index = rows.min(0)
        chosen.append(index)
    return losses, chosen


def _picked(chosen: Sequence[Tensor], choices: Sequence[Sequence[Choice]], bucket: int, size: float) -> list[Choice]:
    """The choices that lead to a bucket, site by site."""
    found = []
    for index, options in zip(reversed(chosen), reversed(choices), strict=True):
        pick = options[int(index[bucket])]
        bucket -= _bucket(pick[0], size)
        found.append(pick)
    return found[::-1]


def _undominated(reachable: Sequence[int], losses: Tensor) -> list[int]:
    """The buckets whose loss is smaller than that of every larger one, ascending."""
    found, least = list[int](), math.inf
    for bucket in reversed(reachable):
        if float(losses[bucket]) < least:
            least = float(losses[bucket])
            found.append(bucket)
    return found[::-1]


def _spaced(buckets: Sequence[int], most: int) -> list[int]:
    """At most `most` of the buckets, evenly spaced in what they save; the last is one of them."""
    if len(buckets) <= most:
        return list(buckets)
    wanted = torch.linspace(buckets[0], buckets[-1], most, dtype=torch.float64)
    places = torch.searchsorted(torch.tensor(buckets, dtype=torch.float64), wanted).clamp(max=len(buckets) - 1)
    return [buckets[i] for i in sorted(set(places.tolist()))]
