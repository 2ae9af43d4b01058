"""Consumers of a site: the layers whose weights mix its channels, and the sums where they meet others.

Between the site and a consumer lie only ops that treat each channel alone (activations, pools, flatten, depthwise filters,
gates), so every input channel of a consumer comes from one channel of the site, or from elsewhere.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx
from torch.nn.modules.batchnorm import _BatchNorm

from secateurs.graph.add_fusion import spread_sums
from secateurs.graph.channels import all_of, none_of
from secateurs.graph.flow import (
    ELSEWHERE,
    Blocks,
    Channelwise,
    Concat,
    Flow,
    Flows,
    Join,
    Layer,
    Moved,
    Norm,
    analyse,
    find_flows,
)
from secateurs.graph.flow.kinds import elsewhere
from secateurs.graph.flow.liveness import activation_behind
from secateurs.graph.layers import Offset
from secateurs.graph.node_info import called_module, info, label_of
from secateurs.graph.sites import Site
from secateurs.graph.trace import Graph
from secateurs.graph.weight_norm import weight_norm_of

SUMS = (operator.add, torch.add, "add", operator.sub, torch.sub, torch.subtract, "sub", torch.rsub)


@dataclass(frozen=True)
class LayerConsumer:
    """A layer that reads the site; `source` gives the site's channel of each input channel, -1 for one from elsewhere.

    `norm` is the BatchNorm that is the layer's only user, if there is one.
    """

    node: str
    module: str
    source: Tensor
    norm: str | None


@dataclass(frozen=True)
class SumConsumer:
    """A sum with terms from the site; `sources` has for each term a vector like a layer's `source`, or None for all elsewhere.

    `source` is the vector of the sum's own channels. `name` ('layer1.0.add') stays the same after cuts. `offset` is the path of
    the `Offset` behind the sum, if there is one. `covered` are the channels that it covers or may cover: those that other terms
    contribute to. The others are zero without the site and must stay zero, so that compaction removes them.
    """

    node: str
    name: str
    axis: int
    sources: tuple[Tensor | None, ...]
    source: Tensor
    offset: str | None
    covered: Tensor


@dataclass(frozen=True)
class Consumers:
    """All consumers of a site; `others` says by node name why a consumer is neither a layer nor a sum that can be repaired."""

    layers: tuple[LayerConsumer, ...]
    sums: tuple[SumConsumer, ...]
    others: Mapping[str, str]


_KNOWN: WeakKeyDictionary[Graph, dict[bool, tuple[fx.GraphModule, Flows]]] = WeakKeyDictionary()


def _flows_of(graph: Graph, inside: bool) -> tuple[fx.GraphModule, Flows]:
    """The network with its sums apart, and how channels flow in it: the same for every site, and the most of the work."""
    known = _KNOWN.setdefault(graph, {})
    if inside not in known:
        module = spread_sums(graph.module)
        known[inside] = module, find_flows(module, inside=inside)
    return known[inside]


def find_consumers(graph: Graph, site: Site) -> Consumers:
    """Find the layers and sums that read the site's channels first, in network order."""
    module, flows = _flows_of(graph, site.inside)
    source: dict[fx.Node, Tensor] = {}
    normed: dict[fx.Node, Tensor] = {}  # what lies behind a norm loses the site's channels, but the others change, too
    layers: list[LayerConsumer] = []
    sums: list[SumConsumer] = []
    others: dict[str, str] = {}
    calls = Counter(str(node.target) for node in flows.of if node.op == "call_module")
    points = {point.node: point.source() for point in site.points}
    for node, flow in flows.of.items():
        ins = [source.get(i) for i in flows.inputs[node]]
        end = activation_behind(flows, node) if isinstance(flow, Join) else node  # of a sum that is masked with the site
        if end.name in points and not (isinstance(flow, Norm) and node.name != site.node):
            source[node] = points[end.name]
        elif all(i is None or bool((i == ELSEWHERE).all()) for i in ins):
            if isinstance(flow, Channelwise) and flows.inputs[node][0] in normed:
                normed[node] = normed[flows.inputs[node][0]]
            continue
        elif isinstance(flow, Layer) and not flow.linear:
            others[node.name] = f"{label_of(node)} is not linear in its weights"
        elif isinstance(flow, Norm):
            others[node.name] = f"{label_of(node)} takes statistics over the channels, which change with every cut"
            normed |= {node: points[node.name]} if node.name in points else {}
        elif isinstance(flow, Layer) and not info(node).get("filters_a_channel", flow.depthwise):
            assert ins[0] is not None
            if calls[str(node.target)] > 1:
                others[node.name] = f"{label_of(node)} is called several times, and its weights would have to fit every call"
                continue
            if weight_norm_of(module.get_submodule(str(node.target))) is not None:
                others[node.name] = f"{label_of(node)} computes its weights, which cannot be replaced"
                continue
            layers.append(LayerConsumer(node.name, str(node.target), ins[0], _norm_behind(module, flows, node)))
        else:
            found = _passed_on(flow, ins)
            if found is not None:
                source[node] = found
            elif isinstance(flow, Join) and node.target in SUMS and _widths_fit(flow, ins):
                gone = [normed.get(i, source) for i, source in zip(flows.inputs[node], ins, strict=True)]
                consumer = replace(_sum_consumer(module, flows, node, flow, gone), sources=tuple(ins), source=_of_any(ins))
                if consumer.offset is None and not bool(consumer.covered.any()):
                    others[node.name] = f"{label_of(node)} adds channels that all go with the site"
                else:
                    sums.append(consumer)
            else:
                others[node.name] = f"{label_of(node)} mixes channels in a way that no weights make up for"
    return Consumers(tuple(layers), tuple(sums), others)


@dataclass(frozen=True)
class LastTerm:
    """The sum that a layer's output is a term of, with nothing but its BatchNorm in between.

    `node` is the sum, `end` the node behind its offset; the layer's channel j is the channel `place[j]` of `end`.
    """

    node: str
    end: str
    place: Tensor


def find_layers(graph: Graph) -> tuple[tuple[LayerConsumer, LastTerm | None], ...]:
    """List every layer in network order, all inputs from elsewhere, with the sum that it is a term of, if there is one.

    A layer that is called several times is left out.
    """
    module = spread_sums(graph.module)
    flows = find_flows(module)
    found = []
    calls = Counter(str(node.target) for node in flows.of if node.op == "call_module")
    for node, flow in flows.of.items():
        own = isinstance(flow, Layer) and flow.linear and weight_norm_of(module.get_submodule(str(node.target))) is None
        if isinstance(flow, Layer) and own and calls[str(node.target)] == 1:
            norm = _norm_behind(module, flows, node)
            consumer = LayerConsumer(node.name, str(node.target), elsewhere(flow.inputs), norm)
            found.append((consumer, _last_term(module, flows, node if norm is None else flows.users[node][0], flow.filters)))
    return tuple(found)


def _last_term(module: fx.GraphModule, flows: Flows, start: fx.Node, channels: int) -> LastTerm | None:
    """Return the sum behind `start` if it is the only use of its channels, and none is dropped or changed before it."""
    total, source = start, torch.arange(channels)
    while not _is_sum(total):
        users = flows.users.get(total, ())
        if len(users) != 1 or not (_is_sum(users[0]) or isinstance(flows.of.get(users[0]), Moved)):
            return None
        inputs, flow, total = flows.inputs.get(users[0], ()), flows.of.get(users[0]), users[0]
        if isinstance(flow, Moved):
            source = _moved(source, flow)
        elif not isinstance(flow, Join) or len(source) != flow.width or len(set(inputs)) < len(inputs):
            return None
    end = total
    while len(users := flows.users.get(end, ())) == 1:
        layer, flow = called_module(module, users[0]), flows.of.get(users[0])
        if layer is None or not (isinstance(flow, Moved) or (flow is not None and isinstance(layer, Offset))):
            break
        end = users[0]
        if isinstance(flow, Moved):
            source = _moved(source, flow)
    matches = source == torch.arange(channels)[:, None]
    return LastTerm(total.name, end.name, matches.long().argmax(1)) if bool((matches.sum(1) == 1).all()) else None


def _moved(source: Tensor, flow: Moved) -> Tensor:
    return torch.cat([source, elsewhere(1)])[flow.index]


def _is_sum(node: fx.Node) -> bool:
    return node.target in (operator.add, torch.add, "add")


def _sum_consumer(module: fx.GraphModule, flows: Flows, node: fx.Node, flow: Join, ins: list[Tensor | None]) -> SumConsumer:
    offset = next((str(user.target) for user in node.users if isinstance(called_module(module, user), Offset)), None)
    if offset is not None:
        covered: Tensor = module.get_submodule(offset).covered.detach().cpu()  # type: ignore[operator]
    else:
        zero = analyse(flows, {}).zero
        covered = none_of(flow.width)
        for source, term in zip(ins, flows.inputs[node], strict=True):
            there = ~zero[term].expand(flow.width) if term in zero else all_of(flow.width)
            covered |= there if source is None else there & (source == ELSEWHERE)
    name = info(node).get("name", node.name)
    return SumConsumer(node.name, name, flow.axis, tuple(ins), _of_any(ins), offset, covered)


def _passed_on(flow: Flow, ins: list[Tensor | None]) -> Tensor | None:
    """Return the sources of the output's channels if each comes from one place; None where the op mixes channels."""
    first = ins[0]
    if isinstance(flow, Channelwise):
        return first
    if isinstance(flow, Layer) and first is not None:
        return first.repeat_interleave(flow.filters // flow.inputs)
    if isinstance(flow, Moved) and first is not None:
        return _moved(first, flow)
    if isinstance(flow, Concat):
        return torch.cat([elsewhere(w) if i is None else i for i, w in zip(ins, flow.widths, strict=True)])
    if isinstance(flow, Blocks) and first is not None:
        blocks = first[flow.members]
        return blocks[:, 0] if bool((blocks == blocks[:, :1]).all()) else None
    if isinstance(flow, Join) and _widths_fit(flow, ins):
        return _joined(flow, ins)
    return None


def _joined(flow: Join, ins: list[Tensor | None]) -> Tensor | None:
    """A product is zero with any factor, so one factor from the site is enough; a sum needs all terms from one channel."""
    if flow.zero_if in ("first", "third"):
        return ins[0] if flow.zero_if == "first" else None
    known = [elsewhere(flow.width) if i is None else i for i in ins]
    either = _of_any(ins)
    if flow.zero_if == "any":
        agree = all(bool(((k == either) | (k == ELSEWHERE)).all()) for k in known)
    else:
        agree = all(bool((k == either).all()) for k in known)
    return either if agree else None


def _of_any(ins: list[Tensor | None]) -> Tensor:
    return torch.stack([i for i in ins if i is not None]).amax(0)


def _widths_fit(flow: Join, ins: list[Tensor | None]) -> bool:
    """Whether no input from the site is broadcast over several channels."""
    return all(i is None or w == flow.width == len(i) for i, w in zip(ins, flow.widths, strict=True))


def _norm_behind(module: fx.GraphModule, flows: Flows, layer: fx.Node) -> str | None:
    users = flows.users.get(layer, ())
    if len(users) != 1 or not isinstance(flows.of[users[0]], Channelwise):
        return None
    norm = called_module(module, users[0])
    steady = isinstance(norm, _BatchNorm) and norm.running_mean is not None and norm.running_var is not None
    return str(users[0].target) if steady else None
