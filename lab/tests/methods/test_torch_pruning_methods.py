"""Torch-Pruning's whole procedures in a comparison: the target is reached, and our network is the one that it cut."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nets import random_tensor, randomise_
from pages import ROOT
from secateurs import cost, load, save, trace
from secateurs.config import TrainSettings
from secateurs.data import Data, Examples
from secateurs.errors import InvalidInput, NotEqual
from secateurs.models import build
from secateurs_lab.methods import Budget, Task, method

tp = pytest.importorskip("torch_pruning", reason="Torch-Pruning is not installed: pip install torch-pruning==1.6.1")

L1, TAYLOR = (f"benchmarks.torch_pruning:{name}" for name in ("group_l1[steps=60]", "group_taylor[steps=60;images=20]"))


@pytest.fixture(autouse=True)
def benchmarks_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "lab"))


def task(projected: bool = True, **changes: Any) -> Task:
    images = Examples(random_tensor(60, 3, 8, 8).float(), torch.arange(60) % 10)
    graph = trace(network(projected), images.inputs[:2])
    return replace(Task(graph, Data("noise", images, images, None), 0.4, shortcut="coupled"), **changes)


def network(projected: bool = True) -> nn.Module:
    model = build("resnet8", shortcut="B" if projected else "A", widths=(6, 8, 12))
    return randomise_(model).float().train()  # as a network that was just built is


@pytest.mark.parametrize("name", [L1, TAYLOR])
def test_what_torch_pruning_removes_becomes_a_plan(name: str, tmp_path: Path) -> None:
    asked = task(budget=Budget("brief", after=TrainSettings(epochs=1, batch=30, lr=0.01)), folder=tmp_path / "work")
    found = method(name)(asked)
    assert 0.4 <= 1 - cost(found.graph).macs / cost(asked.graph).macs < 0.5  # a step is about a filter
    assert found.trained.images == 60
    assert (found.passes > 0) == (name == TAYLOR)
    assert found.graph.module.training
    again = load(network(), save(found.graph, tmp_path / "small.safetensors"))
    x = asked.data.train.inputs[:4]
    torch.testing.assert_close(again.module.eval()(x), found.graph.module.eval()(x))
    assert method(name)(asked).graph.plan == found.graph.plan  # from its folder


def test_the_weakest_group_goes_first() -> None:
    """A filter, its BatchNorm and what reads it are scaled down: together they are the weakest group of the network."""
    model = network()
    with torch.no_grad():
        for name, part in [("conv1", (5,)), ("bn1", (5,)), ("conv2", (slice(None), 5))]:
            model.get_parameter(f"layer2.0.{name}.weight")[part] *= 0.01
    asked = task()
    found = method(L1)(replace(asked, graph=trace(model, asked.graph.example), target_macs=0.001))
    assert {site: ids for site, ids in found.graph.plan.removed().items() if ids} == {"layer2.0.conv1": (5,)}


def test_a_network_that_torch_pruning_cuts_wrongly_is_refused() -> None:
    """Padded shortcuts shift channels, which it does not follow."""
    with pytest.raises(InvalidInput, match=r"site 'conv1\.coupled': Torch-Pruning removed other channels of each of conv1, "):
        method(L1)(task(projected=False))


def test_a_module_that_computes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_pruning.pruner.function import BatchnormPruner

    def forgets_the_mean(self: Any, layer: nn.BatchNorm2d, idxs: list[int]) -> nn.Module:
        right(self, layer, idxs)
        assert layer.running_mean is not None
        layer.running_mean.zero_()
        return layer

    right = BatchnormPruner.prune_out_channels
    for name in ("prune_out_channels", "prune_in_channels"):
        monkeypatch.setattr(BatchnormPruner, name, forgets_the_mean)
    with pytest.raises(NotEqual, match="what Torch-Pruning's module computes differs by"):
        method(L1)(task())


def test_a_position_whose_sites_are_not_its_groups_is_refused() -> None:
    with pytest.raises(InvalidInput, match="shortcut='before': wanted coupled or stream"):
        method(L1)(task(shortcut="before"))


def test_too_few_steps_are_an_error() -> None:
    with pytest.raises(InvalidInput, match=r"target_macs = 0\.999: 1 steps removed only 0\."):
        method("benchmarks.torch_pruning:group_l1[steps=1]")(task(target_macs=0.999))
