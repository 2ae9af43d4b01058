"""Step 2 of 9: find the `Site`s of a Graph in network order: places where a zeroed channel stays zero until it is read.

A layer's site lies behind the activation that follows it. In a residual block the last layer's site lies before the add, or
behind the add's activation (the two shortcut positions of the paper). A layer without a site is listed with the reason.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args, overload
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from secateurs.config import Shortcut
from secateurs.errors import InvalidInput, InvalidMask, UnknownSite, suggest
from secateurs.graph.add_fusion import spread_sums
from secateurs.graph.cost import count_macs
from secateurs.graph.flow import Channelwise, Flow, Flows, Join, Layer, Opaque, analyse, find_flows, revivals
from secateurs.graph.layers import Align
from secateurs.graph.node_info import called_module, dims_of, info, shape_of
from secateurs.graph.trace import Example, Graph, trace

FUNCTIONAL: dict[Any, bool] = {  # layers in functional form, and whether they are transposed
    **dict.fromkeys((torch.conv1d, torch.conv2d, torch.conv3d, F.linear), False),
    **dict.fromkeys((torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d), True),
}


_KNOWN: WeakKeyDictionary[Graph, dict[Shortcut, Sites]] = WeakKeyDictionary()
"""Sites by graph: a graph's structure does not change once it is made."""


@dataclass(frozen=True)
class Site:
    """A place where a channel can be zeroed and stays zero until it is read.

    The mask goes behind the graph node `node`, along `axis`. `layers` lose one filter for each removed channel. `original`
    holds the ids, in the uncut network, of the channels that remain.
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
    """A layer without a site, the reason, and its MACs for one example."""

    name: str
    node: str
    reason: str
    macs: int


class Sites(Sequence[Site]):
    """The sites of a graph in network order; `unprunable` lists the layers without a site, with reasons."""

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


def find_sites(
    graph: Graph | nn.Module, example_input: Example | Shortcut | None = None, shortcut: Shortcut = "before"
) -> Sites:
    """Find all sites of a traced network, or of a module that is traced with `example_input`.

    `shortcut` says whether the end of a residual block is masked before or after the add; for a graph it may come second.
    """
    if isinstance(example_input, str):
        shortcut = example_input
    elif isinstance(graph, nn.Module) and example_input is not None:
        graph = trace(graph, example_input)
    if not isinstance(graph, Graph):
        raise InvalidInput(
            f"graph: got {type(graph).__name__} without an example, wanted a Graph, or a module and an example input: "
            f"find_sites(model, example_input)."
        )
    if shortcut not in ("before", "after"):
        raise InvalidInput(f"shortcut: got {shortcut!r}, wanted 'before' or 'after' (the add).")
    known = _KNOWN.setdefault(graph, {})
    if shortcut not in known:
        known[shortcut] = _all_sites(graph, shortcut)
    return known[shortcut]


def share_sites(source: Graph, target: Graph) -> None:
    """Let `target`, a graph of the same structure as `source`, reuse the sites that were found for `source`."""
    _KNOWN[target] = dict(_KNOWN.get(source, {}))


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
                weight = graph.module.get_submodule(str(node.target)).weight
                assert isinstance(weight, Tensor)
                refused.append(Unprunable(str(node.target), node.name, reason, _macs(weight.shape, node, flow.transposed)))
            elif place not in sites:
                sites[place] = search.site(node, place)
    covered = {layer for site in sites.values() for layer in site.layers}
    found = [sites[place] for place in flows.of if place in sites]
    return Sites(found, [u for u in [*refused, *_opaque_layers(graph, flows)] if u.name not in covered])


def remember_names_(graph: Graph, module: fx.GraphModule) -> None:
    """Record the names of the sites in `module`, a copy of the uncut network: a cut may remove the layer that they name."""
    nodes = {node.name: node for node in module.graph.nodes}
    for shortcut in get_args(Shortcut):
        for site in find_sites(graph, shortcut):
            info(nodes[site.node]).setdefault("site_names", {})[shortcut] = site.name


def find_site(graph: Graph, name: str) -> Site:
    """Find the site called `name`, at either shortcut position; `UnknownSite` names similar ones, or the reason."""
    return resolve(graph, [name])[name]


def resolve(graph: Graph, names: Iterable[str | Site]) -> dict[str, Site]:
    """Look up sites by name in `graph`: an earlier cut may have narrowed them."""
    wanted = [n.name if isinstance(n, Site) else n for n in names]
    before = find_sites(graph, "before")
    known = {site.name: site for site in before}
    if any(name not in known for name in wanted):
        known |= {site.name: site for site in find_sites(graph, "after") if site.name not in known}
    for name in wanted:
        if name not in known:
            reasons = [u.reason for u in before.unprunable if u.name == name]
            if reasons:
                raise UnknownSite(f"{name!r} is not a site: {reasons[-1]}.")
            if name in graph.plan.removed():
                raise UnknownSite(f"site {name!r} is gone: an earlier cut folded its branch away.")
            raise UnknownSite(f"no site {name!r} in this graph.{suggest(str(name), known)} find_sites(graph) lists them all.")
    return {name: known[name] for name in wanted}


def check_masks(graph: Graph, masks: Mapping[str | Site, Tensor]) -> dict[str, tuple[Site, Tensor]]:
    """Look up the sites of `masks` in `graph` and check the masks: bool, one value for each channel that the site has now."""
    if not isinstance(masks, Mapping):
        raise InvalidMask(f"masks: got {type(masks).__name__}, wanted a dict of bool tensors by site or its name.")
    sites = resolve(graph, masks)
    checked: dict[str, tuple[Site, Tensor]] = {}
    for key, keep in masks.items():
        name = key.name if isinstance(key, Site) else key
        site = sites[name]
        if name in checked:
            raise InvalidMask(f"site {name!r} is given twice, as a Site and by its name. Pass one mask for each site.")
        if isinstance(keep, Tensor) and keep.is_meta:
            raise InvalidMask(
                f"mask of site {name!r}: got a tensor on the meta device, which has no values. Create it on the CPU."
            )
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
    """Search from a layer for the node behind which its channels can be masked."""

    graph: Graph
    flows: Flows
    shortcut: Shortcut
    unmasked: Mapping[fx.Node, Tensor]  # channels that are needed without any mask, where that is not all of them

    def place(self, layer: fx.Node) -> tuple[fx.Node | None, str]:
        """Return the node behind which the mask of `layer` goes, or None and the reason."""
        chain = self._chain(layer)
        add = self._sum_behind(chain)
        if add is not None and self.shortcut == "after":
            chain = self._chain(add)
        elif add is not None and self._is_shortcut(chain[-1], add):
            return None, "it is the shortcut, which keeps all its channels while masks go before the add"
        elif self._is_gate(chain):
            return None, "it is a gate: its filters go with the channels that it multiplies"
        if info(chain[0]).get("original_channels", self.flows.width(chain[0])) < 2:
            return None, "it has one filter only"
        reason = ""
        for candidate in self._candidates(chain):
            reason = next((why for _, why in revivals(self.flows, candidate)), "")
            if not reason:
                return self._behind_gather(candidate), ""
        return None, reason

    def _behind_gather(self, place: fx.Node) -> fx.Node:
        """Where a gather of an earlier cut is the only consumer, the site is the output of the gather."""
        user, _ = self._only_user(place)
        return place if user is None or not info(user).get("ends_site") else self._behind_gather(user)

    def _chain(self, start: fx.Node) -> list[fx.Node]:
        """Return `start` and the ops behind it that treat each channel alone, up to the first value with several consumers.

        Depthwise layers with one filter for each channel and alignments of earlier cuts belong to the chain.
        """
        chain = [start]
        while True:
            user, flow = self._only_user(chain[-1])
            if user is None or not (
                isinstance(flow, Channelwise)
                or self._is_depthwise(user)
                or isinstance(called_module(self.graph.module, user), Align)
            ):
                return chain
            chain.append(user)

    def _is_depthwise(self, node: fx.Node) -> bool:
        flow = self.flows.of[node]
        return isinstance(flow, Layer) and info(node).get("filters_a_channel") == 1 and not flow.reads_all

    def _is_activation(self, node: fx.Node) -> bool:
        flow = self.flows.of[node]
        return isinstance(flow, Channelwise) and flow.activation

    def _candidates(self, chain: list[fx.Node]) -> list[fx.Node]:
        """Return the nodes behind which the mask may go, best first: from a layer's activation, or from the layer without one.

        A depthwise layer later in the chain loses the same filters, so the place behind its activation comes first: then every
        filter has one site.
        """
        starts = [i for i, n in enumerate(chain) if i == 0 or self._is_depthwise(n)]
        candidates: list[fx.Node] = []
        for start, end in zip(reversed(starts), [len(chain), *reversed(starts[1:])], strict=True):
            stretch = chain[start:end]
            active = [i for i, n in enumerate(stretch) if self._is_activation(n)]
            candidates += stretch[active[0] :] if active else stretch
        return candidates

    def _sum_behind(self, chain: list[fx.Node]) -> fx.Node | None:
        """Return the add that follows a chain without activation, if there is one."""
        if any(self._is_activation(n) for n in chain):
            return None
        user, flow = self._only_user(chain[-1])
        return user if isinstance(flow, Join) and flow.zero_if == "all" and len(flow.in_axes) == 2 else None

    def _is_shortcut(self, end: fx.Node, add: fx.Node) -> bool:
        """Of the two branches into an add, the shortcut is the one with fewer layers that the other does not have."""
        branches = [self._layers_above(i) for i in self.flows.inputs[add]]
        mine = self.flows.inputs[add].index(end)
        own, other = branches[mine] - branches[1 - mine], branches[1 - mine] - branches[mine]
        return bool(branches[0] & branches[1]) and len(own) < len(other)

    def _layers_above(self, node: fx.Node) -> set[fx.Node]:
        seen, open_nodes = {node}, [node]
        while open_nodes:
            sources = set(self.flows.inputs[open_nodes.pop()]) - seen
            seen |= sources
            open_nodes += sources
        return {n for n in seen if isinstance(self.flows.of[n], Layer)}

    def _is_gate(self, chain: list[fx.Node]) -> bool:
        """Whether the chain ends in a product with a larger image: squeeze-and-excitation."""
        end = chain[-1]
        user, flow = self._only_user(end)
        if user is not None and isinstance(flow, Join) and flow.zero_if == "first" and self.flows.inputs[user][0] is end:
            user, flow = self._only_user(user)  # spread by expand_as to the shape of what it multiplies
        if user is None or not isinstance(flow, Join) or flow.zero_if != "any":
            return False
        return shape_of(end).dims != shape_of(user).dims

    def _only_user(self, node: fx.Node) -> tuple[fx.Node | None, Flow | None]:
        users = self.flows.users.get(node, ())
        return (users[0], self.flows.of[users[0]]) if len(users) == 1 else (None, None)

    def site(self, layer: fx.Node, place: fx.Node) -> Site:
        """Return the site behind `place`."""
        channels = self.flows.width(place)
        keep = torch.ones(channels, dtype=torch.bool)
        keep[0] = False
        dead = analyse(self.flows, {place: keep}).need
        unchanged = {n for n, needed in self.unmasked.items() if n in dead and torch.equal(needed, dead[n])}
        layers = tuple(str(n.target) for n in dead if isinstance(self.flows.of[n], Layer) and n not in unchanged)
        ids = self.graph.ids.get(place.name)
        original = tuple(range(channels)) if ids is None else tuple(ids.tolist())
        axis = self.flows.of[place].axis
        assert axis is not None
        wide = info(place).get("original_channels", channels)
        name = info(place).get("site_names", {}).get(self.shortcut) or self._name(layer, layers[::-1])
        return Site(name, channels, place.name, axis, layers[::-1], original, wide)

    def _name(self, layer: fx.Node, layers: tuple[str, ...]) -> str:
        """Return the path of the layer that loses filters; for a site behind an add, the name of the add."""
        add = self._sum_behind(self._chain(layer))
        if add is not None and self.shortcut == "after":
            return info(add)["name"]
        path = str(layer.target)
        return path if path in layers or not layers else layers[0]


def _macs(weight: Sequence[int], node: fx.Node, transposed: bool) -> int:
    """Count the MACs of a layer for one example from the shape of its weight.

    Each weight is used once at each place of the output (of a transposed convolution: of the input): all axes but the batch and
    the channels, which lie before the axes of the kernel.
    """
    dims = dims_of(node.all_input_nodes[0] if transposed else node)
    axis = len(dims) - 1 - max(len(weight) - 2, 0)
    return math.prod(weight) * math.prod(n for dim, n in enumerate(dims) if dim != axis and not (dim == 0 and axis > 0))


def _opaque_layers(graph: Graph, flows: Flows) -> Iterable[Unprunable]:
    """List layers that are opaque themselves: called several times, tied, hooked, or with computed weights; each once."""
    counted: Counter[str] | None = None
    seen: set[str] = set()
    for node, flow in flows.of.items():
        path = str(node.target)
        if node.op == "call_function" and node.target in FUNCTIONAL and isinstance(flow, Opaque):
            weight = node.args[1] if len(node.args) > 1 else node.kwargs["weight"]
            assert isinstance(weight, fx.Node)
            macs = _macs(dims_of(weight), node, FUNCTIONAL[node.target])
            yield Unprunable(info(node)["name"], node.name, "its weights are computed while the network runs", macs)
        elif isinstance(flow, Opaque) and node.op == "call_module" and path not in seen:
            seen.add(path)
            if any(True for _ in graph.module.get_submodule(path).parameters()):
                counted = counted or count_macs(graph.module, graph.example)
                inside = sum(n for name, n in counted.items() if name == path or name.startswith(f"{path}."))
                yield Unprunable(path, node.name, flow.reason, inside)
