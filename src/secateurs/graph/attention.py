"""nn.MultiheadAttention in parts: linear layers and scaled_dot_product_attention, so that whole heads can be removed.

torch's module computes the width of a head from `embed_dim` and `num_heads`, so it cannot have fewer heads than it was made
with. The layers hold the module's own parameters: `in_proj.weight` is `in_proj_weight` where all calls are self-attention;
otherwise `q_proj`, `k_proj` and `v_proj` hold its thirds. `out_proj` stays.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from secateurs.graph.capture.leaves import RULED, Leaves
from secateurs.graph.node_info import called_module, pass_on_, shape_of
from secateurs.graph.normalise import FollowsMode

ARGUMENTS = ("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask", "average_attn_weights", "is_causal")


def expand_attention_(module: fx.GraphModule, leaves: Leaves) -> bool:
    """Replace each nn.MultiheadAttention by its parts, if all its calls allow it; return whether any was replaced.

    Those whose weights are an output, with a key_padding_mask, with added keys and values, or without a batch stay whole; so do
    those that the user names as leaves, and all if there is a rule for the class.
    """
    calls: dict[str, list[fx.Node]] = {}
    for node in [] if nn.MultiheadAttention in RULED else module.graph.nodes:
        attention = called_module(module, node)
        if type(attention) is nn.MultiheadAttention and not leaves.are_chosen(attention, str(node.target)):
            calls.setdefault(str(node.target), []).append(node)
    expanded = False
    for path, nodes in calls.items():
        attention = module.get_submodule(path)
        assert isinstance(attention, nn.MultiheadAttention)
        if not all(_is_plain(module, attention, node, _given(node)) for node in nodes):
            continue
        packed = attention._qkv_same_embed_dim and all(e["query"] is e["key"] is e["value"] for e in map(_given, nodes))
        _put_layers_(module, path, attention, packed=packed)
        for node in nodes:  # a later call may be given what an earlier one was replaced by
            _expand_call_(module, node, _given(node), attention, packed=packed)
        expanded = True
    return expanded


def _given(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call by name."""
    return dict(zip(ARGUMENTS, node.args, strict=False)) | dict(node.kwargs)


def _held(module: fx.GraphModule, mask: fx.Node) -> Any:
    """Return the mask that the network holds; something else than a tensor if the mask is computed."""
    return (
        operator.attrgetter(str(mask.target))(module)
        if mask.op == "get_attr"
        else getattr(called_module(module, mask), "value", None)
    )


def _is_plain(module: fx.GraphModule, attention: nn.MultiheadAttention, node: fx.Node, given: dict[str, Any]) -> bool:
    """Whether the call is what linear layers and scaled_dot_product_attention compute, and only its first result is used."""
    first_only = all(user.target is operator.getitem and (user.args[1] == 0 or not user.users) for user in node.users)
    mask = given.get("attn_mask")
    mask_for_all = mask is None or (isinstance(held := _held(module, mask), Tensor) and held.dim() == 2)
    batched = all(isinstance(given[n], fx.Node) and len(shape_of(given[n]).dims or ()) == 3 for n in ARGUMENTS[:3])
    extended = attention.bias_k is not None or attention.add_zero_attn or given.get("key_padding_mask") is not None
    hooked = attention._forward_hooks or attention._forward_pre_hooks
    return first_only and mask_for_all and batched and not extended and not hooked


def _put_layers_(module: fx.GraphModule, path: str, attention: nn.MultiheadAttention, *, packed: bool) -> None:
    """Put a submodule that only holds the layers in the place of the attention."""
    holder = nn.Module()
    weight, bias = attention.in_proj_weight, attention.in_proj_bias
    if packed:
        holder.add_module("in_proj", _linear(weight, bias))
    else:
        separate = (attention.q_proj_weight, attention.k_proj_weight, attention.v_proj_weight)
        biases = [None] * 3 if bias is None else _thirds(bias)
        for letter, *its in zip("qkv", _thirds(weight) if attention._qkv_same_embed_dim else separate, biases, strict=True):
            holder.add_module(f"{letter}_proj", _linear(*its))
    holder.add_module("out_proj", attention.out_proj)
    if attention.dropout:
        holder.add_module("attend", FollowsMode(F.scaled_dot_product_attention, "dropout_p", (0.0, attention.dropout)))
    holder.train(attention.training)
    module.set_submodule(path, holder)


def _thirds(packed: Tensor) -> list[nn.Parameter]:
    return [nn.Parameter(third.clone(), requires_grad=packed.requires_grad) for third in packed.detach().chunk(3)]


def _linear(weight: nn.Parameter, bias: nn.Parameter | None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = weight
    if bias is not None:
        layer.bias = bias
    return layer


def _expand_call_(
    module: fx.GraphModule, node: fx.Node, given: dict[str, Any], attention: nn.MultiheadAttention, *, packed: bool
) -> None:
    """Replace one call by calls of the layers; of the new nodes, only the result has a shape yet."""
    graph, path, batch_first = module.graph, str(node.target), attention.batch_first
    width = attention.head_dim

    def heads(projected: fx.Node) -> fx.Node:
        """From (batch, places, features), or (places, batch, features), to (batch, heads, places, features of a head)."""
        sizes = [graph.call_method("size", (projected, axis)) for axis in (0, 1)]
        divided = graph.call_method("view", (projected, *sizes, attention.num_heads, width))
        return graph.call_method("permute", (divided, *((0, 2, 1, 3) if batch_first else (1, 2, 0, 3))))

    before = set(graph.nodes)
    with graph.inserting_before(node):
        if packed:
            whole = graph.call_module(f"{path}.in_proj", (given["query"],))
            parts = graph.call_method("chunk", (whole, 3, -1))
            projected = [graph.call_function(operator.getitem, (parts, i)) for i in range(3)]
        else:
            projected = [graph.call_module(f"{path}.{name[0]}_proj", (given[name],)) for name in ARGUMENTS[:3]]
        mask = given.get("attn_mask")
        if mask is not None and _held(module, mask).dtype is torch.bool:
            mask = graph.call_function(torch.logical_not, (mask,))  # of places to leave out; now of places to read
        arguments = (*map(heads, projected), mask)
        if attention.dropout:
            attended = graph.call_module(f"{path}.attend", arguments)
        else:
            attended = graph.call_function(F.scaled_dot_product_attention, arguments)
        joined = graph.call_method("flatten", (graph.call_method("permute", (attended, 2, 0, 1, 3)), 2))
        result = graph.call_module(f"{path}.out_proj", (joined,))
        if batch_first:  # after the layer, as torch does it: dropout draws its numbers in the order of memory
            result = graph.call_method("transpose", (result, 0, 1))
    for user in list(node.users):
        pass_on_(user, result, "shape")  # another attention may read it before shapes are recorded again
        user.replace_all_uses_with(result)
        graph.erase_node(user)
    graph.erase_node(node)
    for new in set(graph.nodes) - before:
        pass_on_(node, new, "nn_module_stack")
