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

_POWERS = (0.7, 2.0)  # of a measured loss over the predicted one: beyond these it is noise


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


def calibrated(predicted: Sequence[float], measured: Mapping[int, float]) -> tuple[float, ...]:
    """Increases of the loss without 0, 1, 2, … filters: predicted ones, brought to those measured at some numbers of filters.

    A prediction is right up to a factor, and curved too little where cuts are large: measured = factor · predicted ** power,
    fitted in logarithms. Empty where no prediction follows: an increase that is measured is not above 0.
    """
    pairs = [(predicted[m - 1], loss) for m, loss in sorted(measured.items())]
    if not pairs or any(not (math.isfinite(loss) and loss > 0 and guess > 0) for guess, loss in pairs):
        return ()
    (low, first), (high, last) = pairs[0], pairs[-1]
    power = math.log(last / first) / math.log(high / low) if high > low else 1.0
    power = min(max(power, _POWERS[0]), _POWERS[1])
    factor = math.exp(math.fsum(math.log(loss) - power * math.log(guess) for guess, loss in pairs) / len(pairs))
    return (0.0, *(factor * max(guess, 0.0) ** power for guess in predicted))


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
