"""Masks at all sites at once: slopes by hand, and no figure that depends on the batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from nets import seeded
from secateurs import find_sites, trace
from secateurs.data.dataset import Examples, generator_for
from secateurs.metrics import cross_entropy
from secateurs.scoring.masks import sample_masks
from secateurs.scoring.network import score_network


def small() -> tuple[nn.Sequential, Examples]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)).double().eval()
    inputs = torch.randn(20, 4, generator=seeded(1), dtype=torch.float64)
    return model, Examples(inputs, torch.arange(20) % 3)


def test_scores_are_mean_sizes_of_each_examples_own_slopes() -> None:
    model, data = small()
    graph = trace(model, torch.randn(2, 4, dtype=torch.float64))
    sites = find_sites(graph)
    found = score_network(graph, sites, data, cross_entropy, off=0.4, seed=3)
    generator = generator_for(3, "network masks")
    one, two = (sample_masks(c, 20, off=0.2, design="bernoulli", generator=generator).double() for c in (5, 6))

    def loss(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(model[0](data.inputs)) * a
        return F.cross_entropy(model[4](torch.relu(model[2](hidden)) * b), data.targets, reduction="none")

    step = 1e-6
    for site, (place, channels) in zip(sites, ((0, 5), (1, 6)), strict=True):
        slopes = []
        for channel in range(channels):
            moved = torch.zeros(channels, dtype=torch.float64)
            moved[channel] = step
            up, down = ([one + moved, two], [one - moved, two]) if place == 0 else ([one, two + moved], [one, two - moved])
            with torch.no_grad():
                slopes.append(((loss(*up) - loss(*down)) / (2 * step)).abs().mean())
        torch.testing.assert_close(found[site.name].coef, torch.stack(slopes), rtol=1e-5, atol=1e-8)


def test_scores_do_not_depend_on_the_batch() -> None:
    model, data = small()
    graph = trace(model, torch.randn(2, 4, dtype=torch.float64))
    sites = find_sites(graph)
    whole, parts = (score_network(graph, sites, data, cross_entropy, batch=batch) for batch in (20, 3))
    for name, importance in whole.items():
        torch.testing.assert_close(importance.coef, parts[name].coef, rtol=0, atol=1e-12)
        torch.testing.assert_close(importance.split_half, parts[name].split_half)


def test_an_effect_that_differs_in_sign_from_example_to_example_counts() -> None:
    """A filter that moves the loss of half the examples up and of the others down is not without effect."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 2, bias=False)).double().eval()
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(2))
        model[2].weight.copy_(torch.tensor([[1.0, 0.01], [-1.0, 0.01]]))
    inputs = torch.ones(8, 2, dtype=torch.float64)
    graph = trace(model, inputs[:2])
    found = score_network(graph, find_sites(graph), Examples(inputs, torch.arange(8) % 2), cross_entropy, off=0.5)
    (importance,) = found.values()
    assert importance.coef[0] > 10 * importance.coef[1]
