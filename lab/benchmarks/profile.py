"""Where a network's time goes: every node of its graph timed, summed by what it calls."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, fx

from secateurs import Graph

KINDS = ("Conv2d", "BatchNorm2d", "relu", "add", "SumInto", "Align")  # all else is "other"


class StopWatch(fx.Interpreter):
    """Runs a graph node by node and adds up the seconds of each kind of node; on a CPU nothing runs behind its back."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.seconds: dict[str, float] = defaultdict(float)

    def run_node(self, n: fx.Node) -> Any:
        start = perf_counter()
        result = super().run_node(n)
        self.seconds[kind_of(self.module, n)] += perf_counter() - start
        return result


def kind_of(module: torch.nn.Module, node: fx.Node) -> str:
    """The class of the module, or the name of the function, that `node` calls; "other" for what does not matter."""
    if node.op == "call_module":
        word = type(module.get_submodule(str(node.target))).__name__
    else:
        word = getattr(node.target, "__name__", str(node.target))
    word = {"ReLU": "relu", "iadd": "add", "add_": "add", "relu_": "relu"}.get(word, word)
    return word if word in KINDS else "other"


def profile(graphs: Sequence[Graph], x: Tensor, repeats: int) -> list[dict[str, float]]:
    """Median seconds of each kind of node in each graph, the graphs run in turns."""
    found: list[dict[str, list[float]]] = [defaultdict(list) for _ in graphs]
    with torch.inference_mode():
        for repeat in range(repeats + 1):
            for graph, times in zip(graphs, found, strict=True):
                watch = StopWatch(graph.module)
                watch.run(x)
                if repeat:  # the first run warms up
                    for kind in (*KINDS, "other"):
                        times[kind].append(watch.seconds[kind])
    return [{kind: torch.tensor(values).median().item() for kind, values in times.items()} for times in found]
