"""Short forms of the torture (docs/reliability.md): some generated networks, some killed runs. `make torture` has thousands."""

from __future__ import annotations

import pytest
from tests.torture import graphs, kills


@pytest.mark.parametrize("first", range(0, 60, 12))
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
