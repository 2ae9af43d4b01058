"""Sites with several mask points: behind ops that make something else of a zero, and behind every call of a layer.

Expected values come from hooks on the user's model, from the masked network, and from arithmetic by hand.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nets import Net, assert_compact_is_masked, assert_same, conv, random_keep, random_tensor, run, traced, without
from secateurs import Graph, compact, find_site, find_sites, masked, replay
from secateurs.config import Shortcut
from secateurs.criteria import CRITERIA, CriterionContext
from secateurs.data import Examples
from secateurs.graph.masking import split_at
from secateurs.metrics import cross_entropy
from secateurs.repair import observe, prepare, repair_
from secateurs.scoring.engine import split_for
from secateurs.scoring.evaluator import SiteEvaluator

X = random_tensor(4, 3, 6, 6, seed=3)


def dense(net: Net, x: Tensor) -> Tensor:
    """Concatenation, BatchNorm, activation, convolution: every layer reads all that came before it."""
    found = [net.stem(x)]
    for norm, layer in ((net.n1, net.c1), (net.n2, net.c2)):
        found.append(layer(F.relu(norm(torch.cat(found, 1)))))
    return net.out(F.relu(net.n3(torch.cat(found, 1))).mean((2, 3)))


def dense_parts() -> dict[str, nn.Module]:
    norms = {"n1": nn.BatchNorm2d(6), "n2": nn.BatchNorm2d(10), "n3": nn.BatchNorm2d(14)}
    return {"stem": conv(3, 6), "c1": conv(6, 4), "c2": conv(10, 4), **norms, "out": nn.Linear(14, 3)}


def pre_activation(net: Net, x: Tensor) -> Tensor:
    x = net.stem(x)
    x = x + net.c2(F.relu(net.n2(net.c1(F.relu(net.n1(x))))))
    return net.out(F.relu(net.n3(x)).mean((2, 3)))


def ghost(net: Net, x: Tensor) -> Tensor:
    """Half of the features are cheap filters, with BatchNorm or with a bias, of the other half."""
    y = F.relu(net.c1(x))
    return net.out(torch.cat([y, F.relu(net.n1(net.g1(y))), net.g2(y).tanh()], 1).mean((2, 3)))


def mixer(net: Net, x: Tensor) -> Tensor:
    """Activation before BatchNorm, a depthwise filter with a bias beside the stream."""
    x = net.n1(F.gelu(net.c1(x)))
    x = x + net.n2(F.gelu(net.g1(x)))
    return net.out(net.n3(F.gelu(net.c2(x))).mean((2, 3)))


def mixed_kernels(net: Net, x: Tensor) -> Tensor:
    a, b = F.relu(net.c1(x)).chunk(2, 1)
    return net.out(net.n1(torch.cat([net.g1(a), net.g2(b)], 1)).relu().mean((2, 3)))


def dual_path(net: Net, x: Tensor) -> Tensor:
    """Some channels of two layers are added, the others concatenated: a cut fills terms with zeros that are no site's."""
    y = net.c1(x)
    z = net.c2(F.relu(net.n1(y)))
    joined = torch.cat([y[:, :5] + z[:, :5], torch.cat([y[:, 5:], z[:, 5:]], 1)], 1)
    return net.out(F.relu(net.n2(joined)).mean((2, 3)))


def head_of_two_scales(net: Net, x: Tensor) -> tuple[Tensor, Tensor]:
    fine = F.relu(net.fine(x))
    coarse = F.relu(net.coarse(F.max_pool2d(x, 2)))
    return tuple(net.out(F.relu(net.n2(net.c2(F.relu(net.c1(y)))))) for y in (fine, coarse))  # type: ignore[return-value]


def siamese(net: Net, x: Tensor) -> Tensor:
    a, b = (torch.sigmoid(net.c1(y)).mean((2, 3)) for y in (x, x.flip(3) * 2))
    return net.out((a - b) ** 2)


def one_norm(net: Net, x: Tensor) -> Tensor:
    """Two layers before the calls of one BatchNorm, whose statistics count both."""
    y = F.relu(net.n1(net.c1(x)))
    return net.out(F.relu(net.n1(net.c2(y))).mean((2, 3)) + net.c3(y).mean((2, 3)))


def recurrent(net: Net, x: Tensor) -> Tensor:
    x = F.relu(net.stem(x))
    for _ in range(3):
        x = F.relu(x + net.c2(F.relu(net.n1(net.c1(x)))))
    return net.out(x.mean((2, 3)))


def parts(**made: nn.Module) -> Callable[[], dict[str, nn.Module]]:
    return lambda: copy.deepcopy(made)


NETS: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, nn.Module]], dict[Shortcut, list[str]]]] = {
    "dense": (dense, dense_parts, {"before": ["stem", "c1", "c2"], "after": ["stem", "c1", "c2"]}),
    "pre-activation": (
        pre_activation,
        parts(
            stem=conv(3, 6),
            **{"n1": nn.BatchNorm2d(6), "c1": conv(6, 5), "n2": nn.BatchNorm2d(5), "c2": conv(5, 6), "n3": nn.BatchNorm2d(6)},
            out=nn.Linear(6, 3),
        ),
        {"before": ["stem", "c1", "c2"], "after": ["stem", "c1", "add"]},
    ),
    "ghost": (
        ghost,
        parts(
            c1=conv(3, 6),
            g1=conv(6, 6, groups=6, bias=False),
            n1=nn.BatchNorm2d(6),
            g2=conv(6, 6, groups=6),
            out=nn.Linear(18, 3),
        ),
        {"before": ["c1", "g1", "g2"], "after": ["c1", "g1", "g2"]},
    ),
    "mixer": (
        mixer,
        parts(
            **{"c1": conv(3, 6), "g1": conv(6, 6, groups=6), "c2": conv(6, 5)},
            **{"n1": nn.BatchNorm2d(6), "n2": nn.BatchNorm2d(6), "n3": nn.BatchNorm2d(5), "out": nn.Linear(5, 3)},
        ),
        {"before": ["c1", "g1", "c2"], "after": ["c1", "g1", "c2"]},
    ),
    "kernels of several sizes": (
        mixed_kernels,
        parts(
            c1=conv(3, 6, 1),
            g1=conv(3, 3, groups=3, bias=False),
            g2=conv(3, 3, 5, groups=3, bias=False),
            n1=nn.BatchNorm2d(6),
            out=nn.Linear(6, 3),
        ),
        {"before": ["c1"], "after": ["c1"]},
    ),
    "dual path": (
        dual_path,
        parts(c1=conv(3, 8), n1=nn.BatchNorm2d(8), c2=conv(8, 7), n2=nn.BatchNorm2d(10), out=nn.Linear(10, 3)),
        {"before": ["c1", "c2"], "after": ["c1", "c2"]},
    ),
    "a head of two scales": (
        head_of_two_scales,
        parts(fine=conv(3, 6), coarse=conv(3, 6), c1=conv(6, 5), c2=conv(5, 4, groups=1), n2=nn.BatchNorm2d(4), out=conv(4, 2)),
        {"before": ["fine", "coarse", "c1", "c2"], "after": ["fine", "coarse", "c1", "c2"]},
    ),
    "siamese": (siamese, parts(c1=conv(3, 6), out=nn.Linear(6, 3)), {"before": ["c1"], "after": ["c1"]}),
    "one norm": (
        one_norm,
        parts(c1=conv(3, 6), n1=nn.BatchNorm2d(6), c2=conv(6, 6), c3=conv(6, 6), out=nn.Linear(6, 3)),
        {"before": ["c1", "c3"], "after": ["c1", "add"]},
    ),
    "recurrent": (
        recurrent,
        parts(stem=conv(3, 6), c1=conv(6, 5), n1=nn.BatchNorm2d(5), c2=conv(5, 6), out=nn.Linear(6, 3)),
        {"before": ["stem", "c1", "c2"], "after": ["stem", "c1", "add"]},
    ),
}
CASES = [(name, shortcut) for name in NETS for shortcut in ("before", "after")]


def graph_of(name: str) -> Graph:
    body, made, _ = NETS[name]
    return traced(Net(body, **made()), X)


@pytest.mark.parametrize(("name", "shortcut"), CASES)
def test_compact_equals_masked_in_both_modes_and_in_two_steps(name: str, shortcut: Shortcut) -> None:
    graph = graph_of(name)
    sites = find_sites(graph, shortcut)
    assert [site.name for site in sites] == NETS[name][2][shortcut]
    assert len({layer for site in sites for layer in site.layers}) >= len(sites)
    keep = random_keep(sites, 0, 0.4)
    smaller = assert_compact_is_masked(graph, keep, (X[:3],))
    networks = copy.deepcopy(smaller.module).train(), masked(graph, keep).train()
    assert_same(*(run(network, X[:3]) for network in networks), atol=1e-11)
    statistics = [{n: b for n, b in network.named_buffers() if "running" in n} for network in networks]
    for path, ours in statistics[0].items():
        kept = smaller.kept.get(path)
        assert_same(ours, statistics[1][path] if kept is None else statistics[1][path][kept[0]])
    again = find_sites(smaller, shortcut)
    assert [s.name for s in again] == [s.name for s in sites]
    assert all(keep[s.name][list(s.original)].all() for s in again)
    second = random_keep(again, 5, 0.3)
    twice = assert_compact_is_masked(smaller, second, (X[:3],))
    assert_same(run(replay(graph, twice.plan).module, X), run(twice.module, X))


@pytest.mark.parametrize("name", NETS)
def test_masks_at_every_place_are_measured(name: str) -> None:
    """What the engine measures under a mask is the masked network's loss; its slopes are those of the masks' factors."""
    graph = graph_of(name)
    if name == "a head of two scales":
        return  # two outputs of two sizes
    examples = Examples(X, torch.tensor([0, 1, 2, 0]))
    for site in find_sites(graph):
        masks = torch.stack([without(site.channels, 0), without(site.channels, 1, 2)])
        network = split_for(graph, site, examples, batch=3)
        wanted = [cross_entropy(run(masked(graph, {site: mask}), X), examples.targets).mean() for mask in masks]
        assert_same(network.measure(masks, [cross_entropy])[:, 0], torch.stack(wanted), atol=1e-11)
        (found,) = network.slopes([masks[[0, 1, 0, 1]]], cross_entropy)
        smooth = masks[0] if name == "recurrent" else slice(None)  # a ReLU of a masked stream has no slope to one side
        assert_same(found[0, 1:][smooth], slopes_by_differences(graph, site, masks[0], examples)[smooth], atol=1e-6)


def slopes_by_differences(graph: Graph, site: Any, mask: Tensor, examples: Examples) -> Tensor:
    """The slopes of the first example's loss along the factors of the site's channels, by central differences."""
    split, step, slopes = split_at(graph, site), 1e-6, []
    activations, *carried = run(split.prefix, examples.inputs[:1])
    for channel in range(site.channels):
        losses = []
        for sign in (1, -1):
            factors = mask.double()
            factors[channel] += sign * step
            if split.several:
                outputs = run(split.suffix, activations, *carried, factors[None])
            else:
                shape = [1] * activations.dim()
                shape[split.axis] = -1
                outputs = run(split.suffix, activations * factors.view(shape), *carried)
            losses.append(cross_entropy(outputs, examples.targets[:1])[0])
        slopes.append((losses[0] - losses[1]) / (2 * step))
    return torch.stack(slopes)


def test_a_channel_of_a_dense_block_is_zero_wherever_it_is_read() -> None:
    """Zeroed by hooks behind each BatchNorm that reads it: channel 1 of c1 is channel 7 of both concatenations."""
    graph = graph_of("dense")
    site = find_site(graph, "c1")
    assert [point.node for point in site.points] == ["c1", "relu_1", "relu_2"]
    assert [(point.channels[1], point.sources[1]) for point in site.points] == [(1, 1), (7, 1), (7, 1)]
    hooked = copy.deepcopy(graph.module)
    for name, width in (("n2", 10), ("n3", 14)):
        kept = without(width, 7).view(1, -1, 1, 1)
        hooked.get_submodule(name).register_forward_hook(lambda m, i, o, kept=kept: o * kept)
    smaller = compact(graph, {"c1": without(4, 1)})
    assert_same(run(smaller.module, X), run(hooked, X))
    assert smaller.module.c1.out_channels == 3
    assert (smaller.module.n2.num_features, smaller.module.c2.in_channels) == (9, 9)
    assert (smaller.module.n3.num_features, smaller.module.out.in_features) == (13, 13)


def test_one_site_over_all_calls_of_a_layer() -> None:
    graph = graph_of("a head of two scales")
    site = find_site(graph, "c1")
    assert len(site.points) == 2
    assert site.layers == ("c1",)
    hooked = copy.deepcopy(graph.module)
    kept = without(5, 0, 3).view(1, -1, 1, 1)
    hooked.c1.register_forward_hook(lambda m, i, o: o * kept)  # a ReLU keeps its zeros, at both scales
    smaller = compact(graph, {"c1": kept.flatten()})
    for got, wanted in zip(run(smaller.module, X), run(hooked, X), strict=True):
        assert_same(got, wanted)
    assert (smaller.module.c1.out_channels, smaller.module.c2.in_channels) == (3, 3)
    # a filter that only one of the two inputs lost is still read from the other
    one = compact(graph, {"fine": without(6, 2)})
    assert (one.module.fine.out_channels, one.module.c1.in_channels) == (5, 6)
    both = compact(graph, {"fine": without(6, 2), "coarse": without(6, 2, 4)})
    assert both.module.c1.in_channels == 5


def test_a_layer_whose_second_call_is_the_output_has_no_site() -> None:
    graph = traced(Net(lambda net, x: net.c(F.relu(net.c(x))), c=conv(3, 3)), X)
    (refused,) = find_sites(graph).unprunable
    assert (refused.reason, refused.macs) == ("it is the network's output (it is called 2 times)", 2 * 81 * 36)


def test_criteria_and_repair_count_every_place() -> None:
    graph = graph_of("dense")
    examples = Examples(X, torch.tensor([0, 1, 2, 0]))
    site = find_site(graph, "c1")
    context = CriterionContext(SiteEvaluator(graph, site), examples.take(torch.tensor([0])))
    wanted = slopes_by_differences(graph, site, torch.ones(4).bool(), examples).abs()
    assert_same(CRITERIA["taylor"](context), wanted, atol=1e-6)
    keep = {"c1": without(4, 1)}
    fits = observe(graph, site, examples)
    assert {fit.name for fit in fits.layers} == {"c2", "out"}
    repaired = prepare(graph, ["c1"])
    repair_(repaired, keep, examples)
    wanted = run(graph.module, X)
    errors = [float((run(compact(g, keep).module, X) - wanted).square().sum()) for g in (graph, repaired)]
    assert errors[1] < errors[0] / 2
