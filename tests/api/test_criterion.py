"""The user's own criterion, and layers that keep all their filters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from digit_loaders import QUICK, loaders, trained
from torch import Tensor, nn

import secateurs as sc
from secateurs.data import Examples
from secateurs.errors import InvalidInput

UNRANKED = sc.Recipe.fast(max_drop=0.05, sites=("0",))


@pytest.mark.usefixtures("own_criteria")
def test_their_criterion_ranks() -> None:
    def last_first(graph: sc.Graph, site: sc.Site, data: Examples) -> Tensor:
        assert len(data) > 0
        return -torch.arange(site.channels)

    recipe = sc.Recipe.fast(confidence=0, max_drop=0.9, largest_share=0.5, sites=("0",))
    result = sc.prune(trained(), *loaders(), recipe=recipe, criterion=last_first, progress=False)
    assert result.steps[0].criterion == "last_first"
    assert result.steps[0].removed == (11, 10, 9, 8, 7, 6)

    def wrong(graph: sc.Graph, site: sc.Site, data: Examples) -> Tensor:
        return torch.zeros(3)

    with pytest.raises(InvalidInput, match=r"criterion 'wrong' gave \(3,\) for site '0': wanted a tensor \(12,\)"):
        sc.prune(trained(), *loaders(), recipe=recipe, criterion=wrong, progress=False)


@pytest.mark.parametrize("by", ["pattern", "module", "type"])
def test_ignored_layers_keep_their_filters(by: str) -> None:
    model = trained()
    ignore: Any = {"pattern": "0", "module": model[0], "type": nn.Conv2d}[by]  # type: ignore[index]
    if by == "type":
        with pytest.raises(InvalidInput, match="no site is left"):
            sc.prune(model, *loaders(), ignore=[ignore], **QUICK)
        return
    result = sc.prune(model, *loaders(), ignore=[ignore], **QUICK)
    assert result.model.get_submodule("0").weight.shape[0] == 12
    assert result.model.get_submodule("3").weight.shape[0] < 16


class Blocks(nn.Module):
    """The digits' network in two blocks, with a head."""

    def __init__(self) -> None:
        super().__init__()
        layers = list(trained().children())
        self.stem, self.body = nn.Sequential(*layers[:3]), Block(*layers[3:6])
        self.head = nn.Sequential(*layers[6:])

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.head(self.body(self.stem(inputs)))
        return found


class Block(nn.Sequential):
    pass


@pytest.mark.parametrize("ignore", ["body", ["bod?"], [Block], Block, "body.0"])
def test_an_ignored_block_is_ignored_with_all_its_layers(ignore: Any) -> None:
    recipe = sc.Recipe.fast(confidence=0, max_drop=0.2, criterion="l1")
    result = sc.prune(Blocks(), *loaders(), ignore=ignore, recipe=recipe, progress=False)
    assert [step.site for step in result.steps] == ["stem.0"]


def test_what_cannot_be_ignored_is_an_error() -> None:
    with pytest.raises(InvalidInput, match="ignore: got 3, wanted patterns of layers' names, modules, or types"):
        sc.prune(trained(), *loaders(), ignore=[3], **QUICK)
    with pytest.raises(InvalidInput, match="no layer of the network is this Sequential"):
        sc.prune(trained(), *loaders(), ignore=trained(), **QUICK)


def ruinous(graph: sc.Graph, site: sc.Site, data: Examples) -> Tensor:
    with torch.no_grad():
        graph.module.get_submodule(site.layers[0]).weight.zero_()  # type: ignore[operator,union-attr]
    return torch.arange(site.channels)


def real(graph: sc.Graph, site: sc.Site, data: Examples) -> Tensor:
    return torch.arange(site.channels) * 1j


@pytest.mark.usefixtures("own_criteria")
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (ruinous, "criterion 'ruinous' changed the network's weights or buffers at site '0'"),
        (real, r"criterion 'real' gave torch.complex64 on cpu for site '0': wanted a tensor \(12,\) of real numbers"),
        (5, r"criterion: got 5, wanted a name, or a function \(graph, site, data\)"),
        (max, "wanted a name, or a function"),
    ],
)
def test_a_criterion_that_is_none_is_an_error(given: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        sc.prune(trained(), *loaders(), criterion=given, recipe=UNRANKED, progress=False)


@pytest.mark.usefixtures("own_criteria")
def test_a_registered_criterion_is_reported_under_its_name() -> None:
    @sc.criterion("counting")
    def counting(graph: sc.Graph, site: sc.Site, data: Examples) -> Tensor:
        return torch.arange(site.channels)

    result = sc.prune(trained(), *loaders(), criterion="counting", recipe=UNRANKED, progress=False)
    assert result.steps[0].criterion == "counting"
