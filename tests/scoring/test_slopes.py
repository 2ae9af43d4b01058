"""The linear model from slopes: exact where the loss is linear, the expected slope elsewhere, honest about its error."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nets import seeded
from secateurs.errors import InvalidInput, NonFinite
from secateurs.scoring.importance import fit_importance
from secateurs.scoring.masks import sample_masks
from secateurs.scoring.slopes import MaskedSlopes, fit_slopes, joined


def linear_pairs(examples: int, each: int, worth: torch.Tensor, spread: float, seed: int = 0) -> MaskedSlopes:
    """Losses start - mask · w of examples whose own worths w scatter about `worth`; slopes are exactly -w."""
    channels, generator = len(worth), seeded(seed)
    masks = sample_masks(channels, examples * each, generator=generator).view(examples, each, channels)
    own = worth + spread * torch.randn(examples, 1, channels, generator=generator, dtype=torch.float64)
    start = 5 + torch.randn(examples, 1, generator=generator, dtype=torch.float64)
    return MaskedSlopes(masks, start - (masks * own).sum(-1), -own.expand(examples, each, channels))


@settings(deadline=None, max_examples=15)
@given(st.integers(2, 30), st.integers(2, 6), st.integers(2, 12), st.integers(0, 99))
def test_a_linear_loss_is_recovered_exactly(examples: int, each: int, channels: int, seed: int) -> None:
    worth = torch.randn(channels, generator=seeded(seed), dtype=torch.float64)
    found = fit_slopes(linear_pairs(examples, each, worth, 0.0, seed))
    torch.testing.assert_close(found.coef, worth, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.stderr, torch.zeros(channels, dtype=torch.float64), rtol=0, atol=1e-12)
    assert math.isnan(found.r2) or found.r2 == pytest.approx(1) == found.r2_held_out  # NaN: all masks of examples alike


def test_it_is_the_model_that_least_squares_fits_to_the_losses() -> None:
    worth = torch.linspace(-1, 1, 8, dtype=torch.float64)
    pairs = linear_pairs(40, 1, worth, 0.0)
    # one mask each, and no example with a level of its own: the losses are those of one linear function
    losses = 3 - (pairs.masks * worth).sum(-1)
    by_losses = fit_importance(pairs.masks[:, 0], -losses[:, 0])
    by_slopes = fit_slopes(MaskedSlopes(pairs.masks, losses, pairs.slopes))
    torch.testing.assert_close(by_slopes.coef - by_slopes.coef.mean(), by_losses.coef, rtol=0, atol=1e-10)
    assert by_slopes.intercept == pytest.approx(-3)


def test_standard_errors_are_the_spread_of_estimates_from_other_examples() -> None:
    worth = torch.zeros(4, dtype=torch.float64)
    found = [fit_slopes(linear_pairs(100, 2, worth, 1.0, seed)) for seed in range(200)]
    seen = torch.stack([one.coef for one in found]).std(0)
    said = torch.stack([one.stderr for one in found]).mean(0)
    torch.testing.assert_close(said, torch.full_like(said, 0.1), rtol=0.02, atol=0)  # 1 / √100
    torch.testing.assert_close(seen, said, rtol=0.2, atol=0)


def test_losses_correct_slopes_where_these_are_wrong_and_only_there() -> None:
    worth = torch.linspace(-1, 1, 8, dtype=torch.float64)
    right = linear_pairs(600, 2, worth, 0.5)
    slopes = right.slopes.clone()
    slopes[..., 5] += 3  # as if filter 5 were worth 3 less than the losses say
    found = fit_slopes(MaskedSlopes(right.masks, right.losses, slopes))
    by_slopes = -slopes.mean((0, 1))
    # masks of equal size cannot identify a constant: the 3 is known as 3 · 7/8 for filter 5, and 3/8 less for each other
    expected = by_slopes + torch.where(torch.arange(8) == 5, 3 * 7 / 8, -3 / 8)
    torch.testing.assert_close(found.coef, expected, rtol=0, atol=0.25)
    assert found.coef.argsort()[-3:].tolist() == worth.argsort()[-3:].tolist()


def test_split_half_separates_signal_from_noise() -> None:
    signal, none = torch.linspace(-1, 1, 30, dtype=torch.float64), torch.zeros(30, dtype=torch.float64)
    assert fit_slopes(linear_pairs(400, 1, signal, 1.0)).split_half > 0.9
    assert abs(fit_slopes(linear_pairs(400, 1, none, 1.0)).split_half) < 4 / math.sqrt(30)


def test_examples_that_are_not_finite_are_left_out() -> None:
    worth = torch.linspace(-1, 1, 5, dtype=torch.float64)
    good, bad = linear_pairs(20, 2, worth, 0.3), linear_pairs(2, 2, worth, 0.3, seed=1)
    losses, slopes = bad.losses.clone(), bad.slopes.clone()
    losses[0, 1], slopes[1, 0, 2] = math.inf, math.nan
    broken = MaskedSlopes(bad.masks, losses, slopes)
    assert torch.equal(fit_slopes(joined([good, broken])).coef, fit_slopes(good).coef)
    with pytest.raises(NonFinite, match="finite for 0 of 2 examples"):
        fit_slopes(broken)


def test_shapes_that_do_not_fit_are_refused() -> None:
    masks = torch.ones(3, 2, 4, dtype=torch.bool)
    with pytest.raises(InvalidInput, match=r"wanted \(N, K, C\), \(N, K\) and \(N, K, C\)"):
        MaskedSlopes(masks, torch.ones(3), torch.ones(3, 2, 4))
