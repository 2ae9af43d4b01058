"""Weights that a forward computes from parameters alone become weights of ordinary layers, with the values that they have.

Weight standardisation (`F.conv2d(x, standardised(self.weight))`), and products with a parameter that has its filters in columns
(`x @ self.weight`, `torch.addmm`). Once filters or inputs are gone, the standardised weight of what is left would be another
one, so it is computed once, here, and trained as it is from then on. The new layer has a name of its own: its weight is not the
parameter that the model holds under the old name.
"""

from __future__ import annotations

import operator
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from secateurs.graph.channels import call_word, free_name
from secateurs.graph.node_info import Shape, dims_of, info, pass_on_, shape_of

LAYERS = (
    *(torch.conv1d, torch.conv2d, torch.conv3d, F.linear),
    *(torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d),
)
PRODUCTS = (operator.matmul, torch.matmul, "matmul", "__matmul__")
RANDOM = ("rand", "drop", "bernoulli", "multinomial", "normal", "empty")


def compute_weights_(module: fx.GraphModule) -> None:
    """Compute each layer's weight that depends on no input, unless something else reads what it is computed from."""
    for node in list(module.graph.nodes):
        _as_linear_(module, node)
    for node in list(module.graph.nodes):
        if node.op != "call_function" or node.target not in LAYERS:
            continue
        given = node.args[1] if len(node.args) > 1 else node.kwargs.get("weight")
        if not isinstance(given, fx.Node) or given.op == "get_attr":
            continue
        above = _above(given)
        weight = _computed(module, node, given, above)
        if weight is None:
            continue
        name = free_name(module, f"computed_{given.name}")
        module.register_parameter(name, weight)
        with module.graph.inserting_before(node):
            held = module.graph.get_attr(name)
        info(held)["shape"] = Shape(tuple(weight.shape))
        pass_on_(node, held, "nn_module_stack")
        node.replace_input_with(given, held)
        for old in reversed([n for n in module.graph.nodes if n in above]):
            if not old.users:
                module.graph.erase_node(old)


def _as_linear_(module: fx.GraphModule, node: fx.Node) -> None:
    """Replace bias + x @ w by F.linear(x, w.t(), bias), where w is a parameter."""
    if node.target is torch.addmm and len(node.args) == 3 and not node.kwargs:
        bias, x, weight = node.args
    elif node.target in PRODUCTS and len(node.args) == 2 and not node.kwargs:
        bias, (x, weight) = None, node.args
    else:
        return
    if not isinstance(x, fx.Node) or x.op == "get_attr" or not _is_own_parameter(weight, module, 2):
        return
    if bias is not None and not (_is_own_parameter(bias, module, 1) and dims_of(bias)[0] == dims_of(weight)[1]):
        return
    with module.graph.inserting_before(node):
        turned = module.graph.call_method("t", (weight,))
    info(turned)["shape"] = Shape(dims_of(weight)[::-1])
    pass_on_(node, turned, "nn_module_stack")
    node.op, node.target, node.args = "call_function", F.linear, (x, turned) if bias is None else (x, turned, bias)


def _is_own_parameter(value: Any, module: fx.GraphModule, axes: int) -> TypeGuard[fx.Node]:
    """Whether an argument is a parameter with that number of axes, read once."""
    if not isinstance(value, fx.Node) or value.op != "get_attr" or len(shape_of(value).dims or ()) != axes:
        return False
    once = len(value.users) == 1 and sum(n.op == "get_attr" and n.target == value.target for n in module.graph.nodes) == 1
    return once and isinstance(operator.attrgetter(str(value.target))(module), nn.Parameter)


def _above(weight: fx.Node) -> set[fx.Node]:
    """Return a node and all that it is computed from."""
    above, open_nodes = {weight}, [weight]
    while open_nodes:
        fresh = set(open_nodes.pop().all_input_nodes) - above
        above |= fresh
        open_nodes += fresh
    return above


def _computed(module: fx.GraphModule, layer: fx.Node, weight: fx.Node, above: set[fx.Node]) -> nn.Parameter | None:
    """Return the value of a layer's weight as a parameter; None if it depends on an input, on chance or on train mode."""
    read = {str(node.target) for node in above if node.op == "get_attr"}
    for node in module.graph.nodes:
        if node in above:
            word = call_word(node)
            pure = node.op in ("get_attr", "call_function", "call_method") and not info(node).get("follows_mode")
            alone = all(user in above or user is layer for user in node.users)
            if not pure or not alone or (node.op != "get_attr" and (word.endswith("_") or any(w in word for w in RANDOM))):
                return None
        elif node.op == "get_attr" and str(node.target) in read:  # the layer is called again
            return None
    values: dict[fx.Node, Any] = {}
    with torch.no_grad():
        for node in module.graph.nodes:
            if node not in above:
                continue
            if node.op == "get_attr":
                values[node] = operator.attrgetter(str(node.target))(module)
                continue
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
            called: Any = getattr(args[0], node.target) if isinstance(node.target, str) else node.target
            values[node] = called(*(args[1:] if isinstance(node.target, str) else args), **kwargs)
    parameters = [v for node, v in values.items() if node.op == "get_attr" and isinstance(v, nn.Parameter)]
    found = values[weight]
    if not parameters or not isinstance(found, Tensor):
        return None
    return nn.Parameter(found.detach().clone(memory_format=torch.contiguous_format), any(p.requires_grad for p in parameters))
