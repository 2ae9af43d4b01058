"""What the engine does with weights that are replaced, slopes, and networks that are odd."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nets import seeded
from secateurs import Graph, Site, find_sites, masked, sample_masks, trace
from secateurs.data import Examples
from secateurs.errors import InvalidInput
from secateurs.graph.masking import copy_module
from secateurs.metrics import cross_entropy
from secateurs.metrics import loss as mean_loss
from secateurs.scoring.engine import MaskingStrategy, split_for


class Net(nn.Module):
    """Two convolutions with BatchNorm beside a shortcut, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.conv1, self.bn1 = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.conv2, self.bn2 = nn.Conv2d(6, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.linear = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        y = F.relu(self.bn1(self.conv1(x)))
        x = F.silu(self.bn2(self.conv2(y)) + x)  # smooth: a ReLU has no slope where a masked channel meets a zero
        logits: Tensor = self.linear(x.mean((2, 3)))
        return logits


def problem(model: nn.Module | None = None, dtype: torch.dtype = torch.float64, count: int = 9) -> tuple[Graph, Examples]:
    torch.manual_seed(0)
    net = (model or Net()).eval().to(dtype)
    for part in net.modules():
        if isinstance(part, nn.BatchNorm2d):
            nn.init.normal_(part.get_buffer("running_mean"), generator=seeded(1))
            nn.init.uniform_(part.get_buffer("running_var"), 0.5, 2, generator=seeded(2))
    inputs = torch.randn(count, 3, 5, 5, generator=seeded(3), dtype=dtype)
    return trace(net, inputs[:2]), Examples(inputs, torch.arange(count) % 4)


def drawn(site: Site, count: int = 4) -> Tensor:
    return sample_masks(site.channels, count, generator=seeded(6))


def losses_of(graph: Graph, site: Site, masks: Tensor, examples: Examples) -> Tensor:
    found = [mean_loss(masked(graph, {site: mask}), examples) for mask in masks]
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize("cache_bytes", [0, None])
def test_replaced_weights_are_those_of_the_mask(cache_bytes: int | None) -> None:
    graph, examples = problem()
    site = next(s for s in find_sites(graph) if s.name == "conv1")

    def weights(mask: Tensor) -> Mapping[str, Tensor]:
        noise = torch.randn(6, 6, 3, 3, generator=seeded(int(mask.sum()) + int(mask[0])), dtype=torch.float64)
        return {"conv2.weight": noise, "bn2.running_mean": mask.double(), "linear.bias": mask[:4].double()}

    expected = []
    for mask in drawn(site):
        module = copy_module(graph)
        module.load_state_dict({**module.state_dict(), **weights(mask)})
        expected.append(mean_loss(masked(graph.with_module(module), {site: mask}), examples))
    network = split_for(graph, site, examples, batch=4, unfolded=["conv2", "bn2"], cache_bytes=cache_bytes)
    found = network.measure(drawn(site), [cross_entropy], weights=weights)[:, 0]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=0)
    values = network.values(drawn(site), cross_entropy, weights=weights)
    torch.testing.assert_close(values.mean(1), found, rtol=1e-12, atol=0)
    # and the next one without them has its own again
    plain = network.measure(drawn(site), [cross_entropy])[:, 0]
    torch.testing.assert_close(plain, losses_of(graph, site, drawn(site), examples), rtol=1e-10, atol=0)


def test_weights_that_cannot_be_replaced_are_refused() -> None:
    graph, examples = problem()
    site = next(s for s in find_sites(graph) if s.name == "conv1")
    network = split_for(graph, site, examples)
    refused: dict[str, tuple[Tensor, str]] = {
        "conv2.weight": (torch.zeros(6, 6, 3, 3), "folded with its BatchNorm"),
        "stem.weight": (torch.zeros(6, 3, 3, 3), "not a parameter or buffer behind the site"),
        "linear.bias": (torch.zeros(3), "wanted \\(4,\\)"),
    }
    for name, (tensor, message) in refused.items():
        with pytest.raises(InvalidInput, match=message):
            network.measure(drawn(site), [cross_entropy], weights=lambda _, n=name, t=tensor: {n: t})  # type: ignore[misc]


@pytest.mark.parametrize("name", ["stem", "conv1", "conv2"])
def test_slopes_are_those_of_finite_differences(name: str) -> None:
    graph, examples = problem()
    site = next(s for s in find_sites(graph) if s.name == name)
    masks = sample_masks(6, len(examples), generator=seeded(7))
    network = split_for(graph, site, examples, batch=4)
    (found,) = network.slopes([masks], cross_entropy)
    losses, slopes = found[:, 0], found[:, 1:]
    torch.testing.assert_close(losses, network.values(masks, cross_entropy).diagonal(), rtol=1e-10, atol=0)

    def loss_at(factors: Tensor) -> Tensor:
        def soft(_: nn.Module, __: Any, output: Tensor) -> Tensor:
            return output * factors[:, :, None, None]

        module = copy_module(graph)
        node = next(n for n in module.graph.nodes if n.name == site.node)
        module.add_submodule("soft", nn.Identity())
        with module.graph.inserting_after(node):
            new = module.graph.call_module("soft", (node,))
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
        module.recompile()
        module.get_submodule("soft").register_forward_hook(soft)
        return cross_entropy(module.eval()(examples.inputs), examples.targets)

    assert slopes.shape == (len(examples), 6)
    step = 1e-6
    for channel in range(6):
        shift = torch.zeros(6, dtype=torch.float64)
        shift[channel] = step
        with torch.no_grad():
            expected = (loss_at(masks + shift) - loss_at(masks.double() - shift)) / (2 * step)
        torch.testing.assert_close(slopes[:, channel], expected, rtol=1e-5, atol=1e-8)
    factors = masks.double().requires_grad_()
    (expected,) = torch.autograd.grad(loss_at(factors).sum(), factors)
    torch.testing.assert_close(slopes, expected, rtol=1e-9, atol=1e-12)


def test_a_loss_without_slopes_is_refused() -> None:
    graph, examples = problem()
    site = find_sites(graph)[0]
    network = split_for(graph, site, examples)
    masks = torch.ones(len(examples), site.channels, dtype=torch.bool)
    with pytest.raises(InvalidInput, match="no slope"):
        network.slopes([masks], lambda outputs, targets: (outputs.argmax(1) == targets).double())
    with pytest.raises(InvalidInput, match="not their mean"):
        network.slopes([masks], lambda outputs, targets: cross_entropy(outputs, targets).mean())


class Mixing(Net):
    """Subtracts the mean over the batch: an example alone gives something else."""

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        return logits - logits.mean(0, keepdim=True)


class Twice(nn.Module):
    """Before the only site, a convolution that is called twice, with and without a BatchNorm, and tied to another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.again, self.tied, self.bn = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
        self.tied.weight = self.again.weight
        self.last, self.linear = nn.Conv2d(3, 6, 3), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tied(self.bn(self.again(x)) + self.again(x))
        logits: Tensor = self.linear(F.relu(self.last(x)).mean((2, 3)))
        return logits


class TwoHeads(nn.Module):
    """Channels on the last axis, two layers that read them, and outputs in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.one, self.two = nn.Linear(5, 6), nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = F.relu(self.hidden(x))
        return {"logits": self.one(y).mean((1, 2)), "again": self.two(y).sum((1, 2))}


@pytest.mark.parametrize("model", [Mixing(), Twice()], ids=["mixing", "twice"])
@pytest.mark.parametrize("batch", [4, 9])
def test_odd_networks_are_measured_as_they_are(model: nn.Module, batch: int) -> None:
    graph, examples = problem(model)
    site = find_sites(graph)[0]
    network = split_for(graph, site, examples, batch=batch)
    expected = [mean_loss(masked(graph, {site: mask}), examples, batch=batch) for mask in drawn(site)]
    found = network.measure(drawn(site), [cross_entropy])[:, 0]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=0)


def test_channels_on_the_last_axis_and_several_outputs() -> None:
    graph, examples = problem(TwoHeads())
    (site,) = find_sites(graph)
    assert site.axis == 3

    def loss(outputs: Any, targets: Any) -> Tensor:
        again: Tensor = outputs["again"]
        return cross_entropy(outputs["logits"], targets) + 0.1 * again.square().mean(1)

    expected = [mean_loss(masked(graph, {site: mask}), examples, loss_fn=loss) for mask in drawn(site)]
    for strategy in (None, MaskingStrategy(rows=2), MaskingStrategy(rows=4, masking="subtract")):
        network = split_for(graph, site, examples, batch=5, strategy=strategy)
        found = network.measure(drawn(site), [loss])[:, 0]
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=0)


@pytest.mark.parametrize("strategy", [None, MaskingStrategy(rows=3), MaskingStrategy(rows=9, masking="subtract")])
def test_infinite_activations_in_a_masked_channel_vanish(strategy: MaskingStrategy | None) -> None:
    graph, examples = problem()
    site = next(s for s in find_sites(graph) if s.name == "conv1")
    module = copy_module(graph)
    with torch.no_grad():
        module.get_parameter("bn1.bias")[2] = torch.inf
    graph = graph.with_module(module)
    masks = drawn(site)
    masks[:, 2] = False
    found = split_for(graph, site, examples, strategy=strategy).measure(masks, [cross_entropy])[:, 0]
    expected = losses_of(graph, site, masks, examples)
    assert bool(torch.isfinite(expected).all())
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)
