"""The shortcut position "stream": one mask for all tensors that the sums of a stage join, also through norms over channels.

Expected values come from networks that are built narrow by hand, from hooks on the user's model, and from the masked network.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nets import Net, assert_compact_is_masked, assert_same, conv, random_keep, random_tensor, randomise_, run, without
from secateurs import Graph, compact, find_sites, load, masked, replay, save, trace, verify
from secateurs.config import criterion_names
from secateurs.criteria import CRITERIA, CriterionContext, score_filters
from secateurs.data import Examples
from secateurs.errors import InvalidInput
from secateurs.graph.consumers import find_consumers
from secateurs.graph.layers import Align
from secateurs.graph.masking import split_at
from secateurs.metrics import cross_entropy
from secateurs.models import build
from secateurs.repair import prepare, repair_
from secateurs.scoring.engine import split_for
from secateurs.scoring.evaluator import SiteEvaluator
from secateurs.scoring.network import with_factors
from secateurs.speed.sizes import Sizing


class Attention(nn.Module):
    """A block of a vision transformer, with a factor for each channel of one branch."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width, bias=False)
        self.qkv, self.proj = nn.Linear(width, 12 * 3), nn.Linear(12, width)
        self.fc1, self.fc2 = nn.Linear(width, 10), nn.Linear(10, width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        size, places, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(size, places, 3, 4, 3).permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(size, places, 12)
        x = x + self.scale * self.proj(attended)
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class Transformer(nn.Module):
    """A class token and positions are written to the stream, too."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.patches, self.token = nn.Conv2d(3, width, 4, 4), nn.Parameter(torch.ones(1, 1, width))
        self.positions = nn.Parameter(torch.ones(1, 5, width))
        self.blocks, self.norm, self.head = (
            nn.Sequential(Attention(width), Attention(width)),
            nn.LayerNorm(width),
            nn.Linear(width, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


class ImageNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps).permute(0, 3, 1, 2)


class NextBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.spread, self.norm = nn.Conv2d(width, width, 3, padding=1, groups=width), nn.LayerNorm(width)
        self.fc1, self.fc2, self.scale = nn.Linear(width, 7), nn.Linear(7, width), nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc2(F.gelu(self.fc1(self.norm(self.spread(x).permute(0, 2, 3, 1))))).permute(0, 3, 1, 2)
        return x + y * self.scale.reshape(1, -1, 1, 1)


class NextNet(nn.Module):
    """ConvNeXt, of two stages: norms on images and on channels that lie last, in module and functional form."""

    def __init__(self, one: int = 6, two: int = 8) -> None:
        super().__init__()
        self.stem, self.first, self.second = nn.Conv2d(3, one, 2, 2), ImageNorm(one), ImageNorm(one)
        self.stage1, self.down = nn.Sequential(NextBlock(one), NextBlock(one)), nn.Conv2d(one, two, 2, 2)
        self.stage2, self.norm, self.head = NextBlock(two), nn.LayerNorm(two), nn.Linear(two, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(self.second(self.stage1(self.first(self.stem(x)))))
        return self.head(self.norm(self.stage2(x).mean((2, 3))))


class Grouped(nn.Module):
    """A residual network with GroupNorm behind every convolution."""

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.stem, self.head = conv(3, channels), nn.Linear(channels, 3)
        self.convs = nn.ModuleList(conv(channels, channels) for _ in range(4))
        self.norms = nn.ModuleList(nn.GroupNorm(groups, channels) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norms[4](self.stem(x)))
        for i in (0, 2):
            x = F.relu(x + self.norms[i + 1](self.convs[i + 1](F.silu(self.norms[i](self.convs[i](x))))))
        return self.head(x.mean((2, 3)))


class Merging(nn.Module):
    """Windows and merged patches of a Swin Transformer: four places become one with four times the channels."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norms = nn.Conv2d(3, 6, 1), nn.ModuleList(map(nn.LayerNorm, (6, 24, 8)))
        self.fc1, self.fc2, self.reduction = nn.Linear(6, 9), nn.Linear(9, 6), nn.Linear(24, 8, bias=False)
        self.fc3, self.fc4, self.head = nn.Linear(8, 9), nn.Linear(9, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).permute(0, 2, 3, 1)
        n, h, w, c = x.shape
        windows = torch.roll(self.norms[0](x), (1, 1), (1, 2)).view(n, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 2, 4, 5)
        y = self.fc2(F.gelu(self.fc1(windows.reshape(-1, 4, c))))
        y = y.view(n, h // 2, w // 2, 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(n, h, w, c)
        x = x + torch.roll(y, (-1, -1), (1, 2))
        x = x.reshape(n, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 4, 2, 5).flatten(3)
        x = self.reduction(self.norms[1](x))
        x = x + self.fc4(F.gelu(self.fc3(self.norms[2](x))))
        return self.head(x.mean((1, 2)))


def pre_activation(net: Net, x: Tensor) -> Tensor:
    x = net.stem(x)
    x = x + net.c2(F.relu(net.n2(net.c1(F.relu(net.n1(x))))))
    return net.out(F.relu(net.n3(x)).mean((2, 3)))


def encoder_decoder(net: Net, x: Tensor) -> Tensor:
    """A U-Net of residual units with GroupNorm and InstanceNorm, whose two streams are concatenated."""
    a = F.relu(net.g1(net.c1(x)))
    a = F.relu(a + net.g2(net.c2(a)))
    b = F.relu(net.i1(net.c3(a)))
    b = b + F.relu(net.i2(net.c4(b)))
    return net.out(F.relu(net.c5(torch.cat([a, F.interpolate(b, scale_factor=2.0)], 1))))


def post_norm(net: Net, x: Tensor) -> Tensor:
    x = net.embed(x.flatten(2).transpose(1, 2))
    x = net.n1(x + net.b1(F.relu(net.a1(x))))
    x = net.n2(x + net.b2(F.relu(net.a2(x))))
    return net.out(x.mean(1))


def root_mean_square(net: Net, x: Tensor) -> Tensor:
    x = net.embed(x.flatten(2).transpose(1, 2))
    x = x + net.b1(F.silu(net.a1(net.n1(x))))
    x = x + net.b2(F.silu(net.a2(F.rms_norm(x, (6,), net.gain, 1e-6))))
    return net.out(net.n2(x).mean(1))


def layered(norm: Callable[[int], nn.Module]) -> dict[str, nn.Module]:
    layers = {f"{name}{i}": nn.Linear(*size) for i in (1, 2) for name, size in {"a": (6, 9), "b": (9, 6)}.items()}
    return {"embed": nn.Linear(3, 6), **layers, "n1": norm(6), "n2": norm(6), "out": nn.Linear(6, 3)}


NETS: dict[str, tuple[Callable[[], nn.Module], dict[str, int]]] = {  # with the streams and their channels
    "option A": (
        lambda: build("resnet8", widths=(4, 6, 8)),
        {"layer1.0.stream": 4, "layer2.0.stream": 6, "layer3.0.stream": 8},
    ),
    "option B": (
        lambda: build("resnet8-b", widths=(4, 6, 8)),
        {"layer1.0.stream": 4, "layer2.0.stream": 6, "layer3.0.stream": 8},
    ),
    "pre-activation": (
        lambda: Net(
            pre_activation,
            **{"stem": conv(3, 6), "c1": conv(6, 5), "c2": conv(5, 6), "out": nn.Linear(6, 3)},
            **{"n1": nn.BatchNorm2d(6), "n2": nn.BatchNorm2d(5), "n3": nn.BatchNorm2d(6)},
        ),
        {"stream": 6},
    ),
    "transformer": (Transformer, {"blocks.stream": 12}),
    "convnext": (NextNet, {"stage1.stream": 6, "stage2.stream": 8}),
    "swin": (Merging, {"stream": 6, "stream_1": 8}),
    "post-norm": (lambda: Net(post_norm, **layered(nn.LayerNorm)), {"stream": 6}),
    "rms norm": (lambda: Net(root_mean_square, gain=nn.Parameter(torch.ones(6)), **layered(nn.RMSNorm)), {"stream": 6}),
    "whole groups": (lambda: Grouped(12, 6), {"stream": 6}),
    "one of each group": (lambda: Grouped(12, 3), {"stream": 4}),
    "u-net": (
        lambda: Net(
            encoder_decoder,
            **{"c1": conv(3, 8), "c2": conv(8, 8), "c3": conv(8, 6, stride=2), "c4": conv(6, 6), "c5": conv(14, 5)},
            **{"g1": nn.GroupNorm(4, 8), "g2": nn.GroupNorm(4, 8), "out": conv(5, 2)},
            **{"i1": nn.InstanceNorm2d(6, affine=True), "i2": nn.InstanceNorm2d(6)},
        ),
        {"stream": 4, "stream_1": 6},
    ),
}
X = random_tensor(4, 3, 8, 8, seed=3)


@cache
def graph_of(name: str) -> Graph:
    return trace(randomise_(NETS[name][0](), 1), X)


@pytest.mark.parametrize("name", NETS)
def test_compact_equals_masked_in_both_modes_in_two_steps_and_replayed(name: str, tmp_path: Path) -> None:
    graph = graph_of(name)
    sites = find_sites(graph, "stream")
    assert {site.name: site.channels for site in sites if "stream" in site.name} == NETS[name][1]
    assert [u.reason for u in sites.unprunable] == ["it is the network's output"]
    layers = [layer for site in sites for layer in site.layers]
    assert len(set(layers)) == len(layers)  # every layer's filters go with one site
    keep = random_keep(sites, 0, 0.4)
    smaller = assert_compact_is_masked(graph, keep, (X[:3],))
    assert_same(run(copy.deepcopy(smaller.module).train(), X), run(masked(graph, keep).train(), X), atol=1e-11)
    again = find_sites(smaller, "stream")
    assert [s.name for s in again] == [s.name for s in sites]
    assert all(int(keep[s.name].sum()) == s.channels and keep[s.name][list(s.original)].all() for s in again)
    twice = assert_compact_is_masked(smaller, random_keep(again, 5, 0.3), (X[:3],))
    assert_same(run(replay(graph, twice.plan, verify=False).module, X), run(twice.module, X))
    save(twice, tmp_path / "small.safetensors")
    assert_same(run(load(NETS[name][0]().double().eval(), tmp_path / "small.safetensors").module, X), run(twice.module, X))


@pytest.mark.parametrize("name", NETS)
def test_nothing_is_aligned_inside_a_stage(name: str) -> None:
    graph = graph_of(name)
    keep = random_keep([s for s in find_sites(graph, "stream") if "stream" in s.name], 2, 0.4)
    smaller = compact(graph, keep)
    wanted = {"option A": 2, "u-net": 0}.get(name, 0)  # where a stage begins, its new channels are filled in
    assert sum(isinstance(part, Align) for part in smaller.module.modules()) == wanted


def narrowed(state: dict[str, Tensor], kept: dict[int, Tensor], like: nn.Module) -> dict[str, Tensor]:
    """The weights of a network, in every dimension of one of the sizes in `kept` the entries that it lists."""
    found = {}
    for name, wanted in like.state_dict().items():
        tensor = state[name]
        for dim, size in enumerate(wanted.shape):
            if tensor.shape[dim] != size:
                tensor = tensor.index_select(dim, kept[tensor.shape[dim]])
        found[name] = tensor
    return found


def test_a_compacted_convnext_is_a_convnext_of_smaller_widths() -> None:
    """Built by hand with fewer channels and the kept weights: its LayerNorms know nothing of masks."""
    model, kept = randomise_(NextNet(), 1), {6: torch.tensor([0, 2, 5]), 8: torch.tensor([1, 2, 3, 6, 7])}
    by_hand = NextNet(3, 5).double().eval()
    by_hand.load_state_dict(narrowed(model.state_dict(), kept, by_hand))
    masks = {"stage1.stream": torch.isin(torch.arange(6), kept[6]), "stage2.stream": torch.isin(torch.arange(8), kept[8])}
    graph = trace(model, X)
    smaller = compact(graph, masks).module
    assert_same(run(smaller, X), run(by_hand, X))
    assert_same(run(masked(graph, masks), X), run(by_hand, X))
    assert {n: p.shape for n, p in smaller.named_parameters()} == {n: p.shape for n, p in by_hand.named_parameters()}


def test_a_compacted_transformer_is_one_of_smaller_width_and_its_token_and_positions_are_narrow() -> None:
    model, kept = randomise_(Transformer(12), 1), torch.tensor([0, 1, 4, 5, 9])
    by_hand = Transformer(5).double().eval()
    by_hand.load_state_dict(narrowed(model.state_dict(), {12: kept}, by_hand))
    smaller = compact(trace(model, X), {"blocks.stream": torch.isin(torch.arange(12), kept)}).module
    assert_same(run(smaller, X), run(by_hand, X))
    assert {n: p.shape for n, p in smaller.named_parameters()} == {n: p.shape for n, p in by_hand.named_parameters()}


@pytest.mark.parametrize(("groups", "unit"), [(6, [2, 3]), (3, [1, 5, 9])])
def test_a_channel_of_a_site_through_group_norms_is_a_whole_group_or_one_channel_of_each(groups: int, unit: list[int]) -> None:
    """Of 12 channels in 6 groups, group 1 goes; of 12 in 3, the second of each: whatever leaves more to choose from."""
    graph = graph_of("whole groups" if groups == 6 else "one of each group")
    site = next(s for s in find_sites(graph, "stream") if s.name == "stream")
    smaller = compact(graph, {site: without(site.channels, 1)})
    assert sorted(set(range(12)) - set(smaller.kept["stem.weight"][0].tolist())) == unit
    norm = smaller.module.get_submodule("norms.1")
    assert isinstance(norm, nn.GroupNorm)
    assert (norm.num_groups, norm.num_channels) == ((5, 10) if groups == 6 else (3, 9))


def test_the_other_positions_still_stop_at_norms() -> None:
    graph = graph_of("convnext")
    for position in ("before", "after"):
        sites = find_sites(graph, position)
        assert not any("stream" in site.name for site in sites)
        assert {u.name for u in sites.unprunable} >= {"stem"}


@pytest.mark.parametrize("name", NETS)
def test_masks_of_streams_are_measured_and_have_slopes(name: str) -> None:
    """What the engine measures under a mask is the masked network's loss; its slopes are those of the masks' factors."""
    if name == "u-net":
        return  # its output is an image
    graph, examples = graph_of(name), Examples(X, torch.tensor([0, 1, 2, 0]))
    for site in [s for s in find_sites(graph, "stream") if "stream" in s.name]:
        masks = torch.stack([without(site.channels, 0), without(site.channels, 1, 2)])
        network = split_for(graph, site, examples, batch=3)
        wanted = [cross_entropy(run(masked(graph, {site: mask}), X), examples.targets).mean() for mask in masks]
        assert_same(network.measure(masks, [cross_entropy])[:, 0], torch.stack(wanted), atol=1e-11)
        (found,) = network.slopes([masks[[0, 1, 0, 1]]], cross_entropy)
        assert_same(found[0, 1:][masks[0]], slopes_by_differences(graph, site, masks[0], examples)[masks[0]], atol=1e-6)
        assert bool((found[:, 1:][~masks[[0, 1, 0, 1]]] != 0).any())  # a removed channel has a slope, too


def slopes_by_differences(graph: Graph, site: Any, mask: Tensor, examples: Examples) -> Tensor:
    """The slopes of the first example's loss along the factors of the site's channels, by central differences."""
    split, step, slopes = split_at(graph, site), 1e-6, []
    activations, *carried = run(split.prefix, examples.inputs[:1])
    for channel in range(site.channels):
        moved = [mask.double().index_fill(0, torch.tensor(channel), float(mask[channel]) + d) for d in (step, -step)]
        shape = [-1 if axis == split.axis else 1 for axis in range(activations.dim())]
        inputs = [(activations, *carried, f[None]) if split.several else (activations * f.view(shape), *carried) for f in moved]
        outputs = [run(split.suffix, *each) for each in inputs]
        losses = [cross_entropy(out, examples.targets[:1])[0] for out in outputs]
        slopes.append((losses[0] - losses[1]) / (2 * step))
    return torch.stack(slopes)


def test_a_network_whose_first_axis_is_not_the_examples_has_losses_and_no_slopes() -> None:
    def body(net: Net, x: Tensor) -> Tensor:
        y = net.embed(x.flatten(2).permute(2, 0, 1))  # (places, examples, channels)
        y = y + net.b1(F.relu(net.a1(net.n1(y))))
        return net.out(y.mean(0))

    parts = {name: part for name, part in layered(nn.LayerNorm).items() if name not in ("a2", "b2", "n2")}
    graph = trace(randomise_(Net(body, **parts), 1), X)
    site = find_sites(graph, "stream")[0]
    masks = torch.stack([without(6, 0), without(6, 1, 2)])
    network = split_for(graph, site, Examples(X, torch.tensor([0, 1, 2, 0])), batch=4)
    wanted = [cross_entropy(run(masked(graph, {site: mask}), X), torch.tensor([0, 1, 2, 0])).mean() for mask in masks]
    assert_same(network.measure(masks, [cross_entropy])[:, 0], torch.stack(wanted), atol=1e-11)
    with pytest.raises(InvalidInput, match="each cannot have a mask of its own"):
        network.slopes([masks[[0, 1, 0, 1]]], cross_entropy)


@pytest.mark.parametrize("name", ["option A", "transformer", "one of each group"])
def test_every_criterion_ranks_the_channels_of_a_stream(name: str) -> None:
    graph, examples = graph_of(name), Examples(X, torch.tensor([0, 1, 2, 0]))
    site = next(s for s in find_sites(graph, "stream") if "stream" in s.name)
    for criterion in (name for name in criterion_names() if name not in ("ensemble", "obs", "portfolio")):
        if (criterion == "batchnorm" and name != "option A") or criterion.startswith("maxplus"):
            continue  # without such layers these two refuse a site
        if criterion.startswith("thinet") and name != "option A":
            continue  # behind norms over channels nothing can be observed
        found = score_filters(criterion, SiteEvaluator(graph, site, cross_entropy), examples).coef
        assert found.shape == (site.channels,), criterion
        assert bool(found.isfinite().all()), criterion


def test_the_weight_norm_of_a_stream_counts_all_layers_that_write_to_it() -> None:
    """Channel 0 of a stage: the first filter of the stem and of each block's last layer; by hand from the weights."""
    graph = graph_of("option A")
    site = next(s for s in find_sites(graph, "stream") if s.name == "layer1.0.stream")
    found = CRITERIA["l1"](CriterionContext(SiteEvaluator(graph, site, cross_entropy), Examples(X, torch.zeros(4).long()), 0))
    layers = [graph.module.get_submodule(path) for path in ("conv1", "layer1.0.conv2")]
    assert_same(found, sum(layer.weight.detach().abs().sum((1, 2, 3)) for layer in layers))  # type: ignore[operator, union-attr]


def test_repair_reaches_every_consumer_of_a_stream() -> None:
    """The stream of the first stage is read by the block's first layer, by the next stage's, and by the shortcut's sum."""
    graph = graph_of("option A")
    site = next(s for s in find_sites(graph, "stream") if s.name == "layer1.0.stream")
    consumers = find_consumers(graph, site)
    assert [layer.module for layer in consumers.layers] == ["layer1.0.conv1", "layer2.0.conv1"]
    assert [total.name for total in consumers.sums] == ["layer2.0.add"]
    prepared, x = prepare(graph, [site]), random_tensor(32, 3, 8, 8, seed=7)
    keep, wanted = {site.name: without(4, 1)}, run(graph.module, x)
    before = (run(masked(prepared, keep), x) - wanted).square().mean()
    repair_(prepared, keep, Examples(x, torch.zeros(32).long()))
    assert (run(masked(prepared, keep), x) - wanted).square().mean() < before / 2
    assert_same(run(compact(prepared, keep).module, x), run(masked(prepared, keep), x))


def test_repair_says_that_it_skips_what_lies_behind_a_norm() -> None:
    graph = graph_of("transformer")
    consumers = find_consumers(graph, next(s for s in find_sites(graph, "stream") if "stream" in s.name))
    assert not consumers.layers
    assert "blocks.0.norm1 takes statistics over the channels, which change with every cut" in consumers.others.values()


@pytest.mark.parametrize(
    ("sizes", "words"), [([4], r"normalized_shape=\[4\]"), ([5, 4, 4], r"wanted \[5, 4, 4\] along its last")]
)
def test_a_norm_that_nothing_reads_refuses_other_images_masked_too(sizes: list[int], words: str) -> None:
    """The masked network takes the sizes that the model takes: `verify` tries others on it."""

    def body(net: Net, x: Tensor) -> Tensor:
        x = net.a(x)
        net.norm(x)  # over the width of the image, or all of it; not read
        return net.out(x.flatten(2).mean(2))

    x = random_tensor(3, 2, 4, 4)
    graph = trace(randomise_(Net(body, a=nn.Conv2d(2, 5, 1), norm=nn.LayerNorm(sizes), out=nn.Linear(5, 2))), x)
    masks = {"a": torch.tensor([True, False, True, True, False])}
    assert verify(graph, masks).conclusive
    with pytest.raises(RuntimeError, match=words):
        masked(graph, masks)(random_tensor(3, 2, 6, 6))


class NormAndActivation(nn.GroupNorm):
    """As in transformers' BiT: the activation is a child of the norm."""

    def __init__(self, groups: int, channels: int) -> None:
        super().__init__(groups, channels)
        self.activation = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps))


def test_a_norm_that_holds_an_activation() -> None:
    x = random_tensor(2, 3, 4, 4)
    layers = {"a": conv(3, 8), "norm": NormAndActivation(2, 8), "out": conv(8, 2)}
    graph = trace(randomise_(Net(lambda net, x: net.out(net.norm(net.a(x))), **layers)), x)
    sites = find_sites(graph, "stream")
    assert [site.name for site in sites] == ["a"]
    assert_compact_is_masked(graph, random_keep(list(sites), 0), (x[:1],))
    split_at(graph, sites[0])


# ---- streams that begin with a recurrent module ---------------------------------------------------------------------------


def after_recurrent(kind: Callable[..., nn.Module], options: dict[str, Any], norm: bool, state: bool) -> Net:
    def body(net: Net, x: Tensor) -> Tensor:
        y, states = net.r(x)
        z = net.out(y + net.g(F.relu(net.f(net.n(y)))))
        last = states[0] if isinstance(states, tuple) else states
        return (z if options.get("batch_first") else z.transpose(0, 1)).mean(1) + (net.last(last[-1]) if state else 0)

    width = 6 * (1 + options.get("bidirectional", False))
    layers = {"n": nn.LayerNorm(width) if norm else nn.Identity(), "f": nn.Linear(width, 8), "g": nn.Linear(8, width)}
    net = Net(body, r=kind(4, 6, **options), **layers, out=nn.Linear(width, 3), last=nn.Linear(6, 3))
    randomise_(net)
    return net


RECURRENT_NETS = {
    f"{kind.__name__}, norm={norm}, state={state}, {options}": (kind, options, norm, state)
    for kind, options, norm, state in [
        (nn.LSTM, {"batch_first": True}, True, False),
        (nn.GRU, {"batch_first": True}, False, True),
        (nn.RNN, {"num_layers": 2}, False, False),
        (nn.LSTM, {"batch_first": True, "num_layers": 2}, False, True),
    ]
}


@pytest.mark.parametrize("name", RECURRENT_NETS)
def test_a_stream_that_begins_with_a_recurrent_module_takes_its_units(name: str) -> None:
    """A unit that goes is gone from the recurrence, too: as in the module with zeros in all weights that read it."""
    net, x = after_recurrent(*RECURRENT_NETS[name]), random_tensor(2, 5, 4)
    graph = trace(net, x)
    sites = find_sites(graph, "stream")
    stream = next(site for site in sites if site.name == "stream")
    smaller = assert_compact_is_masked(graph, {"stream": without(6, 1, 4)})
    assert (smaller.module.r.hidden_size, smaller.module.out.in_features) == (4, 4)
    if not isinstance(net.n, nn.LayerNorm):  # whose statistics would count the zeros
        zeroed = copy.deepcopy(net)
        with torch.no_grad():
            for parameter, weight in zeroed.named_parameters():
                if parameter.split(".")[-1] in ("weight_hh_l0", "weight_hh_l1", "weight_ih_l1") or parameter in READERS:
                    weight[:, [1, 4]] = 0
        assert_same(run(smaller.module, x), run(zeroed, x))
    alone = [site.name for site in sites if site.unit == "units"]
    if alone:
        assert_compact_is_masked(graph, {"r": without(6, 0), stream: without(6, 1, 4)})
        fewer = assert_compact_is_masked(graph, {"r": without(6, 0)})
        assert_compact_is_masked(fewer, {"stream": without(next(s for s in find_sites(fewer, "stream")).channels, 1)})
    sizes = {node.name: size[:2] for node, size in Sizing(graph, sites).sizes({"stream": 4}).items()}
    assert (sizes["f"], sizes["g"], sizes["out"]) == ((4, 8), (8, 4), (4, 3))  # what time is predicted from
    again = find_sites(smaller, "stream")
    assert again[[site.name for site in again].index("stream")].original == (0, 2, 3, 5)
    assert_compact_is_masked(smaller, {"stream": without(4, 0)})


READERS = ("f.weight", "out.weight", "last.weight")


@pytest.mark.parametrize("name", [name for name in RECURRENT_NETS if "batch_first" in name])
def test_units_of_a_stream_are_measured_and_have_slopes(name: str) -> None:
    x = random_tensor(3, 5, 4)
    graph, examples = trace(after_recurrent(*RECURRENT_NETS[name]), x), Examples(x, torch.tensor([0, 1, 2]))
    site = next(site for site in find_sites(graph, "stream") if site.name == "stream")
    masks = torch.stack([without(6, 0), without(6, 1, 2)])
    wanted = [cross_entropy(run(masked(graph, {site: mask}), x), examples.targets).mean() for mask in masks]
    network = split_for(graph, site, examples, batch=2)
    assert_same(network.measure(masks, [cross_entropy])[:, 0], torch.stack(wanted), atol=1e-11)
    everywhere = with_factors(graph, find_sites(graph, "stream"))
    factors = [masks[:1].double() if s == site else torch.ones(1, s.channels).double() for s in find_sites(graph, "stream")]
    assert_same(run(everywhere, x, *factors), run(masked(graph, {site: masks[0]}), x))


def test_outputs_of_two_directions_are_no_stream() -> None:
    net = after_recurrent(nn.LSTM, {"batch_first": True, "bidirectional": True}, False, False)
    graph = trace(net, random_tensor(2, 5, 4))
    sites = find_sites(graph, "stream")
    assert {site.name: site.unit for site in sites} == {"r": "units", "f": "filters", "g": "filters"}
    assert_compact_is_masked(graph, {"r": without(6, 1, 2), "f": without(8, 0)})
