"""Many cuts one after the other, as a run makes them: every site keeps its name and its account of original channels."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nets import randomise_
from secateurs import compact, find_sites, replay, trace, verify
from secateurs.models import build, example_input
from secateurs.models.topologies import InvertedResidual


def with_few_blocks(name: str) -> nn.Module:
    """The network with one block of each kind: what a cut costs grows with the square of the sites."""
    model = build(name)
    if name == "mobilenet-small":
        model.blocks = nn.Sequential(model.blocks[0], InvertedResidual(8, 32, stride=2, expansion=3))  # residual, then not
    elif name == "resnext-small":
        model.blocks = model.blocks[:3]  # projected, plain, strided
    return model


@pytest.mark.parametrize("name", ["resnet8", "mobilenet-small", "resnext-small", "split-small"])
@pytest.mark.parametrize("shortcut", ["before", "after"])
def test_site_by_site_in_two_rounds(name: str, shortcut: str) -> None:
    batch = example_input(name).double()[..., :16, :16]
    start = trace(randomise_(with_few_blocks(name), 0), batch)
    left = {site.name: set(range(site.channels)) for site in find_sites(start, shortcut)}  # type: ignore[arg-type]
    names = list(left)
    generator = torch.Generator().manual_seed(0)
    graph = start
    for step, site_name in enumerate([*names, *names]):
        sites = {site.name: site for site in find_sites(graph, shortcut)}  # type: ignore[arg-type]
        site = sites[site_name]
        assert set(site.original) <= left[site_name]
        keep = torch.rand(site.channels, generator=generator) > 0.25
        keep[step % site.channels] = True
        smaller = compact(graph, {site: keep})
        verify(graph, {site: keep}, smaller)
        graph = smaller
        left[site_name] = {i for i, kept in zip(site.original, keep.tolist(), strict=True) if kept}
    assert {site.name for site in find_sites(graph, shortcut)} <= set(names)  # type: ignore[arg-type]
    again = replay(start, graph.plan)
    torch.testing.assert_close(again.module(batch), graph.module(batch), rtol=0, atol=1e-12)
