"""Torch-Pruning's whole procedures as methods of `secateurs compare`: `--methods benchmarks.torch_pruning:group_l1`.

Each is run as its authors run it (reproduce/main.py of its repository): global pruning towards all channels in many small
iterative steps, ranked anew before each of them, until the network is small enough. Small enough is decided by our count of
MACs on the compacted network, and the training afterwards is the one that all methods get. What it removed is applied as masks
to our own network, so that the result has a plan; it must compute what Torch-Pruning's own pruned module computes.

Its groups are the sites of the shortcut position `coupled`, and of `stream` where sums alone tie channels together.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.rival import VERSION, torch_pruning
from secateurs import Graph, compact
from secateurs._util.modules import eval_mode
from secateurs.data import subset
from secateurs.data.dataset import derive
from secateurs.errors import InvalidInput, NotEqual
from secateurs.graph.sites import Site
from secateurs_lab.methods import MethodRun, MethodState, Pruned, Spent, Task, Watch, cut_then_train, procedure

STEPS = 400  # as in its reproduce/main.py: on ResNet-20 about one channel a step
GRADIENTS = 256  # training images before every step, others each time
_THERE_AND_BACK = 3  # passes that an image counts whose gradient is taken
_NEAR = 0.03  # of the MACs: as far from the target their count decides alone, which the procedure makes anyway
_CLOSE = 1e-4  # of the largest output
_POSITIONS = ("coupled", "stream")
_PROBE = 64  # images that both networks are compared on


@procedure
def group_l1(task: Task, *, watch: Watch | None = None, steps: int = STEPS) -> Pruned:
    """Group L1: the mean over a group's layers of the L1 norms of a channel's weights, over the mean of the group."""

    def cut(run: MethodRun) -> MethodState:
        return _pruned(run, torch_pruning().importance.GroupMagnitudeImportance(p=1), steps, lambda network, step: 0)

    return cut_then_train(task, cut, watch=watch)


@procedure
def group_taylor(task: Task, *, watch: Watch | None = None, steps: int = STEPS, images: int = GRADIENTS) -> Pruned:
    """Group Taylor: the same of |weight × gradient|, with gradients of the loss taken anew before every step."""

    def cut(run: MethodRun) -> MethodState:
        def take_gradients(network: nn.Module, step: int) -> int:
            few = subset(task.data.train, min(images, len(task.data.train)), seed=derive(task.seed, "torch-pruning", step))
            network.zero_grad()
            for inputs, targets in few.batches(64):
                assert isinstance(targets, Tensor)
                loss = functional.cross_entropy(network(inputs), targets, reduction="sum") / len(few)
                loss.backward()  # type: ignore[no-untyped-call]
            return _THERE_AND_BACK * len(few)

        return _pruned(run, torch_pruning().importance.GroupTaylorImportance(), steps, take_gradients)

    return cut_then_train(task, cut, watch=watch)


def _pruned(run: MethodRun, importance: Any, steps: int, before_step: Callable[[nn.Module, int], int]) -> MethodState:
    """The network after as many steps as the target takes; `before_step` gives the passes that it made."""
    tp, task = torch_pruning(), run.task
    if task.shortcut not in _POSITIONS:  # elsewhere a projection is no part of a site, and its whole group would be left alone
        raise InvalidInput(
            f"shortcut={task.shortcut!r}: wanted {' or '.join(_POSITIONS)}, whose sites are Torch-Pruning's groups."
        )
    network, example = copy.deepcopy(task.graph.module).eval(), task.data.train.batch(slice(0, 2)).inputs
    names = {module: name for name, module in network.named_modules()}
    prunable = {layer for site in run.sites for layer in site.layers}
    kept = {name: list(range(len(layer.weight))) for layer, name in names.items() if isinstance(layer, nn.Conv2d | nn.Linear)}
    pruner = tp.pruner.BasePruner(
        network,
        example,
        importance=importance,
        global_pruning=True,
        pruning_ratio=1.0,
        iterative_steps=steps,
        ignored_layers=[layer for layer, name in names.items() if name in kept and name not in prunable],
    )
    whole, _ = tp.utils.count_ops_and_params(network, example)
    smaller, passes, step = task.graph, 0, 0
    while not run.reached(smaller):
        if step == steps:
            raise InvalidInput(f"target_macs = {task.target_macs:g}: {steps} steps removed only {run.removed(smaller):.3f}.")
        run.report("search", step, steps)
        passes += before_step(network, step)
        for group in pruner.step(interactive=True):
            for dependency, channels in group:
                name = names.get(dependency.target.module, "")
                if name in kept and pruner.DG.is_out_channel_pruning_fn(dependency.handler):
                    gone = set(channels)  # numbers of the layer as it is now
                    kept[name] = [channel for place, channel in enumerate(kept[name]) if place not in gone]
            group.prune()
        step += 1
        if 1 - tp.utils.count_ops_and_params(network, example)[0] / whole >= task.target_macs - _NEAR or step == steps:
            smaller = compact(task.graph, _masks(run, kept), verify=False)
    return MethodState(
        _same(run, kept, network), Spent(passes=passes, note=f"Torch-Pruning {VERSION}, {step} of {steps} steps")
    )


def _masks(run: MethodRun, kept: Mapping[str, list[int]]) -> dict[str | Site, Tensor]:
    """What is left as masks of our sites; their layers must have lost the same channels."""
    masks: dict[str | Site, Tensor] = {}
    for site in run.sites:
        if len({tuple(kept[layer]) for layer in site.layers}) != 1:
            raise InvalidInput(f"site {site.name!r}: Torch-Pruning removed other channels of each of {', '.join(site.layers)}.")
        masks[site.name] = torch.zeros(site.channels, dtype=torch.bool)
        masks[site.name][kept[site.layers[0]]] = True
    return masks


def _same(run: MethodRun, kept: Mapping[str, list[int]], network: nn.Module) -> Graph:
    """Our network with the same cuts, which must compute what Torch-Pruning's does."""
    smaller = compact(run.task.graph, _masks(run, kept))
    x = run.task.data.train.batch(slice(0, _PROBE)).inputs
    with torch.inference_mode(), eval_mode(smaller.module):  # the user's network may be in train mode, and so is its copy
        wanted, found = network(x), smaller.module(x)
    worst = float((found - wanted).abs().max() / wanted.abs().max())
    if not worst <= _CLOSE:
        raise NotEqual(
            f"what Torch-Pruning's module computes differs by {worst:.1e} of the largest output from the network with the same "
            f"channels removed: wanted a network that it cuts rightly."
        )
    return smaller
