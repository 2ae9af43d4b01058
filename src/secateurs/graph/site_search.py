"""Search of a network for its sites: from each layer to the node behind which its channels can be masked, or to the reason."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from secateurs.config import Shortcut
from secateurs.graph.add_fusion import spread_ids, spread_sums
from secateurs.graph.channels import ids, none_of
from secateurs.graph.cost import count_macs
from secateurs.graph.coupling import Classes, Group, channels_of, find_classes, find_groups
from secateurs.graph.flow import (
    ELSEWHERE,
    Blocks,
    Channelwise,
    Contracted,
    Flow,
    Flows,
    Join,
    Layer,
    Moved,
    Norm,
    Opaque,
    Recurrent,
    analyse,
    find_flows,
    find_revivals,
)
from secateurs.graph.flow.liveness import Revivals
from secateurs.graph.node_info import dims_of, info, shape_of
from secateurs.graph.recurrent import recurrent_call
from secateurs.graph.site import MaskPoint, Site, Sites, Unprunable
from secateurs.graph.streams import find_streams, keeps_numbers
from secateurs.graph.trace import Graph

FUNCTIONAL: dict[Any, bool] = {  # layers in functional form, and whether they are transposed
    **dict.fromkeys((torch.conv1d, torch.conv2d, torch.conv3d, F.linear), False),
    **dict.fromkeys((torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d), True),
}


Position = Shortcut | Literal["widths"]
"""Where sites are looked for: a shortcut position, or the features within heads of attention."""


def search_sites(graph: Graph, shortcut: Position) -> Sites:
    """Find all sites of a traced network at one position."""
    present = frozenset(node.name for node in graph.module.graph.nodes)
    module = spread_sums(graph.module)
    graph = replace(graph, module=module, ids=spread_ids(module, graph.ids))
    flows = find_flows(graph.module, inside=shortcut == "widths")
    order = {node: place for place, node in enumerate(flows.of)}
    search = _Search(graph, flows, shortcut, analyse(flows, {}).need, {}, order, present)
    if shortcut == "widths":
        return search.widths()
    calls: dict[str, list[fx.Node]] = {}
    macs: Counter[str] = Counter()
    for node, flow in flows.of.items():
        if isinstance(flow, Layer):
            calls.setdefault(str(node.target), []).append(node)
            weight: Any = graph.module.get_submodule(str(node.target)).weight
            macs[str(node.target)] += _macs(weight.shape, node, flow.transposed)
    sites = search.streams() if shortcut == "stream" else []
    reasons: dict[str, str]
    classes = find_classes(flows, graph.ids) if shortcut == "coupled" else None
    if classes is not None:
        coupled, reasons = find_groups(classes)
        tried = [(group.layers, search.coupled(classes, group)) for group in coupled]
    else:
        replaced = search.covered_by(sites)
        groups, reasons = search.groups({path: nodes for path, nodes in calls.items() if not replaced.issuperset(nodes)})
        tried = [(tuple(layers), search.site(places, partial(search.name_of, layers[0]))) for layers, places in groups]
    for layers, found in tried:
        if isinstance(found, Site):
            sites.append(found)
        else:
            reasons |= {str(layer.target): found for layer in layers}
    for call, parts in _recurrent_calls(flows).items():
        obstacle = classes.obstacle_of_units(parts) if classes is not None else ""
        found, path = obstacle or search.recurrent_site(call, parts), str(call.target)
        macs[path] = 0 if isinstance(found, Site) else count_macs(graph.module, graph.example)[path]
        if isinstance(found, Site):
            sites.append(found)
        else:
            calls[path], reasons[path] = [call], found
    place = {node.name: order for order, node in enumerate(graph.module.graph.nodes)}
    sites.sort(key=lambda site: place[site.node])
    sites = _one_of_a_name([site for site in sites if not _goes_with_another(site, sites, flows)])
    refused = [Unprunable(path, calls[path][0].name, reason, macs[path]) for path, reason in reasons.items()]
    covered = {layer for site in sites for layer in site.layers}
    return Sites(sites, [u for u in [*refused, *_opaque_layers(graph, flows)] if u.name not in covered])


def _recurrent_calls(flows: Flows) -> dict[fx.Node, list[fx.Node]]:
    """Return the calls of recurrent modules, each with those of its outputs and states that are used."""
    found: dict[fx.Node, list[fx.Node]] = {}
    for node, flow in flows.of.items():
        call = recurrent_call(node) if isinstance(flow, Recurrent) else None
        if call is not None:
            found.setdefault(call, []).append(node)
    return found


def _goes_with_another(site: Site, sites: Sequence[Site], flows: Flows) -> bool:
    """Whether a depthwise layer's site only repeats another: its filters and those that feed it go there, with more of them."""
    if len(site.points) == 1 or not any(info(n).get("filters_a_channel") for n in flows.of if str(n.target) == site.name):
        return False
    own = set(site.layers)
    return any(other is not site and other.name in own and own <= set(other.layers) for other in sites)


def _one_of_a_name(sites: Sequence[Site]) -> list[Site]:
    """Of sites of one name, which remove the same filters, keep the one with most layers, in the order given.

    Queries and values of linear attention have a place each; where heads share keys and values, a query's filters go at either.
    """
    best: dict[str, Site] = {}
    for site in sites:
        if site.name not in best or len(site.layers) > len(best[site.name].layers):
            best[site.name] = site
    return [site for site in sites if best[site.name] is site]


@dataclass(frozen=True)
class _Search:
    """Search from a layer for the node behind which its channels can be masked."""

    graph: Graph
    flows: Flows
    shortcut: Position
    unmasked: Mapping[fx.Node, Tensor]  # channels that are needed without any mask, where that is not all of them
    known: dict[tuple[fx.Node, bool], Revivals]  # by place, once they are found
    order: Mapping[fx.Node, int]  # of the nodes in the network
    present: frozenset[str]  # nodes of the network itself; what a fused sum is spread into is not there

    def groups(
        self, calls: Mapping[str, Sequence[fx.Node]]
    ) -> tuple[list[tuple[list[fx.Node], list[fx.Node]]], dict[str, str]]:
        """Return the layers and the places of each site in network order, and by path why other layers have none.

        A layer that is called several times needs a place behind each call; layers with a place in common share a site, and so
        do layers before the calls of one BatchNorm: its statistics are those of all of them.
        """
        reasons: dict[str, str] = {}
        groups: list[tuple[list[fx.Node], list[fx.Node]]] = []
        norms = {call: calls[0] for calls in self.flows.counted for call in calls}
        behind: dict[fx.Node, list[fx.Node]] = {}  # the places behind the calls of one BatchNorm
        for path, nodes in calls.items():
            places: list[fx.Node] = []
            for node in nodes:
                place, reason = self.place(node)
                if place is None:
                    reasons[path] = reason if len(nodes) == 1 else f"{reason} (it is called {len(nodes)} times)"
                    break
                places.append(place)
            else:
                layers = [nodes[0]]
                for norm in {norms[n] for node in nodes for n in self._chain(node) if n in norms}:
                    places += behind.setdefault(norm, [])
                    behind[norm] += places
                for group in [g for g in groups if not set(places).isdisjoint(g[1])]:
                    groups.remove(group)
                    layers, places = group[0] + layers, group[1] + places
                groups.append((layers, list(dict.fromkeys(places))))
        for _, found in groups:
            found.sort(key=self.order.__getitem__)
        return sorted(groups, key=lambda group: self.order[group[1][0]]), reasons

    def place(self, layer: fx.Node) -> tuple[fx.Node | None, str]:
        """Return the node behind which the mask of `layer` goes, or None and the reason.

        With streams, a norm over channels that follows the layer may be that node: its statistics leave out removed channels.
        """
        place, reason = self._place(layer, norms=False)
        return (place, reason) if place is not None or self.shortcut != "stream" else self._place(layer, norms=True)

    def _place(self, layer: fx.Node, *, norms: bool) -> tuple[fx.Node | None, str]:
        chain = self._chain(layer)
        add = self._sum_behind(chain)
        if add is not None and self.shortcut == "after":
            chain = self._chain(add)
        elif add is not None and self._is_shortcut(chain[-1], add):
            return None, "it is the shortcut, which keeps all its channels while masks go before the add"
        elif self._is_gate(chain):
            return None, "it is a gate: its filters go with the channels that it multiplies"
        if self._original(chain[0]) < 2:
            return None, "it has one filter only"
        joined = [i for i, node in enumerate(chain) if self._joins(node)]
        chain = chain[joined[-1] :] if joined else chain
        meeting, joins = self._meeting(chain[-1])
        if meeting is not None and (joined or joins):
            return self._best(self._candidates(self._chain(meeting)), norms=norms)
        user, flow = self._only_user(chain[-1])
        if norms and user is not None and isinstance(flow, Norm) and keeps_numbers(self.flows, user, self._numbers):
            return self._best([user], norms=True)
        place, reason = self._best(self._candidates(chain), norms=norms)
        if meeting is not None and (place is None or self._revivals(place).points):
            other, _ = self._best(self._candidates(self._chain(meeting)))
            place = other or place
        return place, "" if place is not None else reason

    def _joins(self, node: fx.Node) -> bool:
        """Whether a node makes one channel of several that are removed together."""
        flow = self.flows.of[node]
        return isinstance(flow, Blocks) and flow.together

    def _meeting(self, start: fx.Node) -> tuple[fx.Node | None, bool]:
        """Return the product where all that is made of the channels of `start` meets: a gate, the output of attention.

        The second value says whether channels are joined on the way there.
        """
        heads, joins = {start}, False
        while heads:
            node = min(heads, key=self.order.__getitem__)
            flow = self.flows.of[node]
            if len(heads) == 1 and node is not start and isinstance(flow, Join):
                return (node if flow.zero_if in ("any", "third") else None), joins
            if node is not start and not (self._joins(node) or isinstance(flow, Channelwise | Moved | Join)):
                break
            joins = joins or (node is not start and self._joins(node))
            heads = heads - {node} | set(self.flows.users.get(node, ()))
        return None, joins

    def _best(self, candidates: Iterable[fx.Node], *, norms: bool = False) -> tuple[fx.Node | None, str]:
        """Return the first candidate with the fewest further mask points, or None and the reason."""
        best: fx.Node | None = None
        reason = ""
        for candidate in candidates:
            found = self._revivals(candidate, norms=norms)
            reason = found.obstacle or ("" if self._original(candidate) > 1 else "it has one head only")
            if not reason and (best is None or len(found.points) < len(self._revivals(best, norms=norms).points)):
                best = candidate
            if best is not None and not self._revivals(best, norms=norms).points:
                break
        return (None, reason) if best is None else (self._behind_gather(best), "")

    def _original(self, node: fx.Node) -> int:
        """Return the number of channels of a node in the uncut network."""
        if self.shortcut == "widths":
            return info(node).get("features", ((), self.flows.width(node)))[1]
        return info(node).get("original_channels", self.flows.width(node))

    def _revivals(self, place: fx.Node, *, norms: bool = False) -> Revivals:
        if (place, norms) not in self.known:
            self.known[place, norms] = self._followed([place], norms=norms).revivals
        return self.known[place, norms]

    def _behind_gather(self, place: fx.Node) -> fx.Node:
        """Where a gather of an earlier cut is the only consumer, the site is the output of the gather."""
        user, _ = self._only_user(place)
        return place if user is None or not info(user).get("ends_site") else self._behind_gather(user)

    def _chain(self, start: fx.Node) -> list[fx.Node]:
        """Return `start` and the ops behind it that treat each channel alone, up to the first value with several consumers.

        Depthwise layers with one filter for each channel belong to the chain. So do alignments of earlier cuts. Nothing behind
        a shuffle or a part does, though a cut may have erased that: channels have other numbers there.
        """
        chain = [start]
        while True:
            user, flow = self._only_user(chain[-1])
            if user is None or not (
                self._joins(user)
                or (
                    (isinstance(flow, Channelwise) or self._is_depthwise(user) or (isinstance(flow, Moved) and flow.added))
                    and keeps_numbers(self.flows, user, self._numbers)
                )
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

    def _layers_above(self, node: fx.Node, *, nearest: bool = False) -> set[fx.Node]:
        seen, open_nodes = {node}, [node]
        while open_nodes:
            above = open_nodes.pop()
            if nearest and isinstance(self.flows.of[above], Layer):
                continue
            sources = set(self.flows.inputs[above]) - seen
            seen |= sources
            open_nodes += sources
        return {n for n in seen if isinstance(self.flows.of[n], Layer)}

    def _is_gate(self, chain: list[fx.Node]) -> bool:
        """Whether the chain ends in a product with a larger image: squeeze-and-excitation."""
        end = chain[-1]
        user, flow = self._only_user(end)
        if user is not None and isinstance(flow, Join) and flow.zero_if == "first" and self.flows.inputs[user][0] is end:
            user, flow = self._only_user(user)  # spread by expand_as to the shape of what it multiplies
        if user is None or not isinstance(flow, Join) or flow.zero_if != "any" or None in flow.in_axes:
            return False
        return shape_of(end).dims != shape_of(user).dims

    def _only_user(self, node: fx.Node) -> tuple[fx.Node | None, Flow | None]:
        users = self.flows.users.get(node, ())
        return (users[0], self.flows.of[users[0]]) if len(users) == 1 else (None, None)

    def streams(self) -> list[Site]:
        """Return the sites of the streams: one mask for all the tensors that the sums of a stage join."""
        sites: list[Site] = []
        for stream in find_streams(self.flows, self._numbers):
            taken = {site.name for site in sites}
            names = (stream.name if not number else f"{stream.name}_{number}" for number in count())
            name = next(name for name in names if name not in taken)
            places = self._with_all_parts([self._behind_gather(place) for place in stream.places])
            found = self.site(places, partial(_given, name)) if places else ""
            if isinstance(found, Site) and found.layers:
                sites.append(found)
        return sites

    def _with_all_parts(self, places: Sequence[fx.Node]) -> list[fx.Node]:
        """Return the places, with all outputs and states of the recurrent modules among them, in network order.

        A unit that goes is gone from all of them. Empty where one has outputs of two directions: these go together, while the
        channels of a stream go one by one.
        """
        calls = {recurrent_call(place) for place in places if isinstance(self.flows.of[place], Recurrent)}
        parts = [part for call, found in _recurrent_calls(self.flows).items() if call in calls for part in found]
        if any(flow.copies > 1 for part in parts if isinstance(flow := self.flows.of[part], Recurrent)):
            return []
        return sorted({*places, *parts}, key=self.order.__getitem__)

    def covered_by(self, sites: Sequence[Site]) -> set[fx.Node]:
        """Return the layers all of whose filters go with channels of `sites`."""
        nodes = {node.name: node for node in self.graph.module.graph.nodes}
        covered: dict[fx.Node, Tensor] = {}
        for site in sites:
            for left in (0, site.channels - 1):  # without any channel left, whole branches would be dead
                keep = torch.arange(site.channels) == left
                need = analyse(self.flows, {nodes[point.node]: point.mask(keep) for point in site.points}).need
                for node, needed in need.items():
                    if isinstance(self.flows.of[node], Layer) and str(node.target) in site.layers:
                        covered[node] = covered.get(node, none_of(len(needed))) | ~needed
        return {node for node, filters in covered.items() if bool(filters.all())}

    def site(self, places: Sequence[fx.Node], named: Callable[[tuple[str, ...]], str]) -> Site | str:
        """Return the site behind `places`, or why there is none; `named` gives its name from those of its layers."""
        followed = self._followed(places, norms=False)
        if followed.revivals.obstacle and self.shortcut == "stream":
            followed = self._followed(places, norms=True)
        return self._site_at(named, followed)

    def coupled(self, classes: Classes, group: Group) -> Site | str:
        """Return the site of classes of channels that are written by the same layers, or why there is none."""
        alone = len({str(layer.target) for layer in group.layers}) == 1
        places: dict[fx.Node, None] = {}
        for layer in group.layers:
            place = self.place(layer)[0] if alone else None
            if place is None or not set(group.classes) <= set(classes.of(place).tolist()):
                chain = self._chain(layer)
                candidates = self._candidates(chain[: next((i for i, n in enumerate(chain) if self._joins(n)), len(chain))])
                place = next((n for n in candidates if self._is_activation(n)), candidates[-1])
            places.setdefault(place)
        for node in classes.with_parameters():
            if not set(group.classes).isdisjoint(classes.of(node).tolist()):
                places.setdefault(node)
        starts = {place: group.sources(classes.of(place)) for place in sorted(places, key=self.order.__getitem__)}
        first = next(iter(starts))
        original = torch.tensor(channels_of(first, classes, group, self.graph.ids))
        whole = len(starts) == 1 and len(original) == self._original(first)
        named = partial(self.name_of, group.layers[0], whole=whole)
        followed = _Followed(original, max(map(self._original, starts)), starts, find_revivals(self.flows, starts, norms=True))
        return self._site_at(named, followed, own=len(starts))

    def _site_at(self, named: Callable[[tuple[str, ...]], str], followed: _Followed, own: int = 1) -> Site | str:
        """Return the site of the channels that were followed; `own` of the nodes where they start only together are it."""
        original, starts, found = followed.original, followed.starts, followed.revivals
        if found.obstacle:
            return found.obstacle
        places = list(starts)
        points = {**starts, **found.points}
        if any(node.name not in self.present for node in points):
            return "an earlier cut has aligned the terms of a sum that it is added to"
        removed: set[fx.Node] = set()
        for channel in sorted({0, *found.filtered}):
            keep = torch.arange(len(original)) != channel
            masks = {node: (source == ELSEWHERE) | keep[source] for node, source in points.items()}
            dead = analyse(self.flows, masks).need
            unchanged = {n for n, needed in self.unmasked.items() if n in dead and torch.equal(needed, dead[n])}
            removed |= {n for n in dead if isinstance(self.flows.of[n], Layer) and n not in unchanged}
        layers = tuple(dict.fromkeys(str(n.target) for n in self.flows.of if n in removed))
        if not layers and len(points) > 1:
            return "its filters are read elsewhere, too, such as for the statistics of a BatchNorm that is called several times"
        names = [info(place).get("site_names", {}).get(self.shortcut) for place in places]
        name = next((name for name in names if name), None) or named(layers)
        points_of = (*(self._point(node, source, points) for node, source in points.items()), *self._points_within(starts))
        unit = "features" if self.shortcut == "widths" else "heads" if self._is_of_heads(places[0]) else "filters"
        return Site(name, len(original), layers, tuple(original.tolist()), followed.wide, points_of, own, unit=unit)

    def _is_of_heads(self, place: fx.Node) -> bool:
        """Whether the channels of a node are the heads of attention: it multiplies matrices of each."""
        flow = self.flows.of[place]
        return isinstance(flow, Join) and flow.zero_if in ("any", "third") and not flow.broadcasts

    def widths(self) -> Sites:
        """Return the sites of the features within heads: those of queries and keys together, and those of values."""
        found: dict[str, Site] = {}
        refused: dict[str, Unprunable] = {}
        for node, flow in self.flows.of.items():
            inputs = self.flows.inputs[node]
            weighted = isinstance(flow, Join) and flow.zero_if == "any" and flow.in_axes == (None, flow.axis)
            places = {"query_key": inputs[0]} if isinstance(flow, Contracted) else {}
            if weighted or (isinstance(flow, Contracted) and flow.axis is not None):
                places["value"] = inputs[1 if weighted else 2]
            for word, place in places.items():
                view = self._view_of_heads(place)
                if view is None or place.name not in self.present:
                    continue
                layer = min(self._layers_above(view, nearest=True), key=self.order.__getitem__, default=view)
                name = f"{layer.target}.{word}"
                site = self.site([place], lambda layers, name=name: name)  # type: ignore[misc]  # mypy cannot infer such a lambda
                reason = site if isinstance(site, str) else ""
                if not reason and self._original(place) < 2:
                    reason = "its heads have one feature only"
                if not reason and isinstance(site, Site) and not site.layers:
                    reason = "its filters are read elsewhere, too, or mixed within heads"
                if reason:
                    refused[name] = Unprunable(name, place.name, reason, 0)
                elif isinstance(site, Site) and name not in found:
                    found[name] = replace(site, inside=True)
        return Sites(found.values(), [u for name, u in refused.items() if name not in found])

    def _view_of_heads(self, node: fx.Node) -> fx.Node | None:
        """Return the view above `node` that divides channels among heads, with nothing but ops on single channels between."""
        while isinstance(self.flows.of[node], Channelwise):
            (node, *_) = self.flows.inputs[node]
        flow = self.flows.of[node]
        if not isinstance(flow, Blocks) or not flow.together:
            return None
        alone = flow.members.shape[1] == 1 and info(node).get("channel_axis", flow.axis) == flow.axis
        return None if alone else node  # the features of a single head are channels like others

    def recurrent_site(self, call: fx.Node, parts: Sequence[fx.Node]) -> Site | str:
        """Return the site of the hidden units of a recurrent module, behind its `parts` and within it, or why there is none."""
        flow = self.flows.of[parts[0]]
        assert isinstance(flow, Recurrent)
        wide = self._original(parts[0]) // flow.copies
        if wide < 2:
            return "it has one hidden unit only"
        starts = {part: torch.arange(self.flows.width(part)) % flow.units for part in parts}
        found = find_revivals(self.flows, starts)
        if found.obstacle:
            return found.obstacle
        original = self.graph.ids.get(parts[0].name, torch.arange(wide))[: flow.units]
        behind = {**starts, **found.points}
        points = [self._point(node, source, behind) for node, source in behind.items()]
        path = str(call.target)
        within = self._points_within(starts)
        return Site(path, flow.units, (path,), tuple(original.tolist()), wide, (*points, *within), unit="units")

    def _points_within(self, starts: Mapping[fx.Node, Tensor]) -> list[MaskPoint]:
        """Return the mask points within the recurrent modules whose outputs are among `starts`: a unit is read there first."""
        found: dict[str, MaskPoint] = {}
        for part, source in starts.items():
            if isinstance(flow := self.flows.of[part], Recurrent) and (call := recurrent_call(part)) is not None:
                units = tuple(range(flow.units))
                found[call.name] = MaskPoint(call.name, 0, flow.units, units, tuple(source[: flow.units].tolist()))
        return list(found.values())

    def _followed(self, places: Sequence[fx.Node], *, norms: bool) -> _Followed:
        """Follow the channels behind `places` to what reads them."""
        own = {place: self._ids(place) for place in places}
        original = torch.tensor(
            sorted({i for kept in own.values() for i in kept.tolist()})
        )  # a cut elsewhere may have removed channels of some calls only
        starts = {place: torch.searchsorted(original, kept) for place, kept in own.items()}
        found = find_revivals(self.flows, starts, norms=norms)
        wide = max(map(self._original, places))
        whole = not any(
            "norm_groups" in info(node) for node in found.grouped
        )  # else an earlier cut went by units: so do later ones
        if not found.grouped or (whole and not found.obstacle):
            return _Followed(original, wide, starts, found)
        units = self._units(found.grouped, original)
        if units is None or not bool(units.any()):
            return _Followed(original, wide, starts, found)
        remaining = torch.tensor(sorted(set(units[original].tolist())))
        starts = {place: torch.searchsorted(remaining, units[kept]) for place, kept in own.items()}
        return _Followed(remaining, int(units.max()) + 1, starts, find_revivals(self.flows, starts, norms=norms))

    def _ids(self, node: fx.Node) -> Tensor:
        """Return the ids, in the uncut network, of the channels of a node."""
        if self.shortcut == "widths":
            return torch.tensor(info(node)["features"][0]) if "features" in info(node) else torch.arange(self.flows.width(node))
        return self.graph.ids.get(node.name, torch.arange(self.flows.width(node)))

    def _numbers(self, node: fx.Node) -> tuple[Tensor, int]:
        """Return the ids, in the uncut network, of the channels of a node, and how many there were."""
        return self._ids(node), self._original(node)

    def _units(self, grouped: Mapping[fx.Node, Tensor], original: Tensor) -> Tensor | None:
        """Return for each channel of the uncut network the unit that it is removed with, so that groups stay equally large.

        Either whole groups of each GroupNorm go, or one channel of every group at once: what leaves more to choose from. None
        if a GroupNorm reads other channels too, or in another order.
        """
        sizes = []
        for node, source in grouped.items():
            flow, wide = self.flows.of[node], self._original(node)
            if bool((source == ELSEWHERE).any()) or not torch.equal(original[source], self._ids(node)):
                return None
            assert isinstance(flow, Norm)
            sizes.append((wide, wide // info(node).get("norm_groups", flow.groups)))
        if len({wide for wide, _ in sizes}) != 1:
            return None
        channels = torch.arange(sizes[0][0])
        whole, one_of_each = _joined([channels // size for _, size in sizes]), _joined([channels % size for _, size in sizes])
        return max(whole, one_of_each, key=lambda units: int(units.max()))

    def _point(self, node: fx.Node, source: Tensor, points: Mapping[fx.Node, Tensor]) -> MaskPoint:
        flow, channels = self.flows.of[node], ids(source != ELSEWHERE)
        assert flow.axis is not None
        masked = (tuple(channels.tolist()), tuple(source[channels].tolist()))
        zeroes = not isinstance(flow, Norm) or not self._is_masked_behind(node, points)
        return MaskPoint(node.name, flow.axis, len(source), *masked, zeroes=zeroes)

    def _is_masked_behind(self, node: fx.Node, points: Mapping[fx.Node, Tensor]) -> bool:
        """Whether a mask point follows a norm, behind an activation or a sum, and nothing in between reads its channels."""
        user, flow = self._only_user(node)
        while user is not None and (isinstance(flow, Channelwise) or (isinstance(flow, Join) and flow.broadcasts)):
            if user in points:
                return True
            user, flow = self._only_user(user)
        return False

    def name_of(self, layer: fx.Node, layers: tuple[str, ...], *, whole: bool = True) -> str:
        """Return the path of the layer that loses filters; for a site behind an add, the name of the add.

        A coupled site has a name of its own unless its channels are the `whole` of one place: then it is that layer's site.
        """
        add = self._sum_behind(self._chain(layer))
        if add is not None and self.shortcut == "after":
            return info(add)["name"]
        path = str(layer.target)
        path = path if path in layers or not layers else layers[0]
        return path if self.shortcut != "coupled" or whole else f"{path}.coupled"


def _given(name: str, layers: tuple[str, ...]) -> str:
    """The name of a stream's site, whatever layers lose filters with it."""
    return name


@dataclass(frozen=True)
class _Followed:
    """The channels of a site: the `original` ids of those left of `wide`, the nodes where they start, and what they meet."""

    original: Tensor
    wide: int
    starts: Mapping[fx.Node, Tensor]
    revivals: Revivals


def _joined(labels: Sequence[Tensor]) -> Tensor:
    """Return the numbers of the finest classes of which each class of each of `labels` is a part."""
    joined, before = labels[0], torch.empty(0)
    while not torch.equal(joined, before):
        before = joined
        for label in labels:
            joined = torch.full((len(label),), len(label)).scatter_reduce(0, label, joined, "amin")[label]
    number = {value: place for place, value in enumerate(sorted(set(joined.tolist())))}
    return torch.tensor([number[value] for value in joined.tolist()])


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
            continue
        if isinstance(flow, Opaque) and (call := recurrent_call(node)) is not None:
            node, path = call, str(call.target)
        if isinstance(flow, Opaque) and node.op == "call_module" and path not in seen:
            seen.add(path)
            if any(True for _ in graph.module.get_submodule(path).parameters()):
                counted = counted or count_macs(graph.module, graph.example)
                inside = sum(n for name, n in counted.items() if name == path or name.startswith(f"{path}."))
                yield Unprunable(path, node.name, flow.reason, inside)
