"""The text that identifies a function: its code, what it holds, and what it reads of its own module."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Mapping
from functools import lru_cache, partial
from types import CodeType, FunctionType, MethodType
from typing import Any

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_PACKAGES = ("torch", "secateurs")  # whose functions are identified by name, in every version


def identity(measure: Any, *, whole: bool, seen: set[int] | None) -> str:
    """The text of a measure; `seen` are the ids of the functions that were looked at so far, None if helpers do not count."""

    def state(value: Any) -> str:
        if seen is not None and isinstance(value, FunctionType | partial):
            return identity(value, whole=whole, seen=seen)
        return repr(value) if whole else _stable_text(value)

    if isinstance(measure, partial):
        given = [*measure.args, *(part for item in sorted(measure.keywords.items()) for part in item)]
        return f"{identity(measure.func, whole=whole, seen=seen)} {[state(value) for value in given]}"
    if isinstance(measure, MethodType):
        parts = (identity(part, whole=whole, seen=seen) for part in (measure.__func__, measure.__self__))
        return " of ".join(parts)
    module, name = getattr(measure, "__module__", None) or "", getattr(measure, "__qualname__", type(measure).__qualname__)
    code = getattr(measure, "__code__", None)
    if not whole and code is not None and _is_ours(module):
        return f"{module}.{name}"
    name = f"{module}.{name}" if whole else name
    if seen is not None:
        if id(measure) in seen:
            return name
        seen.add(id(measure))
    if code is None:
        settings = [(key, state(value)) for key, value in sorted(getattr(measure, "__dict__", {}).items())]
        calls = [getattr(type(measure), call, None) for call in ("__call__", "forward") if seen is not None]
        texts = [f" {state(call)}" for call in calls if isinstance(call, FunctionType) and not _is_ours(call.__module__)]
        return f"{name} {state(measure)} {settings}{''.join(texts)}"
    held = [state(cell.cell_contents) for cell in getattr(measure, "__closure__", None) or ()]
    defaults = (getattr(measure, "__defaults__", None), *sorted((getattr(measure, "__kwdefaults__", None) or {}).items()))
    text = f"{name} {_code_text(code)} {state(defaults)} {held}"
    found = {} if seen is None else _helpers(code, getattr(measure, "__globals__", {}))
    return text + "".join(f" {key}: {state(value)}" for key, value in found.items())


def _helpers(code: CodeType, module: Mapping[str, Any]) -> dict[str, Any]:
    """The functions and plain constants of the code's own module that it reads, by name; not what functions there assign."""
    if _is_ours(module.get("__name__")):
        return {}
    functions = {name: inspect.unwrap(value) for name, value in module.items() if isinstance(value, FunctionType)}
    functions = {name: value for name, value in functions.items() if getattr(value, "__globals__", None) is module}
    state = {name for value in functions.values() for name in _globals_of(value.__code__, "STORE_GLOBAL")}
    read = sorted(_globals_of(code, "LOAD_GLOBAL") & module.keys() - state)
    found = {name: functions.get(name, module[name]) for name in read if not name.startswith("__")}
    return {name: value for name, value in found.items() if name in functions or isinstance(value, partial) or _is_plain(value)}


@lru_cache(maxsize=4096)
def _globals_of(code: CodeType, operation: str) -> frozenset[str]:
    """The names of globals that the code, or a function within it, reads or assigns."""
    within = [_globals_of(value, operation) for value in code.co_consts if isinstance(value, CodeType)]
    return frozenset(step.argval for step in dis.get_instructions(code) if step.opname == operation).union(*within)


def _is_ours(module: str | None) -> bool:
    return (module or "").split(".")[0] in _PACKAGES


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(map(_is_plain, value)))


def _stable_text(value: Any) -> str:
    """A value's text if it is immutable; otherwise only its type and code."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, tuple):
        return str([_stable_text(part) for part in value])
    code = getattr(value, "__code__", None)
    return f"{type(value).__qualname__} {'' if code is None else _code_text(code)}"


def _code_text(code: CodeType) -> str:
    """Instructions and constants, without the addresses that a code object's own text has, and sets in one order."""
    return f"{code.co_code.hex()} {code.co_names} {[_constant(value) for value in code.co_consts]}"


def _constant(value: object) -> str:
    if isinstance(value, CodeType):
        return _code_text(value)
    return str(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)
