"""Scale of the BatchNorm behind the filters (network slimming: Liu et al., 2017)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from secateurs.criteria.common import importance_of
from secateurs.criteria.filters import norms_behind, sum_over
from secateurs.data.examples import Examples
from secateurs.errors import InvalidInput
from secateurs.evaluate import Device, Measure, cross_entropy
from secateurs.graph import Graph
from secateurs.importance import Importance
from secateurs.sites import Site


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
