"""How many examples: the two sources of noise are told apart, and the answers are those of the planted variances."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from secateurs.errors import InvalidInput
from secateurs.scoring.convergence import MOST_MASKS_PER_EXAMPLE, masks_per_example, required_examples
from secateurs.scoring.masks import sample_masks


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pilot(by_mask: float, by_example: float, single: float, *, seed: int) -> tuple[Tensor, Tensor]:
    """128 masks of 8 filters on 300 examples: noise of masks, of examples' worths, and of single losses."""
    generator = seeded(seed)
    masks = sample_masks(8, 128, design="balanced", generator=generator)
    worths = by_example * torch.randn(300, 8, generator=generator, dtype=torch.float64)
    shared = by_mask * torch.randn(128, 1, generator=generator, dtype=torch.float64)
    alone = single * torch.randn(128, 300, generator=generator, dtype=torch.float64)
    return masks, shared + alone - masks.double() @ worths.T


@pytest.mark.parametrize(("by_mask", "by_example", "single"), [(1.0, 1.0, 0.0), (0.5, 1.0, 0.5), (1.0, 3.0, 2.0)])
def test_examples_follow_the_planted_variances(by_mask: float, by_example: float, single: float) -> None:
    found = [required_examples(*pilot(by_mask, by_example, single, seed=seed), final=80) for seed in range(20)]
    # Coefficients are known up to a constant: worths count without their mean over filters, which leaves 7 of 8 directions.
    # Masks are centred; 2 of 8 are off. In each of the 7 directions the variance of a coefficient is (noise²) / (M p),
    # with p = (2/8)(6/8)(8/7) the variance of a mask along it.
    p = (2 / 8) * (6 / 8) * (8 / 7)
    wanted = by_example**2 * 80 / ((by_mask**2 + single**2 / 300) / p)
    assert sum(found) / len(found) == pytest.approx(wanted, rel=0.1)


def test_examples_all_alike_need_no_more_than_one() -> None:
    assert required_examples(*pilot(1.0, 0.0, 0.0, seed=0), final=80) == 1


def test_a_pilot_must_have_more_masks_than_coefficients() -> None:
    masks = sample_masks(8, 9, generator=seeded(0))
    with pytest.raises(InvalidInput, match="M at least 10"):
        required_examples(masks, torch.ones(9, 5), final=80)


@pytest.mark.parametrize(("by_mask", "preparing", "wanted"), [(2.1, 9.0, 4), (2.1, 1.0, 2), (1.05, 9.0, 1), (0.0, 9.0, 1)])
def test_masks_per_example_follow_noise_and_cost(by_mask: float, preparing: float, wanted: int) -> None:
    """v_m / v_e is by_mask²; the cheapest number is √(preparing · v_m / v_e): 4.4 of 6.3, 2.1, 1.1, and never below 1."""
    generator = seeded(0)
    examples = torch.randn(4000, 1, 6, generator=generator, dtype=torch.float64)
    masks = by_mask * torch.randn(4000, 2, 6, generator=generator, dtype=torch.float64)
    assert masks_per_example(examples + masks, preparing=preparing) == wanted


def test_masks_per_example_are_bounded() -> None:
    slopes = torch.randn(100, 2, 6, generator=seeded(0))
    assert masks_per_example(slopes - slopes.mean(1, keepdim=True)) == MOST_MASKS_PER_EXAMPLE
    with pytest.raises(InvalidInput, match="K at least 2"):
        masks_per_example(slopes[:, :1])
