"""Networks made from a Graph: copies, the network with masks (True = kept) at its sites, and the two parts around a site."""

from __future__ import annotations

import copy
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from secateurs._util.modules import copyable, device_of, with_real_tensors
from secateurs.errors import UnsupportedOp
from secateurs.graph.channels import free_name
from secateurs.graph.layers import KeptNorm, Mask
from secateurs.graph.node_info import called_module, copy_info_, dims_of, facts_held, pass_on_
from secateurs.graph.recurrent import recurrent_call, with_factors
from secateurs.graph.sites import MaskPoint, Site, check_masks, node_masks, share_sites
from secateurs.graph.trace import Graph, dtype_of

Masks = Mapping[str | Site, Tensor]
NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)


def copy_module(graph: Graph, dtype: torch.dtype | None = None, *, share: bool = False) -> fx.GraphModule:
    """Return a copy of the graph's network, with the facts recorded at its nodes, that shares nothing with it.

    With `share`, parameters and buffers are the same; with `dtype`, those of floating point are converted.
    """
    known = _known_copies(graph.module)
    for tensor in [*graph.module.parameters(), *graph.module.buffers()] if share or dtype is not None else []:
        if share or not tensor.is_floating_point():
            known[id(tensor)] = tensor if share else tensor.clone()
        else:
            converted = tensor.detach().to(dtype, copy=True)
            is_parameter = isinstance(tensor, nn.Parameter)
            known[id(tensor)] = nn.Parameter(converted, tensor.requires_grad) if is_parameter else converted
    with copyable(graph.module):
        module = copy.deepcopy(graph.module, known)
    copy_info_(graph.module.graph, module.graph)
    return module


def _known_copies(module: fx.GraphModule) -> dict[int, Any]:
    """Return what `copy.deepcopy` need not look into, by id: copies of empty dicts, and the facts, which nobody changes.

    A layer has a dozen empty dicts for hooks: in a small network they would take longer to copy than all weights.
    """
    held = [value for part in module.modules() for value in vars(part).values()]
    known: dict[int, Any] = {id(v): type(v)() for v in held if type(v) in (dict, OrderedDict) and not v}
    facts = facts_held(module)
    return known if facts is None else {**known, id(facts): facts}


def copied(graph: Graph, dtype: torch.dtype | None = None) -> Graph:
    """Return the graph with a copy of its network, whose weights may be changed; sites that were found are reused."""
    fresh = graph.with_module(copy_module(graph, dtype))
    share_sites(graph, fresh)
    return fresh


@with_real_tensors
def masked(graph: Graph, masks: Masks, *, share: bool = False) -> fx.GraphModule:
    """Return a copy of the network in which the channels that `masks` drop are set to zero at their sites; shapes stay.

    Where an op would make something else of such a zero before it is read, the channel is set to zero again behind it. Norms
    that the masks reach take their statistics over the kept channels. With `share`, parameters and buffers are those of the
    graph's network.
    """
    checked = check_masks(graph, masks)
    module = copy_module(graph, share=share)
    nodes = {node.name: node for node in module.graph.nodes}
    within, others = ([cut for cut in checked.values() if cut[0].inside is inside] for inside in (True, False))
    for name, (axis, mask) in [*node_masks(others).items(), *node_masks(within).items()]:
        node = nodes[name]
        norm, path, call = norm_over(module, node, axis), str(node.target), recurrent_call(node)
        if call is not None and call != node:
            continue  # an output of a recurrent module, which is masked by the module
        if call is not None:
            layer = module.get_submodule(path)
            module.set_submodule(path, with_factors(layer, mask[None].to(device_of(module), dtype_of(module))))
        elif norm is not None:
            module.set_submodule(path, KeptNorm(norm, mask, axis).to(device_of(module)))
        else:
            insert_behind_(module, node, f"mask_{name}", Mask(mask, axis).to(device_of(module)))
    module.recompile()
    return module


def norm_over(module: fx.GraphModule, node: fx.Node, axis: int) -> nn.Module | None:
    """Return the norm that `node` calls if it takes statistics over `axis`: they leave out channels that are masked.

    Another norm, of the features of each head for example, is masked behind: other calls of it may have other heads.
    """
    called = called_module(module, node)
    if not isinstance(called, NORMS):
        return None
    first = 1 if isinstance(called, nn.GroupNorm) else len(dims_of(node)) - len(called.normalized_shape)
    return called if axis >= first else None


def insert_behind_(module: fx.GraphModule, node: fx.Node, name: str, layer: nn.Module) -> fx.Node:
    """Call `layer`, stored as `name` or a free name like it, on the output of `node`, for all users of `node`."""
    users = list(node.users)
    path = free_name(module, name)
    module.add_submodule(path, layer)
    with module.graph.inserting_after(node):
        behind = module.graph.call_module(path, (node,))
    pass_on_(node, behind, "shape")  # a later mask point may be a part that is indexed from this one
    for user in users:
        user.replace_input_with(node, behind)
    return behind


class Factor(nn.Module):
    """Multiplies the channels of a mask point by factors of the site's channels, a row for all examples or one for each."""

    source: Tensor

    def __init__(self, point: MaskPoint) -> None:
        super().__init__()
        self.axis = point.axis
        self.register_buffer("source", point.source())  # -1 is the last of the padded factors, which is 1

    def each(self, x: Tensor, factors: Tensor) -> Tensor:
        """The factors of the channels of `x`, with its number of axes."""
        rows = factors.repeat_interleave(1 if len(factors) == 1 else len(x) // len(factors), 0)
        shape = [len(rows)] + [1] * (x.dim() - 1)
        shape[self.axis] = -1
        return F.pad(rows, (0, 1), value=1.0)[:, self.source].view(shape)

    def forward(self, x: Tensor, factors: Tensor) -> Tensor:
        """Of the shape of `x`; `factors` is (1, C) or (n, C). A factor of 0 gives 0, even of infinite values."""
        each = self.each(x, factors)
        return torch.where((each == 0) & ~x.isfinite(), 0, x * each)


class NormFactor(KeptNorm):
    """A norm at a mask point: its statistics are weighted with the factors of the site's channels."""

    def __init__(self, norm: nn.Module, point: MaskPoint) -> None:
        super().__init__(norm, torch.ones(point.width, dtype=torch.bool), point.axis, zeroes=point.zeroes)
        self.factor = Factor(point)

    def forward(self, x: Tensor, factors: Tensor | None = None) -> Tensor:
        """Of the shape of `x`; `factors` is (1, C) or (n, C)."""
        return super().forward(x, None if factors is None else self.factor.each(x, factors))


def multiply_(module: fx.GraphModule, node: fx.Node, point: MaskPoint, factors: fx.Node) -> None:
    """Multiply the channels behind `node`, a mask point, by `factors`, a placeholder for (1, C) or (n, C).

    A norm takes its statistics with them; a recurrent module takes them within, for all its outputs.
    """
    norm, call, path = norm_over(module, node, point.axis), recurrent_call(node), str(node.target)
    if norm is not None:
        module.set_submodule(path, NormFactor(norm, point).to(device_of(module)))
        node.args = (*node.args, factors)
    elif call is None:
        behind = insert_behind_(module, node, f"factor_{node.name}", Factor(point).to(device_of(module)))
        behind.args = (*behind.args, factors)
        if node.op == "placeholder":  # a call must follow all placeholders
            factors.append(behind)
    elif call is node:
        module.set_submodule(path, with_factors(module.get_submodule(path)))
        with module.graph.inserting_before(node):
            units = module.graph.call_function(operator.getitem, (factors, (slice(None), list(point.sources))))
            if "factors" in node.kwargs:  # of another site that has these units
                units = module.graph.call_function(operator.mul, (units, node.kwargs["factors"]))
        node.kwargs = {**node.kwargs, "factors": units}


@dataclass(frozen=True)
class Split:
    """A network in two parts: `suffix(kept · prefix(x), *carried)` is the masked network.

    The outputs of `prefix` are the site's activations, then the other values from before the site that `suffix` reads. If the
    mask is applied in several places (`several`), the suffix does it: `suffix(prefix(x), *carried, factors)`, with factors
    (1, C) for all examples or (n, C), 0 for a dropped channel and 1 for a kept one.
    """

    prefix: fx.GraphModule
    suffix: fx.GraphModule
    axis: int
    several: bool


def split_at(graph: Graph, site: Site) -> Split:
    """Split the network behind the site, so that the prefix runs once and the suffix for every mask."""
    nodes = list(graph.module.graph.nodes)
    points = {node: point for node in nodes for point in site.points if point.node == node.name}
    place: fx.Node = next(iter(points))
    behind = _reachable(points, lambda node: node.users)
    # the statistics of a norm depend on the mask, and that of a recurrent module acts within it: the parts meet before these
    within = norm_over(graph.module, place, site.axis) is not None or recurrent_call(place) == place
    simple = list(site.points[0].sources) == list(range(site.points[0].width)) and not within
    if within:
        behind.add(place)
        place = place.all_input_nodes[0]
    if place.op == "output" or not behind:
        raise UnsupportedOp(f"site {site.name!r}: no node follows it, so there is no suffix to run.")
    read = [n for n in nodes if n not in behind and n is not place and any(u in behind for u in n.users)]
    carried = [n for n in read if n.op != "get_attr"]
    inputs = {place: "activations", **{n: f"carried_{n.name}" for n in carried}}
    several = len(points) > 1 or not simple
    suffix = _part(graph.module, {*behind, *read} - {*carried}, "Suffix", inputs=inputs, points=points if several else {})
    return Split(network_up_to(graph.module, [place, *carried], name="Prefix"), suffix, site.axis, several)


def network_up_to(module: fx.GraphModule, ends: Sequence[fx.Node], *, name: str = "Part") -> fx.GraphModule:
    """Return the part of `module` that computes `ends`, whose values are its outputs, as a tuple; it shares all weights."""
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    needed = {*inputs, *ends, *_reachable(ends, lambda node: node.all_input_nodes)}
    return _part(module, needed, name, outputs=ends)


def network_between(module: fx.GraphModule, starts: Sequence[fx.Node], ends: Sequence[fx.Node]) -> fx.GraphModule:
    """Return the part of `module` that computes `ends`, as a tuple, from the values of `starts`, its inputs; shares weights."""
    given = set(starts)
    needed = {*ends, *_reachable(ends, lambda node: [] if node in given else node.all_input_nodes)} - given
    return _part(module, needed, "Part", inputs={node: f"from_{node.name}" for node in starts}, outputs=ends)


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
    points: Mapping[fx.Node, MaskPoint] | None = None,
) -> fx.GraphModule:
    """Copy `nodes` into a network of their own, with placeholders for `inputs`; without `outputs`, its output is among them.

    With `points`, the last placeholder is for factors, by which the channels behind these nodes are multiplied.
    """
    graph = fx.Graph()
    env = {node: graph.placeholder(called) for node, called in (inputs or {}).items()}
    factors = graph.placeholder("factors") if points else None
    for node in module.graph.nodes:
        if node in nodes:
            env[node] = graph.node_copy(node, env.__getitem__)
    if outputs is not None:
        graph.output(tuple(env[node] for node in outputs))
    part = fx.GraphModule(module, graph, class_name=name)
    for node, point in (points or {}).items():
        assert factors is not None
        multiply_(part, env[node], point, factors)
    part.recompile()
    return part
