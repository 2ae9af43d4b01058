"""ThiNet (Luo et al., 2017): channels whose share in the next layer's output can go with the least error.

The next layer's output, bias aside, is a sum over its input channels. All that the method asks is in the second moments of
these shares, a matrix (C, C): the error without a set of channels is the sum of the set's entries, the best scales of the
others are the solution of a linear system. The authors draw 10 random (filter, place) pairs of an image; here every filter
counts, at all places that a repair would look at.
"""

from __future__ import annotations

import torch
from torch import Tensor

from secateurs._util.modules import Device
from secateurs.criteria import CriterionContext, criterion
from secateurs.data.dataset import Examples
from secateurs.errors import InvalidInput
from secateurs.graph.sites import Site
from secateurs.graph.trace import Graph
from secateurs.repair import Reconstruction, observe

_RIDGE = 1e-9  # of the mean energy: two equal channels have no unique scales


def share_moments(found: Reconstruction) -> Tensor:
    """Second moments (C, C) of the shares of a site's channels in the outputs of its consumers, summed over filters and places.

    At a sum of channels each channel is a share of its own.
    """
    channels = found.site.channels
    total = torch.zeros(channels, channels, dtype=torch.float64)
    for layer in found.layers:
        for gram, weight, source in zip(layer.total.gram, layer.start, layer.source, strict=True):
            belongs = torch.nn.functional.one_hot(source + 1, channels + 1)[:, 1:].double()  # no column for elsewhere
            total += belongs.T @ (gram * (weight @ weight.T)) @ belongs
    for each in found.sums:
        inside = each.source >= 0
        total += torch.diag(torch.zeros(channels).double().index_add(0, each.source[inside], each.sums[3][inside]))
    return total


def removal_order(moments: Tensor) -> Tensor:
    """Channels in the order in which the removed set grows: each time the one with which it loses the least (ICCV)."""
    removed, left = torch.zeros(len(moments), dtype=torch.float64), torch.ones(len(moments), dtype=torch.bool)
    order = []
    for _ in range(len(moments)):
        # ‖Σ_T x_t + x_j‖² less ‖Σ_T x_t‖², which is the same for all
        costs = moments.diagonal() + 2 * moments @ removed
        order.append(int(costs.masked_fill(~left, torch.inf).argmin()))
        removed[order[-1]], left[order[-1]] = 1.0, False
    return torch.tensor(order)


def pursuit_order(moments: Tensor) -> Tensor:
    """The same from the other end: the kept set grows by the channel that leaves the least error, scales solved anew."""
    whole, kept = moments.sum(1), list[int]()
    for _ in range(len(moments)):
        weights = scales(moments, _mask(kept, len(moments)))
        residual = whole - moments @ weights  # what each channel has in common with what is still missing
        gains = residual.square() / moments.diagonal().clamp_min(1e-300)
        gains[kept] = -1.0
        kept.append(int(gains.argmax()))
    return torch.tensor(kept[::-1])


def scales(moments: Tensor, keep: Tensor) -> Tensor:
    """One factor for each kept channel (C,), 0 for the others, that best reproduces the sum of all shares."""
    found = torch.zeros(len(moments), dtype=torch.float64)
    if bool(keep.any()):
        inner = moments[keep][:, keep]
        ridge = _RIDGE * max(float(inner.diagonal().mean()), 1e-300)
        found[keep] = torch.linalg.solve(inner + ridge * torch.eye(len(inner)).double(), moments[keep].sum(1))
    return found


def error(moments: Tensor, weights: Tensor) -> float:
    """Share of the energy of the whole sum that is lost where channel c counts `weights[c]` times; 0 for a removed one."""
    lacking = 1 - weights.double()
    return float(lacking @ moments @ lacking) / max(float(moments.sum()), 1e-300)


def observed(graph: Graph, site: Site, examples: Examples, *, batch: int, device: Device = None, seed: int = 0) -> Tensor:
    """The moments of a site's shares over the examples."""
    found = observe(graph, site, examples, batch=batch, device=device, seed=seed)
    if not found.layers and not found.sums:
        raise InvalidInput(f"thinet at site {site.name!r}: no layer or sum that reads it can be observed. Rank it by 'l1'.")
    return share_moments(found)


@criterion("thinet")
def thinet(context: CriterionContext) -> Tensor:
    """Place in the order of removal, ICCV 2017."""
    return _places(removal_order(_moments(context)))


@criterion("thinet-pursuit")
def thinet_pursuit(context: CriterionContext) -> Tensor:
    """Place in the order of the matching pursuit, TPAMI 2018."""
    return _places(pursuit_order(_moments(context)))


def _moments(context: CriterionContext) -> Tensor:
    if len(context.examples) == 0:
        raise InvalidInput("criterion 'thinet': got no examples, wanted at least one to observe.")
    evaluator = context.evaluator
    return observed(
        context.graph, context.site, context.examples, batch=evaluator.batch, device=evaluator.device, seed=context.seed
    )


def _places(order: Tensor) -> Tensor:
    return torch.empty(len(order), dtype=torch.float64).scatter_(0, order, torch.arange(len(order)).double())


def _mask(ids: list[int], width: int) -> Tensor:
    mask = torch.zeros(width, dtype=torch.bool)
    mask[ids] = True
    return mask
