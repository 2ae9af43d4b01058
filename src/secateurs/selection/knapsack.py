"""Multiple-choice knapsack: one number of filters for each site, so that the saving is reached at the least loss. Pure maths.

Dynamic programming over the sites with the saving cut into buckets (Frantar and Alistarh, SPDY, 2022). Unlike the convex
frontier of `allocation`, it also finds choices that lie inside a site's hull, as the steps of measured times do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from secateurs.selection.allocation import Allocation, Branch, Curve, Option, allocated, options

BUCKETS = 4096  # of the largest saving
MOST = 256  # allocations: a bisection asks about eight of them


def best_allocations(
    curves: Sequence[Curve],
    branches: Sequence[Branch] = (),
    *,
    saved: Callable[[Mapping[str, int]], float] | None = None,
    buckets: int = BUCKETS,
    most: int = MOST,
) -> tuple[Allocation, ...]:
    """The allocations of least predicted loss for every saving, from nothing removed on; each saves more than the last.

    Savings add up over the sites, and so do losses; the sites of a branch are chosen together, with the saving that `saved`
    gives, if given (see `options`). A choice that saves nothing, or whose loss is unknown, is never made.
    No allocation of the same saving has a smaller loss, up to one bucket for each site; where there are more than `most`,
    those nearest to evenly spaced savings are given, the largest saving among them.
    """
    groups = [[nothing, *(one for one in others if one.saved > 0)] for nothing, *others in options(curves, branches, saved)]
    found = {0: allocated([group[0] for group in groups])}
    largest = math.fsum(max(one.saved for one in group) for group in groups)
    if largest <= 0:
        return (found[0],)
    losses, chosen = _solve(groups, largest, buckets)
    reachable = [b for b in range(1, buckets + 1) if math.isfinite(losses[b])]
    for bucket in _spaced(_undominated(reachable, losses), most - 1):
        found[bucket] = allocated(_picked(chosen, groups, bucket, largest / buckets))
    return ascending(list(found.values()))


def ascending(allocations: Sequence[Allocation]) -> tuple[Allocation, ...]:
    """Those of the allocations that save more than nothing and than every one of smaller loss, after one that saves nothing."""
    first, kept = allocations[0], list[Allocation]()
    for one in sorted(allocations[1:], key=lambda one: (-one.saved, one.predicted_loss)):
        if one.saved > first.saved and (not kept or one.predicted_loss < kept[-1].predicted_loss):
            kept.append(one)
    return (first, *reversed(kept))


def _bucket(saved: float, size: float) -> int:
    return math.floor(saved / size + 1e-9)  # rounded down: no allocation saves less than its bucket says


def _solve(groups: Sequence[Sequence[Option]], largest: float, buckets: int) -> tuple[Tensor, list[Tensor]]:
    """Least losses (buckets + 1,) by saving, and for every group the option that leads to each of them."""
    losses = torch.full((buckets + 1,), math.inf, dtype=torch.float64)
    losses[0] = 0.0
    chosen = []
    for group in groups:
        rows = torch.full((len(group), buckets + 1), math.inf, dtype=torch.float64)
        for row, one in zip(rows, group, strict=True):
            by = min(_bucket(one.saved, largest / buckets), buckets)
            row[by:] = losses[: buckets + 1 - by] + one.loss
        losses, index = rows.min(0)
        chosen.append(index)
    return losses, chosen


def _picked(chosen: Sequence[Tensor], groups: Sequence[Sequence[Option]], bucket: int, size: float) -> list[Option]:
    """The options that lead to a bucket, group by group."""
    found = []
    for index, group in zip(reversed(chosen), reversed(groups), strict=True):
        pick = group[int(index[bucket])]
        bucket -= _bucket(pick.saved, size)
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
