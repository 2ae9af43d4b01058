"""The edges are checked on made-up staircases, the measured layers against what compaction makes of the network."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from nets import Net, seeded
from secateurs import Graph, Site, compact, find_sites, trace
from secateurs.config import Shortcut
from secateurs.errors import InvalidInput, UnknownSite
from secateurs.models import build, example_input
from secateurs.selection.latency_widths import Widths, edges, fast_widths

ROUNDS = 7


def steady(seconds: dict[int, float]) -> dict[int, list[float]]:
    return {width: [time] * ROUNDS for width, time in seconds.items()}


def noisy(seconds: dict[int, float], seed: int, drift: Sequence[float] = (1.0,) * ROUNDS) -> dict[int, list[float]]:
    """Two per cent of noise on every time, and what slows a whole round down."""
    generator = seeded(seed)
    slow = torch.tensor(drift, dtype=torch.float64)
    return {
        width: (time * slow * (1 + 0.02 * torch.randn(ROUNDS, generator=generator, dtype=torch.float64))).tolist()
        for width, time in seconds.items()
    }


def staircase(channels: int, step: int = 8) -> dict[int, float]:
    return {width: float(-(-width // step)) for width in range(1, channels + 1)}


def sites_of(name: str, shortcut: Shortcut = "before") -> tuple[Graph, dict[str, Site]]:
    graph = trace(build(name), example_input(name))
    return graph, {site.name: site for site in find_sites(graph, shortcut)}


def measured_fast(graph: Graph, site: Site, **options: Any) -> Widths:
    """As in earnest, but with work of a tenth of a millisecond in every round."""
    return fast_widths(graph, site, repeats=5, shortest=1e-4, **options)


@contextmanager
def watched_layers() -> Iterator[list[tuple[nn.Module, tuple[int, ...]]]]:
    """Every convolution and linear layer that runs in the block, with the shape of its input."""
    seen: list[tuple[nn.Module, tuple[int, ...]]] = []

    def note(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if isinstance(layer, nn.Linear | nn.modules.conv._ConvNd):
            seen.append((layer, tuple(inputs[0].shape)))

    handle = register_module_forward_pre_hook(note)
    try:
        yield seen
    finally:
        handle.remove()


def test_steps_of_eight_have_their_edges_at_the_multiples_of_eight() -> None:
    assert edges(steady(staircase(64))) == (56, 48, 40, 32, 24, 16, 8)
    assert edges(steady(staircase(61))) == (56, 48, 40, 32, 24, 16, 8)


def test_a_wider_width_that_is_as_fast_keeps_a_slower_one_out() -> None:
    seconds = {8: 8.0, 7: 9.0, 6: 6.0, 5: 7.0, 4: 6.0, 3: 3.0, 2: 10.0, 1: 2.9}
    assert edges(steady(seconds)) == (6, 3, 1)


def test_where_no_width_is_faster_than_the_full_one_there_is_no_edge() -> None:
    assert edges(steady(dict.fromkeys(range(1, 33), 1.0))) == ()
    assert edges(steady({3: 1.0, 2: 2.0, 1: 1.5})) == ()
    assert edges(steady({1: 1.0})) == ()


def test_noise_makes_no_edges_on_a_flat_staircase() -> None:
    found = [edges(noisy(dict.fromkeys(range(1, 49), 1.0), seed)) for seed in range(15)]
    assert sum(map(bool, found)) <= 1


def test_steps_are_found_under_noise_and_drift() -> None:
    drift = (1.0, 3.0, 1.2, 1.0, 5.0, 1.5, 1.0)
    found = [edges(noisy(staircase(32), seed, drift)) for seed in range(10)]
    assert sum(widths == (24, 16, 8) for widths in found) >= 8
    assert all({-(-width // 8) for width in widths} >= {1, 2, 3} for widths in found)  # no step is missed


def test_a_width_that_was_lucky_in_half_of_its_rounds_is_no_edge() -> None:
    seconds = noisy(dict.fromkeys(range(1, 17), 1.0), seed=0)
    seconds[9] = [0.5, 1.0, 0.5, 1.0, 0.5, 1.0, 0.5]
    assert edges(seconds) == ()


def test_a_larger_margin_asks_for_larger_gains() -> None:
    seconds = noisy({4: 1.0, 3: 0.95, 2: 0.5, 1: 0.48}, seed=3)
    assert edges(seconds, margin=0.0) == (3, 2, 1)
    assert edges(seconds, margin=10.0) == (2,)
    assert edges(seconds, margin=1000.0) == ()


times = st.lists(st.floats(1e-6, 10.0), min_size=5, max_size=5)


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(st.integers(1, 100), times, min_size=1, max_size=12), st.floats(0, 5))
def test_medians_of_edges_strictly_fall_below_the_full_widths(seconds: dict[int, list[float]], margin: float) -> None:
    found = edges(seconds, margin)
    medians = [sorted(seconds[width])[2] for width in (max(seconds), *found)]
    assert all(wide > narrow for wide, narrow in pairwise(medians))
    assert list(found) == sorted(set(found) & set(seconds), reverse=True)


@pytest.mark.parametrize(
    ("name", "site", "shortcut", "layers"),
    [
        ("mlp", "layers.4", "before", ["layers.4", "output"]),
        ("resnet8", "conv1", "before", ["conv1", "layer1.0.conv1"]),
        ("resnet8-b", "layer1.0.conv2", "before", ["layer1.0.conv2"]),
        ("resnet8-b", "layer1.0.add", "after", ["layer1.0.conv2", "layer2.0.conv1", "layer2.0.shortcut.0"]),
        ("unet-small", "down2.3", "before", ["down2.3", "bottom.0", "merge2.0"]),
        ("unet-small", "up1", "before", ["up1", "merge1.0"]),
        (
            "mobilenet-small",
            "blocks.0.expand",
            "before",
            [f"blocks.0.{part}" for part in ("expand", "depthwise", "excite.reduce", "excite.expand", "project")],
        ),
        ("resnext-small", "blocks.0.conv1", "before", ["blocks.0.conv1", "blocks.0.conv2"]),
    ],
)
def test_layers_are_timed_as_compaction_would_leave_them(name: str, site: str, shortcut: Shortcut, layers: list[str]) -> None:
    graph, sites = sites_of(name, shortcut)
    place = sites[site]
    with watched_layers() as seen:
        found = measured_fast(graph, place, batch=3)
    assert list(found.seconds) == list(range(place.channels, 0, -1))
    assert all(time > 0 for time in found.seconds.values())
    assert all(1 <= width < place.channels for width in found.widths)
    medians = [found.seconds[width] for width in (place.channels, *found.widths)]
    assert medians == sorted(set(medians), reverse=True)
    for width in (1, place.channels // 2 + 1):
        spread = torch.isin(torch.arange(place.channels), torch.arange(width) * place.channels // width)
        smaller = compact(graph, {site: spread})
        first = len(layers) * (place.channels - width)  # a first round runs all widths, the widest first
        timed = [size_of(layer) for layer, _ in seen[first : first + len(layers)]]
        assert timed == [size_of(smaller.module.get_submodule(layer)) for layer in layers]


def size_of(layer: nn.Module) -> tuple[int, int, int]:
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features, 1
    assert isinstance(layer, nn.modules.conv._ConvNd)
    return layer.in_channels, layer.out_channels, layer.groups


def test_inputs_have_the_shapes_of_the_network_and_the_given_batch() -> None:
    net = Net(
        lambda m, x: m.out(torch.flatten(torch.relu(m.conv(x)), 1)), conv=nn.Conv2d(2, 3, 3, stride=2), out=nn.Linear(27, 4)
    )
    graph = trace(net, torch.randn(5, 2, 7, 7))
    with watched_layers() as seen:
        measured_fast(graph, find_sites(graph)[0], batch=10)
    assert {(type(layer).__name__, shape) for layer, shape in seen} == {
        ("Conv2d", (10, 2, 7, 7)),
        ("Linear", (10, 27)),
        ("Linear", (10, 18)),
        ("Linear", (10, 9)),
    }


def test_wide_sites_are_measured_on_a_grid_with_neighbours() -> None:
    graph, sites = sites_of("mlp")
    site = sites["layers.1"]
    assert site.channels == 64
    fours = {4 * k + by for k in range(1, 17) for by in (-1, 0, 1)} - {65}
    assert set(measured_fast(graph, site, batch=1).seconds) == fours


def test_a_tenth_of_the_filters_is_faster_than_all() -> None:
    net = nn.Sequential(nn.Conv2d(16, 40, 3, padding=1), nn.ReLU(), nn.Conv2d(40, 16, 3, padding=1))
    graph = trace(net, torch.randn(1, 16, 16, 16))
    found = measured_fast(graph, find_sites(graph)[0], batch=4)
    assert found.seconds[4] < found.seconds[40]


def test_a_site_can_be_measured_again_after_a_cut() -> None:
    graph, sites = sites_of("resnet8")
    old = sites["layer1.0.conv2"]
    smaller = compact(graph, {old.name: torch.arange(16) < 5, "conv1": torch.arange(16) > 8})
    now = {site.name: site for site in find_sites(smaller)}[old.name]
    assert list(measured_fast(smaller, now, batch=2).seconds) == [5, 4, 3, 2, 1]
    with pytest.raises(UnknownSite, match=r"'layer1.0.conv2' of 16 channels .* look it up again"):
        fast_widths(smaller, old, batch=2)


def test_the_network_and_the_random_state_stay_as_they_are() -> None:
    graph, sites = sites_of("unet-small")
    before = copy.deepcopy(graph.module)
    parts = [*graph.module.modules()]
    state = torch.get_rng_state()
    measured_fast(graph, sites["down1.0"], batch=2)
    assert torch.equal(state, torch.get_rng_state())
    assert [*graph.module.modules()] == parts
    assert graph.module.training == before.training
    for name, tensor in before.state_dict().items():
        now: Tensor = graph.module.state_dict()[name]
        assert torch.equal(now, tensor)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, "batch: got 0"),
        ({"repeats": 4}, "repeats: got 4, wanted at least 5"),
        ({"device": "meta"}, "meta device computes nothing"),
    ],
)
def test_settings_that_measure_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    graph, sites = sites_of("mlp")
    with pytest.raises(InvalidInput, match=message):
        fast_widths(graph, sites["layers.4"], **options)
