"""Ways to choose which hidden neurons stay, all experiments at once: the paper's, those beyond it, and rivals.

Every method takes the networks, their points and how many neurons to keep, and gives a mask (E, H), True = kept. The
ensembles are the library's own: `sample_masks`, `scores`, `fit_importance`, `fit_pairs`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from secateurs.config import Transform
from secateurs.reproduce.xor.nets import Nets, Points, Setting, mask_losses, stream, uniform
from secateurs.scoring.importance import best_subset, fit_importance, fit_pairs, scores
from secateurs.scoring.masks import sample_masks


class Choose(Protocol):
    """Chooses the neurons that stay."""

    def __call__(self, nets: Nets, points: Points, keep: int, setting: Setting) -> Tensor:
        """A mask (E, H), True = kept, with `keep` neurons kept in every row."""
        ...


@dataclass(frozen=True)
class EnsembleMethod:
    """The masks of every experiment and the losses of the networks masked by them."""

    masks: Tensor  # (E, M, H)
    losses: Tensor  # (E, M)


def draw_ensemble(nets: Nets, points: Points, setting: Setting) -> EnsembleMethod:
    """Masks of their own for every experiment, scored on its training points."""
    hidden = nets.w2.shape[-1]
    masks = sample_masks(
        hidden,
        setting.masks,
        off=setting.off,
        generator=stream(setting, f"masks over {hidden}"),
        batch=(setting.first + setting.experiments,),
    )[setting.first :]
    return EnsembleMethod(masks, mask_losses(nets, points, masks))


def by_chance(nets: Nets, points: Points, keep: int, setting: Setting) -> Tensor:
    """Any neurons, drawn at random."""
    hidden = nets.w2.shape[-1]
    return _largest(uniform(setting, f"random of {hidden}", hidden), keep)


def by_ensembles(transform: Transform) -> Choose:
    """The paper's method: least squares from masks to scores, largest coefficients stay."""

    def choose(nets: Nets, points: Points, keep: int, setting: Setting) -> Tensor:
        ensemble = draw_ensemble(nets, points, setting)
        return _largest(fit_importance(ensemble.masks, scores(ensemble.losses, transform)).coef, keep)

    return choose


def by_pairs(nets: Nets, points: Points, keep: int, setting: Setting) -> Tensor:
    """Ensembles with a term for every pair of neurons, and a search for the subset with the best predicted score."""
    ensemble = draw_ensemble(nets, points, setting)
    return best_subset(fit_pairs(ensemble.masks, scores(ensemble.losses)), keep)


def _ranked(values: Callable[[Nets, Points], Tensor]) -> Choose:
    """The neurons with the largest `values` (E, H) stay."""

    def choose(nets: Nets, points: Points, keep: int, setting: Setting) -> Tensor:
        return _largest(values(nets, points), keep)

    return choose


def _l1(nets: Nets, points: Points) -> Tensor:
    return nets.w1[..., :2].abs().sum(-1)


def _l2(nets: Nets, points: Points) -> Tensor:
    return nets.w1[..., :2].square().sum(-1).sqrt()


def _in_times_out(nets: Nets, points: Points) -> Tensor:
    return _l2(nets, points) * nets.w2.abs()


def _geometric_median(nets: Nets, points: Points) -> Tensor:
    """Distance to all other neurons' weights together: one near the middle is taken to be replaceable by the others."""
    return torch.cdist(nets.w1, nets.w1, compute_mode="donot_use_mm_for_euclid_dist").sum(-1)


def _leave_one_out(nets: Nets, points: Points) -> Tensor:
    return mask_losses(nets, points, _all_but_one(torch.ones_like(nets.w2, dtype=torch.bool)))


def _taylor(nets: Nets, points: Points) -> Tensor:
    """Mean over the points of |activation × slope of the loss|: the first-order guess at what its removal changes."""
    error = nets.logits(points.x).sigmoid() - points.y
    return (nets.hidden(points.x) * error[..., None]).abs().mean(1) * nets.w2.abs()


def by_greedy_leave_one_out(nets: Nets, points: Points, keep: int, setting: Setting) -> Tensor:
    """One neuron goes at a time, the one without which the loss is smallest; then all that are left are tried again."""
    kept = torch.ones_like(nets.w2, dtype=torch.bool)
    for _ in range(kept.shape[-1] - keep):
        losses = mask_losses(nets, points, _all_but_one(kept)).masked_fill(~kept, torch.inf)
        kept = kept.scatter(-1, losses.argmin(-1, keepdim=True), False)
    return kept


def by_refit(nets: Nets, points: Points, keep: int, setting: Setting) -> Tensor:
    """One neuron goes at a time, the one whose loss a new output layer can best make up for.

    New output weights reproduce the whole network's logits by least squares. What such a fit loses without neuron j is
    coef_j² / (Gram⁻¹)_jj, so one inverse a step answers for all neurons. Retraining starts from the old weights all the
    same.
    """
    hidden = nets.hidden(points.x).double()
    terms = torch.cat([hidden, torch.ones_like(hidden[..., :1])], -1)
    gram = terms.mT @ terms
    gram = gram + 1e-9 * gram.diagonal(dim1=-2, dim2=-1).amax(-1)[:, None, None] * torch.eye(gram.shape[-1]).double()
    target = terms.mT @ nets.logits(points.x).double()[..., None]
    kept = torch.ones_like(nets.w2, dtype=torch.bool)
    for _ in range(kept.shape[-1] - keep):
        inverse, coef = _solve_kept(gram, target, kept)
        lost = coef.square() / inverse.diagonal(dim1=-2, dim2=-1)
        kept = kept.scatter(-1, lost[:, :-1].masked_fill(~kept, torch.inf).argmin(-1, keepdim=True), False)
    return kept


def _solve_kept(gram: Tensor, target: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse and coefficients of the normal equations restricted to the kept neurons and the constant."""
    inside = torch.cat([kept, torch.ones_like(kept[:, :1])], -1).double()
    restricted = gram * inside[:, :, None] * inside[:, None, :] + torch.diag_embed(1 - inside)
    inverse: Tensor = torch.linalg.inv(restricted)
    return inverse, (inverse @ (target * inside[..., None])).squeeze(-1)


def _all_but_one(kept: Tensor) -> Tensor:
    """For each neuron the mask without it: (E, H) to (E, H, H)."""
    return kept[:, None] & ~torch.eye(kept.shape[-1], dtype=torch.bool)


def _largest(values: Tensor, keep: int) -> Tensor:
    ids = values.argsort(dim=-1, stable=True)[..., -keep:]
    return torch.zeros_like(values, dtype=torch.bool).scatter_(-1, ids, True)


by_the_paper = by_ensembles("linear")

OTHER_METHODS: dict[str, Choose] = {
    "ensembles, log score": by_ensembles("log"),
    "ensembles with pairs": by_pairs,
    "L1": _ranked(_l1),
    "L2": _ranked(_l2),
    "norm in × out": _ranked(_in_times_out),
    "geometric median": _ranked(_geometric_median),
    "leave-one-out": _ranked(_leave_one_out),
    "greedy leave-one-out": by_greedy_leave_one_out,
    "mean |Taylor|": _ranked(_taylor),
    "least-squares refit": by_refit,
}
