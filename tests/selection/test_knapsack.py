"""The knapsack against all combinations of choices."""

from __future__ import annotations

import math
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from secateurs.errors import InvalidInput
from secateurs.selection.allocation import Curve, frontier
from secateurs.selection.knapsack import best_allocations

counts = st.lists(st.tuples(st.integers(-2, 12), st.integers(-3, 30)), min_size=0, max_size=4)


def curve(site: str, points: list[tuple[int, int]]) -> Curve:
    """Savings in hundredths and losses in tenths, after nothing removed."""
    saved, loss = ([0.0, *(point[i] / scale for point in points)] for i, scale in ((0, 100), (1, 10)))
    return Curve(site, tuple(range(len(saved))), tuple(loss), tuple(saved))


def least_losses(curves: list[Curve]) -> dict[int, float]:
    """By brute force: the least loss of all combinations that save so many hundredths or more."""
    found: dict[int, float] = {}
    for picks in product(*([i for i in range(len(c.removed)) if i == 0 or c.saved[i] > 0] for c in curves)):
        saved = round(100 * sum(c.saved[i] for c, i in zip(curves, picks, strict=True)))
        loss = sum(c.loss[i] - c.loss[0] for c, i in zip(curves, picks, strict=True))
        for reached in range(saved + 1):
            found[reached] = min(found.get(reached, math.inf), loss)
    return found


@settings(max_examples=80, deadline=None)
@given(st.lists(counts, min_size=1, max_size=4))
def test_no_combination_saves_as_much_at_a_smaller_loss(points: list[list[tuple[int, int]]]) -> None:
    curves = [curve(f"site {i}", each) for i, each in enumerate(points)]
    least = least_losses(curves)
    largest = max(least)
    found = best_allocations(curves, buckets=max(largest, 1))  # a bucket for each hundredth: nothing is rounded
    assert (found[0].saved, found[0].predicted_loss, sum(found[0].removed.values())) == (0.0, 0.0, 0)
    assert all(a.saved < b.saved for a, b in pairwise(found))
    for wanted in range(1, largest + 1):
        reaching = [one.predicted_loss for one in found[1:] if round(100 * one.saved) >= wanted]
        assert min(reaching) == pytest.approx(least[wanted])
    for one in found:
        picked = [(c.saved[one.removed[c.site]], c.loss[one.removed[c.site]] - c.loss[0]) for c in curves]
        assert one.saved == pytest.approx(sum(saved for saved, _ in picked))
        assert one.predicted_loss == pytest.approx(sum(loss for _, loss in picked))


def test_choices_inside_the_convex_hull_are_found() -> None:
    """Two sites with a step each: one of them alone is best for half, though a mixture of nothing and both is cheaper."""
    curves = [Curve("a", (0, 4, 8), (0.0, 5.0, 6.0), (0.0, 0.3, 0.6)), Curve("b", (0, 8), (0.0, 20.0), (0.0, 0.3))]
    assert all(one.removed["a"] != 4 for one in frontier(curves))
    assert [one.removed for one in best_allocations(curves)] == [
        {"a": 0, "b": 0},
        {"a": 4, "b": 0},
        {"a": 8, "b": 0},
        {"a": 8, "b": 8},
    ]


def test_what_is_slower_or_unmeasured_is_never_chosen() -> None:
    curves = [Curve("a", (0, 1, 2), (0.0, -9.0, math.nan), (0.0, -0.1, 0.5)), Curve("b", (0, 1), (0.0, 1.0), (0.0, 0.2))]
    assert [one.removed for one in best_allocations(curves)] == [{"a": 0, "b": 0}, {"a": 0, "b": 1}]
    assert len(best_allocations(curves[:1])) == 1


def test_many_allocations_are_thinned_evenly() -> None:
    curves = [
        Curve(str(i), tuple(range(40)), tuple(0.1 * k**1.5 for k in range(40)), tuple(0.001 * k for k in range(40)))
        for i in range(6)
    ]
    found = best_allocations(curves, most=50)
    assert len(found) <= 50
    assert found[-1].saved == pytest.approx(6 * 0.039)
    assert max(b.saved - a.saved for a, b in pairwise(found)) <= 0.234 / 40


def test_sites_must_differ() -> None:
    with pytest.raises(InvalidInput, match="wanted one curve for each"):
        best_allocations([curve("a", []), curve("a", [])])
