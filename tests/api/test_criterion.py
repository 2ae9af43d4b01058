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


@pytest.mark.usefixtures("own_criteria")
def test_their_criterion_ranks() -> None:
    def last_first(graph: sc.Graph, site: sc.Site, data: Examples) -> Tensor:
        assert len(data) > 0
        return -torch.arange(site.channels)

    recipe = sc.Recipe(confidence=0, max_drop=0.9, largest_share=0.5, sites=("0",))
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
