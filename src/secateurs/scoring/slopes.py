"""The linear model mask → score from slopes of the loss. Pure: tensors in, tensors out, float64 inside.

A loss at a random mask depends on all filters that are off together. Its slope along the mask concerns each filter alone: what
the loss would save if that filter were kept a little more. The mean slope over random masks therefore estimates the same
coefficients from far fewer passes. Every example has masks of its own, so that the variation between masks and between examples
averages out together.

A slope is not quite a difference: where removing a filter does the most harm, the loss is steepest near zero. The losses come
with the slopes and estimate the same coefficients, with more noise. So the slopes decide, except where the losses contradict
them by more than chance.

The score here is the loss with its sign turned, not brought to [0, 1] as in Eq. 2: losses of single examples have no common
smallest and largest. The order of the filters does not depend on it, and coefficients of different sites can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from secateurs._util.modules import device_of
from secateurs.errors import InvalidInput, NonFinite
from secateurs.graph.cost import cost
from secateurs.graph.masking import split_at
from secateurs.scoring.convergence import agreement, has_converged, masks_per_example, resampled_means
from secateurs.scoring.ensemble import PILOT, ROUNDS, Ensemble, EnsembleJob, EnsembleResult
from secateurs.scoring.evaluator import CachedEvaluator
from secateurs.scoring.importance import Importance, rank_correlation

_PARTS = 5  # of the examples, each predicted from the others
_DOUBT = 2.5  # standard errors by which losses must contradict slopes to correct them


@dataclass(frozen=True, eq=False)
class MaskedSlopes:
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

    def finite(self) -> MaskedSlopes:
        """The examples whose losses and slopes are finite under all their masks."""
        good = self.losses.isfinite().all(-1) & self.slopes.isfinite().flatten(1).all(-1)
        return MaskedSlopes(self.masks[good], self.losses[good], self.slopes[good])


def joined(parts: list[MaskedSlopes]) -> MaskedSlopes:
    """The examples of all parts, in order."""
    return MaskedSlopes(*(torch.cat([getattr(part, name) for part in parts]) for name in ("masks", "losses", "slopes")))


def fit_slopes(pairs: MaskedSlopes) -> Importance:
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
    each = per_example_coefficients(usable)
    coef, z = each.mean(0), usable.masks.double()
    return Importance(
        coef=coef,
        intercept=-usable.losses.double().mean() - z.mean((0, 1)) @ coef,
        stderr=each.std(0) / math.sqrt(len(each)),
        r2=_explained(usable, coef.expand_as(each)),
        r2_held_out=_explained(usable, _from_the_others(each)),
        split_half=rank_correlation(each[::2].mean(0), each[1::2].mean(0)),
    )


def per_example_coefficients(pairs: MaskedSlopes) -> Tensor:
    """Each example's estimate of the coefficients, float64 (N, C): their mean is the estimate, their spread its error.

    An example's mean of -slope. Coefficients fitted to losses, with one intercept per example, correct the slopes by any
    discrepancy beyond `_DOUBT` standard errors.
    """
    by_slopes = -pairs.slopes.double().mean(1)
    examples, each, channels = pairs.slopes.shape
    if examples * (each - 1) <= 2 * channels:
        return by_slopes
    by_losses, seen = _by_losses(pairs)
    differs = by_losses - by_slopes @ seen
    mean, chance = differs.mean(0), _DOUBT * differs.std(0) / math.sqrt(examples)
    return by_slopes + torch.where(mean.abs() > chance, differs - mean.sign() * chance, 0.0)


def _by_losses(pairs: MaskedSlopes) -> tuple[Tensor, Tensor]:
    """Each example's estimate of the coefficients from its losses (N, C), and the projection (C, C) on what masks identify.

    Masks that all keep the same number of filters leave a constant added to all coefficients undetermined.
    """
    z, saved = _within_examples(pairs)
    moments = torch.einsum("nkc,nkd->cd", z, z) / len(z)
    inverse = torch.linalg.pinv(moments, rtol=1e-9, hermitian=True)
    coef = inverse @ torch.einsum("nkc,nk->c", z, saved) / len(z)
    return coef + torch.einsum("nkc,nk->nc", z, saved - z @ coef) @ inverse, moments @ inverse


def _within_examples(pairs: MaskedSlopes) -> tuple[Tensor, Tensor]:
    """Masks (N, K, C) and -losses (N, K) as deviations from their means over each example's masks."""
    z, losses = pairs.masks.double(), pairs.losses.double()
    return z - z.mean(1, keepdim=True), losses.mean(1, keepdim=True) - losses


def _from_the_others(each: Tensor) -> Tensor:
    """For each example the coefficients (N, C) without the part of the examples that it belongs to."""
    part = torch.arange(len(each), device=each.device) % _PARTS
    others = torch.stack([each[part != p].mean(0) for p in range(min(_PARTS, len(each)))])
    return others[part]


def _explained(pairs: MaskedSlopes, coef: Tensor) -> Tensor:
    """Share of the variance of an example's losses under its masks that coefficients (N, C) explain."""
    z, saved = _within_examples(pairs)
    total = saved.square().sum()
    unexplained = (saved - (z * coef[:, None]).sum(-1)).square().sum()
    return torch.where(total > 0, 1 - unexplained / total, math.nan)


_FEWEST = 4  # examples with masks of their own
_SLICE = 64  # examples at once on a CPU: a round has so few that larger batches would leave cores without work
GRADIENT_PASS = 2.4  # cost of a forward and backward pass, in forward passes


def by_slopes(job: EnsembleJob) -> EnsembleResult:
    """Rounds of new examples, each under a few masks of its own, until the least important filters are the same twice."""
    found: list[MaskedSlopes] = []
    agreements: list[float] = []
    used = 0
    for number, pairs in enumerate(_rounds(job)):
        found.append(pairs)
        used += pairs.losses.numel()
        job.report_progress(0, used)
        if job.scoring.adaptive:
            agreements.append(_agreement(joined(found), job.bootstrap_generator(number)))
        if has_converged(agreements, job.scoring.agreement):
            break
    whole = joined(found)
    stable = has_converged(agreements, job.scoring.agreement) if job.scoring.adaptive else None
    ensemble = Ensemble(job.evaluator.site.name, whole.masks.flatten(0, 1), whole.losses.double().flatten())
    return EnsembleResult(fit_slopes(whole), ensemble, used, job.bound, stable, len(whole.losses))


def _rounds(job: EnsembleJob) -> Iterator[MaskedSlopes]:
    """Measure examples under masks until the bound is reached or the examples are used up."""
    order, bound, evaluator = job.order(), job.bound, job.evaluator
    if len(order) < 2 or bound < 2 * _FEWEST:
        raise InvalidInput(
            f"site {evaluator.site.name!r}: {bound} masks on {len(order)} examples are too few for slopes: wanted "
            f"{2 * _FEWEST} masks or more, on 2 examples or more. estimator = 'losses' needs fewer masks."
        )
    device = device_of(evaluator.graph.module) if evaluator.device is None else torch.device(evaluator.device)
    if device.type == "cpu":
        evaluator = replace(evaluator, batch=min(evaluator.batch, _SLICE))
    size = min(max(bound // (2 * ROUNDS), PILOT), len(order))
    first = evaluator.on(job.pool.take(order[:size].sort().values))
    each = _masks_each(job, first, len(order))
    most = bound // each  # examples
    for number, start in enumerate(range(0, min(most, len(order)), size)):
        rows = order[start : min(start + size, most)].sort().values
        measured = first if len(rows) == size and number == 0 else evaluator.on(job.pool.take(rows))
        yield _measured(job, measured, number, each)


def _measured(job: EnsembleJob, evaluator: CachedEvaluator, number: int, each: int) -> MaskedSlopes:
    """One round: its examples under `each` masks of their own."""
    masks = [job.masks(len(evaluator.examples), number, turn) for turn in range(each)]
    losses, slopes = evaluator.slopes(masks)
    return MaskedSlopes(torch.stack(masks, 1), losses.transpose(0, 1), slopes.transpose(0, 1))


def _masks_each(job: EnsembleJob, first: CachedEvaluator, available: int) -> int:
    """Masks for each example: as the noise in the first round calls for, more where the examples would not last.

    At least two, whose losses can be compared.
    """
    most = job.bound // _FEWEST  # so that a few examples are used, however small the bound
    least = min(max(math.ceil(job.bound / available), 2), most)
    if job.scoring.examples is not None:
        return least
    pilot = _measured(job, first, 0, 2).finite()
    if len(pilot.losses) < 2:
        return least
    graph = job.evaluator.graph
    before, whole = cost(split_at(graph, job.evaluator.site).prefix, graph.example).macs, cost(graph).macs
    preparing = before / (
        GRADIENT_PASS * max(whole - before, 1)
    )  # bringing an example to the site, in gradient passes behind it
    return min(max(least, masks_per_example(pilot.slopes, preparing=preparing)), most)


def _agreement(pairs: MaskedSlopes, generator: torch.Generator) -> float:
    """Stability under resampling of the examples with all their masks: as these are their own, both are resampled."""
    each = per_example_coefficients(pairs.finite())
    return agreement(each.mean(0), resampled_means(each, generator=generator)) if len(each) > 1 else 0.0
