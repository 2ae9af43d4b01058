"""A pruned network in plain torch: every layer of secateurs becomes ordinary ops, in eval mode.

Exports are made from this network. It names no class of secateurs, so they run without it.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from secateurs.errors import UnsupportedOp
from secateurs.graph.channels import free_name
from secateurs.graph.layers import Align, Constant, Fixed, FrozenNorm, Mask, Offset, SumInto
from secateurs.graph.node_info import Shape, called_module, copy_info_, copy_node_info_, info, pass_on_, shape_of
from secateurs.graph.normalise import FollowsMode
from secateurs.graph.trace import Graph


@runtime_checkable
class SpeltOut(Protocol):
    """A layer that is not torch's and says by which functions of torch it is to be written, here and in plain source."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Its weights, all its own."""
        ...

    def functions(self, call: Callable[..., fx.Node], *inputs: fx.Node, **weights: fx.Node) -> fx.Node:
        """Make the calls, as `call(torch.add, x, 1)`, and return the last."""
        ...


def plain_module(graph: Graph) -> fx.GraphModule:
    """A copy of the graph's network, in eval mode, that calls only torch and the user's own leaf modules."""
    module = copy.deepcopy(graph.module)
    copy_info_(graph.module.graph, module.graph)
    _align_constants_(module)
    rewriter = _Rewriter(module)
    for node in module.graph.nodes:
        rewriter.new[node] = rewriter.rewrite(node)
    module.graph = rewriter.graph
    for node in module.graph.nodes:  # torch.export writes the classes of the calling blocks into its files
        stack = info(node).get("nn_module_stack") or {}
        info(node)["nn_module_stack"] = {key: (entry[0], nn.Module) for key, entry in stack.items()}
    module.delete_all_unused_submodules()
    module.recompile()
    module.requires_grad_(False)
    return module.eval()


def alignments(module: fx.GraphModule) -> list[fx.Node]:
    """The nodes of a plain network that align channels."""
    return [node for node in module.graph.nodes if info(node).get("alignment")]


def _align_constants_(module: fx.GraphModule) -> None:
    """Align constants themselves, once, instead of whenever the network runs."""
    for node in module.graph.nodes:
        layer, source = called_module(module, node), next(iter(node.all_input_nodes), node)
        held = called_module(module, source)
        if isinstance(layer, Align) and isinstance(held, Constant | Fixed) and len(source.users) == 1:
            value = layer(held.value.detach())
            held.value = nn.Parameter(value) if isinstance(held, Constant) else value
            pass_on_(node, source, "shape")
            node.replace_all_uses_with(source)
            module.graph.erase_node(node)


class _Rewriter:
    """A new graph over `module`; `new` maps the nodes of the old graph to those that replace them."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self.graph = fx.Graph()
        self.new: dict[fx.Node, fx.Node] = {}

    def rewrite(self, node: fx.Node) -> fx.Node:
        """Add what replaces `node`, and return the node that gives its value."""
        layer = self.module.get_submodule(str(node.target)) if node.op == "call_module" else None
        inputs = [self.new[source] for source in node.all_input_nodes]
        match layer:
            case Align():
                return self._align(node, layer, inputs[0])
            case SumInto():
                return self._add(node, inputs[0], self._align(node, layer.widen, inputs[1]))
            case Constant() | Fixed():
                return self._tensor(node.name, layer.value)
            case Offset():
                value = nn.Parameter(layer.value.detach().where(layer.covered, 0).view(_broadcast(node, layer.axis)))
                return self._add(node, inputs[0], self._tensor(node.name, value))
            case Mask():
                keep = self._tensor(f"{node.name}_keep", layer.keep.view(_broadcast(node, layer.axis)))
                return self._call(torch.where, keep, inputs[0], 0.0, like=node)
            case SpeltOut():
                return self._spelt_out(node, layer, inputs)
            case FollowsMode():
                return self._in_eval_mode(node, layer)
            case FrozenNorm():
                names = ("running_mean", "running_var", "weight", "bias")
                held = [(getattr(layer, n) is not None and self.graph.get_attr(f"{node.target}.{n}")) or None for n in names]
                called = self.graph.call_function(F.batch_norm, (inputs[0], *held, False, 0.0, layer.eps))
                copy_node_info_(node, called)
                return called
        if layer is not None and type(layer).__module__.partition(".")[0] == "secateurs":
            raise UnsupportedOp(f"{type(layer).__name__} at node {str(node.target)!r} has no equivalent in plain torch.")
        if _pads_nothing(node):
            return inputs[0]
        return self.graph.node_copy(node, self.new.__getitem__)

    def _tensor(self, name: str, tensor: Tensor) -> fx.Node:
        """Read a tensor that is stored in the network as `name`, or as a free name like it."""
        name = free_name(self.module, name)
        if isinstance(tensor, nn.Parameter):
            self.module.register_parameter(name, tensor)
        else:
            self.module.register_buffer(name, tensor, persistent=False)
        return self.graph.get_attr(name)

    def _call(self, function: Callable[..., Any], *args: Any, like: fx.Node) -> fx.Node:
        """Call a function of torch in the place of the node `like`."""
        node = self.graph.call_function(function, args)
        info(node)["alignment"] = True
        pass_on_(like, node, "nn_module_stack")
        return node

    def _add(self, node: fx.Node, one: fx.Node, other: fx.Node) -> fx.Node:
        """The sum that replaces `node`, under its name."""
        total = self.graph.create_node("call_function", operator.add, (one, other), name=node.name)
        copy_node_info_(node, total)
        return total

    def _align(self, node: fx.Node, layer: Align, x: fx.Node) -> fx.Node:
        """Pick and widen the channels of `x` with the cheapest ops; none if all channels stay in place."""
        axis, rank = layer.axis, len(shape_of(node).dims or ())
        source = node.all_input_nodes[-1]
        width = (shape_of(source).dims or ())[axis]
        after_axis = (0, 0) * (rank - 1 - axis)  # F.pad counts from the last axis
        if not layer.slides:
            index = layer.index
            if layer.fills:
                x = self._call(F.pad, x, (*after_axis, 0, 1), like=node)  # one zero channel behind the others
                index = torch.where(index < 0, width, index)
            return self._call(torch.index_select, x, axis, self._tensor(f"{source.name}_channels", index), like=node)
        if layer.count < width:
            end = layer.start + layer.count
            span = slice(layer.start or None, end if end < width else None)
            x = self._call(operator.getitem, x, (*(slice(None),) * axis, span), like=node)
        if layer.fills:
            x = self._call(F.pad, x, (*after_axis, layer.before, layer.after), like=node)
        return x

    def _spelt_out(self, node: fx.Node, layer: SpeltOut, inputs: list[fx.Node]) -> fx.Node:
        """The layer's own functions in its place; its weights keep their names."""
        holder = nn.Module()
        for name, weight in layer.named_parameters():
            holder.register_parameter(name, weight)
        self.module.set_submodule(str(node.target), holder)
        weights = {name: self.graph.get_attr(f"{node.target}.{name}") for name, _ in layer.named_parameters()}
        return layer.functions(partial(self._call, like=node), *inputs, **weights)

    def _in_eval_mode(self, node: fx.Node, layer: FollowsMode) -> fx.Node:
        """Call the function itself, with training=False, or without dropout."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.new.__getitem__)
        if isinstance(layer.position, str):
            kwargs = {**kwargs, layer.position: layer.values[0]}
        else:
            args = (*args[: layer.position], layer.values[0], *args[layer.position + 1 :])
        called = self.graph.call_function(layer.function, args, kwargs)
        copy_node_info_(node, called)
        if layer.values == (False, True):
            info(called)["follows_mode_at"] = layer.position
        return called


def _broadcast(node: fx.Node, axis: int) -> list[int]:
    """The shape that broadcasts a value for each channel over the output of `node`: -1 along `axis`, 1 elsewhere."""
    return [-1 if dim == axis else 1 for dim in range(len(shape_of(node).dims or ()))]


def _pads_nothing(node: fx.Node) -> bool:
    """Whether it is a pad by nothing, which is left when the zero channels of a pad were removed."""
    amounts = node.args[1] if len(node.args) > 1 else node.kwargs.get("pad")
    same = node.all_input_nodes and shape_of(node.all_input_nodes[0]) == shape_of(node) != Shape(None)
    return node.target is F.pad and bool(same) and isinstance(amounts, tuple | list) and not any(amounts)
