"""The modules that secateurs adds to networks, against their definitions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

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


takes = st.lists(st.booleans(), min_size=1, max_size=12).map(
    lambda kept: [sum(kept[:i]) if on else -1 for i, on in enumerate(kept)]
)


def side_by_side(x: Tensor) -> bool:
    """Whether the channels of a pixel are neighbours in memory."""
    return x.shape[1] == 1 or x.stride(1) == 1


@given(take=takes, extra=st.integers(0, 2), trained=st.booleans(), large=st.sampled_from([0, 10**9]), half=st.booleans())
@settings(max_examples=80, deadline=None)
def test_channels_last_changes_no_bit_and_lasts_through_both_passes(
    take: list[int], extra: int, trained: bool, large: int, half: bool
) -> None:
    align, kind = Align(torch.tensor(take), 1), torch.bfloat16 if half else torch.float32  # what autocast makes of images
    channels = max(1, align.count + extra)
    source, wide, upstream = (
        torch.randn(2, width, 3, 5, generator=seeded(seed)).to(kind)
        for seed, width in enumerate((channels, len(take), len(take)))
    )
    # by definition: a channel of the output is one of the input or zero, and its gradient goes where it came from
    selected, back = torch.zeros_like(wide), torch.zeros_like(source)
    for to, come in enumerate(take):
        if come >= 0:
            selected[:, to] = source[:, come]
            back[:, come] = upstream[:, to]
    for into in (False, True):
        if into and (align.count == 0 or extra):
            continue  # every channel of a narrow term is added somewhere
        x, beside = (t.clone(memory_format=torch.channels_last).requires_grad_(trained) for t in (source, wide))
        layer = (SumInto(align, large) if into else align).train(trained)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
            y = layer(beside, x) if into else layer(x)
        assert y.dtype == kind
        assert torch.equal(y, wide + selected if into else selected)
        assert align.count < 2 or side_by_side(y)  # of one channel both orders are the same
        if trained and y.requires_grad:
            y.backward(upstream.contiguous(memory_format=torch.channels_last))
            assert torch.equal(x.grad, back)
            assert side_by_side(x.grad)
            assert not into or torch.equal(beside.grad, upstream)


@pytest.mark.parametrize("how", ["autocast", "fast products", "fast products of one backend"])
def test_channels_are_not_rounded_where_products_are(how: str) -> None:
    matmul = getattr(torch.backends.mkldnn, "matmul", None)
    if how == "fast products of one backend" and not hasattr(matmul, "fp32_precision"):
        pytest.skip("this torch has one setting for all backends")
    align = Align(torch.tensor([1, -1, 0, 2]), 1)
    x = torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last).requires_grad_()
    expected = torch.stack([x[:, 1], torch.zeros(2, 8, 8), x[:, 0], x[:, 2]], 1)
    known = torch.get_float32_matmul_precision()
    try:
        if how == "fast products":
            torch.set_float32_matmul_precision("medium")
        elif how == "fast products of one backend":
            matmul.fp32_precision = "bf16"
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=how == "autocast"):
            assert torch.equal(align(x), expected)
            assert torch.equal(
                SumInto(Align(torch.tensor([0, -1, 1, 2]), 1), 0)(expected, x)[:, 2:], expected[:, 2:] + x[:, 1:]
            )
    finally:
        if how == "fast products of one backend":
            matmul.fp32_precision = "none"
        torch.set_float32_matmul_precision(known)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit, which people use all the same
def test_a_cut_network_in_channels_last_can_be_traced_and_mapped() -> None:
    graph = trace(randomise_(build("resnet8"), 0).float().eval(), torch.randn(2, 3, 8, 8))
    masks = {site.name: torch.arange(site.channels) % 3 != 1 for site in find_sites(graph)}
    net = compact(graph, masks).module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(4, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    wanted = net(x).detach()
    torch.testing.assert_close(torch.jit.trace(net, x)(x), wanted)
    several = {name: torch.stack([t.detach()] * 2) for name, t in net.named_parameters()}
    mapped = torch.func.vmap(lambda own: torch.func.functional_call(net, own, (x,)))(several)
    torch.testing.assert_close(mapped[1], wanted)


@pytest.mark.parametrize("trained", [False, True])
def test_an_infinite_channel_stays_the_only_one_outside_training(trained: bool) -> None:
    x = torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    x[:, 1] = torch.inf
    x.requires_grad_(trained)
    y = Align(torch.tensor([0, -1, 1, 2]), 1).eval()(x)
    assert torch.equal(y, torch.stack([x[:, 0], torch.zeros(2, 8, 8), x[:, 1], x[:, 2]], 1))
