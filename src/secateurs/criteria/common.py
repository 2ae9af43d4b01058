"""What all criteria have in common: how they are called, and what they give."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from secateurs.data.examples import Examples
from secateurs.evaluate import Device, Measure
from secateurs.graph import Graph
from secateurs.importance import Importance
from secateurs.sites import Site


class Criterion(Protocol):
    """Ranks the filters of a site: higher coefficient = more important.

    All criteria take the same options, so that one can stand in for another; each leaves alone what it has no use for
    (a norm of weights looks at no data, only "random" at the seed).
    """

    def __call__(
        self,
        graph: Graph,
        site: Site,
        data: Examples,
        *,
        seed: int = ...,
        loss_fn: Measure = ...,
        batch: int = ...,
        device: Device = ...,
    ) -> Importance:
        """The importance of each of the site's channels as `graph` has them now, on the CPU."""
        ...


def importance_of(coef: Tensor) -> Importance:
    """An importance of coefficients (C,) alone: no linear model was fitted, so all else is NaN."""
    coef = coef.detach().cpu().double()
    unknown = torch.tensor(torch.nan, dtype=torch.float64)
    return Importance(coef, unknown, torch.full_like(coef, torch.nan), unknown, unknown, unknown)
