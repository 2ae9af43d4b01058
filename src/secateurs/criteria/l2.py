"""Euclidean norm of the weights, as soft filter pruning ranks filters (He et al., 2018)."""

from __future__ import annotations

from secateurs.criteria.common import importance_of
from secateurs.criteria.filters import filter_weights, layers_behind, sum_over
from secateurs.data.examples import Examples
from secateurs.evaluate import Device, Measure, cross_entropy
from secateurs.graph import Graph
from secateurs.importance import Importance
from secateurs.sites import Site


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
