"""Sums that cuts leave unaligned, as networks that can be timed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from secateurs.graph.layers import Align, Offset
from secateurs.graph.masking import copy_module, insert_behind_
from secateurs.graph.node_info import pass_on_
from secateurs.graph.trace import Graph, trace

# what is timed at a sum: the place of its network beside the plain one, and the second number of sizes
ALIGNMENT, OFFSET = 1, 2


def aligned_sums(example: Tensor, axis: int) -> tuple[Graph, ...]:
    """Three networks: a sum between two layers, the same with a term aligned, and with an offset behind the sum.

    A quarter of the term's channels is dropped and as many zeros come in between, as compaction leaves it. Between layers,
    because an engine may keep channels in another order there, and has to bring them back to pick them.
    """
    width = example.shape[axis]
    plain = trace(_Sum(width, example.dim() - 2 if axis == 1 else 0).eval(), example)
    place = torch.arange(width)
    # of every four channels the first is dropped, and a zero is the last; a rest of fewer than four ends in a zero, too
    take = (place + 1).where((place % 4 != 3) & (place + 1 < width), -1)
    added = {ALIGNMENT: ("second", Align(take, axis)), OFFSET: ("add", Offset(place % 2 == 0, axis, example.dtype))}
    return plain, *(_with_layer(plain, *added[kind]) for kind in (ALIGNMENT, OFFSET))


def _with_layer(graph: Graph, name: str, layer: nn.Module) -> Graph:
    module = copy_module(graph)
    node = next(node for node in module.graph.nodes if node.name == name)
    pass_on_(node, insert_behind_(module, node, f"{name}_extra", layer), "shape", "original_channels")
    module.recompile()
    return graph.with_module(module.eval())


class _Sum(nn.Module):
    """The sum of a residual block, between convolutions over `dims` axes, or linear layers where there are none."""

    def __init__(self, channels: int, dims: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):  # fresh layers draw their weights
            self.first, self.second, self.last = (_layer(channels, dims) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Of the shape of `x`."""
        x = self.first(x).relu()
        found: Tensor = self.last((x + self.second(x)).relu())
        return found


def _layer(channels: int, dims: int) -> nn.Module:
    if not dims:
        return nn.Linear(channels, channels)
    return (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](channels, channels, 1)
