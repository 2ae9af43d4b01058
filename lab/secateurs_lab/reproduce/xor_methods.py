"""Ways to choose which hidden neurons stay, all experiments at once: the paper's, those beyond it, and rivals.

Every method takes the networks, their points and how many neurons to keep, and returns a mask (E, H), True = kept. The
ensembles are the library's own: `sample_masks`, `scores`, `fit_importance`, `fit_pairs`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from secateurs.config import Transform
from secateurs.scoring.importance import best_subset, fit_importance, fit_pairs, scores
from secateurs.scoring.masks import sample_masks
from secateurs_lab.reproduce.xor_nets import Nets, Points, Setting, mask_losses, stream, uniform

Choose = Callable[[Nets, Points, int, Setting], Tensor]


def by_chance(nets: Nets, points: Points, keep: int, setting: Setting) -> Tensor:
    """Keep neurons drawn at random."""
    hidden = nets.w2.shape[-1]
    return _largest(uniform(setting, f"random of {hidden}", hidden), keep)


def by_ensembles(transform: Transform) -> Choose:
    """Fit least squares from masks to scores, and keep the largest coefficients: the paper's method."""

    def choose(nets: Nets, points: Points, keep: int, setting: Setting) -> Tensor:
        masks, losses = _ensemble(nets, points, setting)
        return _largest(fit_importance(masks, scores(losses, transform)).coef, keep)

    return choose


def by_pairs(nets: Nets, points: Points, keep: int, setting: Setting) -> Tensor:
    """Fit ensembles with a term for every pair of neurons, and search for the subset with the best predicted score."""
    masks, losses = _ensemble(nets, points, setting)
    return best_subset(fit_pairs(masks, scores(losses)), keep)


def _ensemble(nets: Nets, points: Points, setting: Setting) -> tuple[Tensor, Tensor]:
    """Draw separate masks (E, M, H) for every experiment, and measure their losses (E, M) on its training points."""
    hidden, count = nets.w2.shape[-1], setting.first + setting.experiments
    generator = stream(setting, f"masks over {hidden}")
    masks = sample_masks(hidden, setting.masks, off=setting.off, generator=generator, batch=(count,))[setting.first :]
    return masks, mask_losses(nets, points, masks)


def by_greedy_leave_one_out(nets: Nets, points: Points, keep: int, setting: Setting) -> Tensor:
    """Remove one neuron at a time, the one without which the loss is smallest, and measure all others again."""
    kept = torch.ones_like(nets.w2, dtype=torch.bool)
    for _ in range(kept.shape[-1] - keep):
        losses = mask_losses(nets, points, _all_but_one(kept)).masked_fill(~kept, torch.inf)
        kept = kept.scatter(-1, losses.argmin(-1, keepdim=True), False)
    return kept


def by_refit(nets: Nets, points: Points, keep: int, setting: Setting) -> Tensor:
    """Remove one neuron at a time, the one whose loss a new output layer can best make up for.

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
        # the normal equations restricted to the kept neurons and the constant
        inside = torch.cat([kept, torch.ones_like(kept[:, :1])], -1).double()
        inverse: Tensor = torch.linalg.inv(gram * inside[:, :, None] * inside[:, None, :] + torch.diag_embed(1 - inside))
        coef = (inverse @ (target * inside[..., None])).squeeze(-1)
        lost = coef.square() / inverse.diagonal(dim1=-2, dim2=-1)
        kept = kept.scatter(-1, lost[:, :-1].masked_fill(~kept, torch.inf).argmin(-1, keepdim=True), False)
    return kept


def _ranked(values: Callable[[Nets, Points], Tensor]) -> Choose:
    """Keep the neurons with the largest `values` (E, H)."""
    return lambda nets, points, keep, setting: _largest(values(nets, points), keep)


def _l2(nets: Nets) -> Tensor:
    return nets.w1[..., :2].square().sum(-1).sqrt()


def _taylor(nets: Nets, points: Points) -> Tensor:
    """Mean over the points of |activation × slope of the loss|: the first-order estimate of what its removal changes."""
    error = nets.logits(points.x).sigmoid() - points.y
    return (nets.hidden(points.x) * error[..., None]).abs().mean(1) * nets.w2.abs()


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
    "L1": _ranked(lambda nets, _: nets.w1[..., :2].abs().sum(-1)),
    "L2": _ranked(lambda nets, _: _l2(nets)),
    "norm in × out": _ranked(lambda nets, _: _l2(nets) * nets.w2.abs()),
    # distance to all other neurons' weights together: one near the middle is taken to be replaceable by the others
    "geometric median": _ranked(
        lambda nets, _: torch.cdist(nets.w1, nets.w1, compute_mode="donot_use_mm_for_euclid_dist").sum(-1)
    ),
    "leave-one-out": _ranked(
        lambda nets, points: mask_losses(nets, points, _all_but_one(torch.ones_like(nets.w2, dtype=torch.bool)))
    ),
    "greedy leave-one-out": by_greedy_leave_one_out,
    "mean |Taylor|": _ranked(_taylor),
    "least-squares refit": by_refit,
}
