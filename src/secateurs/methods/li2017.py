"""Li et al. (Pruning filters for efficient ConvNets, 2017): L1 norms, and as much from each site as its sensitivity allows.

The accuracy is measured against the filters removed, one site at a time. Every site is cut as far as its own drop stays within
one threshold, the same for all: the smallest that reaches the target.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from secateurs.criteria.ranking import cuts_along
from secateurs.data.dataset import derive
from secateurs.data.splits import subset
from secateurs.graph.sites import Site
from secateurs.methods.allocations import Counts, first_reaching
from secateurs.methods.base import MethodRun, MethodState, Pruned, Task, Watch, opened, recipe_for
from secateurs.methods.profiles import SiteProfile, profile_sites, ranked
from secateurs.methods.training import finished, train_rest
from secateurs.pruning.global_allocation import SiteCurve, counts_of
from secateurs.selection.allocation import Curve

_IMAGES = 2048  # of the search set at most: a step of the accuracy is then a twentieth of a point


def li(task: Task, *, watch: Watch | None = None) -> Pruned:
    """Prune by sensitivity, all sites at once, then spend the budget."""
    with opened(task, "li", recipe_for(task, "l1"), watch) as work:
        return finished(work, train_rest(work, work.standing() or work.keep(_cut(work))))


@dataclass(frozen=True, order=True)
class Advance:
    """One site goes on to its next number of filters. In the order of advances, sites take turns where drops are equal."""

    threshold: float  # the least that allows it: no number of filters on the way there costs more accuracy
    share: float
    place: int  # of the site in the network
    site: str
    removed: int


def advances(curves: Sequence[Curve]) -> list[Advance]:
    """All that sites can lose, by the threshold that it takes; the curves' losses are drops of accuracy, fractions.

    A drop below 0, an accuracy that rises, asks for no threshold.
    """
    found = []
    for place, curve in enumerate(curves):
        needed = accumulate((max(round(drop, 12), 0.0) for drop in curve.loss), max)
        steps = zip(needed, curve.removed, strict=True)
        found += [Advance(least, count / curve.removed[-1], place, curve.site, count) for least, count in steps if count]
    return sorted(found)


def ladder_of(steps: Sequence[Advance], sites: Sequence[str]) -> list[Counts]:
    """From nothing removed on, one advance more on every rung."""
    at = dict.fromkeys(sites, 0)
    rungs: list[Mapping[str, int]] = [dict(at)]
    for step in steps:
        at[step.site] = step.removed
        rungs.append(dict(at))
    return rungs


def _cut(work: MethodRun) -> MethodState:
    looked = profile_sites(work, _sensitivity)
    courses, began = {name: found.course for name, found in looked.items()}, time.monotonic()
    steps = advances([course.curve for course in courses.values()])
    chosen = first_reaching(work, courses, ladder_of(steps, list(courses)))
    return MethodState(
        chosen.graph,
        passes=sum(found.passes for found in looked.values()),
        search_seconds=sum(found.seconds for found in looked.values()) + time.monotonic() - began,
        note=f"threshold {steps[chosen.rung - 1].threshold:.4f}, {chosen.filters} filters",
    )


def _sensitivity(work: MethodRun, site: Site, number: int) -> SiteProfile:
    """The drop of the search accuracy against the filters removed at this site alone, by L1 norm."""
    workshop, recipe = work.workshop, work.workshop.recipe
    place = workshop.place(work.task.graph, site)
    ranking, _ = ranked(work, place, number)
    counts = counts_of(site.channels, recipe.largest_share, recipe.round_to)
    few = subset(workshop.search, min(_IMAGES, len(workshop.search)), seed=derive(work.task.seed, "sensitivity"))
    accuracies = workshop.bench(place, work.task.metric).on(few).means(cuts_along(ranking.order, counts)).tolist()
    drops = tuple(accuracies[0] - accuracy for accuracy in accuracies)
    curve = Curve(site.name, counts, drops, tuple(map(float, counts)))
    return SiteProfile(SiteCurve(ranking, site.original, curve), len(counts) * len(few))
