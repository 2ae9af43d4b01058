"""Capture by torch.export: a graph of aten ops, put back into calls of the model's own submodules and of torch's functions."""

from __future__ import annotations

import functools
import io
import logging
import operator
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from secateurs.errors import Untraceable
from secateurs.graph.capture.aten import DROPPED, POOLS_WITH_INDICES, emit, word_of
from secateurs.graph.capture.calls import Call, erase_unused_, kind_of_input, place_of, put_together
from secateurs.graph.capture.leaves import Leaves
from secateurs.graph.layers import Fixed
from secateurs.graph.node_info import info

WRAPPED = "model."
"""What the names of tensors and submodules begin with in an exported program: the model is exported inside `_Flat`."""


class _Flat(nn.Module):
    """A model that takes tensors by position and returns the list of its tensors; `outputs` is what it returned last."""

    outputs: Any = None

    def __init__(self, model: nn.Module, call: Call) -> None:
        super().__init__()
        self.model = model
        self.call = call

    def forward(self, *tensors: Tensor) -> list[Any]:
        """All tensors and sizes of the outputs, in order."""
        positional, named = self.call.arguments(tensors)
        self.outputs = self.model(*positional, **named)
        found: list[Any] = []
        put_together(fx.Graph(), self.outputs, found.append)
        return found


@torch.library.custom_op("secateurs::mark", mutates_args=())
def mark(tensor: Tensor, label: str) -> Tensor:
    """Return a copy of `tensor`: a node of an exported program that says where a leaf begins or ends."""
    return tensor.clone()


@mark.register_fake
def _(tensor: Tensor, label: str) -> Tensor:
    return torch.empty_like(tensor)


class _Marked:
    """The calls of leaves during an export: hooks mark every tensor that goes in or comes out."""

    def __init__(self, model: nn.Module, leaves: Leaves) -> None:
        self.calls: list[tuple[str, Any]] = []  # path, and arguments with labels in place of tensors
        self.running: list[int] = []
        self.places: dict[str, tuple[int, tuple[Any, ...]]] = {}  # of a result: which call, and where in what it returned
        self.handles: list[Any] = []
        for path, part in _outermost(model, leaves):
            self.handles.append(
                part.register_forward_pre_hook(functools.partial(self.begin, path), prepend=True, with_kwargs=True)
            )
            self.handles.append(part.register_forward_hook(self.end, with_kwargs=True))

    def begin(self, path: str, part: nn.Module, args: Any, kwargs: Any) -> Any:
        """Mark the arguments of a call."""
        number = len(self.calls)
        flat, spec = pytree.tree_flatten((args, kwargs))
        labels = [f"call {number} argument {i}" if isinstance(v, Tensor) else v for i, v in enumerate(flat)]
        marked = [mark(v, label) if isinstance(v, Tensor) else v for v, label in zip(flat, labels, strict=True)]
        self.calls.append((path, pytree.tree_unflatten(labels, spec)))
        self.running.append(number)
        return pytree.tree_unflatten(marked, spec)

    def end(self, part: nn.Module, args: Any, kwargs: Any, outputs: Any) -> Any:
        """Mark the results of a call."""
        number = self.running.pop()
        flat, spec = pytree.tree_flatten_with_path(outputs)
        marked: list[Any] = []
        keys: Any
        for keys, value in flat:
            label = f"call {number} result {len(marked)}"
            self.places[label] = number, tuple(k.idx if hasattr(k, "idx") else k.key for k in keys)
            marked.append(mark(value, label) if isinstance(value, Tensor) else value)
        return pytree.tree_unflatten(marked, spec)


def export(model: nn.Module, call: Call, tensors: tuple[Tensor, ...], leaves: Leaves) -> fx.Graph:
    """Export `model` with a batch of any size, and put its leaves and functions back."""
    flat = _Flat(model, call)
    flat.training = model.training
    batch = tensors[0].shape[:1]
    dynamic = tuple({0: torch.export.Dim.AUTO} if t.shape[:1] == batch and t.dim() else None for t in tensors)
    marked = _Marked(model, leaves)
    try:
        with _quiet():
            inputs = tuple(t.clone() for t in tensors)
            program = torch.export.export(flat, inputs, dynamic_shapes=(dynamic,), strict=False)
    except Exception as error:
        first = next(iter(str(error).strip().splitlines()), "")
        raise Untraceable(
            f"torch.export cannot export {type(model).__name__}: {place_of(error)} ({type(error).__name__}: {first})."
        ) from error
    finally:
        for handle in marked.handles:
            handle.remove()
    return _Conversion(program, flat, marked, tensors).run(call.names(model))


def _outermost(model: nn.Module, leaves: Leaves, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the leaves that do not lie in another leaf."""
    for name, part in model.named_children():
        below = f"{path}.{name}" if path else name
        if leaves(part, below):
            yield below, part
        else:
            yield from _outermost(part, leaves, below)


class _Conversion:
    """Builds the new graph from an exported program, node by node."""

    def __init__(
        self, program: torch.export.ExportedProgram, flat: _Flat, marked: _Marked, tensors: tuple[Tensor, ...]
    ) -> None:
        self.program, self.model, self.outputs, self.marked, self.tensors = program, flat.model, flat.outputs, marked, tensors
        self.graph = fx.Graph()
        self.new: dict[fx.Node, Any] = {}
        self.inputs: list[tuple[fx.Node, Tensor]] = []
        self.state = flat.model.state_dict(keep_vars=True)
        self.specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs if hasattr(spec.arg, "name")}
        self.labelled: dict[str, Any] = {}  # arguments of leaves
        self.called: dict[int, fx.Node] = {}
        self.fixed = 0

    def run(self, names: list[str]) -> fx.Graph:
        """Return the new graph."""
        remaining = iter(zip(names, self.tensors, strict=True))
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                if self.specs[node.name].kind is InputKind.USER_INPUT:
                    name, tensor = next(remaining)
                    self.new[node] = self.graph.placeholder(name)
                    self.inputs.append((self.new[node], tensor))
            elif node.op == "output":
                self.graph.output(self.returned(iter(self.argument(node.args[0]))))
            elif node.target is torch.ops.secateurs.mark.default:
                self.at_mark(node)
            elif node.op == "call_function":
                self.convert(node)
            elif node.op != "get_attr":
                raise Untraceable(f"torch.export gives a node {node.format_node()}, which cannot be put back into the model.")
        erase_unused_(self.graph, self.model, Fixed)
        return self.graph

    def returned(self, following: Iterator[Any]) -> Any:
        """Return what the output node takes, with the following nodes in place of the tensors and sizes of the outputs."""
        return put_together(self.graph, self.outputs, lambda _: next(following))

    def argument(self, value: Any) -> Any:
        """Return an argument with nodes of the new graph; tensors of the model become reads of their own names."""

        def mapped(each: Any) -> Any:
            if isinstance(each, fx.Node):
                return self.held(each) if each.op == "placeholder" and each not in self.new else self.new[each]
            if isinstance(each, torch.device | torch.dtype):
                return kind_of_input(self.graph, self.inputs, each)
            return each

        if isinstance(value, tuple | list):
            return tuple(self.argument(v) for v in value)
        if isinstance(value, dict):
            return {key: self.argument(v) for key, v in value.items()}
        try:
            return mapped(value)
        except KeyError as error:
            raise Untraceable(f"torch.export gives {value}, which cannot be put back into the model.") from error

    def held(self, placeholder: fx.Node) -> fx.Node:
        """Return the node that reads a parameter, a buffer or a constant of the exported program."""
        spec = self.specs[placeholder.name]
        name = str(spec.target).removeprefix(WRAPPED)
        if name in self.state:
            node = self.graph.get_attr(name)
        else:
            path = f"fixed_tensor_{self.fixed}"
            self.fixed += 1
            known = {**self.program.constants, **dict(self.program.named_buffers())}
            self.model.add_module(path, Fixed(known[str(spec.target)]))
            node = self.graph.call_module(path)
        self.new[placeholder] = node
        return node

    def convert(self, node: fx.Node) -> None:
        """Append what an op does."""
        op: Any = node.target
        word = word_of(op)
        if word.startswith(DROPPED):
            return
        if not isinstance(op, torch._ops.OpOverload):
            if isinstance(op, torch._ops.HigherOrderOperator):
                raise Untraceable(f"torch.export gives a call of {word}, which cannot be put back into the model.")
            source: Any = node.args[0] if node.args else None
            pooled = op is operator.getitem and word_of(source.target) in POOLS_WITH_INDICES
            self.new[node] = self.new[source] if pooled else self.graph.call_function(op, *self.both(node))
        else:
            changed = node.args[0] if op._schema.is_mutable and node.args else None
            if (
                isinstance(changed, fx.Node)
                and changed.op == "placeholder"
                and changed.name in self.specs
                and changed not in self.new
            ):
                return  # the model counts its batches
            args, kwargs = self.both(node)
            names = [a.name for a in op._schema.arguments]
            defaults = {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()}
            given = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
            if word in ("lift_fresh_copy", "alias", "detach_"):
                self.new[node] = args[0]
                return
            if word == "copy_" and isinstance(changed, fx.Node):
                self.write(changed, args[1])
                self.new[node] = self.new[changed]
                return
            self.new[node] = emit(self.graph, op, given)
            if changed is not None and isinstance(changed, fx.Node):
                self.write(changed, self.new[node])
        self.locate(self.new[node], node)

    def both(self, node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a node with nodes of the new graph."""
        return self.argument(node.args), self.argument(node.kwargs)

    def write(self, changed: fx.Node, value: Any) -> None:
        """From here on `changed` is `value`, and so is the part of the tensor that it is a view of."""
        self.new[changed] = value
        name = changed.target._schema.name if isinstance(changed.target, torch._ops.OpOverload) else ""
        known: dict[str, Any] = {"aten::slice": torch.slice_scatter, "aten::select": torch.select_scatter}
        scatter = known.get(name)
        base = changed.args[0] if scatter is not None else None
        if isinstance(base, fx.Node) and scatter is not None:
            whole = self.graph.call_function(scatter, (self.argument(base), value, *self.argument(changed.args[1:])))
            self.locate(whole, changed)
            self.write(base, whole)

    def locate(self, new: Any, old: fx.Node) -> None:
        """Record whose forward made a node."""
        if isinstance(new, fx.Node) and "nn_module_stack" not in new.meta:
            paths = [self.path_of(entry) for entry in (info(old).get("nn_module_stack") or {}).values()]
            known = [path for path in paths if path is not None]
            info(new)["nn_module_stack"] = {path: (path, type(self.model.get_submodule(path))) for path in known}

    def path_of(self, entry: Any) -> str | None:
        """Return the path in the model of an entry of a stack of submodules; None for the wrapper."""
        path = str(entry[0]).partition("@")[0]
        if path == WRAPPED.removesuffix("."):
            return ""
        return path.removeprefix(WRAPPED) if path.startswith(WRAPPED) else None

    def at_mark(self, node: fx.Node) -> None:
        """Remember an argument of a leaf; at a result, call the leaf, unless another result has done so."""
        source, label = node.args
        if label not in self.marked.places:
            self.new[node] = self.labelled[str(label)] = self.argument(source)
            return
        number, place = self.marked.places[str(label)]
        if number not in self.called:
            path, given = self.marked.calls[number]
            args, kwargs = pytree.tree_map(lambda v: self.labelled.get(v, v) if isinstance(v, str) else v, given)
            self.called[number] = self.graph.call_module(path, args, kwargs)
            self.locate(self.called[number], node)
        value = self.called[number]
        for key in place:
            value = self.graph.call_function(operator.getitem, (value, key))
        self.new[node] = value


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide what torch.export warns and logs, and the program that it prints when it fails.

    A capture that is wrong is found by comparing outputs. What a model itself says on stderr is passed on if it is captured.
    """
    before, said = logging.root.manager.disable, io.StringIO()
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(said):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
    sys.stderr.write(said.getvalue())
