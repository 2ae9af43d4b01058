"""Training through int8 rounding: layers compute with rounded weights and inputs, gradients pass as if nothing were rounded.

Weights are rounded for each filter, inputs of layers for a whole tensor, as in the int8 files of `export.int8`; their ranges
are moving averages of the extremes of batches. A filter's scale follows a BatchNorm behind it, so rounding before the
BatchNorm is rounding after it was folded. A filter moves between int8 steps only if the weights beneath are trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

_MEMORY = 0.99  # of the moving averages
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@contextmanager
def fake_int8(module: nn.Module) -> Iterator[None]:
    """Round weights and inputs of convolutions and linear layers while they train; in eval mode nothing is rounded.

    Afterwards the layers compute as before; names, shapes and the state dict of the module never change.
    """
    layers = [layer for layer in module.modules() if type(layer) in _LAYERS]
    for layer in layers:
        layer.forward = partial(_forward, layer, _Range())
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


class _Range:
    """The moving average of a tensor's extremes."""

    def __init__(self) -> None:
        self.low: Tensor | None = None
        self.high: Tensor | None = None

    def update(self, x: Tensor) -> tuple[Tensor, Tensor]:
        low, high = x.detach().amin().clamp(max=0), x.detach().amax().clamp(min=0)
        self.low = low if self.low is None else torch.lerp(low, self.low, _MEMORY)
        self.high = high if self.high is None else torch.lerp(high, self.high, _MEMORY)
        return self.low, self.high


def _forward(layer: nn.Module, seen: _Range, input: Tensor) -> Tensor:  # as a layer's own forward names it
    weight, bias = layer.weight, layer.bias
    assert isinstance(weight, Tensor)
    assert bias is None or isinstance(bias, Tensor)
    if layer.training:
        input, weight = rounded_input(input, *seen.update(input)), rounded_weight(weight)
    if isinstance(layer, nn.Linear):
        return functional.linear(input, weight, bias)
    found: Tensor = layer._conv_forward(input, weight, bias)  # type: ignore[operator]  # of torch's convolutions
    return found


def rounded_weight(weight: Tensor) -> Tensor:
    """Weights (F, …) on 255 steps, symmetric about 0, for each filter; the gradient is that of the weights themselves."""
    step = weight.detach().abs().flatten(1).amax(1).clamp_min(1e-12) / 127
    step = step.view(-1, *[1] * (weight.ndim - 1))
    return weight + ((weight / step).round() * step - weight).detach()


def rounded_input(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Values on the 256 steps of a range that contains 0; the gradient is 1 inside the range, and 0 outside."""
    step = ((high - low) / 255).clamp_min(1e-12)
    zero = (-low / step).round()
    limited = x.clamp(-zero * step, (255 - zero) * step)
    return limited + ((limited / step).round() * step - limited).detach()
