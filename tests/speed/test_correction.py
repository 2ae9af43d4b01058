"""Predicted savings brought to measured ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from secateurs.speed.correction import Correction

shares = st.floats(0.0, 0.99)


def test_without_a_measurement_nothing_is_corrected() -> None:
    assert [Correction()(share) for share in (-0.1, 0.0, 0.4, 0.9)] == [-0.1, 0.0, 0.4, 0.9]


@given(first=st.floats(0.03, 0.4), last=st.floats(0.5, 0.95), saved=shares, more=shares)
def test_what_was_measured_is_predicted_and_between_two_networks_what_lies_between(
    first: float, last: float, saved: float, more: float
) -> None:
    correction = Correction([(last, more), (first, saved)])
    assert correction(first) == pytest.approx(saved, abs=1e-9)
    assert correction(last) == pytest.approx(more, abs=1e-9)
    assert correction((first + last) / 2) == pytest.approx((saved + more) / 2, abs=1e-9)


@given(predicted=st.floats(0.03, 0.98), measured=shares, asked=st.floats(0.0, 1.0))
def test_some_time_is_always_left_and_nothing_is_saved_by_nothing(predicted: float, measured: float, asked: float) -> None:
    correction = Correction([(predicted, measured)])
    assert correction(0.0) == pytest.approx(0.0, abs=1e-9)
    assert correction(asked) <= 1.0


def test_half_of_the_saving_measured_is_half_of_it_everywhere() -> None:
    correction = Correction([(0.6, 0.3)])
    assert [correction(share) for share in (0.2, 0.6, 0.8)] == pytest.approx([0.1, 0.3, 0.4])


def test_the_later_of_two_measurements_at_one_place_counts() -> None:
    assert Correction([(0.5, 0.2), (0.51, 0.4)])(0.51) == pytest.approx(0.4)
