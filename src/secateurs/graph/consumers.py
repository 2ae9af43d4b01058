"""Who reads a site: the layers whose weights mix its channels, and the sums where they meet others.

On the way there a channel passes ops that treat it alone (activations, pools, flatten, depthwise filters, gates), so every
channel of what a reader gets comes from one channel of the site, or from elsewhere.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch.nn.modules.batchnorm import _BatchNorm

from secateurs.graph.add_fusion import spread_sums
from secateurs.graph.flow import Blocks, Channelwise, Concat, Flow, Flows, Join, Layer, Moved, analyse, find_flows
from secateurs.graph.layers import Offset
from secateurs.graph.sites import Site
from secateurs.graph.trace import Graph

SUMS = (operator.add, torch.add, "add", operator.sub, torch.sub, torch.subtract, "sub", torch.rsub)
ELSEWHERE = -1


@dataclass(frozen=True)
class LayerConsumer:
    """A layer that reads the site; `source` gives for each of its input channels the site's channel, -1 for one from elsewhere.

    `norm` is the BatchNorm that alone reads the layer, if there is one.
    """

    node: str
    module: str
    source: Tensor
    norm: str | None


@dataclass(frozen=True)
class SumConsumer:
    """A sum whose terms come from the site as `sources` say: a vector like a layer's, or None for a term from elsewhere.

    `source` says the same of the sum's own channels. `name` ('layer1.0.add') survives all cuts. `offset` is the `Offset` behind
    it, if there is one, and `covered` are the channels that it covers or may cover: those that something else than the site
    reaches. The others are zero without the site, and are to stay so: then compaction removes them further on.
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
    """All that reads a site; `others` says by node name why a reader is neither a layer nor a sum that can be mended."""

    layers: tuple[LayerConsumer, ...]
    sums: tuple[SumConsumer, ...]
    others: Mapping[str, str]


def find_consumers(graph: Graph, site: Site) -> Consumers:
    """The layers and sums that read the site's channels first, in network order."""
    module = spread_sums(graph.module)
    return _readers_of(module, find_flows(module), site.node, site.channels)


def _readers_of(module: fx.GraphModule, flows: Flows, start: str, channels: int) -> Consumers:
    source: dict[fx.Node, Tensor] = {}
    layers: list[LayerConsumer] = []
    sums: list[SumConsumer] = []
    others: dict[str, str] = {}
    for node, flow in flows.of.items():
        ins = [source.get(i) for i in flows.inputs[node]]
        if node.name == start:
            source[node] = torch.arange(channels)
        elif all(i is None or bool((i == ELSEWHERE).all()) for i in ins):
            continue
        elif isinstance(flow, Layer) and not node.meta.get("filters_a_channel", flow.depthwise):
            assert ins[0] is not None
            layers.append(LayerConsumer(node.name, str(node.target), ins[0], _norm_behind(module, flows, node)))
        else:
            found = _handed_on(flow, ins)
            if found is not None:
                source[node] = found
            elif isinstance(flow, Join) and node.target in SUMS and _widths_fit(flow, ins):
                sums.append(_sum_reader(module, flows, node, flow, ins))
            else:
                others[node.name] = (
                    f"{node.meta.get('name', node.target)!s} mixes channels in a way that no weights make up for"
                )
    return Consumers(tuple(layers), tuple(sums), others)


@dataclass(frozen=True)
class LastTerm:
    """Where a layer's output meets others in a sum, with nothing but its BatchNorm in between.

    `node` is the sum, `end` gives it with its offset; the layer's channel j is the channel `place[j]` of `end`.
    """

    node: str
    end: str
    place: Tensor


def find_layers(graph: Graph) -> tuple[tuple[LayerConsumer, LastTerm | None], ...]:
    """Every layer in network order, as the reader of whatever comes in, with the sum that it is a term of, if there is one."""
    module = spread_sums(graph.module)
    flows = find_flows(module)
    found = []
    for node, flow in flows.of.items():
        if isinstance(flow, Layer):
            norm = _norm_behind(module, flows, node)
            reader = LayerConsumer(node.name, str(node.target), _elsewhere(flow.inputs), norm)
            found.append((reader, _last_term(module, flows, node if norm is None else flows.users[node][0], flow.filters)))
    return tuple(found)


def _last_term(module: fx.GraphModule, flows: Flows, start: fx.Node, channels: int) -> LastTerm | None:
    """The sum behind `start`, if its channels go nowhere else, and none is lost or changed on the way."""
    total, source = start, torch.arange(channels)
    while not _is_sum(total):
        users = flows.users.get(total, ())
        if len(users) != 1 or not (_is_sum(users[0]) or isinstance(flows.of.get(users[0]), Moved)):
            return None
        inputs, flow, total = flows.inputs.get(users[0], ()), flows.of.get(users[0]), users[0]
        if isinstance(flow, Moved):
            source = torch.cat([source, torch.tensor([ELSEWHERE])])[flow.index]
        elif not isinstance(flow, Join) or len(source) != flow.width or len(set(inputs)) < len(inputs):
            return None
    end = total
    while len(users := flows.users.get(end, ())) == 1 and _only_shifts(module, flows, users[0]):
        end, flow = users[0], flows.of[users[0]]
        if isinstance(flow, Moved):
            source = torch.cat([source, torch.tensor([ELSEWHERE])])[flow.index]
    matches = source == torch.arange(channels)[:, None]
    return LastTerm(total.name, end.name, matches.long().argmax(1)) if bool((matches.sum(1) == 1).all()) else None


def _is_sum(node: fx.Node) -> bool:
    return node.target in (operator.add, torch.add, "add")


def _only_shifts(module: fx.GraphModule, flows: Flows, node: fx.Node) -> bool:
    if node.op != "call_module" or node not in flows.of:
        return False
    return isinstance(flows.of[node], Moved) or isinstance(module.get_submodule(str(node.target)), Offset)


def _sum_reader(module: fx.GraphModule, flows: Flows, node: fx.Node, flow: Join, ins: list[Tensor | None]) -> SumConsumer:
    name = str(node.meta.get("name", node.name))
    behind = _offset_behind(module, node)
    if behind is not None:
        covered = behind[1].covered.detach().cpu()
    else:
        zero = analyse(flows, {}).zero
        covered = torch.zeros(flow.width, dtype=torch.bool)
        for source, term in zip(ins, flows.inputs[node], strict=True):
            there = ~zero[term].expand(flow.width) if term in zero else torch.ones(flow.width, dtype=torch.bool)
            covered |= there if source is None else there & (source == ELSEWHERE)
    return SumConsumer(node.name, name, flow.axis, tuple(ins), _of_any(ins), None if behind is None else behind[0], covered)


def _offset_behind(module: fx.GraphModule, add: fx.Node) -> tuple[str, Offset] | None:
    for user in add.users:
        layer = module.get_submodule(str(user.target)) if user.op == "call_module" else None
        if isinstance(layer, Offset):
            return str(user.target), layer
    return None


def _handed_on(flow: Flow, ins: list[Tensor | None]) -> Tensor | None:
    """Where the channels of the result come from, if each still comes from one place; None where the op mixes them."""
    first = ins[0]
    if isinstance(flow, Channelwise):
        return first
    if isinstance(flow, Layer) and first is not None:
        return first.repeat_interleave(flow.filters // flow.inputs)
    if isinstance(flow, Moved) and first is not None:
        return torch.cat([first, torch.tensor([ELSEWHERE])])[flow.index]
    if isinstance(flow, Concat):
        return torch.cat([_elsewhere(w) if i is None else i for i, w in zip(ins, flow.widths, strict=True)])
    if isinstance(flow, Blocks) and first is not None:
        blocks = first.view(flow.width, flow.size)
        return blocks[:, 0] if bool((blocks == blocks[:, :1]).all()) else None
    if isinstance(flow, Join) and _widths_fit(flow, ins):
        return _joined(flow, ins)
    return None


def _joined(flow: Join, ins: list[Tensor | None]) -> Tensor | None:
    """A product is zero with any factor, so one factor from the site is enough; a sum must have all terms from one channel."""
    if flow.zero_if == "first":
        return ins[0]
    known = [_elsewhere(flow.width) if i is None else i for i in ins]
    either = _of_any(ins)
    if flow.zero_if == "any":
        agree = all(bool(((k == either) | (k == ELSEWHERE)).all()) for k in known)
    else:
        agree = all(bool((k == either).all()) for k in known)
    return either if agree else None


def _of_any(ins: list[Tensor | None]) -> Tensor:
    return torch.stack([i for i in ins if i is not None]).amax(0)


def _widths_fit(flow: Join, ins: list[Tensor | None]) -> bool:
    """Whether no input from the site is spread over several channels."""
    return all(i is None or w == flow.width == len(i) for i, w in zip(ins, flow.widths, strict=True))


def _elsewhere(width: int) -> Tensor:
    return torch.full((width,), ELSEWHERE)


def _norm_behind(module: fx.GraphModule, flows: Flows, layer: fx.Node) -> str | None:
    users = flows.users.get(layer, ())
    if len(users) != 1 or users[0].op != "call_module" or not isinstance(flows.of[users[0]], Channelwise):
        return None
    norm = module.get_submodule(str(users[0].target))
    steady = isinstance(norm, _BatchNorm) and norm.running_mean is not None and norm.running_var is not None
    return str(users[0].target) if steady else None
