"""Sum of absolute weights, as Li et al. rank filters (Pruning filters for efficient ConvNets, 2017)."""

from __future__ import annotations

from secateurs.criteria.common import importance_of
from secateurs.criteria.filters import filter_weights, layers_behind, sum_over
from secateurs.data.examples import Examples
from secateurs.evaluate import Device, Measure, cross_entropy
from secateurs.graph import Graph
from secateurs.importance import Importance
from secateurs.sites import Site


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
