"""Distance from the geometric median of the layer's filters (FPGM: He et al., 2019): what lies near it, others can replace.

The geometric median of a layer is the point with the least sum of distances to all its filters. Ranking filters by that
sum, as FPGM does, needs no search for the point: the filter nearest to being the median has the least."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from secateurs.criteria.common import importance_of
from secateurs.criteria.filters import filter_weights, layers_behind, sum_over
from secateurs.data.examples import Examples
from secateurs.evaluate import Device, Measure, cross_entropy
from secateurs.graph import Graph
from secateurs.importance import Importance
from secateurs.sites import Site


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
