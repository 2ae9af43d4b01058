"""Whole-network reconstruction: its gradient by finite differences, its error by hand, a start that it brings back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_refit import disturbed, examples, small_resnet
from torch import nn

from nets import assert_same_bits, weights_of
from secateurs import Pruner, Recipe, compact, find_sites, resume, trace
from secateurs._util.journal import Journal
from secateurs.data.dataset import Examples
from secateurs.errors import InvalidInput, RecipeError
from secateurs.repair import reconstruct_
from secateurs.repair.whole import LayerTargets
from secateurs.training import KeptWeights
from torture.runs import few_digits, perceptron


def test_the_error_by_hand() -> None:
    """Two layers, the second filter of the first removed: its target is the original's first and third output."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)).double()
    graph = trace(model, torch.randn(2, 4).double())
    (site,) = [site for site in find_sites(graph) if site.name == "0"]
    smaller = compact(graph, {site.name: torch.tensor([True, False, True])})
    changed = disturbed(smaller, "0.weight")
    x = torch.randn(6, 4).double()
    hidden, wanted = model[0](x)[:, [0, 2]], model(x)
    first, last = changed.module.get_submodule("0"), changed.module.get_submodule("2")
    own = first(x)
    expected = (own - hidden).square().sum() / hidden.square().sum()
    expected = expected + (last(own.relu()) - wanted).square().sum() / wanted.square().sum()
    torch.testing.assert_close(LayerTargets.of(changed, graph).error((x,)), expected)


def test_gradients_equal_finite_differences() -> None:
    original = small_resnet()
    graph = disturbed(original, "conv1.weight", "layer2.0.conv2.weight")
    pairs, inputs = LayerTargets.of(graph, original), examples(2, 3, 8, 8).batch(slice(0, 2)).args
    graph.module.eval()
    pairs.error(inputs).backward()  # type: ignore[no-untyped-call]
    for name in ("conv1.weight", "layer2.0.conv2.weight", "linear.bias"):
        weight = pairs.trained[name]
        gradient = weight.grad
        assert gradient is not None
        for place in (0, weight.numel() // 2):
            slopes = []
            for step in (1e-6, -1e-6):
                with torch.no_grad():
                    weight.view(-1)[place] += step
                    slopes.append(float(pairs.error(inputs)))
                    weight.view(-1)[place] -= step
            slope = (slopes[0] - slopes[1]) / 2e-6
            assert float(gradient.view(-1)[place]) == pytest.approx(slope, rel=1e-5, abs=1e-8)


def test_a_disturbed_network_comes_nearer_to_the_original_and_batchnorm_stays() -> None:
    original = small_resnet()
    graph = disturbed(original, "layer1.0.conv1.weight")
    before = weights_of(graph.module)
    images = examples(16, 3, 8, 8)
    first, last = reconstruct_(graph, original, images, passes=10, rate=1e-2, batch=8, seed=1)
    assert last < 0.5 * first
    after = weights_of(graph.module)
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert {name for name in before if "bn" in name or "running" in name} <= same
    again = disturbed(original, "layer1.0.conv1.weight")
    assert reconstruct_(again, original, images, passes=10, rate=1e-2, batch=8, seed=1) == (first, last)
    assert_same_bits(after, weights_of(again.module))
    with pytest.raises(InvalidInput, match="no examples"):
        reconstruct_(graph, original, Examples(torch.zeros(0, 3, 8, 8).double(), torch.zeros(0)))


def test_a_run_with_it_keeps_what_is_better_and_ends_the_same_when_stopped(tmp_path: Path) -> None:
    recipe = Recipe.fast(
        max_drop=0.3, confidence=0, criterion="l1", repair="whole-network", allocation="global", target_macs=0.3
    )
    data = few_digits(384)
    whole = Pruner(perceptron(), data, recipe=recipe, folder=tmp_path / "whole")
    result = whole.finish()
    (kept,) = whole.journal.of(KeptWeights)
    losses = {each.name: each.loss for each in kept.tried}
    assert kept.phase == "reconstruct"
    assert losses[kept.kept] == min(losses.values()) < losses["start"]

    def stop(journal: Journal, record: Any) -> None:
        append(journal, record)
        if isinstance(record, KeptWeights):
            raise KeyboardInterrupt

    append = Journal.append
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "append", stop)
        with pytest.raises(KeyboardInterrupt):
            Pruner(perceptron(), data, recipe=recipe, folder=tmp_path / "stopped").finish()
    again = resume(tmp_path / "stopped", perceptron(seed=3), data)
    assert_same_bits(weights_of(result.model), weights_of(again.finish().model))
    assert len(again.journal.of(KeptWeights)) == 1


def test_it_comes_after_all_cuts() -> None:
    with pytest.raises(RecipeError, match="repair = 'whole-network': comes after all cuts: set allocation = 'global'"):
        Recipe.fast(repair="whole-network")


def test_gradients_come_back_as_they_were() -> None:
    original = small_resnet()
    graph, images = disturbed(original, "layer1.0.conv1.weight"), examples(8, 3, 8, 8)
    first, *others = graph.module.parameters()
    first.grad = given = torch.full_like(first, 7.0)
    reconstruct_(graph, original, images, passes=1)
    assert first.grad is given
    assert bool((given == 7).all())
    assert all(weight.grad is None for weight in others)

    def stop(*given: Any) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.Adam, "step", stop)
        with pytest.raises(KeyboardInterrupt):
            reconstruct_(graph, original, images, passes=1)
    assert first.grad is given
    assert all(weight.grad is None for weight in others)


@pytest.mark.parametrize("norms_too", [False, True])
def test_frozen_layers_are_measured_and_stay(norms_too: bool) -> None:
    """Of one batch of all examples the error is that of `LayerTargets`, divided by the number of layers."""
    original = small_resnet()
    graph, images = disturbed(original, "layer1.0.conv1.weight"), examples(8, 3, 8, 8)
    for name, weight in graph.module.named_parameters():
        weight.requires_grad_("bn" in name and not norms_too)
    before, pairs = weights_of(graph.module), LayerTargets.of(graph, original)
    graph.module.eval()
    expected = float(pairs.error(images.stored.args).detach()) / len(pairs.targets)
    assert expected > 0
    assert reconstruct_(graph, original, images, passes=3, rate=0.1) == pytest.approx((expected, expected))
    assert_same_bits(weights_of(graph.module), before)


def test_a_run_of_a_frozen_network_ends_with_the_weights_before() -> None:
    recipe = Recipe.fast(
        max_drop=0.3, confidence=0, criterion="l1", repair="whole-network", allocation="global", target_macs=0.3
    )
    run = Pruner(perceptron().requires_grad_(False), few_digits(384), recipe=recipe)
    run.finish()
    (kept,) = run.journal.of(KeptWeights)
    assert kept.kept == "start"
