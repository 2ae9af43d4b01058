"""Structured sparsity learning (Wen et al., 2016): group lasso on the weights while training; groups that became zero go.

λ ‖w_g‖ is added to the loss for every group g, without a factor for its size, as the authors' code has it: the slope is
λ w / ‖w_g‖. After every step weights below 1e-4 are set to zero. Groups are filters (all weights of a filter), channels (all
weights that read one), shapes (the weights of all filters at one place of the kernel), and depth (a whole layer, so that a
branch between shortcuts can vanish).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from secateurs.criteria.filters import filter_weights, layers_behind, sum_over
from secateurs.graph.consumers import find_consumers
from secateurs.graph.sites import find_sites
from secateurs_lab.methods.base import MethodRun, MethodState, Pruned, Task, Watch, opened, recipe_for
from secateurs_lab.methods.penalised import cut_lowest, train_penalised
from secateurs_lab.methods.training import finished, train_rest
from secateurs_lab.methods.weights import weights_of, without_dead

ZERO = 1e-4  # weights below it become zero


def group_norms(weight: Tensor) -> dict[str, Tensor]:
    """Norms of the groups of a layer's weights (filters, channels, …): a vector for each kind of group."""
    norms = torch.linalg.vector_norm
    return {
        "filters": norms(weight.flatten(1), dim=1),
        "channels": norms(weight.transpose(0, 1).flatten(1), dim=1),
        "shapes": norms(weight.flatten(1), dim=0),
        "depth": norms(weight).view(1),
    }


def group_lasso(weight: Tensor, strengths: Mapping[str, float]) -> Tensor:
    """Σ over groups of λ ‖w_g‖; at a group of zeros the slope is 0."""
    norms = group_norms(weight)
    return sum((strength * norms[kind].sum() for kind, strength in strengths.items() if strength), weight.new_zeros(()))


def penalties(run: MethodRun, strengths: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """The strengths that apply to each layer: filters where they can be removed, channels and shapes where the site's
    channels are read, depth where the layer's output is a term of a sum."""
    found: dict[str, dict[str, float]] = {}
    for site in run.sites:
        consumers = find_consumers(run.task.graph, site)
        for layer in site.layers:
            found.setdefault(layer, {})["filters"] = strengths["filters"]
            if consumers.sums:
                found[layer]["depth"] = strengths["depth"]
        for consumer in consumers.layers:
            found.setdefault(consumer.module, {}).update({kind: strengths[kind] for kind in ("channels", "shapes")})
    return found


def ssl(
    task: Task,
    *,
    filters: float = 0.003,
    channels: float = 0.003,
    shapes: float = 0.0,
    depth: float = 0.0,
    watch: Watch | None = None,
) -> Pruned:
    """Train with group lasso through the stages of the budget before its last (or that one), remove zeros, train the rest.

    The strengths are λ of each kind of group. The first layer's channels are the image's and get none; `depth` is for layers
    whose output is added to something. Where less than the target becomes zero, filters with the smallest norms go too.
    """
    strengths = {"filters": filters, "channels": channels, "shapes": shapes, "depth": depth}
    name = "ssl " + " ".join(f"{value:g}" for value in strengths.values())
    with opened(task, name, recipe_for(task, "l2"), watch) as run:
        state = run.load()
        if state is None:
            state = run.save(_trained(run, strengths))
        return finished(run, train_rest(run, state))


def _trained(run: MethodRun, strengths: Mapping[str, float]) -> MethodState:
    graph = run.copied()
    weights, lasso = weights_of(graph), penalties(run, strengths)

    def penalty() -> Tensor:
        return torch.stack([group_lasso(weights[name], own) for name, own in lasso.items()]).sum()

    def threshold_() -> None:
        with torch.no_grad():
            for name in lasso:
                weights[name].masked_fill_(weights[name].abs() < ZERO, 0)

    state = train_penalised(run, graph, penalty, threshold_)
    began = time.monotonic()
    zeros = {name: int((weight == 0).sum()) for name, weight in weights.items()}
    smaller = without_dead(run, graph)
    before, after = (sum(site.channels for site in find_sites(each, run.task.shortcut)) for each in (run.task.graph, smaller))
    said = ", ".join(f"{kind} {value:g}" for kind, value in strengths.items() if value)
    share = sum(zeros.values()) / sum(weight.numel() for weight in weights.values())
    note = f"group lasso ({said}): {before - after} filters of {before} became zero, {share:.1%} of the weights"
    norms = {
        site.name: sum_over(layers_behind(smaller, site), lambda layer: filter_weights(layer).norm(dim=1))
        for site in find_sites(smaller, run.task.shortcut)
    }
    smaller = cut_lowest(run, smaller, {name: values / values.mean() for name, values in norms.items()})
    spent = replace(state.spent, search_seconds=state.spent.search_seconds + time.monotonic() - began, note=note)
    return MethodState(smaller, spent)
