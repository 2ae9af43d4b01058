"""What aligning channels costs in a pruned network, measured node by node. It goes into a run's journal, with the speed."""

from __future__ import annotations

from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, fx

from secateurs.costs import evaluating
from secateurs.graph import Example, Graph, as_example, like_network
from secateurs.layers import Align, SumInto

RUNS = 5


def aligning_share(graph: Graph, inputs: Example) -> float:
    """The share, in [0, 1], of the network's time for `inputs` that goes into aligning channels; 0 where none is aligned.

    Where a sum widens a term as it adds it, what it takes beyond a plain sum counts. Median of several runs, in eval mode, on
    the network's device.
    """
    if not any(isinstance(layer, Align | SumInto) for layer in graph.module.modules()):
        return 0.0
    given, shares = like_network(graph.module, as_example(inputs)), []
    with evaluating(graph.module), torch.inference_mode():
        for run in range(RUNS + 1):
            watch = _StopWatch(graph.module)
            watch.run(*given)
            if run:  # the first run warms up
                shares.append(watch.aligning / watch.all)
    return median(shares)


class _StopWatch(fx.Interpreter):
    """Runs a network node by node, each to its end."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.aligning, self.all = 0.0, 0.0

    def run_node(self, n: fx.Node) -> Any:
        """The node's value; its time is added up."""
        start = perf_counter()
        result = super().run_node(n)
        _wait_for(result)
        seconds = perf_counter() - start
        self.all += seconds
        layer = self.module.get_submodule(str(n.target)) if n.op == "call_module" else None
        if isinstance(layer, Align):
            self.aligning += seconds
        elif isinstance(layer, SumInto):
            self.aligning += max(seconds - _plain_sum(result), 0.0)
        return result


def _plain_sum(like: Tensor) -> float:
    start = perf_counter()
    _wait_for(like + like)
    return perf_counter() - start


def _wait_for(value: Any) -> None:
    """A GPU works behind Python's back."""
    if isinstance(value, Tensor) and value.device.type == "cuda":
        torch.cuda.synchronize(value.device)
