"""Dividing the cuts over a network: takes every site's curve of loss against filters removed, gives divisions. Pure maths.

The losses of different sites are taken to add up, and so are the savings. Under that assumption one measuring pass
over the sites answers every budget: `frontier` gives the whole trade of predicted loss against saving, `divide` the best
division for one budget, `back_off` the next cheaper one when the real network was worse than predicted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from secateurs.errors import InvalidInput

_STATES = 20_000  # divisions kept while sites are added one by one; more are thinned out along the saving
_ROUNDING = 1e-12  # relative: sums of decimal fractions must not miss a budget by their rounding


@dataclass(frozen=True)
class Curve:
    """What removing filters from one site alone costs and saves, on a coarse grid that starts at 0 filters."""

    site: str
    removed: tuple[int, ...]  # filters removed, ascending, first 0
    loss: tuple[float, ...]  # of the network (after repair), one each; only differences to the first matter; NaN: not usable
    saved: tuple[float, ...]  # MACs or parameters saved, one each, first 0

    def __post_init__(self) -> None:
        if not len(self.removed) == len(self.loss) == len(self.saved) > 0:
            lengths = f"{len(self.removed)}, {len(self.loss)} and {len(self.saved)}"
            raise InvalidInput(
                f"curve of {self.site!r}: got {lengths} values of removed, loss and saved, wanted as many of each."
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
    """How many filters go at each site, and what that is predicted to save and to cost."""

    removed: Mapping[str, int]  # every site, 0 where nothing goes
    saved: float  # in the curves' unit
    predicted_loss: float  # increase over the network as it is; negative where cuts help


@dataclass(frozen=True)
class _Point:
    """One entry of a curve."""

    saved: float
    loss: float  # increase
    removed: int


def frontier(curves: Sequence[Curve]) -> tuple[Allocation, ...]:
    """From nothing removed to the most: the divisions that no mixture of two others beats, each removing more than the last.

    Every site's curve is replaced by its lower convex hull, and the hulls' steps are taken in the order of loss per unit
    saved (steps that lower the loss come first). Along the frontier a site's saving never falls. Divisions in between are
    found by `divide`.
    """
    hulls = {curve.site: _hull(_points(curve)) for curve in _checked(curves)}
    steps = [(_slope(here, there), there.saved, site, there) for site, hull in hulls.items() for here, there in pairwise(hull)]
    at = {site: hull[0] for site, hull in hulls.items()}
    found = [_division(at)]
    for _, _, site, there in sorted(steps, key=lambda step: step[:3]):
        at[site] = there
        found.append(_division(at))
    return tuple(found)


def divide(curves: Sequence[Curve], *, saved: float | None = None, loss: float | None = None) -> Allocation:
    """The least loss that saves at least `saved`, or the most saving that costs at most `loss` (an increase): give one.

    Exact on the curves' grid: all divisions that no other beats in both are carried along, site by site. Only when there
    are more than 20,000 of them, they are thinned out evenly along the saving; what is returned still keeps to the
    budget, and is the best but for a step of that size.
    """
    sites = {curve.site: _points(curve) for curve in _checked(curves)}
    best = _undominated(list(sites.values()))
    if saved is not None and loss is None:
        fits = (best.saved >= saved - _ROUNDING * abs(saved)).nonzero().flatten()[:1]
        limit = f"saved: got {saved:g}, wanted at most {float(best.saved[-1]):g}, which is all that these curves save."
    elif loss is not None and saved is None:
        fits = (best.loss <= loss + _ROUNDING * abs(loss)).nonzero().flatten()[-1:]
        limit = f"loss: got {loss:g}, wanted at least {float(best.loss[0]):g}, the least that these curves reach."
    else:
        raise InvalidInput(f"divide: got saved = {saved} and loss = {loss}, wanted exactly one of them.")
    if not len(fits):
        raise InvalidInput(limit)
    picks = best.picks[int(fits)].tolist()
    return _division({site: points[pick] for (site, points), pick in zip(sites.items(), picks, strict=True)})


def back_off(division: Allocation, curves: Sequence[Curve]) -> Allocation:
    """The next division of the frontier that saves less: what to try when a promise failed with this one."""
    smaller = [found for found in frontier(curves) if found.saved < division.saved * (1 - _ROUNDING)]
    if not smaller:
        raise InvalidInput("back_off: this division saves nothing, so there is no smaller one.")
    return smaller[-1]


# ---- hulls -----------------------------------------------------------------------------------------------------------


def _points(curve: Curve) -> list[_Point]:
    """The usable entries of a curve, by saving; the first is that of nothing removed."""
    entries = zip(curve.saved, curve.loss, curve.removed, strict=True)
    points = [_Point(saved, loss - curve.loss[0], removed) for saved, loss, removed in entries]
    return [
        points[0],
        *sorted((p for p in points[1:] if p.saved > 0 and math.isfinite(p.loss)), key=lambda p: (p.saved, p.loss)),
    ]


def _hull(points: Sequence[_Point]) -> list[_Point]:
    """The lower convex hull of loss over saving: slopes ascend from each point to the next."""
    hull = [points[0]]
    for point in points[1:]:
        if point.saved == hull[-1].saved:  # sorted by loss within a saving: this one is worse
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def _slope(here: _Point, there: _Point) -> float:
    return (there.loss - here.loss) / (there.saved - here.saved)


def _division(at: Mapping[str, _Point]) -> Allocation:
    return Allocation(
        removed={site: point.removed for site, point in at.items()},
        saved=math.fsum(point.saved for point in at.values()),
        predicted_loss=math.fsum(point.loss for point in at.values()),
    )


def _checked(curves: Sequence[Curve]) -> Sequence[Curve]:
    names = [curve.site for curve in curves]
    if not names or len(set(names)) < len(names):
        raise InvalidInput(f"curves: got sites {names}, wanted one curve for each of one or more sites.")
    return curves


# ---- all divisions that none beats -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _States:
    """Divisions over the sites so far, by saving; more saved costs more, or it would not be worth keeping the lesser."""

    saved: Tensor  # (S,) float64 ascending
    loss: Tensor  # (S,) float64 ascending
    picks: Tensor  # (S, sites) long: which point of each site's curve


def _undominated(sites: Sequence[list[_Point]]) -> _States:
    nothing = torch.zeros(1, dtype=torch.float64)
    states = _States(nothing, nothing, torch.zeros(1, 0, dtype=torch.long))
    for points in sites:
        states = _thinned(_with_site(states, points))
    return states


def _with_site(states: _States, points: Sequence[_Point]) -> _States:
    """Every division with every point of one more site, without those that another beats."""
    saved = (states.saved[:, None] + torch.tensor([p.saved for p in points], dtype=torch.float64)).flatten()
    loss = (states.loss[:, None] + torch.tensor([p.loss for p in points], dtype=torch.float64)).flatten()
    by_loss = loss.argsort(stable=True)
    order = by_loss[saved[by_loss].argsort(stable=True, descending=True)]  # most saved first, then least loss
    least_before = torch.cat([torch.tensor([math.inf], dtype=torch.float64), loss[order].cummin(0).values[:-1]])
    kept = order[loss[order] < least_before].flip(0)
    picks = torch.cat([states.picks[kept // len(points)], (kept % len(points))[:, None]], 1)
    return _States(saved[kept], loss[kept], picks)


def _thinned(states: _States) -> _States:
    """At most about `_STATES` of them, evenly along the saving; the two ends stay."""
    if len(states.saved) <= _STATES:
        return states
    low, high = states.saved[0], states.saved[-1]
    bins = ((states.saved - low) / (high - low) * _STATES).long()
    first = torch.cat([torch.tensor([True]), bins[1:] != bins[:-1]])
    first[-1] = True
    return _States(states.saved[first], states.loss[first], states.picks[first])
