"""Targets of a repair: what consumers gave in the original, in the channels and at the scale of the cut network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from secateurs.errors import InvalidInput
from secateurs.graph.consumers import LayerConsumer, SumConsumer
from secateurs.graph.features import kept_positions, select
from secateurs.graph.trace import Graph


def find_node(module: fx.GraphModule, name: str, *, whose: str = "the graph") -> fx.Node:
    """Return the node of that name."""
    nodes: list[fx.Node] = list(module.graph.nodes)
    for node in nodes:
        if node.name == name:
            return node
    raise InvalidInput(f"{whose} has no node {name!r}. Pass the untouched network that the graph was cut from.")


def converted(graph: Graph, original: Graph, consumer: LayerConsumer | SumConsumer) -> Callable[[Tensor], Tensor]:
    """Return the function that turns a consumer's output in `original` into its target in `graph`.

    It selects the channels that remain. Before a BatchNorm it also rescales them, so that the graph's BatchNorm gives what the
    original's gives.
    """
    chosen = kept_positions(graph, original, consumer.node)
    axis = consumer.axis if isinstance(consumer, SumConsumer) else channel_axis(graph.module.get_submodule(consumer.module))
    if isinstance(consumer, SumConsumer) or consumer.norm is None:
        return lambda value: select(value, chosen, axis)
    gain, shift = affine(graph.module.get_submodule(consumer.norm))
    their_gain, their_shift = (select(t, chosen, 0) for t in affine(original.module.get_submodule(consumer.norm)))
    steady = gain.abs() > 1e-12 * gain.abs().max()  # where the norm gives a constant, its input does not matter
    scale = torch.where(steady, their_gain / torch.where(steady, gain, 1.0), 1.0)
    moved = torch.where(steady, (their_shift - shift) / torch.where(steady, gain, 1.0), 0.0)

    def convert(value: Tensor) -> Tensor:
        shape = [-1] + [1] * (-1 - axis)
        return select(value, chosen, axis) * scale.to(value).view(shape) + moved.to(value).view(shape)

    return convert


def channel_axis(layer: Any) -> int:
    """Return the channel axis of a layer's output, counted from the right."""
    return -1 - len(getattr(layer, "kernel_size", ()))


def affine(norm: Any) -> tuple[Tensor, Tensor]:
    """Return a BatchNorm in eval mode as gain and shift of gain · x + shift, (C,) each, float64, on the CPU."""
    gain = (norm.running_var.detach().cpu().double() + norm.eps).rsqrt()
    if norm.weight is not None:
        gain = gain * norm.weight.detach().cpu().double()
    shift = -gain * norm.running_mean.detach().cpu().double()
    return gain, shift if norm.bias is None else shift + norm.bias.detach().cpu().double()
