"""Pruning of single weights, in rounds with training after each: by Han et al. (2015), by Optimal Brain Damage (LeCun 1990).

Weights become zero and stay zero while the rest is trained. Dense hardware gains nothing from that: only a neuron or filter
that has lost all weights it reads, or all that read it, can be removed, and is. To meet a target of MACs, weights go until
enough filters have died.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from secateurs.compaction import compact
from secateurs.criteria.filters import filter_weights, layers_behind, norms_behind
from secateurs.data.dataset import Examples, derive
from secateurs.data.splits import subset
from secateurs.graph.consumers import find_consumers
from secateurs.graph.masking import copied
from secateurs.graph.sites import Site, find_sites
from secateurs.graph.trace import Graph
from secateurs.repair.solve import feature_source, matrix_of
from secateurs.training.state import carry_momentum
from secateurs_lab.criteria.obd import WEIGHTED, weight_curvatures
from secateurs_lab.methods.base import MethodRun, MethodState, Pruned, Task, Watch, opened, recipe_for
from secateurs_lab.methods.sfp import zero_filters_
from secateurs_lab.methods.training import finished, train_next, training_stages

_EXAMPLES = 1024  # that curvatures are measured on

Scores = Callable[[MethodRun, Graph], dict[str, Tensor]]
"""Gives the importance of every weight of every layer by name; higher = more important, 0 for one that is zero."""


# ---- scores of weights in networks ----------------------------------------------------------------------------------------


def weights_of(graph: Graph) -> dict[str, nn.Parameter]:
    """The weights of all linear layers and convolutions by the layer's name."""
    parts: dict[str, Any] = {name: part for name, part in graph.module.named_modules() if isinstance(part, WEIGHTED)}
    return {name: part.weight for name, part in parts.items()}


def by_deviation(run: MethodRun, graph: Graph) -> dict[str, Tensor]:
    """Han et al.: |w| over the standard deviation of the layer's weights that are left: a threshold on it is the quality."""
    return {name: deviations(weight.detach()) for name, weight in weights_of(graph).items()}


def deviations(weight: Tensor) -> Tensor:
    """|w| over the standard deviation of those that are not zero."""
    left = weight[weight != 0]
    return weight.abs().double() / (float(left.double().std(unbiased=False)) if len(left) > 1 else 1.0)


def by_damage(run: MethodRun, graph: Graph) -> dict[str, Tensor]:
    """OBD: h w² / 2, with h the Gauss-Newton curvature on a part of the training set."""
    few = few_examples(run)
    found = weight_curvatures(graph.module, few, batch=run.task.batch, device=run.task.device)
    return {name: found[name] * weight.detach().cpu().double().square() / 2 for name, weight in weights_of(graph).items()}


def few_examples(run: MethodRun) -> Examples:
    """The part of the training set that curvatures are measured on."""
    train = run.task.data.train
    return subset(train, min(_EXAMPLES, len(train)), seed=derive(run.task.seed, "curvature"))


# ---- filters that have died -----------------------------------------------------------------------------------------------


def dead_filters(graph: Graph, site: Site) -> Tensor:
    """The channels (C,) that read only zero weights, or that only zero weights read."""
    lives = torch.zeros(site.channels, dtype=torch.bool)
    for part in layers_behind(graph, site):
        lives |= (part.makes & filter_weights(part.module).any(1)).any(1)
    consumers = find_consumers(graph, site)
    if consumers.sums or consumers.others:
        return ~lives
    read = torch.zeros(site.channels, dtype=torch.bool)
    for consumer in consumers.layers:
        layer: Any = graph.module.get_submodule(consumer.module)
        used, source = matrix_of(layer).any(2), feature_source(layer, consumer.source)
        read[source[used & (source >= 0)]] = True
    return ~(lives & read)


def without_dead(run: MethodRun, graph: Graph, *, verify: bool = True) -> Graph:
    """The network without its dead filters; what a dead filter's bias still gave is gone with it.

    One filter of a site is always kept, except of a branch that ends in a sum. Each removal may leave others dead, so that it
    is repeated.
    """
    while True:
        graph = copied(graph)
        masks: dict[str | Site, Tensor] = {}
        for site in find_sites(graph, run.task.shortcut):
            dead = dead_filters(graph, site)
            if not find_consumers(graph, site).sums:  # a branch that is added to something can vanish as a whole
                dead[int((~dead).double().argmax())] = False
            if bool(dead.any()):
                masks[site.name] = ~dead
                for part in (*layers_behind(graph, site), *norms_behind(graph, site)):
                    zero_filters_(part.module, part.makes[dead].any(0) & ~part.makes[~dead].any(0))
        if not masks:
            return graph
        graph = compact(graph, masks, verify=verify)


# ---- the methods ----------------------------------------------------------------------------------------------------------


def prune_weights(
    task: Task,
    *,
    name: str,
    scores: Scores,
    share: float | None = None,
    quality: float | None = None,
    watch: Watch | None = None,
) -> Pruned:
    """Set the least important weights to zero in as many rounds as the budget has stages before its last; train after each.

    `share` of the weights go, or those below `quality` (of Han et al.: times the layer's standard deviation); by default as
    many as it takes until the filters that die reach the target.
    """
    with opened(task, f"{name} {share} {quality}", recipe_for(task, "l1"), watch) as run:
        state, stages = run.load() or MethodState(run.copied()), training_stages(task, len(run.sites))
        rounds = max(1, sum(stage.phase == "finetune" for stage in stages))
        while state.spent.stages < len(stages) or not state.spent.note:
            number, began = state.spent.stages, time.monotonic()
            if number < rounds:
                run.report("prune", number, rounds)
                done = (number + 1) / rounds
                if quality is not None:
                    count = _below(weights_of(state.graph), quality * done)
                elif share is not None:
                    count = round(share * done * sum(w.numel() for w in weights_of(state.graph).values()))
                else:
                    count = round(done * _enough(run, state.graph, scores(run, state.graph)))
                zero_lowest_(state.graph, scores(run, state.graph), count)
                seconds = state.spent.search_seconds + time.monotonic() - began
                passes = state.spent.passes + (3 * len(few_examples(run)) if scores is by_damage else 0)
                spent = replace(state.spent, passes=passes, search_seconds=seconds, note="to be counted")
                state = replace(state, spent=spent)
            state = train_held(run, state)
        return finished(run, run.save(finish_weights(run, state, scores)))


def train_held(run: MethodRun, state: MethodState) -> MethodState:
    """The state after the next stage of the budget, if there is one left; what is zero stays zero."""
    if state.spent.stages == len(training_stages(run.task, len(run.sites))):
        return state
    scale_dropout_(state.graph, run.task.graph)
    hold = holding(state.graph)
    state = train_next(run, state, after_step=hold)
    hold()  # an average of weights is over steps before they were set to zero
    return run.save(state)


def finish_weights(run: MethodRun, state: MethodState, scores: Scores) -> MethodState:
    """The network without its dead filters, and with more weights gone if these are too few for the target."""
    if state.spent.note.startswith("weights"):  # it was ended before
        return state
    smaller = without_dead(run, state.graph)
    if not run.reached(smaller):
        found = scores(run, state.graph)
        zero_lowest_(state.graph, found, _enough(run, state.graph, found))
        smaller = without_dead(run, state.graph)
    left = sum(int((w != 0).sum()) for w in weights_of(smaller).values())
    before = sum(w.numel() for w in weights_of(run.task.graph).values())
    dense = sum(w.numel() for w in weights_of(smaller).values())
    each = ", ".join(
        f"{name} {int((w != 0).sum()) / weights_of(run.task.graph)[name].numel():.1%}"
        for name, w in weights_of(smaller).items()
    )
    note = (
        f"weights left: {left:,} of {before:,} ({left / before:.1%}; {each}), in layers of {dense:,}: "
        f"dense hardware computes all of those"
    )
    momentum = carry_momentum(state.momentum, smaller.kept, [name for name, _ in smaller.module.named_parameters()])
    fitting = {
        name: momentum[name]
        for name, w in smaller.module.named_parameters()
        if name in momentum and momentum[name].shape == w.shape
    }
    return MethodState(smaller, replace(state.spent, note=note), fitting)


def zero_lowest_(graph: Graph, scores: Mapping[str, Tensor], count: int) -> None:
    """Set the `count` weights with the lowest scores to zero; those that are zero already come first."""
    flat = torch.cat([scores[name].flatten().cpu() for name in weights_of(graph)])
    gone = torch.zeros(len(flat), dtype=torch.bool)
    gone[flat.argsort(stable=True)[:count]] = True
    weights = list(weights_of(graph).values())
    for weight, part in zip(weights, torch.split(gone, [w.numel() for w in weights]), strict=True):
        weight.data.masked_fill_(part.view_as(weight).to(weight.device), 0)


def _below(weights: Mapping[str, Tensor], quality: float) -> int:
    return sum(int((deviations(w.detach()) < quality).sum()) for w in weights.values())


def _enough(run: MethodRun, graph: Graph, scores: Mapping[str, Tensor]) -> int:
    """The smallest number of weights, to a thousandth of all, after which the filters that die reach the target."""
    total = sum(w.numel() for w in weights_of(graph).values())

    def reaches(thousandth: int) -> bool:
        thinner = copied(graph)
        zero_lowest_(thinner, scores, math.ceil(total * thousandth / 1000))
        return run.reached(without_dead(run, thinner, verify=False))

    return math.ceil(total * bisect_left(range(1000), True, key=reaches) / 1000)


def holding(graph: Graph) -> Callable[[], None]:
    """A function that sets the weights that are zero now to zero again."""
    zero = [(weight, weight == 0) for weight in weights_of(graph).values()]

    def hold() -> None:
        with torch.no_grad():
            for weight, gone in zero:
                weight.masked_fill_(gone, 0)

    return hold


def scale_dropout_(graph: Graph, original: Graph) -> None:
    """Give each dropout the rate p √(weights left / weights) of the layer that reads it (Han et al., section 3.2)."""
    for node in graph.module.graph.nodes:
        part: Any = graph.module.get_submodule(node.target) if node.op == "call_module" else None
        reader = _reader(graph, node) if isinstance(part, nn.Dropout) else None
        if reader is not None:
            whole: Any = original.module.get_submodule(node.target)
            part.p = whole.p * math.sqrt(int((reader.weight != 0).sum()) / reader.weight.numel())


def _reader(graph: Graph, node: fx.Node) -> Any:
    for user in node.users:
        part = graph.module.get_submodule(str(user.target)) if user.op == "call_module" else None
        if isinstance(part, WEIGHTED):
            return part
    return None
