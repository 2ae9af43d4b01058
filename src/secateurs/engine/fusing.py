"""What follows a convolution done while its output is still in the cache: additions and ReLUs, by oneDNN on a CPU.

Eager torch writes the output of every op to memory and reads it again for the next. oneDNN's convolution takes a term to add
and an activation along. torch has these ops for its compiler; they know no gradients.
"""

from __future__ import annotations

import operator

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from secateurs.engine.folding import called, dims_of, has_onednn
from secateurs.naming import free_name

RELUS = (F.relu, torch.relu, "relu")
SUMS = (operator.add, torch.add, "add")


class FusedConv(nn.Module):
    """A Conv2d with the sum and the ReLU that follow it; shares the convolution's parameters."""

    def __init__(self, conv: nn.Conv2d, *, relu: bool) -> None:
        super().__init__()
        self.weight, self.bias, self.relu = conv.weight, conv.bias, relu
        self.how = (list(conv.padding), list(conv.stride), list(conv.dilation), conv.groups)

    def forward(self, x: Tensor, term: Tensor | None = None) -> Tensor:
        """conv(x), plus `term` (of the same shape) if given, behind a ReLU if so made."""
        unary = "relu" if self.relu else "none"
        if term is None:
            return torch.ops.mkldnn._convolution_pointwise(x, self.weight, self.bias, *self.how, unary, [], "")  # type: ignore[no-any-return]
        unary_or_none = "relu" if self.relu else None
        return torch.ops.mkldnn._convolution_pointwise.binary(  # type: ignore[no-any-return]
            x, term, self.weight, self.bias, *self.how, "add", 1.0, unary_or_none, [], ""
        )


def can_fuse() -> bool:
    """Whether this build of torch has the fused convolutions."""
    return has_onednn() and hasattr(torch.ops.mkldnn, "_convolution_pointwise")


def fuse_(module: fx.GraphModule) -> None:
    """Join convolutions with the sums and ReLUs that alone read them; `module` must be private, in float32 on the CPU."""
    for node in list(module.graph.nodes):
        conv = called(module, node)
        if type(conv) is not nn.Conv2d or conv.padding_mode != "zeros" or isinstance(conv.padding, str):
            continue
        last, term = node, None
        add = only_reader(last)
        if add is not None and is_plain_sum(add):
            last, term = add, next(a for a in add.args if a is not node)
        relu = only_reader(last)
        if relu is not None and _is_relu(module, relu):
            last = relu
        if last is node:
            continue
        name = free_name(module, f"fused_{node.name}")
        module.add_submodule(name, FusedConv(conv, relu=last is relu))
        with module.graph.inserting_before(last):
            new = module.graph.call_module(name, (node.args[0],) if term is None else (node.args[0], term))
        new.meta = dict(last.meta)
        last.replace_all_uses_with(new)
    module.graph.eliminate_dead_code()
    module.recompile()


def only_reader(node: fx.Node) -> fx.Node | None:
    """The one node that reads what `node` gives; None if several do."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def is_plain_sum(node: fx.Node) -> bool:
    """Whether `node` adds two different tensors of the same shape."""
    if node.op == "output" or node.target not in SUMS or node.kwargs or len(node.args) != 2 or len(node.all_input_nodes) != 2:
        return False
    shapes = {dims_of(n) for n in (node, *node.all_input_nodes)}
    return len(shapes) == 1 and None not in shapes


def _is_relu(module: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == "call_module":
        return type(called(module, node)) is nn.ReLU
    return node.op != "output" and node.target in RELUS
