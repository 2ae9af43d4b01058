"""Soft filter pruning (He et al., 2018): filters are zeroed after every epoch but keep training, and removed at the end.

A filter is zeroed with its bias and with the scale and shift of the BatchNorm behind it, so that its channel is zero at its
site, as it will be once the filter is removed; a BatchNorm without weights, or what a shortcut adds to the channel, stays.
Training may revive it: the optimiser's momentum is left alone. The whole network is trained, so an epoch takes longer than that
of a method that cuts first; the images and the rates are the same.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from secateurs.criteria import score_filters
from secateurs.criteria.filters import layers_behind, norms_behind
from secateurs.criteria.ranking import Ranking
from secateurs.graph.sites import Site
from secateurs.graph.trace import Graph
from secateurs.pruning.results import SiteCurve
from secateurs.scoring.evaluator import SiteEvaluator
from secateurs.scoring.importance import order
from secateurs_lab.methods.base import MethodRun, MethodState, Pruned, Spent, Task, Watch, opened, recipe_for
from secateurs_lab.methods.one_shot import along_shares, cut_all, first_reaching, unmeasured
from secateurs_lab.methods.training import finished, train_rest


def soft(task: Task, *, name: str, criterion: str, watch: Watch | None = None) -> Pruned:
    """Spend the budget on the whole network, zeroing the same share of filters at every site, then remove as many.

    `criterion` depends on weights alone: "l2" for soft filter pruning as published, "fpgm" for the geometric median. Where
    stages of training are shorter than an epoch, filters are zeroed when as many images were seen as an epoch has.
    """
    with opened(task, name, recipe_for(task, criterion), watch) as run:
        state = run.load() or run.save(_start(run, criterion))
        if state.spent.left is not None:
            zeroing, epoch = Zeroing(state.graph, run.sites, state.spent.left, criterion), len(task.data.train)

            def at_epoch(before: int, now: int) -> None:
                if now // epoch > before // epoch:
                    zeroing.zero_()

            state = run.save(_cut(run, train_rest(run, state, at_epoch), state.spent.left, criterion))
        return finished(run, state)


def _start(run: MethodRun, criterion: str) -> MethodState:
    """The whole network, and how many of its filters have to be removed."""
    began = time.monotonic()
    curves = _curves(run, run.task.graph, criterion)
    series, words = along_shares(run, curves)
    chosen = first_reaching(run, curves, series)
    seconds = time.monotonic() - began
    return MethodState(run.copied(), Spent(search_seconds=seconds, note=words(chosen), left=dict(chosen.removed)))


def _cut(run: MethodRun, state: MethodState, counts: Mapping[str, int], criterion: str) -> MethodState:
    """The network without the filters that are least important after training."""
    began, spent = time.monotonic(), state.spent
    curves = _curves(run, state.graph, criterion)
    smaller, note = cut_all(run, curves, counts, state.graph), spent.note
    if not run.reached(smaller):  # behind a sum it matters to the MACs which channels are removed, not only how many
        series, words = along_shares(run, curves)
        chosen = first_reaching(run, curves, series, state.graph)
        smaller, note = chosen.graph, words(chosen)
    seconds = spent.search_seconds + time.monotonic() - began
    return MethodState(smaller, replace(spent, search_seconds=seconds, note=note, left=None))


def _curves(run: MethodRun, graph: Graph, criterion: str) -> dict[str, SiteCurve]:
    """The ranking of every site's filters in a network of the original's structure."""
    return {site.name: unmeasured(site, Ranking(criterion, _order(graph, site, criterion))) for site in run.sites}


def _order(graph: Graph, site: Site, criterion: str) -> Tensor:
    return order(score_filters(criterion, SiteEvaluator(graph, site)))


@dataclass(frozen=True, eq=False)
class Zeroing:
    """A network whose least important filters are zeroed after every epoch."""

    graph: Graph
    sites: Sequence[Site]
    counts: Mapping[str, int]  # of zeroed filters, by site
    criterion: str

    def zero_(self) -> None:
        """Zero the filters that are least important by the current weights, on the network's device."""
        for site in self.sites:
            zeroed = torch.zeros(site.channels, dtype=torch.bool)
            zeroed[_order(self.graph, site, self.criterion)[: self.counts[site.name]]] = True
            for part in (*layers_behind(self.graph, site), *norms_behind(self.graph, site)):
                # a filter may have a share in several channels: it is zeroed with the last of them
                zero_filters_(part.module, part.makes[zeroed].any(0) & ~part.makes[~zeroed].any(0))


def zero_filters_(module: nn.Module, dead: Tensor) -> None:
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
