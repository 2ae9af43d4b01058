"""Declarations of fields: type, default, meaning and range of each, and the settings that are checked by them."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, Self, TypeVar, Union, get_args, get_origin, get_type_hints

from secateurs._util.decode import brief
from secateurs.errors import RecipeError, suggest

MOST_EXAMPLES = 1_000_000_000  # no set is larger; a number beyond it is a slip of the pen, or hostile
MOST_AT_ONCE = 1 << 20  # examples in a batch: more fit into no memory
SEEDS: dict[str, float] = {"low": -(1 << 63), "high": (1 << 63) - 1}  # what TOML and torch hold

T = TypeVar("T")
FlagGroup = Literal["pruning", "scoring", "training"]


@dataclass(frozen=True)
class Declared:
    """What a field means, and the range of its values; one with a `group` has a flag under that heading.

    Every number has a range with two ends: a recipe may come from anywhere, and 10^12 masks would be an endless run.
    """

    help: str
    group: FlagGroup | None = None
    low: float | None = None
    above: float | None = None
    high: float | None = None
    below: float | None = None

    def check(self, name: str, value: float) -> None:
        """RecipeError unless the number is finite and in range."""
        every = (
            (operator.ge, self.low, "{} or more"),
            (operator.gt, self.above, "a number above {}"),
            (operator.le, self.high, "at most {}"),
            (operator.lt, self.below, "below {}"),
        )
        limits = [(within, limit, text) for within, limit, text in every if limit is not None]
        # whole numbers are finite, and may be too large to be asked
        if (isinstance(value, int) or math.isfinite(value)) and all(within(value, limit) for within, limit, _ in limits):
            return
        wanted = " and ".join(text.format(_number(limit)) for _, limit, text in limits) or "a finite number"
        if self.low is not None and self.high is not None:
            wanted = f"{_number(self.low)} to {_number(self.high)}"
        raise RecipeError(f"{name} = {_shown(value)}: wanted {wanted}.")


def _number(limit: float) -> str:
    return f"{limit:,}" if isinstance(limit, int) else f"{limit:g}"


def _shown(value: Any) -> str:
    """A value in an error message."""
    try:
        return brief(repr(value))
    except ValueError:  # Python writes no number of more than 4,300 digits
        return "a number of thousands of digits"


def setting(default: T | None, help: str, group: FlagGroup | None = None, **limits: float) -> T:
    """Declare a field of a recipe or of settings: its default, what it means, the heading of its flag, its range.

    None for a field that cannot be None: what it is depends on the other fields, and the class fills it in.
    """
    declared: Any = dataclasses.field(default=default, metadata={"declared": Declared(help, group, **limits)})
    made: T = declared
    return made


@cache
def declarations(kind: Any) -> dict[str, tuple[Any, Any, Declared]]:
    """Type, default and declaration of every field, by name."""
    hints = get_type_hints(kind)
    return {f.name: (hints[f.name], f.default, f.metadata["declared"]) for f in dataclasses.fields(kind)}


_KINDS: dict[Any, tuple[type, str, str]] = {
    float: (Real, "a number", "numbers"),
    int: (Integral, "a whole number", "whole numbers"),
    bool: (bool, "True or False", ""),
    str: (str, "text", "texts"),
}


def refuse_unknown(kind: Any, fields: dict[str, Any], where: str, prefix: str = "") -> None:
    """RecipeError if a field is not declared; `where` and `prefix` say in it where the field stands."""
    known = declarations(kind)
    for name in fields:
        if name not in known:
            raise RecipeError(f"{where}: unknown field {brief(repr(prefix + name))}.{suggest(brief(name), known)}")


class Checked:
    """Settings whose fields are checked by their declarations; numbers become plain ints and floats, lists tuples."""

    given: Mapping[str, Any]
    """The fields that it was made from, by name; no field itself, and no part of a comparison."""

    def __new__(cls, *values: Any, **fields: Any) -> Self:
        """RecipeError, not Python's TypeError, for a value without a name or a field that is not declared."""
        if values:
            raise RecipeError(f"{cls.__name__}({brief(repr(values[0]))}): wanted fields by name, such as max_drop=0.01.")
        refuse_unknown(cls, fields, cls.__name__)
        made = super().__new__(cls)
        object.__setattr__(made, "given", dict(fields))
        return made

    def __post_init__(self) -> None:
        kind: Any = type(self)
        for name, (hint, _, declared) in declarations(kind).items():
            value = _checked(name, getattr(self, name), hint)
            for number in value if isinstance(value, tuple) else (value,):
                if isinstance(number, int | float) and not isinstance(number, bool):
                    declared.check(name, number)
            object.__setattr__(self, name, value)


def _checked(name: str, value: Any, hint: Any) -> Any:
    """The value in the type of its field; RecipeError if it has another, or is not one of the choices."""
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    choices = tuple(choice for part in parts if get_origin(part) is Literal for choice in get_args(part))
    kinds = [part for part in parts if part is not NoneType and get_origin(part) is not Literal]
    if (value is None and NoneType in parts) or (isinstance(value, str) and value in choices):
        return value
    shown = _shown(value)
    if not kinds:
        raise RecipeError(f"{name} = {shown}: wanted one of {', '.join(choices)}.{suggest(brief(value), choices, listed=True)}")
    (kind,) = kinds
    if kind in _KINDS:
        if isinstance(value, _KINDS[kind][0]) and (kind is bool or not isinstance(value, bool)):
            try:
                return kind(value)
            except OverflowError as error:
                raise RecipeError(f"{name} = {shown}: the number is out of range.") from error
        wanted = _KINDS[kind][1]
    elif get_origin(kind) is tuple:
        (element, _) = get_args(kind)
        if isinstance(value, tuple | list) and all(isinstance(part, element) for part in value):
            return tuple(value)
        wanted = f"a tuple of {_KINDS[element][2]}"
    elif isinstance(value, kind):
        return value
    else:
        wanted = kind.__name__
    others = [*map(repr, choices), *(["None"] if NoneType in parts else [])]
    raise RecipeError(
        f"{name} = {shown}: got {type(value).__name__}, wanted {', '.join([wanted, *others[:-1]])}"
        + (f" or {others[-1]}." if others else ".")
    )
