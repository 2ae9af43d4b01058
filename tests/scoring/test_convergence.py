"""The bootstrap of masks and examples: its spread is the true one, and agreement runs from chance to certainty."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nets import seeded
from secateurs.errors import InvalidInput
from secateurs.scoring.convergence import (
    MOST_MASKS_PER_EXAMPLE,
    agreement,
    has_converged,
    masks_per_example,
    required_examples,
    resampled_fits,
    resampled_means,
)
from secateurs.scoring.importance import fit_importance
from secateurs.scoring.masks import sample_masks


def turned(losses: Tensor) -> Tensor:
    return -losses


def losses_of(masks: Tensor, worth: Tensor, *, by_mask: float, by_example: float, examples: int, seed: int) -> Tensor:
    """(M, N): what masks save, noise that all examples of a mask share, and worths that scatter between examples."""
    generator = seeded(seed)
    own = worth + by_example * torch.randn(examples, len(worth), generator=generator, dtype=torch.float64)
    noise = by_mask * torch.randn(len(masks), 1, generator=generator, dtype=torch.float64)
    return noise - masks.double() @ own.T


@pytest.mark.parametrize(("by_mask", "by_example"), [(1.0, 0.0), (0.0, 1.0), (1.0, 1.0)])
def test_resampled_coefficients_scatter_as_those_of_fresh_ensembles(by_mask: float, by_example: float) -> None:
    masks = sample_masks(6, 60, generator=seeded(0), batch=(200,))
    worth, noise = torch.zeros(6, dtype=torch.float64), {"by_mask": by_mask, "by_example": by_example}
    losses = torch.stack([losses_of(m, worth, **noise, examples=40, seed=seed) for seed, m in enumerate(masks)])
    fresh = fit_importance(masks, -losses.mean(-1)).coef.std(0).mean()
    resampled = [resampled_fits(masks[i], losses[i], turned, generator=seeded(9)).std(0).mean() for i in range(20)]
    assert float(torch.stack(resampled).mean()) == pytest.approx(float(fresh), rel=0.15)


def test_resampled_coefficients_centre_on_the_fit() -> None:
    worth = torch.linspace(-1, 1, 6, dtype=torch.float64)
    masks = sample_masks(6, 80, generator=seeded(0))
    losses = losses_of(masks, worth, by_mask=0.5, by_example=0.5, examples=50, seed=1)
    resampled = resampled_fits(masks, losses, turned, count=2000, generator=seeded(2))
    distance = (resampled.mean(0) - fit_importance(masks, -losses.mean(1)).coef).abs()
    assert bool((distance < 5 * resampled.std(0) / 2000**0.5).all())


def test_resampled_means_have_the_standard_error_of_a_mean() -> None:
    rows = torch.randn(400, 3, generator=seeded(0), dtype=torch.float64)
    resampled = resampled_means(rows, count=2000, generator=seeded(1))
    torch.testing.assert_close(resampled.std(0), rows.std(0) / 20, rtol=0.1, atol=0)


def test_agreement_is_one_for_the_same_sets_and_zero_by_chance() -> None:
    coef = torch.arange(20.0)
    assert agreement(coef, coef.expand(7, 20) * 3 + 1) == 1
    drawn = torch.rand(4000, 20, generator=seeded(0))
    assert agreement(coef, drawn) == pytest.approx(0, abs=0.02)
    # the least half is 0 to 9 in both, the least quarter shares 0, 1, 2: (3/5 - 1/4) / (3/4) and 1, averaged
    swapped = coef.clone()
    swapped[[3, 4, 5, 6]] = swapped[[5, 6, 3, 4]]
    assert agreement(coef, swapped[None]) == pytest.approx(((3 / 5 - 1 / 4) / (3 / 4) + 1) / 2)


@pytest.mark.parametrize("channels", [2, 3])
def test_agreement_of_few_filters_is_defined(channels: int) -> None:
    coef = torch.arange(float(channels))
    assert agreement(coef, coef[None]) == 1
    assert agreement(coef, coef.flip(0)[None]) < 0


def test_convergence_needs_two_rounds_in_a_row() -> None:
    assert not has_converged([0.9], 0.8)
    assert not has_converged([0.9, 0.7], 0.8)
    assert not has_converged([0.9, 0.7, 0.9], 0.8)
    assert has_converged([0.1, 0.8, 0.9], 0.8)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"wanted \(M, C\) and \(M, N\)"):
        resampled_fits(torch.ones(5, 3, dtype=torch.bool), torch.ones(5), turned, generator=seeded(0))


# ---- how many examples and masks are needed ------------------------------------------------------------------------------


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
