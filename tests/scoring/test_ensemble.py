"""Losses under masks: those of the masked network itself, whatever the batching, caching or interruption."""

from __future__ import annotations

import contextlib
from functools import cache

import pytest
import torch
from torch import Tensor

from nets import random_problem, seeded
from secateurs import Site, find_sites, masked, sample_masks, score_masks
from secateurs.config import Shortcut
from secateurs.errors import InvalidMask
from secateurs.metrics import loss as mean_loss
from secateurs.scoring.cache import MeasurementCache

NAMES = ("resnet8", "mobilenet-small", "unet-small", "densenet-small", "resnext-small", "split-small", "mlp", "cnn1d")


def some_masks(site: Site, count: int = 5) -> Tensor:
    return sample_masks(site.channels, count, generator=seeded(5))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shortcut", ["before", "after"])
def test_losses_are_those_of_the_masked_network(name: str, shortcut: Shortcut) -> None:
    graph, examples = random_problem(name)
    sites = find_sites(graph, shortcut)
    for site in [sites[0], sites[len(sites) // 2], sites[-1]]:
        masks = some_masks(site, 3)
        found = score_masks(graph, site, masks, examples).losses
        naive = torch.tensor([mean_loss(masked(graph, {site: mask}), examples) for mask in masks], dtype=torch.float64)
        torch.testing.assert_close(found, naive, rtol=1e-10, atol=1e-12)


@cache
def usual_losses() -> Tensor:
    graph, examples = random_problem("resnet8")
    site = find_sites(graph)[3]
    return score_masks(graph, site, some_masks(site), examples).losses


@pytest.mark.parametrize("batch", [1, 3, 64])
@pytest.mark.parametrize("cache_bytes", [0, 20_000, 2**30])
def test_scores_do_not_depend_on_batching_or_memory(batch: int, cache_bytes: int) -> None:
    graph, examples = random_problem("resnet8")
    site = find_sites(graph)[3]
    found = score_masks(graph, site, some_masks(site), examples, batch=batch, cache_bytes=cache_bytes)
    torch.testing.assert_close(found.losses, usual_losses(), rtol=1e-10, atol=0)


def test_an_interrupted_ensemble_resumes_to_the_same_bits() -> None:
    graph, examples = random_problem("mlp")
    site = find_sites(graph)[0]
    masks = some_masks(site, 70)
    whole = score_masks(graph, site, masks, examples).losses
    for stop in (0, 32, 64, 70):
        store = MeasurementCache()

        def interrupt(done: int, stop: int = stop) -> None:
            if done > stop:
                raise KeyboardInterrupt

        with contextlib.suppress(KeyboardInterrupt):
            score_masks(graph, site, masks, examples, store=store, on_scored=interrupt)
        assert len(store) == min(stop + 32, 70)
        seen: list[int] = []
        assert torch.equal(score_masks(graph, site, masks, examples, store=store, on_scored=seen.append).losses, whole)
        assert seen == [32, 64, 70]


def test_masks_of_another_kind_or_width_are_refused() -> None:
    graph, examples = random_problem("mlp")
    site = find_sites(graph)[0]
    with pytest.raises(InvalidMask, match=f"wanted bool \\(M, {site.channels}\\)"):
        score_masks(graph, site, torch.ones(3, site.channels), examples)
    with pytest.raises(InvalidMask, match="wanted bool"):
        score_masks(graph, site, torch.ones(3, site.channels + 1, dtype=torch.bool), examples)
