"""Step 2 of 9: takes a Graph and a shortcut position, gives Sites in network order: places where a zeroed channel stays zero.

A layer's site lies behind the activation that follows it. In a residual block the second layer's site lies before the add,
or behind the add's activation, as the paper's figure has it. A place that looks prunable and is not is kept with its reason.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args, overload

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from secateurs.config import Shortcut
from secateurs.errors import InvalidInput, InvalidMask, UnknownSite, suggest
from secateurs.graph.add_fusion import spread_sums
from secateurs.graph.cost import count_macs
from secateurs.graph.flow import Channelwise, Flow, Flows, Join, Layer, Opaque, analyse, find_flows, revivals
from secateurs.graph.layers import Align
from secateurs.graph.trace import Graph, shape_of

FUNCTIONAL: dict[Any, bool] = {  # layers in functional form, and whether they are transposed
    **dict.fromkeys((torch.conv1d, torch.conv2d, torch.conv3d, F.linear), False),
    **dict.fromkeys((torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d), True),
}


@dataclass(frozen=True)
class Site:
    """A place where a channel can be zeroed and stays zero until something reads it.

    `node` is the graph node behind which the mask goes, `axis` the channels' axis there, `layers` the layers that lose
    a filter for each channel removed, and `original` which of the untouched network's channels are still there.
    """

    name: str
    channels: int
    node: str
    axis: int
    layers: tuple[str, ...]
    original: tuple[int, ...]
    original_channels: int


@dataclass(frozen=True)
class Unprunable:
    """A layer that has no site: where, why, and how many MACs (for one example) stay with it."""

    name: str
    node: str
    reason: str
    macs: int


class Sites(Sequence[Site]):
    """The sites of a graph in network order; `unprunable` lists the layers that have none, with reasons."""

    def __init__(self, sites: Iterable[Site], unprunable: Iterable[Unprunable] = ()) -> None:
        self._sites = tuple(sites)
        self.unprunable = tuple(unprunable)

    @overload
    def __getitem__(self, index: int) -> Site: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Site, ...]: ...
    def __getitem__(self, index: int | slice) -> Site | tuple[Site, ...]:
        return self._sites[index]

    def __len__(self) -> int:
        return len(self._sites)

    def __repr__(self) -> str:
        return f"Sites({list(self._sites)!r}, unprunable={list(self.unprunable)!r})"


def find_sites(graph: Graph, shortcut: Shortcut = "before") -> Sites:
    """All sites of `graph`; `shortcut` says where a residual block's last filters are masked: before or after the add."""
    if not isinstance(graph, Graph):
        raise InvalidInput(
            f"graph: got {type(graph).__name__}, wanted a Graph: secateurs.trace(model, example_input) gives one."
        )
    if shortcut not in ("before", "after"):
        raise InvalidInput(f"shortcut: got {shortcut!r}, wanted 'before' or 'after' (the add).")
    key = f"sites {shortcut}"
    if key not in graph.findings:
        graph.findings[key] = _all_sites(graph, shortcut)
    found: Sites = graph.findings[key]
    return found


def _all_sites(graph: Graph, shortcut: Shortcut) -> Sites:
    graph = replace(graph, module=spread_sums(graph.module))
    flows = find_flows(graph.module)
    search = _Search(graph, flows, shortcut, analyse(flows, {}).need)
    sites: dict[fx.Node, Site] = {}
    refused: list[Unprunable] = []
    for node, flow in flows.of.items():
        if isinstance(flow, Layer):
            place, reason = search.place(node)
            if place is None:
                refused.append(Unprunable(str(node.target), node.name, reason, _macs(graph, node, flow)))
            elif place not in sites:
                sites[place] = search.site(node, place)
    covered = {layer for site in sites.values() for layer in site.layers}
    order = {node: i for i, node in enumerate(flows.of)}
    found = [sites[place] for place in sorted(sites, key=order.__getitem__)]
    hidden = [*_opaque_layers(graph, flows)]
    return Sites(found, [u for u in [*refused, *hidden] if u.name not in covered])


def remember_names_(graph: Graph, module: fx.GraphModule) -> None:
    """Note the sites' names at their places in `module`, a copy of the uncut network: a cut may fold away what gave them."""
    nodes = {node.name: node for node in module.graph.nodes}
    for shortcut in get_args(Shortcut):
        for site in find_sites(graph, shortcut):
            nodes[site.node].meta.setdefault("site_names", {})[shortcut] = site.name


def find_site(graph: Graph, name: str) -> Site:
    """The site called `name`, at either shortcut position; `UnknownSite` names the nearest ones, or why there is none."""
    return resolve(graph, [name])[name]


def resolve(graph: Graph, names: Iterable[str | Site]) -> dict[str, Site]:
    """Look sites up by name in `graph` as it is now: an earlier cut may have narrowed them."""
    wanted = [n.name if isinstance(n, Site) else n for n in names]
    found: dict[str, Site] = {}
    before = find_sites(graph, "before")
    known = {site.name: site for site in before}
    refusals = {u.name: u.reason for u in before.unprunable}
    if any(name not in known for name in wanted):
        after = find_sites(graph, "after")
        known |= {site.name: site for site in after if site.name not in known}
    for name in wanted:
        if name not in known:
            raise UnknownSite(_unknown(graph, name, known, refusals))
        found[name] = known[name]
    return found


def _unknown(graph: Graph, name: object, known: Mapping[str, Site], refusals: Mapping[str, str]) -> str:
    if name in refusals:
        return f"{name!r} is not a site: {refusals[str(name)]}."
    if name in graph.plan.removed():
        return f"site {name!r} is gone: an earlier cut folded its branch away."
    return f"no site {name!r} in this graph.{suggest(str(name), known)} find_sites(graph) lists them all."


def check_masks(graph: Graph, masks: Mapping[str | Site, Tensor]) -> dict[str, tuple[Site, Tensor]]:
    """Masks by site name, looked up in `graph` and checked: bool, one value for each channel the site has now."""
    if not isinstance(masks, Mapping):
        raise InvalidMask(f"masks: got {type(masks).__name__}, wanted a dict of bool tensors by site or its name.")
    sites = resolve(graph, masks)
    checked: dict[str, tuple[Site, Tensor]] = {}
    for key, keep in masks.items():
        name = key.name if isinstance(key, Site) else key
        site = sites[name]
        if name in checked:
            raise InvalidMask(f"site {name!r} is given twice, as a Site and by its name. Give one mask for each site.")
        if isinstance(keep, Tensor) and keep.is_meta:
            raise InvalidMask(f"mask of site {name!r}: it is on the meta device and has no values. Make it on the CPU.")
        if not isinstance(keep, Tensor) or keep.dtype != torch.bool:
            got = keep.dtype if isinstance(keep, Tensor) else type(keep).__name__
            raise InvalidMask(
                f"mask of site {name!r}: got {got}, wanted a bool tensor, True = kept. Use mask.bool() if 1 means kept."
            )
        if keep.shape != (site.channels,):
            raise InvalidMask(
                f"mask of site {name!r}: got shape {tuple(keep.shape)}, wanted ({site.channels},), one value for each channel "
                f"it has now. An earlier cut may have narrowed it: look it up again with find_sites(graph)."
            )
        checked[name] = (site, keep.detach().cpu())
    return checked


@dataclass(frozen=True)
class _Search:
    """Walks from a layer to the place behind which its channels can be masked."""

    graph: Graph
    flows: Flows
    shortcut: Shortcut
    idle: Mapping[fx.Node, Tensor]  # what is needed while nothing is masked, where that is not everything

    def place(self, layer: fx.Node) -> tuple[fx.Node | None, str]:
        """The node behind which the mask of `layer` goes, or None and the reason."""
        chain = self._chain(layer)
        add = self._sum_behind(chain)
        if add is not None and self.shortcut == "after":
            chain = self._chain(add)
        elif add is not None and self._is_shortcut(chain[-1], add):
            return None, "it is the shortcut, which keeps all its channels while masks go before the add"
        elif self._is_gate(chain):
            return None, "it is a gate: its filters go with the channels that it multiplies"
        if chain[0].meta.get("original_channels", self.flows.width(chain[0])) < 2:
            return None, "it has one filter only"
        reason = ""
        for candidate in self._candidates(chain):
            reason = next((why for _, why in revivals(self.flows, candidate)), "")
            if not reason:
                return self._behind_gather(candidate), ""
        return None, reason

    def _behind_gather(self, place: fx.Node) -> fx.Node:
        """Where an earlier cut left a gather as the only reader, the site is what the gather lets through."""
        user, _ = self._only_reader(place)
        return place if user is None or not user.meta.get("ends_site") else self._behind_gather(user)

    def _chain(self, start: fx.Node) -> list[fx.Node]:
        """`start` and what follows it channel by channel, as long as nobody else reads in between."""
        chain = [start]
        while True:
            users = self.flows.users.get(chain[-1], ())
            flow = self.flows.of[users[0]] if len(users) == 1 else None
            if flow is None or not (isinstance(flow, Channelwise) or self._hands_on(users[0])):
                return chain
            chain.append(users[0])

    def _hands_on(self, node: fx.Node) -> bool:
        """A depthwise layer with one filter a channel, or what an earlier cut put between two nodes."""
        if self._is_depthwise(node):
            return True
        return node.op == "call_module" and isinstance(self.graph.module.get_submodule(str(node.target)), Align)

    def _is_depthwise(self, node: fx.Node) -> bool:
        flow = self.flows.of[node]
        return isinstance(flow, Layer) and node.meta.get("filters_a_channel") == 1 and not flow.reads_all

    def _candidates(self, chain: list[fx.Node]) -> list[fx.Node]:
        """Where the mask may go, best first: from a layer's activation on, or from the layer if it has none.

        A depthwise layer further on loses the same filters, so the place behind its activation comes first: then every
        filter has one site.
        """
        starts = [i for i, n in enumerate(chain) if i == 0 or self._is_depthwise(n)]
        candidates: list[fx.Node] = []
        for start, end in zip(reversed(starts), [len(chain), *reversed(starts[1:])], strict=True):
            stretch = chain[start:end]
            active = [i for i, n in enumerate(stretch) if getattr(self.flows.of[n], "activation", False)]
            candidates += stretch[active[0] :] if active else stretch
        return candidates

    def _sum_behind(self, chain: list[fx.Node]) -> fx.Node | None:
        """The add that a chain without activation runs into, if it does."""
        if any(getattr(self.flows.of[n], "activation", False) for n in chain):
            return None
        users = self.flows.users.get(chain[-1], ())
        if len(users) != 1:
            return None
        flow = self.flows.of[users[0]]
        return users[0] if isinstance(flow, Join) and flow.zero_if == "all" and len(flow.in_axes) == 2 else None

    def _is_shortcut(self, end: fx.Node, add: fx.Node) -> bool:
        """Of the two ways into an add, the one with fewer layers of its own is the shortcut."""
        ways = [self._layers_above(i) for i in self.flows.inputs[add]]
        mine = self.flows.inputs[add].index(end)
        own, other = ways[mine] - ways[1 - mine], ways[1 - mine] - ways[mine]
        return bool(ways[0] & ways[1]) and len(own) < len(other)

    def _layers_above(self, node: fx.Node) -> set[fx.Node]:
        found, open_nodes = set(), [node]
        seen = set(open_nodes)
        while open_nodes:
            current = open_nodes.pop()
            if isinstance(self.flows.of[current], Layer):
                found.add(current)
            for source in self.flows.inputs[current]:
                if source not in seen:
                    seen.add(source)
                    open_nodes.append(source)
        return found

    def _is_gate(self, chain: list[fx.Node]) -> bool:
        """Ends in a product with a wider image: squeeze-and-excitation."""
        end = chain[-1]
        user, flow = self._only_reader(end)
        if user is not None and isinstance(flow, Join) and flow.zero_if == "first" and self.flows.inputs[user][0] is end:
            user, flow = self._only_reader(user)  # spread by expand_as to the shape of what it multiplies
        if user is None or not isinstance(flow, Join) or flow.zero_if != "any":
            return False
        return shape_of(end).dims != shape_of(user).dims

    def _only_reader(self, node: fx.Node) -> tuple[fx.Node | None, Flow | None]:
        users = self.flows.users.get(node, ())
        return (users[0], self.flows.of[users[0]]) if len(users) == 1 else (None, None)

    def site(self, layer: fx.Node, place: fx.Node) -> Site:
        """The record of the site behind `place`."""
        channels = self.flows.width(place)
        keep = torch.ones(channels, dtype=torch.bool)
        keep[0] = False
        dead = analyse(self.flows, {place: keep}).need
        layers = tuple(str(n.target) for n in dead if isinstance(self.flows.of[n], Layer) and self._loses(n, dead[n]))
        ids = self.graph.ids.get(place.name)
        original = tuple(range(channels)) if ids is None else tuple(ids.tolist())
        axis = self.flows.of[place].axis
        assert axis is not None
        wide = place.meta.get("original_channels", channels)
        name = place.meta.get("site_names", {}).get(self.shortcut) or self._name(layer, layers[::-1])
        return Site(name, channels, place.name, axis, layers[::-1], original, wide)

    def _loses(self, layer: fx.Node, needed: Tensor) -> bool:
        """Whether the layer needs fewer filters than without any mask."""
        before = self.idle.get(layer)
        return before is None or not torch.equal(before, needed)

    def _name(self, layer: fx.Node, layers: tuple[str, ...]) -> str:
        """The path of the layer that loses filters; for a site behind an add, the path of the add."""
        add = self._sum_behind(self._chain(layer))
        if add is not None and self.shortcut == "after":
            return str(add.meta["name"])
        path = str(layer.target)
        return path if path in layers or not layers else layers[0]


def _macs(graph: Graph, node: fx.Node, flow: Layer) -> int:
    """MACs of a layer for one example."""
    weight = graph.module.get_submodule(str(node.target)).weight
    assert isinstance(weight, Tensor)
    places, axis = (node.all_input_nodes[0], flow.in_axis) if flow.transposed else (node, flow.axis)
    return weight.numel() * _places(places, axis)


def _places(node: fx.Node, axis: int) -> int:
    """How many places of one example a layer's weights are used at: all axes but the batch and the channels."""
    dims = shape_of(node).dims
    assert dims is not None
    return math.prod(n for dim, n in enumerate(dims) if dim != axis and not (dim == 0 and axis > 0))


def _opaque_layers(graph: Graph, flows: Flows) -> Iterable[Unprunable]:
    """Layers that are opaque themselves: called several times, tied, hooked, or called with computed weights; each once."""
    counted: Counter[str] | None = None
    seen: set[str] = set()
    for node, flow in flows.of.items():
        path = str(node.target)
        if node.op == "call_function" and node.target in FUNCTIONAL and isinstance(flow, Opaque):
            macs = _functional_macs(node, FUNCTIONAL[node.target])
            yield Unprunable(str(node.meta["name"]), node.name, "its weights are computed while the network runs", macs)
        elif isinstance(flow, Opaque) and node.op == "call_module" and path not in seen:
            seen.add(path)
            if any(True for _ in graph.module.get_submodule(path).parameters()):
                counted = counted or count_macs(graph.module, graph.example)
                inside = sum(n for name, n in counted.items() if name == path or name.startswith(f"{path}."))
                yield Unprunable(path, node.name, flow.reason, inside)


def _functional_macs(node: fx.Node, transposed: bool) -> int:
    """MACs for one example of a convolution or linear layer that is called with its weights as an argument."""
    weight = node.args[1] if len(node.args) > 1 else node.kwargs["weight"]
    assert isinstance(weight, fx.Node)
    dims = shape_of(weight).dims
    assert dims is not None
    source = node.all_input_nodes[0] if transposed else node
    rank = len(shape_of(source).dims or ())
    return math.prod(dims) * _places(source, rank - 1 - max(len(dims) - 2, 0))
