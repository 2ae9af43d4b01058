"""The forward pass in straight lines, with names that say which branch a tensor belongs to."""

from __future__ import annotations

import builtins
import keyword
import operator
from typing import Any

from torch import fx

from secateurs.errors import UnsupportedOp
from secateurs.export.plain import FOLLOWS_MODE, TABLE
from secateurs.export.source.text import INFIX, Call, Container, Expression, function_name, spelled, value, without_defaults
from secateurs.graph.channels import call_word, module_path
from secateurs.graph.trace import Shape

RESERVED = {"self", "torch", "nn", "F", "math", "Part", "Path", "Tensor", "load", *keyword.kwlist, *dir(builtins)}


class Forward:
    """Writes the nodes of a plain network, one line each."""

    def __init__(self, module: fx.GraphModule, tree: Container) -> None:
        self.tree = tree
        self.nodes = list(module.graph.nodes)
        self.last_use = {source: node for node in self.nodes for source in node.all_input_nodes}
        self.names: dict[fx.Node, str] = {}
        self.born: dict[str, int] = {}  # when a name was first given: a sum goes on under the older name of its terms
        self.place = ""

    def arguments(self) -> list[str]:
        """Names of the inputs."""
        return [self._fresh(n, str(n.target)) for n in self.nodes if n.op == "placeholder"]

    def lines(self) -> list[str]:
        """The body of forward."""
        written: list[str] = []
        for position, node in enumerate(self.nodes):
            if node.op == "placeholder":
                continue
            if node.op == "get_attr":
                self.names[node] = self.tree.access(str(node.target))
            elif node.op == "output":
                written += spelled("return ", self._argument(node.args[0], node), 8)
            else:
                written += self._heading(node, bool(written))
                last = self.nodes[position + 1]
                if last.op == "output" and last.args[0] is node:
                    return [*written, *spelled("return ", self._expression(node), 8)]
                expression = self._expression(node)
                before = f"{self._name(node)} = " if node.users else ""
                written += spelled(before, expression, 8)
        return written

    def _heading(self, node: fx.Node, later: bool) -> list[str]:
        """A comment where another block of the network begins."""
        place = _block(node)
        if not place or place == self.place:
            return []
        self.place = place
        return [*([""] if later else []), f"        # {place}"]

    def _expression(self, node: fx.Node) -> Expression:
        if node.op == "call_module":
            return Call(self.tree.access(str(node.target)), self._arguments(node, list(node.args), dict(node.kwargs)))
        if node.op == "call_method":
            owner = self._argument(node.args[0], node)
            return Call(f"{owner}.{node.target}", self._arguments(node, list(node.args[1:]), dict(node.kwargs)))
        args = list(node.args)
        if node.target is operator.getitem:
            return f"{self._argument(args[0], node)}[{self._index(args[1], node)}]"
        if node.target is getattr and len(args) == 2:
            return f"{self._argument(args[0], node)}.{args[1]}"
        if node.target is operator.neg:
            return f"-{self._argument(args[0], node)}"
        if node.target in INFIX and len(args) == 2:
            return f" {INFIX[node.target]} ".join(self._argument(a, node) for a in args)
        name = function_name(node.target)
        if name is None:
            raise _unwritable(node, "is not a function of torch")
        assert callable(node.target)
        kept, named = without_defaults(node.target, *_with_mode(node))
        return Call(name, self._arguments(node, kept, named))

    def _arguments(self, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> tuple[tuple[str, str], ...]:
        named = ((f"{key}=", self._argument(found, node)) for key, found in kwargs.items())
        return (*(("", self._argument(found, node)) for found in args), *named)

    def _argument(self, found: Any, node: fx.Node) -> str:
        match found:
            case fx.Node():
                return self.names[found]
            case _Mode():
                return "self.training"
            case list():
                return f"[{', '.join(self._argument(item, node) for item in found)}]"
            case tuple():
                inside = ", ".join(self._argument(item, node) for item in found)
                return f"({inside},)" if len(found) == 1 else f"({inside})"
            case dict():
                return f"{{{', '.join(f'{self._argument(k, node)}: {self._argument(v, node)}' for k, v in found.items())}}}"
            case slice():
                parts = ", ".join(self._argument(item, node) for item in (found.start, found.stop, found.step))
                return f"slice({parts})"
        text = value(found)
        if text is None:
            raise _unwritable(node, f"is given {found!r}, which has no spelling")
        return text

    def _index(self, found: Any, node: fx.Node) -> str:
        items = found if isinstance(found, tuple) and found else (found,)
        return ", ".join(self._slice(item, node) if isinstance(item, slice) else self._argument(item, node) for item in items)

    def _slice(self, found: slice, node: fx.Node) -> str:
        start, stop, step = ("" if p is None else self._argument(p, node) for p in (found.start, found.stop, found.step))
        if not step:
            return f"{start}:{stop}"
        return f"{start}:{stop}:{step}" if start or stop else f"::{step}"

    def _name(self, node: fx.Node) -> str:
        """The oldest name among the tensors that are read here for the last time; else a new one after where the node is."""
        ending = [
            self.names[source]
            for source in node.all_input_nodes
            if self.names[source] in self.born and self.last_use[source] is node and _is_tensor(source)
        ]
        if ending and _is_tensor(node):
            self.names[node] = min(ending, key=self.born.__getitem__)
            return self.names[node]
        return self._fresh(node, _place(node).replace(".", "_") or _word(node))

    def _fresh(self, node: fx.Node, wanted: str) -> str:
        at = self.nodes.index(node)
        position = {other: n for n, other in enumerate(self.nodes)}
        alive = {name for n, name in self.names.items() if n in self.last_use and position[self.last_use[n]] >= at}
        wanted = "".join(c if c.isalnum() or c == "_" else "_" for c in wanted).strip("_") or "x"
        wanted = f"x{wanted}" if wanted[0].isdigit() else wanted
        name, count = wanted, 1
        while name in alive or name in RESERVED:
            count += 1
            name = f"{wanted}_{count}"
        self.names[node] = name
        self.born.setdefault(name, at)
        return name


class _Mode:
    """Stands for an argument that follows the network's mode."""


def _with_mode(node: fx.Node) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call, with what was False in eval mode only marked as such."""
    mode = node.meta.get(FOLLOWS_MODE)
    args = [_Mode() if place == mode else found for place, found in enumerate(node.args)]
    return args, {key: _Mode() if key == mode else found for key, found in node.kwargs.items()}


def tables(module: fx.GraphModule) -> dict[str, str]:
    """Buffers that are tables of channels, and the names of the constants that hold them."""
    return {str(n.target): str(n.target).upper() for n in module.graph.nodes if n.op == "get_attr" and n.meta.get(TABLE)}


def _is_tensor(node: fx.Node) -> bool:
    shape = node.meta.get("shape")
    return not isinstance(shape, Shape) or shape.is_tensor


def _word(node: fx.Node) -> str:
    if node.target is operator.getitem:
        return "part"
    return str(node.target).rpartition(".")[2] if node.op == "call_module" else call_word(node)


def _place(node: fx.Node) -> str:
    """Path of the module whose forward made the call."""
    return str(node.target).rpartition(".")[0] if node.op == "call_module" else module_path(node)


def _block(node: fx.Node) -> str:
    """The block that a node belongs to: its place up to the last number in it, or the first name."""
    parts = _place(node).split(".")
    numbers = [n for n, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[-1] + 1] if numbers else parts[:1])


def _unwritable(node: fx.Node, why: str) -> UnsupportedOp:
    return UnsupportedOp(
        f"{call_word(node)} at node {node.meta.get('name', node.name)!r} cannot be written out as source: it {why}. "
        f"Export to ONNX or .pt2 instead."
    )
