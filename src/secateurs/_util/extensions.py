"""What other installed packages add under names of their own: entry points in the groups secateurs.commands, .criteria, …

The lab is such a package. Its names are known here only to say, where it is not installed, what would bring them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any, Literal

Kind = Literal["commands", "criteria", "models", "data", "downloads"]

INSTALL_LAB = "pip install ./lab, in a checkout of secateurs"
LAB: Mapping[Kind, tuple[str, ...]] = {
    "commands": ("compare", "reproduce"),
    "criteria": ("obd", "thinet", "thinet-pursuit", "maxplus", "maxplus-threshold", "pairs"),
    "models": (
        *("fcn3", "fcn10", "vgg16", "lenet300", "lenet5", "maxplus", "mlp", "cnn1d"),
        *("densenet-small", "mobilenet-small", "resnext-small", "split-small", "unet-small"),
    ),
    "data": ("mnist", "xor"),
    "downloads": ("mnist",),
}
"""The names that the lab adds."""


@cache  # what is installed is read from the disk
def added(kind: Kind) -> Mapping[str, EntryPoint]:
    """The entry points of a kind by name; nothing is imported."""
    return MappingProxyType({entry.name: entry for entry in entry_points(group=f"secateurs.{kind}")})


def load_added(kind: Kind, name: str) -> Any:
    """The object that an installed package adds under that name; None if there is none."""
    entry = added(kind).get(name)
    return None if entry is None else entry.load()


def lab_hint(kind: Kind, name: str) -> str:
    """What to install for a name of the lab, as a sentence behind an error; empty for other names."""
    return f" {name!r} is of the lab, which is not installed: {INSTALL_LAB}." if name in LAB[kind] else ""
