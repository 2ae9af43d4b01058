"""Ensembles over the whole network: every example gets a random mask at all sites at once, and one pass there and back gives
its slopes along all filters of the network.

One linear model of the mean loss would add up effects that differ in sign from example to example, and cancel: a filter that
helps some as much as it harms others seems to matter to none, and a set of such filters cannot be removed. So there is a linear
model for each example, and filters go in the order in which the mean square of what their whole set changes stays smallest.

The models are of log odds, not of the loss: on an example that a network knows by heart the loss is flat, so that the slopes of
a few examples would decide all (on ResNet-56, 1 % of them have 58 % of the sizes).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from secateurs._util.modules import Device, keeping_modes, on_device
from secateurs.data.dataset import Examples, generator_for
from secateurs.distributed import active
from secateurs.errors import NonFinite
from secateurs.graph.masking import copy_module, multiply_
from secateurs.graph.node_info import values_of_an_example
from secateurs.graph.sites import Site
from secateurs.graph.trace import Graph
from secateurs.metrics import Measure, cross_entropy, log_odds
from secateurs.scoring.importance import Importance, order_by_sets, rank_correlation
from secateurs.scoring.masks import sample_masks

ACTIVATION_BYTES = 2**31  # that all activations of a batch, there and back, may take
_BATCH = 128


@dataclass(frozen=True, eq=False)
class RankedSite:
    """The filters of a site as the linear models of single examples rank them."""

    order: Tensor  # (C,) filter ids, least important first
    importance: Importance  # of each filter alone: the root mean square of its slopes


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
) -> dict[str, RankedSite]:
    """Rank the filters of each site by the slopes of single examples' log odds along them, under masks of all sites.

    With a loss other than cross-entropy its own slopes count. There is no linear model of a mean, so that the
    intercept and r² are NaN.
    """
    measure = log_odds if loss_fn is cross_entropy else loss_fn
    options: dict[str, Any] = {"off": off, "batch": batch, "device": device, "seed": seed}
    batches = [slopes for _, slopes in network_slopes(graph, sites, examples, measure, **options)]
    found = {site.name: torch.cat([slopes[site.name] for slopes in batches]) for site in sites}
    finite = torch.stack([slopes.isfinite().all(1) for slopes in found.values()]).all(0)
    if not bool(finite.any()):
        raise NonFinite(
            f"all {len(finite)} examples have slopes that are NaN or infinite under masks. Check the network's outputs and the "
            f"examples for NaN."
        )
    return {name: _ranked(slopes[finite]) for name, slopes in found.items()}


def network_slopes(
    graph: Graph,
    sites: Sequence[Site],
    examples: Examples,
    measure: Measure,
    *,
    off: float,
    batch: int = _BATCH,
    device: Device = None,
    seed: int = 0,
) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Yield for each batch the measure (n,) under a mask of each example's own, float64, and its slopes (n, C) at all sites.

    All masks of an example together switch off about as many filters as one site's would that switches off the share `off`:
    each filter of S sites by chance, with a probability of off / S. So a deep network is not further from itself than another.
    """
    module = with_factors(graph, sites)
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
            values = measure(module(*each.args, *factors), each.targets)
            values = values.expand(each.size) if values.ndim == 0 else values.reshape(each.size, -1).mean(1)
            # one example's value does not depend on another's mask, so the slope of the sum is that of each
            slopes = torch.autograd.grad(values.sum(), factors, allow_unused=True)
            known = [torch.zeros_like(f) if s is None else s for f, s in zip(factors, slopes, strict=True)]
            return [values.detach().cpu().double(), *(slope.cpu() for slope in known)]

        for values, *slopes in _measured_batches(-(-len(examples) // size), measured):
            yield values, dict(zip((site.name for site in sites), slopes, strict=True))


def _measured_batches(count: int, measure: Callable[[int], list[Tensor]]) -> Iterable[Sequence[Tensor]]:
    """What is measured of each batch, in order: one after the other, or shared among the workers of a run."""
    workers = active()
    return map(measure, range(count)) if workers.size == 1 else workers.map("slopes of all sites", count, measure)


def with_factors(graph: Graph, sites: Sequence[Site]) -> fx.GraphModule:
    """A copy of the network, weights fixed, with an input for each site behind its own: factors (n, C) of its channels."""
    module = copy_module(graph).requires_grad_(False)
    nodes: dict[str, fx.Node] = {node.name: node for node in module.graph.nodes}
    last = [node for node in nodes.values() if node.op == "placeholder"][-1]
    for number, site in enumerate(sites):
        with module.graph.inserting_after(last):
            last = module.graph.placeholder(f"factors_{number}_of_{site.node}")
        for point in site.points:
            multiply_(module, nodes[point.node], point, last)
    module.recompile()
    return module


def _ranked(slopes: Tensor) -> RankedSite:
    squares = slopes.double().square()
    coef, unknown = squares.mean(0).sqrt(), torch.tensor(torch.nan, dtype=torch.float64)
    stderr = squares.std(0, correction=0) / (2 * coef * len(slopes) ** 0.5).clamp_min(torch.finfo(torch.float64).tiny)
    halves = [order_by_sets(slopes[half::2]).argsort() for half in (0, 1)] if len(slopes) > 1 else []
    split_half = rank_correlation(*halves) if halves else unknown
    return RankedSite(order_by_sets(slopes), Importance(coef, unknown, stderr, unknown, unknown, split_half))
