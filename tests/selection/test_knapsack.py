"""The knapsack against all combinations of choices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from secateurs.errors import InvalidInput
from secateurs.selection.allocation import MOST_OPTIONS, Branch, Curve, Option, frontier, options
from secateurs.selection.knapsack import best_allocations

counts = st.lists(st.tuples(st.integers(-2, 12), st.integers(-3, 30)), min_size=0, max_size=4)


def curve(site: str, points: list[tuple[int, int]]) -> Curve:
    """Savings in hundredths and losses in tenths, after nothing removed."""
    saved, loss = ([0.0, *(point[i] / scale for point in points)] for i, scale in ((0, 100), (1, 10)))
    return Curve(site, tuple(range(len(saved))), tuple(loss), tuple(saved))


def least_losses(curves: list[Curve]) -> dict[int, float]:
    """By brute force: the least loss of all combinations that save at least a number of hundredths."""
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


def whole_branch(site: str, *gone: str) -> Branch:
    """The third cut of a site is all of it."""
    return Branch(site, 3, gone)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20)), min_size=3, max_size=3), min_size=3, max_size=3))
def test_a_branch_is_folded_or_its_sites_are_cut_never_both(points: list[list[tuple[int, int]]]) -> None:
    """Sites a and b lie in one branch, which saves more than the two together would; against all combinations."""
    curves = [curve(name, each) for name, each in zip("abc", points, strict=True)]

    def together(removed: Mapping[str, int]) -> float:
        a, b = (c.saved[removed[c.site]] for c in curves[:2])
        return 0.25 if removed["a"] == 3 else a + b - 0.1 * min(a, b)  # two cuts of one branch save less than their sum

    picks = [p for p in product(range(4), repeat=3) if not (p[0] == 3 and p[1])]
    all_of_them = [
        (
            together({"a": p[0], "b": p[1]}) + curves[2].saved[p[2]],
            sum(c.loss[i] - c.loss[0] for c, i in zip(curves, p, strict=True)),
        )
        for p in picks
    ]
    found = best_allocations(curves, [whole_branch("a", "b")], saved=together, buckets=10_000)
    assert all(not one.removed["b"] for one in found if one.removed["a"] == 3)
    for one in found[1:]:
        assert one.saved == pytest.approx(
            together({"a": one.removed["a"], "b": one.removed["b"]}) + curves[2].saved[one.removed["c"]]
        )
    for saved, _ in all_of_them:
        if saved > 0.001:  # reached up to a bucket for each site
            least = min(loss for other, loss in all_of_them if other >= saved)
            reaching = [one.predicted_loss for one in found[1:] if one.saved >= saved - 0.001]
            assert min(reaching) <= least + 1e-9
    for one in frontier(curves, [whole_branch("a", "b")]):
        assert not (one.removed["a"] == 3 and one.removed["b"])


def test_a_large_branch_keeps_its_best_options() -> None:
    curves = [
        Curve(str(i), tuple(range(8)), tuple(0.1 * k**2 for k in range(8)), tuple(0.01 * k for k in range(8))) for i in range(6)
    ]
    branch = Branch("0", 7, tuple("12345"))
    (found,) = options(curves, [branch])
    assert len(found) <= 6 * MOST_OPTIONS
    assert found[0] == Option(0.0, 0.0, dict.fromkeys("012345", 0))
    # 0.12 saved by two filters at each site is cheapest; alone, the branch saves 0.07
    best = min(one.loss for one in found if one.saved >= 0.12 - 1e-9)
    assert best == pytest.approx(6 * 0.4, rel=0.1)
