"""Calling code by name: built-in factories and the user's own `package.module:function`."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from secateurs.errors import InvalidInput, SecateursError, suggest


def call(
    target: str | Callable[..., Any],
    what: str,
    options: Mapping[str, Any],
    *,
    error: type[SecateursError] = InvalidInput,
) -> Any:
    """Call `target`, a callable or its name `package.module:function`, with `options`; every failure becomes an error.

    A module is looked up in the current folder first, then on Python's path; for a callable the folder is not on it. `what`
    names the target in messages. Options that the target does not take are an `InvalidInput`. What the target raises becomes an
    `error`, unless it is one of ours.
    """
    with _current_folder_on_path() if isinstance(target, str) else nullcontext():
        function = find(target, what) if isinstance(target, str) else target
        _check_options(function, what, options)
        try:
            return function(**options)
        except SecateursError:
            raise
        except (Exception, SystemExit) as cause:  # the user's code, or torch refusing a size
            raise error(f"{what} failed with options {dict(options)}: {type(cause).__name__}: {cause}") from cause


@contextmanager
def _current_folder_on_path() -> Iterator[None]:
    """Put the current folder first on Python's path; a script installed by pip does not have it there."""
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    importlib.invalidate_caches()  # the file may be newer than Python's listing of the folder
    try:
        yield
    finally:
        sys.path.remove(folder)


def find(name: str, what: str) -> Callable[..., Any]:
    """Import the callable that `package.module:function` names; every failure is an `InvalidInput` that begins with `what`."""
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise InvalidInput(f"{what}: wanted package.module:function, such as mypackage.mymodule:build.")
    try:
        with _current_folder_on_path():
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise InvalidInput(
                f"{what}: no module {error.name!r} in {Path.cwd()} or in the installed packages. "
                f"Run from the folder that holds it, or install it."
            ) from error
        raise InvalidInput(f"{what}: importing {module_name} failed: {error}.") from error
    except (Exception, SystemExit) as error:  # the user's module runs its own code
        raise InvalidInput(f"{what}: importing {module_name} failed: {type(error).__name__}: {error}.") from error
    found = getattr(module, attribute, None)
    if callable(found):
        return found  # type: ignore[no-any-return]
    callables = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    problem = "has no" if found is None else f"has a value of type {type(found).__name__}, not a function, named"
    raise InvalidInput(f"{what}: {module_name} {problem} {attribute!r}.{suggest(attribute, callables)}")


def _check_options(function: Callable[..., Any], what: str, options: Mapping[str, Any]) -> None:
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # some builtins have no signature
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for option in options:
        if option not in parameters:
            raise InvalidInput(f"{what} has no option {option!r}.{suggest(option, parameters)}")
