"""One form for each op: functional layers become modules, in-place ops out-of-place ones, dropout follows train and eval mode.

torch.fx records the calls of one forward pass, including constants such as `training=self.training`, and does not track
in-place changes. Compaction needs a graph whose values never change and whose weights belong to ordinary modules.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from secateurs.errors import Untraceable
from secateurs.graph.as_modules import BUILDERS, argument, call_module_, has_nodes
from secateurs.graph.channels import call_word
from secateurs.graph.node_info import Shape, called_module, dims_of, info, pass_on_, shape_of
from secateurs.graph.recurrent import RECURRENT

OUT_OF_PLACE: dict[Any, Any] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}

DROPOUTS: dict[Any, type[nn.Module]] = {
    F.dropout: nn.Dropout,
    F.dropout1d: nn.Dropout1d,
    F.dropout2d: nn.Dropout2d,
    F.dropout3d: nn.Dropout3d,
    F.alpha_dropout: nn.AlphaDropout,
    F.feature_alpha_dropout: nn.FeatureAlphaDropout,
    torch.dropout: nn.Dropout,
}


class FollowsMode(nn.Module):
    """Calls a function with an argument that depends on this module's mode, as `training=self.training` did."""

    def __init__(self, function: Callable[..., Any], position: int | str, values: tuple[Any, Any] = (False, True)) -> None:
        super().__init__()
        self.function = function
        self.position = position
        self.values = values  # in eval mode, in train mode

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function with the value of the mode at `position`, an index or a keyword."""
        value = self.values[self.training]
        if isinstance(self.position, str):
            return self.function(*args, **{**kwargs, self.position: value})
        return self.function(*args[: self.position], value, *args[self.position + 1 :], **kwargs)


class AnotherPath(Untraceable):
    """The model is in train mode, and takes another path through its forward there than in eval mode."""


def align_train_and_eval_(module: fx.GraphModule, follow_in_train_mode: Callable[[], fx.Graph], *, demanded: bool) -> bool:
    """Make the ops whose arguments differ between train and eval mode follow the mode; return whether both take one path.

    `module` was traced in eval mode. If the forward takes another path in train mode, the eval path is kept; if train mode is
    `demanded` (the model was in it), that is an error instead.
    """
    try:
        other = list(follow_in_train_mode().nodes)
    except Untraceable:
        other = []
    ours = list(module.graph.nodes)
    if [(n.op, str(n.target)) for n in ours] != [(n.op, str(n.target)) for n in other]:
        if demanded:
            raise AnotherPath(
                "the model is in train mode and its forward takes another path there than in eval mode. Pruning is "
                "measured in eval mode: call model.eval() before trace."
            )
        return False
    for node, in_train_mode in zip(ours, other, strict=True):
        found = _mode_argument(node, in_train_mode)
        if found is None:
            continue
        position, values = found
        if node.target in BUILDERS:
            info(node)["follows_mode"] = True
        elif node.target in DROPOUTS and values == (False, True):
            rate = argument(node, 1, "p", 0.5)
            call_module_(module, node, DROPOUTS[node.target](rate), (argument(node, 0, "input"),))
        else:
            assert callable(node.target)
            call_module_(module, node, FollowsMode(node.target, position, values), node.args, node.kwargs)
    return True


def _mode_argument(node: fx.Node, in_train_mode: fx.Node) -> tuple[int | str, tuple[Any, Any]] | None:
    """Return the argument of a call, a flag or a rate, that differs between the modes, with both values; None if none does."""
    if node.op != "call_function":
        return None
    ours: dict[Any, Any] = {**dict(enumerate(node.args)), **node.kwargs}
    other: dict[Any, Any] = {**dict(enumerate(in_train_mode.args)), **in_train_mode.kwargs}
    pairs = {key: (value, other.get(key)) for key, value in ours.items()}
    differ = (key for key, (a, b) in pairs.items() if type(a) is type(b) and isinstance(a, bool | float) and a != b)
    return next(((key, pairs[key]) for key in differ), None)


def normalise_(module: fx.GraphModule) -> None:
    """Bring all calls to one form; raises `Untraceable` for in-place assignment, which no rule describes."""
    for node in module.graph.nodes:
        if node.target is operator.setitem or node.kwargs.get("out") is not None:
            raise Untraceable(
                f"node {node.name!r} writes into a tensor in place ({node.format_node()}). Build the result with torch.cat or "
                f"torch.where instead, or mark the submodule as a leaf: trace(model, x, leaves=[...])."
            )
    _undo_in_place_(module)
    for node in list(module.graph.nodes):
        _read_type_only_(module, node)
        _rename_(node)
        _list_sizes_(module, node)
        _leave_out_zero_state_(module, node)
        _fuse_shuffle_(module, node)
    for node in list(module.graph.nodes):
        _divide_before_heads_(module, node)
    for node in list(module.graph.nodes):
        if node.op == "call_function" and node.target in BUILDERS:
            layer = BUILDERS[node.target](module, node)
            if layer is not None:
                call_module_(module, node, layer, (argument(node, 0, "input"),))
    for node in reversed(list(module.graph.nodes)):
        stateless = node.op in ("get_attr", "call_function", "call_method") or isinstance(
            called_module(module, node), RECURRENT
        )
        erasable = stateless and not node.users
        if erasable and "assert" not in call_word(node) and not call_word(node).endswith("_"):  # an assertion must run
            module.graph.erase_node(node)
    module.graph.lint()
    module.delete_all_unused_submodules()
    _delete_unused_tensors_(module)
    module.recompile()


def _delete_unused_tensors_(module: fx.GraphModule) -> None:
    """Delete parameters that no node reads: those of functional layers belong to the new modules."""
    read = {str(n.target) for n in module.graph.nodes if n.op == "get_attr"}  # also modules that a function gets
    called = read | {str(n.target) for n in module.graph.nodes if n.op == "call_module"}
    parameters, buffers = module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    for name in [name for name, _ in [*parameters, *buffers]]:
        parents = name.split(".")
        if name not in read and not any(".".join(parents[:i]) in called for i in range(1, len(parents))):
            delattr(module.get_submodule(".".join(parents[:-1])), parents[-1])


def _undo_in_place_(module: fx.GraphModule) -> None:
    """Replace in-place ops by out-of-place ones; later users of the changed tensor read the result instead."""
    nodes = list(module.graph.nodes)
    changing = [node for node in nodes if _plain_form(module, node) is not None]
    for node in changing:
        plain = _plain_form(module, node)
        if node.op != "call_module":
            node.target = plain
        if node.kwargs.get("inplace") is True:
            node.kwargs = {**node.kwargs, "inplace": False}
        changed = node.args[0] if node.args else next(iter(node.kwargs.values()))
        assert isinstance(changed, fx.Node)
        for user in nodes[nodes.index(node) + 1 :]:
            if changed in user.all_input_nodes:
                user.replace_input_with(changed, node)
    for layer in module.modules():
        if getattr(layer, "inplace", False) is True:
            setattr(layer, "inplace", False)  # noqa: B010  (not every module has it)


def _plain_form(module: fx.GraphModule, node: fx.Node) -> Any:
    """Return the out-of-place form of an in-place op; None for an op that is not in-place."""
    if node.op == "call_module":
        return node.target if getattr(module.get_submodule(str(node.target)), "inplace", False) is True else None
    if node.op == "call_function":
        if node.target in OUT_OF_PLACE:
            return OUT_OF_PLACE[node.target]
        if node.kwargs.get("inplace") is True:
            return node.target
    if node.op not in ("call_function", "call_method"):
        return None
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if not name.endswith("_") or name.endswith("__"):
        return None
    if isinstance(node.target, str):
        return name[:-1] if hasattr(Tensor, name[:-1]) else None
    return getattr(torch, name[:-1], None) or getattr(F, name[:-1], None)


NEW: dict[str, Any] = {"new_full": torch.full, "new_zeros": torch.zeros, "new_ones": torch.ones, "new_empty": torch.empty}


def _read_type_only_(module: fx.GraphModule, node: fx.Node) -> None:
    """Replace x.type_as(y), x.to(y) by x.to(y.device, y.dtype), y.new_zeros by torch.zeros: they do not read values of y."""
    made = NEW.get(str(node.target))
    other = node.args[0] if made and node.args else node.args[1] if len(node.args) == 2 and not node.kwargs else None
    if node.op != "call_method" or not (made or node.target in ("type_as", "to")) or not isinstance(other, fx.Node):
        return
    if not shape_of(other).is_tensor:
        return
    with module.graph.inserting_before(node):
        device = module.graph.call_function(getattr, (other, "device"))
        dtype = module.graph.call_function(getattr, (other, "dtype"))
    for query in (device, dtype):
        info(query).update(info(node))
        info(query)["shape"] = Shape(None)
    if made:
        node.op, node.target, node.args = "call_function", made, node.args[1:]
        node.kwargs = {"device": device, "dtype": dtype, **node.kwargs}
    else:
        node.target, node.args = "to", (node.args[0], device, dtype)


def _rename_(node: fx.Node) -> None:
    """Replace x.max(2).values by x.max(2)[0], and the like for other ops that return pairs; x.where(…) by torch.where(…)."""
    if node.op == "call_method" and node.target == "where" and len(node.args) == 3:
        node.op, node.target, node.args = "call_function", torch.where, (node.args[1], node.args[0], node.args[2])
    if node.target is getattr and node.args[1] in ("values", "indices") and not shape_of(node.all_input_nodes[0]).is_tensor:
        node.target, node.args = operator.getitem, (node.args[0], int(node.args[1] == "indices"))


def _list_sizes_(module: fx.GraphModule, node: fx.Node) -> None:
    """Replace x.view(y.shape), with all sizes at once, by sizes one by one, of which a cut can correct that of the channels.

    Also sizes that are joined from parts: y.size()[:-1] + (8,).
    """
    given = node.args[1] if len(node.args) == 2 else None
    if call_word(node) not in ("view", "reshape", "expand") or not isinstance(given, fx.Node) or node.kwargs:
        return
    listed = _sizes_in(given)
    if listed is None:
        return
    sizes: list[Any] = []
    for each in listed:
        if not isinstance(each, tuple):
            sizes.append(each)
            continue
        asked, axis = each
        with module.graph.inserting_before(node):
            size = module.graph.call_method("size", (asked, axis))
        pass_on_(given, size, "nn_module_stack")
        info(size)["shape"] = Shape(None, dims_of(asked)[axis])
        sizes.append(size)
    node.args = (node.args[0], tuple(sizes))


def _sizes_in(given: Any) -> list[Any] | None:
    """Return the sizes that a node stands for: numbers, nodes, or pairs of a tensor and an axis; None if they are not known."""
    if isinstance(given, tuple | list):
        return list(given)
    if not isinstance(given, fx.Node) or given.kwargs:
        return None
    if given.target == "size" or (given.target is getattr and given.args[1] == "shape"):
        asked = given.args[0]
        if not isinstance(asked, fx.Node) or len(given.args) != (1 if given.target == "size" else 2):
            return None
        return [(asked, axis) for axis in range(len(dims_of(asked)))]
    if given.target is operator.getitem and isinstance(given.args[1], slice):
        whole = _sizes_in(given.args[0])
        part = given.args[1]
        return whole[part] if whole is not None and not has_nodes({"part": (part.start, part.stop, part.step)}) else None
    if given.target is operator.add:
        parts = [_sizes_in(each) for each in given.args]
        return None if None in parts else [size for part in parts for size in part or ()]
    return None


def _leave_out_zero_state_(module: fx.GraphModule, node: fx.Node) -> None:
    """Leave out the first state of a recurrent module if it is torch.zeros(...), as it is where none is given."""
    given = argument(node, 1, "hx") if isinstance(called_module(module, node), RECURRENT) else None
    states = given if isinstance(given, tuple | list) else (given,)
    if all(isinstance(state, fx.Node) and state.target in (torch.zeros, torch.zeros_like) for state in states):
        node.args, node.kwargs = (argument(node, 0, "input"),), {}


def _fuse_shuffle_(module: fx.GraphModule, last: fx.Node) -> None:
    """Replace view, transpose, view by nn.ChannelShuffle if they only reorder the channels."""
    turned = _only_source(last, ("view", "reshape", torch.reshape, "flatten", torch.flatten))
    while turned is not None and turned.target == "contiguous":
        turned = _only_source(turned, ("contiguous",))
    first = None if turned is None else _only_source(turned, ("transpose", torch.transpose))
    source = None if first is None else _only_source(first, ("view", "reshape", torch.reshape), sole=False)
    if turned is None or first is None or source is None:
        return
    before, apart, after = dims_of(source), dims_of(first), dims_of(last)
    swapped = sorted(a for a in turned.args[1:] if isinstance(a, int))
    around = (*apart[:1], *apart[3:]) == (*before[:1], *before[2:]) and len(apart) == len(before) + 1
    if swapped == [1, 2] and before == after and around:
        shuffled = last.args[0]
        call_module_(module, last, nn.ChannelShuffle(apart[1]), (source,))
        assert isinstance(shuffled, fx.Node)
        _erase_unused_(module, shuffled)


def _divide_before_heads_(module: fx.GraphModule, view: fx.Node) -> None:
    """Let a layer's output be divided into queries, keys and values first, and each of them among heads then.

    In (…, 3, h, d, …), made by one view, the features of queries cannot be removed without those of values.
    """
    if view.target not in ("view", "reshape", torch.reshape) or len(view.args) < 2 or not isinstance(view.args[0], fx.Node):
        return
    source, sizes = view.args[0], list(view.args[1] if isinstance(view.args[1], tuple | list) else view.args[1:])
    before, after = shape_of(source).dims or (), dims_of(view)
    divided_at = [
        axis
        for axis in range(1, len(before))
        if after[:axis] == before[:axis]
        and after[axis : axis + 1] in ((2,), (3,))
        and math.prod(after[axis : axis + 3]) == before[axis]
    ]
    if not divided_at or len(sizes) != len(after):
        return
    at = divided_at[-1]  # the axis that counts queries, keys and values
    turned = next(iter(view.users)) if len(view.users) == 1 else view
    order = list(range(len(after)))
    if turned.target in ("permute", torch.permute):
        given: Any = turned.args[1] if isinstance(turned.args[1], tuple | list) else turned.args[1:]
        order = [d % len(after) if isinstance(d, int) else -1 for d in given]
    elif turned is not view:
        turned = view
    if sorted(order) != list(range(len(after))):
        return
    first, parts = order.index(at), dict[fx.Node, int]()
    for user in turned.users:
        bound: Any = user.args[1] if len(user.args) > 1 else user.kwargs.get("dim", 0)
        if user.target in ("unbind", torch.unbind) and bound == first:
            parts |= {part: part.args[1] for part in user.users if isinstance(part.args[1], int)}
            ends = all(part.target is operator.getitem and isinstance(part.args[1], int) for part in user.users)
        else:
            ends = user.target is operator.getitem and isinstance(bound, int) and first == 0
            parts |= {user: bound} if ends else {}
        if not ends:
            return
    graph, dims = module.graph, (*after[:at], *after[at + 1 :])
    with graph.inserting_before(view):
        whole = graph.call_method("chunk", (source, after[at], at))
    third = (*before[:at], before[at] // after[at], *before[at + 1 :])
    info(whole)["shape"] = Shape(None, (Shape(third),) * after[at])
    left = [d - (d > at) for d in order if d != at]
    for part, number in parts.items():
        with graph.inserting_before(part):
            own = graph.call_function(operator.getitem, (whole, number % after[at]))
            divided = graph.call_method("reshape", (own, *sizes[:at], *sizes[at + 1 :]))
            result = graph.call_method("permute", (divided, *left))
        shapes = (third, dims, tuple(dims[d] for d in left))
        for node, shape in zip((own, divided, result), shapes, strict=True):
            info(node)["shape"] = Shape(shape)
        for node in (whole, own, divided, result):
            pass_on_(view, node, "nn_module_stack")
        part.replace_all_uses_with(result)
        _erase_unused_(module, part)


def _erase_unused_(module: fx.GraphModule, node: fx.Node) -> None:
    """Erase a node without users, and the nodes that only it read."""
    if node.users or node.op in ("placeholder", "output"):
        return
    sources = node.all_input_nodes
    module.graph.erase_node(node)
    for source in sources:
        _erase_unused_(module, source)


def _only_source(node: fx.Node, targets: tuple[Any, ...], *, sole: bool = True) -> fx.Node | None:
    """Return the tensor that `node` is called on, if it calls one of `targets` (and is the only user of that tensor)."""
    if node.op not in ("call_function", "call_method") or node.target not in targets:
        return None
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or not shape_of(source).is_tensor:
        return None
    return source if not sole or len(source.users) == 1 else None
