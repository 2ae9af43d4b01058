"""ThiNet (Luo et al., 2017) as a method: layer by layer, the next layer's weights rescaled, a stage of training after each cut.

As published, only layers whose channels are read by layers alone are cut, so that the last convolution of a residual block
stays whole. All are cut in the same share.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from secateurs.compaction import compact
from secateurs.data.dataset import derive
from secateurs.data.splits import subset
from secateurs.errors import InvalidInput
from secateurs.graph.consumers import find_consumers
from secateurs.graph.masking import copied
from secateurs.graph.sites import Site, resolve
from secateurs.graph.trace import Graph
from secateurs.repair import Reconstruction, observe
from secateurs.repair.reconstruction import write_
from secateurs.repair.solve import weight_from
from secateurs.training.state import carry_momentum
from secateurs_lab.criteria.thinet import pursuit_order, removal_order, scales, share_moments
from secateurs_lab.methods.base import MethodRun, MethodState, Pruned, Spent, Task, Watch, opened, recipe_for
from secateurs_lab.methods.one_shot import Counts
from secateurs_lab.methods.training import finished, train_next, train_rest, training_stages

_EXAMPLES = 1024


def thinet(
    task: Task,
    *,
    name: str = "thinet",
    order: Callable[[Tensor], Tensor] = removal_order,
    watch: Watch | None = None,
) -> Pruned:
    """Cut each site in network order by one of the two greedy orders, rescale its consumers, and train a stage."""
    with opened(task, name, recipe_for(task, "thinet"), watch) as run:
        state = run.load() or run.save(_start(run))
        while state.spent.left:
            state = run.save(_next_site(run, state, order))
        return finished(run, train_rest(run, state))


def pursuit(task: Task, *, watch: Watch | None = None) -> Pruned:
    """ThiNet with the order of its later version."""
    return thinet(task, name="thinet-pursuit", order=pursuit_order, watch=watch)


def _start(run: MethodRun) -> MethodState:
    """The whole network, and how many filters each site is to lose: the smallest common share that reaches the target."""
    sites = [site for site in run.sites if _layers_only(run, site)]
    shares = sorted({count / site.channels for site in sites for count in range(site.channels)})
    for share in shares:
        counts = {site.name: min(math.floor(round(share * site.channels, 9)), site.channels - 1) for site in sites}
        if run.reached(_cut(run, counts)):
            note = f"up to {share:.1%} of the filters of {len(sites)} sites, {sum(counts.values())} in all"
            return MethodState(run.copied(), Spent(note=note, left={name: count for name, count in counts.items() if count}))
    raise InvalidInput(
        f"target_macs = {run.task.target_macs:g}: thinet cuts {len(sites)} sites of {len(run.sites)}, those that layers "
        f"alone read, which is not enough. Give a smaller target."
    )


def _layers_only(run: MethodRun, site: Site) -> bool:
    found = find_consumers(run.task.graph, site)
    return bool(found.layers) and not found.sums and not found.others


def _cut(run: MethodRun, counts: Counts) -> Graph:
    masks: dict[str | Site, Tensor] = {}
    for site in run.sites:
        if counts.get(site.name):
            masks[site.name] = torch.arange(site.channels) >= counts[site.name]
    return compact(run.task.graph, masks, verify=False) if masks else run.task.graph


def _next_site(run: MethodRun, state: MethodState, order: Callable[[Tensor], Tensor]) -> MethodState:
    """The state after the next site: cut, its consumers rescaled, and trained if a stage is left for it."""
    assert state.spent.left
    began, task, (name, *others) = time.monotonic(), run.task, state.spent.left
    graph = copied(state.graph)
    site, train = resolve(graph, [name])[name], task.data.train
    number = next(place for place, each in enumerate(run.sites, 1) if each.name == name)
    run.report("score", number - 1, len(run.sites), site, number)
    few = subset(train, min(_EXAMPLES, len(train)), seed=derive(task.seed, "thinet"))
    found = observe(graph, site, few, batch=task.batch, device=task.device, seed=task.seed)
    moments = share_moments(found)
    keep = torch.ones(site.channels, dtype=torch.bool)
    keep[order(moments)[: state.spent.left[name]]] = False
    write_(graph, rescaled(found, scales(moments, keep)))
    smaller = compact(graph, {name: keep})
    momentum = carry_momentum(state.momentum, smaller.kept, [name for name, _ in smaller.module.named_parameters()])
    spent = replace(
        state.spent,
        passes=state.spent.passes + len(few),
        search_seconds=state.spent.search_seconds + time.monotonic() - began,
        left={other: state.spent.left[other] for other in others},
    )
    cut = MethodState(smaller, spent, momentum)
    stages = training_stages(task, len(run.sites))
    more = spent.stages < len(stages) and stages[spent.stages].phase == "finetune"
    return train_next(run, cut) if more else cut


def rescaled(found: Reconstruction, factors: Tensor) -> dict[str, Tensor]:
    """The weights of the site's consumers with what they read of channel c times factors[c], for all their filters alike.

    A removed channel's weights stay, for it is masked.
    """
    weights = {}
    for fit in found.layers:
        each = torch.cat([torch.where(factors == 0, 1.0, factors), torch.ones(1).double()])[fit.source]  # -1: elsewhere
        weights[f"{fit.name}.weight"] = weight_from(fit.layer, fit.start * each[..., None])
    return weights
