"""Where the time of a network goes: node by node, in eager mode."""

from __future__ import annotations

import operator
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import fx, nn

from secateurs._util.modules import eval_mode
from secateurs.graph.layers import Align, SumInto
from secateurs.graph.node_info import called_module
from secateurs.graph.trace import Example, Graph, as_example, like_network
from secateurs.speed.engines import on_one_thread, wait_for
from secateurs.speed.timing import CLOCK, Clock, undisturbed

RUNS = (7, 31)  # at least; of short networks as many as take `SECONDS`. The medians count, and the first run warms up
SECONDS = 0.2


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
    measured = timer.seconds
    scale = whole / sum(
        measured.values()
    )  # what lies between the calls is shared out: a tenth at most, of networks with few nodes
    for node, seconds in measured.items():
        if isinstance(called_module(graph.module, node), nn.Linear | nn.modules.conv._ConvNd):
            found[str(node.target)] = found.get(str(node.target), 0.0) + scale * seconds
    return found


def node_seconds(module: fx.GraphModule, inputs: Example) -> dict[fx.Node, float]:
    """Seconds of every node for `inputs`; 0 for nodes that call nothing."""
    return dict.fromkeys(module.graph.nodes, 0.0) | _timed(module, inputs).seconds


def _timed(module: fx.GraphModule, inputs: Example) -> NodeTimer:
    timer, given = NodeTimer(module), like_network(module, as_example(inputs))
    with eval_mode(module), torch.inference_mode(), undisturbed():
        timer.run(*given)
        timer.runs.clear()
        timer.beyond_sums.clear()
        fewest, most = RUNS
        began = CLOCK.wall()
        for number in range(most):
            if number >= fewest and CLOCK.wall() - began > SECONDS:
                break
            timer.run(*given)
    return timer


class NodeTimer(fx.Interpreter):
    """Runs a network node by node and keeps the seconds of the calls that the nodes make, in every run.

    Only the call is timed, not what the interpreter does around it, so that the nodes add up to about the whole network.
    """

    def __init__(self, module: fx.GraphModule, clock: Clock = CLOCK) -> None:
        super().__init__(module)
        self.runs: dict[fx.Node, list[float]] = {}
        self.beyond_sums: dict[fx.Node, list[float]] = {}  # of sums that widen a term: what they take beyond a plain sum
        alone = on_one_thread(None) and all(not tensor.is_cuda for tensor in module.parameters())
        self._now = clock.processor if alone else clock.wall
        self._node: fx.Node | None = None

    @property
    def seconds(self) -> dict[fx.Node, float]:
        """Median seconds of every node that calls something."""
        return {node: median(found) for node, found in self.runs.items()}

    @property
    def aligning(self) -> dict[fx.Node, float]:
        """Of those, what aligning channels takes."""
        picking = [node for node in self.runs if isinstance(called_module(self.module, node), Align)]
        beyond = {node: max(median(found), 0.0) for node, found in self.beyond_sums.items()}
        return {node: median(self.runs[node]) for node in picking} | beyond

    def run_node(self, n: fx.Node) -> Any:
        """Run the node; of a sum that widens a term, time a plain sum of the same size too."""
        self._node = n
        result = super().run_node(n)
        if isinstance(called_module(self.module, n), SumInto):
            _, seconds = self._call(operator.add, (result, result), {})
            self.beyond_sums.setdefault(n, []).append(self.runs[n][-1] - seconds)
        return result

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Time the call."""
        return self._kept(target, args, kwargs)

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Time the call."""
        return self._kept(getattr(args[0], target), args[1:], kwargs)

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Time the call."""
        return self._kept(self.fetch_attr(target), args, kwargs)

    def _kept(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        assert self._node is not None
        result, seconds = self._call(function, args, kwargs)
        self.runs.setdefault(self._node, []).append(seconds)
        return result

    def _call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, float]:
        start = self._now()
        result = function(*args, **kwargs)
        wait_for(result)
        return result, self._now() - start
