"""The designs of masks: right counts for every width, evenness where promised, errors that explain."""

from __future__ import annotations

import math
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nets import seeded
from secateurs.config import Design
from secateurs.errors import InvalidInput
from secateurs.scoring.masks import sample_masks


@pytest.mark.parametrize("design", ["exact", "balanced"])
def test_every_row_has_exactly_the_right_number_off_for_every_width(design: Design) -> None:
    for channels in range(2, 513) if design == "exact" else [*range(2, 40), 64, 100, 257]:
        masks = sample_masks(channels, 7, design=design, generator=seeded(channels))
        wanted = max(1, round(0.3 * channels))
        assert masks.dtype == torch.bool
        assert masks.shape == (7, channels)
        assert (~masks).sum(1).tolist() == [wanted] * 7, channels


def test_default_count_is_the_papers_ten_masks_for_each_filter() -> None:
    assert sample_masks(16, generator=seeded(0)).shape == (160, 16)


@pytest.mark.parametrize(("off", "zeros"), [(0.01, 1), (0.1, 1), (0.5, 5), (0.99, 9)])
def test_at_least_one_filter_is_off_and_one_kept(off: float, zeros: int) -> None:
    assert set((~sample_masks(10, 50, off=off, generator=seeded(0))).sum(1).tolist()) == {zeros}


def test_exact_masks_choose_every_filter_equally_often_in_the_long_run() -> None:
    share_off = (~sample_masks(10, 20_000, generator=seeded(3))).double().mean(0)
    # Binomial: 5 standard errors of a share of 0.3 among 20,000.
    assert (share_off - 0.3).abs().max() < 5 * math.sqrt(0.3 * 0.7 / 20_000)


def test_bernoulli_filters_are_independent_with_the_given_share() -> None:
    off = (~sample_masks(8, 40_000, off=0.3, design="bernoulli", generator=seeded(1))).double()
    both = off.T @ off / 40_000
    expected = torch.full((8, 8), 0.09, dtype=torch.double).fill_diagonal_(0.3)
    assert (both - expected).abs().max() < 5 * math.sqrt(0.3 * 0.7 / 40_000)


def test_bernoulli_never_switches_all_filters_off() -> None:
    masks = sample_masks(2, 5_000, off=0.95, design="bernoulli", generator=seeded(0))
    assert masks.any(1).all()
    # 0.95² of the rows were all off and spared a filter at random: both filters get their share of them.
    assert (masks.double().mean(0) - (0.05 + 0.95**2 / 2)).abs().max() < 5 * math.sqrt(0.25 / 5_000)


@settings(deadline=None, max_examples=40)
@given(st.integers(2, 40), st.integers(1, 60), st.floats(0.05, 0.95), st.integers(0, 99))
def test_balanced_filters_are_off_equally_often(channels: int, count: int, off: float, seed: int) -> None:
    times_off = (~sample_masks(channels, count, off=off, design="balanced", generator=seeded(seed))).sum(0)
    assert int(times_off.max() - times_off.min()) <= 1


def test_balanced_pairs_are_far_more_even_than_drawn_ones() -> None:
    def spread(design: Design) -> float:
        off = (~sample_masks(32, 320, design=design, generator=seeded(0))).double()
        first, second = torch.triu_indices(32, 32, offset=1)
        return float((off.T @ off)[first, second].std())

    # Drawn at random, pairs are off together with the spread of a binomial count.
    pair_share = 10 * 9 / (32 * 31)
    assert spread("exact") == pytest.approx(math.sqrt(320 * pair_share * (1 - pair_share)), rel=0.2)
    assert spread("balanced") < spread("exact") / 4


def test_rounds_keep_the_ensemble_balanced_after_each() -> None:
    masks = torch.empty(0, 20, dtype=torch.bool)
    for number in range(12):
        masks = torch.cat([masks, sample_masks(20, 7, design="balanced", generator=seeded(number), after=masks)])
        times_off = (~masks).sum(0)
        assert int(times_off.max() - times_off.min()) <= 1
    off = (~masks).double()
    first, second = torch.triu_indices(20, 20, offset=1)
    alone = torch.cat([sample_masks(20, 7, design="balanced", generator=seeded(number)) for number in range(12)])
    pairs, apart = ((o.T @ o)[first, second].std() for o in (off, (~alone).double()))
    assert pairs < apart / 2


def test_masks_to_extend_must_be_masks_of_that_width() -> None:
    for wrong in (torch.ones(5, 9, dtype=torch.bool), torch.ones(5, 8)):
        with pytest.raises(InvalidInput, match=r"wanted masks drawn before, bool \(M, 8\)"):
            sample_masks(8, 3, generator=seeded(0), after=wrong)


@pytest.mark.parametrize("design", ["exact", "bernoulli", "balanced"])
def test_a_batch_holds_ensembles_of_their_own(design: Design) -> None:
    masks = sample_masks(9, 20, design=design, generator=seeded(0), batch=(3, 2))
    assert masks.shape == (3, 2, 20, 9)
    assert len({tuple(ensemble.flatten().tolist()) for ensemble in masks.reshape(6, 20, 9)}) == 6
    if design == "balanced":
        times_off = (~masks).sum(-2)
        assert int((times_off.amax(-1) - times_off.amin(-1)).max()) <= 1


@pytest.mark.parametrize("design", ["exact", "bernoulli", "balanced"])
def test_same_seed_same_masks(design: Design) -> None:
    first, second, other = (sample_masks(12, design=design, generator=seeded(s)) for s in (5, 5, 6))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_a_longer_batch_starts_with_the_shorter_one() -> None:
    short, long = (sample_masks(10, 30, generator=seeded(0), batch=(size,)) for size in (3, 50))
    assert torch.equal(short, long[:3])


@pytest.mark.parametrize("design", ["exact", "bernoulli", "balanced"])
def test_wide_layers_take_seconds(design: Design) -> None:
    start = time.process_time()
    sample_masks(256, 2560, design=design, generator=seeded(0))
    assert time.process_time() - start < 7.5


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"channels": 1}, "channels: got 1, wanted 2 or more"),
        ({"count": 0}, "count: got 0"),
        ({"off": 0.0}, "off: got 0.0, wanted a share"),
        ({"off": 1.0}, "off: got 1.0, wanted a share"),
        ({"off": math.nan}, "off: got nan"),
        ({"design": "balance"}, "Did you mean 'balanced'"),
        ({"batch": (2, 0)}, "batch: got"),
    ],
)
def test_wrong_arguments_are_explained(wrong: dict[str, object], message: str) -> None:
    arguments = {"channels": 8, "count": 10, "generator": seeded(0)} | wrong
    with pytest.raises(InvalidInput, match=message):
        sample_masks(**arguments)  # type: ignore[arg-type]
