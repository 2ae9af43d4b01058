"""How many examples an ensemble needs. Pure: the noise of a coefficient is split into its two sources.

Coefficients differ from ensemble to ensemble because other masks were drawn, which more masks mend, and because other examples
were drawn, which more masks on the same examples do not. Examples are chosen so that the second is no larger than the first.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from secateurs.errors import InvalidInput

MOST_MASKS_PER_EXAMPLE = 8  # a pilot's estimate is rough: one that asks for more is not believed


def examples_needed(masks: Tensor, losses: Tensor, *, final: int) -> int:
    """How many examples an ensemble of `final` masks deserves, judged by a pilot: masks (M, C) and losses (M, N), M > C + 1.

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
    solve = torch.linalg.pinv(z, rtol=10 * max(z.shape) * torch.finfo(z.dtype).eps)
    freedom = count - 1 - int(torch.linalg.matrix_rank(z))
    spread = solve.square().sum()  # of all coefficients, for losses that scatter by 1
    from_masks = _residual(z, solve, losses.mean(1, keepdim=True), freedom) * spread * count
    coef = solve @ losses  # (C, N): as if each example were alone
    from_examples = coef.var(1).sum() - _residual(z, solve, losses, freedom) * spread
    if not from_examples > 0:
        return 1
    return math.ceil(float(from_examples * final / from_masks)) if from_masks > 0 else losses.shape[1]


def masks_per_example(slopes: Tensor, *, preparing: float = math.inf) -> int:
    """Under how many masks of its own each example deserves to be seen, judged by a pilot of slopes (N, K, C), K at least 2.

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
