"""Masks at all sites at once: slopes by hand, sets before single filters, and no figure that depends on the batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from nets import seeded
from secateurs import find_sites, trace
from secateurs.data.dataset import Examples, generator_for
from secateurs.errors import NonFinite
from secateurs.metrics import cross_entropy, log_odds
from secateurs.scoring.importance import order_by_sets
from secateurs.scoring.masks import sample_masks
from secateurs.scoring.network import network_slopes, score_network


def small() -> tuple[nn.Sequential, Examples]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)).double().eval()
    inputs = torch.randn(20, 4, generator=seeded(1), dtype=torch.float64)
    return model, Examples(inputs, torch.arange(20) % 3)


def read_twice(weights: Tensor) -> nn.Sequential:
    """Neuron c is input c, and adds weights[c] of it to the first of two logits and subtracts it from the second."""
    count = len(weights)
    model = nn.Sequential(nn.Linear(count, count, bias=False), nn.ReLU(), nn.Linear(count, 2, bias=False)).double().eval()
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(count))
        model[2].weight.copy_(torch.stack([weights, -weights]))
    return model


def test_slopes_are_those_of_each_example_under_its_own_masks() -> None:
    model, data = small()
    graph = trace(model, torch.randn(2, 4, dtype=torch.float64))
    sites = find_sites(graph)
    (found,) = network_slopes(graph, sites, data, cross_entropy, off=0.4, seed=3)
    generator = generator_for(3, "network masks")
    one, two = (sample_masks(c, 20, off=0.2, design="bernoulli", generator=generator).double() for c in (5, 6))

    def loss(a: Tensor, b: Tensor) -> Tensor:
        hidden = torch.relu(model[0](data.inputs)) * a
        return cross_entropy(model[4](torch.relu(model[2](hidden)) * b), data.targets)

    step = 1e-6
    for site, (place, channels) in zip(sites, ((0, 5), (1, 6)), strict=True):
        for channel in range(channels):
            moved = torch.zeros(channels, dtype=torch.float64)
            moved[channel] = step
            up, down = ([one + moved, two], [one - moved, two]) if place == 0 else ([one, two + moved], [one, two - moved])
            with torch.no_grad():
                slopes = (loss(*up) - loss(*down)) / (2 * step)
            torch.testing.assert_close(found[1][site.name][:, channel], slopes, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_log_odds_of_two_classes_are_linear_in_the_mask(scale: float) -> None:
    """They are twice the first logit, so that slopes are known under any masks, however certain the answers are."""
    weights = torch.tensor([0.5, 0.1, 0.3], dtype=torch.float64)
    inputs = scale * torch.tensor([[1.0, 2.0, 1.0], [1.0, 2.0, 3.0]], dtype=torch.float64).repeat(4, 1)
    graph = trace(read_twice(weights), inputs[:2])
    found = score_network(graph, find_sites(graph), Examples(inputs, torch.zeros(8, dtype=torch.long)), cross_entropy, off=0.5)
    (ranked,) = found.values()
    by_hand = scale * torch.tensor([1.0, 0.4, 0.6 * 5**0.5], dtype=torch.float64)  # 2 w times the root mean square input
    torch.testing.assert_close(ranked.importance.coef, by_hand, rtol=1e-12, atol=0)
    assert ranked.order.tolist() == [1, 0, 2]


def test_filters_that_do_the_same_do_not_all_go_first() -> None:
    """Mean squares are 1, 1.21 and 1.44. With the first gone, the second adds 1.21 + 2 · 1.1, the third 1.44 and no more."""
    slopes = torch.tensor([[1.0, 1.1, 1.2], [1.0, 1.1, -1.2]])
    assert order_by_sets(slopes).tolist() == [0, 2, 1]


def test_filters_that_make_up_for_each_other_go_together() -> None:
    """With the first gone, the second adds 1.21 + 2 · 1.1, the third takes 2 · 1.2 - 1.44 back."""
    slopes = torch.tensor([[1.0, 1.1, -1.2], [1.0, 1.1, -1.2]])
    assert order_by_sets(slopes).tolist() == [0, 2, 1]


def test_equal_filters_go_by_index() -> None:
    assert order_by_sets(torch.zeros(4, 5)).tolist() == [0, 1, 2, 3, 4]


def test_an_effect_that_differs_in_sign_from_example_to_example_counts() -> None:
    """A filter that moves half the examples up and the others down is not without effect."""
    inputs = torch.ones(8, 2, dtype=torch.float64)
    graph = trace(read_twice(torch.tensor([1.0, 0.01], dtype=torch.float64)), inputs[:2])
    found = score_network(graph, find_sites(graph), Examples(inputs, torch.arange(8) % 2), cross_entropy, off=0.5)
    (ranked,) = found.values()
    torch.testing.assert_close(ranked.importance.coef, torch.tensor([2.0, 0.02], dtype=torch.float64))
    assert ranked.order.tolist() == [1, 0]


def test_scores_do_not_depend_on_the_batch_and_are_the_same_again() -> None:
    model, data = small()
    graph = trace(model, torch.randn(2, 4, dtype=torch.float64))
    sites = find_sites(graph)
    whole, again, parts = (score_network(graph, sites, data, cross_entropy, batch=batch) for batch in (20, 20, 3))
    for name, ranked in whole.items():
        assert torch.equal(ranked.importance.coef, again[name].importance.coef)
        torch.testing.assert_close(ranked.importance.coef, parts[name].importance.coef, rtol=0, atol=1e-12)
        torch.testing.assert_close(ranked.importance.split_half, parts[name].importance.split_half)
        assert ranked.order.tolist() == again[name].order.tolist() == parts[name].order.tolist()


def test_slopes_of_other_losses_are_their_own() -> None:
    """A squared error of 4 h0 + h1 from 0 at h = (1, 2), with nothing off: slopes are 2 · 6 · (4, 2)."""
    weights, inputs = torch.tensor([4.0, 1.0], dtype=torch.float64), torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    graph = trace(read_twice(weights), inputs.repeat(2, 1))
    data = Examples(inputs.repeat(2, 1), torch.zeros(2, dtype=torch.float64))
    (ranked,) = score_network(graph, find_sites(graph), data, lambda given, _: given[:, 0].square(), off=1e-9).values()
    torch.testing.assert_close(ranked.importance.coef, torch.tensor([48.0, 24.0], dtype=torch.float64))


def test_examples_without_finite_slopes_are_left_out() -> None:
    model, data = small()
    graph = trace(model, torch.randn(2, 4, dtype=torch.float64))
    assert isinstance(data.inputs, Tensor)
    damaged = data.inputs.clone()
    damaged[3] = torch.nan
    found = score_network(graph, find_sites(graph), Examples(damaged, data.targets), cross_entropy)
    assert all(bool(ranked.importance.coef.isfinite().all()) for ranked in found.values())
    with pytest.raises(NonFinite, match="all 20 examples"):
        score_network(graph, find_sites(graph), Examples(damaged * torch.nan, data.targets), cross_entropy)


def test_log_odds_are_those_of_the_right_class() -> None:
    logits = torch.randn(6, 4, generator=seeded(0), dtype=torch.float64)
    right = logits.softmax(1)[torch.arange(6), torch.arange(6) % 4]
    torch.testing.assert_close(log_odds(logits, torch.arange(6) % 4), (right / (1 - right)).log())
    certain = torch.tensor([[200.0, 0.0]])
    assert float(log_odds(certain, torch.tensor([0]))) == 200.0  # the probability is 1 in any precision


def test_log_odds_of_a_label_that_is_left_out_have_no_slope() -> None:
    logits = torch.randn(1, 3, 2, generator=seeded(0)).requires_grad_()
    found = log_odds(logits, torch.tensor([[1, -100]]))
    (slope,) = torch.autograd.grad(found.sum(), logits)
    assert float(found.detach()[0, 1]) == 0.0
    assert float(slope[..., 1].abs().sum()) == 0.0
