"""The division of cuts: the best there is on the grid, and a frontier that only grows."""

from __future__ import annotations

import itertools
import math
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from secateurs.errors import InvalidInput
from secateurs.selection.allocation import Curve, back_off, divide, frontier


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
    """(saved, loss increase) of every division there is."""
    choices = [[(s, y - c.loss[0]) for s, y in zip(c.saved, c.loss, strict=True)] for c in curves]
    return [(sum(s for s, _ in pick), sum(y for _, y in pick)) for pick in itertools.product(*choices)]


@settings(deadline=None, max_examples=60)
@given(curve_sets(), st.data())
def test_a_division_is_the_best_of_all(curves: list[Curve], data: st.DataObject) -> None:
    every = brute_force(curves)
    target = data.draw(st.integers(0, int(max(s for s, _ in every))))
    found = divide(curves, saved=target)
    assert found.saved >= target
    assert found.predicted_loss == min(loss for saved, loss in every if saved >= target)
    allowed = data.draw(st.integers(int(min(loss for _, loss in every)), 60))
    found = divide(curves, loss=allowed)
    assert found.predicted_loss <= allowed
    assert found.saved == max(saved for saved, loss in every if loss <= allowed)


@settings(deadline=None, max_examples=60)
@given(curve_sets())
def test_what_a_division_says_of_itself_is_true(curves: list[Curve]) -> None:
    for found in (divide(curves, saved=0), divide(curves, loss=10), *frontier(curves)):
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


@settings(deadline=None, max_examples=40)
@given(curve_sets())
def test_backing_off_ends_with_nothing_removed(curves: list[Curve]) -> None:
    division = divide(curves, loss=20)
    while division.saved:
        smaller = back_off(division, curves)
        assert smaller.saved < division.saved
        division = smaller
    assert set(division.removed.values()) == {0}
    with pytest.raises(InvalidInput, match="no smaller one"):
        back_off(division, curves)


def test_the_cheap_site_gives_more() -> None:
    cheap = Curve("cheap", (0, 4, 8), (0.1, 0.11, 0.13), (0, 100, 200))
    dear = Curve("dear", (0, 4, 8), (0.1, 0.2, 0.4), (0, 100, 200))
    assert divide([cheap, dear], saved=200).removed == {"cheap": 8, "dear": 0}
    assert divide([cheap, dear], loss=0.13).removed == {"cheap": 8, "dear": 4}  # 0.03 + 0.1, but for rounding
    assert [d.removed for d in frontier([cheap, dear])] == [
        {"cheap": 0, "dear": 0},
        {"cheap": 4, "dear": 0},
        {"cheap": 8, "dear": 0},
        {"cheap": 8, "dear": 4},
        {"cheap": 8, "dear": 8},
    ]


def test_cuts_that_help_are_always_taken() -> None:
    helps = Curve("helps", (0, 1, 2), (0.5, 0.4, 0.6), (0, 1, 2))
    assert divide([helps], saved=0).removed == {"helps": 1}
    assert divide([helps], loss=0).predicted_loss == pytest.approx(-0.1)


def test_a_loss_that_is_not_finite_is_never_chosen() -> None:
    broken = Curve("a", (0, 1, 2), (0.5, math.nan, math.inf), (0, 1, 2))
    fine = Curve("b", (0, 1), (0.5, 0.6), (0, 1))
    assert divide([broken, fine], loss=1e9).removed == {"a": 0, "b": 1}
    assert frontier([broken, fine])[-1].saved == 1


def test_a_large_network_is_divided_in_seconds_and_never_worse_than_the_frontier() -> None:
    generator = torch.Generator().manual_seed(0)
    curves = []
    for site in range(56):
        loss = [0.0, *torch.rand(8, generator=generator).cumsum(0).tolist()]
        saved = [0.0, *(torch.rand(8, generator=generator) + 0.1).cumsum(0).tolist()]
        curves.append(Curve(f"s{site}", tuple(range(9)), tuple(loss), tuple(saved)))
    began = time.process_time()
    hulls = frontier(curves)
    for number in (20, 120):
        found = divide(curves, saved=hulls[number].saved)
        # a vertex of the hull is the optimum; thinning may cost 1/20,000 of the whole saving, at this slope
        assert hulls[number].predicted_loss <= found.predicted_loss + 1e-9 <= hulls[number].predicted_loss * 1.002 + 1e-6
    assert time.process_time() - began < 20


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Curve("a", (0, 1), (0.1,), (0, 1)), "curve of 'a': got 2, 1 and 2 values"),
        (lambda: Curve("a", (1, 2), (0.1, 0.2), (0, 1)), "ascending numbers that start at 0"),
        (lambda: Curve("a", (0, 2), (math.nan, 0.2), (0, 1)), "finite loss"),
        (lambda: frontier([]), "wanted one curve for each"),
        (lambda: divide([Curve("a", (0, 1), (0, 1), (0, 1))] * 2, loss=1), "wanted one curve for each"),
        (lambda: divide([Curve("a", (0, 1), (0, 1), (0, 1))]), "exactly one of them"),
        (lambda: divide([Curve("a", (0, 1), (0, 1), (0, 1))], saved=2), "saved: got 2, wanted at most 1"),
        (lambda: divide([Curve("a", (0, 1), (0, 1), (0, 1))], loss=-1), "loss: got -1, wanted at least 0"),
    ],
)
def test_wrong_arguments_are_explained(make: object, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        make()  # type: ignore[operator]
