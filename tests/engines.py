"""Engines whose times are known: what a test decides must not depend on how busy its machine is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn, zeros

from secateurs import Graph, cost
from secateurs.graph.layers import Align, Offset, SumInto
from secateurs.speed.timing import Clock, Load, Timer


class NoTime(Clock):
    """A clock of a machine that nobody else uses."""

    def interruptions(self) -> int:
        return 0

    def used_by_others(self) -> float | None:
        return None


class MacEngine:
    """A nanosecond for each multiply-accumulate of each example, a microsecond for each tensor that is aligned or offset."""

    name, threads, runs_layers = "torch", None, True
    clock: Clock = NoTime()

    def __init__(self, batch: int = 1) -> None:
        self.batch = batch

    def network(self, graph: Graph) -> Load:
        extra = sum(isinstance(layer, Align | SumInto | Offset) for layer in graph.module.modules())
        return lambda: always(1e-9 * cost(graph).macs * self.batch + 1e-6 * extra)

    def layer(self, layer: nn.Module, shape: Sequence[int], times: int) -> Timer:
        example: Tensor = zeros(*shape, dtype=next(layer.parameters()).dtype)
        return always(1e-9 * times * cost(layer, example).macs * len(example))


def with_known_times(engine_for: Callable[..., Any]) -> Callable[..., Any]:
    """The same choice of an engine; where none is named, time is told by MACs."""

    def choose(recipe: Any, measure: Any = None, device: Any = None) -> Any:
        weighs = recipe.engine == "auto" and recipe.weighs_time and recipe.deploy is None and measure is None
        return MacEngine() if weighs else engine_for(recipe, measure, device)

    return choose


def always(seconds: float) -> Timer:
    """A timer that tells the same every time."""
    return lambda: seconds
