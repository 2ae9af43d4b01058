"""The demo keeps its promise for several seeds: at least half of the parameters gone, at most a point of test accuracy lost."""

from __future__ import annotations

import pytest

from secateurs import prune
from secateurs.cli.inputs import chosen_recipe, load_data
from secateurs.cli.prune import origin_for, trained


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_half_of_the_parameters_go_at_a_loss_of_at_most_a_point(seed: int) -> None:
    origin = origin_for(seed)
    data = load_data(origin)
    outcome = prune(trained(origin, data), data, chosen_recipe("demo", {"seed": seed})).finish()

    parameters = sum(p.numel() for p in outcome.graph.module.parameters())
    assert outcome.test_before.count == 500
    assert outcome.test_before.accuracy > 0.95, "the network to prune is not trained"
    assert parameters <= 0.5 * outcome.cost_before.parameters, outcome.summary()
    assert outcome.test_before.accuracy - outcome.test_after.accuracy <= 0.01 + 1e-9, outcome.summary()
