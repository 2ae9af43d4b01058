"""Frontiers of allocations, predicted loss against saving: one for each shortcut position and weighing of cuts, joined."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from secateurs.compaction import compact
from secateurs.config import REFITTED
from secateurs.errors import EmptyLayer, RunError
from secateurs.graph.sites import Site
from secateurs.graph.trace import Graph
from secateurs.pruning.context import PruningContext
from secateurs.pruning.cuts import apply_allocation
from secateurs.pruning.results import ChosenAllocation, ComparedFrontiers, FrontierTrial, SiteCurve
from secateurs.selection.allocation import Allocation
from secateurs.selection.knapsack import ascending

_MOST_TRIED = 160  # allocations that a search looks among: neighbours then differ by less than their accuracies are known
_MOST_WRONG = 10.0  # factor between the rise of the loss that is predicted for a network, and the one that is measured
_TINY = 1e-12  # sums of shares are rounded


@dataclass(frozen=True, eq=False)
class Frontier:
    """Allocations of one shortcut position and one weighing of cuts, each of which saves more than the last."""

    context: PruningContext  # of that position
    curves: Mapping[str, SiteCurve]
    allocations: Sequence[Allocation]
    weighed: str = ""
    reaches: bool = False  # the last one reaches all targets

    def network(self, allocation: Allocation) -> Graph:
        """The network with all cuts of an allocation made and repaired."""
        return apply_allocation(self.context, self.curves, allocation)

    def rough_network(self, allocation: Allocation) -> Graph:
        """The same, refitted on few examples: to be compared with others like it."""
        return apply_allocation(self.context, self.curves, allocation, examples=self.context.few_repair_examples)


def frontiers_of(context: PruningContext, curves: Mapping[str, SiteCurve]) -> list[Frontier]:
    """The frontiers of the context's position: one, or where time counts, one for each way to weigh cuts."""
    if context.journal.of(ChosenAllocation):  # a resumed run has chosen
        return [Frontier(context, curves, ())]
    if not curves:
        return [Frontier(context, curves, (Allocation({}, 0.0, 0.0),))]
    found = [_up_to_target(context, curves, each, by) for by, each in context.price.frontiers(curves).items()]
    return found if context.recipe.repair in REFITTED else found[:1]


def _up_to_target(
    context: PruningContext, curves: Mapping[str, SiteCurve], allocations: Sequence[Allocation], weighed: str
) -> Frontier:
    """The allocations up to the first whose cuts, made together, reach all targets; else all of them."""
    recipe = context.recipe
    share = context.price.target_share
    by_structure = any(t is not None for t in (recipe.target_macs, recipe.target_parameters, recipe.target_memory))

    def reaches(index: int) -> bool:
        """By structure and predicted time alone: nothing is repaired or measured."""
        if share is not None and allocations[index].saved < 1 - share:
            return False
        if not by_structure:
            return share is not None
        masks: dict[str | Site, Tensor] = {}
        for name, curve in curves.items():
            site, m = context.site(context.original, name), allocations[index].removed[name]
            if m and site is not None:
                masks[name] = curve.keep(m, site)
        smaller = compact(context.original, masks, verify=False) if masks else context.original
        parameters, macs = context.shares_removed(smaller)
        enough = macs >= (recipe.target_macs or 0.0) and parameters >= (recipe.target_parameters or 0.0)
        return enough and context.memory_left(smaller) <= (recipe.target_memory or 1.0)

    if not by_structure and share is None:
        return Frontier(context, curves, allocations, weighed)
    last = bisect_left(range(len(allocations) - 1), True, key=reaches)
    return Frontier(context, curves, allocations[: last + 1], weighed, reaches(last))


@dataclass(frozen=True, eq=False)
class JoinedFrontier:
    """Allocations of several frontiers, each of which saves more than the last, and the frontier that each is from."""

    allocations: tuple[Allocation, ...]
    sources: tuple[Frontier, ...]

    def network(self, index: int) -> Graph:
        """The network of the allocation with that index."""
        return self.sources[index].network(self.allocations[index])

    def rough_network(self, index: int) -> Graph:
        """The same, refitted on few examples."""
        return self.sources[index].rough_network(self.allocations[index])


def joined(found: Sequence[Frontier]) -> JoinedFrontier:
    """The best allocations of all frontiers.

    Predictions of different positions and weighings are wrong by different factors: what cuts lose together is not what they
    lose alone. So a network of each frontier is made and measured, and what the frontier predicts is multiplied by that factor.
    """
    losses = [1.0] if len(found) == 1 else [_factor(one) for one in _compared(found).tried]
    source: dict[int, Frontier] = {}
    every = list[Allocation]()
    for each, factor in zip(found, losses, strict=True):
        scaled = [replace(one, predicted_loss=factor * one.predicted_loss) for one in each.allocations]
        every += scaled
        source |= {id(one): each for one in scaled}
    enough = {id(one) for one in every if source[id(one)].reaches and one.saved == source[id(one)].allocations[-1].saved}
    best = ascending(every)
    best = best[: next((i for i, one in enumerate(best) if id(one) in enough), len(best)) + 1]
    step = -(-len(best) // _MOST_TRIED)  # predicted curves have a point for every filter
    best = (*best[:-1:step], best[-1]) if step > 1 else best
    return JoinedFrontier(best, tuple(source[id(one)] for one in best))


def _rise(frontier: Frontier, one: Allocation) -> float:
    """What the loss of an allocation's network is above the original's; infinite where nothing of the input is left in it."""
    context = frontier.context
    try:
        smaller = frontier.rough_network(one)
    except EmptyLayer:
        return math.inf
    return context.loss(smaller, context.held_out) - context.loss(context.original, context.held_out)


def _factor(one: FrontierTrial) -> float:
    """What a frontier's predicted losses are multiplied by."""
    if one.predicted <= 0:
        return 1.0
    return min(max(one.rise / one.predicted, 1 / _MOST_WRONG), _MOST_WRONG)


def _compared(found: Sequence[Frontier]) -> ComparedFrontiers:
    """A network of each frontier, measured; all are to save as much.

    The saving is that of a target in time; without one, half of the most that any frontier saves. Targets of structure are
    reached by the last allocation.
    """
    recipe, journal = found[0].context.recipe, found[0].context.journal
    half = max(each.allocations[-1].saved for each in found) / 2
    by_structure = any(t is not None for t in (recipe.target_macs, recipe.target_parameters, recipe.target_memory))

    def compare() -> ComparedFrontiers:
        known, tried = dict[str, float](), []
        for number, each in enumerate(found):
            context, allocations = each.context, each.allocations
            context.progress.report("compare", number, len(found))
            target = context.price.target_share
            wanted = 1 - target if target is not None else allocations[-1].saved if by_structure else half
            chosen = next((one for one in allocations if one.saved >= wanted - _TINY), allocations[-1])
            name = f"{context.shortcut} {sorted(chosen.removed.items())}"
            if name not in known:
                known[name] = _rise(each, chosen)
            tried.append(FrontierTrial(context.shortcut, each.weighed, chosen.saved, chosen.predicted_loss, known[name]))
        return ComparedFrontiers(tuple(tried))

    compared = journal.once(ComparedFrontiers, compare)
    if [(one.shortcut, one.weighed) for one in compared.tried] != [(each.context.shortcut, each.weighed) for each in found]:
        raise RunError(
            "journal.jsonl: the compared networks are of other shortcut positions or weighings than this run's. "
            "Restore the run from a copy, or start a new one."
        )
    return compared
