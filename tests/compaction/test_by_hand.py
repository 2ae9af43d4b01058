"""A cut network asks no more of torch than the same network written by hand, and alignments ask for little."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from nets import assert_same, conv, randomise_, run
from secateurs import Graph, compact, find_sites, trace
from secateurs.config import Shortcut
from secateurs.graph.layers import Align, Offset, SumInto
from secateurs.models import resnet
from secateurs.models.resnet import Block

X = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0)).double()


class Ops(TorchDispatchMode):
    """Counts the ops that torch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[str(func)] += 1
        return func(*args, **(kwargs or {}))


def ops(module: nn.Module) -> Counter[str]:
    with torch.no_grad(), Ops() as counted:
        module(X)
    return counted.found


def searches(module: nn.Module, monkeypatch: pytest.MonkeyPatch) -> int:
    """How often a layer or tensor was searched by its name in one forward pass."""
    found, search = 0, nn.Module.__getattr__

    def counted(self: nn.Module, name: str) -> Any:
        nonlocal found
        found += 1
        return search(self, name)

    with monkeypatch.context() as patched:
        patched.setattr(nn.Module, "__getattr__", counted)
        run(module, X)
    return found


def inner(network: nn.Module) -> nn.Module:
    """In place: half as many filters in the first layer of every block."""
    for block in network.modules():
        if isinstance(block, Block):
            half = block.conv1.out_channels // 2
            block.conv1 = conv(block.conv1.in_channels, half, stride=block.conv1.stride, bias=False)
            block.bn1 = nn.BatchNorm2d(half)
            block.conv2 = conv(half, block.conv2.out_channels, bias=False)
    return network


def halved(shortcut: Shortcut, within: str = "", seed: int = 0) -> Graph:
    """A ResNet-8 with a random half of the filters of all sites, or of those with `within` in their name."""
    graph = trace(randomise_(resnet(8)).double(), X)
    generator = torch.Generator().manual_seed(seed)
    masks: dict[str, Tensor] = {}
    for site in find_sites(graph, shortcut):
        kept = torch.randperm(site.channels, generator=generator)[: site.channels // 2]
        if within in site.name:
            masks[site.name] = torch.zeros(site.channels, dtype=torch.bool).index_fill(0, kept, True)
    return compact(graph, masks)


def test_a_cut_of_inner_layers_asks_no_more_of_torch_than_the_network_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    cut, by_hand = halved("before", ".0.conv1").module, inner(resnet(8)).double().eval()
    by_hand.load_state_dict(cut.state_dict())
    assert_same(run(cut, X), run(by_hand, X))
    assert ops(cut).total() <= ops(by_hand).total()
    assert searches(cut, monkeypatch) <= searches(by_hand, monkeypatch)


@pytest.mark.parametrize(("shortcut", "aligned"), [("before", 6), ("after", 3), ("stream", 2)])
def test_an_alignment_is_two_ops_at_most_and_nothing_is_padded_by_nothing(shortcut: Shortcut, aligned: int) -> None:
    """Three sums: both terms of each are aligned, or the shortcut, or only the two shortcuts between stages."""
    module = halved(shortcut).module
    own = [part for part in module.modules() if isinstance(part, Align | SumInto | Offset)]
    assert sum(isinstance(part, Align) for part in own) <= aligned
    assert [n for n in module.graph.nodes if n.target is F.pad] == []
    whole = ops(trace(resnet(8).double().eval(), X).module)
    assert ops(module).total() <= whole.total() - whole["aten.constant_pad_nd.default"] + 2 * aligned


class Deep(nn.Module):
    """Layers some levels down, one of them called twice, and a parameter of a container."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleDict({"a": nn.ModuleList([conv(3, 4), nn.ModuleList([conv(4, 4)])])})
        self.body.register_parameter("scale", nn.Parameter(torch.rand(4, 1, 1)))
        self.last = conv(4, 2)

    def forward(self, x: Tensor) -> Any:
        first, (second,) = self.body["a"]  # type: ignore[misc]  # torch says Tensor or Module
        return self.last(second(second(first(x)).relu() * self.body.scale))


@pytest.mark.parametrize(
    "way",
    [lambda module: module, copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))],
    ids=["own", "copy", "pickle"],
)
def test_layers_may_be_hooked_and_replaced_wherever_they_are(
    way: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = randomise_(Deep()).double()
    graph = trace(model, X)
    (site,) = (site for site in find_sites(graph) if "body.a.0" in site.layers)
    module = way(compact(graph, {site.name: torch.arange(4) > 0}).module)
    before = run(module, X)
    calls: list[int] = []
    module.get_submodule("body.a.1.0").register_forward_hook(lambda *given: calls.append(1))
    assert_same(run(module, X), before)
    assert len(calls) == 2
    assert searches(module, monkeypatch) < 20  # weights and biases of four calls, and the parameter
    module.set_submodule("body.a.0", zeros := nn.Conv2d(3, 3, 1).double())
    nn.init.zeros_(zeros.weight)
    nn.init.zeros_(zeros.bias)  # type: ignore[arg-type]
    assert_same(run(module, X), run(module, torch.zeros_like(X)))
