"""Convergence of a ranking by the bootstrap, and sample sizes from a pilot. Pure: tensors in, tensors out.

Resampling the ensemble with replacement estimates how far the coefficients would move with other masks and other examples. What
matters is the set that a cut would remove, so the least important quarter and half of the filters are compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from secateurs.errors import InvalidInput

CUTS = (0.25, 0.5)  # shares of the filters, least important first, whose members are compared
RESAMPLES = 200
MOST_MASKS_PER_EXAMPLE = 8  # a pilot's estimate is rough: a larger one is not trusted


def resampled_means(rows: Tensor, *, count: int = RESAMPLES, generator: torch.Generator) -> Tensor:
    """Bootstrap means (count, C) of rows (N, C), each over N rows drawn with replacement, as float64."""
    return _weights(count, len(rows), generator).to(rows.device) @ rows.double()


def resampled_fits(
    masks: Tensor,
    losses: Tensor,
    score: Callable[[Tensor], Tensor],
    *,
    ridge: float = 0.0,
    count: int = RESAMPLES,
    generator: torch.Generator,
) -> Tensor:
    """Bootstrap coefficients (count, C) of the linear model, masks and examples resampled: masks (M, C), losses (M, N).

    `score` turns mean losses (..., M) into scores. The examples are resampled outright. A resampled mask counts by its
    influence on the coefficients, with the residual it has when it is left out of the fit: this costs no fit for each
    resample, and grows without bound as M comes down to C, where nothing can be said.
    """
    if masks.ndim != 2 or losses.ndim != 2 or len(masks) != len(losses):
        raise InvalidInput(f"masks {tuple(masks.shape)} and losses {tuple(losses.shape)} do not fit: wanted (M, C) and (M, N).")
    z, losses = masks.double(), losses.double()
    z = z - z.mean(0)
    solve = _solver(z, ridge)  # (C, M)
    whole = score(losses.mean(1))
    whole = whole - whole.mean()
    leverage = (z * solve.T).sum(1) + 1 / len(z)
    left_out = (whole - z @ (solve @ whole)) / (1 - leverage).clamp_min(torch.finfo(z.dtype).eps)
    others = _weights(count, len(z), generator).to(z.device) * len(z) - 1
    examples = _weights(count, losses.shape[1], generator).to(z.device)
    return score(examples @ losses.T) @ solve.T + (others * left_out) @ solve.T


def agreement(coef: Tensor, resampled: Tensor, cuts: Sequence[float] = CUTS) -> float:
    """Overlap of the sets of least important filters by coef (C,) and by resampled coefficients (B, C), mean over cuts.

    1: the same sets every time. 0: no more overlap than sets drawn at random.
    """
    channels = coef.shape[-1]
    sizes = sorted({min(max(round(cut * channels), 1), channels - 1) for cut in cuts})
    found = [_overlap(coef, resampled, size) for size in sizes]
    return sum((share - size / channels) / (1 - size / channels) for share, size in zip(found, sizes, strict=True)) / len(sizes)


def has_converged(agreements: Sequence[float], wanted: float, *, times: int = 2) -> bool:
    """Whether the last `times` agreements all reach what is wanted: once may be luck."""
    return len(agreements) >= times and min(agreements[-times:]) >= wanted


def _overlap(coef: Tensor, resampled: Tensor, size: int) -> float:
    """Mean share of the `size` smallest of coef that are among the `size` smallest of each resample."""
    least = _least(coef[None], size)
    return float((_least(resampled, size) & least).double().sum(-1).mean() / size)


def _least(coef: Tensor, size: int) -> Tensor:
    picked = coef.argsort(dim=-1, stable=True)[..., :size]
    return torch.zeros_like(coef, dtype=torch.bool).scatter_(-1, picked, True)


def _weights(count: int, size: int, generator: torch.Generator) -> Tensor:
    """How often each of `size` items is drawn, divided by `size`: (count, size), every row adds up to 1."""
    drawn = torch.randint(size, (count, size), generator=generator, device=generator.device)
    ones = torch.ones_like(drawn, dtype=torch.float64)
    return torch.zeros_like(ones).scatter_add_(-1, drawn, ones) / size


def _solver(z: Tensor, ridge: float) -> Tensor:
    """The matrix (C, M) that turns scores into coefficients of smallest norm; centred masks (M, C)."""
    if ridge == 0:
        inverse: Tensor = torch.linalg.pinv(z, rtol=10 * max(z.shape) * torch.finfo(z.dtype).eps)
        return inverse
    penalty = ridge * len(z) * torch.eye(z.shape[1], dtype=z.dtype, device=z.device)
    solved: Tensor = torch.linalg.solve(z.T @ z + penalty, z.T)
    return solved


def required_examples(masks: Tensor, losses: Tensor, *, final: int) -> int:
    """Number of examples for an ensemble of `final` masks, from a pilot: masks (M, C) and losses (M, N), M > C + 1.

    The variance of a coefficient has a part v_m / M from masks and a part v_e / N from examples, which all masks share. N is
    chosen so that the examples' part is no larger than the masks' part of the final ensemble: N = v_e · final / v_m.
    """
    count, channels = masks.shape
    if losses.ndim != 2 or len(losses) != count or count < channels + 2 or losses.shape[1] < 2:
        raise InvalidInput(
            f"pilot: got masks {tuple(masks.shape)} and losses {tuple(losses.shape)}, "
            f"wanted (M, C) and (M, N) with M at least {channels + 2} and N at least 2."
        )
    losses = losses.double()
    z = masks.double() - masks.double().mean(0)
    solve = _solver(z, 0.0)
    freedom = count - 1 - int(torch.linalg.matrix_rank(z))
    spread = solve.square().sum()  # of all coefficients, for losses that scatter by 1
    from_masks = _residual(z, solve, losses.mean(1, keepdim=True), freedom) * spread * count
    coef = solve @ losses  # (C, N): as if each example were alone
    from_examples = coef.var(1).sum() - _residual(z, solve, losses, freedom) * spread
    if not from_examples > 0:
        return 1
    return math.ceil(float(from_examples * final / from_masks)) if from_masks > 0 else losses.shape[1]


def masks_per_example(slopes: Tensor, *, preparing: float = math.inf) -> int:
    """Number of masks for each example, from a pilot of slopes (N, K, C), K at least 2.

    The variance of a mean slope has a part v_e / N from examples and a part v_m / (N K) from the K masks that each one has. K
    is chosen so that the examples' part is no larger than the masks', K ≤ v_m / v_e, and no larger than is cheapest when an
    example costs as much as `preparing` passes before its first one, K ≤ √(preparing · v_m / v_e); at least 1.
    """
    if slopes.ndim != 3 or slopes.shape[0] < 2 or slopes.shape[1] < 2:
        raise InvalidInput(f"pilot: got slopes {tuple(slopes.shape)}, wanted (N, K, C) with N and K at least 2.")
    slopes = slopes.double()
    from_masks = slopes.var(1).mean(0).sum()
    from_examples = slopes.mean(1).var(0).sum() - from_masks / slopes.shape[1]
    ratio = float(from_masks / from_examples) if from_examples > 0 else math.inf
    wanted = min(ratio, math.sqrt(preparing * ratio), MOST_MASKS_PER_EXAMPLE)
    return max(int(wanted), 1)


def _residual(z: Tensor, solve: Tensor, losses: Tensor, freedom: int) -> Tensor:
    """Mean over the columns of losses (M, N) of the variance that the linear model leaves."""
    centred = losses - losses.mean(0)
    return (centred - z @ (solve @ centred)).square().sum(0).mean() / freedom
