"""Cuts at several shortcut positions, one after the other, and of normed weights: replayed, saved, and made in place."""

from __future__ import annotations

import warnings
from itertools import permutations
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import secateurs as sc
from nets import Net, assert_compact_is_masked, conv, traced, without
from secateurs.config import Shortcut

X = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Mixed(nn.Module):
    """A sum behind an op that revives zeros: the channels of its terms are followed apart."""

    def __init__(self) -> None:
        super().__init__()
        self.c1, self.c2, self.c3 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, H, W) to (N, 6, H, W)."""
        a = F.relu(self.c1(x))
        a = a - a.mean(1, keepdim=True)
        out: Tensor = self.c3(F.relu(a + self.c2(a)))
        return out


def mixed() -> nn.Module:
    torch.manual_seed(0)
    return Mixed().double().eval()


POSITIONS: tuple[Shortcut, ...] = ("before", "after", "stream", "coupled")
EVERY_PAIR: list[tuple[Shortcut, ...]] = [  # each position right behind each other one
    ("before", "after", "stream"),
    ("before", "stream", "after"),
    ("before", "coupled", "after"),
    ("after", "coupled", "before"),
    ("coupled", "stream", "before"),
    ("before", "stream", "coupled"),
    ("after", "before", "stream"),
]
OTHERS = [order for order in permutations(POSITIONS, 3) if order not in EVERY_PAIR]


@pytest.mark.parametrize(
    "positions", [*EVERY_PAIR, *(pytest.param(order, marks=pytest.mark.slow) for order in OTHERS)], ids="-".join
)
def test_cuts_at_mixed_positions_are_replayed_and_loaded(positions: tuple[Shortcut, ...], tmp_path: Path) -> None:
    graph, generator = sc.trace(mixed(), X), torch.Generator().manual_seed(3)
    for position in positions:
        sites = sc.find_sites(graph, position)
        assert len({site.name for site in sites}) == len(sites)
        for name in [site.name for site in sites]:
            site = next((each for each in sc.find_sites(graph, position) if each.name == name), None)
            if site is not None and site.channels > 2:
                graph = sc.compact(graph, {site: torch.rand(site.channels, generator=generator) > 0.25})
    sc.save(graph, tmp_path / "cut.safetensors")
    for again in (sc.replay(sc.trace(mixed(), X), graph.plan), sc.load(mixed(), tmp_path / "cut.safetensors")):
        torch.testing.assert_close(again.module(X), graph.module(X), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("old", [False, True], ids=["parametrization", "hook"])
def test_a_model_with_weight_norm_is_cut_in_place_by_its_plan_and_loaded(old: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        normed = torch.nn.utils.weight_norm if old else torch.nn.utils.parametrizations.weight_norm
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), normed(nn.Linear(8, 3))).to(dtype).eval()

    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(2)).to(dtype)
    smaller = sc.compact(sc.trace(build(), x), {"0": torch.arange(8) < 4})
    wanted, tolerance = smaller.module(x), 1e-12 if dtype == torch.float64 else 1e-6
    torch.testing.assert_close(sc.cut_(build(), smaller.plan, x)(x), wanted, rtol=0, atol=tolerance)
    sc.save(smaller, tmp_path / "cut.safetensors")
    loaded = sc.load(build(), tmp_path / "cut.safetensors")
    torch.testing.assert_close(loaded.module(x), wanted, rtol=0, atol=tolerance)


def test_groups_of_channels_that_are_added_stay_groups_when_one_channel_of_each_is_left() -> None:
    """A view to (2, 1) has the same sizes as one to (2,): which axis had the channels is remembered, and the ids stay right."""

    def forward(net: Net, x: Tensor) -> Tensor:
        out: Tensor = net.out(net.wide(x).view(-1, 2, 3, 6, 6).sum(1))
        return out

    graph = traced(Net(forward, wide=conv(3, 6), out=conv(3, 2)), X)
    for removed, left in ((0, (1, 2)), (1, (1,))):
        graph = assert_compact_is_masked(graph, {"wide": without(3 - removed, removed)}, (X,))
        assert sc.find_site(graph, "wide").original == left


@pytest.mark.parametrize("first", POSITIONS)
def test_a_sum_with_the_input_is_cut_again_at_every_position(first: Shortcut) -> None:
    """As in networks that restore images, `x + body(x)`: a cut may align the input itself, which keeps all its channels."""

    def forward(net: Net, x: Tensor) -> Tensor:
        out: Tensor = net.out(torch.relu(net.c(x + net.b(torch.relu(net.a(x))))))
        return out

    graph = traced(Net(forward, a=conv(3, 8), b=conv(8, 3), c=conv(3, 6), out=conv(6, 2)), X)
    sites = sc.find_sites(graph, first)
    graph = assert_compact_is_masked(graph, {site.name: torch.arange(site.channels) % 3 > 0 for site in sites}, (X,))
    for position in POSITIONS:
        for site in sc.find_sites(graph, position):
            assert_compact_is_masked(graph, {site: torch.arange(site.channels) > 0}, (X,))
    # the filters of b are joined with the input, of which none can go
    assert {layer for site in sc.find_sites(graph, "coupled") for layer in site.layers} == {"a", "c"}


def assert_same_at_once(whole: sc.Graph, smaller: sc.Graph) -> None:
    """The ids that the plan says are removed are those of the uncut network: masked there, they give the same."""
    removed = smaller.plan.removed()
    sites = {name: sc.find_site(whole, name) for name in removed}
    masks = {name: ~torch.isin(torch.tensor(site.original), torch.tensor(removed[name])) for name, site in sites.items()}
    assert all(set(removed[name]) <= set(site.original) for name, site in sites.items())
    torch.testing.assert_close(smaller.module(X), sc.masked(whole, masks)(X), rtol=0, atol=1e-12)


SLICED = {
    "an activation": lambda net, x: net.out(torch.relu(net.wide(x)[:, 1:])),
    "a norm over channels": lambda net, x: net.out(torch.relu(net.norm(net.wide(x)[:, 1:]))),
    "a depthwise layer": lambda net, x: net.out(torch.relu(net.depthwise(net.wide(x)[:, 1:]))),
    "a sum": lambda net, x: net.out(torch.relu((net.wide(x) + x.mean(1, keepdim=True))[:, 1:])),
    "a sum of a stream": lambda net, x: net.out(torch.relu((net.wide(x) + net.narrow(torch.relu(net.wide(x))))[:, 1:])),
}


@pytest.mark.parametrize("position", POSITIONS[:3])
@pytest.mark.parametrize("form", SLICED)
def test_channels_keep_their_numbers_where_a_cut_leaves_a_slice_nothing_to_take_away(form: str, position: Shortcut) -> None:
    """The slice is erased, and what is behind it has other numbers than what is before it: a site does not move there."""
    layers = {"wide": conv(3, 4, 1), "narrow": conv(4, 4, 1), "out": conv(3, 5, 1)}
    layers |= {"norm": nn.GroupNorm(1, 3), "depthwise": conv(3, 3, groups=3, bias=False)}
    whole = traced(Net(SLICED[form], **layers), X)
    for site in [site for site in sc.find_sites(whole, position) if site.channels == 4]:
        smaller = sc.compact(whole, {site: without(4, 0)})
        again = sc.find_site(smaller, site.name)
        assert (again.original, again.original_channels) == ((1, 2, 3), 4)
        for each in sc.find_sites(smaller, position):
            assert_same_at_once(whole, assert_compact_is_masked(smaller, {each.name: without(each.channels, 0)}, (X,)))


@pytest.mark.parametrize(("groups", "units"), [(3, 3), (2, 3)], ids=["whole groups", "one channel of each group"])
def test_the_last_unit_of_a_group_norm_stays_one(groups: int, units: int) -> None:
    """With one group left, or one channel of each, any channel could go, but the uncut network has no numbers for it."""

    def forward(net: Net, x: Tensor) -> Tensor:
        wide = net.wide(x)
        out: Tensor = wide - net.norm(net.depthwise(wide))
        return out

    whole = traced(Net(forward, wide=conv(3, 6), depthwise=conv(6, 6, groups=6), norm=nn.GroupNorm(groups, 6)), X)
    assert sc.find_site(whole, "depthwise").original_channels == units
    smaller = sc.compact(whole, {"depthwise": without(units, 1, 2)})
    last = sc.find_site(smaller, "depthwise")
    assert (last.original, last.original_channels) == ((0,), units)
    assert_same_at_once(whole, assert_compact_is_masked(smaller, {"depthwise": without(1, 0)}, (X,)))


def test_channels_that_a_cut_couples_with_others_have_no_coupled_site() -> None:
    """The grouped layer reads 0, 1 | 5, 6, 7 of 0-3 | 4-7: by place 0 goes with 5 now, but the uncut network has 0 with 4."""

    def forward(net: Net, x: Tensor) -> Tensor:
        wide = net.wide(x)
        out: Tensor = net.out((wide - net.back(net.grouped(wide))).mean((2, 3)))
        return out

    layers = {"wide": conv(3, 8), "grouped": conv(8, 6, groups=2), "back": conv(6, 8), "out": nn.Linear(8, 3)}
    whole = traced(Net(forward, **layers), X)
    assert [(site.name, site.original) for site in sc.find_sites(whole, "coupled")] == [
        ("wide.coupled", (0, 1, 2, 3)),
        ("grouped.coupled", (0, 1, 2)),
    ]
    smaller = sc.compact(whole, {"wide": without(8, 2, 3, 4), "grouped": without(6, 1, 4)})
    (site,) = found = sc.find_sites(smaller, "coupled")
    assert (site.name, site.original) == ("grouped.coupled", (0, 2))
    reasons = {each.name: each.reason for each in found.unprunable}
    assert reasons["wide"] == "earlier cuts have changed which channels it goes with"
    assert_same_at_once(whole, assert_compact_is_masked(smaller, {site.name: without(2, 1)}, (X,)))


def test_channels_that_an_erased_op_no_longer_couples_have_no_coupled_site() -> None:
    """Of no output depends the shuffle; once a cut has erased it, 1 and 3 could go apart: but the number 1 is that of both."""

    def forward(net: Net, x: Tensor) -> Tensor:
        wide = net.wide(x)
        net.shuffle(wide)
        out: Tensor = net.out(wide)
        return out

    whole = traced(Net(forward, wide=conv(3, 4), shuffle=nn.ChannelShuffle(2), out=conv(4, 2)), X)
    (site,) = sc.find_sites(whole, "coupled")
    assert (site.name, site.original) == ("wide.coupled", (0, 1))
    smaller = sc.compact(whole, {"wide": without(4, 0, 2)})
    for each in sc.find_sites(smaller, "coupled"):
        assert_same_at_once(whole, assert_compact_is_masked(smaller, {each.name: without(each.channels, 0)}, (X,)))


def test_what_a_part_of_the_channels_leaves_unread_stays_after_a_cut() -> None:
    """A gather comes in the place of the part that is read; the size is still that of the tensor of which nothing else is."""

    def forward(net: Net, x: Tensor) -> Tensor:
        wide = net.wide(x)
        whole = torch.cat([wide, wide, net.table.expand(wide.size(0), -1, -1, -1)], 1)
        out: Tensor = net.out(torch.relu(net.narrow(whole.chunk(3, 1)[2] + x.mean(1, keepdim=True))))
        return out

    layers = {"wide": conv(3, 4), "narrow": conv(4, 5), "out": conv(5, 2)}
    whole = traced(Net(forward, table=torch.rand(1, 4, 6, 6, dtype=X.dtype), **layers), X)
    smaller = assert_compact_is_masked(whole, {"wide": without(4, 0, 2, 3)}, (X,))
    sc.verify(smaller, {"wide": without(1)})
    assert_same_at_once(whole, assert_compact_is_masked(smaller, {"narrow": without(5, 1)}, (X,)))
