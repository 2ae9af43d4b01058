"""Allocation of cuts over a network: takes every site's curve of loss against filters removed, gives allocations. Pure maths.

The losses of different sites are assumed to add up, and so are the savings. Under that assumption one pass of measurements
over the sites covers every budget: `frontier` gives the whole trade-off of predicted loss against saving.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from secateurs.errors import InvalidInput


@dataclass(frozen=True)
class Curve:
    """Loss and saving of removing filters from one site alone, on a coarse grid that starts at 0 filters."""

    site: str
    removed: tuple[int, ...]  # filters removed, ascending, first 0
    loss: tuple[float, ...]  # of the network (after repair), one each; only differences to the first matter; NaN: unusable
    saved: tuple[float, ...]  # MACs or parameters saved, one each, first 0

    def __post_init__(self) -> None:
        if not len(self.removed) == len(self.loss) == len(self.saved) > 0:
            lengths = f"{len(self.removed)}, {len(self.loss)} and {len(self.saved)}"
            raise InvalidInput(
                f"curve of {self.site!r}: got {lengths} values of removed, loss and saved, wanted equal numbers of each."
            )
        if self.removed[0] != 0 or any(a >= b for a, b in pairwise(self.removed)):
            raise InvalidInput(
                f"curve of {self.site!r}: got removed = {self.removed}, wanted ascending numbers that start at 0."
            )
        if self.saved[0] != 0 or not all(map(math.isfinite, self.saved)) or not math.isfinite(self.loss[0]):
            raise InvalidInput(
                f"curve of {self.site!r}: wanted a finite loss and a saving of 0 with nothing removed, and finite savings, "
                f"got loss {self.loss[0]} and savings {self.saved}."
            )


@dataclass(frozen=True)
class Allocation:
    """Number of filters to remove at each site, with the predicted saving and loss."""

    removed: Mapping[str, int]  # every site, 0 where nothing is removed
    saved: float  # in the curves' unit
    predicted_loss: float  # increase over the unpruned network; negative where cuts help


@dataclass(frozen=True)
class _Point:
    """One entry of a curve."""

    saved: float
    loss: float  # increase
    removed: int


def frontier(curves: Sequence[Curve]) -> tuple[Allocation, ...]:
    """Allocations that no mixture of two others beats, from nothing removed to the most; each removes more than the last.

    Every site's curve is replaced by its lower convex hull, and the hulls' steps are taken in the order of loss per unit
    saved (steps that lower the loss come first). Along the frontier a site's saving never falls.
    """
    sites = [curve.site for curve in curves]
    if not sites or len(set(sites)) < len(sites):
        raise InvalidInput(f"curves: got sites {sites}, wanted one curve for each of one or more sites.")
    hulls = {curve.site: _hull(curve) for curve in curves}
    steps = [(_slope(here, there), there.saved, site, there) for site, hull in hulls.items() for here, there in pairwise(hull)]
    at = {site: hull[0] for site, hull in hulls.items()}
    found = [_allocation(at)]
    for _, _, site, there in sorted(steps, key=lambda step: step[:3]):
        at[site] = there
        found.append(_allocation(at))
    return tuple(found)


def _allocation(at: Mapping[str, _Point]) -> Allocation:
    return Allocation(
        removed={site: point.removed for site, point in at.items()},
        saved=math.fsum(point.saved for point in at.values()),
        predicted_loss=math.fsum(point.loss for point in at.values()),
    )


def _hull(curve: Curve) -> list[_Point]:
    """Lower convex hull of loss over saving, from nothing removed: slopes ascend from each point to the next."""
    entries = zip(curve.saved, curve.loss, curve.removed, strict=True)
    start, *others = (_Point(saved, loss - curve.loss[0], removed) for saved, loss, removed in entries)
    hull = [start]
    for point in sorted((p for p in others if math.isfinite(p.loss)), key=lambda p: (p.saved, p.loss)):
        if point.saved <= hull[-1].saved:  # sorted by loss within a saving: this one is worse
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def _slope(here: _Point, there: _Point) -> float:
    return (there.loss - here.loss) / (there.saved - here.saved)
