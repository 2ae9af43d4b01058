"""Sum of absolute weights, as Li et al. rank filters (Pruning filters for efficient ConvNets, 2017)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from secateurs._util.modules import Device
from secateurs.criteria.filters import filter_weights, importance_of, layers_behind, norms_behind, sum_over
from secateurs.data.dataset import Examples, generator_for
from secateurs.errors import InvalidInput
from secateurs.graph.sites import Site
from secateurs.graph.trace import Graph
from secateurs.metrics import Measure, cross_entropy
from secateurs.scoring.importance import Importance


def l1(
    graph: Graph,
    site: Site,
    data: Examples,
    *,
    seed: int = 0,
    loss_fn: Measure = cross_entropy,
    batch: int = 256,
    device: Device = None,
) -> Importance:
    """The L1 norm of each filter, summed over the layers behind the site; biases and BatchNorm do not count."""
    return importance_of(sum_over(layers_behind(graph, site), lambda layer: filter_weights(layer).abs().sum(1)))


def l2(
    graph: Graph,
    site: Site,
    data: Examples,
    *,
    seed: int = 0,
    loss_fn: Measure = cross_entropy,
    batch: int = 256,
    device: Device = None,
) -> Importance:
    """The L2 norm of each filter, summed over the layers behind the site; biases and BatchNorm do not count."""
    return importance_of(sum_over(layers_behind(graph, site), lambda layer: filter_weights(layer).norm(dim=1)))


def geometric_median(
    graph: Graph,
    site: Site,
    data: Examples,
    *,
    seed: int = 0,
    loss_fn: Measure = cross_entropy,
    batch: int = 256,
    device: Device = None,
) -> Importance:
    """Sum of the distances to all other filters of the layer, summed over the layers behind the site."""
    return importance_of(sum_over(layers_behind(graph, site), _distances_to_all))


def _distances_to_all(layer: nn.Module) -> Tensor:
    rows = filter_weights(layer)
    # plain differences: the quicker way over products loses the small distances, which decide here
    distances: Tensor = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist")
    return distances.sum(1)


def batchnorm(
    graph: Graph,
    site: Site,
    data: Examples,
    *,
    seed: int = 0,
    loss_fn: Measure = cross_entropy,
    batch: int = 256,
    device: Device = None,
) -> Importance:
    """Absolute weight of each channel in the BatchNorm behind its filters, summed where several layers feed the site."""
    norms = norms_behind(graph, site)
    if not norms:
        raise InvalidInput(
            f"criterion 'batchnorm' at site {site.name!r}: no BatchNorm with weights lies between its filters and the place "
            f"where they are masked. Rank this site by 'l1' or 'l2' instead."
        )
    return importance_of(sum_over(norms, _scales))


def _scales(norm: nn.Module) -> Tensor:
    weight: Any = norm.weight
    return weight.detach().abs()  # type: ignore[no-any-return]  # a module's attribute has no type


def random_scores(
    graph: Graph,
    site: Site,
    data: Examples,
    *,
    seed: int = 0,
    loss_fn: Measure = cross_entropy,
    batch: int = 256,
    device: Device = None,
) -> Importance:
    """Uniform in [0, 1), drawn anew for each seed and site."""
    generator = generator_for(seed, "random criterion", site.name)
    return importance_of(torch.rand(site.channels, generator=generator, dtype=torch.float64))
