"""Sums with a narrow term, in two forms: an alignment and an add, for analysis, and `SumInto`, which is faster to run."""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
from torch import Tensor, fx

from secateurs.graph.capture.code import call_directly_
from secateurs.graph.channels import free_name
from secateurs.graph.layers import Align, SumInto
from secateurs.graph.node_info import called_module, info, pass_on_, shape_of

WIDENED = "align_into_"  # begins the names of what `spread_sums` inserts


def fuse_sums_(module: fx.GraphModule) -> None:
    """Replace each sum with a term that is widened for it alone by a `SumInto`, and compile the graph. Names of nodes stay."""
    fused = False
    for node in list(module.graph.nodes):
        terms = _terms(module, node)
        if terms is None:
            continue
        wide, widened = terms
        layer = called_module(module, widened)
        assert isinstance(layer, Align)
        name = free_name(module, f"sum_into_{node.name}")
        module.add_submodule(name, SumInto(layer).train(module.training))
        node.op, node.target, node.args = "call_module", name, (wide, widened.all_input_nodes[0])
        module.graph.erase_node(widened)
        fused = True
    if fused:
        module.delete_all_unused_submodules()
    module.recompile()


def _terms(module: fx.GraphModule, node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return the wide term and the alignment of the narrow one, if `node` is such a sum."""
    if node.target not in (operator.add, torch.add, "add") or node.kwargs or len(node.args) != 2:
        return None
    one, other = node.args
    if not isinstance(one, fx.Node) or not isinstance(other, fx.Node):
        return None
    for wide, narrow in ((one, other), (other, one)):
        same_shape = shape_of(wide).dims == shape_of(narrow).dims == shape_of(node).dims
        if same_shape and _only_widens(module, narrow) and not _only_widens(module, wide):
            return wide, narrow
    return None


def _only_widens(module: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a node is an alignment with one user that only inserts zero channels."""
    layer = called_module(module, node)
    if not isinstance(layer, Align) or not layer.fills or len(node.users) != 1:
        return False
    dims = shape_of(node.all_input_nodes[0]).dims
    in_order = [i for i in layer.take if i >= 0] == list(range(layer.count))
    return dims is not None and in_order and layer.count == dims[layer.axis]


def spread_sums(module: fx.GraphModule) -> fx.GraphModule:
    """Return the network with every `SumInto` as an alignment and an add; it shares all other modules with `module`."""
    if not any(isinstance(layer, SumInto) for layer in module.modules()):
        return module
    graph = fx.Graph(tracer_cls=module.graph._tracer_cls)
    call_directly_(graph)
    aligns: dict[str, Align] = {}
    env: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        layer = called_module(module, node)
        if not isinstance(layer, SumInto):
            env[node] = graph.node_copy(node, lambda n: env[n])
            continue
        wide, narrow = (env[n] for n in node.all_input_nodes)
        name = free_name(module, WIDENED + node.name)
        aligns[name] = layer.widen
        widened = graph.create_node("call_module", name, (narrow,))
        pass_on_(node, widened, "shape", "other_shapes", "original_channels")
        env[node] = graph.create_node("call_function", operator.add, (wide, widened), name=node.name)
        info(env[node]).update(info(node))
        info(env[node]).setdefault("name", str(node.target))  # of a network that was traced with the sum in it
    if not aligns:
        return module
    for name, align in aligns.items():
        module.add_submodule(name, align)
    spread = fx.GraphModule(module, graph, class_name=type(module).__name__)
    for name in aligns:
        module.delete_submodule(name)
    return spread


def spread_ids(module: fx.GraphModule, ids: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the ids of channels at the nodes of a network that `spread_sums` gave: what is widened for a sum has the sum's."""
    found = dict(ids)
    for node in module.graph.nodes:
        if node.op == "call_module" and str(node.target).startswith(WIDENED) and (user := next(iter(node.users))).name in ids:
            found[node.name] = ids[user.name]
    return found
