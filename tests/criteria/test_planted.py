"""Networks whose filters' worth is known by construction: what ensembles say of them, and what simpler measures say."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nets import seeded
from secateurs import find_sites, fit_importance, fit_pairs, sample_masks, score_masks, scores, trace
from secateurs.data import Examples
from secateurs.scoring.importance import order


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean(1)


def hidden_layer(into: Tensor, out: Tensor) -> nn.Sequential:
    """Linear, ReLU, linear without biases, of the given weights (C, inputs) and (outputs, C), in float64."""
    net = nn.Sequential(nn.Linear(into.shape[1], len(into), False), nn.ReLU(), nn.Linear(len(into), len(out), False)).double()
    net[0].weight.data.copy_(into)
    net[2].weight.data.copy_(out)
    return net


def ensemble_of(net: nn.Module, x: Tensor, masks: Tensor) -> Tensor:
    """Losses of the masked network against what the whole one says."""
    graph = trace(net, x[:2])
    return score_masks(graph, find_sites(graph)[0], masks, Examples(x, net(x).detach()), loss_fn=squared).losses


def test_large_unread_filters_rank_lowest() -> None:
    into = torch.rand(12, 6, generator=seeded(0), dtype=torch.float64)
    out = torch.rand(3, 12, generator=seeded(1), dtype=torch.float64) + 0.5
    unread = [2, 5, 7]
    into[unread] *= 50
    out[:, unread] = 0
    x = torch.randn(64, 6, generator=seeded(2), dtype=torch.float64)
    masks = sample_masks(12, 240, generator=seeded(3))
    importance = fit_importance(masks, scores(ensemble_of(hidden_layer(into, out), x, masks)))
    assert set(order(importance)[:3].tolist()) == set(unread)
    assert set(into.abs().sum(1).argsort()[-3:].tolist()) == set(unread)  # by L1 they are the most important of all


def test_known_contributions_are_ranked_rightly() -> None:
    """Each neuron feeds an output of its own, so the loss of a mask is the sum of what its missing neurons gave: additive."""
    count = 10
    worth = torch.linspace(0.5, 3.0, count, dtype=torch.float64)[torch.randperm(count, generator=seeded(0))]
    net = hidden_layer(torch.eye(count, dtype=torch.float64), torch.diag(worth.sqrt()))
    x = torch.ones(4, count, dtype=torch.float64)  # neuron c then contributes worth[c] / count to the squared error
    masks = sample_masks(count, 100, generator=seeded(1))
    losses = ensemble_of(net, x, masks)
    torch.testing.assert_close(losses, (~masks).double() @ worth / count, rtol=1e-12, atol=1e-12)
    importance = fit_importance(masks, scores(losses))
    assert order(importance).tolist() == worth.argsort().tolist()
    assert float(importance.r2_held_out) > 1 - 1e-9


def cancelling() -> tuple[nn.Module, Tensor]:
    """Neurons 0 and 1 are alike and read with opposite signs: together they do nothing, one alone does harm."""
    into = torch.rand(8, 4, generator=seeded(0), dtype=torch.float64)
    into[1] = into[0]
    out = torch.rand(2, 8, generator=seeded(1), dtype=torch.float64) * 0.6
    out[:, 0] = torch.tensor([1.5, 1.5])
    out[:, 1] = -out[:, 0]
    return hidden_layer(into, out), torch.randn(128, 4, generator=seeded(2), dtype=torch.float64)


def test_two_filters_that_cancel_each_other() -> None:
    """lab/notes/method.md describes the result: only pairwise terms see that the two can go together."""
    net, x = cancelling()
    alone = ~torch.eye(8, dtype=torch.bool)
    leave_one_out = ensemble_of(net, x, alone)
    without_both = torch.ones(1, 8, dtype=torch.bool)
    without_both[0, :2] = False
    assert float(ensemble_of(net, x, without_both)[0]) < 1e-12  # the truth: without both, nothing is lost
    assert set(leave_one_out.argsort()[-2:].tolist()) == {0, 1}  # leave-one-out: the two most important of all
    masks = sample_masks(8, 400, design="bernoulli", off=0.3, generator=seeded(3))
    losses = ensemble_of(net, x, masks)
    plain = order(fit_importance(masks, scores(losses))).tolist()
    assert not {0, 1} <= set(plain[:2])  # a linear model cannot say that they go together
    pairs = order(fit_pairs(masks, scores(losses))).tolist()
    assert set(pairs[:2]) == {0, 1}
