"""Data sets as three disjoint sets in memory: XOR, digits, MNIST, CIFAR-10, image folders, and the user's DataLoaders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from secateurs._util.entrypoints import call
from secateurs.data.builtin import load_digits, load_xor, sample_xor
from secateurs.data.cifar10 import get_cifar10, load_cifar10
from secateurs.data.dataset import Batch, Examples, Scaling, Targets
from secateurs.data.folder import load_folder
from secateurs.data.loaders import as_sources, from_loaders
from secateurs.data.mnist import get_mnist, load_mnist
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
    "get_mnist",
    "load",
    "load_cifar10",
    "load_digits",
    "load_folder",
    "load_mnist",
    "load_sources",
    "load_xor",
    "sample_xor",
    "split",
    "subset",
]

SETS: dict[str, Callable[..., Data]] = {
    "cifar10": load_cifar10,
    "mnist": load_mnist,
    "digits": load_digits,
    "xor": load_xor,
}


def load(name: str, /, **options: Any) -> Data:
    """Load the data set of that name: one of `SETS`, `folder:PATH`, or `package.module:function`, called with `options`.

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
        if name not in SETS:
            forms = "folder:PATH, or package.module:function for your own"
            raise InvalidInput(f"no data set {name!r}.{suggest(name, SETS)} Other forms: {forms}.")
        target = SETS[name]
    return as_sources(call(target, f"data set {name!r}", options, error=DataError), name=name)
