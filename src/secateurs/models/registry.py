"""Networks by name: the built-in ones, and the user's own as `package.module:function`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from secateurs._util.entrypoints import call
from secateurs.errors import InvalidInput, suggest
from secateurs.models.lenet import LeNet5, MaxPlusNet, lenet300
from secateurs.models.mlp import MLP
from secateurs.models.resnet import resnet
from secateurs.models.topologies import FCN, CNN1d, SmallDenseNet, SmallMobileNet, SmallResNeXt, SmallSplitNet, SmallUNet
from secateurs.models.vgg import VGG16

Factory = Callable[..., nn.Module]


_CIFAR = (3, 32, 32)
_SMALL = (3, 16, 16)
_MNIST = (1, 28, 28)
_DEPTHS = (8, 14, 20, 32, 44, 56, 110)

# the shape of one example is that for the default options
_REGISTRY: Mapping[str, tuple[Factory, tuple[int, ...]]] = {
    "fcn3": (partial(FCN, hidden=3), (2,)),
    "fcn10": (partial(FCN, hidden=10), (2,)),
    **{f"resnet{depth}": (partial(resnet, depth), _CIFAR) for depth in _DEPTHS},
    **{f"resnet{depth}-b": (partial(resnet, depth, shortcut="B"), _CIFAR) for depth in _DEPTHS},
    "vgg16": (VGG16, _CIFAR),
    "lenet300": (lenet300, _MNIST),
    "lenet5": (LeNet5, _MNIST),
    "maxplus": (MaxPlusNet, _MNIST),
    "densenet-small": (SmallDenseNet, _SMALL),
    "mobilenet-small": (SmallMobileNet, _SMALL),
    "resnext-small": (SmallResNeXt, _SMALL),
    "split-small": (SmallSplitNet, _SMALL),
    "unet-small": (SmallUNet, _SMALL),
    "mlp": (MLP, (1, 8, 8)),
    "cnn1d": (CNN1d, (1, 64)),
}


def names() -> list[str]:
    """Names of all built-in networks, in the order of the registry."""
    return list(_REGISTRY)


def build(name: str, /, **options: Any) -> nn.Module:
    """Build a freshly initialised built-in network; `options` go to its constructor (`classes=100`, `width=8`, …)."""
    return _module(_entry(name)[0], name, options)


def example_input(name: str, batch: int = 2) -> Tensor:
    """A standard normal batch of the shape that network `name` takes by default; the same values at every call."""
    shape = (batch, *_entry(name)[1])
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def resolve(spec: str, /, **options: Any) -> nn.Module:
    """Build the network that `spec` names: a built-in name, or `package.module:function` that returns an `nn.Module`.

    The module is looked up in the current folder first, then on Python's path. `options` go to the function.
    """
    return _module(spec, spec, options) if ":" in spec else build(spec, **options)


def _entry(name: str) -> tuple[Factory, tuple[int, ...]]:
    if name not in _REGISTRY:
        raise InvalidInput(
            f"unknown model {name!r}.{suggest(name, _REGISTRY)} Your own network is named package.module:function."
        )
    return _REGISTRY[name]


def _module(target: str | Factory, name: str, options: Mapping[str, Any]) -> nn.Module:
    model = call(target, f"model {name!r}", options)
    if not isinstance(model, nn.Module):
        raise InvalidInput(f"model {name!r} gave a {type(model).__name__}: wanted a torch.nn.Module.")
    return model
