"""Short forms of the torture (docs/reliability.md): some generated networks, some killed runs. `make torture` has thousands."""

from __future__ import annotations

from statistics import fmean

import pytest

from torture import files, folders, graphs, kills
from torture.contracts import KINDS, MAX_DROP, World, ended, run, simulate, tail


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in (12, 24, 36, 48))])
def test_generated_networks_obey_the_laws_of_surgery(first: int) -> None:
    tally = graphs.run(12, first, workers=1)
    assert tally.tried == sum(tally.outcomes.values()) == 12
    assert not tally.failures, "\n".join(tally.failures)
    equal = sum(count for outcome, count in tally.outcomes.items() if "equal" in outcome)
    assert equal >= 4, tally.outcomes  # a generator of networks that are all refused would find nothing


def test_killed_and_starved_runs_end_like_undisturbed_ones() -> None:
    tally = kills.run(4, 0, workers=1, recipes=["two rounds with fine-tuning"])
    assert tally.tried == 4
    assert not tally.failures, "\n".join(tally.failures)
    assert tally.outcomes["runs that end like the undisturbed one"] > 0
    assert tally.outcomes["full disks"] > 0


# ---- damaged files and folders -------------------------------------------------------------------------------------------


def test_damaged_files_are_refused_or_load_to_the_same_network() -> None:
    found = files.run(600, seed=0, workers=1)
    assert found.failures == ()
    assert found.tried == sum(found.outcomes.values()) == 600
    assert {outcome.partition(":")[0] for outcome in found.outcomes} == {make.__name__ for make in files.MAKERS}


def test_damaged_folders_are_refused_or_end_with_the_same_network() -> None:
    found = folders.run(6, seed=0, workers=1)
    assert found.failures == ()
    assert found.tried == sum(found.outcomes.values()) == 6


# ---- simulated contracts -------------------------------------------------------------------------------------------------


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
