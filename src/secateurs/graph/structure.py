"""Structure of a traced network for a run's journal: layers, joins, and the edges between them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from secateurs.graph.cost import cost
from secateurs.graph.node_info import info, shape_of
from secateurs.graph.trace import Graph


@dataclass(frozen=True)
class Node:
    """A layer, a join (a sum, a product, a concatenation) or the input, with the nodes that it reads."""

    name: str
    kind: str  # "input", "join", or the class of the layer
    sources: tuple[int, ...]  # indices in the list of nodes
    filters: int = 0  # of a layer
    axis: int = 0  # of the filters in the layer's weight
    macs: int = 0  # for one example

    @property
    def is_layer(self) -> bool:
        """Whether it has a weight of its own."""
        return self.kind not in ("input", "join")


def describe(graph: Graph) -> dict[str, Any]:
    """Return the structure of `graph` as plain values: {"nodes": [...]}, in the order of computation."""
    macs = {layer.name: layer.macs for layer in cost(graph).layers}
    nodes: list[dict[str, Any]] = []
    sources: dict[fx.Node, tuple[int, ...]] = {}
    for node in graph.module.graph.nodes:
        read = tuple(sorted({place for source in node.all_input_nodes for place in sources.get(source, ())}))
        found = _described(graph, node, read, macs)
        if found is None:
            sources[node] = read
        else:
            sources[node] = (len(nodes),)
            nodes.append(found)
    return {"nodes": nodes}


def nodes_from(fields: Any) -> tuple[Node, ...]:
    """Return the nodes from the plain values of `describe`; empty if they are something else."""
    try:
        return tuple(Node(**{**entry, "sources": tuple(entry["sources"])}) for entry in fields["nodes"])
    except (KeyError, TypeError):
        return ()


def _described(graph: Graph, node: fx.Node, read: tuple[int, ...], macs: dict[str, int]) -> dict[str, Any] | None:
    if node.op == "placeholder":
        return {"name": node.name, "kind": "input", "sources": []}
    if node.op == "call_module":
        path = str(node.target)
        module = graph.module.get_submodule(path)
        weight = getattr(module, "weight", None)
        if weight is not None and weight.dim() > 1:
            turned = isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d)
            filters = getattr(module, "out_channels", None) or getattr(module, "out_features", None) or len(weight)
            known = {"filters": int(filters), "axis": int(turned), "macs": macs.get(path, 0)}
            return {"name": path, "kind": type(module).__name__, "sources": list(read), **known}
    if len(read) > 1 and node.op != "output" and shape_of(node).is_tensor:
        return {"name": info(node).get("name", node.name), "kind": "join", "sources": list(read)}
    return None


def is_bypassed(graph: fx.Graph, place: fx.Node) -> bool:
    """Whether the output can be reached from an input without passing through `place`."""
    reached = set[fx.Node]()
    for node in graph.nodes:
        if node is not place and (node.op == "placeholder" or not reached.isdisjoint(node.all_input_nodes)):
            reached.add(node)
    return any(node.op == "output" for node in reached)


@dataclass(frozen=True)
class Activations:
    """Numbers that the tensors of a network hold, for its example: at most at one time, and all together.

    Every op counts as if it gave a tensor of its own, which is freed after its last reader.
    """

    peak: int
    total: int


def activations(graph: Graph) -> Activations:
    """Count the numbers in the tensors of a network."""
    nodes = list(graph.module.graph.nodes)
    last = {source: place for place, node in enumerate(nodes) for source in node.all_input_nodes}
    held, peak, total = dict[fx.Node, int](), 0, 0
    for place, node in enumerate(nodes):
        dims = shape_of(node).dims
        if dims is not None and node.op not in ("get_attr", "output"):
            held[node] = math.prod(dims)
            total += held[node]
        peak = max(peak, sum(held.values()))
        for source in {*node.all_input_nodes, node}:
            if last.get(source, place) <= place:
                held.pop(source, None)
    return Activations(peak, total)
