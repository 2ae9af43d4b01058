"""Edges are checked on made-up staircases, multiples by hand."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nets import seeded
from secateurs.speed.widths import PROBED, candidates, edges, multiple_at, preferred

ROUNDS = 7


def steady(seconds: dict[int, float]) -> dict[int, list[float]]:
    return {width: [time] * ROUNDS for width, time in seconds.items()}


def noisy(seconds: dict[int, float], seed: int, drift: Sequence[float] = (1.0,) * ROUNDS) -> dict[int, list[float]]:
    """Two per cent of noise on every time, and what slows a whole round down."""
    generator = seeded(seed)
    slow = torch.tensor(drift, dtype=torch.float64)
    return {
        width: (time * slow * (1 + 0.02 * torch.randn(ROUNDS, generator=generator, dtype=torch.float64))).tolist()
        for width, time in seconds.items()
    }


def staircase(channels: int, step: int = 8) -> dict[int, float]:
    return {width: float(-(-width // step)) for width in range(1, channels + 1)}


def test_steps_of_eight_have_their_edges_at_the_multiples_of_eight() -> None:
    assert edges(steady(staircase(64))) == (56, 48, 40, 32, 24, 16, 8)
    assert edges(steady(staircase(61))) == (56, 48, 40, 32, 24, 16, 8)


def test_a_wider_width_that_is_as_fast_keeps_a_slower_one_out() -> None:
    seconds = {8: 8.0, 7: 9.0, 6: 6.0, 5: 7.0, 4: 6.0, 3: 3.0, 2: 10.0, 1: 2.9}
    assert edges(steady(seconds)) == (6, 3, 1)


def test_widths_that_were_timed_in_fewer_rounds_are_compared_in_those() -> None:
    """Sizes of one layer that are added later are timed in rounds of their own, which may be fewer."""
    assert edges({8: [4.0] * 7, 4: [2.0] * 3, 2: [1.0] * 5}) == (4, 2)


def test_where_no_width_is_faster_than_the_full_one_there_is_no_edge() -> None:
    assert edges(steady(dict.fromkeys(range(1, 33), 1.0))) == ()
    assert edges(steady({3: 1.0, 2: 2.0, 1: 1.5})) == ()
    assert edges(steady({1: 1.0})) == ()


def test_noise_makes_no_edges_on_a_flat_staircase() -> None:
    found = [edges(noisy(dict.fromkeys(range(1, 49), 1.0), seed)) for seed in range(15)]
    assert sum(map(bool, found)) <= 1


def test_steps_are_found_under_noise_and_drift() -> None:
    drift = (1.0, 3.0, 1.2, 1.0, 5.0, 1.5, 1.0)
    found = [edges(noisy(staircase(32), seed, drift)) for seed in range(10)]
    assert sum(widths == (24, 16, 8) for widths in found) >= 8
    assert all({-(-width // 8) for width in widths} >= {1, 2, 3} for widths in found)  # no step is missed


def test_a_width_that_was_lucky_in_half_of_its_rounds_is_no_edge() -> None:
    seconds = noisy(dict.fromkeys(range(1, 17), 1.0), seed=0)
    seconds[9] = [0.5, 1.0, 0.5, 1.0, 0.5, 1.0, 0.5]
    assert edges(seconds) == ()


def test_a_larger_margin_asks_for_larger_gains() -> None:
    seconds = noisy({4: 1.0, 3: 0.95, 2: 0.5, 1: 0.48}, seed=3)
    assert edges(seconds, margin=0.0) == (3, 2, 1)
    assert edges(seconds, margin=10.0) == (2,)
    assert edges(seconds, margin=1000.0) == ()


times = st.lists(st.floats(1e-6, 10.0), min_size=5, max_size=5)


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(st.integers(1, 100), times, min_size=1, max_size=12), st.floats(0, 5))
def test_medians_of_edges_strictly_fall_below_the_full_widths(seconds: dict[int, list[float]], margin: float) -> None:
    found = edges(seconds, margin)
    medians = [sorted(seconds[width])[2] for width in (max(seconds), *found)]
    assert all(wide > narrow for wide, narrow in pairwise(medians))
    assert list(found) == sorted(set(found) & set(seconds), reverse=True)


@pytest.mark.parametrize(
    ("channels", "multiple", "wanted"),
    [
        (512, 16, 16),
        (512, 8, 8),
        (64, 16, 16),
        (32, 16, 8),
        (16, 16, 4),
        (16, 8, 4),
        (20, 8, 4),
        (10, 8, 2),
        (5, 8, 1),
        (2, 8, 1),
    ],
)
def test_a_narrow_site_has_a_smaller_multiple(channels: int, multiple: int, wanted: int) -> None:
    assert multiple_at(channels, multiple) == wanted
    assert channels < 4 or len(candidates(channels, wanted)) >= 4  # three cuts or more remain


@pytest.mark.parametrize(("block", "wanted"), [(1, 1), (2, 1), (8, 8), (16, 16), (32, 16)])
def test_the_multiple_is_that_of_the_engines_blocks(block: int, wanted: int) -> None:
    assert preferred({width: float(-(-width // block)) ** 2 for width in PROBED}) == wanted


def test_candidates_are_multiples_or_all_widths_or_a_grid_with_neighbours() -> None:
    assert candidates(64, 16) == [64, 48, 32, 16]
    assert candidates(20, 1) == list(range(20, 0, -1))
    assert set(candidates(64, 1)) == {4 * k + by for k in range(1, 17) for by in (-1, 0, 1)} - {65}
    assert candidates(1024, 8) == [64 * k for k in range(16, 0, -1)]
