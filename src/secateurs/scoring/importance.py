"""Step 5 of 9: takes masks and losses, gives an `Importance`. Pure: tensors in, tensors out, float64 inside.

All functions work over leading batch dimensions (many ensembles at once), without a loop over them.

The model is score ≈ intercept + mask · coef, fitted by least squares (Eq. 3). Masks and scores are centred first, and of all
solutions the one of smallest norm is taken. That determines what the paper's design leaves open: when every mask keeps the same
number K of filters, adding a constant to all coefficients and subtracting K times it from the intercept changes no prediction,
so coefficients are identified up to a constant only. The smallest norm is the one whose coefficients add up to zero. The
paper's fit without an intercept is the same model: its coefficients are these plus intercept / K, in the same order. Where
masks differ in how many filters they keep, as in the `bernoulli` design, the coefficients are simply those of least squares.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from secateurs.config import Transform
from secateurs.errors import InvalidInput, NonFinite, suggest

_SMALLEST_LOSS = 1e-12  # `log` treats smaller losses as this one: a loss that underflows to 0 must not swamp all the others
_MAX_SWAPS = 1000  # of `best_subset`; every swap raises the prediction, so this only ends cycles of rounding


@dataclass(frozen=True)
class Importance:
    """The linear model mask → score of one ensemble, or of a batch of them, and how far to trust it."""

    coef: Tensor  # (..., C) score gained by keeping each filter, others drawn at random; may be negative
    intercept: Tensor  # (...)
    stderr: Tensor  # (..., C) of coef; inf where the masks cannot tell (a filter that never varies, too few masks)
    r2: Tensor  # (...) share of the scores' variance the model explains; NaN where scores do not vary
    r2_held_out: Tensor  # (...) the same on masks that were not fitted (cross-validation); can be negative
    split_half: Tensor  # (...) rank correlation of the coefficients fitted to two halves of the masks


@dataclass(frozen=True)
class PairImportance:
    """The model with pairwise terms: score ≈ intercept + Σ linear_c z_c + Σ_{c<d} pairs_cd z_c z_d."""

    linear: Tensor  # (..., C)
    pairs: Tensor  # (..., C, C) symmetric, zero diagonal: what two filters are worth together beyond the sum of both
    intercept: Tensor  # (...)
    r2: Tensor  # (...) as in Importance
    r2_held_out: Tensor  # (...)

    def predict(self, masks: Tensor) -> Tensor:
        """The predicted score of each mask: (..., M, C) to (..., M)."""
        z = masks.to(self.linear)
        together = ((z @ self.pairs) * z).sum(-1) / 2
        return self.intercept[..., None] + (z @ self.linear[..., None]).squeeze(-1) + together


def scores(losses: Tensor, transform: Transform = "linear") -> Tensor:
    """Eq. 2 over the last axis: the smallest loss scores 1, the largest 0, the others in between in proportion.

    `log` puts the loss's logarithm in place of the loss, `rank` its rank (ties share the mean of theirs). Equal losses
    all score 1: none is worse than another. A NaN or infinite loss scores 0 and takes no part in the minimum and
    maximum. Returns float64.
    """
    if transform not in get_args(Transform):
        raise InvalidInput(f"transform: got {transform!r}.{suggest(transform, get_args(Transform))}")
    if losses.ndim == 0 or losses.shape[-1] == 0:
        raise InvalidInput(f"losses: got shape {tuple(losses.shape)}, wanted one loss for each mask on the last axis.")
    losses = losses.double()
    finite = losses.isfinite()
    if not bool(finite.any(-1).all()):
        raise NonFinite("losses: every one is NaN or infinite. Check the unmasked network's outputs on the scoring data.")
    levels = _transformed(losses, finite, transform)
    low = levels.masked_fill(~finite, math.inf).amin(-1, keepdim=True)
    high = levels.masked_fill(~finite, -math.inf).amax(-1, keepdim=True)
    spread = high - low
    shares = torch.where(spread > 0, (levels - low) / spread, 0.0)
    return (1 - shares).masked_fill(~finite, 0.0)


def fit_importance(
    masks: Tensor,
    scores: Tensor,
    *,
    ridge: float = 0.0,
    held_out: float = 0.2,
    generator: torch.Generator | None = None,
) -> Importance:
    """Fit the linear model mask → score by least squares: masks (..., M, C), True = kept, and scores (..., M).

    `ridge` adds `ridge` · |coef|² to the mean squared error (standard errors then leave out the bias it causes). r² on
    held-out masks comes from cross-validation in which each part holds out a share `held_out`; the coefficients use all
    masks. Parts and halves take every k-th mask as given, or as shuffled by `generator`: give one if the order of the
    masks means something.
    """
    z, s = _checked(masks, scores, ridge, held_out)
    rows = _row_order(z, generator)
    fit = _least_squares(z, s, ridge)

    def predicted(train: Tensor, test: Tensor) -> Tensor:
        part = _least_squares(z[..., train, :], s[..., train], ridge)
        return part.intercept[..., None] + (z[..., test, :] @ part.coef[..., None]).squeeze(-1)

    halves = [_least_squares(z[..., half, :], s[..., half], ridge).coef for half in (rows[::2], rows[1::2])]
    fitted = fit.intercept[..., None] + (z @ fit.coef[..., None]).squeeze(-1)
    return Importance(
        coef=fit.coef,
        intercept=fit.intercept,
        stderr=_standard_errors(fit, (s - fitted).square().sum(-1), s.shape[-1]),
        r2=_explained(s, fitted),
        r2_held_out=_explained(s, _cross_validated(predicted, rows, s, held_out)),
        split_half=rank_correlation(*halves),
    )


def fit_pairs(
    masks: Tensor,
    scores: Tensor,
    *,
    ridge: float = 1e-4,
    held_out: float = 0.2,
    generator: torch.Generator | None = None,
) -> PairImportance:
    """Fit the model with pairwise terms, arguments as in `fit_importance`.

    It has C(C+1)/2 coefficients besides the intercept, and needs that many different masks to tell them all apart: 55
    for 10 filters, 2,080 for 64, 131,328 for 512. With fewer, `ridge` (or, when it is 0, the smallest norm) shares out
    what is not known, and `r2_held_out` says whether the pairs help: compare it with that of
    `fit_importance`. Masks of equal size, as of the `exact` design, cannot tell them all apart in any number, but do
    for subsets of that size.
    """
    z, s = _checked(masks, scores, ridge, held_out)
    rows = _row_order(z, generator)
    fit = _fit_pairs(z, s, ridge)

    def predicted(train: Tensor, test: Tensor) -> Tensor:
        return _fit_pairs(z[..., train, :], s[..., train], ridge).predict(z[..., test, :])

    return PairImportance(
        linear=fit.linear,
        pairs=fit.pairs,
        intercept=fit.intercept,
        r2=_explained(s, fit.predict(z)),
        r2_held_out=_explained(s, _cross_validated(predicted, rows, s, held_out)),
    )


def order(importance: Importance | PairImportance) -> Tensor:
    """Filter ids (..., C) in the order to remove them, least important first; equals by index.

    With pairwise terms the worth of a filter depends on what is left, and two filters that work against each other cost
    much alone and nothing together. So each step finds the two filters that cost least together, and removes the lesser.
    """
    if isinstance(importance, Importance):
        return importance.coef.argsort(dim=-1, stable=True)
    return _greedy_order(importance, importance.linear.shape[-1])


def order_by_sets(slopes: Tensor) -> Tensor:
    """Filter ids (C,) in the order to remove them, from the slopes (N, C) of N examples along C filters; equals by index.

    To each example belongs a linear model of masks: a set of filters that goes changes its value by minus the sum of their
    slopes. Next goes the filter with which the mean square of that change over all examples is smallest. So filters that stand
    in for each other do not all go first: their slopes add up, where those that differ from example to example do not.
    """
    given = slopes.double()
    moments = given.mT @ given / len(given)
    added = moments.diagonal().clone()  # to the mean square, if this filter goes next
    found = []
    for _ in range(len(moments)):
        chosen = int(added.argmin())
        found.append(chosen)
        added += 2 * moments[chosen]
        added[chosen] = math.inf
    return torch.tensor(found)


def best_subset(importance: PairImportance, keep: int) -> Tensor:
    """The `keep` filters with the best predicted score, bool (..., C), True = kept.

    Greedy, so that it scales to wide layers: filters are removed one at a time as in `order`, then a kept one is swapped for
    a removed one for as long as the best such swap raises the prediction. No single swap improves on the result; a better
    one may exist.
    """
    channels = importance.linear.shape[-1]
    if not 1 <= keep <= channels:
        raise InvalidInput(f"keep: got {keep}, wanted 1 to {channels} filters.")
    removed = _greedy_order(importance, channels - keep)
    kept = torch.ones_like(importance.linear, dtype=torch.bool).scatter_(-1, removed, False)
    for _ in range(_MAX_SWAPS if keep < channels else 0):
        better = _swapped(importance, kept)
        if torch.equal(better, kept):
            break
        kept = better
    return kept


def rank_correlation(left: Tensor, right: Tensor) -> Tensor:
    """Spearman's correlation over the last axis, ties at their mean rank; NaN where either side is constant."""
    a, b = (ranks - ranks.mean(-1, keepdim=True) for ranks in (_ranks(left), _ranks(right)))
    return (a * b).sum(-1) / (a.square().sum(-1) * b.square().sum(-1)).sqrt()


def _transformed(losses: Tensor, finite: Tensor, transform: Transform) -> Tensor:
    if transform == "linear":
        return losses
    if transform == "rank":
        return _ranks(losses.masked_fill(~finite, math.inf))  # the non-finite rank last, whatever they are
    if bool((losses[finite] < 0).any()):
        lowest = float(losses[finite].min())
        raise InvalidInput(f"losses: transform 'log' wants none below 0, got {lowest:.6g}. Use 'linear' or 'rank'.")
    return losses.clamp_min(_SMALLEST_LOSS).log()


def _ranks(values: Tensor) -> Tensor:
    """Rank of each value on the last axis, from 0; equal values share the mean of their ranks."""
    values = values.contiguous()
    ascending = values.sort(-1).values
    below = torch.searchsorted(ascending, values)
    up_to = torch.searchsorted(ascending, values, right=True)
    return (below + up_to - 1).double() / 2


@dataclass(frozen=True)
class _Fit:
    """Least squares on centred features, with what its standard errors need."""

    coef: Tensor  # (..., F)
    intercept: Tensor  # (...)
    variances: Tensor  # (..., F) of coef, for a residual variance of 1; inf where not identified
    parameters: Tensor  # (...) how many the data pays for (the rank; less with ridge)


def _least_squares(features: Tensor, s: Tensor, ridge: float) -> _Fit:
    """Smallest-norm least squares of s (..., M) on features (..., M, F)."""
    count, width = features.shape[-2:]
    centre, mean = features.mean(-2, keepdim=True), s.mean(-1, keepdim=True)
    x = features - centre
    q, r = torch.linalg.qr(x)  # first, because the singular values of the small r are those of x, and far cheaper
    u, sizes, vt = torch.linalg.svd(r, full_matrices=False)
    seen = sizes > sizes.amax(-1, keepdim=True) * (10 * max(count, width) * torch.finfo(x.dtype).eps)
    inverse = torch.where(seen, sizes / (sizes.square() + ridge * count), 0.0)
    coef = vt.mT @ (inverse[..., None] * (u.mT @ (q.mT @ (s - mean)[..., None])))
    known = (vt.square() * seen[..., None]).sum(-2)
    # Constant row sums hide the all-ones direction: coefficients are then meant up to a constant, and so far known.
    known = known + torch.where(x.sum(-1).abs().amax(-1) < 1e-9 * width, 1 / width, 0.0)[..., None]
    variances = (vt.square() * inverse.square()[..., None]).sum(-2)
    return _Fit(
        coef=coef.squeeze(-1),
        intercept=mean.squeeze(-1) - (centre @ coef).squeeze(-1).squeeze(-1),
        variances=torch.where((known > 1 - 1e-6) | (ridge > 0), variances, math.inf),
        parameters=(sizes * inverse).sum(-1),
    )


def _standard_errors(fit: _Fit, squared_error: Tensor, count: int) -> Tensor:
    freedom = count - 1 - fit.parameters
    residual = torch.where(freedom > 0.5, squared_error / freedom.clamp_min(0.5), math.inf)
    return (residual[..., None] * fit.variances).sqrt().nan_to_num(nan=math.inf, posinf=math.inf)


def _fit_pairs(z: Tensor, s: Tensor, ridge: float) -> PairImportance:
    """Solve for whichever is fewer, coefficients or masks: both ways give the same model."""
    count, channels = z.shape[-2:]
    centre = z.mean(-2, keepdim=True)
    u = z - centre
    few_masks = count < channels * (channels + 1) // 2
    linear, pairs = (_pairs_by_masks if few_masks else _pairs_by_terms)(u, s, ridge)
    # From deviations back to masks: (z_c - p_c)(z_d - p_d) holds -p_d z_c, which belongs to the linear term.
    linear = linear - (pairs @ centre.mT).squeeze(-1)
    without_intercept = PairImportance(linear, pairs, torch.zeros_like(s[..., 0]), *[torch.zeros_like(s[..., 0])] * 2)
    intercept = (s - without_intercept.predict(z)).mean(-1)
    return PairImportance(linear, pairs, intercept, without_intercept.r2, without_intercept.r2_held_out)


def _pairs_by_terms(u: Tensor, s: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    channels = u.shape[-1]
    first, second = torch.triu_indices(channels, channels, offset=1, device=u.device)
    scale = _pair_scale(u).sqrt()[..., None]
    terms = torch.cat([u, scale[..., None] * u[..., first] * u[..., second]], -1)
    coef = _ridge(terms, s, ridge) if ridge > 0 else _least_squares(terms, s, 0.0).coef
    pairs = u.new_zeros(*u.shape[:-2], channels, channels)
    pairs[..., first, second] = scale * coef[..., channels:]
    return coef[..., :channels], pairs + pairs.mT


def _ridge(features: Tensor, s: Tensor, ridge: float) -> Tensor:
    """The coefficients of `_least_squares` for a positive `ridge`, without the cost of singular vectors."""
    x, y = features - features.mean(-2, keepdim=True), s - s.mean(-1, keepdim=True)
    penalty = ridge * x.shape[-2] * torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    coef: Tensor = torch.linalg.solve(x.mT @ x + penalty, x.mT @ y[..., None])
    return coef.squeeze(-1)


def _pairs_by_masks(u: Tensor, s: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """One weight for each mask instead of each term: the C²/2 products are never written down, so wide layers fit."""
    count, scale = u.shape[-2], _pair_scale(u)[..., None, None]
    kernel = u @ u.mT
    kernel = kernel + scale * (kernel.square() - u.square() @ u.square().mT) / 2  # Σ_{c<d} u_c u_d u'_c u'_d
    kernel = kernel - kernel.mean(-1, keepdim=True)
    kernel = kernel - kernel.mean(-2, keepdim=True)
    centred = (s - s.mean(-1, keepdim=True))[..., None]
    if ridge > 0:
        penalised = kernel + ridge * count * torch.eye(count, dtype=u.dtype, device=u.device)
        weights = torch.linalg.solve(penalised, centred)
    else:
        weights = torch.linalg.pinv(kernel, rtol=10 * count * torch.finfo(u.dtype).eps, hermitian=True) @ centred
    weights = weights - weights.mean(-2, keepdim=True)
    pairs = scale * (u.mT @ (weights * u))
    return (u.mT @ weights).squeeze(-1), pairs - torch.diag_embed(pairs.diagonal(dim1=-2, dim2=-1))


def _pair_scale(u: Tensor) -> Tensor:
    """Makes all pairs together vary as much as all single filters: else a wide layer's many pairs would swamp them."""
    singles, fourth = u.square().sum(-1), u.square().square().sum(-1)
    pairs = (singles.square() - fourth) / 2
    return singles.sum(-1) / pairs.sum(-1).clamp_min(torch.finfo(u.dtype).tiny)


def _greedy_order(importance: PairImportance, steps: int) -> Tensor:
    """The first `steps` filters to remove, (..., steps), one at a time."""
    worth = importance.linear + importance.pairs.sum(-1)
    removed = []
    for left in range(steps, 0, -1):
        least = _next_to_remove(worth, importance.pairs) if left > 1 else worth.argmin(-1, keepdim=True)
        removed.append(least)
        partners = importance.pairs.gather(-2, least[..., None].expand(*least.shape, worth.shape[-1])).squeeze(-2)
        worth = (worth - partners).scatter(-1, least, math.inf)
    empty = torch.empty((*worth.shape[:-1], 0), dtype=torch.long, device=worth.device)
    return torch.cat([empty, *removed], -1)


def _next_to_remove(worth: Tensor, pairs: Tensor) -> Tensor:
    """Of the two filters that cost least together, the one that costs less alone, (..., 1)."""
    channels = worth.shape[-1]
    itself = torch.eye(channels, dtype=torch.bool, device=worth.device)
    joint = (worth[..., :, None] + worth[..., None, :] - pairs).masked_fill(itself, math.inf)
    place = joint.flatten(-2).argmin(-1, keepdim=True)
    first, second = place // channels, place % channels
    return torch.where(worth.gather(-1, second) < worth.gather(-1, first), second, first)


def _swapped(importance: PairImportance, kept: Tensor) -> Tensor:
    """`kept` after the one swap that raises the prediction most, in each ensemble where some swap does."""
    channels = kept.shape[-1]
    worth = importance.linear + (importance.pairs @ kept.to(importance.pairs)[..., None]).squeeze(-1)
    # entry (c, d): c is removed, d kept. The worth of d was counted beside c, so their pair is subtracted
    gain = worth[..., None, :] - worth[..., :, None] - importance.pairs
    gain = gain.masked_fill(~(kept[..., :, None] & ~kept[..., None, :]), -math.inf)
    best, place = gain.flatten(-2).max(-1, keepdim=True)
    scale = importance.linear.abs().amax(-1, keepdim=True) + importance.pairs.abs().flatten(-2).amax(-1, keepdim=True)
    swapped = kept.scatter(-1, place // channels, False).scatter(-1, place % channels, True)
    return torch.where(best > 1e-12 * scale, swapped, kept)


def _explained(s: Tensor, fitted: Tensor) -> Tensor:
    total = (s - s.mean(-1, keepdim=True)).square().sum(-1)
    return torch.where(total > 0, 1 - (s - fitted).square().sum(-1) / total, math.nan)


def _cross_validated(predicted: Callable[[Tensor, Tensor], Tensor], rows: Tensor, s: Tensor, held_out: float) -> Tensor:
    """Every score predicted by a fit that did not see it, (..., M)."""
    parts = min(max(round(1 / held_out), 2), len(rows))
    result = torch.empty_like(s)
    place = torch.arange(len(rows), device=rows.device)
    for part in range(parts):
        test = rows[place % parts == part]
        result[..., test] = predicted(rows[place % parts != part], test)
    return result


def _row_order(z: Tensor, generator: torch.Generator | None) -> Tensor:
    count = z.shape[-2]
    if generator is None:
        return torch.arange(count, device=z.device)
    return torch.randperm(count, generator=generator, device=generator.device).to(z.device)


def _checked(masks: Tensor, scores: Tensor, ridge: float, held_out: float) -> tuple[Tensor, Tensor]:
    """Masks and scores as float64, or the reason why they cannot be fitted."""
    if masks.ndim < 2 or masks.shape[:-1] != scores.shape:
        raise InvalidInput(
            f"masks {tuple(masks.shape)} and scores {tuple(scores.shape)} do not fit: wanted (..., M, C) and (..., M)."
        )
    if masks.shape[-2] < 2:
        raise InvalidInput(f"masks: got {masks.shape[-2]}, wanted at least 2 to compare (the paper uses 10 for each filter).")
    if not ridge >= 0:
        raise InvalidInput(f"ridge: got {ridge}, wanted 0 or more.")
    if not 0 < held_out <= 0.5:
        raise InvalidInput(f"held_out: got {held_out}, wanted a share above 0 and up to 0.5.")
    if not bool(scores.isfinite().all()):
        raise NonFinite("scores: some are NaN or infinite. Turn losses into scores with `scores(losses)` first.")
    return masks.double(), scores.double()
