"""Networks made from a Graph: copies, the network with masks (True = kept) at its sites, and the two parts around a site."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, fx, nn

from secateurs._util.modules import device_of
from secateurs.errors import UnsupportedOp
from secateurs.graph.channels import free_name
from secateurs.graph.layers import Mask
from secateurs.graph.node_info import copy_info_
from secateurs.graph.sites import Site, check_masks, share_sites
from secateurs.graph.trace import Graph

Masks = Mapping[str | Site, Tensor]


def copy_module(graph: Graph) -> fx.GraphModule:
    """Return a copy of the graph's network, with the facts recorded at its nodes, that shares nothing with it."""
    module = copy.deepcopy(graph.module)
    copy_info_(graph.module.graph, module.graph)
    return module


def copied(graph: Graph) -> Graph:
    """Return the graph with a copy of its network, whose weights may be changed; sites that were found are reused."""
    fresh = graph.with_module(copy_module(graph))
    share_sites(graph, fresh)
    return fresh


def masked(graph: Graph, masks: Masks) -> fx.GraphModule:
    """Return a copy of the network in which the channels that `masks` drop are set to zero at their sites; shapes stay."""
    checked = check_masks(graph, masks)
    module = copy_module(graph)
    nodes = {node.name: node for node in module.graph.nodes}
    for site, keep in checked.values():
        insert_behind_(module, nodes[site.node], f"mask_{site.node}", Mask(keep, site.axis).to(device_of(module)))
    module.recompile()
    return module


def insert_behind_(module: fx.GraphModule, node: fx.Node, name: str, layer: nn.Module) -> fx.Node:
    """Call `layer`, stored as `name` or a free name like it, on the output of `node`, for all users of `node`."""
    users = list(node.users)
    path = free_name(module, name)
    module.add_submodule(path, layer)
    with module.graph.inserting_after(node):
        behind = module.graph.call_module(path, (node,))
    for user in users:
        user.replace_input_with(node, behind)
    return behind


@dataclass(frozen=True)
class Split:
    """A network in two parts: `suffix(kept · prefix(x), *carried)` is the masked network.

    The outputs of `prefix` are the site's activations, then the other values from before the site that `suffix` reads.
    """

    prefix: fx.GraphModule
    suffix: fx.GraphModule
    axis: int


def split_at(graph: Graph, site: Site) -> Split:
    """Split the network behind the site, so that the prefix runs once and the suffix for every mask."""
    nodes = list(graph.module.graph.nodes)
    place = next(node for node in nodes if node.name == site.node)
    behind = _reachable([place], lambda node: node.users)
    if place.op == "output" or not behind:
        raise UnsupportedOp(f"site {site.name!r}: no node follows it, so there is no suffix to run.")
    read = [n for n in nodes if n not in behind and n is not place and any(u in behind for u in n.users)]
    carried = [n for n in read if n.op != "get_attr"]
    inputs = {place: "activations", **{n: f"carried_{n.name}" for n in carried}}
    suffix = _part(graph.module, {*behind, *read} - {*carried}, "Suffix", inputs=inputs)
    return Split(network_up_to(graph.module, [place, *carried], name="Prefix"), suffix, site.axis)


def network_up_to(module: fx.GraphModule, ends: Sequence[fx.Node], *, name: str = "Part") -> fx.GraphModule:
    """Return the part of `module` that computes `ends`, whose values are its outputs, as a tuple; it shares all weights."""
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    needed = {*inputs, *ends, *_reachable(ends, lambda node: node.all_input_nodes)}
    return _part(module, needed, name, outputs=ends)


def _reachable(places: Iterable[fx.Node], neighbours: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    """Return all nodes that can be reached from `places`; one of `places` only if it can be reached from another."""
    found: set[fx.Node] = set()
    open_nodes = list(places)
    while open_nodes:
        for node in neighbours(open_nodes.pop()):
            if node not in found:
                found.add(node)
                open_nodes.append(node)
    return found


def _part(
    module: fx.GraphModule,
    nodes: set[fx.Node],
    name: str,
    *,
    inputs: Mapping[fx.Node, str] | None = None,
    outputs: Sequence[fx.Node] | None = None,
) -> fx.GraphModule:
    """Copy `nodes` into a network of their own, with placeholders for `inputs`; without `outputs`, its output is among them."""
    graph = fx.Graph()
    env = {node: graph.placeholder(called) for node, called in (inputs or {}).items()}
    for node in module.graph.nodes:
        if node in nodes:
            env[node] = graph.node_copy(node, env.__getitem__)
    if outputs is not None:
        graph.output(tuple(env[node] for node in outputs))
    return fx.GraphModule(module, graph, class_name=name)
