"""Short forms of the torture (docs/reliability.md): some generated networks, some killed runs. `make torture` has thousands."""

from __future__ import annotations

import pytest
from tests.torture import graphs, kills


@pytest.mark.parametrize("first", range(0, 60, 6))
def test_generated_networks_obey_the_laws_of_surgery(first: int) -> None:
    tally = graphs.run(6, first, workers=1)
    assert tally.tried == sum(tally.outcomes.values()) == 6
    assert not tally.failures, "\n".join(tally.failures)


def test_most_generated_networks_are_cut_and_not_refused() -> None:
    """A generator that only made networks without sites would find nothing."""
    outcomes = [graphs.case(seed)[0] for seed in range(100, 112)]
    assert sum("equal" in outcome for outcome in outcomes) >= len(outcomes) // 2, outcomes


@pytest.mark.parametrize("recipe", ["two rounds with fine-tuning", "global, with a target"])
def test_killed_and_starved_runs_end_like_undisturbed_ones(recipe: str) -> None:
    tally = kills.run(3, 0, workers=1, recipes=[recipe])
    assert tally.tried == 3
    assert not tally.failures, "\n".join(tally.failures)
    assert tally.outcomes["runs that end like the undisturbed one"] > 0
    assert tally.outcomes["full disks"] > 0
