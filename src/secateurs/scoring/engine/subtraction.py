"""What follows a convolution done while its output is still in the cache: additions and ReLUs, by oneDNN on a CPU.

Eager torch writes the output of every op to memory and reads it again for the next. oneDNN's convolution takes a term to add
and an activation along. torch has these ops for its compiler; they know no gradients.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from secateurs.graph.channels import free_name
from secateurs.scoring.engine.split import called, dims_of, has_onednn, shallow_clone

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
    changed = shallow_clone(suffix)
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
