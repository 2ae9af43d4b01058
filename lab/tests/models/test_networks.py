"""The networks of the lab against the literature: sizes by arithmetic, and the topologies that they are for."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.flop_counter import FlopCounterMode

from secateurs.models import build

SMALL = ["densenet-small", "mobilenet-small", "resnext-small", "split-small", "unet-small", "mlp", "cnn1d", "fcn3"]


def macs(model: nn.Module, x: Tensor) -> int:
    """Multiply-adds of convolutions and linear layers, as torch counts them."""
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model.eval()(x)
    return counter.get_total_flops() // 2


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_lenets_have_the_sizes_of_the_literature() -> None:
    """Han et al. (2015), table 1: 267K and 431K parameters; 20-50-800-500 has 2.29 million multiply-adds."""
    assert parameters(build("lenet300")) == 784 * 300 + 300 + 300 * 100 + 100 + 100 * 10 + 10 == 266_610
    lenet = build("lenet5")
    assert parameters(lenet) == 25 * 20 + 20 + 25 * 20 * 50 + 50 + 800 * 500 + 500 + 500 * 10 + 10 == 431_080
    assert macs(lenet, torch.zeros(1, 1, 28, 28)) == 24 * 24 * 500 + 8 * 8 * 25_000 + 400_000 + 5_000


def test_vgg16_has_the_known_size() -> None:
    widths = [3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512]
    convolutions = sum(9 * a * b + b for a, b in pairwise(widths))
    assert parameters(build("vgg16")) == convolutions + 2 * sum(widths[1:]) + 512 * 10 + 10 == 14_728_266
    pixels = [1024] * 2 + [256] * 2 + [64] * 3 + [16] * 3 + [4] * 3
    expected = sum(9 * a * b * size for (a, b), size in zip(pairwise(widths), pixels, strict=True)) + 5_120
    assert macs(build("vgg16"), torch.zeros(1, 3, 32, 32)) == expected == 313_201_664


@pytest.mark.parametrize(("name", "hidden"), [("fcn3", 3), ("fcn10", 10)])
def test_fcn_is_the_papers(name: str, hidden: int) -> None:
    model = build(name)
    assert parameters(model) == 2 * hidden + hidden + 1  # no bias in the hidden layer, one at the output
    x = np.random.default_rng(0).normal(size=(5, 2)).astype(np.float32)
    w1, w2, b = (model.state_dict()[key].numpy() for key in ("hidden.weight", "output.weight", "output.bias"))
    expected = np.maximum(x @ w1.T, 0) @ w2.T + b
    np.testing.assert_allclose(model(torch.from_numpy(x)).detach().numpy(), expected, rtol=1e-5, atol=1e-6)


def test_small_networks_have_the_topology_they_are_for() -> None:
    groups = {name: {m.groups for m in build(name).modules() if isinstance(m, nn.Conv2d)} for name in SMALL if name != "fcn3"}
    assert max(groups["resnext-small"]) == 4
    assert max(groups["mobilenet-small"]) > 4
    called = {name: {node.target for node in fx.symbolic_trace(build(name)).graph.nodes} for name in SMALL}
    assert torch.cat in called["densenet-small"]
    assert torch.cat in called["unet-small"]
    assert {"chunk", torch.split} <= called["split-small"]
    assert any(isinstance(module, nn.ConvTranspose2d) for module in build("unet-small").modules())
    assert any(isinstance(module, nn.Conv1d) for module in build("cnn1d").modules())
