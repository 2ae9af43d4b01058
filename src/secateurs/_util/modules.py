"""Modules: device and training mode, changed inside a block and restored after it; what fits a device; what makes two equal."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from itertools import chain
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor, fx, nn

from secateurs._util.tensors import digest
from secateurs.errors import InvalidInput, OutOfMemory

Device = str | torch.device | None
"""None: the module's own device."""

WITHOUT_FLOAT64 = frozenset({"mps"})  # types of devices

T = TypeVar("T")
P = ParamSpec("P")


def device_of(module: nn.Module) -> torch.device:
    """Device of the module's first parameter or buffer; the CPU if it has none."""
    first = next(chain(module.parameters(), module.buffers()), None)
    return torch.device("cpu") if first is None else first.device


def with_real_tensors(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function make real tensors even where the default device is "meta", as in `with torch.device("meta")`."""

    @wraps(function)
    def inside(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.get_default_device().type != "meta":
            return function(*args, **kwargs)
        with torch.device("cpu"):
            return function(*args, **kwargs)

    return inside


def unwrapped(model: nn.Module) -> nn.Module:
    """The network itself, without the wrappers of torch.compile, DataParallel and DistributedDataParallel."""
    if not isinstance(model, nn.Module):
        raise InvalidInput(f"model: got {type(model).__name__}, wanted a torch.nn.Module (an instance, not a class).")
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


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
def keeping_gradients(*modules: nn.Module) -> Iterator[None]:
    """Put the gradients of all parameters aside inside the block, and back after it, even after an error."""
    before = [(parameter, parameter.grad) for module in modules for parameter in module.parameters()]
    for parameter, _ in before:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient


@contextmanager
def channels_last(module: nn.Module) -> Iterator[None]:
    """Lay out weights of four axes with channels last inside the block, and as they were after it."""
    moved = [t for t in (*module.parameters(), *module.buffers()) if t.dim() == 4 and t.is_contiguous()]
    for tensor in moved:
        tensor.data = tensor.data.contiguous(memory_format=torch.channels_last)
    try:
        yield
    finally:
        for tensor in moved:
            tensor.data = tensor.data.contiguous()


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


def check_device(device: Device, where: str = "device") -> None:
    """Refuse a device that torch does not know, or that this machine does not have; `where` it was given."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch raises one or another, by kind of device
        first = str(error).partition("\n")[0]
        raise InvalidInput(
            f"{where}: got {str(device)!r}, which cannot be used here ({first}). Leave device out to stay on the model's "
            f"own, or give 'cpu'."
        ) from error


def accumulation_dtype(device: torch.device) -> torch.dtype:
    """The finest floating-point type that the device computes in: float64, or float32 where it has none."""
    return torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64


def to_device(tensor: Tensor, device: Device) -> Tensor:
    """The tensor on `device` (None: where it is); copies to CUDA come from pinned memory, and do not wait."""
    if device is None or torch.device(device).type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class BatchLimit:
    """The largest batch that fits into the device's memory, as far as it is known; all measurements of a run share it."""

    def __init__(self) -> None:
        self.most: int | None = None  # None: no batch was too large yet

    def within(self, batch: int) -> int:
        """The batch, or the limit if that is smaller."""
        return batch if self.most is None else min(batch, self.most)

    def run(self, batch: int, work: Callable[[int], T]) -> T:
        """Call `work(batch)`; where memory runs out, again with half the batch, which then is the limit of all later calls.

        `work` starts from the beginning each time, so that it gives what it gives with the smaller batch.
        """
        batch = self.within(batch)
        while True:
            try:
                return work(batch)
            except torch.OutOfMemoryError as error:
                if batch == 1:
                    raise OutOfMemory(
                        "the device has not enough memory for a single example. Use a device with more memory, smaller inputs, "
                        "or the CPU (device='cpu')."
                    ) from error
            # outside of the handler, where the error no longer holds what its frames had in memory
            self.most = batch = batch // 2
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


@contextmanager
def copyable(model: nn.Module) -> Iterator[None]:
    """Within the block, tensors that modules have computed and hold (torch.nn.utils.weight_norm) can be copied."""
    held = [
        (part, name, value)
        for part in model.modules()
        for name, value in vars(part).items()
        if isinstance(value, Tensor) and not value.is_leaf
    ]
    try:
        for part, name, value in held:
            part.__dict__[name] = value.detach()
        yield
    finally:
        for part, name, value in held:
            part.__dict__[name] = value


def structure(module: nn.Module) -> str:
    """What a network computes besides its tensors: the class and settings of every module, and the calls of a traced one.

    The same in every process and on every device.
    """
    codes = [part.graph.python_code("self").src for part in module.modules() if isinstance(part, fx.GraphModule)]
    named = [(name, part) for name, part in module.named_modules() if name or not isinstance(part, fx.GraphModule)]
    modules = [f"{name} {type(part).__qualname__}({part.extra_repr()})" for name, part in named]
    return re.sub(r"device\(type='\w+'(, index=\d+)?\)|0x[0-9a-f]+", "", "\n".join([*codes, *modules]))


def network_digest(module: nn.Module) -> str:
    """SHA-256 of a network: of its structure, weights and buffers, also of buffers that its state dict leaves out."""
    return digest({**module.state_dict(), **dict(module.named_buffers())}, {"structure": structure(module)})
