"""Engines: what runs a network where it will be used, and how its seconds are measured there.

An engine loads a network, or a single layer, and gives a timer: a call that runs it once and returns the seconds.
"""

from __future__ import annotations

import copy
import math
import platform
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from secateurs._util.modules import Device, device_of
from secateurs.errors import InvalidInput
from secateurs.graph.trace import Graph
from secateurs.speed.timing import CLOCK, Clock, Load, Timer, timed


class Elsewhere(Clock):
    """A clock for what does not run on this machine: nothing here interrupts it."""

    def interruptions(self) -> int:
        """None."""
        return 0

    def used_by_others(self) -> float | None:
        """Not known."""
        return None


class Engine(Protocol):
    """What runs networks. Its `name`, `batch` and `threads` say under which conditions a time was measured."""

    name: str
    batch: int  # examples at once
    threads: int | None  # None: torch's number
    runs_layers: bool  # False: only whole networks can be timed
    clock: Clock

    def network(self, graph: Graph) -> Load:
        """Prepare a network for a batch of inputs like its example; it may then be loaded several times."""

    def layer(self, layer: nn.Module, shape: Sequence[int], times: int) -> Timer:
        """Load a convolution or linear layer for an input of `shape`; the timer runs it `times` times."""


class TorchEngine:
    """PyTorch in eager mode, on `device` (None: where the network is)."""

    name, runs_layers = "torch", True
    clock: Clock = CLOCK

    def __init__(self, batch: int = 1, threads: int | None = None, device: Device = None) -> None:
        self.batch, self.threads, self.device = batch, threads, device

    def network(self, graph: Graph) -> Load:
        """Copies of the network in eval mode."""

        def load() -> Timer:
            module = copy.deepcopy(graph.module).eval()
            module = module.to(device_of(module) if self.device is None else self.device)
            return self._timed(self.callable(module), on_device_of(module, batch_like(graph, self.batch)))

        return load

    def loaded(self, module: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Load:
        """A module as it is, not copied."""
        return lambda: self._timed(module, inputs)

    def _timed(self, module: Callable[..., Any], inputs: tuple[Tensor, ...], times: int = 1) -> Timer:
        run = caller(module, inputs, times)
        return timed(run, alone=on_one_thread(self.threads) and inputs[0].device.type == "cpu", clock=self.clock)

    def callable(self, module: nn.Module) -> Callable[..., Any]:
        """What the engine calls for a module."""
        return module

    def layer(self, layer: nn.Module, shape: Sequence[int], times: int) -> Timer:
        """Load the layer; its input is random."""
        if self.device is not None:
            layer = copy.deepcopy(layer).to(self.device)
        given = torch.rand(*shape, generator=torch.Generator().manual_seed(0)).to(next(layer.parameters()).dtype)
        return self._timed(layer, on_device_of(layer, (given,)), times)


class MeasureEngine:
    """A function of the user's own, `measure(module) -> seconds`; it is given whole networks only."""

    batch, runs_layers = 1, False
    clock: Clock = Elsewhere()

    def __init__(self, measure: Callable[[nn.Module], float]) -> None:
        self.measure = measure
        self.threads: int | None = None
        self.name = getattr(measure, "__name__", type(measure).__name__)

    def network(self, graph: Graph) -> Load:
        """Call the function with the network in eval mode."""

        def run() -> float:
            found = self.measure(copy.deepcopy(graph.module).eval())
            try:
                seconds = float(found)
            except (TypeError, ValueError) as error:
                raise InvalidInput(f"measure(module) returned a {type(found).__name__}, wanted seconds: one number.") from error
            if not (math.isfinite(seconds) and seconds > 0):
                raise InvalidInput(f"measure(module) returned {seconds}, wanted seconds above 0.")
            return seconds

        return lambda: run

    def layer(self, layer: nn.Module, shape: Sequence[int], times: int) -> Timer:
        """Refused: the function knows the inputs of whole networks only."""
        raise InvalidInput(f"{self.name} measures whole networks, and cannot time a {type(layer).__name__} alone.")


def at_batch(engine: Engine, batch: int) -> Engine:
    """The same engine for batches of another size."""
    other = copy.copy(engine)
    other.batch = batch
    return other


def batch_like(graph: Graph, batch: int) -> tuple[Tensor, ...]:
    """The graph's example inputs, repeated or truncated to `batch` examples."""
    count = len(graph.example[0])
    return tuple(t[torch.arange(batch) % count] if t.dim() and len(t) == count else t for t in graph.example)


def on_one_thread(threads: int | None) -> bool:
    """Whether an engine with this setting computes in the thread that calls it."""
    return (torch.get_num_threads() if threads is None else threads) == 1


def caller(module: Callable[..., Any], tensors: tuple[Tensor, ...], times: int = 1) -> Callable[[], None]:
    """Return a function that calls `module` so many `times` and waits until the device is done."""

    def run() -> None:
        for _ in range(times):
            module(*tensors)
        wait_for(tensors[0])

    return run


def wait_for(value: Any) -> None:
    """Wait until a GPU has computed `value`."""
    if isinstance(value, Tensor) and value.device.type == "cuda":
        torch.cuda.synchronize(value.device)


def on_device_of(module: nn.Module, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The tensors on the device of the module."""
    return tuple(t.to(device_of(module)) for t in tensors)


# ---- the machine ---------------------------------------------------------------------------------------------------------


def machine(engine: Engine) -> dict[str, str]:
    """What a time of this engine depends on besides the network: processor, its flags, versions, threads."""
    info = _cpu_info()
    return {
        "cpu": info.get("model name") or platform.processor() or platform.machine(),
        "flags": " ".join(sorted(flag for flag in info.get("flags", "").split() if flag.startswith(_MATTER))),
        "engine": engine.name,
        "method": _METHOD,
        "threads": str(torch.get_num_threads() if engine.threads is None else engine.threads),
        **{name: _version(name) for name in ("torch", "onnxruntime")},
    }


_METHOD = "chains, processor time"  # how layers are timed: a file of times that were measured in another way is not used
_MATTER = ("avx", "amx", "fma", "sse4", "asimd", "sve", "bf16", "vnni")


def cpu_flags() -> frozenset[str]:
    """What the processor can do, as Linux names it; nothing elsewhere."""
    return frozenset(_cpu_info().get("flags", "").split())


def _cpu_info() -> dict[str, Any]:
    """The first processor, as Linux describes it; nothing elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
