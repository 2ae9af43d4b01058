"""Capture by torch.export: a graph of aten ops, put back into calls of the model's own submodules and of torch's functions."""

from __future__ import annotations

import inspect
import logging
import operator
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from secateurs.errors import Untraceable
from secateurs.graph.capture.aten import DROPPED, POOLS_WITH_INDICES, emit
from secateurs.graph.capture.calls import Call, erase_unused_, kind_of_input, place_of, put_together, tensors_in
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

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        """All tensors of the outputs, in order."""
        positional, named = self.call.arguments(tensors)
        self.outputs = self.model(*positional, **named)
        return tensors_in(self.outputs)


def export(model: nn.Module, call: Call, tensors: tuple[Tensor, ...], leaves: Leaves) -> fx.Graph:
    """Export `model` with a batch of any size, and put its leaves and functions back."""
    flat = _Flat(model, call)
    flat.training = model.training
    batch = tensors[0].shape[:1]
    dynamic = tuple({0: torch.export.Dim.AUTO} if t.shape[:1] == batch and t.dim() else None for t in tensors)
    whole = [path for path, part in _outermost(model, leaves) if not _takes_one_tensor(part)]
    try:
        with _quiet():
            program = torch.export.export(
                flat,
                tuple(t.clone() for t in tensors),
                dynamic_shapes=(dynamic,),
                strict=False,
                preserve_module_call_signature=tuple(WRAPPED + path for path in whole),
            )
    except Exception as error:
        first = next(iter(str(error).strip().splitlines()), "")
        raise Untraceable(
            f"torch.export cannot export {type(model).__name__}: {place_of(error)} ({type(error).__name__}: {first})."
        ) from error
    return _Conversion(program, flat, leaves, tensors).run(call.names(model))


def _outermost(model: nn.Module, leaves: Leaves, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the leaves that do not lie in another leaf."""
    for name, part in model.named_children():
        below = f"{path}.{name}" if path else name
        if leaves(part, below):
            yield below, part
        else:
            yield from _outermost(part, leaves, below)


def _takes_one_tensor(part: nn.Module) -> bool:
    """Whether a call of the layer is known by its one input: all of torch's own layers but attention and recurrent ones."""
    parameters = list(inspect.signature(part.forward).parameters.values())
    return type(part).__module__.startswith("torch.nn") and sum(p.default is p.empty for p in parameters) == 1 and not isinstance(
        part, nn.RNNBase | nn.RNNCellBase | nn.TransformerEncoderLayer | nn.TransformerEncoder
    )


class _Conversion:
    """Builds the new graph from an exported program, node by node."""

    def __init__(self, program: torch.export.ExportedProgram, flat: _Flat, leaves: Leaves, tensors: tuple[Tensor, ...]) -> None:
        self.program, self.model, self.outputs, self.leaves, self.tensors = program, flat.model, flat.outputs, leaves, tensors
        self.graph = fx.Graph()
        self.new: dict[fx.Node, Any] = {}
        self.inputs: list[tuple[fx.Node, Tensor]] = []
        self.state = flat.model.state_dict(keep_vars=True)
        self.specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs if hasattr(spec.arg, "name")}
        self.fixed = 0

    def run(self, names: list[str]) -> fx.Graph:
        """Return the new graph."""
        remaining = iter(zip(names, self.tensors, strict=True))
        groups = self.leaf_calls()
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                if self.specs[node.name].kind is InputKind.USER_INPUT:
                    name, tensor = next(remaining)
                    self.new[node] = self.graph.placeholder(name)
                    self.inputs.append((self.new[node], tensor))
            elif node.op == "output":
                listed = iter(node.args[0])
                self.graph.output(put_together(self.graph, self.outputs, lambda _: self.argument(next(listed))))
            elif node in groups:
                groups[node](node)
            elif node.op == "call_function":
                self.convert(node)
            elif node.op != "get_attr":
                raise Untraceable(f"torch.export gives a node {node.format_node()}, which cannot be put back into the model.")
        erase_unused_(self.graph, self.model, Fixed)
        return self.graph

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
        op = node.target
        word = getattr(op, "__name__", str(op)) if not hasattr(op, "_schema") else op._schema.name.split("::")[-1]
        if word.startswith(DROPPED):
            return
        if not isinstance(op, torch._ops.OpOverload):
            if isinstance(op, torch._ops.HigherOrderOperator):
                raise Untraceable(f"torch.export gives a call of {word}, which cannot be put back into the model.")
            pooled = op is operator.getitem and node.args[0].target._schema.name.split("::")[-1] in POOLS_WITH_INDICES
            self.new[node] = self.new[node.args[0]] if pooled else self.graph.call_function(op, *self.both(node))
        else:
            changed = node.args[0] if op._schema.is_mutable and node.args else None
            if isinstance(changed, fx.Node) and changed.op == "placeholder" and changed.name in self.specs and changed not in self.new:
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
        scatter = {"aten::slice": torch.slice_scatter, "aten::select": torch.select_scatter}.get(name)
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

    def leaf_calls(self) -> dict[fx.Node, Any]:
        """Return what to do at the nodes inside leaves: nothing, or at a node that gives a result, the call of the leaf."""
        found: dict[fx.Node, Any] = {}
        nodes = {node.name: node for node in self.program.graph.nodes}
        members: dict[str, list[fx.Node]] = defaultdict(list)
        for node in self.program.graph.nodes:
            for key, entry in (info(node).get("nn_module_stack") or {}).items() if node.op == "call_function" else ():
                path = self.path_of(entry)
                if path and self.leaves(self.model.get_submodule(path), path):
                    members[f"{entry[0]}" if "@" in str(entry[0]) else f"{entry[0]}{key.partition('@')[1:]}"].append(node)
                    break
        signatures = {e.fqn: e.signature for e in self.program.module_call_graph if e.signature is not None and e.fqn}
        for label, group in members.items():
            fqn = label.split("(")[0].rstrip("'")
            path = str(fqn).partition("@")[0].removeprefix(WRAPPED)
            inside = set(group)
            given = dict.fromkeys(
                source for node in group for source in node.all_input_nodes if source not in inside and self.is_value(source)
            )
            results = [node for node in group if any(user not in inside for user in node.users)]
            if fqn in signatures:
                calls = self.whole_call(path, signatures[fqn], nodes)
            elif len(given) == 1 and len(results) == 1:
                calls = {results[0]: self.single_call(path, next(iter(given)))}
            else:
                continue
            found.update({node: calls.get(node, lambda node: None) for node in group})
        return found

    def is_value(self, node: fx.Node) -> bool:
        """Whether a node is a tensor that is computed, or an input."""
        if node.op == "placeholder":
            return self.specs[node.name].kind is InputKind.USER_INPUT
        return isinstance(node.meta.get("val"), Tensor | tuple | list)

    def single_call(self, path: str, source: fx.Node) -> Any:
        """Call a leaf on its one input."""

        def call(node: fx.Node) -> None:
            self.new[node] = self.graph.call_module(path, (self.argument(source),))
            self.locate(self.new[node], node)

        return call

    def whole_call(self, path: str, signature: Any, nodes: dict[str, fx.Node]) -> dict[fx.Node, Any]:
        """Call a leaf with the arguments that torch.export has noted; its results are taken apart."""
        made: list[fx.Node] = []

        def call_once() -> fx.Node:
            if not made:
                flat = [self.argument(nodes[a.name]) if hasattr(a, "name") and a.name in nodes else getattr(a, "value", None) for a in signature.inputs]
                args, kwargs = pytree.tree_unflatten(flat, signature.in_spec)
                made.append(self.graph.call_module(path, tuple(args), kwargs))
            return made[0]

        def give(place: tuple[Any, ...]) -> Any:
            def call(node: fx.Node) -> None:
                value = call_once()
                self.locate(value, node)
                for key in place:
                    value = self.graph.call_function(operator.getitem, (value, key))
                self.new[node] = value

            return call

        count = len(signature.outputs)
        shaped = pytree.tree_unflatten(list(range(count)), signature.out_spec)
        places = {leaf: tuple(k.idx if hasattr(k, "idx") else k.key for k in keys) for keys, leaf in pytree.tree_flatten_with_path(shaped)[0]}
        return {nodes[a.name]: give(places[i]) for i, a in enumerate(signature.outputs) if hasattr(a, "name") and a.name in nodes}


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide what torch.export warns and logs: a capture that is wrong is found by comparing outputs."""
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
