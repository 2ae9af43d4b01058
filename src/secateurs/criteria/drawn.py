"""By chance: what every other criterion has to beat."""

from __future__ import annotations

import torch

from secateurs.criteria.common import importance_of
from secateurs.data.examples import Examples
from secateurs.data.seeding import generator_for
from secateurs.evaluate import Device, Measure, cross_entropy
from secateurs.graph import Graph
from secateurs.importance import Importance
from secateurs.sites import Site


def drawn(
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
