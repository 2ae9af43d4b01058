"""Sites: where they lie, what they are called, which layers they shrink, and why other places have none."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nets import Net, assert_compact_is_masked, random_keep, random_tensor, randomise_, run, traced
from secateurs import Graph, compact, find_site, find_sites, masked, trace
from secateurs.config import Shortcut
from secateurs.errors import InvalidInput, UnknownSite
from secateurs.graph.obstacles import find_obstacles
from secateurs.graph.sites import Sites
from secateurs.models import build, example_input

BLOCKS = [f"layer{stage}.{block}" for stage in (1, 2, 3) for block in (0, 1, 2)]


@pytest.fixture(scope="module")
def resnet20() -> Graph:
    return trace(randomise_(build("resnet20")), example_input("resnet20").double())


def names_of(sites: Sites) -> list[str]:
    return [site.name for site in sites]


def test_resnet20_before_the_add(resnet20: Graph) -> None:
    sites = find_sites(resnet20)
    assert names_of(sites) == ["conv1", *(f"{block}.conv{i}" for block in BLOCKS for i in (1, 2))]
    assert [site.channels for site in sites] == [16] * 7 + [32] * 6 + [64] * 6
    assert [site.layers for site in sites] == [(name,) for name in names_of(sites)]
    assert all(site.original == tuple(range(site.channels)) and site.original_channels == site.channels for site in sites)


def test_resnet20_after_the_add(resnet20: Graph) -> None:
    sites = find_sites(resnet20, "after")
    assert names_of(sites) == ["conv1", *(name for block in BLOCKS for name in (f"{block}.conv1", f"{block}.add"))]
    assert [site.channels for site in sites] == [16] * 7 + [32] * 6 + [64] * 6
    # a channel dropped behind the add still reaches the sum of the next block through its own convolution
    assert sites[2].layers == ("layer1.0.conv2",)


@pytest.mark.parametrize("shortcut", ["before", "after", "stream"])
def test_masks_lie_where_the_figure_has_them(resnet20: Graph, shortcut: Shortcut) -> None:
    """Behind the ReLU, but before the add or behind its ReLU for a block's second convolution."""
    places = {site.name: site.node for site in find_sites(resnet20, shortcut)}
    nodes = {node.name: node for node in resnet20.module.graph.nodes}
    for name, place in places.items():
        if name.endswith("conv2"):
            assert nodes[place].target == name.replace("conv2", "bn2")
        else:
            assert "relu" in place


def test_option_b_shortcuts_keep_all_channels_before_the_add() -> None:
    graph = trace(randomise_(build("resnet8-b")), example_input("resnet8-b").double())
    reasons = {u.name: u.reason for u in find_sites(graph).unprunable}
    assert set(reasons) == {"layer2.0.shortcut.0", "layer3.0.shortcut.0", "linear"}
    assert reasons["layer2.0.shortcut.0"] == "it is the shortcut, which keeps all its channels while masks go before the add"
    after = find_sites(graph, "after")
    site = next(site for site in after if site.name == "layer2.0.add")
    assert set(site.layers) == {"layer2.0.conv2", "layer2.0.shortcut.0"}
    assert [u.name for u in after.unprunable] == ["linear"]


def test_the_output_layer_is_unprunable_with_its_macs(resnet20: Graph) -> None:
    (output,) = find_sites(resnet20).unprunable
    assert (output.name, output.node, output.macs) == ("linear", "linear", 640)
    assert output.reason == "it is the network's output"


def test_macs_that_refused_layers_lock() -> None:
    """By hand, for one example: taps × inputs × filters × places."""
    net = Net(
        lambda net, x: net.out(net.norm(net.up(net.twice(net.twice(net.a(x)))))),
        a=nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.GroupNorm(2, 8)),
        twice=nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.GroupNorm(2, 8)),
        up=nn.ConvTranspose2d(8, 6, 2, stride=2),
        norm=nn.GroupNorm(2, 6),
        out=nn.Conv2d(6, 4, 1, bias=False),
    )
    sites = find_sites(traced(net, random_tensor(3, 3, 8, 8)))
    assert not sites
    macs = {u.name: u.macs for u in sites.unprunable}
    assert macs["a.0"] == 9 * 3 * 8 * 16
    assert macs["twice.0"] == 2 * 9 * 4 * 8 * 16
    assert macs["up"] == 4 * 8 * 6 * 16
    assert macs["out"] == 6 * 4 * 64


def test_the_obstacle_that_locks_the_most_comes_first_with_a_remedy() -> None:
    """By hand: a and c stop at one GroupNorm each, b at an op without a rule; the output layer is no obstacle."""
    net = Net(
        lambda net, x: net.out(net.n2(net.c(torch.renorm(net.b(net.n1(net.a(x))), 2, 1, 1.0)))),
        a=nn.Conv2d(3, 8, 1),
        n1=nn.GroupNorm(2, 8),
        b=nn.Conv2d(8, 2, 1),
        c=nn.Conv2d(2, 8, 1),
        n2=nn.GroupNorm(4, 8),
        out=nn.Conv2d(8, 4, 1),
    )
    first, second = find_obstacles(find_sites(traced(net, random_tensor(3, 3, 8, 8))))
    assert (first.layers, first.macs) == (("a", "c"), (3 * 8 + 2 * 8) * 64)
    assert first.reason == "GroupNorm takes statistics over several channels, so it needs all of them"
    assert "shortcut='stream'" in first.remedy
    assert (second.layers, second.macs) == (("b",), 8 * 2 * 64)
    assert str(second).startswith("no rule for renorm (1 layer, 1,024 MACs). Add a rule for renorm with @secateurs.rule")


@pytest.mark.parametrize("shortcut", ["before", "after", "stream"])
def test_names_survive_cuts_and_channels_keep_their_ids(resnet20: Graph, shortcut: Shortcut) -> None:
    sites = find_sites(resnet20, shortcut)
    keep = random_keep(sites, seed=4)
    smaller = compact(resnet20, keep)
    again = find_sites(smaller, shortcut)
    assert names_of(again) == names_of(sites)
    for before, after in zip(sites, again, strict=True):
        assert after.original == tuple(keep[before.name].nonzero().flatten().tolist())
        assert after.channels == len(after.original)
        assert after.original_channels == before.channels
    assert find_site(smaller, sites[2].name) == again[2]


def test_a_single_cut_narrows_only_its_own_site_before_the_add(resnet20: Graph) -> None:
    smaller = compact(resnet20, {"layer2.1.conv2": torch.arange(32) % 2 > 0})
    widths = {site.name: site.channels for site in find_sites(smaller)}
    assert widths.pop("layer2.1.conv2") == 16
    assert widths == {s.name: s.channels for s in find_sites(resnet20) if s.name != "layer2.1.conv2"}


def test_sites_can_be_given_instead_of_names(resnet20: Graph) -> None:
    site = find_sites(resnet20)[3]
    keep = torch.arange(16) > 5
    by_site, by_name = compact(resnet20, {site: keep}), compact(resnet20, {site.name: keep})
    assert by_site.plan == by_name.plan
    # a site found before another cut still names its place afterwards
    later = compact(by_site, {find_sites(resnet20)[4]: torch.arange(16) > 2})
    assert later.plan.removed() == {"layer1.1.conv1": tuple(range(6)), "layer1.1.conv2": (0, 1, 2)}


def test_both_positions_can_be_cut_at_once(resnet20: Graph) -> None:
    keep = {"layer2.0.conv2": torch.arange(32) > 5, "layer2.0.add": torch.arange(32) % 3 > 0, "conv1": torch.arange(16) > 1}
    smaller = assert_compact_is_masked(resnet20, keep)
    assert smaller.module.get_submodule("layer2.0.conv2").out_channels == sum(1 for i in range(32) if i > 5 and i % 3)


def test_the_first_convolution_is_masked_behind_its_relu_in_both_positions(resnet20: Graph) -> None:
    keep = {"conv1": torch.arange(16) > 3}
    zeroed = run(masked(resnet20, keep), *resnet20.example)
    model = randomise_(build("resnet20"))

    def zero(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (inputs[0] * keep["conv1"].view(1, -1, 1, 1),)

    model.layer1.register_forward_pre_hook(zero)
    torch.testing.assert_close(run(model, *resnet20.example), zeroed, rtol=0, atol=1e-12)
    assert find_site(resnet20, "conv1") == next(s for s in find_sites(resnet20, "after") if s.name == "conv1")


def test_a_site_names_all_layers_that_shrink_with_it() -> None:
    graph = trace(randomise_(build("mobilenet-small")), example_input("mobilenet-small").double())
    site = find_site(graph, "blocks.0.expand")
    assert site.layers == ("blocks.0.expand", "blocks.0.depthwise", "blocks.0.excite.expand")
    smaller = compact(graph, {site: torch.arange(site.channels) > 0})
    for layer in site.layers:
        assert smaller.module.get_submodule(layer).out_channels == site.channels - 1
    covered = [layer for site in find_sites(graph) for layer in site.layers]
    assert len(covered) == len(set(covered))  # every filter has one site


@pytest.mark.parametrize("name", ["resnet20", "resnet8-b", "vgg16", "mobilenet-small", "resnext-small", "densenet-small"])
@pytest.mark.parametrize("shortcut", ["before", "after", "stream"])
def test_every_layer_has_a_site_or_a_reason(name: str, shortcut: Shortcut) -> None:
    model = build(name)
    sites = find_sites(trace(model, example_input(name)), shortcut)
    layers = {path for path, part in model.named_modules() if isinstance(part, nn.Conv2d | nn.Linear)}
    covered = {layer for site in sites for layer in site.layers}
    refused = {u.name for u in sites.unprunable}
    assert covered | refused == layers
    assert not covered & refused
    assert len(names_of(sites)) == len(set(names_of(sites)))
    assert all(u.reason for u in sites.unprunable)


def test_order_is_that_of_the_network() -> None:
    net = Net(
        lambda net, x: net.d(torch.cat([F.relu(net.z(F.relu(net.b(x)))), F.relu(net.a(x))], 1)),
        a=nn.Conv2d(3, 4, 1),
        b=nn.Conv2d(3, 5, 1),
        z=nn.Conv2d(5, 6, 1),
        d=nn.Conv2d(10, 2, 1),
    )
    assert names_of(find_sites(traced(net, random_tensor(2, 3, 4, 4)))) == ["b", "z", "a"]


def test_sites_are_a_sequence(resnet20: Graph) -> None:
    sites = find_sites(resnet20)
    assert len(sites[2:5]) == 3
    assert sites[-1] in sites
    assert "unprunable=" in repr(sites)


def test_wrong_shortcut_and_unknown_names(resnet20: Graph) -> None:
    with pytest.raises(InvalidInput, match="shortcut: got 'behind', wanted 'before' or 'after'"):
        find_sites(resnet20, "behind")  # type: ignore[arg-type]
    with pytest.raises(UnknownSite, match=r"no site 'layer1.0.conv3'.* Did you mean 'layer1.0.conv2'.*find_sites"):
        find_site(resnet20, "layer1.0.conv3")
    with pytest.raises(UnknownSite, match="'linear' is not a site: it is the network's output"):
        find_site(resnet20, "linear")


class RotatedTail(nn.Module):
    """A part of a tensor is rotated, as in vision transformers with rotary positions: tensor and part are both mask points."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.answer = nn.Linear(6, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        first, rest = x[:, :1], x[:, 1:]
        found: Tensor = self.answer(torch.cat([first, rest + 0.5 * rest.flip(1)], 1))
        return found


def test_a_tensor_and_a_part_of_it_are_mask_points_of_one_stream() -> None:
    graph = trace(RotatedTail().double().eval(), torch.randn(2, 5, 6, dtype=torch.float64))
    site = find_sites(graph, "stream")[0]
    keep = {site.name: torch.arange(site.channels) > 3}
    x = torch.randn(3, 5, 6, dtype=torch.float64)
    torch.testing.assert_close(compact(graph, keep)(x), masked(graph, keep)(x), rtol=0, atol=1e-12)
