"""The modules that secateurs adds to networks, against their definitions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nets import add_as_if_large_, randomise_, seeded
from secateurs import compact, find_sites, trace, verify
from secateurs.config import Shortcut
from secateurs.graph.layers import Align, SumInto
from secateurs.models import build, example_input


@given(inputs=st.integers(1, 8), take=st.lists(st.integers(-1, 7), min_size=1, max_size=12), axis=st.integers(0, 2))
@settings(max_examples=60, deadline=None)
def test_align_picks_channels_and_fills_with_zeros(inputs: int, take: list[int], axis: int) -> None:
    present = sorted({i for i in take if 0 <= i < inputs})
    chosen = iter(present)
    order = [next(chosen, -1) if i >= 0 else -1 for i in take]  # ascending, as compaction makes them
    x = torch.randn(*[inputs if d == axis else 3 for d in range(3)], generator=seeded(0))
    expected = torch.stack([x.select(axis, i) if i >= 0 else torch.zeros_like(x.select(axis, 0)) for i in order], axis)
    assert torch.equal(Align(torch.tensor(order), axis)(x), expected)


@pytest.mark.parametrize("large", [0, 10**9])
def test_a_sum_into_a_wide_tensor_is_widening_and_adding(large: int) -> None:
    align = Align(torch.tensor([-1, 0, -1, 1, 2]), 1)
    wide, narrow = torch.randn(2, 5, 4, 4), torch.randn(2, 3, 4, 4)
    expected = wide.clone()
    expected[:, [1, 3, 4]] += narrow
    torch.testing.assert_close(SumInto(align, large)(wide, narrow), expected)


@pytest.mark.parametrize("large", [0, 10**9])
def test_a_sum_of_two_precisions_is_of_the_wider_one(large: int) -> None:
    # what autocast makes of a cut residual network: the shortcut float32, the branch bfloat16
    align = Align(torch.tensor([-1, 0, 1]), 1)
    wide, narrow = torch.randn(2, 3, 4, 4), torch.randn(2, 2, 4, 4).bfloat16()
    for one, other in ((wide, narrow), (wide.bfloat16(), narrow.float())):
        expected = one.clone().float()
        expected[:, [1, 2]] += other.float()
        torch.testing.assert_close(SumInto(align, large)(one, other), expected)


@pytest.mark.parametrize("large", [0, 10**9])
@pytest.mark.parametrize("shortcut", ["before", "after"])
def test_both_ways_to_add_keep_the_network_equal(large: int, shortcut: Shortcut) -> None:
    graph = trace(randomise_(build("resnet20"), 0), example_input("resnet20").double()[..., :16, :16])
    sites = find_sites(graph, shortcut)
    masks = {site: torch.rand(site.channels, generator=seeded(i)) > 0.4 for i, site in enumerate(sites)}
    smaller = compact(graph, masks, verify=False)
    add_as_if_large_(smaller.module, large)
    assert shortcut == "after" or any(isinstance(part, SumInto) for part in smaller.module.modules())
    verify(graph, masks, smaller)
    again = {site: torch.arange(site.channels) > 0 for site in find_sites(smaller, shortcut)}
    last = compact(smaller, again, verify=False)
    add_as_if_large_(last.module, large)
    verify(smaller, again, last)
