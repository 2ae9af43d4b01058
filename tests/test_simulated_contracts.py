"""The promise is kept by whole simulated runs: a short form of `python -m tests.torture.contracts`."""

from __future__ import annotations

from statistics import fmean

import pytest
from tests.torture.contracts import KINDS, MAX_DROP, World, ended, run, simulate, tail


@pytest.mark.parametrize("kind", KINDS)
def test_contracts_are_kept_and_not_wasted(kind: str) -> None:
    pairs = ended(kind, range(4))
    violated = sum(held.drop > MAX_DROP for held, _ in pairs)
    assert tail(violated, len(pairs)) > 0.01
    assert fmean(held.drop for held, _ in pairs) > 0.2 * MAX_DROP
    assert fmean(guessed.drop for _, guessed in pairs) > 0.8 * MAX_DROP  # point estimates promise nothing: the test can fail


def test_a_run_that_certifies_nothing_would_be_found_out() -> None:
    """Point estimates, counted as contracts, are too many violations for chance."""
    violated = sum(simulate("sequential", World(seed), 0.0).drop > MAX_DROP for seed in range(8))
    assert tail(violated, 8) < 0.01


def test_the_same_seed_gives_the_same_tally() -> None:
    first, again = run(1, 5, workers=1), run(1, 5, workers=1)
    assert first.outcomes == again.outcomes
    assert (first.part, first.tried, first.failures) == ("contracts", len(KINDS), ())


@pytest.mark.parametrize(("violated", "count", "chance"), [(0, 400, 1.0), (1, 1, 0.05), (2, 2, 0.0025), (1, 2, 0.0975)])
def test_the_tail_is_the_binomial_one(violated: int, count: int, chance: float) -> None:
    assert tail(violated, count) == pytest.approx(chance)
