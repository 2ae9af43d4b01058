"""What the network loses when one filter alone is missing."""

from __future__ import annotations

import torch

from secateurs.criteria.common import importance_of
from secateurs.data.examples import Examples
from secateurs.ensemble import score_masks
from secateurs.evaluate import Device, Measure, cross_entropy
from secateurs.graph import Graph
from secateurs.importance import Importance
from secateurs.sites import Site


def leave_one_out(
    graph: Graph,
    site: Site,
    data: Examples,
    *,
    seed: int = 0,
    loss_fn: Measure = cross_entropy,
    batch: int = 256,
    device: Device = None,
) -> Importance:
    """Mean loss over the data without the filter, less the loss of the whole network: one mask for each filter."""
    alone_missing = ~torch.eye(site.channels, dtype=torch.bool)
    masks = torch.cat([torch.ones(1, site.channels, dtype=torch.bool), alone_missing])
    losses = score_masks(graph, site, masks, data, loss_fn=loss_fn, batch=batch, device=device).losses
    return importance_of(losses[1:] - losses[0])
