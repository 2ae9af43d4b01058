"""Data sets as three disjoint sets in memory: digits, CIFAR-10, image folders, and the user's DataLoaders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from secateurs._util.entrypoints import call
from secateurs._util.extensions import added, lab_hint, load_added
from secateurs.data.builtin import load_digits
from secateurs.data.cifar10 import get_cifar10, load_cifar10
from secateurs.data.dataset import Batch, Examples, Scaling, Targets
from secateurs.data.folder import load_folder
from secateurs.data.loaders import as_sources, from_loaders
from secateurs.data.splits import Data, split, subset
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
    "load_sources",
    "set_names",
    "split",
    "subset",
]

SETS: dict[str, Callable[..., Data]] = {
    "cifar10": load_cifar10,
    "digits": load_digits,
}


def set_names() -> list[str]:
    """Names of data sets: `SETS`, then those of other installed packages, by entry points in the group secateurs.data."""
    return [*SETS, *added("data")]


def load(name: str, /, **options: Any) -> Data:
    """Load the data set of that name: one of `set_names()`, `folder:PATH`, or `package.module:function`, called with `options`.

    The module of a function is looked up in the current folder first, then on Python's path. What its loaders give is read
    into memory.
    """
    found = load_sources(name, **options)
    return found if isinstance(found, Data) else from_loaders(*found, name=name)


def load_sources(name: str, /, **options: Any) -> Data | tuple[Any, Any, Any]:
    """The same, but the (train, val, test) that a user's function returns are not read; test is None if it gives none."""
    kind, colon, rest = name.partition(":")
    target: str | Callable[..., Any] = name
    if kind == "folder" and rest:
        target, options = load_folder, {"root": rest, **options}
    elif not (colon and rest):
        known: Callable[..., Data] | None = SETS.get(name) or load_added("data", name)
        if known is None:
            forms = "folder:PATH, or package.module:function for your own"
            hint = lab_hint("data", name) or suggest(name, set_names())
            raise InvalidInput(f"no data set {name!r}.{hint} Other forms: {forms}.")
        target = known
    return as_sources(call(target, f"data set {name!r}", options, error=DataError), name=name)
