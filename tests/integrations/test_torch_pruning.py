"""FilterImportance in the real Torch-Pruning: it removes the filters with the lowest scores."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from nets import random_tensor, randomise_, seeded
from secateurs import Importance, compact, find_sites, fit_importance, masked, sample_masks, trace
from secateurs.errors import InvalidInput, InvalidMask, UnknownSite
from secateurs.integrations.torch_pruning import FilterImportance
from secateurs.models import build

tp = pytest.importorskip("torch_pruning", reason="Torch-Pruning is not installed: pip install torch-pruning==1.6.1")

HALF = {"pruning_ratio": 0.5, "global_pruning": False}


def chain() -> nn.Sequential:
    layers = [nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 5)]
    randomise_(made := nn.Sequential(*layers)).float()
    return made


def images() -> Tensor:
    return random_tensor(2, 3, 6, 6).float()


def test_torch_pruning_removes_the_filters_that_score_lowest() -> None:
    model, x = chain(), images()
    graph = trace(model, x)
    scores = {"0": torch.tensor([3.0, -1, 5, 0, 2, 9]), "3": torch.tensor([8.0, 7, 6, 5, 4, 3, 2, 1])}
    kept = {"0": scores["0"] >= 3, "3": scores["3"] >= 5}  # half of each, read off above
    wanted = masked(graph, kept)(x)
    importance = FilterImportance(model, graph, scores)
    tp.pruner.BasePruner(model, x, importance=importance, ignored_layers=[model[-1]], **HALF).step()
    assert (model[0].out_channels, model[3].out_channels) == (3, 4)
    torch.testing.assert_close(model(x), wanted, rtol=0, atol=1e-5)
    torch.testing.assert_close(compact(graph, kept).module(x), wanted, rtol=0, atol=1e-5)


def test_coupled_layers_are_scored_by_the_mean_of_their_sites() -> None:
    model = build("resnet8-b", widths=(4, 4, 8)).eval()
    x = random_tensor(2, 3, 8, 8).float()
    graph = trace(model, x)
    # stem and block write to the same four channels: their means are 1, 2.5, 2, 0.5
    scores = {"conv1": torch.tensor([2.0, 1, 4, 0]), "layer1.0.conv2": torch.tensor([0.0, 4, 0, 1])}
    group = (
        tp.DependencyGraph().build_dependency(model, x).get_pruning_group(model.conv1, tp.prune_conv_out_channels, [0, 1, 2, 3])
    )
    found = FilterImportance(model, graph, scores)(group)
    assert found is not None
    assert found.tolist() == [1.0, 2.5, 2.0, 0.5]
    other = (
        tp.DependencyGraph()
        .build_dependency(model, x)
        .get_pruning_group(model.layer1[0].conv1, tp.prune_conv_out_channels, [0])
    )
    assert FilterImportance(model, graph, scores)(other) is None


def test_importances_of_an_ensemble_are_accepted() -> None:
    model, x = chain(), images()
    graph = trace(model, x)
    masks = sample_masks(6, 40, generator=seeded(0))
    worth = torch.tensor([1.0, 6, 2, 5, 3, 4]).double()
    fitted = {"0": fit_importance(masks, masks.double() @ worth)}
    assert isinstance(fitted["0"], Importance)
    tp.pruner.BasePruner(
        model, x, importance=FilterImportance(model, graph, fitted), ignored_layers=[model[3], model[-1]], **HALF
    ).step()
    left = trace(chain(), x).module.get_submodule("0").weight[[1, 3, 5]]
    torch.testing.assert_close(model[0].weight, left)


def test_wrong_scores_and_pruned_layers_are_refused() -> None:
    model, x = chain(), images()
    graph = trace(model, x)
    with pytest.raises(InvalidMask, match=r"site '0': got shape \(5,\), wanted \(6,\)"):
        FilterImportance(model, graph, {"0": torch.ones(5)})
    with pytest.raises(InvalidInput, match="contain NaN"):
        FilterImportance(model, graph, {"0": torch.full((6,), torch.nan)})
    with pytest.raises(UnknownSite):
        FilterImportance(model, graph, {"nowhere": torch.ones(6)})
    cut = compact(graph, {find_sites(graph)[0].name: torch.arange(6) < 3})
    with pytest.raises(InvalidInput, match="is already pruned"):
        FilterImportance(model, cut, {"0": torch.ones(3)})
    with pytest.raises(InvalidInput, match="has no layer '0'"):
        FilterImportance(nn.ReLU(), graph, {"0": torch.ones(6)})
    importance = FilterImportance(model, graph, {"0": torch.arange(6.0)})
    pruner = tp.pruner.BasePruner(model, x, importance=importance, ignored_layers=[model[-1]], **HALF)
    pruner.step()
    again = tp.pruner.BasePruner(copy.copy(model), x, importance=importance, ignored_layers=[model[-1]], **HALF)
    with pytest.raises(InvalidInput, match="has 3 filters, but had 6 when it was scored"):
        again.step()
