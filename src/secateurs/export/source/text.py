"""How values and calls are spelled in generated source, wrapped as ruff formats them."""

from __future__ import annotations

import inspect
import json
import keyword
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secateurs.errors import UnsupportedOp
from secateurs.graph.trace import ruled_class

WIDTH = 88  # ruff's own; what is split here stays split in a wider format too, by its trailing commas

INFIX: dict[Any, str] = {
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.truediv: "/",
    operator.floordiv: "//",
    operator.mod: "%",
    operator.pow: "**",
    operator.matmul: "@",
    operator.eq: "==",
    operator.ne: "!=",
    operator.lt: "<",
    operator.le: "<=",
    operator.gt: ">",
    operator.ge: ">=",
}


@dataclass(frozen=True)
class Call:
    """A call to be spelled: `head(first, name=second)`, an argument being text or a call itself."""

    head: str
    args: tuple[tuple[str, Expression], ...]  # what stands before each argument ("", "name="), and the argument

    def flat(self) -> str:
        """In one line."""
        return f"{self.head}({', '.join(before + flat(arg) for before, arg in self.args)})"


Expression = str | Call


def flat(expression: Expression) -> str:
    """An expression in one line."""
    return expression if isinstance(expression, str) else expression.flat()


def spelled(before: str, expression: Expression, indent: int, after: str = "") -> list[str]:
    """The lines of `before expression after`, split one argument a line where they are too long."""
    margin = " " * indent
    line = f"{margin}{before}{flat(expression)}{after}"
    if len(line) <= WIDTH or isinstance(expression, str) or not expression.args:
        return [line]
    inside = [row for name, arg in expression.args for row in spelled(name, arg, indent + 4, ",")]
    return [f"{margin}{before}{expression.head}(", *inside, f"{margin}){after}"]


def table(name: str, numbers: Sequence[int]) -> list[str]:
    """A list of numbers as a constant, in lines of full width (which ruff is told to leave alone)."""
    lines, row = [f"{name} = ["], "   "
    for number in numbers:
        if len(row) + len(f" {number},") > WIDTH:
            lines.append(row)
            row = "   "
        row += f" {number},"
    return [*lines, row, "]"]


def value(found: Any) -> str | None:
    """A constant as Python spells it; None for what has no spelling."""
    match found:
        case bool() | int() | None:
            return repr(found)
        case float():
            return repr(found) if math.isfinite(found) else f'float("{found}")'
        case str():
            return json.dumps(found)
        case torch.dtype() | torch.memory_format():
            return repr(found)
        case torch.device():
            return f'torch.device("{found}")'
    return "..." if found is Ellipsis else None


@cache
def _functions() -> dict[int, str]:
    """Public functions of torch by identity, under the shortest name that source can use."""
    found: dict[int, str] = {}
    for module, prefix in ((F, "F"), (torch, "torch"), (math, "math")):
        for name, function in vars(module).items():
            if callable(function) and not isinstance(function, type) and not name.startswith("_"):
                found.setdefault(id(function), f"{prefix}.{name}")
    return found


def function_name(function: Any) -> str | None:
    """E.g. "F.relu"; None for a function that is not torch's."""
    return _functions().get(id(function))


def without_defaults(
    function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments that differ from the function's own defaults: trailing ones, and named ones."""
    name = (function_name(function) or "").rpartition(".")[2]
    function = getattr(F, f"_{name}", function)  # pools choose by an argument which function they are, and hide its defaults
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # built in: it does not tell
        return list(args), {k: v for k, v in kwargs.items() if (k, v) != ("inplace", False)}
    left, defaults = list(args), {p.name: p.default for p in parameters}
    if all(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in parameters):
        while left and len(left) <= len(parameters) and is_same(left[-1], parameters[len(left) - 1].default):
            left.pop()
    if len(left) < len(args):  # then no later argument may count on their places
        kwargs = {p.name: a for p, a in list(zip(parameters, args, strict=False))[len(left) :]} | kwargs
    return left, {k: v for k, v in kwargs.items() if k not in defaults or not is_same(v, defaults[k])}


def is_same(one: Any, other: Any) -> bool:
    """Equal, and of the same kind: 0 is not False, and 0 stands for 0.0 only where it is a number's default."""
    return one is other or (type(one) in (int, float, str, tuple) and type(one) is type(other) and bool(one == other))


SIZES = ("kernel_size", "stride", "padding", "dilation", "output_padding")  # (3, 3) is written 3
UNWRITTEN = ("device", "dtype")


def constructor(layer: nn.Module, where: str) -> Call:
    """The call that builds a layer like `layer`, weights aside; `UnsupportedOp` names the node where there is none."""
    kind = type(layer) if _is_torchs(type(layer)) else ruled_class(type(layer))
    if kind is None or not _is_torchs(kind):
        raise _unwritable(layer, where, "is not a layer of torch.nn")
    given = inspect.signature(kind).parameters.values()
    parameters = [p for p in given if p.name not in UNWRITTEN and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    chosen = {p.name: _setting(layer, p, where) for p in parameters}
    _check_same(layer, kind, chosen, where)
    args: list[tuple[str, Expression]] = []
    for p in parameters:
        found = chosen[p.name]
        required = p.default is p.empty
        implied = p.name == "stride" and p.default is None and found == chosen.get("kernel_size")
        if required or not (implied or is_same(found, p.default)):
            args.append(("" if required else f"{p.name}=", _spelled(found, layer, where)))
    return Call(f"nn.{kind.__name__}", tuple(args))


def _is_torchs(kind: type[nn.Module]) -> bool:
    return getattr(nn, kind.__name__, None) is kind


def _setting(layer: nn.Module, parameter: inspect.Parameter, where: str) -> Any:
    """What `parameter` was when the layer was built: layers keep their settings under the same names."""
    found = getattr(layer, parameter.name, parameter.default)
    if found is parameter.empty:
        raise _unwritable(layer, where, f"does not keep its setting {parameter.name!r}")
    if isinstance(parameter.default, bool) and (isinstance(found, Tensor) or found is None):
        return found is not None  # bias=True has become a tensor
    if parameter.name in SIZES and isinstance(found, tuple) and len(found) > 1 and len(set(found)) == 1:
        return found[0]
    return found


def _check_same(layer: nn.Module, kind: type[nn.Module], chosen: Mapping[str, Any], where: str) -> None:
    """A layer built anew must have the same tensors and print the same: settings may be kept under other names."""
    try:
        with torch.device("meta"):
            again = kind(**chosen)
    except Exception as error:
        raise _unwritable(layer, where, f"cannot be built from its settings ({error})") from error
    ours, theirs = ({name: t.shape for name, t in m.state_dict().items()} for m in (again, layer))
    if ours != theirs or again.extra_repr() != layer.extra_repr():
        raise _unwritable(layer, where, "is not what its settings say")


def _spelled(found: Any, layer: nn.Module, where: str) -> str:
    if isinstance(found, tuple | list):
        inside = ", ".join(_spelled(item, layer, where) for item in found)
        return f"[{inside}]" if isinstance(found, list) else f"({inside},)" if len(found) == 1 else f"({inside})"
    text = value(found)
    if text is None:
        raise _unwritable(layer, where, f"has a setting that has no spelling: {found!r}")
    return text


def _unwritable(layer: nn.Module, where: str, why: str) -> UnsupportedOp:
    return UnsupportedOp(
        f"{type(layer).__name__} at node {where!r} cannot be written out as source: it {why}. Export to ONNX or .pt2 instead, "
        f"or build the layer from torch.nn's."
    )


@dataclass
class Container:
    """The layers and tensors of a network as a tree, by the parts of their names."""

    parts: dict[str, Container | Expression] = field(default_factory=dict)

    def put(self, path: str, expression: Expression) -> None:
        """Store what builds the layer or tensor at `path`."""
        *parents, name = path.split(".")
        here = self
        for parent in parents:
            inner = here.parts.setdefault(parent, Container())
            assert isinstance(inner, Container)
            here = inner
        here.parts[name] = expression

    @property
    def numbered(self) -> bool:
        """Whether its parts are called 0, 1, 2 …, as in nn.Sequential."""
        return list(self.parts) == [str(n) for n in range(len(self.parts))]

    def sort_(self) -> None:
        """Bring numbered parts into their order; a network may call them in another."""
        if all(name.isdigit() for name in self.parts):
            self.parts = dict(sorted(self.parts.items(), key=lambda item: int(item[0])))
        for part in self.parts.values():
            if isinstance(part, Container):
                part.sort_()

    def built(self) -> Call:
        """The call that builds it: nn.Sequential, or a `Part` with named layers."""
        made = {name: part.built() if isinstance(part, Container) else part for name, part in self.parts.items()}
        if self.numbered and not any(isinstance(p, str) for p in made.values()):
            return Call("nn.Sequential", tuple(("", part) for part in made.values()))
        return Call("Part", tuple((f"{argument_name(name)}=", part) for name, part in made.items()))

    @property
    def uses_part(self) -> bool:
        """Whether a `Part` is among what is inside."""
        return any(isinstance(p, Container) and (not p.numbered or p.uses_part) for p in self.parts.values())

    def access(self, path: str) -> str:
        """How forward reads what is stored at `path`."""
        text, here = "self", self
        for name in path.split("."):
            if here is not self and here.numbered:
                text += f"[{name}]"
            elif is_name(name):
                text += f".{name}"
            else:
                text = f'getattr({text}, "{name}")'
            inner = here.parts[name]
            here = inner if isinstance(inner, Container) else Container()
        return text


def is_name(text: str) -> bool:
    """Whether it can stand behind a dot."""
    return text.isidentifier() and not keyword.iskeyword(text)


def assigned(name: str, part: Expression) -> list[str]:
    """The lines of __init__ that store `part` under `name`; add_module where the name (0, for, …) cannot stand behind a dot."""
    if is_name(name):
        return spelled(f"self.{name} = ", part, 8)
    if isinstance(part, Call) and part.head in ("nn.Parameter", "nn.Buffer"):
        return spelled("", Call("setattr", (("", "self"), ("", f'"{name}"'), ("", part))), 8)
    return spelled("", Call("self.add_module", (("", f'"{name}"'), ("", part))), 8)


def argument_name(name: str) -> str:
    """How `Part` is told a name: one that is no identifier (3, for, …) gets an underscore before it, which `Part` takes off."""
    return name if is_name(name) and not name.startswith("_") else f"_{name}"
