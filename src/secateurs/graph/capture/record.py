"""Capture by recording: the model runs on the example, and every call of torch that it makes becomes a node.

Python runs as it is, so control flow, lists, decorators and caches are no obstacle; what depends on the values of an input is
refused. Sizes are numbers that remember which tensor they came from, so that the graph takes batches of other sizes.
"""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from secateurs.errors import Untraceable
from secateurs.graph.capture.calls import Call, erase_unused_, kind_of_input, place_of, put_together, tensors_in
from secateurs.graph.capture.leaves import Leaves, is_ruled
from secateurs.graph.layers import Fixed
from secateurs.graph.node_info import info

READS_VALUES = {
    *("__bool__", "__int__", "__float__", "__index__", "__complex__", "__contains__", "__array__", "item", "tolist", "numpy"),
    *("equal", "allclose", "is_nonzero"),
}

OPERATORS: dict[str, Any] = {
    **{"add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv, "matmul": operator.matmul},
    **{"true_divide": operator.truediv, "floor_divide": operator.floordiv, "pow": operator.pow, "neg": operator.neg},
    **{name: getattr(operator, name) for name in ("gt", "ge", "lt", "le", "eq", "ne")},
}
"""The operator behind the method that torch calls for it: `x + y` calls Tensor.add."""

REVERSED = {
    **{"__rsub__": operator.sub, "__rdiv__": operator.truediv, "__rtruediv__": operator.truediv, "__rpow__": operator.pow},
    **{"__rfloordiv__": operator.floordiv, "__rmatmul__": operator.matmul, "__rmul__": operator.mul, "__radd__": operator.add},
}


_ONE_AT_A_TIME = threading.Lock()
"""Held while `nn.Module.__call__` is another function."""


class Size(int):
    """A size of a recorded tensor, or what was computed from sizes: an int that can become a node of the graph."""

    make: Callable[[], fx.Node]

    def __new__(cls, value: int, make: Callable[[], fx.Node]) -> Size:
        """Hold `value`; `make` appends the node, at the first use only."""
        size = super().__new__(cls, value)
        size.make = functools.cache(make)
        return size

    def __truediv__(self, other: Any) -> float:
        return _Ratio(self, other) if type(other) in (int, Size) else int(self) / other

    def __neg__(self) -> Size:
        return Size(-int(self), lambda: self.make().graph.call_function(operator.neg, (self.make(),)))


def _on_sizes(name: str) -> Callable[[Any, Any], Any]:
    plain = getattr(int, name)

    def compute(one: Size, other: Any) -> Any:
        value = plain(one, other)
        if type(other) not in (int, Size):
            return value

        def make() -> fx.Node:
            a, b = one.make(), other.make() if isinstance(other, Size) else other
            pair = (b, a) if name.startswith("__r") else (a, b)
            return a.graph.call_function(getattr(operator, name.replace("__r", "__")), pair)

        return Size(value, make)

    return compute


for _name in ("add", "sub", "mul", "floordiv", "mod"):
    setattr(Size, f"__{_name}__", _on_sizes(f"__{_name}__"))
    setattr(Size, f"__r{_name}__", _on_sizes(f"__r{_name}__"))


class _Ratio(float):
    """A quotient of sizes, of which the floor and the ceiling are sizes again."""

    parts: tuple[Size, int]

    def __new__(cls, one: Size, other: int) -> _Ratio:
        ratio = super().__new__(cls, int(one) / int(other))
        ratio.parts = (one, other)
        return ratio

    def __floor__(self) -> int:
        return self.parts[0] // self.parts[1]

    def __ceil__(self) -> int:
        return -(-self.parts[0] // self.parts[1])


def with_item(tensor: Tensor, index: Any, value: Any) -> Any:
    """Return a copy of `tensor` in which `tensor[index]` is `value`; a node of its own when torch.fx unpickles a network."""
    for proxy in (tensor, value):
        if isinstance(proxy, fx.Proxy):
            return proxy.tracer.create_proxy("call_function", with_item, (tensor, index, value), {})
    tensor = tensor.clone()
    tensor[index] = value
    return tensor


def record(model: nn.Module, call: Call, tensors: tuple[Tensor, ...], leaves: Leaves) -> fx.Graph:
    """Run `model` once on `tensors` and return the graph of the calls that it made.

    Tensors that neither the call nor the model holds are kept as `Fixed` submodules, which are added to `model`.
    """
    recorder = _Recorder(model, leaves)
    inputs = tuple(t.detach().clone() for t in tensors)
    for name, tensor in zip(call.names(model), inputs, strict=True):
        recorder.keep(tensor, recorder.graph.placeholder(name), varies=True)
        recorder.inputs.append((recorder.nodes[id(tensor)], tensor))
    positional, named = call.arguments(inputs)
    try:
        with torch.no_grad(), buffers_restored(model), recorder.modules_watched(), recorder:
            outputs = model(*positional, **named)
        recorder.graph.output(put_together(recorder.graph, outputs, recorder.argument))
        erase_unused_(recorder.graph, model, Fixed)
    except Untraceable:
        raise
    except _ReadsValues as error:
        raise Untraceable(
            f"{type(model).__name__} reads the values of a tensor that depends on its input: {place_of(error)} ({error}). What "
            f"it computes then may differ from input to input. Rewrite that line, or mark the submodule that contains it as a "
            f"leaf: trace(model, x, leaves=['path.of.submodule'])."
        ) from error
    except Exception as error:
        raise Untraceable(
            f"{type(model).__name__} cannot be recorded: {place_of(error)} "
            f"({type(error).__name__}: {(str(error).splitlines() or [''])[0]})."
        ) from error
    return recorder.graph


class _ReadsValues(Exception):
    """The forward asks for the values of a tensor that depends on the input."""


class _Recorder(TorchFunctionMode):
    """Appends a node for every call of torch, and for every call of a leaf as a whole."""

    def __init__(self, model: nn.Module, leaves: Leaves) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.model = model
        self.leaves = leaves
        self.paths = {id(part): path for path, part in reversed(list(model.named_modules(remove_duplicate=False)))}
        state = model.state_dict(keep_vars=True)
        self.held = {id(tensor): name for name, tensor in reversed(state.items()) if isinstance(tensor, Tensor)}
        self.nodes: dict[int, fx.Node] = {}
        self.inputs: list[tuple[fx.Node, Tensor]] = []
        self.kept: list[Tensor] = []  # alive, so that no id is given twice
        self.varying: set[fx.Node] = set()  # nodes whose values depend on the inputs
        self.stack: list[nn.Module] = []
        self.paused = False
        self.fixed = 0

    def keep(self, tensor: Tensor, node: fx.Node, *, varies: bool) -> None:
        """Remember that `node` computes `tensor`."""
        self.nodes[id(tensor)] = node
        self.kept.append(tensor)
        if varies:
            self.varying.add(node)

    def argument(self, value: Any) -> Any:
        """Return `value` with nodes in place of tensors and sizes; devices and the network's dtype are those of its input."""
        if isinstance(value, Tensor):
            return self.node_of(value)
        if isinstance(value, Size):
            return value.make()
        if isinstance(value, tuple | list):
            parts = [self.argument(v) for v in value]
            return parts if isinstance(value, list) else tuple(parts)
        if isinstance(value, dict):
            return {key: self.argument(v) for key, v in value.items()}
        if isinstance(value, slice):
            return slice(*(self.argument(v) for v in (value.start, value.stop, value.step)))
        if isinstance(value, torch.device | torch.dtype):
            return kind_of_input(self.graph, self.inputs, value)
        if isinstance(value, float | int | str) and type(value) is not bool:  # also numpy's, which print differently
            return next(kind(value) for kind in (float, int, str) if isinstance(value, kind))
        return value

    def node_of(self, tensor: Tensor) -> fx.Node:
        """Return the node that computes `tensor`, reads it from the model, or holds it as a constant."""
        if id(tensor) not in self.nodes:
            if id(tensor) in self.held:
                node = self.graph.get_attr(self.held[id(tensor)])
            else:
                path = f"fixed_tensor_{self.fixed}"  # the same names in train and eval mode
                self.fixed += 1
                self.model.add_module(path, Fixed(tensor))
                node = self.graph.call_module(path)
            self.keep(tensor, node, varies=False)
        return self.nodes[id(tensor)]

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run the call, and append its node."""
        kwargs = kwargs or {}
        name = func.__name__
        if self.paused:
            return func(*args, **kwargs)
        if name == "__get__":
            attribute = func.__self__.__name__
            if attribute == "shape":
                return self.sizes(args[0])
            return self.call(
                lambda: func(*args), lambda given, _: self.graph.call_function(getattr, (given[0], attribute)), args, {}
            )
        if name in ("size", "numel"):
            sizes: Any = self.sizes(args[0])
            if name == "numel":
                return functools.reduce(operator.mul, sizes, 1)
            dim = args[1] if len(args) > 1 else kwargs.get("dim")
            return sizes if dim is None else sizes[dim]
        if name in READS_VALUES and any(self.nodes.get(id(t)) in self.varying for t in tensors_in([*args, kwargs])):
            raise _ReadsValues(f"Tensor.{name}")
        if name.endswith("_") and not name.startswith("__") and args and id(args[0]) in self.held:
            return func(*args, **kwargs)  # the model counts its batches: no part of what it computes
        if name == "__setitem__":
            node = self.graph.call_function(with_item, self.argument(args))
            func(*args)
            self.keep(args[0], node, varies=self.depends(node))
            return None
        return self.call(lambda: func(*args, **kwargs), functools.partial(self.node_for, func), args, kwargs)

    def node_for(self, func: Any, given: tuple[Any, ...], named: dict[str, Any]) -> fx.Node:
        """Append the call in the form that rules know: an operator, a method of a tensor, or a function of torch."""
        name = func.__name__
        named.pop("out", None)  # the result is remembered as that tensor
        if getattr(Tensor, name, None) is not func and not getattr(func, "__qualname__", "").startswith("Tensor"):
            return self.graph.call_function(func, given, named)
        if name in REVERSED:
            return self.graph.call_function(REVERSED[name], given[::-1])
        found = OPERATORS.get(name) or (getattr(operator, name, None) if name.startswith("__") else None)
        if found is not None and not named and len(given) == (1 if name == "neg" else 2):
            return self.graph.call_function(found, given)
        return self.graph.call_method(name, given, named)

    def call(
        self, run: Callable[[], Any], append: Callable[..., fx.Node], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a call; if it gives tensors, append its node and remember which tensors it gave."""
        sources = {id(t): (t, t._version) for t in tensors_in([args, kwargs])}
        given, named = self.argument(args), self.argument(kwargs)  # before the call, which may change a constant
        result = run()
        if not tensors_in(result):
            return result
        node = append(given, named)
        info(node)["nn_module_stack"] = {self.paths[id(m)]: (self.paths[id(m)], type(m)) for m in self.stack}
        return self.remember(result, node, sources)

    def remember(self, result: Any, node: fx.Node, sources: dict[int, tuple[Tensor, int]]) -> Any:
        """Remember the tensors of a result; one that is an unchanged argument gets another identity."""
        if isinstance(result, Tensor):
            tensor, version = sources.get(id(result), (None, -1))
            if tensor is not None and result._version == version:
                result = torch.ops.aten.alias(result)  # dropout in eval mode returns its input
            self.keep(result, node, varies=self.depends(node))
            return result
        if isinstance(result, dict):
            for key, value in result.items():
                result[key] = self.remember(value, self.graph.call_function(operator.getitem, (node, key)), sources)
        elif isinstance(result, tuple | list):
            parts = [
                self.remember(each, self.graph.call_function(operator.getitem, (node, place)), sources)
                if tensors_in(each)
                else each
                for place, each in enumerate(result)
            ]
            result = type(result)(*parts) if hasattr(result, "_make") else type(result)(parts)  # a namedtuple, or the rest
        return result

    def depends(self, node: fx.Node) -> bool:
        """Whether the values of `node` depend on the inputs of the network, not only on their sizes."""
        return any(source in self.varying for source in node.all_input_nodes)

    def sizes(self, tensor: Tensor) -> torch.Size:
        """Return the sizes of `tensor`; those of a recorded tensor remember it."""
        node = self.nodes.get(id(tensor))
        plain = tuple(tensor.size())
        if node is None or node.op == "get_attr":
            return torch.Size(plain)
        query = functools.partial(self.graph.call_method, "size")
        return torch.Size([Size(n, functools.partial(query, (node, i))) for i, n in enumerate(plain)])

    @contextmanager
    def modules_watched(self) -> Iterator[None]:
        """Within the block, know whose forward is running, and record a call of a leaf as one node."""
        _ONE_AT_A_TIME.acquire()
        original, thread = nn.Module.__call__, threading.get_ident()

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            path = self.paths.get(id(module))
            if path is None or self.paused or threading.get_ident() != thread:
                return original(module, *args, **kwargs)
            self.stack.append(module)
            try:
                if not path or not (self.leaves(module, path) or is_ruled(type(module))):
                    return original(module, *args, **kwargs)
                run = functools.partial(self.as_whole, original, module, args, kwargs)
                return self.call(run, functools.partial(self.graph.call_module, path), args, kwargs)
            finally:
                self.stack.pop()

        setattr(nn.Module, "__call__", call)  # noqa: B010  (a method of a class may not be assigned for mypy)
        try:
            yield
        finally:
            setattr(nn.Module, "__call__", original)  # noqa: B010
            _ONE_AT_A_TIME.release()

    def as_whole(self, original: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a leaf and record nothing of what it does."""
        self.paused = True
        try:
            return original(module, *args, **kwargs)
        finally:
            self.paused = False


@contextmanager
def buffers_restored(model: nn.Module) -> Iterator[None]:
    """Give the buffers their values back after the block: BatchNorm in train mode changes them."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for buffer, value in before:
            buffer.copy_(value)
