"""Ensembles over the whole network: every example gets a random mask at all sites at once, and one pass there and back gives
its slopes along all filters of the network.

One linear model of the mean loss would add up effects that differ in sign from example to example, and cancel: a filter that
helps some as much as it harms others seems to matter to none, and a set of such filters cannot be removed. So there is a linear
model for each example, and a filter counts by the mean size of its slopes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, fx

from secateurs._util.modules import Device, device_of, keeping_modes, on_device
from secateurs.data.dataset import Examples, generator_for
from secateurs.distributed import active
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
    off: float = 0.9,
    batch: int = _BATCH,
    device: Device = None,
    seed: int = 0,
) -> dict[str, Importance]:
    """Return for each site the mean size of the slopes of single examples' losses along its filters, under masks of all sites.

    There is no linear model of the mean loss, so that the intercept and r² are NaN.
    """
    sizes = {site.name: torch.zeros(2, 2, site.channels, dtype=torch.float64) for site in sites}  # half, power, filter
    first = 0
    for losses, slopes in network_slopes(graph, sites, examples, loss_fn, off=off, batch=batch, device=device, seed=seed):
        halves = (torch.arange(len(losses)) + first) % 2
        for name, slope in slopes.items():
            sizes[name].index_add_(0, halves, torch.stack([slope.abs(), slope**2], 1))
        first += len(losses)
    return {name: _importance(found, len(examples)) for name, found in sizes.items()}


def network_slopes(
    graph: Graph,
    sites: Sequence[Site],
    examples: Examples,
    loss_fn: Measure,
    *,
    off: float,
    batch: int = _BATCH,
    device: Device = None,
    seed: int = 0,
) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Yield for each batch the losses (n,) under a mask of each example's own, and its slopes (n, C) at all sites; float64.

    All masks of an example together switch off about as many filters as one site's would that switches off the share `off`:
    each filter of S sites by chance, with a probability of off / S. So a deep network is not further from itself than another.
    """
    module = _with_factors(graph, sites)
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    fits = ACTIVATION_BYTES // max(8 * values_of_an_example(graph.module), 1)
    generator = generator_for(seed, "network masks")
    masks = [
        sample_masks(site.channels, len(examples), off=off / len(sites), design="bernoulli", generator=generator)
        if off
        else torch.ones(len(examples), site.channels, dtype=torch.bool)
        for site in sites
    ]
    size = max(min(batch, _BATCH, fits), 1)
    with on_device(module, device) as where, keeping_modes(module), torch.enable_grad():
        module.eval()

        def measured(ticket: int) -> list[Tensor]:
            each = examples.batch(slice(ticket * size, (ticket + 1) * size), device=where)
            rows = slice(ticket * size, ticket * size + each.size)
            factors = [mask[rows].to(where, dtype).requires_grad_() for mask in masks]
            losses = loss_fn(module(*each.args, *factors), each.targets)
            losses = losses.expand(each.size) if losses.ndim == 0 else losses.reshape(each.size, -1).mean(1)
            # one example's loss does not depend on another's mask, so the slope of the sum is that of each
            slopes = torch.autograd.grad(losses.sum(), factors, allow_unused=True)
            known = [torch.zeros_like(f) if s is None else s for f, s in zip(factors, slopes, strict=True)]
            return [value.detach().cpu().double() for value in (losses, *known)]

        for losses, *slopes in _measured_batches(-(-len(examples) // size), measured):
            yield losses, dict(zip((site.name for site in sites), slopes, strict=True))


def _measured_batches(count: int, measure: Callable[[int], list[Tensor]]) -> Iterable[Sequence[Tensor]]:
    """What is measured of each batch, in order: one after the other, or shared among the workers of a run."""
    workers = active()
    return map(measure, range(count)) if workers.size == 1 else workers.map("slopes of all sites", count, measure)


def _with_factors(graph: Graph, sites: Sequence[Site]) -> fx.GraphModule:
    """A copy of the network, weights fixed, with an input for each site behind its own: factors (n, C) of its channels."""
    module = copy_module(graph).requires_grad_(False)
    nodes: dict[str, fx.Node] = {node.name: node for node in module.graph.nodes}
    last = [node for node in nodes.values() if node.op == "placeholder"][-1]
    for number, site in enumerate(sites):
        with module.graph.inserting_after(last):
            last = module.graph.placeholder(f"factors_{number}_of_{site.node}")
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
