"""The linear model mask → score from slopes of the loss. Pure: tensors in, tensors out, float64 inside.

A loss at a random mask tells of all filters that are off together. Its slope along the mask tells of each filter alone: what
the loss would save if that filter were kept a little more. The mean slope over random masks is therefore an estimate of the
same coefficients, from far fewer passes. Every example has masks of its own, so that what masks and what examples differ in
averages out together, with every pass.

A slope is not quite a difference: where removing a filter does the most harm, the last part of the way off is the steepest. The
losses come with the slopes, and say by themselves, only with more noise, what a filter is worth. So the slopes are believed but
where the losses contradict them by more than chance does.

The score here is the loss with its sign turned, not brought to [0, 1] as in Eq. 2: losses of single examples have no common
smallest and largest. The order of the filters does not depend on it, and coefficients of different sites can be compared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from secateurs.errors import InvalidInput, NonFinite
from secateurs.importance import Importance, rank_correlation

_PARTS = 5  # of the examples, each predicted from the others
_DOUBT = 2.5  # standard errors by which losses must contradict slopes to be heard


@dataclass(frozen=True, eq=False)
class Pairs:
    """N examples under K masks of their own: the loss of each pair, and its slope along the mask."""

    masks: Tensor  # (N, K, C) bool, True = kept
    losses: Tensor  # (N, K)
    slopes: Tensor  # (N, K, C)

    def __post_init__(self) -> None:
        masks, losses, slopes = self.masks.shape, self.losses.shape, self.slopes.shape
        if len(masks) != 3 or masks != slopes or masks[:2] != losses:
            raise InvalidInput(
                f"masks {tuple(masks)}, losses {tuple(losses)} and slopes {tuple(slopes)} do not fit: "
                f"wanted (N, K, C), (N, K) and (N, K, C)."
            )

    def finite(self) -> Pairs:
        """The examples whose losses and slopes are finite under all their masks."""
        good = self.losses.isfinite().all(-1) & self.slopes.isfinite().flatten(1).all(-1)
        return Pairs(self.masks[good], self.losses[good], self.slopes[good])


def joined(parts: list[Pairs]) -> Pairs:
    """The examples of all parts, in order."""
    return Pairs(*(torch.cat([getattr(part, name) for part in parts]) for name in ("masks", "losses", "slopes")))


def fit_slopes(pairs: Pairs) -> Importance:
    """The linear model from pairs of examples and masks; `coef` is the loss saved by keeping each filter.

    Standard errors come from the spread between examples, `split_half` from two halves of them. `r2` is about single losses
    within an example, so it is low even for a good model, and NaN where no example has two masks. Examples with a NaN or an
    infinite value are left out.
    """
    usable = pairs.finite()
    if len(usable.losses) < 2:
        raise NonFinite(
            f"slopes: finite for {len(usable.losses)} of {len(pairs.losses)} examples, wanted at least 2. "
            f"Check the unmasked network's outputs on the scoring data."
        )
    each = gains(usable)
    coef, z = each.mean(0), usable.masks.double()
    return Importance(
        coef=coef,
        intercept=-usable.losses.double().mean() - z.mean((0, 1)) @ coef,
        stderr=each.std(0) / math.sqrt(len(each)),
        r2=_explained(usable, coef.expand_as(each)),
        r2_held_out=_explained(usable, _from_the_others(each)),
        split_half=rank_correlation(each[::2].mean(0), each[1::2].mean(0)),
    )


def gains(pairs: Pairs) -> Tensor:
    """What each example says of the coefficients, float64 (N, C): their mean is the estimate, their spread its error.

    An example's mean of -slope. Where the coefficients by losses (least squares on the masks, every example with a level of its
    own) differ from that by more than `_DOUBT` standard errors, the estimate is moved towards them by what is beyond that.
    """
    by_slopes = -pairs.slopes.double().mean(1)
    examples, each, channels = pairs.slopes.shape
    if examples * (each - 1) <= 2 * channels:
        return by_slopes
    by_losses, seen = _by_losses(pairs)
    differs = by_losses - by_slopes @ seen
    mean, chance = differs.mean(0), _DOUBT * differs.std(0) / math.sqrt(examples)
    return by_slopes + torch.where(mean.abs() > chance, differs - mean.sign() * chance, 0.0)


def _by_losses(pairs: Pairs) -> tuple[Tensor, Tensor]:
    """What each example's losses say of the coefficients (N, C), and the projection (C, C) on what its masks can tell.

    Masks that all keep the same number of filters cannot tell a constant that is added to all coefficients.
    """
    z, saved = _within_examples(pairs)
    moments = torch.einsum("nkc,nkd->cd", z, z) / len(z)
    inverse = torch.linalg.pinv(moments, rtol=1e-9, hermitian=True)
    coef = inverse @ torch.einsum("nkc,nk->c", z, saved) / len(z)
    return coef + torch.einsum("nkc,nk->nc", z, saved - z @ coef) @ inverse, moments @ inverse


def _within_examples(pairs: Pairs) -> tuple[Tensor, Tensor]:
    """Masks (N, K, C) and -losses (N, K) as deviations from their means over each example's masks."""
    z, losses = pairs.masks.double(), pairs.losses.double()
    return z - z.mean(1, keepdim=True), losses.mean(1, keepdim=True) - losses


def _from_the_others(each: Tensor) -> Tensor:
    """For each example the coefficients (N, C) without the part of the examples that it belongs to."""
    part = torch.arange(len(each), device=each.device) % _PARTS
    others = torch.stack([each[part != p].mean(0) for p in range(min(_PARTS, len(each)))])
    return others[part]


def _explained(pairs: Pairs, coef: Tensor) -> Tensor:
    """Share of the variance of an example's losses under its masks that coefficients (N, C) explain."""
    z, saved = _within_examples(pairs)
    total = saved.square().sum()
    unexplained = (saved - (z * coef[:, None]).sum(-1)).square().sum()
    return torch.where(total > 0, 1 - unexplained / total, math.nan)
