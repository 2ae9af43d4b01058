"""Data sets as three disjoint sets in memory: XOR, digits, CIFAR-10, image folders, and whatever a user has."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from secateurs._util.entrypoints import current_folder_importable
from secateurs.data.cifar10 import get_cifar10, load_cifar10
from secateurs.data.dataset import Batch, Examples, Scaling, Targets
from secateurs.data.digits import load_digits
from secateurs.data.folder import load_folder
from secateurs.data.loaders import as_data, from_loaders
from secateurs.data.splits import Data, split, subset
from secateurs.data.xor import load_xor, sample_xor
from secateurs.errors import DataError, InvalidInput, suggest

__all__ = [
    "SETS",
    "Batch",
    "Data",
    "Examples",
    "Scaling",
    "Targets",
    "from_loaders",
    "get_cifar10",
    "load",
    "load_cifar10",
    "load_digits",
    "load_folder",
    "load_xor",
    "sample_xor",
    "split",
    "subset",
]

SETS: dict[str, Callable[..., Data]] = {"cifar10": load_cifar10, "digits": load_digits, "xor": load_xor}


def load(name: str, **options: Any) -> Data:
    """The data set of that name: one of `SETS`, `folder:PATH`, or `package.module:function`, called with `options`.

    The module of an own function is looked for in the current folder, then where Python looks for modules.
    """
    kind, colon, rest = name.partition(":")
    if kind == "folder" and rest:
        return as_data(_call(load_folder, name, {"root": rest, **options}), name=name)
    if colon and rest:
        return as_data(_call(_find(kind, rest), name, options), name=name)
    if name not in SETS:
        forms = "folder:PATH, or package.module:function for your own"
        raise InvalidInput(f"no data set {name!r}.{suggest(name, SETS)} Other forms: {forms}.")
    return as_data(_call(SETS[name], name, options), name=name)


def _find(module: str, attribute: str) -> Callable[..., Any]:
    try:
        with current_folder_importable():
            found = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # the user's module runs its own code
        what = f"{type(error).__name__}: {error}"
        raise InvalidInput(f"cannot import {module!r} of the data set '{module}:{attribute}': {what}") from error
    function = getattr(found, attribute, None)
    if not callable(function):
        names = [key for key, value in vars(found).items() if callable(value) and not key.startswith("_")]
        raise InvalidInput(f"{module} has no function {attribute!r}.{suggest(attribute, names)}")
    return function  # type: ignore[no-any-return]


def _call(function: Callable[..., Any], name: str, options: dict[str, Any]) -> Any:
    known = inspect.signature(function).parameters
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    for option in options:
        if option not in known and not open_ended:
            raise InvalidInput(f"the data set {name!r} has no option {option!r}.{suggest(option, known)}")
    try:
        return function(**options)
    except OSError as error:
        raise DataError(f"cannot read the data set {name!r}: {error}") from error
    except SystemExit as error:
        raise InvalidInput(f"the data set {name!r}: its function ended with SystemExit({error.code!r}).") from error
