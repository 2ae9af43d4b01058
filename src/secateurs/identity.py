"""What tells one loss or metric from another: what it is called, what it does, and with which settings."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from functools import partial
from types import CodeType, MethodType
from typing import Any

from secateurs.evaluate import Measure, correct

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_PACKAGES = ("torch", "secateurs")  # whose functions do what they are called, in every version


def called(measure: Measure) -> str:
    """What a measure is called: "accuracy" for ours, the function's or its type's name for a user's own."""
    return "accuracy" if measure is correct else getattr(measure, "__name__", type(measure).__name__)


def name_of(measure: Measure) -> str:
    """All there is to tell measures apart, for values that are kept: two lambdas, or two settings of a class, are two."""
    return _told(measure, whole=True)


def fingerprints(measures: Mapping[str, Measure]) -> dict[str, str]:
    """What tells measures apart when a run goes on another day, by role, and the Python that it holds for.

    What a measure gathers while it is used, and the module that it comes from, do not make it another one.
    """
    prints = {role: hashlib.sha256(_told(measure, whole=False).encode()).hexdigest() for role, measure in measures.items()}
    return {**prints, "python": f"{platform.python_implementation()} {platform.python_version()}"}


def changed(measures: Mapping[str, Measure], names: Mapping[str, str], kept: Mapping[str, str]) -> list[str]:
    """The roles whose measure is not the one whose name and fingerprint were kept, if any were; by name for another Python."""
    now = fingerprints(measures)
    if kept.get("python") == now["python"]:
        return [role for role in measures if kept[role] != now[role]]
    return [role for role, measure in measures.items() if kept and names[role] != called(measure)]


def _told(measure: Any, *, whole: bool) -> str:
    state = repr if whole else _settled
    if isinstance(measure, partial):
        given = [*measure.args, *(part for item in sorted(measure.keywords.items()) for part in item)]
        return f"{_told(measure.func, whole=whole)} {[state(value) for value in given]}"
    if isinstance(measure, MethodType):
        return f"{_told(measure.__func__, whole=whole)} of {_told(measure.__self__, whole=whole)}"
    module, name = getattr(measure, "__module__", None) or "", getattr(measure, "__qualname__", type(measure).__qualname__)
    code = getattr(measure, "__code__", None)
    if not whole and code is not None and module.split(".")[0] in _PACKAGES:
        return f"{module}.{name}"
    name = f"{module}.{name}" if whole else name
    if code is None:
        settings = [(key, state(value)) for key, value in sorted(getattr(measure, "__dict__", {}).items())]
        return f"{name} {state(measure)} {settings}"
    held = [state(cell.cell_contents) for cell in getattr(measure, "__closure__", None) or ()]
    defaults = (getattr(measure, "__defaults__", None), *sorted((getattr(measure, "__kwdefaults__", None) or {}).items()))
    return f"{name} {_text_of(code)} {state(defaults)} {held}"


def _settled(value: Any) -> str:
    """A value's text if it is one that does not change by itself; of others only what they are."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, tuple):
        return str([_settled(part) for part in value])
    code = getattr(value, "__code__", None)
    return f"{type(value).__qualname__} {'' if code is None else _text_of(code)}"


def _text_of(code: CodeType) -> str:
    """Instructions and constants, without the addresses that a code object's own text has, and sets in one order."""
    return f"{code.co_code.hex()} {code.co_names} {[_constant(value) for value in code.co_consts]}"


def _constant(value: object) -> str:
    if isinstance(value, CodeType):
        return _text_of(value)
    return str(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)
