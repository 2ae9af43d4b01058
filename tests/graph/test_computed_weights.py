"""Weights that are computed from parameters alone: standardised ones, and those with filters in columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nets import Net, assert_compact_is_masked, assert_same, random_keep, random_tensor, randomise_, run
from secateurs import compact, cut_, find_sites, trace
from secateurs.errors import NotInPlace

X = random_tensor(2, 3, 8, 8)
TOKENS = random_tensor(3, 5, 6, seed=1)


class Standardised(nn.Conv2d):
    """As in timm and transformers: every filter has mean 0 and variance 1."""

    def forward(self, x: Tensor) -> Tensor:
        flat = self.weight.reshape(1, self.out_channels, -1)
        weight = F.batch_norm(flat, None, None, training=True, momentum=0.0, eps=1e-6).reshape_as(self.weight)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class Scaled(nn.Conv2d):
    """As in NFNets: with a gain for each filter."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.gain, self.scale = nn.Parameter(torch.ones(self.out_channels, 1, 1, 1)), self.weight[0].numel() ** -0.5

    def forward(self, x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(self.weight, dim=[1, 2, 3], keepdim=True, unbiased=False)
        weight = self.gain * self.scale * (self.weight - mean) * torch.rsqrt(variance + 1e-6)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class Columns(nn.Module):
    """As GPT-2's layers in transformers: the filters are columns."""

    def __init__(self, inputs: int, filters: int) -> None:
        super().__init__()
        self.filters, self.weight, self.bias = (
            filters,
            nn.Parameter(torch.empty(inputs, filters)),
            nn.Parameter(torch.empty(filters)),
        )

    def forward(self, x: Tensor) -> Tensor:
        sizes = x.size()[:-1] + (self.filters,)  # noqa: RUF005  # as it is written there
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(sizes)


def convolutions(kind: type[nn.Module]) -> Net:
    layers = {"a": kind(3, 6, 3, padding=1), "b": kind(6, 8, 3, groups=2, bias=False), "out": nn.Linear(8, 2)}
    return Net(lambda net, x: net.out(torch.relu(net.b(torch.relu(net.a(x)))).mean((2, 3))), **layers)


def columns() -> Net:
    return Net(lambda net, x: net.out(torch.relu(net.a(x))), a=Columns(6, 8), out=Columns(8, 3))


def products() -> Net:
    weights = {"a": nn.Parameter(torch.empty(6, 8)), "b": nn.Parameter(torch.empty(8, 4)), "out": nn.Linear(4, 2)}
    return Net(lambda net, x: net.out(torch.relu(torch.matmul(torch.relu(x @ net.a), net.b))), **weights)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Tensor, int]] = {  # and how many sites
    "standardised": (lambda: convolutions(Standardised), X, 2),
    "scaled": (lambda: convolutions(Scaled), X, 2),
    "columns": (columns, TOKENS, 1),
    "products": (products, TOKENS, 2),
}


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        *((name, engine) for name in NETWORKS for engine in ("fx", "record")),
        *(("standardised", "export"), ("columns", "export")),
    ],
)
def test_computed_weights_are_those_of_ordinary_layers(name: str, engine: Any) -> None:
    build, x, count = NETWORKS[name]
    model = randomise_(build())
    graph = trace(model, x, engine=engine)
    assert_same(run(graph.module, x), run(model, x))
    sites = list(find_sites(graph))
    assert len(sites) == count
    smaller = assert_compact_is_masked(graph, random_keep(sites, 0), (x[:1],))
    assert_compact_is_masked(smaller, random_keep(list(find_sites(smaller)), 1), (x[:1],))
    assert not {n for n, _ in graph.module.named_parameters()} & {n for n, _ in model.named_parameters() if "out" not in n}
    graph.module(x).sum().backward()
    assert all(parameter.grad is not None for parameter in graph.module.parameters())


def test_a_weight_that_several_layers_read_stays_computed() -> None:
    """Copies of it would no longer be one weight in training."""
    layers = {"a": Standardised(3, 3, 3, padding=1), "out": nn.Conv2d(3, 2, 1)}
    graph = trace(randomise_(Net(lambda net, x: net.out(net.a(torch.relu(net.a(x)))), **layers)), X)
    assert not find_sites(graph)
    assert {u.reason for u in find_sites(graph).unprunable} >= {"its weights are computed while the network runs"}


def test_a_weight_that_depends_on_the_input_stays_computed() -> None:
    def body(net: Net, x: Tensor) -> Tensor:
        return net.out(F.conv2d(x, net.weight * x.mean()))

    graph = trace(randomise_(Net(body, weight=nn.Parameter(torch.empty(4, 3, 1, 1)), out=nn.Conv2d(4, 2, 1))), X)
    assert not find_sites(graph)


def test_a_model_that_computes_its_weights_cannot_be_cut_in_place() -> None:
    model = randomise_(convolutions(Scaled))
    graph = trace(model, X)
    smaller = compact(graph, {"a.conv2d": torch.arange(6) > 1})
    with pytest.raises(NotInPlace, match=r"no parameter a\.conv2d\.weight.*its forward computes it"):
        cut_(model, smaller.plan, X)
