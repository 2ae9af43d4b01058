"""Widths padded to multiples with filters of zero weights: the same outputs, in a shape that kernels working in blocks like."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from secateurs.errors import InvalidInput
from secateurs.graph.add_fusion import fuse_sums_, spread_sums
from secateurs.graph.flow import Channelwise, Flow, Join, Layer, Moved, Source, find_flows
from secateurs.graph.flow.liveness import Flows
from secateurs.graph.layers import Align, Constant
from secateurs.graph.masking import copy_module
from secateurs.graph.node_info import called_module
from secateurs.graph.trace import Graph, record_shapes_

_NORM = {"running_var", "weight"}  # padded by ones: BatchNorm gives zero for zero then


def padded(graph: Graph, multiple: int) -> Graph:
    """The network with zero filters behind those it has, so that numbers of channels are multiples; it computes the same.

    What reads a padded tensor has zero weights for the new channels. Left as they are: the inputs and outputs of the network,
    grouped layers that are not depthwise, layers that are called twice, and tensors read by an
    op that depends on channel positions (concat, slice, flatten).
    """
    if multiple < 1:
        raise InvalidInput(f"pad_to: got {multiple}, wanted 1 or more.")
    module = spread_sums(copy_module(graph))
    flows = find_flows(module)
    joined = _Widths(module, flows)
    extra = {node: -flows.width(node) % multiple for node in flows.of if joined.free(node)}
    for node, flow in flows.of.items():
        into = next((extra.get(source, 0) for source in flows.inputs[node]), 0)
        if into or extra.get(node, 0):
            _pad_(module, node, flow, into, extra.get(node, 0))
    module.recompile()
    record_shapes_(module, graph.example)
    fuse_sums_(module)
    return replace(graph, module=module, ids={}, kept={})


@dataclass(eq=False)
class _Widths:
    """Which tensors have the same channels, and whether new ones can be added to all of them."""

    module: fx.GraphModule
    flows: Flows

    def __post_init__(self) -> None:
        self.parent = {node: node for node in self.flows.of}
        self.fixed: set[fx.Node] = set()
        called = [str(node.target) for node in self.module.graph.nodes if node.op == "call_module"]
        self.shared = {path for path in called if called.count(path) > 1}
        for node, flow in self.flows.of.items():
            self._visit(node, flow)
        for node in self.module.graph.nodes:
            if node.op == "output" or (node not in self.flows.of and not _asks_for_batch(node)):
                self.fixed |= {source for source in node.all_input_nodes if source in self.parent}

    def free(self, node: fx.Node) -> bool:
        """Whether channels may be added to the output of `node`."""
        root = self._root(node)
        return self.flows.of[node].axis is not None and all(self._root(other) is not root for other in self.fixed)

    def _root(self, node: fx.Node) -> fx.Node:
        while self.parent[node] is not node:
            self.parent[node] = self.parent[self.parent[node]]
            node = self.parent[node]
        return node

    def _visit(self, node: fx.Node, flow: Flow) -> None:
        inputs, layer = self.flows.inputs[node], called_module(self.module, node)
        if node.op == "call_module" and str(node.target) in self.shared:
            return self._fix(node, *inputs)
        match flow:
            case Layer(groups=1, reads_all=False):
                return None
            case Layer(reads_all=False) if flow.depthwise and flow.filters == flow.inputs:
                return self._same(node, inputs[0])
            case Channelwise() if len(inputs) == 1 and (flow.keeps_zero or flow.params or flow.pointwise):
                return self._same(node, inputs[0])
            case Join(zero_if="all" | "any"):
                own = [i for i, axis, w in zip(inputs, flow.in_axes, flow.widths, strict=True) if axis is not None and w > 1]
                if all(self.flows.of[i].axis is not None and self.flows.width(i) == flow.width for i in own):
                    return self._same(node, *own)
            case Moved() if isinstance(layer, Align):
                return None
            case Moved(how="same") if torch.equal(flow.index, torch.arange(flow.inputs)):
                return self._same(node, inputs[0])
            case Source(axis=int()) if isinstance(layer, Constant):
                return None
        return self._fix(node, *inputs)

    def _same(self, node: fx.Node, *inputs: fx.Node) -> None:
        for source in inputs:
            if self.flows.of[source].axis is None:
                return self._fix(node, *inputs)
            self.parent[self._root(source)] = self._root(node)
        return None

    def _fix(self, *nodes: fx.Node) -> None:
        self.fixed |= {*nodes}


def _asks_for_batch(node: fx.Node) -> bool:
    """Whether a node asks a tensor for its number of examples, or for what does not depend on channels."""
    word = node.target if node.op == "call_method" else (node.args[1] if node.target is getattr else None)
    return (word == "size" and node.args[1:] == (0,)) or word in ("dim", "ndim", "dtype", "device")


def _pad_(module: fx.GraphModule, node: fx.Node, flow: Flow, into: int, out: int) -> None:
    """Pad what makes the output of `node` by `out` channels, and what reads its input by `into`."""
    layer: Any = called_module(module, node)
    match flow:
        case Layer(groups=1):
            by = (into, out) if flow.transposed else (out, into)
            _lengthen_(layer, ["weight"], 0, by[0])
            _lengthen_(layer, ["weight"], 1, by[1])
            _lengthen_(layer, ["bias"], 0, out)
            names = ("in_features", "out_features") if isinstance(layer, nn.Linear) else ("in_channels", "out_channels")
            for name, more in zip(names, (into, out), strict=True):
                setattr(layer, name, getattr(layer, name) + more)
        case Layer():  # depthwise: as many channels more on both sides
            _lengthen_(layer, ["weight", "bias"], 0, out)
            layer.in_channels, layer.out_channels, layer.groups = (
                n + out for n in (layer.in_channels, layer.out_channels, layer.groups)
            )
        case Channelwise():
            _lengthen_(layer, flow.params, 0, out)
            if flow.count is not None:
                setattr(layer, flow.count, flow.width + out)
            if flow.resize is not None:
                flow.resize(node, flow.width + out)
        case Moved() if isinstance(layer, Align):
            take = torch.cat([torch.tensor(layer.take), torch.full((out,), -1)])
            module.set_submodule(str(node.target), Align(take, layer.axis).train(layer.training))
        case Moved() if flow.resize is not None:
            flow.resize(node, flow.width + out)
        case Source() if isinstance(layer, Constant) and flow.axis is not None:
            _lengthen_(layer, ["value"], flow.axis, out)


def _lengthen_(layer: Any, names: Iterable[str], dim: int, by: int) -> None:
    for name in names:
        tensor = getattr(layer, name, None)
        if not isinstance(tensor, Tensor) or not by:
            continue
        one = hasattr(layer, "running_var") and name in _NORM
        longer = F.pad(tensor.detach(), (*(0, 0) * (tensor.dim() - 1 - dim), 0, by), value=float(one))
        if isinstance(tensor, nn.Parameter):
            setattr(layer, name, nn.Parameter(longer, requires_grad=tensor.requires_grad))
        else:
            layer.register_buffer(name, longer, persistent=name not in layer._non_persistent_buffers_set)
