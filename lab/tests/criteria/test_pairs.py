"""Ensembles with pairwise terms, as a criterion: on a network whose filters' worth is known by construction."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from nets import seeded
from secateurs import Pruner, Recipe, find_sites, trace
from secateurs.criteria import score_filters
from secateurs.data import Examples
from secateurs.errors import InvalidInput
from secateurs.scoring.evaluator import SiteEvaluator
from secateurs.scoring.importance import order
from torture.runs import few_digits, perceptron


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean(1)


def cancelling() -> tuple[nn.Module, Tensor]:
    """Neurons 0 and 1 are alike and read with opposite signs: together they do nothing, one alone does harm."""
    net = nn.Sequential(nn.Linear(4, 8, False), nn.ReLU(), nn.Linear(8, 2, False)).double()
    into, out = net[0].weight.data, net[2].weight.data
    into.copy_(torch.rand(8, 4, generator=seeded(0), dtype=torch.float64))
    into[1] = into[0]
    out.copy_(torch.rand(2, 8, generator=seeded(1), dtype=torch.float64) * 0.6)
    out[:, 0], out[:, 1] = 1.5, -1.5
    return net, torch.randn(128, 4, generator=seeded(2), dtype=torch.float64)


def test_two_filters_that_cancel_each_other_go_first() -> None:
    net, x = cancelling()
    graph, data = trace(net, x[:2]), Examples(x, net(x).detach())
    site = find_sites(graph)[0]
    found = score_filters("pairs", SiteEvaluator(graph, site, squared), data, seed=0)
    assert sorted(found.coef.tolist()) == list(range(8))
    assert set(order(found)[:2].tolist()) == {0, 1}


def test_examples_are_needed() -> None:
    net, x = cancelling()
    graph = trace(net, x[:2])
    with pytest.raises(InvalidInput, match="criterion 'pairs': got no examples"):
        score_filters("pairs", SiteEvaluator(graph, find_sites(graph)[0], squared))


def test_a_run_ranks_by_it() -> None:
    recipe = Recipe.fast(max_drop=0.1, confidence=0, criterion="pairs", sites=("layers.1",))
    (step,) = Pruner(perceptron(), few_digits(384), recipe=recipe)
    assert step.criterion == "pairs"
    assert step.removed
