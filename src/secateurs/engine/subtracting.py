"""Masked channels subtracted: what all channels give is known, so only the masked ones are run through the next layer.

A convolution is linear in its input channels: conv(kept) = conv(all) - conv(masked), and with 30 % of the channels masked the
right-hand side costs 30 %. A sum that follows at once with something no mask changes belongs to the known part, too.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from secateurs.engine.folding import called
from secateurs.engine.fusing import fuse_, is_plain_sum, only_reader
from secateurs.engine.parts import twin
from secateurs.naming import free_name


@dataclass(frozen=True)
class Difference:
    """`whole(activations, *carried)` gives the known totals; `changed(picked channels, *carried, *totals)` the outputs.

    The weight of each of `layers`, in `changed`, must be set to the picked columns of the weight that it has, negated.
    """

    whole: fx.GraphModule
    changed: fx.GraphModule
    layers: tuple[nn.Module, ...]
    weights: tuple[Tensor, ...]


def take_difference(suffix: fx.GraphModule, readers: list[fx.Node], *, fused: bool) -> Difference:
    """Split what `readers`, nodes of `suffix`, do into what no mask changes and what the masked channels take away."""
    touched = _behind(next(iter(suffix.graph.nodes)))
    anchors = [_anchor(reader, touched) for reader in readers]
    changed = twin(suffix)
    same = dict(zip(suffix.graph.nodes, changed.graph.nodes, strict=True))
    names = []
    for reader, anchor in zip(readers, anchors, strict=True):
        names.append(free_name(changed, f"change_{reader.name}"))
        changed.add_submodule(names[-1], _without_bias(called(suffix, reader)))
        _replace(changed.graph, same[anchor], names[-1])
    changed.graph.eliminate_dead_code()
    changed.recompile()
    layers = [changed.get_submodule(name) for name in names]
    if fused:
        weights = [_weight(layer) for layer in layers]
        fuse_(changed)
        layers = [_holder(changed, weight) for weight in weights]
    return Difference(_up_to(suffix, anchors), changed, tuple(layers), tuple(_weight(called(suffix, r)) for r in readers))


def _behind(start: fx.Node) -> set[fx.Node]:
    found = {start}
    for node in start.graph.nodes:
        if any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def _anchor(node: fx.Node, touched: set[fx.Node]) -> fx.Node:
    """The last of the sums that follow at once and add what no mask touches."""
    follower = only_reader(node)
    if follower is None or not is_plain_sum(follower) or all(n in touched for n in follower.all_input_nodes):
        return node
    return _anchor(follower, touched)


def _replace(graph: fx.Graph, anchor: fx.Node, layer: str) -> None:
    """Let what reads `anchor` read the known total, a new input, plus what `layer` makes of the activations."""
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    with graph.inserting_after(inputs[-1]):
        total = graph.placeholder(f"total_{anchor.name}")
    with graph.inserting_before(anchor):
        change = graph.call_module(layer, (inputs[0],))
        new = graph.call_function(operator.add, (total, change))
    for node in (total, change, new):
        node.meta = dict(anchor.meta)
    anchor.replace_all_uses_with(new)


def _up_to(suffix: fx.GraphModule, ends: list[fx.Node]) -> fx.GraphModule:
    """The part of the suffix that `ends` need, with their values as its outputs."""
    needed = set(ends)
    for node in reversed(suffix.graph.nodes):
        if node in needed:
            needed |= set(node.all_input_nodes)
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in suffix.graph.nodes:
        if node in needed or node.op == "placeholder":
            env[node] = graph.node_copy(node, lambda n: env[n])
    graph.output(tuple(env[end] for end in ends))
    return fx.GraphModule(suffix, graph, class_name="Whole")


def _without_bias(layer: nn.Module) -> nn.Module:
    """The same layer without its bias, its weight a tensor object of its own."""
    if isinstance(layer, nn.Linear):
        new: nn.Module = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    else:
        assert isinstance(layer, nn.Conv2d)
        names = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
        new = nn.Conv2d(**{name: getattr(layer, name) for name in names}, bias=False, device="meta")
    new.weight = nn.Parameter(_weight(layer).detach(), requires_grad=False)
    return new.eval()


def _holder(module: fx.GraphModule, weight: Tensor) -> nn.Module:
    """The module, among those that the graph calls, whose weight is that very tensor."""
    layers: list[nn.Module | None] = [called(module, node) for node in module.graph.nodes]
    return next(layer for layer in layers if layer is not None and getattr(layer, "weight", None) is weight)


def _weight(layer: nn.Module) -> Tensor:
    assert isinstance(layer.weight, Tensor)
    return layer.weight


def pick(activations: Tensor, index: Tensor, axis: int) -> Tensor:
    """The channels `index` of the activations, in the layout that they have."""
    is_last = axis == 1 and activations.ndim == 4 and activations.is_contiguous(memory_format=torch.channels_last)
    if not is_last:
        return activations.index_select(axis, index)
    # on the two-dimensional view, since index_select would give another layout back, which all further layers would suffer
    count, channels, height, width = activations.shape
    rows = activations.permute(0, 2, 3, 1).reshape(-1, channels).index_select(1, index)
    return rows.view(count, height, width, len(index)).permute(0, 3, 1, 2)
