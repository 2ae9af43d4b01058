"""Ensembles over the whole network: every example gets a random mask at all sites at once, and one pass there and back gives
its slopes along all filters of the network.

One linear model of the mean loss would add up effects that differ in sign from example to example, and cancel: a filter that
helps some as much as it harms others seems to matter to none, and a set of such filters cannot be removed. So there is a linear
model for each example, and a filter counts by the mean size of its slopes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from secateurs._util.modules import Device, device_of, keeping_modes, on_device
from secateurs.data.dataset import Examples, generator_for
from secateurs.graph.masking import Factor, copy_module, insert_behind_
from secateurs.graph.node_info import values_of_an_example
from secateurs.graph.sites import Site
from secateurs.graph.trace import Graph
from secateurs.metrics import Measure
from secateurs.scoring.importance import Importance, rank_correlation
from secateurs.scoring.masks import sample_masks

ACTIVATION_BYTES = 2**31  # that all activations of a batch, there and back, may take
_BATCH = 128


def score_network(
    graph: Graph,
    sites: Sequence[Site],
    examples: Examples,
    loss_fn: Measure,
    *,
    off: float = 0.1,
    batch: int = _BATCH,
    device: Device = None,
    seed: int = 0,
) -> dict[str, Importance]:
    """Return for each site the mean size of the slopes of single examples' losses along its filters, under masks of all sites.

    Each mask switches off the share `off` of its site's filters, at least one. There is no linear model of the mean loss, so
    that the intercept and r² are NaN.
    """
    module = _with_factors(graph, sites)
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    fits = ACTIVATION_BYTES // max(8 * values_of_an_example(graph.module), 1)
    sizes = {site.name: torch.zeros(2, 2, site.channels, dtype=torch.float64) for site in sites}  # half, power, filter
    generator, first = generator_for(seed, "network masks"), 0
    masks = [sample_masks(site.channels, len(examples), off=off, generator=generator) for site in sites]
    with on_device(module, device) as where, keeping_modes(module), torch.enable_grad():
        module.eval()
        for each in examples.batches(max(min(batch, _BATCH, fits), 1), device=where):
            some = [mask[first : first + each.size].to(where, dtype) for mask in masks]
            factors = [mask.requires_grad_() for mask in some]
            losses = loss_fn(module(*each.args, *factors), each.targets)
            # one example's loss does not depend on another's mask, so the slope of the sum is that of each
            total = losses * each.size if losses.ndim == 0 else losses.reshape(each.size, -1).mean(1).sum()
            slopes = torch.autograd.grad(total, factors, allow_unused=True)
            halves = (torch.arange(each.size) + first) % 2
            for site, slope in zip(sites, slopes, strict=True):
                found = torch.zeros(each.size, site.channels) if slope is None else slope.detach().cpu()
                powers = torch.stack([found.double().abs(), found.double() ** 2], 1)  # (n, 2, C)
                sizes[site.name].index_add_(0, halves, powers)
            first += each.size
    return {name: _importance(found, len(examples)) for name, found in sizes.items()}


def _with_factors(graph: Graph, sites: Sequence[Site]) -> fx.GraphModule:
    """A copy of the network, weights fixed, with an input for each site behind its own: factors (n, C) of its channels."""
    module = copy_module(graph).requires_grad_(False)
    nodes: dict[str, fx.Node] = {node.name: node for node in module.graph.nodes}
    last = [node for node in nodes.values() if node.op == "placeholder"][-1]
    for site in sites:
        with module.graph.inserting_after(last):
            last = module.graph.placeholder(f"factors_of_{nodes[site.node].name}")
        for point in site.points:
            behind = insert_behind_(module, nodes[point.node], f"factor_{point.node}", Factor(point).to(device_of(module)))
            behind.args = (*behind.args, last)
    module.recompile()
    return module


def _importance(sizes: Tensor, count: int) -> Importance:
    mean, square = sizes.sum(0) / count
    unknown = torch.tensor(torch.nan, dtype=torch.float64)
    stderr = ((square - mean**2).clamp_min(0.0) / max(count, 1)).sqrt()
    return Importance(mean, unknown, stderr, unknown, unknown, rank_correlation(sizes[0, 0], sizes[1, 0]))
