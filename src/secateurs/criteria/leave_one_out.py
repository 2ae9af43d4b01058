"""What the network loses when one filter alone is missing."""

from __future__ import annotations

import torch

from secateurs._util.modules import Device
from secateurs.criteria.filters import importance_of
from secateurs.data.dataset import Examples
from secateurs.graph.sites import Site
from secateurs.graph.trace import Graph
from secateurs.metrics import Measure, cross_entropy
from secateurs.scoring.ensemble import score_masks
from secateurs.scoring.importance import Importance


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
