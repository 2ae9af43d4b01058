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
from secateurs.graph.channels import call_word, free_name, module_path
from secateurs.graph.layers import FrozenNorm
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
            rate = _argument(node, 1, "p", 0.5)
            _call_module_(module, node, DROPOUTS[node.target](rate), (_argument(node, 0, "input"),))
        else:
            assert callable(node.target)
            _call_module_(module, node, FollowsMode(node.target, position, values), node.args, node.kwargs)
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
                _call_module_(module, node, layer, (_argument(node, 0, "input"),))
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
        return whole[part] if whole is not None and not _has_nodes({"part": (part.start, part.stop, part.step)}) else None
    if given.target is operator.add:
        parts = [_sizes_in(each) for each in given.args]
        return None if None in parts else [size for part in parts for size in part or ()]
    return None


def _leave_out_zero_state_(module: fx.GraphModule, node: fx.Node) -> None:
    """Leave out the first state of a recurrent module if it is torch.zeros(...), as it is where none is given."""
    given = _argument(node, 1, "hx") if isinstance(called_module(module, node), RECURRENT) else None
    states = given if isinstance(given, tuple | list) else (given,)
    if all(isinstance(state, fx.Node) and state.target in (torch.zeros, torch.zeros_like) for state in states):
        node.args, node.kwargs = (_argument(node, 0, "input"),), {}


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
        _call_module_(module, last, nn.ChannelShuffle(apart[1]), (source,))
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


def _call_module_(
    module: fx.GraphModule, node: fx.Node, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> None:
    """Turn `node` into a call of `layer`, which is stored in the submodule that made the call."""
    layer.train(module.training)
    name = _owner_of(module, layer) or free_name(
        module, ".".join(part for part in (module_path(node), call_word(node)) if part)
    )
    if name in dict(module.named_modules()):
        for child, part in module.get_submodule(name).named_children():
            layer.add_module(child, part)  # the owner of the weights may hold other layers too
    module.add_submodule(name, layer)
    node.op, node.target, node.args, node.kwargs = "call_module", name, args, kwargs or {}


def _owner_of(module: fx.GraphModule, layer: nn.Module) -> str:
    """Return the path of the submodule that holds the tensors of a new layer and no others; '' if there is none.

    The layer takes its place, so that parameters keep their names.
    """
    wanted = {id(t): name for name, t in [*layer.named_parameters(), *layer.named_buffers()]}
    for path, part in module.named_modules() if wanted else ():
        own = {**part._parameters, **part._buffers}
        held = {name: t for name, t in own.items() if t is not None and name != "num_batches_tracked"}
        if path and held and type(part) is nn.Module and all(wanted.get(id(t)) == name for name, t in held.items()):
            missing = {name for i, name in wanted.items() if i not in {id(t) for t in held.values()}}
            return path if missing <= {"num_batches_tracked", "bias"} else ""
    return ""


def _argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def _held(module: fx.GraphModule, value: Any) -> Tensor | None:
    """Return the parameter or buffer that an argument reads from the model; None if it is computed or read elsewhere too."""
    if not isinstance(value, fx.Node) or value.op != "get_attr" or len(value.users) != 1:
        return None
    *path, name = str(value.target).split(".")
    found = getattr(module.get_submodule(".".join(path)), name)
    return found if isinstance(found, Tensor) else None


def _build_conv(kind: type[Any], transposed: bool) -> Callable[[fx.GraphModule, fx.Node], nn.Module | None]:
    names = ["stride", "padding", "dilation", "groups"]
    if transposed:
        names = ["stride", "padding", "output_padding", "groups", "dilation"]
    defaults: dict[str, Any] = {"stride": 1, "padding": 0, "output_padding": 0, "groups": 1, "dilation": 1}

    def build(module: fx.GraphModule, node: fx.Node) -> nn.Module | None:
        weight, bias = _held(module, _argument(node, 1, "weight")), _argument(node, 2, "bias")
        options = {name: _argument(node, 3 + i, name, defaults[name]) for i, name in enumerate(names)}
        held_bias = None if bias is None else _held(module, bias)
        if weight is None or (bias is not None and held_bias is None) or _has_nodes(options):
            return None
        inner, outer = weight.shape[1] * options["groups"], weight.shape[0]
        if transposed:
            inner, outer = outer, inner
        layer = kind(inner, outer, tuple(weight.shape[2:]), bias=bias is not None, device="meta", **options)
        return _with_tensors(layer, weight=weight, bias=held_bias)

    return build


def _build_linear(module: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    weight, bias = _held(module, _argument(node, 1, "weight")), _argument(node, 2, "bias")
    held_bias = None if bias is None else _held(module, bias)
    if weight is None or weight.dim() != 2 or (bias is not None and held_bias is None):
        return None
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    return _with_tensors(layer, weight=weight, bias=held_bias)


def _build_prelu(module: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    weight = _held(module, _argument(node, 1, "weight"))
    return None if weight is None else _with_tensors(nn.PReLU(weight.numel(), device="meta"), weight=weight)


def _build_batch_norm(module: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    names = ["running_mean", "running_var", "weight", "bias"]
    if node.target is torch.batch_norm:
        names = [*names[2:], *names[:2]]
    given = {name: _argument(node, 1 + i, name) for i, name in enumerate(names)}
    held = {name: None if value is None else _held(module, value) for name, value in given.items()}
    defaults = {"training": False, "momentum": 0.1, "eps": 1e-5}
    options = {name: _argument(node, 5 + i, name, default) for i, (name, default) in enumerate(defaults.items())}
    if any(given[n] is not None and held[n] is None for n in names) or _has_nodes(options):
        return None
    shape = shape_of(_argument(node, 0, "input")).dims or ()
    batch_only = held["running_mean"] is None and held["running_var"] is None
    if not info(node).get("follows_mode") and not batch_only:
        if options["training"] or held["running_mean"] is None or held["running_var"] is None:
            return None  # no module updates statistics in eval mode
        return FrozenNorm(options["eps"], **held)  # type: ignore[arg-type]  # statistics were found above
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}.get(len(shape))
    if kind is None:
        return None  # torch has no module for tensors of more axes
    affine = held["weight"] is not None
    layer = kind(shape[1], options["eps"], options["momentum"], affine, track_running_stats=not batch_only, device="meta")
    if layer.num_batches_tracked is not None and held["running_mean"] is not None:
        layer.num_batches_tracked = torch.zeros((), dtype=torch.long, device=held["running_mean"].device)
    if held["weight"] is not None and held["bias"] is None:
        held["bias"] = torch.zeros_like(held["weight"])
    return _with_tensors(
        layer, **{name: tensor for name, tensor in held.items() if name in ("weight", "bias") or not batch_only}
    )


def _build_instance_norm(module: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    """An nn.InstanceNorm with weights; one without is left to its rule, one with statistics to none."""
    given = {name: _argument(node, i, name) for i, name in enumerate(("running_mean", "running_var", "weight", "bias"), 1)}
    weight, bias = _held(module, given["weight"]), _held(module, given["bias"])
    options = {"eps": _argument(node, 7, "eps", 1e-5)}
    if given["running_mean"] is not None or weight is None or bias is None or _has_nodes(options):
        return None
    rank = len(shape_of(_argument(node, 0, "input")).dims or ())
    kind = {3: nn.InstanceNorm1d, 4: nn.InstanceNorm2d, 5: nn.InstanceNorm3d}.get(rank)
    return kind and _with_tensors(kind(len(weight), affine=True, device="meta", **options), weight=weight, bias=bias)


def _build_norm(kind: type[Any], size: str) -> Callable[[fx.GraphModule, fx.Node], nn.Module | None]:
    """`size` is the argument of the function and of the class that comes first: the normalised shape, or the groups."""
    names = ["weight"] if kind is nn.RMSNorm else ["weight", "bias"]

    def build(module: fx.GraphModule, node: fx.Node) -> nn.Module | None:
        given = {name: _argument(node, 2 + i, name) for i, name in enumerate(names)}
        held = {name: None if value is None else _held(module, value) for name, value in given.items()}
        first, eps = _argument(node, 1, size), _argument(node, 2 + len(names), "eps", None if kind is nn.RMSNorm else 1e-5)
        if any(given[n] is not None and held[n] is None for n in names) or _has_nodes({"size": first, "eps": eps}):
            return None
        if held["weight"] is None and any(value is not None for value in held.values()):
            return None
        affine = held["weight"] is not None
        if kind is nn.GroupNorm:
            channels = dims_of(_argument(node, 0, "input"))[1]
            layer = kind(first, channels, eps, affine, device="meta")
        else:
            layer = kind(tuple(first), eps, affine, device="meta")
        if affine and held.get("bias") is None and "bias" in names:
            layer.register_parameter("bias", None)
        return _with_tensors(layer, **held)

    return build


def _has_nodes(options: dict[str, Any]) -> bool:
    return any(isinstance(leaf, fx.Node) for v in options.values() for leaf in (v if isinstance(v, tuple | list) else [v]))


def _with_tensors(layer: nn.Module, **tensors: Tensor | None) -> nn.Module:
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if name in layer._buffers:
            layer._buffers[name] = tensor
        else:
            layer._parameters[name] = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor)
    return layer


BUILDERS: dict[Any, Callable[[fx.GraphModule, fx.Node], nn.Module | None]] = {
    torch.conv1d: _build_conv(nn.Conv1d, False),
    torch.conv2d: _build_conv(nn.Conv2d, False),
    torch.conv3d: _build_conv(nn.Conv3d, False),
    torch.conv_transpose1d: _build_conv(nn.ConvTranspose1d, True),
    torch.conv_transpose2d: _build_conv(nn.ConvTranspose2d, True),
    torch.conv_transpose3d: _build_conv(nn.ConvTranspose3d, True),
    F.linear: _build_linear,
    F.batch_norm: _build_batch_norm,
    torch.batch_norm: _build_batch_norm,
    F.instance_norm: _build_instance_norm,
    **dict.fromkeys((F.layer_norm, torch.layer_norm), _build_norm(nn.LayerNorm, "normalized_shape")),
    **dict.fromkeys((F.group_norm, torch.group_norm), _build_norm(nn.GroupNorm, "num_groups")),
    **dict.fromkeys((F.rms_norm, torch.rms_norm), _build_norm(nn.RMSNorm, "normalized_shape")),
    torch.prelu: _build_prelu,
}
