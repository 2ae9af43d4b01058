"""Where the time of a network goes: node by node, in eager mode."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from secateurs._util.modules import eval_mode
from secateurs.graph.layers import Align, SumInto
from secateurs.graph.node_info import called_module
from secateurs.graph.trace import Example, Graph, as_example, like_network
from secateurs.speed.engines import on_one_thread, wait_for
from secateurs.speed.timing import CLOCK, Clock

RUNS = 7  # of which the fastest of each node counts, as for whole networks; the first warms up


def aligning_share(graph: Graph, inputs: Example) -> float:
    """Return the share, in [0, 1], of the network's time for `inputs` that is spent on aligning channels.

    Of a sum that widens a term, the time beyond that of a plain sum counts. In eval mode, on the network's device.
    """
    if not any(isinstance(layer, Align | SumInto) for layer in graph.module.modules()):
        return 0.0
    timer = _timed(graph.module, inputs)
    return sum(timer.aligning.values()) / sum(timer.seconds.values())


def by_module(graph: Graph, inputs: Example, whole: float) -> dict[str, float]:
    """Share of every convolution and linear layer in the `whole` seconds of the network for `inputs`, by path."""
    timer, found = _timed(graph.module, inputs), dict[str, float]()
    scale = whole / sum(timer.seconds.values())  # the interpreter's own time is in all nodes, and in no network that runs
    for node, seconds in timer.seconds.items():
        if isinstance(called_module(graph.module, node), nn.Linear | nn.modules.conv._ConvNd):
            found[str(node.target)] = found.get(str(node.target), 0.0) + scale * seconds
    return found


def node_seconds(module: fx.GraphModule, inputs: Example) -> dict[fx.Node, float]:
    """Seconds of every node for `inputs`."""
    return _timed(module, inputs).seconds


def _timed(module: fx.GraphModule, inputs: Example) -> NodeTimer:
    timer, given = NodeTimer(module), like_network(module, as_example(inputs))
    with eval_mode(module), torch.inference_mode():
        timer.run(*given)
        timer.seconds, timer.aligning = {}, {}
        for _ in range(RUNS - 1):
            timer.run(*given)
    return timer


class NodeTimer(fx.Interpreter):
    """Runs a network node by node and keeps the least seconds of each node, and of those what aligning channels takes."""

    def __init__(self, module: fx.GraphModule, clock: Clock = CLOCK) -> None:
        super().__init__(module)
        self.seconds: dict[fx.Node, float] = {}
        self.aligning: dict[fx.Node, float] = {}
        alone = on_one_thread(None) and all(not tensor.is_cuda for tensor in module.parameters())
        self._now = clock.processor if alone else clock.wall

    def run_node(self, n: fx.Node) -> Any:
        """Run the node and keep its time."""
        start = self._now()
        result = super().run_node(n)
        wait_for(result)
        _keep(self.seconds, n, self._now() - start)
        layer = called_module(self.module, n)
        if isinstance(layer, Align):
            self.aligning[n] = self.seconds[n]
        elif isinstance(layer, SumInto):
            start = self._now()
            wait_for(result + result)
            _keep(self.aligning, n, max(self.seconds[n] - (self._now() - start), 0.0))
        return result


def _keep(least: dict[fx.Node, float], node: fx.Node, seconds: float) -> None:
    least[node] = min(least.get(node, seconds), seconds)
