"""Allocation of cuts over sites: a frontier that only grows, and no allocation below it."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from secateurs.errors import InvalidInput
from secateurs.selection.allocation import Curve, calibrated, frontier


@st.composite
def curve_sets(draw: st.DrawFn) -> list[Curve]:
    """Up to four sites; losses in whole numbers, some falling with removal, so that sums are exact."""
    curves = []
    for site in range(draw(st.integers(1, 4))):
        points = draw(st.integers(1, 4))
        loss = [draw(st.integers(0, 5))] + [draw(st.integers(0, 30)) for _ in range(points)]
        saved = list(itertools.accumulate([0] + [draw(st.integers(1, 9)) for _ in range(points)]))
        curves.append(Curve(f"s{site}", tuple(range(0, 2 * points + 1, 2)), tuple(map(float, loss)), tuple(map(float, saved))))
    return curves


def brute_force(curves: list[Curve]) -> list[tuple[float, float]]:
    """(saved, loss increase) of every allocation."""
    choices = [[(s, y - c.loss[0]) for s, y in zip(c.saved, c.loss, strict=True)] for c in curves]
    return [(sum(s for s, _ in pick), sum(y for _, y in pick)) for pick in itertools.product(*choices)]


@settings(deadline=None, max_examples=60)
@given(curve_sets())
def test_an_allocation_adds_up_its_curves(curves: list[Curve]) -> None:
    for found in frontier(curves):
        at = [(curve, curve.removed.index(found.removed[curve.site])) for curve in curves]
        assert found.saved == sum(curve.saved[i] for curve, i in at)
        assert found.predicted_loss == sum(curve.loss[i] - curve.loss[0] for curve, i in at)


@settings(deadline=None, max_examples=60)
@given(curve_sets())
def test_nothing_lies_below_the_frontier(curves: list[Curve]) -> None:
    found = frontier(curves)
    assert found[0].removed == {curve.site: 0 for curve in curves}
    slopes = []
    for here, there in itertools.pairwise(found):
        assert there.saved > here.saved
        assert all(there.removed[site] >= m for site, m in here.removed.items())
        slopes.append((there.predicted_loss - here.predicted_loss) / (there.saved - here.saved))
    assert all(a <= b + 1e-12 for a, b in itertools.pairwise(slopes))
    for saved, loss in brute_force(curves):
        for here, there in itertools.pairwise(found):
            if here.saved <= saved <= there.saved:
                between = (saved - here.saved) / (there.saved - here.saved)
                assert loss >= here.predicted_loss + between * (there.predicted_loss - here.predicted_loss) - 1e-9
    assert found[-1].saved == max(saved for saved, _ in brute_force(curves))


def test_the_cheap_site_gives_more() -> None:
    cheap = Curve("cheap", (0, 4, 8), (0.1, 0.11, 0.13), (0, 100, 200))
    dear = Curve("dear", (0, 4, 8), (0.1, 0.2, 0.4), (0, 100, 200))
    assert [d.removed for d in frontier([cheap, dear])] == [
        {"cheap": 0, "dear": 0},
        {"cheap": 4, "dear": 0},
        {"cheap": 8, "dear": 0},
        {"cheap": 8, "dear": 4},
        {"cheap": 8, "dear": 8},
    ]


def test_cuts_that_help_come_first() -> None:
    helps = Curve("helps", (0, 1, 2), (0.5, 0.4, 0.6), (0, 1, 2))
    other = Curve("other", (0, 1), (0.5, 0.51), (0, 1))
    found = frontier([other, helps])[1]
    assert found.removed == {"other": 0, "helps": 1}
    assert found.predicted_loss == pytest.approx(-0.1)


def test_a_loss_that_is_not_finite_is_never_chosen() -> None:
    broken = Curve("a", (0, 1, 2), (0.5, math.nan, math.inf), (0, 1, 2))
    fine = Curve("b", (0, 1), (0.5, 0.6), (0, 1))
    assert frontier([broken, fine])[-1].removed == {"a": 0, "b": 1}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Curve("a", (0, 1), (0.1,), (0, 1)), "curve of 'a': got 2, 1 and 2 values"),
        (lambda: Curve("a", (1, 2), (0.1, 0.2), (0, 1)), "ascending numbers that start at 0"),
        (lambda: Curve("a", (0, 2), (math.nan, 0.2), (0, 1)), "finite loss"),
        (lambda: frontier([]), "wanted one curve for each"),
        (lambda: frontier([Curve("a", (0, 1), (0, 1), (0, 1))] * 2), "wanted one curve for each"),
    ],
)
def test_wrong_arguments_are_explained(make: object, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        make()  # type: ignore[operator]


def test_a_predicted_curve_is_brought_to_what_is_measured() -> None:
    predicted = [0.01 * m**1.5 for m in range(1, 9)]
    true = [3.0 * guess**1.2 for guess in predicted]
    found = calibrated(predicted, {2: true[1], 5: true[4]})
    assert found == pytest.approx((0.0, *true))
    assert calibrated(predicted, {4: 0.5})[4] == pytest.approx(0.5)
    assert calibrated(predicted, {4: 0.5})[8] == pytest.approx(0.5 * predicted[7] / predicted[3])


@pytest.mark.parametrize("measured", [{}, {2: -0.1, 5: 0.3}, {2: float("nan"), 5: 0.3}])
def test_no_curve_follows_from_losses_that_do_not_rise(measured: dict[int, float]) -> None:
    assert calibrated([0.1, 0.2, 0.3, 0.4, 0.5], measured) == ()
