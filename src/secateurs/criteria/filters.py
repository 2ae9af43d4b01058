"""The layers whose filters are a site's channels, and their weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from secateurs.graph.add_fusion import spread_sums
from secateurs.graph.channels import none_of
from secateurs.graph.flow import Flows, Join, Layer, Norm, Recurrent, find_flows
from secateurs.graph.flow.liveness import activation_behind
from secateurs.graph.recurrent import RECURRENT, recurrent_call, unit_weights
from secateurs.graph.sites import Site
from secateurs.graph.trace import Graph


@dataclass(frozen=True, eq=False)
class FilterPart:
    """A module that contributes to a site's channels: `makes` (C, F) says which of its F filters is in which channel."""

    name: str
    module: nn.Module
    makes: Tensor


def layers_behind(graph: Graph, site: Site) -> tuple[FilterPart, ...]:
    """The layers whose filters are removed with the site's channels, in network order."""
    flows, reached = _walk_back(graph, site)
    return tuple(_part(graph, node, reached) for node in _own_layers(flows, reached, site))


def norms_behind(graph: Graph, site: Site) -> tuple[FilterPart, ...]:
    """The BatchNorms with weights that lie between those layers and the site, in network order."""
    flows, reached = _walk_back(graph, site)
    found = {norm: None for layer in _own_layers(flows, reached, site) for norm in _next_norms(graph, flows, reached, layer)}
    return tuple(_part(graph, node, reached) for node in flows.of if node in found)


def sum_over(parts: Sequence[FilterPart], values: Callable[[nn.Module], Tensor]) -> Tensor:
    """The value of every filter (F,) that `values` gives for a module, summed for each channel: float64 (C,)."""
    sums = [part.makes.double() @ values(part.module).detach().cpu().double() for part in parts]
    return torch.stack(sums).sum(0)


def filter_weights(layer: nn.Module) -> Tensor:
    """The weights of a layer, a row for each filter or hidden unit, its bias left out."""
    if isinstance(layer, RECURRENT):
        return unit_weights(layer).cpu().double()
    weight: Any = layer.weight
    weight = weight.detach().cpu().double()
    if not getattr(layer, "transposed", False):
        return weight.flatten(1)  # type: ignore[no-any-return]  # a module's attribute has no type
    groups: Any = layer.groups
    by_group = weight.unflatten(0, (groups, -1)).transpose(1, 2)  # (groups, filters, inputs, …): inputs come first in torch
    return by_group.flatten(0, 1).flatten(1)  # type: ignore[no-any-return]  # as above


def _walk_back(graph: Graph, site: Site) -> tuple[Flows, dict[fx.Node, Tensor]]:
    """For the nodes between the site and the nearest layers: which of their channels each channel of the site needs."""
    flows = find_flows(spread_sums(graph.module), inside=site.inside)
    sums = {activation_behind(flows, node).name for node, flow in flows.of.items() if isinstance(flow, Join)}
    starts = {*(point.node for point in site.points[: site.own]), *sums}  # all of a stream's, or of coupled layers
    points = {point.node: point.source() for point in site.points if point.node in starts}
    each = torch.arange(site.channels)[:, None]
    reached = {node: points[node.name] == each for node in flows.of if node.name in points}
    for node in reversed(list(flows.of)):
        if node in reached and _hands_on(flows, node):
            for source, needed in _needed(flows, node, reached[node]):
                reached[source] = reached[source] | needed if source in reached else needed
    return flows, reached


def _hands_on(flows: Flows, node: fx.Node) -> bool:
    """Whether single channels can be followed to the node's inputs: through all but layers that mix them."""
    flow = flows.of[node]
    return flow.axis is not None and not isinstance(flow, Recurrent) and (not isinstance(flow, Layer) or flow.depthwise)


def _needed(flows: Flows, node: fx.Node, wanted: Tensor) -> Iterator[tuple[fx.Node, Tensor]]:
    """The node's inputs, each with the channels (C, width) that are needed for those `wanted` (C, width) of the node."""
    flow, sources = flows.of[node], flows.inputs[node]
    if isinstance(flow, Norm):  # of its statistics all channels are a part
        yield sources[0], wanted
        return
    nothing = none_of(wanted.shape[1])
    answers = [flow.needs(row, [None] * len(sources), nothing) for row in wanted]
    for source, rows in zip(sources, zip(*answers, strict=True), strict=False):
        known = [row for row in rows if row is not None]
        if len(known) == len(rows) and flows.of[source].axis is not None:
            yield source, torch.stack(known)


def _own_layers(flows: Flows, reached: Mapping[fx.Node, Tensor], site: Site) -> list[fx.Node]:
    found = [node for node in flows.of if node in reached and isinstance(flows.of[node], Layer | Recurrent)]
    # a site has no layer of its own where all that feed it have other consumers: then they all count
    return [node for node in found if _path(node) in site.layers] or found


def _next_norms(graph: Graph, flows: Flows, reached: Mapping[fx.Node, Tensor], layer: fx.Node) -> Iterator[fx.Node]:
    """The first BatchNorm on each way from `layer` to the site; none where another layer or the site comes first."""
    for user in flows.users.get(layer, ()):
        if user not in reached or isinstance(flows.of[user], Layer):
            continue
        called = graph.module.get_submodule(str(user.target)) if user.op == "call_module" else None
        if isinstance(called, _BatchNorm) and called.weight is not None:
            yield user
        else:
            yield from _next_norms(graph, flows, reached, user)


def _part(graph: Graph, node: fx.Node, reached: Mapping[fx.Node, Tensor]) -> FilterPart:
    name, makes = _path(node), reached[node]
    module = graph.module.get_submodule(name)
    if isinstance(module, RECURRENT):
        hidden: Any = module.hidden_size
        makes = makes.view(len(makes), -1, hidden).any(1)
    return FilterPart(name, module, makes)


def _path(node: fx.Node) -> str:
    """The path of the module that a layer calls, or that gives the hidden units of a part."""
    return str((recurrent_call(node) or node).target)
