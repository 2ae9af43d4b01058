"""How a model is called on an example: which inputs by position, which by keyword, what it returns; models that cannot be."""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from keyword import iskeyword
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map

from secateurs.errors import InvalidInput, NonFinite, Untraceable

Example = Tensor | tuple[Any, ...] | Mapping[str, Any]


@dataclass(frozen=True)
class Call:
    """The inputs of a network: the first `positional` by position, then one for each of `keywords`; `fixed` are no inputs.

    `nested` has the arguments as they are given where tensors lie inside lists and dicts, each with its number in their place.
    """

    positional: int
    keywords: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    nested: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def arguments(self, tensors: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword arguments for the inputs in order."""
        if self.nested is not None:
            given = tree_map(lambda leaf: tensors[leaf.number] if isinstance(leaf, _Numbered) else leaf, self.nested)
            return given[0], given[1]
        named = dict(zip(self.keywords, tensors[self.positional :], strict=True))
        return tensors[: self.positional], {**named, **self.fixed}

    def names(self, model: nn.Module) -> list[str]:
        """Return a name for each input: that of the argument of forward which takes it."""
        if self.nested is not None:
            paths = [(path, leaf) for path, leaf in tree_flatten_with_path(self.nested)[0] if isinstance(leaf, _Numbered)]
            words = [re.sub(r"\W+", "_", keystr(path[1:])).strip("_") for path, _ in paths]
            return [word if word.isidentifier() else f"input_{word}" for word in words]
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        known = [p.name for p in inspect.signature(model.forward).parameters.values() if p.kind in kinds]
        more = [f"input_{i}" for i in range(len(known), self.positional)]
        return [*[*known, *more][: self.positional], *self.keywords]


@dataclass(frozen=True)
class _Numbered:
    """The place of an input among all of them."""

    number: int


class ByPosition(nn.Module):
    """A model that takes all its inputs by position, in the order of a `Call`."""

    def __init__(self, model: nn.Module, call: Call) -> None:
        super().__init__()
        self.model = model
        self.call = call

    def forward(self, *tensors: Tensor) -> Any:
        """What the model returns."""
        positional, named = self.call.arguments(tensors)
        return self.model(*positional, **named)


def as_example(example_input: Example) -> tuple[Tensor, ...]:
    """Return a copy of the example input as a tuple of tensors: of a mapping, those of its values that are tensors."""
    example: Any = (example_input,) if isinstance(example_input, Tensor) else example_input
    if isinstance(example, Mapping) or (
        isinstance(example, tuple) and any(isinstance(e, dict | list | tuple) for e in example)
    ):
        example = tuple(
            v for v in tree_leaves(dict(example) if isinstance(example, Mapping) else example) if isinstance(v, Tensor)
        )
    if not isinstance(example, tuple) or not example or not all(isinstance(e, Tensor) for e in example):
        raise InvalidInput(
            f"example_input: got {type(example_input).__name__}, wanted a tensor, or a tuple of tensors for a model "
            f"with several arguments, or a mapping from names of arguments to tensors, or these within lists and dicts. "
            f"Pass one batch that the model accepts, "
            f"e.g. torch.randn(2, 3, 32, 32)."
        )
    return tuple(e.detach().clone() for e in example)


def call_for(model: nn.Module, example_input: Example) -> tuple[Call, tuple[Tensor, ...]]:
    """Return how `model` is called on the example, and its inputs in the order of the arguments of its forward."""
    tensors = as_example(example_input)
    named = isinstance(example_input, Mapping)
    values = list(example_input.values()) if isinstance(example_input, Mapping) else example_input
    if not isinstance(values, Tensor) and any(isinstance(v, dict | list | tuple) and _holds_tensors(v) for v in values):
        number = iter(range(len(tensors)))
        arguments = ((), dict(example_input)) if isinstance(example_input, Mapping) else (tuple(values), {})
        nested = tree_map(lambda leaf: _Numbered(next(number)) if isinstance(leaf, Tensor) else leaf, arguments)
        return Call(len(tensors), nested=nested), tensors
    if not named:
        return Call(len(tensors)), tensors
    assert isinstance(example_input, Mapping)
    if not all(isinstance(name, str) and name.isidentifier() for name in example_input):
        raise InvalidInput(f"example_input: the keys {list(example_input)} must be names of arguments of the model.")
    order = {name: place for place, name in enumerate(inspect.signature(model.forward).parameters)}
    names = [name for name, value in example_input.items() if isinstance(value, Tensor)]
    given = sorted(zip(names, tensors, strict=True), key=lambda pair: order.get(pair[0], len(order)))
    fixed = {name: value for name, value in example_input.items() if not isinstance(value, Tensor)}
    return Call(0, tuple(name for name, _ in given), fixed), tuple(tensor for _, tensor in given)


def _holds_tensors(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))


def check_model(model: nn.Module, example: tuple[Tensor, ...]) -> None:
    """Reject models that cannot be traced: not a module, non-finite weights, another device or dtype than the example's."""
    if not isinstance(model, nn.Module):
        raise InvalidInput(f"model: got {type(model).__name__}, wanted a torch.nn.Module (an instance, not a class).")
    if isinstance(model, torch.jit.ScriptModule):
        raise Untraceable("a ScriptModule cannot be traced. Pass the nn.Module that was scripted.")
    scripted = [name for name, part in model.named_modules() if isinstance(part, torch.jit.ScriptModule)]
    if scripted:
        raise Untraceable(
            f"the submodule {scripted[0]!r} is a ScriptModule, which cannot be traced. "
            f"Replace it by the nn.Module that was scripted."
        )
    if any(is_lazy(p) for p in [*model.parameters(), *model.buffers()]):
        raise InvalidInput("the model has lazy layers whose weights are not initialised. Run it once: model(example_input).")
    for name in [*dict(model.named_modules()), *dict(model.named_parameters()), *dict(model.named_buffers())]:
        if any(c in name for c in '"\\') or not name.isprintable() or any(map(iskeyword, name.split("."))):
            raise InvalidInput(
                f"the model has a submodule or tensor named {name!r}: torch.fx generates code, which cannot hold "
                f"Python keywords, quotes, backslashes or line breaks. Give that submodule or parameter another name."
            )
    floating = {n: t for n, t in [*model.named_parameters(), *model.named_buffers()] if t.is_floating_point()}
    for name, tensor in floating.items():
        # the sum is quick; where it overflows, each value is looked at
        if not tensor.is_meta and not (bool(tensor.sum().isfinite()) or bool(torch.isfinite(tensor).all())):
            raise NonFinite(
                f"{name!r} holds NaN or infinite values, so the effect of a cut cannot be measured. "
                f"Load finite weights, or find out where training diverged."
            )
    devices, dtypes = {str(t.device) for t in floating.values()}, {t.dtype for t in floating.values()}
    for e in example:
        if devices and str(e.device) not in devices:
            raise InvalidInput(
                f"the example input is on {str(e.device)!r} but the model is on {', '.join(sorted(devices))!r}. "
                f"Move one of them: example_input.to(...) or model.to(...)."
            )
        if e.is_floating_point() and dtypes and e.dtype not in dtypes:
            raise InvalidInput(
                f"the example input is {e.dtype} but the model is {', '.join(sorted(map(str, dtypes)))}. "
                f"Convert one of them: example_input.to(dtype) or model.to(dtype)."
            )


def tensors_in(value: Any) -> list[Tensor]:
    """Return all tensors inside nested tuples, lists, mappings and dataclasses, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    elif is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, each.name) for each in fields(value)]
    if isinstance(value, tuple | list):
        return [t for v in value for t in tensors_in(v)]
    return []


def put_together(graph: fx.Graph, outputs: Any, node_of: Callable[[Any], Any]) -> Any:
    """Return what the output node of `graph` takes to give `outputs` in the model's own types; `node_of` maps a tensor."""
    if isinstance(outputs, Tensor | torch.SymInt) or (isinstance(outputs, int) and type(outputs) not in (int, bool)):
        return node_of(outputs)
    if outputs is None or isinstance(outputs, bool | int | float | str | torch.dtype | torch.device):
        return outputs
    kind: Any = type(outputs)
    if is_dataclass(outputs) and not isinstance(outputs, type):
        values = {each.name: getattr(outputs, each.name) for each in fields(outputs) if each.init}
        filled = {name: put_together(graph, v, node_of) for name, v in values.items() if v is not None}
        return graph.call_function(kind, (), filled)
    if isinstance(outputs, Mapping):
        items = {key: put_together(graph, value, node_of) for key, value in outputs.items()}
        return items if kind is dict else graph.call_function(kind, (items,))
    if isinstance(outputs, tuple | list):
        parts = [put_together(graph, value, node_of) for value in outputs]
        if kind in (tuple, list, torch.Size):
            return tuple(parts) if kind is not list else parts
        return graph.call_function(kind, tuple(parts) if hasattr(kind, "_fields") else (parts,))
    raise Untraceable(
        f"the model returns a {kind.__module__}.{kind.__qualname__}, of which tracing does not know the tensors. Return "
        f"tensors in tuples, lists, mappings or dataclasses, or switch that output off (use_cache=False)."
    )


def place_of(error: BaseException) -> str:
    """Return the line of the user's code where `error` was raised."""
    libraries = (Path(torch.__file__).parent, Path(__file__).parents[1])
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not any(folder in Path(f.filename).parents for folder in libraries)]
    return f'line {own[-1].lineno} of {own[-1].filename}, in {own[-1].name}: "{own[-1].line}"' if own else "its forward"


def kind_of_input(graph: fx.Graph, inputs: list[tuple[fx.Node, Tensor]], value: torch.device | torch.dtype) -> Any:
    """Return a query of the first input's device or dtype if it equals `value`, so that the network can be moved."""
    name = "device" if isinstance(value, torch.device) else "dtype"
    for node, tensor in inputs:
        if tensor.is_floating_point() or name == "device":
            return graph.call_function(getattr, (node, name)) if getattr(tensor, name) == value else value
    return value


def erase_unused_(graph: fx.Graph, model: nn.Module, constant: type[nn.Module]) -> None:
    """Erase what no output needs; calls of layers stay, since they may have statistics, but not those of a `constant`."""
    for node in reversed(list(graph.nodes)):
        held = node.op == "call_module" and isinstance(model.get_submodule(str(node.target)), constant)
        if not node.users and (held or node.op in ("get_attr", "call_function", "call_method")):
            graph.erase_node(node)
