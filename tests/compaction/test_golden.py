"""Table 2 of the paper from its removed-filter counts: 76 percentages and four pairs of totals, on real compacted networks.

Convention: weights of the 19 convolutions and the last linear layer, multiply-accumulates of the same; nothing else counts.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nets import assert_compact_is_masked, random_tensor, randomise_, seeded
from paper_tables import LAYERS, TABLE_2
from secateurs import Graph, Site, compact, cost, find_sites, trace
from secateurs.config import Shortcut
from secateurs.models import build

FIRST_OF_STAGE = {"layer2.0.conv2": (8, 24), "layer3.0.conv2": (16, 48)}
"""Channels that the option-A shortcut carries; the others it pads with zeros."""


def cut_exactly(site: Site, count: int, shortcut: Shortcut, seed: int) -> Tensor:
    """Drop `count` channels at random, but where the shortcut is zero-padded only such as it carries.

    A padded channel without its filter is zero for every input, so later layers would shrink as well; the paper counts
    the shortcut as whole.
    """
    low, high = FIRST_OF_STAGE.get(site.name, (0, site.channels)) if shortcut == "before" else (0, site.channels)
    keep = torch.ones(site.channels, dtype=torch.bool)
    keep[low + torch.randperm(high - low, generator=seeded(seed))[:count]] = False
    return keep


@pytest.fixture(scope="module")
def graph() -> Graph:
    return trace(randomise_(build("resnet20"), seed=3), random_tensor(1, 3, 32, 32))


@pytest.mark.parametrize("name", TABLE_2)
def test_table_2_comes_out_of_the_compacted_network(graph: Graph, name: str) -> None:
    column = TABLE_2[name]
    sites = find_sites(graph, column.shortcut)
    assert [site.channels for site in sites] == [16] * 7 + [32] * 6 + [64] * 6
    keep = {
        site.name: cut_exactly(site, count, column.shortcut, seed)
        for seed, (site, count) in enumerate(zip(sites, column.removed, strict=True))
    }
    whole, smaller = cost(graph, convention="paper"), cost(compact(graph, keep), convention="paper")
    assert [layer.name for layer in whole.layers] == [*LAYERS, "linear"]
    for layer, expected in zip(LAYERS, column.percent.split(), strict=True):
        before, after = whole.layer(layer), smaller.layer(layer)
        assert f"{100 * (1 - after.parameters / before.parameters):.2f}" == expected, layer
        assert f"{100 * (1 - after.macs / before.macs):.2f}" == expected, layer
    totals = 1 - smaller.parameters / whole.parameters, 1 - smaller.macs / whole.macs
    assert tuple(f"{100 * total:.2f}" for total in totals) == column.totals


def test_the_counts_are_those_of_the_paper() -> None:
    # the paper prints 187 for BF, but its column adds up to 158
    assert [sum(column.removed) for column in TABLE_2.values()] == [158, 130, 123, 113]


def test_the_whole_network_costs_what_table_2_says(graph: Graph) -> None:
    whole = cost(graph, convention="paper")
    # 0.44M, 2.35M and 1.17M, 40.5M in total: the paper cuts off after the last decimal it prints
    hundredths = [layer.macs // 10_000 for layer in whole.layers[:-1]]
    assert hundredths == [44] + [235] * 6 + ([117] + [235] * 5) * 2
    assert whole.macs // 100_000 == 405


def test_a_filter_on_a_padded_channel_saves_more_than_the_paper_counts(graph: Graph) -> None:
    """Channel 0 of stage 2 is zero in the option-A shortcut: without its filter the next layer reads 31 channels."""
    keep = torch.arange(32) > 0
    smaller = compact(graph, {"layer2.0.conv2": keep})
    assert smaller.module.get_submodule("layer2.1.conv1").in_channels == 31
    kept_by_shortcut = compact(graph, {"layer2.0.conv2": torch.arange(32) != 8})
    assert kept_by_shortcut.module.get_submodule("layer2.1.conv1").in_channels == 32


@pytest.mark.parametrize("name", TABLE_2)
def test_the_cut_network_computes_what_the_masked_one_does(graph: Graph, name: str) -> None:
    column = TABLE_2[name]
    keep = {
        site.name: cut_exactly(site, count, column.shortcut, seed)
        for seed, (site, count) in enumerate(zip(find_sites(graph, column.shortcut), column.removed, strict=True))
    }
    assert_compact_is_masked(graph, keep, (random_tensor(3, 3, 32, 32, seed=1),))
