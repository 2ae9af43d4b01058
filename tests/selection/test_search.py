"""The cut: never beyond the allowed drop, equal to brute force where it promises so, and cheap."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from secateurs.config import Method
from secateurs.errors import InvalidInput, NonFinite
from secateurs.selection.search import find_cut

METHODS: tuple[Method, ...] = ("bisect", "paper", "scan")


def by_count(curve: list[float]) -> Callable[[Tensor], float]:
    """Accuracy as a function of how many filters are off: curve[m]."""
    return lambda keep: curve[int((~keep).sum())]


def brute_force(curve: list[float], baseline: float, max_drop: float) -> list[int]:
    """All m within the drop, worked out apart from the code under test (exact in hundredths)."""
    allowed = round(max_drop * 100)
    return [0] + [m for m in range(1, len(curve)) if round(baseline * 100) - round(curve[m] * 100) <= allowed]


@st.composite
def curves(draw: st.DrawFn) -> list[float]:
    """Any accuracies in hundredths, for m = 0 to C - 1: noisy, not monotone, some better than the start."""
    points = draw(st.lists(st.integers(0, 100), min_size=1, max_size=40))
    return [draw(st.integers(50, 100)) / 100] + [p / 100 for p in points]


@settings(deadline=None, max_examples=200)
@given(curves(), st.integers(0, 30), st.sampled_from(METHODS))
def test_the_drop_is_never_exceeded_and_each_method_finds_what_it_promises(
    curve: list[float], hundredths: int, method: Method
) -> None:
    channels, max_drop = len(curve), hundredths / 100
    cut = find_cut(range(channels), by_count(curve), baseline=curve[0], max_drop=max_drop, method=method)
    passing = brute_force(curve, curve[0], max_drop)
    assert cut.drop <= max_drop
    assert cut.m in passing
    assert cut.accuracy == curve[cut.m]
    assert int(cut.keep.sum()) == channels - cut.m >= 1
    measured = [m for m, _ in cut.evaluated]
    assert len(set(measured)) == len(measured)
    assert all(accuracy == curve[m] for m, accuracy in cut.evaluated)
    if method == "paper":
        assert cut.m == max(passing)
    if method == "scan":
        assert cut.m == next((m - 1 for m in range(1, channels) if m not in passing), channels - 1)
    if method == "bisect":
        assert cut.m == channels - 1 or cut.m + 1 not in passing
        assert len(measured) <= 1 + math.ceil(math.log2(channels))


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, 100), min_size=2, max_size=60), st.integers(0, 40))
def test_all_methods_agree_where_accuracy_falls_steadily(points: list[int], hundredths: int) -> None:
    curve = [p / 100 for p in sorted(points, reverse=True)]
    cuts = {
        find_cut(range(len(curve)), by_count(curve), baseline=curve[0], max_drop=hundredths / 100, method=method).m
        for method in METHODS
    }
    assert cuts == {max(brute_force(curve, curve[0], hundredths / 100))}


@pytest.mark.parametrize("method", METHODS)
def test_the_least_important_filters_go_first(method: Method) -> None:
    importance = torch.tensor([5.0, 1.0, 4.0, 2.0, 3.0])
    order = importance.argsort()
    worth = importance / 15
    cut = find_cut(order, lambda keep: float(worth[keep].sum()), baseline=1.0, max_drop=0.25, method=method)
    # 1/15 + 2/15 = 0.2 fits into 0.25, and 3/15 more does not.
    assert cut.removed == (1, 3)
    assert cut.keep.tolist() == [True, False, True, False, True]
    assert cut.drop == pytest.approx(0.2)


def test_a_drop_of_exactly_what_is_allowed_passes() -> None:
    assert 0.92 - 0.91 > 0.01  # in binary floating point
    assert find_cut([0, 1], by_count([0.92, 0.91]), baseline=0.92, max_drop=0.01).m == 1


@pytest.mark.parametrize("method", METHODS)
def test_nan_counts_as_failing(method: Method) -> None:
    cut = find_cut(range(6), lambda keep: math.nan, baseline=0.9, max_drop=1.0, method=method)
    assert (cut.m, cut.accuracy, cut.drop) == (0, 0.9, 0.0)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("limits", "largest"),
    [
        ({}, 9),
        ({"largest_share": 0.5}, 5),
        ({"max_remove": 3}, 3),
        ({"largest_share": 0.29}, 2),
        ({"max_remove": 0}, 0),
    ],
)
def test_limits_hold(method: Method, limits: dict[str, float], largest: int) -> None:
    cut = find_cut(range(10), lambda keep: 1.0, baseline=1.0, max_drop=0.0, method=method, **limits)  # type: ignore[arg-type]
    assert cut.m == largest


def test_the_papers_order_puts_filters_back_one_at_a_time() -> None:
    curve = [0.9, 0.9, 0.9, 0.4, 0.4, 0.4, 0.4, 0.4]
    cut = find_cut(range(8), by_count(curve), baseline=0.9, max_drop=0.01, method="paper", largest_share=0.75)
    assert [m for m, _ in cut.evaluated] == [6, 5, 4, 3, 2]
    assert cut.m == 2


def test_nothing_removed_keeps_the_accuracy_it_had_under_a_total_budget() -> None:
    cut = find_cut(range(4), lambda keep: 0.5, baseline=0.92, max_drop=0.01, accuracy_now=0.915)
    assert (cut.m, cut.accuracy) == (0, 0.915)
    assert cut.drop == pytest.approx(0.005)


def test_one_filter_is_never_removed() -> None:
    cut = find_cut([0], lambda keep: 1.0, baseline=1.0, max_drop=1.0)
    assert (cut.m, cut.keep.tolist(), cut.evaluated) == (0, [True], ())


@settings(deadline=None, max_examples=100)
@given(curves(), st.integers(0, 30), st.sampled_from(METHODS), st.integers(1, 9), st.data())
def test_only_allowed_widths_are_tried(
    curve: list[float], hundredths: int, method: Method, round_to: int, data: st.DataObject
) -> None:
    channels = len(curve)
    widths = data.draw(st.none() | st.lists(st.integers(1, 50), max_size=6))
    cut = find_cut(
        range(channels),
        by_count(curve),
        baseline=curve[0],
        max_drop=hundredths / 100,
        method=method,
        round_to=round_to,
        widths=widths,
    )

    def allowed(m: int) -> bool:
        return (channels - m) % round_to == 0 and (widths is None or channels - m in widths)

    assert all(allowed(m) for m, _ in cut.evaluated)
    assert cut.m == 0 or allowed(cut.m)
    possible = [m for m in brute_force(curve, curve[0], hundredths / 100) if m == 0 or allowed(m)]
    assert cut.m in possible
    if method == "paper":
        assert cut.m == max(possible)


@pytest.mark.parametrize(("channels", "kept"), [(16, 8), (20, 8), (8, 8), (6, 6), (1, 1)])
def test_kept_filters_come_in_eights_where_that_is_possible(channels: int, kept: int) -> None:
    cut = find_cut(range(channels), lambda keep: 1.0, baseline=1.0, max_drop=0.0, round_to=8)
    assert int(cut.keep.sum()) == kept


@dataclass(frozen=True)
class Verdict:
    accuracy: float
    accepted: bool
    upper: float
    by_estimate: bool


def accepting(limit: int, *, estimate: int | None = None) -> Callable[[Tensor], Verdict]:
    """Verdicts that accept up to `limit` filters off, and whose point estimate would accept up to `estimate`."""

    def verdict(keep: Tensor) -> Verdict:
        m = int((~keep).sum())
        return Verdict(1 - m / 100, m <= limit, m / 50, m <= (limit if estimate is None else estimate))

    return verdict


@pytest.mark.parametrize("method", METHODS)
def test_a_verdict_decides_in_place_of_the_drop(method: Method) -> None:
    cut = find_cut(range(16), accepting(5, estimate=9), baseline=1.0, max_drop=0.0, method=method)
    assert (cut.m, cut.bound) == (5, pytest.approx(0.1))
    largest = {"bisect": 7, "paper": 9, "scan": 6}[method]  # of the m measured, what a point estimate would have allowed
    assert cut.by_estimate == largest


def test_a_plain_accuracy_has_no_bound() -> None:
    cut = find_cut(range(8), by_count([1, 1, 1, 0, 0, 0, 0, 0]), baseline=1.0, max_drop=0.0)
    assert (cut.m, cut.by_estimate, cut.bound, cut.refused) == (2, 2, None, ())


@pytest.mark.parametrize(
    ("certified", "retries", "m", "refused"),
    [(12, 1, 12, ()), (7, 1, 6, (12,)), (5, 1, 0, (12, 6)), (5, 2, 3, (12, 6)), (11, 0, 0, (12,)), (0, 9, 0, (12, 6, 3, 1))],
)
def test_the_certificate_decides_last(certified: int, retries: int, m: int, refused: tuple[int, ...]) -> None:
    cut = find_cut(range(16), accepting(12), baseline=1.0, max_drop=0.0, certify=accepting(certified), retries=retries)
    assert (cut.m, cut.refused) == (m, refused)
    assert cut.bound == (pytest.approx(m / 50) if m else None)
    assert cut.accuracy == pytest.approx(1 - m / 100)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"order": [0, 0, 1]}, InvalidInput, "order: got .*exactly once"),
        ({"order": []}, InvalidInput, "order"),
        ({"order": torch.tensor([1.0, 0.5])}, InvalidInput, "order"),
        ({"order": torch.zeros(2, 2, dtype=torch.long)}, InvalidInput, "order"),
        ({"max_drop": -0.1}, InvalidInput, "max_drop: got -0.1"),
        ({"max_drop": math.nan}, InvalidInput, "max_drop: got nan"),
        ({"baseline": math.nan}, NonFinite, "baseline: got nan"),
        ({"method": "bisection"}, InvalidInput, "Did you mean 'bisect'"),
        ({"largest_share": 1.5}, InvalidInput, "largest_share: got 1.5"),
        ({"max_remove": -1}, InvalidInput, "max_remove: got -1"),
        ({"round_to": 0}, InvalidInput, "round_to: got 0"),
        ({"widths": [4, 0]}, InvalidInput, r"widths: got \[4, 0\]"),
        ({"retries": -1}, InvalidInput, "retries: got -1"),
    ],
)
def test_wrong_arguments_are_explained(wrong: dict[str, object], error: type[Exception], message: str) -> None:
    arguments = {"order": [0, 1, 2], "measure": lambda keep: 1.0, "baseline": 0.9, "max_drop": 0.01} | wrong
    with pytest.raises(error, match=message):
        find_cut(**arguments)  # type: ignore[arg-type]
