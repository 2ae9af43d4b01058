"""Where a module is, and how it is lent: its device and its modes, given back after use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

Device = str | torch.device | None
"""None: where the module is."""


def device_of(module: nn.Module) -> torch.device:
    """Where the network's first parameter or buffer is; the CPU if it has none."""
    first = next((t for t in [*module.parameters(), *module.buffers()]), None)
    return torch.device("cpu") if first is None else first.device


@contextmanager
def keeping_modes(*modules: nn.Module) -> Iterator[None]:
    """Give every submodule the mode back that it had before the block, even after an error."""
    modes = [(part, part.training) for module in modules for part in module.modules()]
    try:
        yield
    finally:
        # part by part: train(True) on the whole would unfreeze what the user had put into eval mode
        for part, training in modes:
            part.training = training


@contextmanager
def eval_mode(*modules: nn.Module) -> Iterator[None]:
    """Eval mode without gradients inside the block; every submodule gets its own mode back, even after an error."""
    with keeping_modes(*modules), torch.no_grad():
        for module in modules:
            module.eval()
        yield


@contextmanager
def on_device(module: nn.Module, device: Device) -> Iterator[torch.device]:
    """Move the module to `device` inside the block (None: it stays), and back afterwards; gives the device."""
    home = device_of(module)
    place = home if device is None else torch.device(device)
    if place == home:
        yield place
        return
    try:
        module.to(place)
        yield place
    finally:
        module.to(home)
