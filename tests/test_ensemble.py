"""Losses under masks: those of the masked network itself, whatever the batching, caching or interruption."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

from secateurs import Graph, Site, find_sites, masked, sample_masks, score_masks, trace
from secateurs.data import Examples
from secateurs.errors import InvalidMask
from secateurs.metrics import accuracy
from secateurs.metrics import loss as mean_loss
from secateurs.models import build, example_input
from secateurs.scoring.engine.masked import split_for
from secateurs.scoring.ensemble import accuracy_under

NAMES = ("resnet8", "mobilenet-small", "unet-small", "densenet-small", "resnext-small", "split-small", "mlp", "cnn1d")


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@cache
def problem(name: str, count: int = 10) -> tuple[Graph, Examples]:
    """A network in float64 with random BatchNorm statistics, and random examples for it, of 16 pixels a side at most."""
    torch.manual_seed(0)
    model = build(name).double().eval()
    for part in model.modules():
        if isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d):
            part.running_mean.normal_(0, 0.2, generator=seeded(1))
            part.running_var.uniform_(0.5, 1.5, generator=seeded(2))
    example = example_input(name).double()
    graph = trace(model, example[..., :16, :16] if name.startswith("resnet") else example)
    inputs = torch.randn(count, *graph.example[0].shape[1:], generator=seeded(3), dtype=torch.float64)
    shape = graph.module(inputs).shape
    return graph, Examples(inputs, torch.randint(shape[1], (count, *shape[2:]), generator=seeded(4)))


def some_masks(site: Site, count: int = 5) -> Tensor:
    return sample_masks(site.channels, count, generator=seeded(5))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shortcut", ["before", "after"])
def test_losses_are_those_of_the_masked_network(name: str, shortcut: str) -> None:
    graph, examples = problem(name)
    sites = find_sites(graph, shortcut)  # type: ignore[arg-type]
    for site in [sites[0], sites[len(sites) // 2], sites[-1]]:
        masks = some_masks(site, 3)
        found = score_masks(graph, site, masks, examples).losses
        naive = torch.tensor([mean_loss(masked(graph, {site: mask}), examples) for mask in masks], dtype=torch.float64)
        torch.testing.assert_close(found, naive, rtol=1e-10, atol=1e-12)


@cache
def usual_losses() -> Tensor:
    graph, examples = problem("resnet8")
    site = find_sites(graph)[3]
    return score_masks(graph, site, some_masks(site), examples).losses


@pytest.mark.parametrize("batch", [1, 3, 64])
@pytest.mark.parametrize("masks_per_pass", [1, 2, 64])
@pytest.mark.parametrize("cache_bytes", [0, 20_000, 2**30])
def test_scores_do_not_depend_on_batching_or_memory(batch: int, masks_per_pass: int, cache_bytes: int) -> None:
    graph, examples = problem("resnet8")
    site = find_sites(graph)[3]
    options = {"batch": batch, "masks_per_pass": masks_per_pass, "cache_bytes": cache_bytes}
    found = score_masks(graph, site, some_masks(site), examples, **options)  # type: ignore[arg-type]
    torch.testing.assert_close(found.losses, usual_losses(), rtol=1e-10, atol=0)


def test_an_interrupted_ensemble_goes_on_to_the_same_bits() -> None:
    graph, examples = problem("mlp")
    site = find_sites(graph)[0]
    masks = some_masks(site, 40)
    whole = score_masks(graph, site, masks, examples, masks_per_pass=4).losses
    for done in (0, 1, 7, 39, 40):
        seen: list[int] = []

        def note(start: int, _: Tensor, into: list[int] = seen) -> None:
            into.append(start)

        again = score_masks(graph, site, masks, examples, masks_per_pass=4, known=whole[:done], on_scored=note)
        assert torch.equal(again.losses, whole)
        assert seen == list(range(done, 40, 4))


def test_accuracy_under_a_mask_is_that_of_the_masked_network() -> None:
    graph, examples = problem("resnet8", 30)
    site = find_sites(graph)[2]
    network = split_for(graph, site, examples, batch=7)
    for mask in some_masks(site):
        assert accuracy_under(network, mask) == accuracy(masked(graph, {site: mask}), examples)


def test_masks_of_another_kind_or_width_are_refused() -> None:
    graph, examples = problem("mlp")
    site = find_sites(graph)[0]
    with pytest.raises(InvalidMask, match=f"wanted bool \\(M, {site.channels}\\)"):
        score_masks(graph, site, torch.ones(3, site.channels), examples)
    with pytest.raises(InvalidMask, match="wanted bool"):
        score_masks(graph, site, torch.ones(3, site.channels + 1, dtype=torch.bool), examples)
