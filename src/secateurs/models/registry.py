"""Networks by name: the built-in ones, those of other installed packages, the user's own as `package.module:function`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from secateurs._util.entrypoints import call
from secateurs._util.extensions import added, lab_hint, load_added
from secateurs.errors import InvalidInput, suggest
from secateurs.models.resnet import resnet

Factory = Callable[..., nn.Module]


_CIFAR = (3, 32, 32)
_DEPTHS = (8, 14, 20, 32, 44, 56, 110)


class NamedNetwork(NamedTuple):
    """A network that has a name; another package adds one by an entry point in the group secateurs.models."""

    build: Factory
    shape: tuple[int, ...]  # of one example, for the default options


_REGISTRY: Mapping[str, NamedNetwork] = {
    **{f"resnet{depth}": NamedNetwork(partial(resnet, depth), _CIFAR) for depth in _DEPTHS},
    **{f"resnet{depth}-b": NamedNetwork(partial(resnet, depth, shortcut="B"), _CIFAR) for depth in _DEPTHS},
}


def names() -> list[str]:
    """Names of all networks: the built-in ones, then those of other installed packages."""
    return [*_REGISTRY, *added("models")]


def build(name: str, /, **options: Any) -> nn.Module:
    """Build a freshly initialised network by its name; `options` go to its constructor (`classes=100`, `width=8`, …)."""
    return _module(_entry(name).build, name, options)


def example_input(name: str, batch: int = 2) -> Tensor:
    """A standard normal batch of the shape that network `name` takes by default; the same values at every call."""
    shape = (batch, *_entry(name).shape)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def resolve(spec: str, /, **options: Any) -> nn.Module:
    """Build the network that `spec` names: a name of `names()`, or `package.module:function` that returns an `nn.Module`.

    The module is looked up in the current folder first, then on Python's path. `options` go to the function.
    """
    return _module(spec, spec, options) if ":" in spec else build(spec, **options)


def _entry(name: str) -> NamedNetwork:
    found: NamedNetwork | None = _REGISTRY.get(name) or load_added("models", name)
    if found is None:
        hint = lab_hint("models", name) or suggest(name, names())
        raise InvalidInput(f"unknown model {name!r}.{hint} Your own network is named package.module:function.")
    return found


def _module(target: str | Factory, name: str, options: Mapping[str, Any]) -> nn.Module:
    model = call(target, f"model {name!r}", options)
    if not isinstance(model, nn.Module):
        raise InvalidInput(f"model {name!r} gave a {type(model).__name__}: wanted a torch.nn.Module.")
    return model
