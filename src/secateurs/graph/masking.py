"""Step 3 of 9: takes a Graph and masks by site, gives the masked network; True = kept.

Also splits the network at a site: the prefix up to the mask, the suffix behind it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor, fx

from secateurs._util.modules import device_of
from secateurs.errors import UnsupportedOp
from secateurs.graph.channels import free_name
from secateurs.graph.layers import Mask
from secateurs.graph.sites import Site, check_masks
from secateurs.graph.trace import Graph

Masks = Mapping[str | Site, Tensor]


def copy_module(graph: Graph) -> fx.GraphModule:
    """A copy of the graph's network that shares nothing with it; node metadata comes along."""
    module = copy.deepcopy(graph.module)
    for old, new in zip(graph.module.graph.nodes, module.graph.nodes, strict=True):
        new.meta = dict(old.meta)
    return module


def copied(graph: Graph) -> Graph:
    """The graph with a network of its own, whose weights may be changed; what was found out about its structure still holds."""
    fresh = graph.with_module(copy_module(graph))
    fresh.findings.update(graph.findings)
    return fresh


def masked(graph: Graph, masks: Masks) -> fx.GraphModule:
    """The network with the channels that `masks` drop set to zero at their sites: the same shapes, nothing removed."""
    checked = check_masks(graph, masks)
    module = copy_module(graph)
    nodes = {node.name: node for node in module.graph.nodes}
    for site, keep in checked.values():
        node = nodes[site.node]
        users = list(node.users)
        name = free_name(module, f"mask_{site.node}")
        module.add_submodule(name, Mask(keep, site.axis).to(device_of(module)))
        with module.graph.inserting_after(node):
            mask = module.graph.call_module(name, (node,))
        for user in users:
            user.replace_input_with(node, mask)
    module.recompile()
    return module


@dataclass(frozen=True)
class Split:
    """A network in two parts: `suffix(kept · prefix(x), *carried)` is the masked network.

    `prefix` gives the site's activations first, then what else the suffix needs from before the site.
    """

    prefix: fx.GraphModule
    suffix: fx.GraphModule
    axis: int


def split_at(graph: Graph, site: Site) -> Split:
    """Cut the network's graph behind the site, so that the prefix is run once and the suffix for every mask."""
    module = graph.module
    nodes = list(module.graph.nodes)
    place = next(node for node in nodes if node.name == site.node)
    behind = _reachable([place], lambda node: node.users)
    if place.op == "output" or not behind:
        raise UnsupportedOp(f"site {site.name!r}: nothing follows it, so there is no suffix to run.")
    carried = [
        n for n in nodes if n not in behind and n is not place and any(u in behind for u in n.users) and n.op != "get_attr"
    ]
    return Split(_prefix(module, place, carried), _suffix(module, place, carried, behind), site.axis)


def _reachable(places: list[fx.Node], neighbours: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    """All nodes that can be reached from the given ones; a given one only if it can be reached from another."""
    found: set[fx.Node] = set()
    open_nodes = list(places)
    while open_nodes:
        for node in neighbours(open_nodes.pop()):
            if node not in found:
                found.add(node)
                open_nodes.append(node)
    return found


def _prefix(module: fx.GraphModule, place: fx.Node, carried: list[fx.Node]) -> fx.GraphModule:
    graph, ends = fx.Graph(), [place, *carried]
    ahead = {*ends, *_reachable(ends, lambda node: node.all_input_nodes)}
    env: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        if node in ahead or node.op == "placeholder":
            env[node] = graph.node_copy(node, lambda n: env[n])
    graph.output((env[place], *[env[n] for n in carried]))
    return fx.GraphModule(module, graph, class_name="Prefix")


def _suffix(module: fx.GraphModule, place: fx.Node, carried: list[fx.Node], behind: set[fx.Node]) -> fx.GraphModule:
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {place: graph.placeholder("activations")}
    for node in carried:
        env[node] = graph.placeholder(f"carried_{node.name}")
    for node in module.graph.nodes:
        if node in behind or (node.op == "get_attr" and any(u in behind for u in node.users)):
            env[node] = graph.node_copy(node, lambda n: env[n])
    return fx.GraphModule(module, graph, class_name="Suffix")
