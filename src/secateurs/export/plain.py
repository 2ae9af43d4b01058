"""A pruned network as nothing but torch: every layer of our own is written out as ordinary ops, in eval mode.

What leaves the house is made of this form: it names no class of secateurs, so it runs where secateurs is not installed.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from secateurs.errors import UnsupportedOp
from secateurs.graph.channels import free_name
from secateurs.graph.layers import Align, Constant, Mask, Offset, SumInto
from secateurs.graph.normalise import FollowsMode
from secateurs.graph.trace import Graph, Shape, shape_of

TABLE = "table"  # marks, in a node's meta, an index that follows from the cuts: written out in source, not a weight
ALIGNMENT = "alignment"  # marks, in a node's meta, the ops that an alignment became
FOLLOWS_MODE = "follows_mode_at"  # the argument (place or name) that is `self.training` in source, False elsewhere


class Writing:
    """A graph under construction: `module` owns what the new nodes read, `now` says who stands for an old node."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self.graph = fx.Graph()
        self.now: dict[fx.Node, fx.Node] = {}

    def held(self, name: str, tensor: Tensor) -> fx.Node:
        """Read a tensor that is stored in the network under `name`, or a free name like it."""
        name = free_name(self.module, name)
        if isinstance(tensor, nn.Parameter):
            self.module.register_parameter(name, tensor)
        else:
            self.module.register_buffer(name, tensor, persistent=False)
        return self.graph.get_attr(name)

    def call(self, function: Callable[..., Any], *args: Any, like: fx.Node) -> fx.Node:
        """Call a function of torch for what used to be done at the node `like`."""
        node = self.graph.call_function(function, args)
        node.meta.update({ALIGNMENT: True, "nn_module_stack": like.meta.get("nn_module_stack", {})})
        return node


def plain_module(graph: Graph) -> fx.GraphModule:
    """A copy of the graph's network, in eval mode, that calls only torch and the user's own leaves."""
    module = copy.deepcopy(graph.module)
    writing = Writing(module)
    for old, node in zip(graph.module.graph.nodes, module.graph.nodes, strict=True):
        node.meta = dict(old.meta)
        writing.now[node] = _written(writing, node)
    module.graph = writing.graph
    for node in module.graph.nodes:  # torch.export writes the classes of the blocks that a call came from into its files
        stack = node.meta.get("nn_module_stack") or {}
        node.meta["nn_module_stack"] = {key: (entry[0], nn.Module) for key, entry in stack.items()}
    module.delete_all_unused_submodules()
    module.recompile()
    module.requires_grad_(False)
    return module.eval()


def _written(writing: Writing, node: fx.Node) -> fx.Node:
    layer = writing.module.get_submodule(str(node.target)) if node.op == "call_module" else None
    inputs = [writing.now[source] for source in node.all_input_nodes]
    match layer:
        case Align():
            return align(writing, node, layer, inputs[0])
        case SumInto():
            # nodes that come later must not see the widened term as theirs: it stands for nothing of the old graph
            widened = align(writing, node, layer.widen, inputs[1])
            return _add(writing, node, inputs[0], widened)
        case Constant():
            return writing.held(node.name, layer.value)
        case Offset():
            value = nn.Parameter(layer.value.detach().where(layer.covered, 0).view(_thin(node, layer.axis)))
            return _add(writing, node, inputs[0], writing.held(node.name, value))
        case Mask():
            return writing.call(
                torch.where,
                writing.held(f"{node.name}_keep", layer.keep.view(_thin(node, layer.axis))),
                inputs[0],
                0.0,
                like=node,
            )
        case FollowsMode():
            return _fixed_mode(writing, node, layer)
    if layer is not None and type(layer).__module__.partition(".")[0] == "secateurs":
        raise UnsupportedOp(f"{type(layer).__name__} at node {str(node.target)!r} has no form in plain torch yet.")
    if _does_nothing(node):
        return inputs[0]
    return writing.graph.node_copy(node, writing.now.__getitem__)


def _add(writing: Writing, node: fx.Node, one: fx.Node, other: fx.Node) -> fx.Node:
    """The sum that stands for `node`, under its name."""
    total = writing.graph.create_node("call_function", operator.add, (one, other), name=node.name)
    total.meta = dict(node.meta)
    return total


def _thin(node: fx.Node, axis: int) -> list[int]:
    """The shape of what `node` gives with length 1 along all axes but `axis`, and -1 there."""
    return [-1 if dim == axis else 1 for dim in range(len(shape_of(node).dims or ()))]


def align(writing: Writing, node: fx.Node, layer: Align, x: fx.Node) -> fx.Node:
    """The channels of `x` picked and widened by the cheapest ordinary op; nothing at all where all stay in place."""
    axis, rank = layer.axis, len(shape_of(node).dims or ())
    source = node.all_input_nodes[-1]
    width = (shape_of(source).dims or ())[axis]
    if not layer.slides:
        index = layer.index
        if layer.fills:
            x = writing.call(F.pad, x, _pads(axis, rank, 0, 1), like=node)  # one zero channel behind the others
            index = torch.where(index < 0, width, index)
        place = writing.held(f"{source.name}_channels", index)
        place.meta[TABLE] = True
        return writing.call(torch.index_select, x, axis, place, like=node)
    if layer.count < width:
        end = layer.start + layer.count
        x = writing.call(operator.getitem, x, _span(axis, layer.start or None, end if end < width else None), like=node)
    if layer.fills:
        x = writing.call(F.pad, x, _pads(axis, rank, layer.before, layer.after), like=node)
    return x


def _span(axis: int, start: int | None, stop: int | None) -> tuple[slice, ...]:
    """The index that takes `start` to `stop` along `axis` and all of the axes before it."""
    return (*(slice(None),) * axis, slice(start, stop))


def _pads(axis: int, rank: int, before: int, after: int) -> tuple[int, ...]:
    """Amounts for F.pad that add zeros along `axis`: it counts from the last axis on."""
    return (*(0, 0) * (rank - 1 - axis), before, after)


def _fixed_mode(writing: Writing, node: fx.Node, layer: FollowsMode) -> fx.Node:
    """The function itself, told that it is not training."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), writing.now.__getitem__)
    if isinstance(layer.position, str):
        kwargs = {**kwargs, layer.position: False}
    else:
        args = (*args[: layer.position], False, *args[layer.position + 1 :])
    called = writing.graph.call_function(layer.function, args, kwargs)
    called.meta = {**node.meta, FOLLOWS_MODE: layer.position}
    return called


def _does_nothing(node: fx.Node) -> bool:
    """A pad by nothing: what surgery leaves of one whose zero channels are gone."""
    amounts = node.args[1] if len(node.args) > 1 else node.kwargs.get("pad")
    same = node.all_input_nodes and shape_of(node.all_input_nodes[0]) == shape_of(node) != Shape(None)
    return node.target is F.pad and bool(same) and isinstance(amounts, tuple | list) and not any(amounts)


def alignments(module: fx.GraphModule) -> list[fx.Node]:
    """The nodes that the alignments of a plain network became."""
    return [node for node in module.graph.nodes if node.meta.get(ALIGNMENT)]
