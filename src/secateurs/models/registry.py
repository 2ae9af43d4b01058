"""Networks by name: the built-in ones, and anybody's as `package.module:callable`."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from secateurs._util.entrypoints import current_folder_importable
from secateurs.errors import InvalidInput, suggest
from secateurs.models.mlp import MLP
from secateurs.models.resnet import resnet
from secateurs.models.topologies import FCN, CNN1d, SmallDenseNet, SmallMobileNet, SmallResNeXt, SmallSplitNet, SmallUNet
from secateurs.models.vgg import VGG16

Factory = Callable[..., nn.Module]


@dataclass(frozen=True)
class _Entry:
    factory: Factory
    input_shape: tuple[int, ...]  # of one example, with the factory's default options


_CIFAR = (3, 32, 32)
_SMALL = (3, 16, 16)
_DEPTHS = (8, 14, 20, 32, 44, 56, 110)

_REGISTRY: Mapping[str, _Entry] = {
    "fcn3": _Entry(partial(FCN, hidden=3), (2,)),
    "fcn10": _Entry(partial(FCN, hidden=10), (2,)),
    **{f"resnet{depth}": _Entry(partial(resnet, depth), _CIFAR) for depth in _DEPTHS},
    **{f"resnet{depth}-b": _Entry(partial(resnet, depth, shortcut="B"), _CIFAR) for depth in _DEPTHS},
    "vgg16": _Entry(VGG16, _CIFAR),
    "densenet-small": _Entry(SmallDenseNet, _SMALL),
    "mobilenet-small": _Entry(SmallMobileNet, _SMALL),
    "resnext-small": _Entry(SmallResNeXt, _SMALL),
    "split-small": _Entry(SmallSplitNet, _SMALL),
    "unet-small": _Entry(SmallUNet, _SMALL),
    "mlp": _Entry(MLP, (1, 8, 8)),
    "cnn1d": _Entry(CNN1d, (1, 64)),
}


def names() -> list[str]:
    """Names of all built-in networks, in the order of the registry."""
    return list(_REGISTRY)


def build(name: str, **options: Any) -> nn.Module:
    """A freshly initialised built-in network; `options` go to its constructor (`classes=100`, `width=8`, …)."""
    return _call(_entry(name).factory, f"model {name!r}", options)


def example_input(name: str, batch: int = 2) -> Tensor:
    """A standard normal batch of the shape that network `name` takes by default; the same values at every call."""
    shape = (batch, *_entry(name).input_shape)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def resolve(spec: str, **options: Any) -> nn.Module:
    """Build the network that `spec` names: a built-in name, or `package.module:callable` that returns an `nn.Module`.

    The module is looked for in the current folder, then where Python looks for modules. `options` go to the callable.
    """
    if ":" not in spec:
        return build(spec, **options)
    module_name, _, attribute = spec.partition(":")
    if not module_name or not attribute:
        raise InvalidInput(f"model {spec!r}: wanted package.module:callable, such as mypackage.networks:build.")
    with current_folder_importable():
        return _call(_load_callable(spec, module_name, attribute), f"model {spec!r}", options)


def _entry(name: str) -> _Entry:
    entry = _REGISTRY.get(name)
    if entry is None:
        raise InvalidInput(
            f"unknown model {name!r}.{suggest(name, _REGISTRY)} A network of your own is named package.module:callable."
        )
    return entry


def _call(factory: Factory, what: str, options: Mapping[str, Any]) -> nn.Module:
    """Call `factory`; options it does not take, and a result that is no network, become errors that name `what`."""
    _check_options(factory, what, options)
    try:
        model = factory(**options)
    except InvalidInput:
        raise
    except (Exception, SystemExit) as error:  # a user's function, or torch refusing a size: whatever it raised is the answer
        raise InvalidInput(f"{what} could not be built with {dict(options)}: {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise InvalidInput(f"{what} gave a {type(model).__name__}: wanted a torch.nn.Module.")
    return model


def _check_options(factory: Factory, what: str, options: Mapping[str, Any]) -> None:
    try:
        parameters = inspect.signature(factory).parameters
    except ValueError:  # some builtins have no signature: calling will tell
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for option in options:
        if option not in parameters:
            raise InvalidInput(f"{what} has no option {option!r}.{suggest(option, parameters)}")


def _load_callable(spec: str, module_name: str, attribute: str) -> Factory:
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise InvalidInput(
                f"model {spec!r}: no module {error.name!r} in {Path.cwd()} or in the installed packages. "
                f"Run from the folder that holds it, or install it."
            ) from error
        raise InvalidInput(f"model {spec!r}: importing {module_name} failed: {error}.") from error
    except (Exception, SystemExit) as error:  # the user's module runs its own code
        raise InvalidInput(f"model {spec!r}: importing {module_name} failed: {type(error).__name__}: {error}.") from error
    found = getattr(module, attribute, None)
    if callable(found):
        return found  # type: ignore[no-any-return]
    callables = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
    what = "has no" if found is None else f"has a {type(found).__name__}, not a callable, named"
    raise InvalidInput(f"model {spec!r}: {module_name} {what} {attribute!r}.{suggest(attribute, callables)}")
