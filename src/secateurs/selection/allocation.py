"""Allocation of cuts over a network: takes every site's curve of loss against filters removed, gives allocations. Pure maths.

The losses of different sites are assumed to add up, and so are the savings. Under that assumption one pass of measurements
over the sites covers every budget: `frontier` gives the whole trade-off of predicted loss against saving.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from secateurs.errors import InvalidInput

_POWERS = (0.7, 2.0)  # of a measured loss over the predicted one: beyond these it is noise
MOST_OPTIONS, MOST_TOGETHER = 1024, 64  # of a group of sites that are chosen together; where a function gives their savings


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
class Branch:
    """A branch that is folded away when `site` loses all its `channels`; the sites `gone` are then gone too, uncut."""

    site: str
    channels: int
    gone: tuple[str, ...]


@dataclass(frozen=True)
class Option:
    """Cuts of the sites of one group, made together."""

    saved: float
    loss: float  # increase
    removed: Mapping[str, int]  # every site of the group


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


def options(
    curves: Sequence[Curve],
    branches: Sequence[Branch] = (),
    saved: Callable[[Mapping[str, int]], float] | None = None,
) -> list[list[Option]]:
    """All that can be removed, by groups of sites that are chosen together; the first option of a group removes nothing.

    Sites of one branch make a group, any other site is one of its own. Losses add up, and so do savings, unless `saved` gives
    that of cuts made together. A cut of unknown loss is no option, nor is one of a site that a folded branch takes with it.
    """
    sites = [curve.site for curve in curves]
    if not sites or len(set(sites)) < len(sites):
        raise InvalidInput(f"curves: got sites {sites}, wanted one curve for each of one or more sites.")
    groups = [{site} for site in sites]
    for branch in branches:
        together = {branch.site, *branch.gone} & {*sites}
        joined = [group for group in groups if group & together]
        groups = [group for group in groups if not group & together] + [set().union(*joined)]
    order = {site: place for place, site in enumerate(sites)}
    found = []
    for group in sorted(groups, key=lambda group: min(order[site] for site in group)):
        merged = [Option(0.0, 0.0, {})]
        for curve in (curve for curve in curves if curve.site in group):
            merged = _fewer([_both(one, other) for one in merged for other in _points(curve)], branches)
        if saved is not None and len(group) > 1:
            merged = [merged[0], *(replace(one, saved=saved(one.removed)) for one in _spaced(merged, MOST_TOGETHER)[1:])]
        found.append(merged)
    return found


def _points(curve: Curve) -> list[Option]:
    """The options of a single site; nothing removed comes first."""
    entries = zip(curve.saved, curve.loss, curve.removed, strict=True)
    return [Option(saved, loss - curve.loss[0], {curve.site: m}) for saved, loss, m in entries if math.isfinite(loss)]


def _both(one: Option, other: Option) -> Option:
    return Option(one.saved + other.saved, one.loss + other.loss, {**one.removed, **other.removed})


def _fewer(merged: Sequence[Option], branches: Sequence[Branch]) -> list[Option]:
    """Without what cuts a part of a folded branch, and without most of too many."""

    def possible(one: Option) -> bool:
        return not any(
            one.removed.get(b.site) == b.channels and any(one.removed.get(site) for site in b.gone) for b in branches
        )

    return _spaced([one for one in merged if possible(one)], MOST_OPTIONS)


def _spaced(found: list[Option], most: int) -> list[Option]:
    """The first option and, where there are more than `most`, those of least loss for evenly spaced savings."""
    if len(found) <= most:
        return found
    largest, best = max(one.saved for one in found), dict[int, Option]()
    for one in found[1:]:
        place = math.ceil(most * one.saved / largest) if largest > 0 else 0
        if place not in best or one.loss < best[place].loss:
            best[place] = one
    return [found[0], *best.values()]


def frontier(curves: Sequence[Curve], branches: Sequence[Branch] = ()) -> tuple[Allocation, ...]:
    """Allocations that no mixture of two others beats, from nothing removed to the most; each removes more than the last.

    The options of every site, or group of sites, are replaced by their lower convex hull, and the hulls' steps are taken in
    the order of loss per unit saved (steps that lower the loss come first). Along the frontier no saving of a group falls.
    """
    hulls = [_hull(found) for found in options(curves, branches)]
    steps = [
        (_slope(here, there), there.saved, number, there) for number, hull in enumerate(hulls) for here, there in pairwise(hull)
    ]
    at = [hull[0] for hull in hulls]
    found = [allocated(at)]
    for _, _, number, there in sorted(steps, key=lambda step: step[:3]):
        at[number] = there
        found.append(allocated(at))
    return tuple(found)


def allocated(picks: Sequence[Option]) -> Allocation:
    """The allocation that makes the cuts of all options."""
    return Allocation(
        removed={site: m for pick in picks for site, m in pick.removed.items()},
        saved=math.fsum(pick.saved for pick in picks),
        predicted_loss=math.fsum(pick.loss for pick in picks),
    )


def _hull(found: Sequence[Option]) -> list[Option]:
    """Lower convex hull of loss over saving, from nothing removed: slopes ascend from each point to the next."""
    start, *others = found
    hull = [start]
    for point in sorted(others, key=lambda p: (p.saved, p.loss)):
        if point.saved <= hull[-1].saved:  # sorted by loss within a saving: this one is worse
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def _slope(here: Option, there: Option) -> float:
    return (there.loss - here.loss) / (there.saved - here.saved)
