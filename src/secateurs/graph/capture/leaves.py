"""Which submodules capture does not enter: torch's own layers, classes that have a rule, and those that the user names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from secateurs.errors import InvalidInput
from secateurs.graph.layers import Constant, Fixed, Mask, SumInto

Leaf = str | type[nn.Module]

RULED: set[Any] = set()
"""Module classes and functions that have a rule, or their names as 'package.module:name': capture does not enter them."""


def is_ruled(called: Any) -> bool:
    """Whether a module class or function has a rule of its own, by itself or by its name."""
    return called in RULED or f"{getattr(called, '__module__', '')}:{getattr(called, '__name__', '')}" in RULED


CONTAINERS = (
    *(nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder),
    *(nn.TransformerEncoderLayer, nn.TransformerDecoderLayer),
)

HARMLESS = {"__init__", "__module__", "__doc__", "__annotations__", "__firstlineno__", "__static_attributes__", "extra_repr"}


def ruled_class(kind: type[nn.Module]) -> type[nn.Module] | None:
    """Return the class whose rule applies to `kind`: itself, or a parent whose forward pass it does not override."""
    for parent in kind.__mro__:
        if parent in RULED:
            return parent
        if any(hasattr(base, name) for base in parent.__bases__ for name in vars(parent) if name not in HARMLESS):
            return None
    return None


class Leaves:
    """The submodules of `root` that capture calls as a whole; `chosen` are the user's, by path or class."""

    def __init__(self, root: nn.Module, chosen: Iterable[Leaf]) -> None:
        listed = list(chosen)
        self.names = {leaf for leaf in listed if isinstance(leaf, str)}
        self.classes = tuple(leaf for leaf in listed if not isinstance(leaf, str))
        known = {name for name, _ in root.named_modules()}
        for name in self.names - known:
            raise InvalidInput(f"leaves: the model has no submodule {name!r}. Use a path from model.named_modules().")

    def are_chosen(self, module: nn.Module, path: str) -> bool:
        """Whether the user named `module` as a leaf."""
        return path in self.names or isinstance(module, self.classes)

    def __call__(self, module: nn.Module, path: str) -> bool:
        """Whether capture does not enter `module`; torch's own containers are entered."""
        ours = self.are_chosen(module, path) or isinstance(module, SumInto | Constant | Fixed | Mask)
        ours = ours or ruled_class(type(module)) is not None or is_ruled(type(module))
        of_torch = type(module).__module__.startswith(("torch.nn", "torch.ao.nn"))
        return ours or (of_torch and not isinstance(module, CONTAINERS))

    def chosen(self, root: nn.Module) -> tuple[str, ...]:
        """Return the paths of the submodules that the user named as leaves."""
        return tuple(name for name, part in root.named_modules() if self.are_chosen(part, name))
