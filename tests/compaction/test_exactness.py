"""Edges where a compacted network could differ from the masked one without a word: terms that are broadcast over the
channels, sizes taken from one example, cuts that remove nothing, unread layers, and proofs that prove nothing."""

from __future__ import annotations

import copy
import dataclasses
import io
import operator
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nets import (
    Net,
    assert_compact_is_masked,
    assert_same,
    assert_same_bits,
    conv,
    random_keep,
    random_tensor,
    randomise_,
    run,
    traced,
    without,
)
from secateurs import compact, find_sites, load, masked, replay, rule, save, trace, verify
from secateurs.errors import EmptyLayer, InvalidInput, NotEqual, SecateursError, Unproved, Untraceable
from secateurs.graph.flow import Flow, Op, channelwise
from secateurs.graph.flow.table import RULES
from secateurs.graph.trace import RULED

KEEP = torch.tensor([1, 1, 0, 1, 0, 1, 1, 0]).bool()


# ---- terms that are broadcast over the channels -------------------------------------------------------------------------

TERMS: dict[str, tuple[int, ...]] = {
    "a scalar": (),
    "one number": (1,),
    "a vector along the last axis": (6,),
    "a map": (6, 6),
    "a map of one channel": (1, 1, 6, 6),
    "one number a channel": (8, 1, 1),
    "one number a channel, with a batch axis": (1, 8, 1, 1),
}
JOINS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "x + p": operator.add,
    "p + x": lambda x, p: p + x,
    "x - p": operator.sub,
    "p - x": lambda x, p: p - x,
    "x * p": operator.mul,
    "maximum": torch.maximum,
    "minimum": lambda x, p: torch.minimum(p, x),
    "rsub": torch.rsub,
    "scale * relu(x)^2 + bias": lambda x, p: p * F.relu(x) ** 2 + p,
}


@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize(
    ("join", "kind"),
    [*((join, nn.Parameter) for join in JOINS), *((join, lambda buffer: buffer) for join in ("x + p", "x * p", "maximum"))],
)
def test_a_broadcast_term_revives_removed_channels(term: str, join: str, kind: Callable[[Tensor], Tensor]) -> None:
    parts = {"a": conv(3, 8), "b": conv(8, 2), "p": kind(torch.ones(TERMS[term]))}

    def inside(net: Net, x: Tensor) -> Tensor:
        return net.b(JOINS[join](F.relu(net.a(x)), net.p))

    def last(net: Net, x: Tensor) -> Tensor:
        return JOINS[join](net.a(x), net.p)

    for body in (inside,) if join == "x * p" else (inside, last):  # a product that is the output hands zeros out
        graph = traced(Net(body, **copy.deepcopy(parts)), random_tensor(2, 3, 6, 6))
        smaller = assert_compact_is_masked(graph, {"a": KEEP}, (random_tensor(5, 3, 6, 6, seed=1),))
        assert smaller.module.a.out_channels == 5


@pytest.mark.parametrize("first", [True, False])
def test_a_map_of_one_channel_from_a_layer_revives_removed_channels(first: bool) -> None:
    def body(net: Net, x: Tensor) -> Tensor:
        a, one = F.relu(net.a(x)), net.one(x)
        return net.b(one + a if first else a + one)

    graph = traced(Net(body, a=conv(3, 8), one=conv(3, 1), b=conv(8, 2)), random_tensor(2, 3, 6, 6))
    smaller = assert_compact_is_masked(graph, {"a": KEEP})
    again = random_keep([site for site in find_sites(smaller) if site.name == "a"], 1)
    assert_compact_is_masked(smaller, again)


def test_grouped_layers_along_another_axis_keep_their_groups() -> None:
    """A linear layer works along the width, the grouped ones behind it along the height: 8 places that are no channels."""
    linear, depthwise = nn.Linear(6, 8), nn.Conv1d(8, 8, 3, padding=1, groups=8, bias=False)
    net = Net(lambda net, x: net.d(net.l(F.relu(net.a(x))[:, :2].flatten(1, 2))), a=conv(2, 4), l=linear, d=depthwise)
    graph = traced(net, random_tensor(2, 2, 4, 6))
    assert [site.name for site in find_sites(graph)] == []

    grouped = nn.ConvTranspose1d(6, 2, 4, 2, 1, groups=2, bias=False)
    net = Net(lambda net, x: net.o(net.g(x + net.l(x)).mean(2)), l=nn.Linear(8, 8), g=grouped, o=nn.Linear(2, 2))
    graph = traced(net, random_tensor(2, 6, 8))
    assert [site.name for site in find_sites(graph, "after")] == ["g"]
    smaller = assert_compact_is_masked(graph, {"g": torch.tensor([False, True])})
    assert [site.name for site in find_sites(smaller, "after")] == ["g"]


@pytest.mark.parametrize("places", [5, 6])
def test_a_layer_that_reads_places_in_one_call_and_channels_in_another(places: int) -> None:
    """The convolution works along the places of tokens, then along its own filters: what it reads first all stays."""
    layers = {"l": nn.Linear(6, 6), "c": nn.Conv1d(places, places, 3, padding=1), "o": nn.Linear(places, 2)}
    graph = traced(Net(lambda net, x: net.o(net.c(F.relu(net.c(net.l(x)))).mean(2)), **layers), random_tensor(2, places, 6))
    assert {"c"} <= {site.name for site in find_sites(graph)}
    for seed in range(4):
        smaller = assert_compact_is_masked(graph, random_keep(find_sites(graph), seed))
        assert_compact_is_masked(smaller, random_keep(find_sites(smaller), seed + 1))


@pytest.mark.parametrize("dim", [1, -1])
def test_a_tensor_that_is_joined_to_itself_and_others(dim: int) -> None:
    net = Net(lambda net, x: torch.cat([net.a(x), net.a2(x), x, x], dim), a=conv(3, 3), a2=conv(3, 3))
    twice = Net(lambda net, x: (lambda a: torch.cat([a, a, x], dim))(net.a(x)), a=conv(3, 3, groups=3))
    for model in (net, twice):
        graph = traced(model, random_tensor(2, 3, 6, 6))
        for site in find_sites(graph):
            assert_compact_is_masked(graph, {site.name: torch.tensor([True, False, True])})


def test_expand_as_takes_values_of_its_first_and_channels_of_its_second() -> None:
    graph = traced(
        Net(lambda net, x: net.b(net.one(x).expand_as(F.relu(net.a(x)))), a=conv(3, 8), one=conv(3, 1), b=conv(8, 2)),
        random_tensor(2, 3, 6, 6),
    )
    for seed in range(3):
        assert_compact_is_masked(graph, random_keep(find_sites(graph), seed))


# ---- sizes of the example -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(
    "body",
    [
        lambda x: x.reshape(x.shape[0] * 2, 4, 6, 6).relu().reshape(x.shape[0], 8, 6, 6),
        lambda x: x.reshape(x.shape[0] * 2, -1, 6, 6).relu().reshape(x.shape[0], 8, 6, 6),
        lambda x: x.view(x.shape[0] * 2, -1, 36).relu().reshape(x.shape),
        lambda x: x.reshape(2, x.shape[0] * 4, 6, 6).relu().reshape(x.shape[0], 8, 6, 6),
        lambda x: x.reshape(x.shape[0] * 8, 6, 6).unsqueeze(0).relu().reshape(x.shape[0], 8, 6, 6),
    ],
)
def test_channels_that_move_into_the_batch_hold_for_every_batch(body: Callable[[Tensor], Tensor], batch: int) -> None:
    net = Net(lambda net, x: net.o(body(F.relu(net.c(x)))), c=conv(3, 8), o=conv(8, 2))
    graph = traced(net, random_tensor(batch, 3, 6, 6))
    for seed in range(3):
        masks = random_keep(find_sites(graph), seed)
        assert_compact_is_masked(graph, masks, *((random_tensor(n, 3, 6, 6, seed=n),) for n in (1, 2, 3, 4)))


def test_a_pad_of_channels_that_depends_on_the_image_is_refused() -> None:
    """A 6 x 6 image pads 2 channels, an 8 x 8 image 4: the channels of such a tensor have no fixed number."""
    net = Net(lambda net, x: F.pad(net.c(x), (0, 0, 0, 0, 0, x.shape[2] - 4)).mean(1), c=conv(3, 8))
    graph = traced(net, random_tensor(2, 3, 6, 6))
    assert not find_sites(graph)
    assert "another batch or image size" in find_sites(graph).unprunable[0].reason


def test_a_pad_of_space_that_depends_on_the_image_still_does_after_a_cut() -> None:
    """Rows are padded by half of the image's width while the channels get two zeros more: a shortcut of odd sizes."""
    net = Net(lambda net, x: net.b(F.pad(F.relu(net.a(x)), (0, 0, 0, x.shape[3] // 2, 0, 2))), a=conv(3, 8), b=conv(10, 2))
    graph = traced(net, random_tensor(2, 3, 6, 6))
    assert_compact_is_masked(graph, {"a": KEEP}, (random_tensor(2, 3, 8, 8),), (random_tensor(1, 3, 5, 10),))


def test_a_computed_position_stays_computed_after_a_cut() -> None:
    net = Net(lambda net, x: net.b(F.relu(net.a(x))[:, 2:, x.shape[2] // 2]), a=conv(3, 8), b=nn.Conv1d(6, 2, 1))
    graph = traced(net, random_tensor(2, 3, 6, 6))
    assert_compact_is_masked(graph, {"a": KEEP}, (random_tensor(2, 3, 10, 6),))


def test_an_example_of_one_is_doubled_where_the_model_takes_two() -> None:
    assert trace(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), torch.randn(1, 3)).example[0].shape == (2, 3)
    alone = Net(lambda net, x: net.a(x).view(1, 4), a=nn.Linear(3, 4))
    assert trace(alone, torch.randn(1, 3)).example[0].shape == (1, 3)


@pytest.mark.parametrize("dims", [(), (0,), (2,), ((2, 3),)])
def test_an_axis_that_vanishes_for_a_single_image_still_does_after_a_cut(dims: tuple[Any, ...]) -> None:
    """squeeze() takes the batch axis away too when there is one image."""
    net = Net(lambda net, x: F.adaptive_avg_pool2d(net.b(F.relu(net.a(x))), 1).squeeze(*dims) + 1, a=conv(3, 8), b=conv(8, 8))
    net = Net(lambda net, x: net.o(net.inner(x).flatten(0).view(-1, 8)), inner=net, o=nn.Linear(8, 2)) if dims == (2,) else net
    for batch in (1, 2):
        graph = traced(copy.deepcopy(net), random_tensor(batch, 3, 6, 6))
        for site in find_sites(graph):
            masks = {site.name: torch.arange(site.channels) % 3 > 0}
            assert_compact_is_masked(graph, masks, (random_tensor(1, 3, 6, 6),), (random_tensor(3, 3, 6, 6),))


def test_what_an_activation_makes_of_zero_must_not_depend_on_the_image() -> None:
    """|x|^(16 - width) keeps zeros in an image 8 wide and makes ones of them in one 16 wide."""
    net = Net(lambda net, x: net.b(net.a(x).abs() ** (16 - x.shape[-1])), a=conv(3, 8), b=conv(8, 2))
    graph = traced(net, random_tensor(2, 3, 8, 8))
    for masks in ({site.name: torch.arange(site.channels) > 2} for site in find_sites(graph)):
        assert_compact_is_masked(graph, masks, (random_tensor(2, 3, 16, 16),))


def test_a_network_that_takes_smaller_images_only_is_followed_there() -> None:
    """As many groups are shuffled as the image is high: fused for 8 rows, it would be wrong for 4, so it asserts 8 rows."""

    def body(net: Net, x: Tensor) -> Tensor:
        a = net.a(x)
        n, c, h, w = a.shape
        return net.o(a.view(n, h, -1, h, w).transpose(1, 2).reshape(n, c, h, w))

    model, x = Net(body, a=conv(3, 8), o=conv(8, 2)), random_tensor(2, 3, 8, 8)
    with pytest.raises(Untraceable, match="another output than the model"):
        traced(model, x, engine="fx")
    graph = traced(model, x)
    assert_compact_is_masked(graph, {"a": without(8, 1, 5)}, (x[:1],))
    with pytest.raises(AssertionError, match="must have length 8"):
        run(graph.module, x[..., :4, :4])


# ---- cuts that remove nothing, and unread channels -----------------------------------------------------------


class HalfRead(nn.Module):
    """Half of the channels of `a` are never read."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.o = conv(3, 8), conv(4, 5), conv(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(F.relu(self.b(F.relu(self.a(x)[:, :4]))))


@pytest.mark.parametrize("masks", [{}, {"b": torch.ones(5).bool()}, {"a": torch.ones(8).bool(), "b": torch.ones(5).bool()}])
def test_a_cut_that_removes_nothing_changes_nothing(masks: dict[str, Tensor], tmp_path: Path) -> None:
    graph = traced(HalfRead(), random_tensor(2, 3, 6, 6))
    same = compact(graph, masks)
    assert same.plan == graph.plan
    assert {n: t.shape for n, t in same.module.state_dict().items()} == {n: t.shape for n, t in HalfRead().state_dict().items()}
    loaded = load(HalfRead(), save(same, tmp_path / "same.safetensors"))
    assert_same(run(loaded.module, *graph.example), run(graph.module, *graph.example), atol=0)


def test_a_cut_removes_what_its_masks_say_and_nothing_else(tmp_path: Path) -> None:
    graph = traced(HalfRead(), random_tensor(2, 3, 6, 6))
    smaller = assert_compact_is_masked(graph, {"b": torch.tensor([1, 1, 1, 1, 0]).bool()})
    assert smaller.module.a.out_channels == 8
    unread = assert_compact_is_masked(graph, {"a": torch.arange(8) < 5})
    assert unread.module.a.out_channels == 5
    assert_same_bits(replay(graph, unread.plan).module.state_dict(), unread.module.state_dict())
    load(HalfRead(), save(unread, tmp_path / "unread.safetensors"))


# ---- unread layers -------------------------------------------------------------------------------------------


def unread_nets() -> Iterator[tuple[str, Net, tuple[int, ...]]]:
    """Networks with an auxiliary head: it hangs on the network and reaches no output."""

    def with_head(head: Callable[[Net, Tensor], Tensor]) -> Callable[[Net, Tensor], Tensor]:
        def body(net: Net, x: Tensor) -> Tensor:
            h = F.relu(net.a(x))
            head(net, h)
            return net.o(h)

        return body

    yield "linear", Net(with_head(lambda net, h: net.aux(h)), a=nn.Linear(4, 8), aux=nn.Linear(8, 6), o=nn.Linear(8, 2)), (2, 4)
    shape = (2, 3, 6, 6)
    heads: dict[str, tuple[Callable[[Net, Tensor], Tensor], nn.Module]] = {
        "grouped": (lambda net, h: net.aux(h), conv(8, 12, groups=4)),
        "batch norm": (lambda net, h: net.aux(h), nn.BatchNorm2d(8)),
        "layer norm": (lambda net, h: net.aux(h), nn.LayerNorm([8, 6, 6])),
        "a chain": (lambda net, h: net.aux(h), nn.Sequential(conv(8, 6), nn.BatchNorm2d(6), nn.ReLU(), conv(6, 4))),
        "a shuffle by views": (
            lambda net, h: h.view(h.shape[0], 2, 4, 6, 6).transpose(1, 2).contiguous().view(h.shape[0], 8, 6, 6) * net.aux,
            nn.Parameter(torch.ones(1)),  # type: ignore[dict-item]
        ),
        "a part of a split": (lambda net, h: net.aux(h.split([4, 4], 1)[0]), conv(4, 6, groups=2)),
        "a shuffle behind a grouped layer": (
            lambda net, h: F.channel_shuffle(net.aux(h), 2),
            conv(8, 12, groups=4),
        ),
    }
    for name, (head, aux) in heads.items():
        yield name, Net(with_head(head), a=conv(3, 8), aux=aux, o=conv(8, 2)), shape


@pytest.mark.parametrize(("net", "shape"), [pytest.param(net, shape, id=name) for name, net, shape in unread_nets()])
def test_unread_layers_do_not_prevent_a_cut(net: Net, shape: tuple[int, ...]) -> None:
    """Every site, the unread ones too, down to one channel, to none where that can be, and then every other site."""
    graph = traced(copy.deepcopy(net), random_tensor(*shape))
    for site in find_sites(graph):
        cuts = [torch.arange(site.channels) > 2, torch.arange(site.channels) < 1]
        if site.name.startswith("aux"):
            cuts.append(torch.zeros(site.channels).bool())
        for keep in cuts:
            once = assert_compact_is_masked(graph, {site.name: keep})
            for other in find_sites(once):
                twice = (
                    assert_compact_is_masked(once, {other.name: torch.arange(other.channels) > 0})
                    if other.channels > 1
                    else once
                )
                assert_same_bits(replay(graph, twice.plan, verify=False).module.state_dict(), twice.module.state_dict())


def test_unread_layers_have_sites_of_their_own_names() -> None:
    def body(net: Net, x: Tensor) -> Tensor:
        net.b(net.a(x))
        return x * 2

    graph = traced(Net(body, a=conv(4, 8, groups=4), b=conv(8, 2, groups=2)), random_tensor(2, 4, 6, 6))
    assert [(site.name, site.channels) for site in find_sites(graph)] == [("a", 8), ("b", 2)]


def test_an_unread_branch_may_lose_what_it_reads() -> None:
    """The input is the output; a grouped layer, a layer and a LayerNorm hang on it and are emptied from their beginning."""

    def body(net: Net, x: Tensor) -> Tensor:
        net.norm(net.b(net.a(x)))
        return x

    net = Net(body, a=nn.Conv3d(2, 6, 1, groups=2), b=nn.Conv3d(6, 8, 1), norm=nn.LayerNorm([8, 4, 4, 4]))
    graph = traced(net, random_tensor(3, 2, 4, 4, 4))
    for keep in (torch.arange(6) == 5, torch.ones(1).bool(), torch.zeros(1).bool()):
        graph = assert_compact_is_masked(graph, {"a": keep})
    assert not list(graph.module.parameters())


def test_an_unread_grouped_layer_keeps_what_its_mask_keeps() -> None:
    def body(net: Net, x: Tensor) -> Tensor:
        net.g(net.a(x))
        return x * 2

    graph = traced(Net(body, a=conv(3, 5), g=conv(5, 15, groups=5)), random_tensor(2, 3, 6, 6))
    keep = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 0]).bool()
    smaller = compact(graph, {"g": keep})
    assert {site.name: site.original for site in find_sites(smaller)}["g"] == (3, 4, 5, 6, 7, 12, 13)
    assert smaller.module.g.groups == 3


def test_an_unread_branch_still_counts_in_batch_statistics() -> None:
    """A BatchNorm is called twice, once for a branch that ends unread in a shuffle: its statistics follow both calls."""

    def body(net: Net, x: Tensor) -> Tensor:
        net.shuffle(net.g(net.n(x * 2)))
        return net.b(F.relu(net.a(net.n(x))))

    net = Net(body, n=nn.BatchNorm2d(4), g=conv(4, 8, groups=4), shuffle=nn.ChannelShuffle(2), a=conv(4, 8), b=conv(8, 2))
    graph = traced(net, random_tensor(2, 4, 6, 6))
    smaller = assert_compact_is_masked(graph, {"g": KEEP, "a": KEEP})
    for module in (graph.module.train(), smaller.module.train()):
        module(*graph.example)
    assert_same(smaller.module.n.running_mean, graph.module.n.running_mean)


def test_an_assertion_about_a_branch_is_removed_with_it() -> None:
    """Two masks without a channel in common leave nothing of a branch, whose layers an assertion still asks about."""

    def body(net: Net, x: Tensor) -> Tensor:
        x = F.relu(net.stem(x))
        y = net.conv1(x)
        torch._assert(y.ndim == 4, "wanted images")
        torch._assert(y.shape[1] == 4, "wanted four channels")
        y = net.conv2(F.relu(y))
        y = y * net.gate(y.mean((2, 3), keepdim=True)).sigmoid()
        return net.head(F.relu(y + net.short(x)).mean((2, 3)))

    layers = {name: conv(4, 4, 1) for name in ("conv1", "conv2", "gate", "short")}
    graph = traced(Net(body, stem=conv(3, 4, 1), **layers, head=nn.Linear(4, 3)), random_tensor(2, 3, 6, 6))
    low = torch.tensor([1, 1, 0, 0]).bool()
    smaller = assert_compact_is_masked(graph, {"stem": torch.arange(4) < 3, "conv2": low, "add": ~low})
    assert "conv1" not in dict(smaller.module.named_modules())


def test_an_unread_layer_without_filters_is_removed() -> None:
    _, net, shape = next(unread_nets())
    graph = traced(net, random_tensor(*shape))
    smaller = assert_compact_is_masked(graph, {"aux": torch.zeros(6).bool()})
    assert not any("aux" in parameter for parameter, _ in smaller.module.named_parameters())
    assert [site.name for site in find_sites(smaller)] == ["a"]


# ---- reasons ------------------------------------------------------------------------------------------------------------


def test_every_layer_without_a_site_has_one_reason_and_its_own_macs() -> None:
    """A convolution whose weights depend on the input (27 · 8 · 36 MACs), and one that is called three times (64 · 36 each)."""

    def body(net: Net, x: Tensor) -> Tensor:
        y = F.relu(F.conv2d(x, net.w - x.mean(), padding=1))
        y = net.b(net.b(net.b(y)))
        return net.o(y.logsumexp(1).mean((1, 2))[:, None] + y.mean((2, 3)))

    net = Net(body, w=nn.Parameter(torch.ones(8, 3, 3, 3)), b=conv(8, 8, 1), o=nn.Linear(8, 2))
    found = {u.name: u for u in find_sites(traced(net, random_tensor(2, 3, 6, 6))).unprunable}
    assert set(found) == {"conv2d", "b", "o"}
    assert found["conv2d"].macs == 27 * 8 * 36
    assert "computed" in found["conv2d"].reason
    assert found["b"].macs == 3 * 64 * 36
    assert "called 3 times" in found["b"].reason


@pytest.mark.parametrize("name", ['a"b', "a\nb", "a\\b", "class", "lambda", "None"])
def test_names_that_cannot_be_written_into_code_are_refused(name: str) -> None:
    model = nn.Sequential()
    model.add_module(name, nn.Linear(3, 4))
    with pytest.raises(InvalidInput, match="Give that submodule or parameter another name"):
        trace(model, torch.randn(2, 3))


def test_only_the_type_of_a_tensor_is_read() -> None:
    """Filters of b go down to one; none can go, since its type is asked for."""
    net = Net(lambda net, x: net.o(net.a(x).type_as(net.b(x))), a=conv(3, 6), b=conv(3, 4), o=conv(6, 2))
    graph = traced(net, random_tensor(2, 3, 6, 6))
    for name, count in (("b", 3), ("a", 4), ("b", 1), ("a", 1)):
        width = {site.name: site.channels for site in find_sites(graph)}[name]
        graph = assert_compact_is_masked(graph, {name: torch.arange(width) < count})
    assert (graph.module.a.out_channels, graph.module.b.out_channels) == (1, 1)


def test_default_arguments_are_recognised_by_their_whole_name() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.o = conv(3, 6), conv(6, 2)

        def forward(self, x_in: Tensor, x: Tensor | None = None) -> Tensor:
            return self.o(F.relu(self.a(x_in)))

    assert [site.name for site in find_sites(traced(Named(), random_tensor(2, 3, 6, 6)))] == ["a"]


def test_what_cannot_be_traced_is_refused() -> None:
    with pytest.warns(DeprecationWarning, match=r"torch\.jit\.script"):
        scripted = torch.jit.script(nn.ReLU())
    with pytest.raises(Untraceable, match="ScriptModule"):
        trace(nn.Sequential(nn.Linear(3, 4), scripted), torch.randn(2, 3))
    with torch.inference_mode():
        frozen = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    assert len(find_sites(trace(frozen, torch.randn(2, 3)))) == 1


def test_a_file_is_loaded_on_a_model_whose_train_path_is_another(tmp_path: Path) -> None:
    class DropPath(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.o = conv(3, 6), conv(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            a = self.a(x)
            if self.training:
                a = a * torch.bernoulli(torch.full((len(a), 1, 1, 1), 0.5))
            return self.o(F.relu(a))

    graph = traced(DropPath(), random_tensor(2, 3, 6, 6))
    smaller = compact(graph, {"a": torch.arange(6) > 2})
    loaded = load(DropPath(), save(smaller, tmp_path / "small.safetensors"))
    assert_same_bits(loaded.module.state_dict(), smaller.module.state_dict())


# ---- proofs -------------------------------------------------------------------------------------------------------------


class Shifted(nn.Module):
    """Adds 1, which revives zeros."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1


@pytest.fixture
def wrong_rule() -> Iterator[None]:
    """A user's rule that says that zeros stay zero where they do not."""

    @rule(Shifted)
    def wrong(op: Op) -> Flow:
        return channelwise(op, keeps_zero=True)

    yield
    del RULES[Shifted]
    RULED.discard(Shifted)


@pytest.mark.parametrize("zero_head", [False, True])
def test_compact_never_returns_a_wrong_network(wrong_rule: None, zero_head: bool) -> None:
    """Also where all weights of the last layer are 0, so that every output is right today."""
    net = Net(lambda net, x: net.b(net.s(F.relu(net.a(x)))), a=nn.Linear(4, 8), s=Shifted(), b=nn.Linear(8, 2))
    randomise_(net)
    if zero_head:
        nn.init.zeros_(net.b.weight)
        nn.init.zeros_(net.b.bias)
    graph = trace(net, random_tensor(2, 4))
    with pytest.raises(NotEqual, match="differs from the masked one"):
        compact(graph, {"a": KEEP})
    wrong = compact(graph, {"a": KEEP}, verify=False)
    with pytest.raises(NotEqual):
        verify(graph, {"a": KEEP}, wrong)


def test_a_head_of_zeros_is_proved_with_other_weights() -> None:
    net = randomise_(Net(lambda net, x: net.b(F.relu(net.a(x))), a=nn.Linear(4, 8), b=nn.Linear(8, 2)))
    nn.init.zeros_(net.b.weight)
    nn.init.zeros_(net.b.bias)
    found = verify(trace(net, random_tensor(2, 4)), {"a": KEEP})
    assert found.scale == 0
    assert found.conclusive
    assert found.perturbed_difference < 1e-12 < found.perturbed_scale


def test_a_proof_that_proves_nothing_says_so() -> None:
    net = randomise_(Net(lambda net, x: net.b(F.relu(net.a(x))) * 0, a=nn.Linear(4, 8), b=nn.Linear(8, 2)))
    graph = trace(net, random_tensor(2, 4))
    with pytest.raises(Unproved, match="nothing is proved"):
        verify(graph, {"a": KEEP})
    with pytest.warns(UserWarning, match="nothing is proved"):
        smaller = compact(graph, {"a": KEEP})
    assert smaller.module.a.out_features == 5


@pytest.mark.parametrize("inputs", [torch.full((2, 4), torch.nan), torch.zeros(0, 4), torch.zeros(2, 5)])
def test_a_proof_needs_inputs_that_can_be_compared(inputs: Tensor) -> None:
    graph = trace(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval(), torch.randn(2, 4))
    other = trace(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval(), torch.randn(2, 4))
    with pytest.raises(InvalidInput, match="inputs: "):
        verify(graph, {"0": KEEP}, other, inputs=inputs)


def test_a_head_of_zeros_does_not_prove_another_network() -> None:
    nets = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).double().eval() for _ in range(2)]
    for net in nets:
        nn.init.zeros_(net[2].weight)
        nn.init.zeros_(net[2].bias)
    graph, other = (trace(net, random_tensor(2, 4)) for net in nets)
    verify(graph, {"0": KEEP}, compact(graph, {"0": KEEP}))
    with pytest.raises(Unproved, match="not the one that compact makes"):
        verify(graph, {"0": KEEP}, compact(other, {"0": KEEP}))


def test_outputs_in_a_dataclass_are_compared(wrong_rule: None) -> None:
    @dataclasses.dataclass
    class Out:
        y: Tensor

    net = Net(lambda net, x: Out(net.b(net.s(F.relu(net.a(x))))), a=nn.Linear(4, 8), s=Shifted(), b=nn.Linear(8, 2))
    graph = traced(net, random_tensor(2, 4))
    with pytest.raises(NotEqual):
        compact(graph, {"a": KEEP})


def test_wrong_arguments_are_named() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    graph = trace(model, torch.randn(2, 4))
    wrong: list[Callable[[], object]] = [
        lambda: compact(graph, None),  # type: ignore[arg-type]
        lambda: compact(graph, {"0": KEEP.to("meta")}),
        lambda: find_sites(model),  # type: ignore[arg-type]
        lambda: save(model, "nowhere"),  # type: ignore[arg-type]
        lambda: replay(graph, "plan"),  # type: ignore[arg-type]
        lambda: verify(graph, {"0": KEEP}, trace(Net(lambda net, x: (net.m(x), x), m=model), torch.randn(2, 4))),
        lambda: verify(trace(copy.deepcopy(model).to("meta"), torch.randn(2, 4, device="meta")), {"0": KEEP}),
    ]
    for call in wrong:
        with pytest.raises(SecateursError):
            call()


def test_a_proof_leaves_weights_and_modes_alone() -> None:
    graph = traced(
        Net(lambda net, x: net.b(net.n(net.a(x))), a=conv(3, 8), n=nn.BatchNorm2d(8), b=conv(8, 2)), random_tensor(2, 3, 6, 6)
    )
    graph.module.train()
    before = copy.deepcopy(graph.module.state_dict())
    smaller = compact(graph, {"a": torch.ones(8).bool()} if not find_sites(graph) else random_keep(find_sites(graph), 0))
    assert_same_bits(before, graph.module.state_dict())
    assert all(part.training for part in [*graph.module.modules(), *smaller.module.modules()])


def test_a_large_example_is_not_run_whole_to_prove_a_cut() -> None:
    seen: list[int] = []
    net = Net(lambda net, x: net.b(F.relu(net.a(x))), a=nn.Linear(4, 8), b=nn.Linear(8, 2))
    graph = traced(net, random_tensor(64, 4))
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, out: seen.append(len(out)) if isinstance(out, Tensor) else None
    )
    with warnings.catch_warnings():
        compact(graph, {"a": KEEP})
    handle.remove()
    assert {n for n in seen if n < 64} == {2, 3}


# ---- interrupts ---------------------------------------------------------------------------------------------------------


def test_an_interrupt_while_tracing_waits_for_its_end() -> None:
    """torch.fx patches itself while it traces; interrupted at the wrong moment it stays patched."""
    finished: list[bool] = []

    class Interrupting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if not isinstance(x, Tensor):  # torch.fx follows
                signal.raise_signal(signal.SIGINT)
                finished.append(True)
            return super().forward(x) + 1

    with pytest.raises(KeyboardInterrupt):
        trace(nn.Sequential(Interrupting(3, 4)), torch.randn(2, 3))
    assert finished
    assert find_sites(trace(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), torch.randn(2, 3)))


# ---- pickles ------------------------------------------------------------------------------------------------------------


def test_a_module_whose_buffers_take_sizes_of_the_input_can_be_pickled() -> None:
    """torch.fx follows the code of a pickled network again; items that are written stay one node."""

    def body(net: Net, x: Tensor) -> Tensor:
        y = net.a(x) + net.shift.expand(x.size(0), -1, -1, -1)
        y[:, 0] = 1.0
        return net.o(y)

    model, x = Net(body, a=conv(3, 8), o=conv(8, 2), shift=torch.zeros(1, 8, 1, 1)), random_tensor(2, 3, 8, 8)
    graph = traced(model, x)
    again = io.BytesIO()
    torch.save(graph.module, again)
    again.seek(0)
    loaded = torch.load(again, weights_only=False)  # our own bytes
    for batch in (x, x[:1]):
        assert_same(run(loaded, batch), run(model, batch))


def test_such_a_module_can_be_pickled_after_each_cut() -> None:
    """The first cut leaves a sum into wide channels, which the second takes apart and puts together again."""

    def body(net: Net, x: Tensor) -> Tensor:
        return net.o(x + net.a(x) + net.shift.expand(x.size(0), -1, -1, -1))

    graph = traced(Net(body, a=conv(8, 8), o=conv(8, 2), shift=torch.zeros(1, 8, 1, 1)), random_tensor(2, 8, 6, 6))
    for keep in (KEEP, torch.arange(int(KEEP.sum())) > 0):
        graph = compact(graph, {"a": keep})
        file = io.BytesIO()
        torch.save(graph.module, file)
        file.seek(0)
        again = torch.load(file, weights_only=False)  # our own bytes
        assert_same(run(again, *graph.example), run(graph.module, *graph.example), atol=0)


def test_a_pruned_module_can_be_pickled_and_copied() -> None:
    body = nn.Sequential(conv(3, 8), nn.BatchNorm2d(8), nn.ReLU(), conv(8, 4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    graph = traced(body, random_tensor(2, 3, 6, 6))
    smaller = compact(graph, {"0": KEEP})
    file = io.BytesIO()
    torch.save(smaller.module, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)  # our own bytes: whole modules are pickles
    assert_same(run(again, *graph.example), run(masked(graph, {"0": KEEP}), *graph.example))
    assert_same(run(copy.deepcopy(smaller.module), *graph.example), run(smaller.module, *graph.example), atol=0)


class ExpandedTable(nn.Module):
    """A table with a value for each pixel, brought to the shape of a convolution's output and added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 1, bias=False)
        self.register_buffer("table", torch.rand(1, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x)
        return self.table.expand_as(y) + y  # type: ignore[operator]  # a buffer


def test_a_table_that_is_expanded_to_an_emptied_output_is_refused_as_an_empty_layer() -> None:
    graph = trace(ExpandedTable().double().eval(), torch.rand(2, 3, 8, 8, dtype=torch.float64))
    (site,) = find_sites(graph, "before")
    with pytest.raises(EmptyLayer):
        compact(graph, {site.name: torch.zeros(site.channels, dtype=torch.bool)})


def test_batch_norm_over_six_axes_is_traced_and_left_alone() -> None:
    class Six(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv3d(2, 4, 1)
            self.register_buffer("mean", torch.rand(4))
            self.register_buffer("var", torch.rand(4))

        def forward(self, x: Tensor) -> Tensor:
            return torch.nn.functional.batch_norm(self.conv(x).unsqueeze(3), self.mean, self.var, training=self.training)

    example = torch.rand(2, 2, 3, 3, 3)
    model = Six().eval()
    graph = trace(model, example)
    torch.testing.assert_close(graph.module(example), model(example))
    assert not find_sites(graph)


def test_a_shortcut_that_takes_every_other_pixel_reads_the_padded_output_of_a_grouped_layer() -> None:
    """Where groups lose different numbers of filters, an alignment drops those that stay for the others: the slice reads it."""

    def body(net: Net, x: Tensor) -> Tensor:
        wide = net.grouped(net.first(x))
        out: Tensor = net.down(wide) + F.pad(wide[:, :, ::2, ::2], (0, 0, 0, 0, 2, 0))
        return net.out(out)

    layers = {
        "first": conv(3, 4, 1, groups=1),
        "grouped": conv(4, 8, groups=4),
        "down": conv(8, 10, stride=2),
        "out": conv(10, 2),
    }
    graph = traced(Net(body, **layers), random_tensor(2, 3, 7, 7))
    masks = {"first": without(4, 3), "grouped": without(8, 1, 3), "add": ~without(10, 6)}
    assert_compact_is_masked(graph, masks, (random_tensor(1, 3, 9, 9),))


def test_a_proof_leaves_out_the_single_value_that_torchs_group_norm_refuses() -> None:
    """Of one example, one channel in a group is one value: torch has no statistics of it, in eval mode either."""
    graph = traced(nn.Sequential(nn.Linear(3, 3), nn.GroupNorm(1, 3), nn.Linear(3, 4)), random_tensor(2, 3))
    (site,) = find_sites(graph, "stream")
    keep = {site.name: without(3, 0, 1)}
    smaller = assert_compact_is_masked(graph, keep, (random_tensor(5, 3),))
    with pytest.raises(ValueError, match="Expected more than 1 value"):
        run(smaller.module, random_tensor(1, 3))
    assert verify(graph, keep, smaller).conclusive
