"""The linear model from losses at masks: every mask is measured on the same examples."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from secateurs.data.examples import Examples
from secateurs.ensemble import Ensemble
from secateurs.importance import Importance, PairImportance, fit_importance, fit_pairs, scores
from secateurs.noise import examples_needed
from secateurs.scoring.settings import Scoring
from secateurs.scoring.work import PILOT, ROUNDS, Scored, Work
from secateurs.stability import agreement, resampled_fits, settled


def by_fixed_masks(work: Work) -> Scored:
    """The paper's way: all masks at once, and the mean loss under each."""
    measured = work.bench.on(_examples_for_masks(work), announced=work.bound)
    masks = work.masks(work.bound)
    ensemble = Ensemble(work.bench.site.name, masks, measured.means(masks, partial(work.told, 0)))
    return Scored(_fit(work.scoring, ensemble), ensemble, len(masks), work.bound, None, len(measured.examples))


def by_rounds(work: Work) -> Scored:
    """Rounds of masks, each balanced with those before it, until the least important filters are the same twice."""
    measured = work.bench.on(_examples_for_masks(work), announced=work.bound)
    agreements: list[float] = []
    masks = torch.empty(0, work.channels, dtype=torch.bool)
    losses = torch.empty(0, len(measured.examples))
    for number in range(ROUNDS):
        count = work.bound * (number + 1) // ROUNDS - len(masks)
        if count == 0:
            continue
        drawn = work.masks(count, number, after=masks)
        losses = torch.cat([losses, measured.values(drawn, partial(work.told, len(masks)))])
        masks = torch.cat([masks, drawn])
        if len(masks) > work.channels + 1:
            agreements.append(_agreement_of_losses(work, masks, losses, number))
        if settled(agreements, work.scoring.agreement):
            break
    ensemble = Ensemble(work.bench.site.name, masks, losses.double().mean(1))
    stable = settled(agreements, work.scoring.agreement)
    return Scored(_fit(work.scoring, ensemble), ensemble, len(masks), work.bound, stable, len(measured.examples))


def _agreement_of_losses(work: Work, masks: Tensor, losses: Tensor, number: int) -> float:
    """With pairwise terms too it is the linear model that is judged: its order is the main part of theirs."""
    score, ridge = partial(scores, transform=work.scoring.transform), work.scoring.ridge
    coef = fit_importance(masks, score(losses.double().mean(1)), ridge=ridge).coef
    return agreement(coef, resampled_fits(masks, losses, score, ridge=ridge, generator=work.resampling(number)))


def _examples_for_masks(work: Work) -> Examples:
    """The examples that all masks share: as many as asked for, or as a pilot of two masks a filter says."""
    wanted = work.scoring.examples
    if wanted is not None:
        return work.pool if wanted == "all" else work.chosen(wanted)
    if len(work.pool) <= PILOT:
        return work.pool
    pilot = work.bench.on(work.chosen(PILOT), announced=work.bound)
    masks = work.masks(max(2 * work.channels, work.channels + 16), ROUNDS)  # a purpose that no round has
    needed = examples_needed(masks, pilot.values(masks), final=work.bound)
    return work.chosen(max(needed, PILOT))


def _fit(scoring: Scoring, ensemble: Ensemble) -> Importance | PairImportance:
    """The linear model mask → score (Eq. 3), or the one with pairwise terms."""
    scored = scores(ensemble.losses, scoring.transform)
    if scoring.model == "pairs":
        return fit_pairs(ensemble.masks, scored, ridge=scoring.ridge or 1e-4)
    return fit_importance(ensemble.masks, scored, ridge=scoring.ridge)
