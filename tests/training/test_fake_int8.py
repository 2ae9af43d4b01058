"""Training through int8 rounding: values and gradients by hand, and a module that is as it was afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from secateurs.config import TrainSettings
from secateurs.data import Examples
from secateurs.training import train_
from secateurs.training.fake_int8 import fake_int8, rounded_input, rounded_weight


def test_weights_are_rounded_for_each_filter_and_gradients_pass() -> None:
    """Filter 0 has steps of 1 (its largest weight is 127), filter 1 of 0.1."""
    weight = torch.tensor([[127.0, 3.4], [-12.7, 0.26]], requires_grad=True)
    found = rounded_weight(weight)
    torch.testing.assert_close(found, torch.tensor([[127.0, 3.0], [-12.7, 0.3]]))
    (found * torch.tensor([[1.0, 2.0], [3.0, 4.0]])).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [[1, 2], [3, 4]]


def test_inputs_are_rounded_in_their_range_and_gradients_end_at_its_edges() -> None:
    """256 steps of 0.1 from -5.5 to 20: 0.26 becomes 0.3, 21 becomes 20, and only what lies inside has a gradient."""
    x = torch.tensor([0.26, -5.52, 21.0, -0.04], requires_grad=True)
    found = rounded_input(x, torch.tensor(-5.5), torch.tensor(20.0))
    torch.testing.assert_close(found, torch.tensor([0.3, -5.5, 20.0, 0.0]))
    found.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1, 0, 0, 1]


def test_the_gradient_is_that_of_the_rounded_network_at_its_rounded_inputs() -> None:
    """Finite differences of the loss with respect to rounded weights, held fixed: what straight-through passes on."""
    torch.manual_seed(0)
    layer, x = nn.Linear(3, 2).double(), torch.randn(5, 3, dtype=torch.float64)
    with fake_int8(layer):
        layer(x).square().sum().backward()
    low, high = x.min().clamp(max=0), x.max().clamp(min=0)
    weight, bias, given = rounded_weight(layer.weight).detach(), layer.bias.detach(), rounded_input(x, low, high)
    for place in ((0, 0), (1, 2)):
        shifted = [weight.clone(), weight.clone()]
        shifted[0][place] += 1e-6
        shifted[1][place] -= 1e-6
        up, down = ((given @ each.T + bias).square().sum() for each in shifted)
        assert layer.weight.grad is not None
        assert float(layer.weight.grad[place]) == pytest.approx(float((up - down) / 2e-6), rel=1e-5)


def test_a_training_leaves_the_module_as_it_was_and_can_be_resumed() -> None:
    def network() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))

    torch.manual_seed(1)
    data = Examples(torch.randn(32, 1, 6, 6), torch.randint(3, (32,)))
    settings, states = TrainSettings(epochs=2, lr=0.05, batch=8, int8=True), []
    whole, plain = network(), network()
    train_(whole, data, settings, save=states.append)
    assert not any("forward" in vars(part) for part in whole.modules())
    assert whole.state_dict().keys() == plain.state_dict().keys()
    resumed = network()
    train_(resumed, data, settings, resume=states[0])
    for name, tensor in whole.state_dict().items():
        torch.testing.assert_close(resumed.state_dict()[name], tensor, rtol=0, atol=0)
    train_(plain, data, TrainSettings(epochs=2, lr=0.05, batch=8))
    assert not torch.equal(plain.state_dict()["0.weight"], whole.state_dict()["0.weight"])
    whole.eval()
    exact = whole(data.inputs)
    with fake_int8(whole):
        torch.testing.assert_close(whole(data.inputs), exact, rtol=0, atol=0)  # in eval mode nothing is rounded


def test_layers_may_be_called_by_name() -> None:
    class Named(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self[1](input=self[0](input=x).flatten(1))

    torch.manual_seed(0)
    named = Named(nn.Conv2d(1, 4, 3), nn.Linear(64, 3))
    plain = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(64, 3))
    plain.load_state_dict({name.replace("1.", "2."): tensor for name, tensor in named.state_dict().items()})
    data = Examples(torch.randn(16, 1, 6, 6), torch.arange(16) % 3)
    for network in (named, plain):
        train_(network, data, TrainSettings(epochs=2, lr=0.05, batch=8, int8=True))
    assert torch.equal(named[1].weight, plain[2].weight)
