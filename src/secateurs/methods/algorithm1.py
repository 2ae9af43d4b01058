"""Algorithm 1 of the paper as a method of comparisons: site after site, forward, each cut within the allowed drop.

Unlike `secateurs.pruning.run` it has a target to meet and a budget to keep. Rounds follow each other until the target is
reached, and the last cut takes no more filters than that needs. A piece of the training between cuts follows every cut, as long
as there is any left.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from secateurs.compaction import compact
from secateurs.errors import InvalidInput
from secateurs.graph.sites import Site
from secateurs.graph.trace import Graph
from secateurs.methods.base import MethodRun, MethodState, Pruned, Task, Watch, opened, recipe_for
from secateurs.methods.profiles import observing, ranked
from secateurs.methods.training import finished, train_next, train_rest
from secateurs.pruning.context import PreparedSite
from secateurs.selection.search import find_cut
from secateurs.training import carry_momentum

# What a cut may cost of the accuracy before it: the paper tunes its α and does not say to what. After a round that cuts nothing
# it is doubled, so that every target is met.
MAX_DROP = 0.01


def paper(task: Task, *, repair: bool = False, watch: Watch | None = None) -> Pruned:
    """Prune by Algorithm 1 with ensembles; with `repair`, by portfolios, readers repaired in closed form after every cut."""
    name = "paper+repair" if repair else "paper"
    # with training between, repairs aim at the network as it is, not at the untouched one
    recipe = replace(
        recipe_for(task, "portfolio" if repair else "ensemble", repair="least-squares" if repair else "none"),
        finetune=task.budget.between,
        max_drop=MAX_DROP,
    )
    with opened(task, name, recipe, watch) as work:
        standing = work.standing() or MethodState(work.copied(), state=_Way(MAX_DROP).fields())
        while not work.reached(standing.graph):
            standing = work.keep(_visit(work, standing))
        return finished(work, train_rest(work, standing))


@dataclass(frozen=True)
class _Way:
    """How far the method has come."""

    max_drop: float  # that a cut may cost now
    visits: int = 0  # to sites, all rounds together
    cuts: int = 0
    cuts_before: int = 0  # those made before this round

    def fields(self) -> dict[str, Any]:
        """As plain values."""
        return {"visits": self.visits, "cuts": self.cuts, "cuts_before": self.cuts_before, "max_drop": self.max_drop}

    def on(self, sites: int, made: bool) -> _Way:
        """One visit later; at the end of a round that made no cut, more may be lost."""
        way = replace(self, visits=self.visits + 1, cuts=self.cuts + made)
        if way.visits % sites:
            return way
        allowed = way.max_drop if way.cuts > way.cuts_before else 2 * way.max_drop
        return replace(way, cuts_before=way.cuts, max_drop=allowed)

    def note(self, sites: int) -> str:
        """In words."""
        return f"{self.cuts} cuts in {self.visits / sites:.1f} rounds, each within a drop of {self.max_drop:g}"


def _visit(work: MethodRun, standing: MethodState) -> MethodState:
    """The next site in turn: its filters ranked, as many removed as the drop allows, a piece of the training."""
    began, way, count = time.monotonic(), _Way(**standing.state), len(work.sites)
    if way.max_drop > 1:
        raise InvalidInput(
            f"target_macs = {work.task.target_macs:g}: wanted at most {work.removed(standing.graph):.3f}, after which no site "
            f"has a filter to spare."
        )
    name = work.sites[way.visits % count].name
    site = work.workshop.site(standing.graph, name)  # looked up again: an earlier cut may have narrowed it
    if site is None:
        return replace(standing, state=way.on(count, made=False).fields())
    place = work.workshop.place(standing.graph, site)
    found = _find_cut(work, place, way)
    after = way.on(count, made=found.filters > 0)
    searched = replace(
        standing,
        passes=standing.passes + found.passes,
        search_seconds=standing.search_seconds + time.monotonic() - began,
        note=after.note(count),
        state=after.fields(),
    )
    return train_next(work, _cut(work, place, found.keep, searched)) if found.filters else searched


@dataclass(frozen=True, eq=False)
class _Found:
    keep: Tensor  # (C,)
    filters: int  # that go
    passes: int


def _find_cut(work: MethodRun, place: PreparedSite, way: _Way) -> _Found:
    """The largest cut of a site within the drop, or the smallest that reaches the target."""
    workshop, site = work.workshop, place.site
    number = way.visits % len(work.sites) + 1
    ranking, passes = ranked(work, place, way.visits + 1)
    measured = workshop.bench(place, work.task.metric).on(workshop.search)
    looks = 0

    def accuracy(keep: Tensor) -> float:
        nonlocal looks
        looks += 1
        work.tell("search", looks, site.channels.bit_length() + 1, site, number)
        return float(measured.means(keep[None])[0])

    baseline = workshop.evaluate(place.graph, workshop.search).accuracy
    share = workshop.recipe.largest_share
    found = find_cut(ranking.order, accuracy, baseline=baseline, max_drop=way.max_drop, largest_share=share)
    removed = _enough(work, place.graph, site, found.removed)
    keep = torch.ones(site.channels, dtype=torch.bool)
    keep[list(removed)] = False
    return _Found(keep, len(removed), passes + (1 + looks) * len(workshop.search) + observing(work))


def _enough(work: MethodRun, graph: Graph, site: Site, removed: tuple[int, ...]) -> tuple[int, ...]:
    """Of the filters that may go, least important first, as many as the target needs."""

    def reaches(count: int) -> bool:
        keep = torch.ones(site.channels, dtype=torch.bool)
        keep[list(removed[:count])] = False
        masks: Mapping[str | Site, Tensor] = {site.name: keep}
        return work.reached(compact(graph, masks, verify=False))

    if not removed or not reaches(len(removed)):
        return removed
    low, high = 1, len(removed)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if reaches(middle) else (middle + 1, high)
    return removed[:low]


def _cut(work: MethodRun, place: PreparedSite, keep: Tensor, standing: MethodState) -> MethodState:
    """The cut made, repaired if repairs are made; the momentum of the weights that are left comes along."""
    made = work.workshop.made(place, keep).graph
    parameters = dict(made.module.named_parameters())
    return replace(standing, graph=made, momentum=carry_momentum(standing.momentum, made.kept, parameters))
