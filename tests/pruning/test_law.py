"""The law: nobody gets a network back that is slower than the one that was given, whatever an engine's times are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import secateurs as sc
from engines import NoTime
from secateurs import Graph, Pruner, Recipe, trace
from secateurs.graph.layers import Align, Offset, SumInto
from secateurs.pruning.results import ChosenAllocation, SpeedTrial
from secateurs.speed.timing import Clock, Load, Timer
from torture.runs import few_digits

DATA = few_digits(96)
Weighted = nn.Linear | nn.modules.conv._ConvNd


class RandomEngine:
    """Microseconds of a layer: `call`, and for every example `work` for each pair of begun blocks of channels; of an alignment
    or an offset `align`, and as much for every example. A network takes those of its layers times `between`, and `rest`."""

    name, threads, runs_layers = "fake", 1, True
    clock: Clock = NoTime()

    def __init__(
        self,
        blocks: tuple[int, int],
        *,
        call: float,
        work: float,
        align: float,
        between: float,
        rest: float,
        noise: float = 0.0,
    ) -> None:
        self.blocks, self.call, self.work, self.align = blocks, call, work, align
        self.between, self.rest, self.noise, self.batch = between, rest, noise, 1
        self.generator = torch.Generator().manual_seed(0)

    def of_layer(self, layer: nn.Module, batch: int) -> float:
        if isinstance(layer, nn.Linear):
            inputs, filters = layer.in_features, layer.out_features
        else:
            assert isinstance(layer, nn.modules.conv._ConvNd)
            inputs, filters = layer.in_channels // layer.groups, layer.out_channels
        pairs = -(-inputs // self.blocks[0]) * -(-filters // self.blocks[1])
        return 1e-6 * (self.call + batch * self.work * pairs)

    def whole(self, module: nn.Module, batch: int) -> float:
        layers = sum(self.of_layer(layer, batch) for layer in module.modules() if isinstance(layer, Weighted))
        aligning = sum(isinstance(layer, Align | SumInto | Offset) for layer in module.modules())
        return self.between * layers + 1e-6 * (self.rest + self.align * aligning * (1 + batch / 16))

    def _timer(self, seconds: float) -> Timer:
        return lambda: seconds * (1 + self.noise * float(torch.randn(1, generator=self.generator)))

    def layer(self, layer: nn.Module, shape: Sequence[int], times: int) -> Timer:
        return self._timer(times * self.of_layer(layer, self.batch))

    def network(self, graph: Graph) -> Load:
        return lambda: self._timer(self.whole(graph.module, self.batch))


class Net(nn.Module):
    """Residual blocks, or plain layers, between a first and a last one."""

    def __init__(self, width: int, inner: Sequence[int], *, residual: bool, depthwise: bool) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        self.blocks = nn.ModuleList()
        for narrow in inner:
            between = [nn.Conv2d(narrow, narrow, 3, padding=1, groups=narrow), nn.ReLU()] if depthwise else []
            layers = [nn.Conv2d(width, narrow, 3, padding=1), nn.ReLU(), *between, nn.Conv2d(narrow, width, 1)]
            self.blocks.append(nn.Sequential(*layers))
        self.residual, self.last = residual, nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = torch.relu(x + block(x) if self.residual else block(x))
        found: Tensor = self.last(x.mean((2, 3)))
        return found


networks = st.builds(
    Net,
    st.sampled_from([8, 12, 24]),
    st.lists(st.sampled_from([4, 8, 16, 20]), min_size=1, max_size=2),
    residual=st.booleans(),
    depthwise=st.booleans(),
)
engines = st.builds(
    RandomEngine,
    st.tuples(st.sampled_from([1, 4, 16, 64]), st.sampled_from([1, 4, 16, 64])),
    call=st.sampled_from([0.0, 1.0, 30.0]),
    work=st.sampled_from([0.01, 0.3, 3.0]),
    align=st.sampled_from([0.0, 1.0, 40.0]),
    between=st.sampled_from([0.7, 1.0, 1.6]),
    rest=st.sampled_from([0.0, 20.0]),
    noise=st.sampled_from([0.0, 0.01]),
)


def pruned(network: nn.Module, engine: Any, **asked: Any) -> Pruner:
    """A run that may lose everything: what stops it is time alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("secateurs.api.engine_for", lambda *given: engine)
        recipe = Recipe(max_drop=1.0, confidence=0.0, criterion="l1", repair_examples=64, curve_examples=32)
        run = Pruner(network.eval(), DATA, recipe=recipe, **asked)
        run.finish()
        return run


@settings(max_examples=6, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(network=networks, engine=engines)
def test_a_result_is_faster_than_the_original_or_is_the_original_and_says_why(network: Net, engine: RandomEngine) -> None:
    run = pruned(network, engine)
    result, dense = run._result, trace(network, torch.zeros(2, 1, 8, 8)).module
    margin = 1 + 3 * engine.noise
    ratios = [engine.whole(dense, batch) / engine.whole(result.model, batch) for batch in run.context.planned_batches]
    if result.macs.removed:
        assert max(ratios) > 1
        assert min(ratios) >= 1 / margin
        assert "faster" in str(result).splitlines()[0]
    else:
        assert "so the network is returned as it was" in str(result).splitlines()[0]
    for trial in run.journal.of(SpeedTrial):  # what is not returned was timed, and was not faster
        (chosen,) = run.journal.of(ChosenAllocation)
        faster = all(speed.high >= 1 for _, speed in trial.speeds) and any(speed.low > 1 for _, speed in trial.speeds)
        assert faster == (trial.place == chosen.place)


class Costly(RandomEngine):
    """Every alignment costs as much as thousands of layers; as an engine that is taken where none is named."""

    name = "torch"

    def __init__(self, batch: int = 1, threads: int | None = None, device: Any = None) -> None:
        super().__init__((1, 1), call=1.0, work=0.001, align=2000.0, between=1.0, rest=0.0)
        self.batch = batch


def test_only_a_target_of_another_kind_gives_a_slower_network_and_the_first_line_says_so() -> None:
    torch.manual_seed(0)
    network = Net(24, (16, 16), residual=True, depthwise=False)
    by_time = pruned(network, Costly())._result
    assert all(Costly().whole(by_time.model, batch) <= Costly().whole(network, batch) for batch in (1, 64))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("secateurs.pruning.price.TorchEngine", Costly)
        patch.setattr("secateurs.pruning.run.layer_times", lambda *given: ())
        asked = Recipe(max_drop=1.0, confidence=0.0, criterion="l1", repair_examples=64, curve_examples=32)
        asked = replace(asked, shortcut="before", branches=False)
        by_macs = sc.prune(network, DATA, recipe=asked, macs=0.8, progress=False)
    assert by_macs.macs.removed >= 0.8
    assert Costly().whole(by_macs.model, 1) > Costly().whole(network, 1)
    first = str(by_macs).splitlines()[0]
    assert "slower" in first
    assert "the cuts were not chosen by time, which made the network slower; for time give no size" in first


class Cliff(RandomEngine):
    """Networks that are narrow everywhere take twice as long as the widest ones, which no layer alone tells."""

    name = "cliff"

    def __init__(self, dense: nn.Module) -> None:
        super().__init__((1, 1), call=0.0, work=0.01, align=0.0, between=1.0, rest=0.0)
        self.full = {batch: super(Cliff, self).whole(dense, batch) for batch in (1, 64)}

    def whole(self, module: nn.Module, batch: int) -> float:
        found = super().whole(module, batch)
        return found if found > 0.12 * self.full[batch] else 2 * self.full[batch]


def test_where_the_deepest_cut_is_slower_one_that_is_less_deep_is_taken() -> None:
    torch.manual_seed(0)
    network = Net(24, (16, 16), residual=False, depthwise=False)
    engine = Cliff(network)
    run = pruned(network, engine)
    result, trials = run._result, run.journal.of(SpeedTrial)
    assert len(trials) > 1
    assert trials[0].speeds != trials[-1].speeds  # each network is timed itself
    assert engine.whole(result.model, 64) < 0.9 * engine.full[64]
    assert engine.whole(result.model, 1) < 0.9 * engine.full[1]


class Int8(RandomEngine):
    """An engine in which no network is faster than another."""

    name = "onnxruntime-int8"

    def whole(self, module: nn.Module, batch: int) -> float:
        return 1e-4 * batch


def test_the_law_holds_for_a_network_that_is_deployed_in_int8() -> None:
    torch.manual_seed(0)
    network = Net(24, (16, 16), residual=False, depthwise=False)
    engine = Int8((1, 1), call=0.0, work=0.3, align=0.0, between=1.0, rest=0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("secateurs.api.engine_for", lambda *given: engine)
        asked = Recipe(max_drop=1.0, confidence=0.0, criterion="l1", repair_examples=64, curve_examples=32, deploy="int8")
        run = Pruner(network.eval(), DATA, recipe=asked)
        run.finish()
    assert run._result.macs.removed == 0
    assert "so the network is returned as it was" in str(run._result).splitlines()[0]
