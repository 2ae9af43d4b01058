"""How values and calls are spelled in generated source, wrapped as ruff formats them."""

from __future__ import annotations

import inspect
import json
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

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
