"""Methods that cut all sites at once: filters ranked once, and the smallest of a series of cuts that reaches the target."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from secateurs.compaction import compact
from secateurs.config import Repair
from secateurs.criteria.ranking import cuts_along
from secateurs.data.dataset import derive
from secateurs.data.splits import subset
from secateurs.errors import InvalidInput
from secateurs.graph.sites import Site, resolve
from secateurs.graph.trace import Graph
from secateurs.methods.base import (
    ENDINGS,
    MethodRun,
    MethodState,
    Pruned,
    SiteProfile,
    Spent,
    Task,
    Watch,
    opened,
    recipe_for,
)
from secateurs.methods.profiles import loss_profile, order_profile, profile_sites, ranked, repair_passes
from secateurs.methods.training import finished, train_rest
from secateurs.pruning.global_allocation import apply_allocation, counts_of
from secateurs.pruning.results import SiteCurve
from secateurs.repair import prepare
from secateurs.selection.allocation import Allocation, Curve, frontier

_IMAGES = 2048  # of the validation set at most, for sensitivities: accuracy is then resolved to a twentieth of a point

Counts = Mapping[str, int]
"""How many filters each site loses. In a series every entry removes at least what the one before it does."""


# ---- the methods ---------------------------------------------------------------------------------------------------------


def divided(task: Task, *, criterion: str, repair: Repair = "none", watch: Watch | None = None) -> Pruned:
    """Make the cuts of the first allocation on the frontier of all sites' curves that reaches the target; spend the budget."""
    with opened(task, f"{criterion}{ENDINGS[repair]}", recipe_for(task, criterion, repair=repair), watch) as run:

        def cut() -> MethodState:
            profiles, began = profile_sites(run, loss_profile), time.monotonic()
            allocations = frontier([profile.curve.curve for profile in profiles.values()])
            chosen = first_reaching(run, _curves(profiles), [allocation.removed for allocation in allocations])
            original = len(run.context.held_out.examples)  # whose outputs curves are measured against
            note = f"allocation {chosen.index} of {len(allocations) - 1}, {chosen.filters} filters"
            return _state(profiles, chosen, began, note, original + repair_passes(run) * chosen.cuts)

        return finished(run, train_rest(run, run.load() or run.save(cut())))


def uniform(task: Task, *, criterion: str, repair: Repair = "none", watch: Watch | None = None) -> Pruned:
    """Prune every site by the same share along a criterion's ranking, up to one filter; then spend the budget."""
    with opened(task, f"{criterion}:uniform{ENDINGS[repair]}", recipe_for(task, criterion, repair=repair), watch) as run:

        def cut() -> MethodState:
            profiles, began = profile_sites(run, order_profile), time.monotonic()
            chosen = smallest_share(run, _curves(profiles))
            return _state(profiles, chosen, began, share_note(run, chosen), repair_passes(run) * chosen.cuts)

        return finished(run, train_rest(run, run.load() or run.save(cut())))


def li(task: Task, *, watch: Watch | None = None) -> Pruned:
    """Li et al. (Pruning filters for efficient ConvNets, 2017): L1 norms, each site as far as its sensitivity allows.

    The accuracy is measured against the filters removed, one site at a time. Every site is cut as far as its own drop stays
    within one threshold, the same for all: the smallest that reaches the target. Then the budget is spent.
    """
    with opened(task, "li", recipe_for(task, "l1"), watch) as run:

        def cut() -> MethodState:
            profiles, began = profile_sites(run, _sensitivity), time.monotonic()
            steps = advances([profile.curve.curve for profile in profiles.values()])
            chosen = first_reaching(run, _curves(profiles), _accumulated(steps, list(profiles)))
            note = f"threshold {steps[chosen.index - 1].threshold:.4f}, {chosen.filters} filters"
            return _state(profiles, chosen, began, note)

        return finished(run, train_rest(run, run.load() or run.save(cut())))


def _curves(profiles: Mapping[str, SiteProfile]) -> dict[str, SiteCurve]:
    return {name: profile.curve for name, profile in profiles.items()}


def _state(profiles: Mapping[str, SiteProfile], chosen: Reached, began: float, note: str, more_passes: int = 0) -> MethodState:
    """The state after the cut, with the cost of the profiles and of the search since `began`."""
    passes = sum(profile.passes for profile in profiles.values()) + more_passes
    seconds = sum(profile.seconds for profile in profiles.values()) + time.monotonic() - began
    return MethodState(chosen.graph, Spent(passes=passes, search_seconds=seconds, note=note))


# ---- the same share everywhere -------------------------------------------------------------------------------------------


def smallest_share(run: MethodRun, curves: Mapping[str, SiteCurve], graph: Graph | None = None) -> Reached:
    """The smallest share of the filters that reaches the target; earlier sites may lose one filter more than later ones."""
    return first_reaching(run, curves, [_counts_of_share(run.sites, share) for share in _shares(run.sites)], graph)


def share_note(run: MethodRun, chosen: Reached) -> str:
    """The share in words."""
    return f"up to {_shares(run.sites)[chosen.index]:.1%} of the filters of every site, {chosen.filters} in all"


def _shares(sites: Sequence[Site]) -> list[float]:
    """All shares at which some site loses one filter more, ascending from 0; every site keeps one filter."""
    return sorted({count / site.channels for site in sites for count in range(site.channels)})


def _counts_of_share(sites: Sequence[Site], share: float) -> Counts:
    return {site.name: min(math.floor(round(share * site.channels, 9)), site.channels - 1) for site in sites}


# ---- sensitivities -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, order=True)
class Advance:
    """One site loses its next number of filters. In the order of advances, sites take turns where drops are equal."""

    threshold: float  # the least that allows it: no smaller number of filters costs more accuracy
    share: float
    place: int  # of the site in the network
    site: str
    removed: int


def advances(curves: Sequence[Curve]) -> list[Advance]:
    """All that sites can lose, by the threshold that it takes; the curves' losses are drops of accuracy, fractions.

    A drop below 0, an accuracy that rises, needs no threshold.
    """
    found = []
    for place, curve in enumerate(curves):
        needed = accumulate((max(round(drop, 12), 0.0) for drop in curve.loss), max)
        steps = zip(needed, curve.removed, strict=True)
        found += [Advance(least, count / curve.removed[-1], place, curve.site, count) for least, count in steps if count]
    return sorted(found)


def _accumulated(steps: Sequence[Advance], sites: Sequence[str]) -> list[Counts]:
    """The series of counts from nothing removed on, with one advance more in every entry."""
    removed = dict.fromkeys(sites, 0)
    series: list[Counts] = [dict(removed)]
    for step in steps:
        removed[step.site] = step.removed
        series.append(dict(removed))
    return series


def _sensitivity(run: MethodRun, site: Site, number: int) -> SiteProfile:
    """The drop of the validation accuracy against the filters removed at this site alone, by L1 norm."""
    context, recipe = run.context, run.context.recipe
    prepared = context.prepare(run.task.graph, site)
    ranking, _ = ranked(run, prepared, number)
    counts = counts_of(site.channels, recipe.largest_share, context.round_to(site.name))
    few = subset(context.validation, min(_IMAGES, len(context.validation)), seed=derive(run.task.seed, "sensitivity"))
    accuracies = context.evaluator(prepared, run.task.metric).on(few).means(cuts_along(ranking.order, counts)).tolist()
    drops = tuple(accuracies[0] - accuracy for accuracy in accuracies)
    curve = Curve(site.name, counts, drops, tuple(map(float, counts)))
    return SiteProfile(SiteCurve(ranking, site.original, curve), len(counts) * len(few))


# ---- the cut that just reaches the target --------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Reached:
    """The first entry of a series that reaches the target, the counts up to it that just do, and the network they leave."""

    index: int
    removed: Counts  # more than the entry before, at most what this one removes
    graph: Graph

    @property
    def cuts(self) -> int:
        """How many sites lose anything."""
        return sum(map(bool, self.removed.values()))

    @property
    def filters(self) -> int:
        """How many filters are removed in all."""
        return sum(self.removed.values())


def first_reaching(
    run: MethodRun, curves: Mapping[str, SiteCurve], series: Sequence[Counts], graph: Graph | None = None
) -> Reached:
    """Find the first entry that reaches the target, counted on compacted networks; an error if even the last does not.

    Methods are compared at equal MACs, so the step to that entry is taken filter by filter, site by site. The cuts are made
    in `graph`, by default the original network (see `cut_all`).
    """
    found = _first(run, curves, series)
    # nothing removed reaches no target, so it is not entry 0
    finer = _filter_by_filter(series[found - 1 : found + 1])
    removed = finer[_first(run, curves, finer)]
    smaller = cut_all(run, curves, removed, graph)
    if not run.reached(smaller):  # a repair can put back what a cut saves behind a sum
        above = _filter_by_filter([removed, *series[found:]])[1:]
        removed, smaller = next(
            ((more, made) for more in above if run.reached(made := cut_all(run, curves, more, graph))), (removed, smaller)
        )
    return Reached(found, removed, smaller)


def _first(run: MethodRun, curves: Mapping[str, SiteCurve], series: Sequence[Counts]) -> int:
    """The index of the first entry that reaches the target, by structure alone: nothing is repaired or measured."""
    calls = 0

    def network(counts: Counts) -> Graph:
        wide = run.task.graph
        masks = masks_of(wide, curves, counts)
        if run.context.recipe.repair != "none":  # what repairs add to the network keeps channels alive
            wide = prepare(wide, masks)
        return compact(wide, masks, verify=False) if masks else wide

    def reaches(index: int) -> bool:
        nonlocal calls
        calls += 1
        run.report("divide", calls, len(series).bit_length())
        return run.reached(network(series[index]))

    most = network(series[-1])
    if not run.reached(most):
        raise InvalidInput(
            f"target_macs = {run.task.target_macs:g}: wanted at most {run.removed(most):.3f}, all that cuts at these "
            f"{len(curves)} sites can remove."
        )
    return bisect_left(range(len(series) - 1), True, key=reaches)


def _filter_by_filter(series: Sequence[Counts]) -> list[Counts]:
    """The series with an entry for every filter: from each of its entries to the next one site after the other."""
    removed, finer = dict(series[0]), [series[0]]
    for above in series[1:]:
        for site, count in above.items():
            while removed[site] < count:
                removed[site] += 1
                finer.append(dict(removed))
    return finer


def cut_all(run: MethodRun, curves: Mapping[str, SiteCurve], counts: Counts, graph: Graph | None = None) -> Graph:
    """The network (by default the original) with all cuts made, verified to compute what the masked one does.

    All are made at once; where consumers are repaired they come in network order, each repaired after those before it, and
    where every layer is refitted that comes last.
    """
    if run.context.recipe.repair != "none":
        assert graph is None, "repairs are solved for the original network"
        return apply_allocation(run.context, curves, Allocation(counts, 0.0, 0.0), verify=True)
    wide = run.task.graph if graph is None else graph
    return compact(wide, masks_of(wide, curves, counts))


def masks_of(graph: Graph, curves: Mapping[str, SiteCurve], counts: Counts) -> dict[str | Site, Tensor]:
    """The masks of those sites that lose anything."""
    sites = resolve(graph, [name for name, count in counts.items() if count])
    return {name: curves[name].keep(counts[name], site) for name, site in sites.items()}
