"""Targets in time, against an engine whose times are known: steps of layers, work between them, noise, and interruptions."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count, product
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from nets import assert_compact_is_masked, randomise_, seeded
from secateurs import Graph, Pruner, Recipe, compact, cost, find_sites, resume, trace
from secateurs.cli import execute
from secateurs.errors import InvalidInput, RecipeError, RunError
from secateurs.graph.layers import Align, SumInto
from secateurs.graph.structure import activations
from secateurs.models import build, example_input
from secateurs.pruning.context import PruningContext
from secateurs.pruning.results import ChosenAllocation, ComparedFrontiers, SiteCurve, SiteWidths, TimeTable
from secateurs.speed import tables
from secateurs.speed.engines import MeasureEngine, TorchEngine
from secateurs.speed.sizes import Sizing, spread
from secateurs.speed.tables import LatencyModel, TableFile, fast_widths
from secateurs.speed.timing import CLOCK, Clock, Load, in_rounds
from torture.runs import few_digits

NAMES = count()
Weighted = nn.Linear | nn.modules.conv._ConvNd


def size(layer: nn.Module) -> tuple[int, int, int]:
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features, 1
    assert isinstance(layer, nn.modules.conv._ConvNd)
    return layer.in_channels, layer.out_channels, layer.groups


class FakeEngine:
    """A layer takes a microsecond for each pair of begun blocks of inputs and of filters; a network what its layers take,
    times `between`, and `more` microseconds. `noise` is relative; the run of the layer or network that was loaded as number
    `stops` is interrupted."""

    batch, threads, runs_layers = 1, None, True
    clock: Clock = CLOCK
    align = 0.0  # microseconds of each alignment of channels

    def __init__(
        self, block: int = 8, between: float = 1.0, more: float = 0.0, noise: float = 0.0, stops: tuple[str, int] | None = None
    ) -> None:
        self.block, self.between, self.more, self.noise, self.stops = block, between, more, noise, stops
        self.name = f"fake {next(NAMES)}"
        self.loaded: Counter[str] = Counter()
        self.generator = seeded(0)

    def true(self, layer: nn.Module) -> float:
        inputs, filters, groups = size(layer)
        return 1e-6 * (-(-inputs // self.block)) * (-(-filters // self.block)) / groups

    def whole(self, network: Graph | nn.Module) -> float:
        module = network if isinstance(network, nn.Module) else network.module
        layers = [layer for layer in module.modules() if isinstance(layer, Weighted)]
        aligning = sum(isinstance(layer, Align | SumInto) for layer in module.modules())
        return self.between * sum(map(self.true, layers)) + 1e-6 * (self.more + self.align * aligning)

    def _timer(self, kind: str, seconds: float) -> Callable[[], float]:
        self.loaded[kind] += 1
        stops = self.stops == (kind, self.loaded[kind])

        def run() -> float:
            if stops:
                raise KeyboardInterrupt
            return seconds * (1 + self.noise * float(torch.randn(1, generator=self.generator)))

        return run

    def layer(self, layer: nn.Module, shape: Sequence[int], times: int) -> Callable[[], float]:
        return self._timer("layer", times * self.true(layer))

    def network(self, graph: Graph) -> Load:
        return lambda: self._timer("network", self.whole(graph))


def small_net(widths: tuple[int, ...] = (24, 32, 16)) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after in zip((1, *widths), widths, strict=False):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10)).eval()


def recipe(**changes: Any) -> Recipe:
    fixed = {"max_drop": 1.0, "confidence": 0.0, "criterion": "l1", "allocation": "global", "target_latency": 0.5}
    return Recipe.fast(**{**fixed, "round_to": 1, "shortcut": "before", **changes})


@pytest.fixture
def with_engine(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeEngine], FakeEngine]:
    """Gives runs an engine in place of the one that their recipe names."""

    def give(engine: FakeEngine) -> FakeEngine:
        monkeypatch.setattr("secateurs.api.engine_for", lambda *given: engine)
        return engine

    return give


# ---- tables ------------------------------------------------------------------------------------------------------------


def model_of(graph: Graph, engine: FakeEngine, path: Path, multiple: int = 1) -> LatencyModel:
    model = LatencyModel(Sizing(graph, find_sites(graph)), engine.batch)
    widths = {s.name: tables.candidates(s.channels, multiple) for s in find_sites(graph)}
    model.measure(engine, model.wanted(widths), TableFile(engine, path))
    return model


def spread_masks(model: LatencyModel, widths: Mapping[str, int]) -> dict[Any, Tensor]:
    """Masks that keep so many filters of each site."""
    return {name: spread(width, model.sites[name].channels) for name, width in widths.items()}


@pytest.mark.parametrize("block", [4, 8, 12])
def test_the_widths_found_are_the_edges_of_the_engines_steps(tmp_path: Path, block: int) -> None:
    graph = trace(small_net(), torch.randn(2, 1, 8, 8))
    model = model_of(graph, FakeEngine(block), tmp_path / "times.json")
    for site in find_sites(graph):
        widths, seconds = fast_widths(model, site, 1)
        assert widths == tuple(w for w in range(site.channels - 1, 0, -1) if w % block == 0)
        assert list(seconds) == list(range(site.channels, 0, -1))


def test_an_engine_without_steps_leaves_all_widths_and_a_flat_one_none(tmp_path: Path) -> None:
    graph = trace(small_net((12,)), torch.randn(2, 1, 8, 8))
    (site,) = find_sites(graph)
    assert fast_widths(model_of(graph, FakeEngine(1), tmp_path / "a"), site, 1)[0] == tuple(range(11, 0, -1))
    assert fast_widths(model_of(graph, FakeEngine(64), tmp_path / "b"), site, 1)[0] == ()


@pytest.mark.parametrize("shortcut", ["before", "after", "stream"])
@pytest.mark.parametrize("name", ["mlp", "resnet8", "resnet8-b", "unet-small", "mobilenet-small", "resnext-small"])
def test_layers_have_the_sizes_that_compaction_leaves_them(name: str, shortcut: Any) -> None:
    graph = trace(build(name), example_input(name))
    sites = find_sites(graph, shortcut)
    sizing = Sizing(graph, sites)

    def differing(widths: Mapping[str, int]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        masks: dict[Any, Tensor] = {name: spread(width, sizing.sites[name].channels) for name, width in widths.items()}
        smaller = dict(compact(graph, masks, verify=False).module.named_modules())
        predicted, found = sizing.sizes(widths), []
        for node, layer in sizing.full.items():
            left = smaller.get(str(node.target))
            found.append((predicted.get(node, layer.size), (0, 0, 0) if left is None else size(left)))
        return [(one, other) for one, other in found if one != other]

    for site in sites:
        for width in {1, site.channels // 2, site.channels - 1} - {0}:
            assert differing({site.name: width}) == []
    # a channel that all terms of a sum lose goes behind it, which no cut alone tells: no less is predicted than is left
    together = differing({site.name: -(-site.channels // 2) for site in sites})
    assert all(one >= other for predicted, left in together for one, other in zip(predicted, left, strict=True))
    assert not together or shortcut == "before"


class Written(fx.Interpreter):
    """Runs a network and keeps how many numbers every node writes, by name."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph.module)
        self.numbers: dict[str, int] = {}
        self.run(*graph.example)

    def run_node(self, n: fx.Node) -> Any:
        found = super().run_node(n)
        if isinstance(found, Tensor):
            self.numbers[n.name] = found.numel()
        return found


@pytest.mark.parametrize("name", ["mlp", "resnet8", "densenet-small", "mobilenet-small"])
def test_ops_between_the_layers_write_what_compaction_leaves_them(name: str) -> None:
    graph = trace(build(name), example_input(name))
    sizing, whole = Sizing(graph, find_sites(graph)), Written(graph).numbers
    between = [node.name for node in sizing._between]
    for site in sizing.sites.values():
        for width in (site.channels // 2, 1):
            left = Written(compact(graph, {site.name: spread(width, site.channels)})).numbers
            found = sizing.left_between({site.name: width})
            assert found.work == pytest.approx(sum(left[each] for each in between) / sum(whole[each] for each in between))
            assert found.calls == 1


def test_a_folded_branch_has_no_calls_left() -> None:
    graph = trace(build("densenet-small"), example_input("densenet-small"))
    sizing = Sizing(graph, find_sites(graph))
    folded = compact(graph, {"block2.2.conv1": spread(0, 16)})
    left = {node.name for node in folded.module.graph.nodes} & {node.name for node in sizing._between}
    assert len(left) < len(sizing._between)
    assert sizing.left_between({"block2.2.conv1": 0}).calls == pytest.approx(len(left) / len(sizing._between))


def test_layers_of_attention_have_the_sizes_that_compaction_leaves_them() -> None:
    """Without heads, features within heads, and neurons at once."""
    graph = trace(nn.TransformerEncoderLayer(12, 3, 20, batch_first=True).eval(), torch.randn(2, 5, 12))
    sizing, heads = Sizing(graph, find_sites(graph, head_widths=True)), "self_attn.in_proj"
    widths = {heads: 2, f"{heads}.query_key": 3, f"{heads}.value": 2, "linear1": 14}
    found = {str(node.target): size for node, size in sizing.sizes(widths).items()}
    assert (found[heads], found["self_attn.out_proj"]) == ((12, 2 * (3 + 3 + 2), 1), (2 * 2, 12, 1))
    masks: dict[Any, Tensor] = {name: spread(width, sizing.sites[name].channels) for name, width in widths.items()}
    smaller = compact(graph, masks).module
    assert smaller.get_submodule(heads).out_features == found[heads][1]


def test_inputs_have_the_shapes_of_the_network_for_the_engines_batch(tmp_path: Path) -> None:
    shapes = []

    class Noting(FakeEngine):
        batch = 10

        def layer(self, layer: nn.Module, shape: Sequence[int], times: int) -> Callable[[], float]:
            shapes.append((type(layer).__name__, tuple(shape)))
            assert layer(torch.zeros(*shape)).shape[0] == 10
            return super().layer(layer, shape, times)

    net = nn.Sequential(nn.Conv2d(2, 3, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(27, 4))
    graph = trace(net, torch.randn(5, 2, 7, 7))
    state = torch.get_rng_state()
    model_of(graph, Noting(1), tmp_path / "times.json")
    assert torch.equal(state, torch.get_rng_state())
    assert set(shapes) == {("Conv2d", (10, 2, 7, 7)), *(("Linear", (10, width)) for width in (27, 18, 9))}


def test_coupled_widths_are_predicted_as_products_until_they_are_measured(tmp_path: Path) -> None:
    graph, engine = trace(small_net(), torch.randn(2, 1, 8, 8)), FakeEngine(8)
    model = model_of(graph, engine, tmp_path / "times.json")
    widths = dict(zip(model.sites, (16, 8, 8), strict=True))
    true = engine.whole(compact(graph, spread_masks(model, widths)))
    assert model.seconds(widths) == pytest.approx(true)  # of these steps the product is exact
    model.measure(engine, model.unmeasured(widths), TableFile(engine, tmp_path / "times.json"))
    assert model.unmeasured(widths) == {}
    assert model.seconds(widths) == pytest.approx(true)


def test_layers_timed_in_a_busier_hour_are_brought_to_the_times_before(tmp_path: Path) -> None:
    """Three times as slow when more sizes are timed: nothing that was predicted before changes, and the new sizes fit."""

    class Busy(FakeEngine):
        slower = 1.0

        def true(self, layer: nn.Module) -> float:
            return self.slower * super().true(layer)

    graph, engine = trace(small_net(), torch.randn(2, 1, 8, 8)), Busy(8)
    model = model_of(graph, engine, tmp_path / "times.json")
    widths = dict(zip(model.sites, (16, 8, 8), strict=True))
    before, true = model.seconds({}), engine.whole(compact(graph, spread_masks(model, widths)))
    engine.slower = 3.0
    model.measure(engine, model.unmeasured(widths), TableFile(engine, tmp_path / "times.json"))
    assert model.seconds({}) == pytest.approx(before)
    assert model.seconds(widths) == pytest.approx(true)


def test_a_layer_of_a_known_shape_is_not_timed_again(tmp_path: Path) -> None:
    graph, engine = trace(small_net(), torch.randn(2, 1, 8, 8)), FakeEngine(8)
    first = model_of(graph, engine, tmp_path / "times.json")
    engine.loaded.clear()
    again = model_of(graph, engine, tmp_path / "times.json")
    assert not engine.loaded
    assert again.seconds({}) == first.seconds({})


def test_a_file_of_another_machine_is_refused(tmp_path: Path) -> None:
    graph, engine, path = trace(small_net(), torch.randn(2, 1, 8, 8)), FakeEngine(8), tmp_path / "times.json"
    model_of(graph, engine, path)
    stored = json.loads(path.read_text())
    assert set(stored["machine"]) == {"cpu", "flags", "engine", "method", "threads", "torch", "onnxruntime"}
    stored["machine"]["cpu"] = "Elbrus-8S"
    path.write_text(json.dumps(stored))
    with pytest.raises(InvalidInput, match=r"measured on another machine: cpu 'Elbrus-8S' \(here "):
        TableFile(engine, path)
    path.write_text("{}")
    with pytest.raises(InvalidInput, match=r"times.json: damaged .* Delete it"):
        TableFile(engine, path)


@pytest.mark.parametrize(("block", "wanted"), [(1, 1), (8, 8), (16, 16)])
def test_the_preferred_multiple_is_measured_once(tmp_path: Path, block: int, wanted: int) -> None:
    graph, engine = trace(small_net(), torch.randn(2, 1, 8, 8)), FakeEngine(block)
    state = torch.get_rng_state()
    for _ in range(2):
        assert tables.preferred_multiple(engine, graph, TableFile(engine, tmp_path / "times.json")) == wanted
    assert sum(engine.loaded.values()) == 7
    assert torch.equal(state, torch.get_rng_state())


def test_rounds_become_fewer_where_time_is_short() -> None:
    timers = {width: lambda: 0.01 for width in range(10)}
    assert {len(seconds) for seconds in in_rounds(timers).values()} == {7}
    assert {len(seconds) for seconds in in_rounds(timers, at_most=0.55).values()} == {5}
    assert {len(seconds) for seconds in in_rounds(timers, at_most=0.0).values()} == {3}


# ---- runs --------------------------------------------------------------------------------------------------------------


def records(run: Pruner, kind: Any) -> list[Any]:
    return run.journal.of(kind)


def test_a_run_reaches_its_share_of_the_time(with_engine: Callable[[FakeEngine], FakeEngine]) -> None:
    engine = with_engine(FakeEngine(8))
    run = Pruner(small_net(), few_digits(128), recipe=recipe())
    result = run.finish()
    before, after = engine.whole(run.original), engine.whole(result.graph)
    assert after <= 0.5 * before
    assert all(step.kept % 8 == 0 for step in result.steps)
    assert result.latency is not None
    assert result.latency.speedup == pytest.approx(before / after)
    assert result.latency.predicted == pytest.approx(after, rel=0.05)
    assert "of the time remain by prediction, of 50.0% wanted" in result.stopped
    assert str(result).startswith(f"{before / after:.2f}x faster")
    assert {widths.site for widths in records(run, SiteWidths)} == {site.name for site in find_sites(run.original)}


def test_the_choice_is_the_best_of_all(with_engine: Callable[[FakeEngine], FakeEngine]) -> None:
    """Of all combinations of widths that are as fast, none has a smaller sum of measured losses."""
    engine = with_engine(FakeEngine(8))
    run = Pruner(small_net((16, 24)), few_digits(128), recipe=recipe(target_latency=0.6))
    run.finish()
    curves = [found.curve for found in records(run, SiteCurve)]
    (chosen,) = records(run, ChosenAllocation)
    whole, best = engine.whole(run.original), float("inf")
    for picks in product(*(range(len(curve.removed)) for curve in curves)):
        masks: dict[Any, Any] = {}
        for curve, pick in zip(curves, picks, strict=True):
            channels = run.context.price.model.sites[curve.site].channels
            masks[curve.site] = spread(channels - curve.removed[pick], channels)
        if engine.whole(compact(run.original, masks, verify=False)) <= 0.6 * whole:
            best = min(best, sum(c.loss[p] - c.loss[0] for c, p in zip(curves, picks, strict=True)))
    assert chosen.loss == pytest.approx(best)


def test_milliseconds_are_a_target_too(with_engine: Callable[[FakeEngine], FakeEngine]) -> None:
    engine = with_engine(FakeEngine(8))
    whole = engine.whole(trace(small_net(), torch.randn(2, 1, 8, 8)))
    result = Pruner(small_net(), few_digits(128), recipe=recipe(target_latency=None, max_ms=700 * whole)).finish()
    assert engine.whole(result.graph) <= 0.7 * whole
    assert "of 70.0% wanted" in result.stopped


def test_the_allowed_drop_may_bind_first(with_engine: Callable[[FakeEngine], FakeEngine]) -> None:
    with_engine(FakeEngine(8))
    result = Pruner(small_net(), few_digits(128), recipe=recipe(max_drop=0.0, target_latency=0.05)).finish()
    assert "within the allowed drop" in result.stopped


@pytest.mark.parametrize(("between", "more"), [(1.4, 0.0), (1.0, 20.0), (0.8, 6.0)])
def test_work_that_the_tables_do_not_know_is_learnt_from_measured_networks(
    with_engine: Callable[[FakeEngine], FakeEngine], between: float, more: float
) -> None:
    engine = with_engine(FakeEngine(8, between, more))
    share = 0.75 if more == 20.0 else 0.5
    run = Pruner(small_net(), few_digits(128), recipe=recipe(target_latency=share))
    result = run.finish()
    assert engine.whole(result.graph) <= share * engine.whole(run.original) * 1.02
    assert result.latency is not None
    assert result.latency.predicted == pytest.approx(result.latency.pruned, rel=0.05)
    assert "missed" not in result.latency.times()


class Residual(nn.Module):
    """A block of 16 channels whose second convolution is added to its input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.conv1, self.conv2 = (nn.Conv2d(n, 16, 3, padding=1) for n in (1, 16, 16))
        self.out = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.conv(x))
        x = torch.relu(x + self.conv2(torch.relu(self.conv1(x))))
        logits: Tensor = self.out(x.mean((2, 3)))
        return logits


@pytest.mark.parametrize("price", [0.0, 40.0])
def test_cuts_whose_alignment_costs_more_than_they_save_are_not_made(
    with_engine: Callable[[FakeEngine], FakeEngine], price: float
) -> None:
    engine = with_engine(FakeEngine(4))
    engine.align = price
    run = Pruner(Residual().eval(), few_digits(128), recipe=recipe(target_latency=0.7))
    result = run.finish()
    assert engine.whole(result.graph) <= 0.7 * engine.whole(run.original)
    assert result.latency is not None
    assert result.latency.predicted == pytest.approx(result.latency.pruned, rel=0.05)
    alone = Pruner(Residual().eval(), few_digits(128), recipe=recipe(target_latency=0.99, sites=("conv2",)))
    assert (alone.finish().macs.removed == 0) == (price > 0)


@pytest.mark.parametrize(
    ("name", "shortcut"),
    [
        ("resnet8", "before"),
        ("resnet8", "stream"),
        ("resnet8-b", "after"),
        ("resnet8-b", "stream"),
        ("mobilenet-small", "before"),
    ],
)
def test_branches_that_may_go_as_a_whole_are_equal_to_masked_ones(name: str, shortcut: Any) -> None:
    graph = trace(randomise_(build(name)), example_input(name).double())
    context = PruningContext(graph, None, recipe(shortcut=shortcut), None)  # type: ignore[arg-type]
    branches = context.branches([site.name for site in find_sites(graph, shortcut)])
    assert branches
    for branch in branches:
        keep = {branch.site: torch.zeros(branch.channels, dtype=torch.bool)}
        smaller = assert_compact_is_masked(graph, keep, prove=False)
        left = {site.name for site in find_sites(smaller, shortcut)}
        assert left.isdisjoint({branch.site, *branch.gone})
        assert cost(smaller).macs < cost(graph).macs
    assert not PruningContext(graph, None, recipe(branches=False), None).folding_sites  # type: ignore[arg-type]


@pytest.mark.parametrize("repair", ["none", "least-squares"])
def test_a_branch_goes_as_a_whole_where_that_is_the_only_way_to_save_time(
    with_engine: Callable[[FakeEngine], FakeEngine], tmp_path: Path, repair: Any
) -> None:
    engine, data = with_engine(FakeEngine(16)), few_digits(128)  # 16 channels are one block: fewer save nothing
    asked = recipe(target_latency=0.6, repair=repair, criterion="l1")
    run = Pruner(Residual().eval(), data, recipe=asked, folder=tmp_path / "run")
    result = run.finish()
    assert [(step.site, step.kept) for step in result.steps] == [("conv1", 0)]
    assert engine.whole(result.graph) == pytest.approx(0.5 * engine.whole(run.original))  # two layers of four remain
    assert result.latency is not None
    assert result.latency.predicted == pytest.approx(result.latency.pruned, rel=0.05)
    assert resume(tmp_path / "run", Residual().eval(), data).finish().plan == result.plan
    alone = Pruner(Residual().eval(), data, recipe=replace(asked, branches=False)).finish()
    assert alone.macs.removed == 0


def test_the_loss_of_a_folded_branch_is_that_after_the_layers_behind_have_made_up_for_it(
    with_engine: Callable[[FakeEngine], FakeEngine],
) -> None:
    """A linear branch before a linear layer: (I + BA) of the one can be written into the other, and nothing is lost."""

    class Linears(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.a, self.b = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)
            self.behind, self.head = nn.Conv2d(8, 8, 1), nn.Linear(8, 10)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x).relu()
            return self.head(self.behind(x + self.b(self.a(x))).relu().mean((2, 3)))  # type: ignore[no-any-return]  # of modules

    torch.manual_seed(0)
    with_engine(FakeEngine(8))  # 8 channels are one block: only whole branches save time
    asked = recipe(target_latency=0.7, repair="every-layer", criterion="obs")
    run = Pruner(Linears().eval(), few_digits(128), recipe=asked)
    result = run.finish()
    curves = {found.site: found for found in records(run, SiteCurve)}
    folded = compact(run.original, {"a": torch.zeros(8, dtype=torch.bool)})
    lost = run.context.loss(folded, run.context.held_out) - curves["a"].curve.loss[0]
    assert curves["a"].curve.removed[-1] == 8
    assert abs(curves["a"].curve.loss[-1] - curves["a"].curve.loss[0]) < 0.01 * lost
    assert [(step.site, step.kept) for step in result.steps] == [("a", 0)]
    (compared,) = records(run, ComparedFrontiers)
    assert [one.weighed for one in compared.tried] == ["time", "time, branches 2 times", "time, branches 5 times", "MACs"]
    assert compared.tried[0].rise < 0.01 * lost


def test_activations_are_counted_and_can_be_the_target() -> None:
    """By hand, for two images: two tensors of 32 channels of 8 × 8 are the most at one time."""
    graph = trace(small_net((24, 32)), torch.randn(2, 1, 8, 8))
    assert activations(graph).peak == 2 * (64 * 2 * 32)
    assert activations(graph).total == 2 * (64 * (1 + 3 * 24 + 3 * 32) + 32 + 32 + 10)
    result = Pruner(small_net((24, 32)), few_digits(128), recipe=recipe(target_latency=None, target_memory=0.5)).finish()
    left = activations(result.graph).peak / activations(trace(small_net((24, 32)), result.graph.example)).peak
    assert left <= 0.5
    assert "activations' peak takes" in result.stopped
    sequential = recipe(target_latency=None, target_memory=0.8, allocation="sequential")
    assert "of 80.0% wanted" in Pruner(small_net((24, 32)), few_digits(128), recipe=sequential).finish().stopped


@pytest.mark.parametrize("target", [0.7, None])
def test_the_shortcut_position_of_least_loss_is_taken(
    with_engine: Callable[[FakeEngine], FakeEngine], tmp_path: Path, target: float | None
) -> None:
    engine, data = with_engine(FakeEngine(4)), few_digits(128)
    asked = recipe(target_latency=target, engine="torch", shortcut="auto", max_drop=1.0)
    run = Pruner(Residual().eval(), data, recipe=asked, folder=tmp_path / "run")
    result = run.finish()
    (compared,), (chosen,) = records(run, ComparedFrontiers), records(run, ChosenAllocation)
    assert list(dict.fromkeys(one.shortcut for one in compared.tried)) == ["before", "after", "stream"]
    alone = {
        shortcut: Pruner(Residual().eval(), data, recipe=replace(asked, shortcut=shortcut)).finish()
        for shortcut in ("before", "after", "stream")
    }
    assert result.plan == alone[chosen.shortcut].plan
    inner = [found for found in records(run, SiteCurve) if found.site == "conv1"]
    assert len(inner) == 1  # the same site at all positions
    again = resume(tmp_path / "run", Residual().eval(), data)
    loaded = engine.loaded.copy()
    assert again.finish().plan == result.plan
    assert engine.loaded["layer"] == loaded["layer"]


@pytest.mark.parametrize("seed", range(2))
def test_noise_does_not_flip_a_choice_beyond_its_interval(with_engine: Callable[[FakeEngine], FakeEngine], seed: int) -> None:
    engine = with_engine(FakeEngine(8, noise=0.02))
    engine.generator = seeded(seed)
    run = Pruner(small_net(), few_digits(128), recipe=recipe(round_to=8, target_latency=0.6))
    result = run.finish()
    assert engine.whole(result.graph) <= 0.6 * engine.whole(run.original) * 1.05
    assert all(step.kept % 8 == 0 or step.kept == step.channels for step in result.steps)
    with_engine(FakeEngine(8))
    quiet = Pruner(small_net(), few_digits(128), recipe=recipe(round_to=8, target_latency=0.57))
    quiet.finish()
    (noisy,), (stricter,) = records(run, ChosenAllocation), records(quiet, ChosenAllocation)
    assert noisy.loss <= stricter.loss + 1e-9


def test_a_network_that_is_not_faster_says_so_first(with_engine: Callable[[FakeEngine], FakeEngine]) -> None:
    with_engine(FakeEngine(64))  # no cut saves time, so only MACs may count
    result = Pruner(
        small_net(), few_digits(128), recipe=recipe(target_latency=None, allocation="sequential", engine="torch")
    ).finish()
    assert result.macs.removed > 0.2
    assert str(result).splitlines()[0].startswith("Not measurably faster (0.99 to 1.01) than the original network: ")


def test_where_no_cut_saves_time_nothing_is_removed(with_engine: Callable[[FakeEngine], FakeEngine]) -> None:
    with_engine(FakeEngine(64))
    run = Pruner(small_net(), few_digits(128), recipe=recipe())
    result = run.finish()
    assert result.macs.removed == 0
    assert all(widths.widths == () for widths in records(run, SiteWidths))  # which says why
    said, sizes, *rest = str(result).splitlines()
    assert re.fullmatch(
        r"No cut that was weighed saves time in fake \d+ \(no width is faster at 0, 3, 6\), so the network is returned as it "
        r"was: name the engine that will run it, or give a target in macs\.",
        said,
    )
    assert sizes.startswith("0.0 % of the parameters")
    assert rest[0].startswith("Next: ")


def test_a_function_of_the_users_own_is_an_engine(tmp_path: Path) -> None:
    def board(module: nn.Module) -> float:
        assert module(torch.zeros(3, 1, 8, 8)).shape == (3, 10)
        assert not module.training
        return FakeEngine(8).whole(module)

    asked, data = recipe(round_to=8), few_digits(128)
    result = Pruner(small_net((16, 24)), data, recipe=asked, measure=board, folder=tmp_path / "run").finish()
    with pytest.raises(RunError, match=r"was started with measure=\. Resume it the same way"):
        resume(tmp_path / "run", small_net((16, 24)), data)
    assert resume(tmp_path / "run", small_net((16, 24)), data, measure=board).finish().plan == result.plan
    assert board(result.model) <= 0.5 * board(small_net((16, 24)))
    assert result.latency is not None
    assert (result.latency.engine, result.latency.predicted) == ("board", pytest.approx(result.latency.pruned, rel=0.05))
    graph = trace(small_net(), torch.zeros(2, 1, 8, 8))
    for wrong, message in ((lambda module: "fast", "returned a str"), (lambda module: -1.0, r"returned -1\.0")):
        with pytest.raises(InvalidInput, match=message):
            MeasureEngine(wrong).network(graph)()()
    with pytest.raises(InvalidInput, match="give one of them"):
        Pruner(small_net(), few_digits(128), recipe=recipe(engine="torch"), measure=board)


def test_a_target_in_time_needs_all_sites_weighed_together() -> None:
    with pytest.raises(RecipeError, match="set allocation = 'global'"):
        Recipe.fast(target_latency=0.5)
    with pytest.raises(RecipeError, match="shortcut = 'auto': allocations are compared"):
        Recipe.fast(shortcut="auto")
    with pytest.raises(RecipeError, match="target_latency"):
        recipe(target_latency=1.5)


# ---- interrupted runs --------------------------------------------------------------------------------------------------


INTERRUPTED = recipe(round_to="auto", target_latency=0.55)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Counter[str]]:
    """The folder of a run that nothing stopped, and what its engine timed."""
    folder, engine = tmp_path_factory.mktemp("undisturbed") / "run", FakeEngine(8, between=1.3)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("secateurs.api.engine_for", lambda *given: engine)
        patched.setattr("secateurs.pruning.context.preferred_multiple", lambda *given: 8)
        patched.setattr(tables, "home", lambda: tmp_path_factory.getbasetemp() / "home")
        Pruner(small_net(), few_digits(128), recipe=INTERRUPTED, folder=folder).finish()
    return folder, engine.loaded


@pytest.mark.parametrize("stops", [("layer", 2), ("layer", 30), ("network", 1), ("network", 2), ("network", 3)])
def test_a_run_that_is_interrupted_while_it_measures_ends_with_the_same_plan(
    with_engine: Callable[[FakeEngine], FakeEngine],
    undisturbed: tuple[Path, Counter[str]],
    tmp_path: Path,
    stops: tuple[str, int],
) -> None:
    (whole, loaded), asked, data = undisturbed, INTERRUPTED, few_digits(128)
    first = with_engine(FakeEngine(8, between=1.3, stops=stops))
    run = Pruner(small_net(), data, recipe=asked, folder=tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        run.finish()
    tables = run.journal.of(TimeTable)
    again = with_engine(FakeEngine(8, between=1.3))  # another name: the file of this machine knows nothing of it
    resume(tmp_path / "run", small_net(), data).finish()
    for name in ("plan.json", "pruned.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (whole / name).read_bytes()
    if stops[0] == "network":  # no layer that is journaled was timed again
        assert bool(tables) == (stops[1] > 1)  # the first one chooses the batch
        assert first.loaded["layer"] + again.loaded["layer"] == loaded["layer"]
    else:
        assert again.loaded["layer"] <= loaded["layer"] - sum(len(table.seconds) for table in tables)


def test_eager_mode_times_layers_and_networks() -> None:
    graph, engine = trace(small_net((64,)), torch.randn(2, 1, 8, 8)), TorchEngine(batch=64, threads=1)  # ten times apart
    narrow = compact(graph, {find_sites(graph)[0]: torch.arange(64) < 4})
    found = in_rounds({"wide": engine.network(graph)(), "narrow": engine.network(narrow)()}, rounds=5)
    wide, thin = (median(found[name]) for name in ("wide", "narrow"))
    assert 0 < thin < wide
    assert engine.layer(nn.Conv2d(3, 4, 3), (4, 3, 8, 8), 2)() > 0


def test_sites_show_what_a_filter_costs_in_time(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("secateurs.export.engines.engine_for", lambda recipe: FakeEngine(8))
    assert execute(["sites", "--model", "resnet8", "--latency", "--json"]) == 0
    found = {site["name"]: site for site in json.loads(capsys.readouterr().out)["sites"]}
    assert found["conv1"]["widths"] == [8]  # of 16: 12 takes as long, and 4 as long as 8
    # 1 × 2 and 2 × 2 blocks become 1 × 1 and 1 × 2 when 8 filters go
    assert found["conv1"]["seconds"] == pytest.approx(6e-6)
    assert found["conv1"]["seconds_a_filter"] == pytest.approx(3e-6 / 8)
    assert execute(["sites", "--model", "resnet8", "--latency"]) == 0
    assert "0.375 µs" in capsys.readouterr().out


def test_cuts_that_leave_nothing_of_the_input_are_within_no_drop(with_engine: Callable[[FakeEngine], FakeEngine]) -> None:
    """A stream that keeps channels of folded branches alone: the padded shortcut gives them nothing."""
    with_engine(FakeEngine(4))
    torch.manual_seed(0)
    net: Any = build("resnet20", in_channels=1).eval()
    with torch.no_grad():
        for block in (*net.layer2, *net.layer3):
            block.conv2.weight[-len(block.conv2.weight) // 4 :] *= 100
    asked = recipe(shortcut="stream", target_latency=None, engine="torch", max_drop=0.99, branches=True)
    result = Pruner(net, few_digits(128), recipe=asked).finish()
    assert 0 < result.macs.removed < 1
