"""Soft filter pruning (He et al., 2018): filters are zeroed after every epoch but keep training, and are removed at the end.

A filter is zeroed with its bias and with the scale and shift of the BatchNorm behind it, so that its channel is zero at its
site, as it will be once the filter is removed; a BatchNorm without weights, or what a shortcut adds to the channel, stays.
Where a filter goes from there is up to the optimiser, whose momentum is left alone. The whole network is trained, so an epoch
takes longer than that of a method that cuts first; the images and the rates are the same.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from secateurs.criteria import criterion as criterion_called
from secateurs.criteria.filters import FilterPart, layers_behind, norms_behind
from secateurs.criteria.ranking import Ranking
from secateurs.data.dataset import Examples
from secateurs.graph.sites import Site
from secateurs.graph.trace import Graph
from secateurs.methods.allocations import cut
from secateurs.methods.base import MethodRun, MethodState, Pruned, Task, Watch, opened, recipe_for
from secateurs.methods.training import finished, train_rest
from secateurs.methods.uniform import share_note, smallest_share
from secateurs.pruning.global_allocation import SiteCurve
from secateurs.scoring.importance import order
from secateurs.selection.allocation import Curve


def soft(task: Task, *, name: str, criterion: str, watch: Watch | None = None) -> Pruned:
    """Spend the budget on the whole network, zeroing the same share of filters at every site, then remove as many.

    `criterion` looks at weights alone: "l2" for soft filter pruning as published, "fpgm" for the geometric median. Where
    stretches of training are shorter than an epoch, filters are zeroed when as many images were seen as an epoch has.
    """
    with opened(task, name, recipe_for(task, criterion), watch) as work:
        standing = work.standing() or work.keep(_start(work, criterion))
        if not standing.state["cut"]:
            zeroing = Zeroing.of(standing.graph, work.sites, standing.state["removed"], criterion)
            epoch = len(task.data.train)

            def at_epoch(before: int, now: int) -> None:
                if now // epoch > before // epoch:
                    zeroing.zero_()

            standing = train_rest(work, standing, at_epoch)
            standing = work.keep(_removed(work, standing, criterion))
        return finished(work, standing)


def _start(work: MethodRun, criterion: str) -> MethodState:
    """The whole network, and how many of its filters have to go."""
    began = time.monotonic()
    chosen = smallest_share(work, _courses(work, work.task.graph, criterion))
    return MethodState(
        work.copied(),
        search_seconds=time.monotonic() - began,
        note=share_note(work, chosen),
        state={"removed": dict(chosen.removed), "cut": False},
    )


def _removed(work: MethodRun, standing: MethodState, criterion: str) -> MethodState:
    """The network without the filters that come last by now."""
    began = time.monotonic()
    courses = _courses(work, standing.graph, criterion)
    smaller = cut(work, courses, standing.state["removed"], standing.graph)
    note = standing.note
    if not work.reached(smaller):  # behind a sum it matters to the MACs which channels go, not only how many
        chosen = smallest_share(work, courses, standing.graph)
        smaller, note = chosen.graph, share_note(work, chosen)
    return replace(
        standing,
        graph=smaller,
        momentum={},
        search_seconds=standing.search_seconds + time.monotonic() - began,
        note=note,
        state={**standing.state, "cut": True},
    )


def _courses(work: MethodRun, graph: Graph, criterion: str) -> dict[str, SiteCurve]:
    """The order of every site's filters in a network of the untouched one's structure."""
    found = {}
    for site in work.sites:
        ranking = Ranking(criterion, _order(graph, site, criterion))
        found[site.name] = SiteCurve(ranking, site.original, Curve(site.name, (0,), (0.0,), (0.0,)))
    return found


def _order(graph: Graph, site: Site, criterion: str) -> Tensor:
    return order(criterion_called(criterion)(graph, site, _NO_EXAMPLES))


_NO_EXAMPLES = Examples(torch.zeros(0, 1), torch.zeros(0, dtype=torch.long))  # criteria of weights look at none


@dataclass(frozen=True, eq=False)
class _Place:
    """A site with the modules that make its channels, and how many of them are zeroed."""

    site: Site
    layers: tuple[FilterPart, ...]
    norms: tuple[FilterPart, ...]
    count: int


@dataclass(frozen=True, eq=False)
class Zeroing:
    """A network whose least important filters are zeroed from time to time."""

    graph: Graph
    criterion: str
    places: tuple[_Place, ...]

    @staticmethod
    def of(graph: Graph, sites: Sequence[Site], counts: Mapping[str, int], criterion: str) -> Zeroing:
        """The zeroing of so many filters at the `sites` of `graph`, chosen by the weights as they are each time."""
        places = [
            _Place(site, layers_behind(graph, site), norms_behind(graph, site), counts[site.name])
            for site in sites
            if counts[site.name]
        ]
        return Zeroing(graph, criterion, tuple(places))

    def zero_(self) -> None:
        """Zero the filters that are least important now, wherever the network is."""
        for place in self.places:
            gone = torch.zeros(place.site.channels, dtype=torch.bool)
            gone[_order(self.graph, place.site, self.criterion)[: place.count]] = True
            for part in (*place.layers, *place.norms):
                # a filter may have a share in several channels: it goes with the last of them
                _zero_filters_(part.module, part.makes[gone].any(0) & ~part.makes[~gone].any(0))


def _zero_filters_(module: nn.Module, dead: Tensor) -> None:
    """Zero the weights and biases of the filters in `dead` (F,)."""
    weight, bias = (getattr(module, name) for name in ("weight", "bias"))
    weight, dead = weight.detach(), dead.to(weight.device)
    if getattr(module, "transposed", False):  # filters lie along the second axis there, those of each group by themselves
        groups: Any = module.groups
        by_group = weight.unflatten(0, (groups, -1))
        by_group.masked_fill_(dead.view(groups, 1, -1, *[1] * (weight.ndim - 2)), 0)
    else:
        weight.masked_fill_(dead.view(-1, *[1] * (weight.ndim - 1)), 0)
    if bias is not None:
        bias.detach().masked_fill_(dead, 0)
