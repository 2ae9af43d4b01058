"""Cuts along the orders of all sites: a ladder of them, and the first rung that reaches the task's target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from secateurs.compaction import compact
from secateurs.errors import InvalidInput
from secateurs.graph.sites import Site, resolve
from secateurs.graph.trace import Graph
from secateurs.methods.base import MethodRun
from secateurs.pruning.global_allocation import SiteCurve, apply_allocation
from secateurs.repair import prepare
from secateurs.selection.allocation import Allocation

Counts = Mapping[str, int]
"""How many filters go at each site. Every rung of a ladder removes at least what the one before it does."""


@dataclass(frozen=True, eq=False)
class Reached:
    """The lowest rung that reaches the target, the cuts on the way to it that just do, and the network that they leave."""

    rung: int  # from 0
    removed: Counts  # more than the rung before, at most what this one removes
    graph: Graph

    @property
    def cuts(self) -> int:
        """How many sites lose anything."""
        return sum(map(bool, self.removed.values()))

    @property
    def filters(self) -> int:
        """How many go in all."""
        return sum(self.removed.values())


def first_reaching(
    work: MethodRun, courses: Mapping[str, SiteCurve], ladder: Sequence[Counts], graph: Graph | None = None
) -> Reached:
    """How far up a ladder the target is, counted on compacted networks; an error if even the last rung does not reach it.

    Methods are compared at equal MACs, so the step to the rung that reaches it is taken filter by filter, site by site. The
    cuts are made in `graph`, by default the untouched network (see `cut`).
    """
    found = _lowest(work, courses, ladder)
    # nothing removed reaches no target, so it is not the first rung
    finer = _filter_by_filter(ladder[found - 1 : found + 1])
    removed = finer[_lowest(work, courses, finer)]
    smaller = cut(work, courses, removed, graph)
    if not work.reached(smaller):  # a repair can put back what a cut saves behind a sum
        above = _filter_by_filter([removed, *ladder[found:]])[1:]
        removed, smaller = next(
            ((more, made) for more in above if work.reached(made := cut(work, courses, more, graph))), (removed, smaller)
        )
    return Reached(found, removed, smaller)


def _lowest(work: MethodRun, courses: Mapping[str, SiteCurve], ladder: Sequence[Counts]) -> int:
    """The lowest rung that reaches the target, found by halving: by structure alone, nothing is repaired or measured."""

    def network(rung: Counts) -> Graph:
        wide = work.task.graph
        masks = masks_of(wide, courses, rung)
        if work.workshop.recipe.repair != "none":  # what repairs add to the network keeps channels alive
            wide = prepare(wide, masks)
        return compact(wide, masks, verify=False) if masks else wide

    most = network(ladder[-1])
    if not work.reached(most):
        raise InvalidInput(
            f"target_macs = {work.task.target_macs:g}: wanted at most {work.removed(most):.3f}, all that cuts at these "
            f"{len(courses)} sites can remove."
        )
    low, high = 0, len(ladder) - 1
    while low < high:
        middle = (low + high) // 2
        work.tell("divide", len(ladder) - (high - low), len(ladder))
        low, high = (low, middle) if work.reached(network(ladder[middle])) else (middle + 1, high)
    return low


def _filter_by_filter(ladder: Sequence[Counts]) -> list[Counts]:
    """The ladder with a rung for every filter: from each of its rungs to the next one site after the other."""
    at, rungs = dict(ladder[0]), [ladder[0]]
    for above in ladder[1:]:
        for site, count in above.items():
            while at[site] < count:
                at[site] += 1
                rungs.append(dict(at))
    return rungs


def cut(work: MethodRun, courses: Mapping[str, SiteCurve], rung: Counts, graph: Graph | None = None) -> Graph:
    """The network (by default the untouched one) with all cuts of a rung made, and proved to compute what the masked one does.

    All are made at once; only where readers are repaired they come in network order, each repaired after those before it, and
    where every layer is refitted that comes last.
    """
    if work.workshop.recipe.repair != "none":
        assert graph is None, "repairs are solved for the untouched network"
        return apply_allocation(work.workshop, courses, Allocation(rung, 0.0, 0.0), proved=True)
    wide = work.task.graph if graph is None else graph
    masks = masks_of(wide, courses, rung)
    return compact(wide, masks)


def masks_of(graph: Graph, courses: Mapping[str, SiteCurve], rung: Counts) -> dict[str | Site, Tensor]:
    """The masks of a rung, of those sites that lose anything."""
    sites = resolve(graph, [name for name, count in rung.items() if count])
    return {name: courses[name].keep(rung[name], site) for name, site in sites.items()}
