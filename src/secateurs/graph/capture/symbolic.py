"""Capture by torch.fx symbolic tracing: the forward runs on proxies. Fast, but control flow must not depend on a proxy."""

from __future__ import annotations

import inspect
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import fx, nn

from secateurs.errors import Untraceable
from secateurs.graph.capture.calls import Call, place_of
from secateurs.graph.capture.code import call_directly_
from secateurs.graph.capture.leaves import Leaves


class _Tracer(fx.Tracer):
    """torch.fx's tracer, which does not enter the leaves."""

    def __init__(self, leaves: Leaves) -> None:
        super().__init__()
        self.leaves = leaves

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return self.leaves(m, module_qualified_name)


class Unpickler(fx.Tracer):
    """The tracer that torch.fx follows a GraphModule's code with when it is unpickled: buffers may be called with its sizes."""

    proxy_buffer_attributes = True

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        """The graph, whose code calls layers directly again."""
        graph = super().trace(root, concrete_args)
        call_directly_(graph)
        return graph


def trace_symbolically(model: nn.Module, call: Call, leaves: Leaves) -> fx.Graph:
    """Run `model` on proxies of the inputs; arguments that the call leaves out have their defaults, not proxies."""
    arguments = _fixed_arguments(model, call)
    try:
        with _interrupts_deferred():
            graph = _Tracer(leaves).trace(model, concrete_args=arguments or None)
        _erase_arguments_(graph, arguments)
        for node in graph.nodes:
            node.type = None if isinstance(node.type, str) else node.type  # a GraphModule with such a type cannot be pickled
        return graph
    except Exception as error:
        raise Untraceable(
            f"torch.fx cannot follow {type(model).__name__}: {place_of(error)} "
            f"({type(error).__name__}: {str(error).splitlines()[0]}). "
            f"The result depends on the values of a tensor, or the code cannot be traced. Rewrite that line, or mark the "
            f"submodule that contains it as a leaf: trace(model, x, leaves=['path.of.submodule'])."
        ) from error


def _fixed_arguments(model: nn.Module, call: Call) -> dict[str, Any]:
    """Return the arguments of forward that are not inputs: tracing must see their values, not proxies."""
    if call.nested is not None:
        raise Untraceable(f"{type(model).__name__}: inputs within lists and dicts are not followed by torch.fx.")
    given: dict[str, Any] = {}
    signature = inspect.signature(model.forward).parameters
    for place, parameter in enumerate(signature.values()):
        if parameter.kind is parameter.VAR_POSITIONAL:
            raise Untraceable(
                f"{type(model).__name__}.forward takes *{parameter.name}, which torch.fx cannot trace. Wrap the model in a "
                f"module whose forward names its inputs."
            )
        if parameter.name in call.fixed:
            given[parameter.name] = call.fixed[parameter.name]
        elif place >= call.positional and parameter.name not in call.keywords and parameter.default is not parameter.empty:
            given[parameter.name] = parameter.default
    for name in {*call.keywords, *call.fixed} - set(signature):
        raise Untraceable(f"{type(model).__name__}.forward takes {name!r} by **, which torch.fx cannot trace.")
    return given


@contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Delay Ctrl-C to the end of the block: torch.fx, interrupted while it traces, may not be able to trace again."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if pressed:
        raise KeyboardInterrupt


def _erase_arguments_(graph: fx.Graph, arguments: dict[str, Any]) -> None:
    """Erase the placeholders of arguments with fixed values, and the checks that torch.fx added for them."""

    def behind(node: fx.Node) -> set[fx.Node]:
        return {node}.union(*map(behind, node.users))

    patterns = [rf"{re.escape(name)}(_\d+)?" for name in arguments]
    for placeholder in [n for n in graph.nodes if n.op == "placeholder"]:
        if any(re.fullmatch(pattern, str(placeholder.target)) for pattern in patterns):
            for node in sorted(behind(placeholder), key=list(graph.nodes).index, reverse=True):
                graph.erase_node(node)
