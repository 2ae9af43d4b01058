"""Networks cut short: what chosen nodes of a graph give, and nothing that is not needed for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, fx

from secateurs.errors import InvalidInput
from secateurs.graph import shape_of
from secateurs.layers import mask_channels
from secateurs.readers import ELSEWHERE, SumReader


def node_called(module: fx.GraphModule, name: str, *, whose: str = "the graph") -> fx.Node:
    """The node of that name."""
    nodes: list[fx.Node] = list(module.graph.nodes)
    for node in nodes:
        if node.name == name:
            return node
    raise InvalidInput(f"{whose} has no node {name!r}: give the untouched network that the graph was cut from.")


def tapped(module: fx.GraphModule, nodes: Iterable[fx.Node]) -> fx.GraphModule:
    """A network that shares its weights with `module` and gives the values of `nodes` as a tuple."""
    ends = list(nodes)
    needed: set[fx.Node] = set()
    open_nodes = list(ends)
    while open_nodes:
        node = open_nodes.pop()
        if node not in needed:
            needed.add(node)
            open_nodes += node.all_input_nodes
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        if node in needed or node.op == "placeholder":
            env[node] = graph.node_copy(node, lambda n: env[n])
    graph.output(tuple(env[node] for node in ends))
    return fx.GraphModule(module, graph, class_name="Tapped")


def sum_of(node: fx.Node, values: Sequence[Any], reader: SumReader | None = None) -> Tensor:
    """What the sum at `node` gives for the values of its `mentioned` nodes; with `reader`, without what comes from the site."""
    terms = iter(reader.sources if reader is not None else ())
    given = []
    for value in values:
        source = next(terms, None) if isinstance(value, Tensor) else None
        if source is not None and reader is not None:
            from_right = len(shape_of(node).dims or ()) - reader.axis  # a term of lower rank is broadcast
            value = mask_channels(value, source == ELSEWHERE, value.dim() - from_right)
        given.append(value)
    remaining = iter(given)
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: next(remaining))
    if isinstance(node.target, str):
        result = getattr(args[0], node.target)(*args[1:], **kwargs)
    else:
        assert callable(node.target)
        result = node.target(*args, **kwargs)
    assert isinstance(result, Tensor)
    return result
