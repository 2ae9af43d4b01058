"""Where the time of a network goes: on a clock by hand, and on the processor's."""

from __future__ import annotations

from statistics import median

import pytest
import torch
from torch import Tensor, fx, nn

from secateurs import compact, find_sites, trace
from secateurs.models import build
from secateurs.speed.engines import TorchEngine
from secateurs.speed.nodes import NodeTimer, by_module, node_seconds
from secateurs.speed.timing import Clock


class ByHand(Clock):
    """A clock that moves when work is done."""

    def __init__(self) -> None:
        self.now = 0.0

    def wall(self) -> float:
        return self.now

    def processor(self) -> float:
        return self.now


class Work(nn.Module):
    """Takes the seconds that are next."""

    def __init__(self, clock: ByHand, *seconds: float) -> None:
        super().__init__()
        self.clock, self.seconds = clock, list(seconds)

    def forward(self, x: Tensor) -> Tensor:
        self.clock.now += self.seconds.pop(0)
        return x


def chain(*layers: nn.Module) -> fx.GraphModule:
    """The layers one after another, each a node."""
    graph = fx.Graph()
    last = graph.placeholder("x")
    for number in range(len(layers)):
        last = graph.call_module(str(number), (last,))
    graph.output(last)
    return fx.GraphModule(nn.Sequential(*layers), graph)


def test_a_node_has_the_median_of_its_runs() -> None:
    """One run in three meets a slice of 12 ms that another process takes."""
    clock = ByHand()
    module = chain(Work(clock, 0.001, 0.013, 0.001), Work(clock, 0.002, 0.002, 0.014))
    timer = NodeTimer(module, clock)
    for _ in range(3):
        timer.run(torch.zeros(1))
    assert {node.name: seconds for node, seconds in timer.seconds.items()} == pytest.approx({"_0": 0.001, "_1": 0.002})


def test_what_the_interpreter_does_between_the_calls_is_in_no_node(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, fetched = ByHand(), fx.Interpreter.fetch_args_kwargs_from_env

    def slow(self: fx.Interpreter, node: fx.Node) -> object:
        clock.now += 0.5
        return fetched(self, node)

    monkeypatch.setattr(fx.Interpreter, "fetch_args_kwargs_from_env", slow)
    timer = NodeTimer(chain(Work(clock, 0.001)), clock)
    timer.run(torch.zeros(1))
    assert sum(timer.seconds.values()) == pytest.approx(0.001)


def test_nodes_add_up_to_the_network() -> None:
    """Within a tenth on an idle core; on a busy one, what the interpreter does between the calls meets colder caches."""
    graph = trace(build("resnet8").eval(), torch.randn(16, 3, 32, 32))
    compacted = compact(graph, {site.name: torch.arange(site.channels) % 2 == 0 for site in find_sites(graph)})
    for each in (graph, compacted):
        whole, timer = TorchEngine(16, 1).network(each)(), NodeTimer(each.module)
        seconds = []
        with torch.inference_mode():
            for _ in range(15):
                seconds.append(whole())
                timer.run(*each.example)
        assert sum(timer.seconds.values()) == pytest.approx(median(seconds), rel=0.3)


def test_every_node_has_seconds_and_layers_their_share_of_the_whole() -> None:
    graph = trace(build("resnet8").eval(), torch.randn(2, 3, 32, 32))
    found = node_seconds(graph.module, graph.example)
    assert found.keys() == set(graph.module.graph.nodes)
    layers = by_module(graph, graph.example, 2.0)
    assert layers.keys() == {str(node.target) for node in found if "conv" in node.name or node.name == "linear"}
    assert 1.0 < sum(layers.values()) < 2.0
