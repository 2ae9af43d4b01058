"""Methods that cut all sites at once: filters ranked once, and the smallest of a series of cuts that reaches the target.

Each site of the original network is measured once before the cut: what is found is kept in the method's folder, and in the
store for the same method with other targets and budgets.
"""

from __future__ import annotations

import json
import math
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import NamedTuple

from torch import Tensor

from secateurs._util.journal import plain, record_from
from secateurs.compaction import compact
from secateurs.config import NETWORK_WIDE, REFITTED, Repair
from secateurs.criteria import passes_of
from secateurs.criteria.ranking import Ranking, cuts_along
from secateurs.data.dataset import derive
from secateurs.data.splits import subset
from secateurs.errors import InvalidInput
from secateurs.graph.sites import Site, resolve
from secateurs.graph.trace import Graph
from secateurs.metrics import fingerprint
from secateurs.pruning.context import PreparedSite
from secateurs.pruning.curves import counts_of, measure_curve
from secateurs.pruning.cuts import apply_allocation
from secateurs.pruning.folder import environment
from secateurs.pruning.results import SiteCurve
from secateurs.scoring.cache import context_of
from secateurs.selection.allocation import Allocation, Curve, frontier
from secateurs_lab.methods.base import MethodRun, MethodState, Pruned, SiteProfile, Spent, Task, Watch, opened, recipe_for
from secateurs_lab.methods.training import finished, train_rest

_IMAGES = 2048  # of the validation set at most, for sensitivities: accuracy is then resolved to a twentieth of a point
_THERE_AND_BACK = 3  # passes that an image counts which is run through a network and its gradient back
_COMPARED_AT = 3  # numbers of filters at which a portfolio compares orders
_BY_REPAIRS = ("obs", "portfolio")  # criteria that consider what a repair would make up for
_NOT_OF_A_PROFILE = ("target_macs", "budget", "loss", "metric")  # the last two are identified by more than a name

Counts = Mapping[str, int]
"""How many filters each site loses. In a series every entry removes at least what the one before it does."""
Curves = Mapping[str, SiteCurve]
"""The ranking of every site, and what cuts along it cost, by name in network order."""


class Choice(NamedTuple):
    """How a method chooses its cuts."""

    profile: Callable[[MethodRun, Site, int], SiteProfile]  # measures a site; the number counts the sites from 1
    series: Callable[[MethodRun, Curves], tuple[Sequence[Counts], Callable[[Reached], str]]]  # and what is chosen in words


def cut_once(
    task: Task, *, name: str, criterion: str, choice: Choice, repair: Repair = "none", watch: Watch | None = None
) -> Pruned:
    """Rank the filters once, make the first cuts of the series that reach the target, then spend the budget."""
    recipe = recipe_for(task, criterion, repair=repair)  # all sites of one network: ranked and observed together
    recipe = replace(recipe, allocation="sequential" if repair == "none" else "global", **NETWORK_WIDE)
    with opened(task, name, recipe, watch) as run:

        def cut() -> MethodState:
            profiles, began = profile_sites(run, choice), time.monotonic()
            curves = {name: profile.curve for name, profile in profiles.items()}
            series, words = choice.series(run, curves)
            chosen = first_reaching(run, curves, series)
            together = 1 if repair in REFITTED else chosen.cuts  # a refit runs both networks once from layer to layer
            passes = sum(profile.passes for profile in profiles.values()) + repair_passes(run) * together
            seconds = sum(profile.seconds for profile in profiles.values()) + time.monotonic() - began
            return MethodState(chosen.graph, Spent(passes=passes, search_seconds=seconds, note=words(chosen)))

        return finished(run, train_rest(run, run.load() or run.save(cut())))


# ---- what is measured at every site --------------------------------------------------------------------------------------


def profile_sites(run: MethodRun, choice: Choice) -> dict[str, SiteProfile]:
    """What the choice measures at every site, in network order; not measured again where it was before.

    Passes and seconds are those of the measurement, whichever row made it: rows are compared at equal time.
    """
    found: dict[str, SiteProfile] = {}
    for number, site in enumerate(run.sites, 1):
        run.report("score", number - 1, len(run.sites), site, number)
        found[site.name] = run.journal.once(SiteProfile, partial(_profiled, run, choice, site, number), site=site.name)
    return found


def _profiled(run: MethodRun, choice: Choice, site: Site, number: int) -> SiteProfile:
    """The profile from the store, if it has one; else measured and stored."""
    cache, key, module = run.context.runtime.cache, site.name.encode(), run.task.graph.module
    # all that a profile depends on besides the site: neither the target nor the training that follows
    asked = {name: value for name, value in run.asked.items() if name not in _NOT_OF_A_PROFILE}
    measures, versions = (fingerprint(run.task.loss_fn), fingerprint(run.task.metric)), environment()["versions"]
    context = context_of(
        "profiles and their seconds", json.dumps([asked, versions], sort_keys=True), f"{module.code}{module}", *measures
    )
    kept = cache.get_fields(context, key)
    if kept is not None:
        return record_from(kept, SiteProfile)
    began = time.monotonic()
    found = replace(choice.profile(run, site, number), seconds=time.monotonic() - began)
    cache.put_fields(context, key, plain(found))
    return found


def loss_profile(run: MethodRun, site: Site, number: int) -> SiteProfile:
    """The ranking of the site's filters by the recipe's criterion, and the loss along it."""
    prepared = run.context.prepare(run.task.graph, site)
    ranking, passes = ranked(run, prepared, number)
    curve = measure_curve(run.context, prepared, ranking)
    few, all_held = len(run.context.held_out_few.examples), len(run.context.held_out.examples)
    measured = 2 * few if ranking.predicted else len(curve.curve.removed) * all_held
    # the first site also counts the outputs of the original network, which all curves are measured against
    return SiteProfile(curve, passes + measured + (all_held if number == 1 else 0) + _observing(run, prepared, number))


def _observing(run: MethodRun, prepared: PreparedSite, number: int) -> int:
    """The passes that observing a site took; the first one also counts what was observed of all sites together."""
    survey = run.context.survey
    if survey is None or prepared.graph is not survey.graph:
        return repair_passes(run)
    few = len(run.context.held_out_few.examples)
    return len(run.context.repair_examples) + _THERE_AND_BACK * few if number == 1 else 0


def order_profile(run: MethodRun, site: Site, number: int) -> SiteProfile:
    """The ranking of the site's filters by the recipe's criterion; no loss is measured along it."""
    observed = run.context.recipe.criterion in _BY_REPAIRS
    prepared = run.context.prepare(run.task.graph, site) if observed else PreparedSite(run.task.graph, site, None)
    ranking, passes = ranked(run, prepared, number)
    return SiteProfile(unmeasured(site, ranking), passes + (_observing(run, prepared, number) if observed else 0))


def sensitivity_profile(run: MethodRun, site: Site, number: int) -> SiteProfile:
    """The drop of the validation accuracy against the filters removed at this site alone."""
    context, recipe = run.context, run.context.recipe
    prepared = context.prepare(run.task.graph, site)
    ranking, _ = ranked(run, prepared, number)
    counts = counts_of(site.channels, recipe.largest_share, context.round_to(site.name))
    few = subset(context.validation, min(_IMAGES, len(context.validation)), seed=derive(run.task.seed, "sensitivity"))
    accuracies = context.evaluator(prepared, run.task.metric).on(few).means(cuts_along(ranking.order, counts)).tolist()
    drops = tuple(accuracies[0] - accuracy for accuracy in accuracies)
    curve = Curve(site.name, counts, drops, tuple(map(float, counts)))
    return SiteProfile(SiteCurve(ranking, site.original, curve), len(counts) * len(few))


def unmeasured(site: Site, ranking: Ranking) -> SiteCurve:
    """A ranking without any loss measured along it."""
    return SiteCurve(ranking, site.original, Curve(site.name, (0,), (0.0,), (0.0,)))


def ranked(run: MethodRun, prepared: PreparedSite, number: int) -> tuple[Ranking, int]:
    """The ranking of a site by the recipe's criterion, and the passes that it took.

    Passes are images run through the network, or its part behind the site, once for each mask that is scored.
    """
    scored, recipe = 0, run.context.recipe

    def on_scored(done: int, bound: int) -> None:
        nonlocal scored
        scored = done
        run.report("score", done, bound, prepared.site, (number - 1) % len(run.sites) + 1)

    ranking = run.context.rank(prepared, step=number, on_scored=on_scored)
    if recipe.criterion == "taylor":
        return ranking, _THERE_AND_BACK * ranking.examples
    if recipe.criterion == "obd":  # back once for every class
        return ranking, (1 + 2 * max(1, len(run.task.data.classes))) * ranking.examples
    if recipe.criterion.startswith(("thinet", "maxplus")):
        return ranking, ranking.examples
    if recipe.criterion == "leave-one-out":
        return ranking, (prepared.site.channels + 1) * ranking.examples
    if recipe.criterion == "pairs":
        return ranking, passes_of("pairs", prepared.site.channels, 0) * ranking.examples
    if recipe.estimator == "losses":
        return ranking, scored * ranking.examples
    comparing = len(ranking.compared) * _COMPARED_AT * len(run.context.held_out.examples) if ranking.compared else 0
    return ranking, _THERE_AND_BACK * scored + comparing  # by slopes, every mask has an image of its own


def repair_passes(run: MethodRun) -> int:
    """The passes that a repair of one site takes; none where nothing is repaired."""
    recipe = run.context.recipe
    if recipe.repair == "none":
        return 0
    networks = 2 if recipe.finetune is None else 1  # the consumers' inputs now, and their outputs in the original network
    return networks * len(run.context.repair_examples)


# ---- series of cuts ------------------------------------------------------------------------------------------------------


def along_frontier(run: MethodRun, curves: Curves) -> tuple[Sequence[Counts], Callable[[Reached], str]]:
    """The allocations on the frontier of all sites' curves."""
    allocations = frontier([curve.curve for curve in curves.values()])
    last = len(allocations) - 1
    return (
        [allocation.removed for allocation in allocations],
        lambda chosen: f"allocation {chosen.index} of {last}, {chosen.filters} filters",
    )


def along_shares(run: MethodRun, curves: Curves) -> tuple[Sequence[Counts], Callable[[Reached], str]]:
    """The same share of the filters at every site, up to one filter, from 0 on; every site keeps one."""
    # all shares at which some site loses one filter more
    shares = sorted({count / site.channels for site in run.sites for count in range(site.channels)})
    series = [
        {site.name: min(math.floor(round(share * site.channels, 9)), site.channels - 1) for site in run.sites}
        for share in shares
    ]
    return (
        series,
        lambda chosen: f"up to {shares[chosen.index]:.1%} of the filters of every site, {chosen.filters} in all",
    )


def along_thresholds(run: MethodRun, curves: Curves) -> tuple[Sequence[Counts], Callable[[Reached], str]]:
    """Li et al. (Pruning filters for efficient ConvNets, 2017): each site as far as its sensitivity allows.

    The accuracy is measured against the filters removed, one site at a time. Every site is cut as far as its own drop stays
    within one threshold, the same for all and rising.
    """
    steps = advances([curve.curve for curve in curves.values()])
    nothing: Counts = dict.fromkeys(curves, 0)
    series = accumulate(steps, lambda counts, step: {**counts, step.site: step.removed}, initial=nothing)
    return (
        list(series),
        lambda chosen: f"threshold {steps[chosen.index - 1].threshold:.4f}, {chosen.filters} filters",
    )


BY_LOSS = Choice(loss_profile, along_frontier)
BY_SHARE = Choice(order_profile, along_shares)
BY_SENSITIVITY = Choice(sensitivity_profile, along_thresholds)


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


def first_reaching(run: MethodRun, curves: Curves, series: Sequence[Counts], graph: Graph | None = None) -> Reached:
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


def _first(run: MethodRun, curves: Curves, series: Sequence[Counts]) -> int:
    """The index of the first entry that reaches the target, by structure alone: nothing is repaired or measured."""
    calls = 0

    def network(counts: Counts) -> Graph:
        wide = run.task.graph
        masks = masks_of(wide, curves, counts)
        survey = run.context.survey
        if survey is not None:  # what repairs add to the network keeps channels alive
            wide = survey.graph
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


def cut_all(run: MethodRun, curves: Curves, counts: Counts, graph: Graph | None = None) -> Graph:
    """The network (by default the original) with all cuts made, verified to compute what the masked one does.

    All are made at once; where consumers are repaired they come in network order, each repaired after those before it, and
    where every layer is refitted that comes last.
    """
    if run.context.recipe.repair != "none":
        assert graph is None, "repairs are solved for the original network"
        return apply_allocation(run.context, curves, Allocation(counts, 0.0, 0.0), verify=True)
    wide = run.task.graph if graph is None else graph
    return compact(wide, masks_of(wide, curves, counts))


def masks_of(graph: Graph, curves: Curves, counts: Counts) -> dict[str | Site, Tensor]:
    """The masks of those sites that lose anything."""
    sites = resolve(graph, [name for name, count in counts.items() if count])
    return {name: curves[name].keep(counts[name], site) for name, site in sites.items()}
