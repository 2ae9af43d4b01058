"""Device and training mode of modules, changed inside a block and restored after it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

Device = str | torch.device | None
"""None: the module's own device."""


def device_of(module: nn.Module) -> torch.device:
    """Device of the module's first parameter or buffer; the CPU if it has none."""
    first = next((t for t in [*module.parameters(), *module.buffers()]), None)
    return torch.device("cpu") if first is None else first.device


@contextmanager
def keeping_modes(*modules: nn.Module) -> Iterator[None]:
    """Restore the training mode of every submodule after the block, even after an error."""
    modes = [(submodule, submodule.training) for module in modules for submodule in module.modules()]
    try:
        yield
    finally:
        # one by one: train(True) on the whole would change submodules that the user had put into eval mode
        for submodule, training in modes:
            submodule.training = training


@contextmanager
def eval_mode(*modules: nn.Module) -> Iterator[None]:
    """Use eval mode without gradients inside the block; restore every submodule's mode, even after an error."""
    with keeping_modes(*modules), torch.no_grad():
        for module in modules:
            module.eval()
        yield


@contextmanager
def on_device(module: nn.Module, device: Device) -> Iterator[torch.device]:
    """Move the module to `device` inside the block (None: it stays), and back afterwards; yields the device."""
    original = device_of(module)
    target = original if device is None else torch.device(device)
    try:
        if target != original:
            module.to(target)
        yield target
    finally:
        if target != original:
            module.to(original)
