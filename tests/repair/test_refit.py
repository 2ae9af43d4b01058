"""Every layer solved again against the original: exact where it can be, equal to an independent solver, never worse."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nets import seeded
from secateurs import compact, find_sites, trace
from secateurs.config import Recipe
from secateurs.data.dataset import Examples
from secateurs.errors import RecipeError
from secateurs.graph.consumers import find_layers
from secateurs.graph.sites import Site
from secateurs.graph.trace import Graph
from secateurs.models import build
from secateurs.repair import refit_


class TwoTerms(nn.Module):
    """A sum of two linear layers, one behind a ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = self.a(torch.relu(x)) + self.b(x)
        return total


def examples(*shape: int) -> Examples:
    generator = seeded(3)
    return Examples(torch.randn(shape, generator=generator, dtype=torch.float64), torch.zeros(shape[0], dtype=torch.long))


def disturbed(graph: Graph, *names: str) -> Graph:
    module = copy.deepcopy(graph.module)
    with torch.no_grad():
        for name in names:
            weight = module.get_parameter(name)
            generator = seeded(len(name))
            weight.add_(torch.randn(weight.shape, generator=generator, dtype=weight.dtype), alpha=0.3)
    return graph.with_module(module)


def small_resnet() -> Graph:
    torch.manual_seed(0)
    model = build("resnet8").double()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):  # statistics that a trained network would have
            nn.init.normal_(module.get_buffer("running_mean"))
            nn.init.uniform_(module.get_buffer("running_var"), 0.5, 2)
            nn.init.uniform_(module.weight, 0.5, 1.5)
    return trace(model.eval(), torch.randn(2, 3, 16, 16, dtype=torch.float64))


def test_the_terms_of_a_sum_are_fitted_one_after_the_other_to_what_it_lacks() -> None:
    torch.manual_seed(1)
    original = trace(TwoTerms().double(), torch.randn(2, 5, dtype=torch.float64))
    seen = examples(60, 5)
    graph = disturbed(original, "a.weight", "b.weight", "b.bias")
    wanted = original(seen.inputs).detach().numpy()
    left, right = (np.c_[x.numpy(), np.ones(60)] for x in (torch.relu(seen.inputs), seen.inputs))
    weights = {name: weight.detach().numpy() for name, weight in graph.module.named_parameters()}
    b = np.c_[weights["b.weight"], weights["b.bias"]].T
    first = np.linalg.lstsq(left, wanted - right @ b, rcond=None)[0]
    second = np.linalg.lstsq(right, wanted - left @ first, rcond=None)[0]
    refit_(graph, original, seen, rows=None)
    np.testing.assert_allclose(weights["a.weight"], first[:-1].T, atol=1e-6)
    np.testing.assert_allclose(weights["b.weight"], second[:-1].T, atol=1e-6)
    np.testing.assert_allclose(weights["b.bias"], second[-1], atol=1e-6)


def test_a_disturbed_layer_is_restored_and_nothing_else_moves() -> None:
    original, seen = small_resnet(), examples(24, 3, 16, 16)
    graph = disturbed(original, "layer2.0.conv1.weight")
    errors = refit_(graph, original, seen, batch=7, rows=None)
    torch.testing.assert_close(graph(seen.inputs), original(seen.inputs), atol=1e-6, rtol=0)
    assert errors["layer2.0.conv1"].before > 0.01 > 1e-9 > errors["layer2.0.conv1"].after
    assert max(error.before for name, error in errors.items() if name < "layer2.0.conv1") < 1e-12


def test_a_cut_network_comes_closer_to_the_original() -> None:
    original, seen = small_resnet(), examples(24, 3, 16, 16)
    masks: dict[str | Site, Tensor] = {s.name: torch.arange(s.channels) >= s.channels // 4 for s in find_sites(original)}
    graph = compact(original, masks)
    before = (graph(seen.inputs) - original(seen.inputs)).square().mean()
    errors = refit_(graph, original, seen, rows=None)
    after = (graph(seen.inputs) - original(seen.inputs)).square().mean()
    assert after < 0.5 * before
    assert all(error.after <= error.before + 1e-12 for error in errors.values())


def test_each_block_ends_in_its_sum() -> None:
    ends = {reader.module: None if term is None else term.node for reader, term in find_layers(small_resnet())}
    assert ends["layer1.0.conv1"] is ends["conv1"] is ends["linear"] is None
    sums = [ends[f"layer{i}.0.conv2"] for i in (1, 2, 3)]
    assert sums == ["add", "add_1", "add_2"]


def test_refitting_wants_all_cuts_to_be_made_at_once() -> None:
    with pytest.raises(RecipeError, match="allocation = 'global'"):
        Recipe.fast(repair="every-layer")
