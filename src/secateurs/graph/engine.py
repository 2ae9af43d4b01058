"""Engines: what runs a network where it will be used, and how its seconds are measured there.

An engine loads a network, or a single layer, and gives a timer: a call that runs it once and returns the seconds. Timers
are compared in rounds, each of which runs all of them in random order, so that a busy machine slows all of them alike.
"""

from __future__ import annotations

import copy
import math
import platform
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from secateurs._util.modules import Device, device_of
from secateurs.errors import InvalidInput
from secateurs.graph.latency import caller, undisturbed, using_threads
from secateurs.graph.trace import Graph

Timer = Callable[[], float]
"""Runs what an engine has loaded once, and returns the seconds."""

K = TypeVar("K")
MOST_CALLS = 20  # of short work in a round; the fastest counts
ROUNDS, FEWEST_ROUNDS = 7, 3  # of a comparison, and where its time is limited
SHORTEST = 1e-2  # seconds: shorter work is repeated for as long in every round


class Engine(Protocol):
    """What runs networks. Its `name`, `batch` and `threads` say under which conditions a time was measured."""

    name: str
    batch: int  # examples at once
    threads: int | None  # None: torch's number
    runs_layers: bool  # False: only whole networks can be timed

    def network(self, graph: Graph) -> Timer:
        """Load a network, for a batch of inputs like its example."""

    def layer(self, layer: nn.Module, shape: Sequence[int], times: int) -> Timer:
        """Load a convolution or linear layer for an input of `shape`; the timer runs it `times` times."""


class TorchEngine:
    """PyTorch in eager mode, on `device` (None: where the network is)."""

    name, runs_layers = "torch", True

    def __init__(self, batch: int = 1, threads: int | None = None, device: Device = None) -> None:
        self.batch, self.threads, self.device = batch, threads, device

    def network(self, graph: Graph) -> Timer:
        """Load a copy of the network in eval mode."""
        module = copy.deepcopy(graph.module).eval()
        module = module.to(device_of(module) if self.device is None else self.device)
        return timed(caller(self.callable(module), on_device_of(module, batch_like(graph, self.batch))))

    def callable(self, module: nn.Module) -> Callable[..., Any]:
        """What the engine calls for a module."""
        return module

    def layer(self, layer: nn.Module, shape: Sequence[int], times: int) -> Timer:
        """Load the layer; its input is random."""
        if self.device is not None:
            layer = copy.deepcopy(layer).to(self.device)
        given = torch.rand(*shape, generator=torch.Generator().manual_seed(0)).to(next(layer.parameters()).dtype)
        run = caller(layer, on_device_of(layer, (given,)))

        def repeat() -> None:
            for _ in range(times):
                run()

        return timed(repeat)


class MeasureEngine:
    """A function of the user's own, `measure(module) -> seconds`; it is given whole networks only."""

    batch, runs_layers = 1, False

    def __init__(self, measure: Callable[[nn.Module], float]) -> None:
        self.measure = measure
        self.threads: int | None = None
        self.name = getattr(measure, "__name__", type(measure).__name__)

    def network(self, graph: Graph) -> Timer:
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

        return run

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


def on_device_of(module: nn.Module, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The tensors on the device of the module."""
    return tuple(t.to(device_of(module)) for t in tensors)


def timed(run: Callable[[], object]) -> Timer:
    """A timer of one call of `run`."""

    def once() -> float:
        start = perf_counter()
        run()
        return perf_counter() - start

    return once


# ---- comparing -----------------------------------------------------------------------------------------------------------


def in_rounds(
    timers: Mapping[K, Timer],
    *,
    threads: int | None = None,
    rounds: int = ROUNDS,
    shortest: float = SHORTEST,
    at_most: float = math.inf,
) -> dict[K, list[float]]:
    """Seconds of every timer in each of `rounds` rounds, in which all run once, in random order; a first round warms up.

    Work that takes less than `shortest` seconds is run for as long in every round, at most 20 times, and the fastest
    counts: interruptions only ever add time. Where all rounds would take more than `at_most` seconds there are fewer, but at
    least 3.
    """
    keys, generator = list(timers), torch.Generator().manual_seed(0)
    seconds: dict[K, list[float]] = {key: [] for key in keys}
    with torch.inference_mode(), using_threads(threads), undisturbed():
        for key in keys:
            timers[key]()
        first = {key: max(timers[key](), 1e-9) for key in keys}  # not recorded: fits the number of calls to each timer
        times = {key: min(MOST_CALLS, max(math.ceil(shortest / first[key]), 1)) for key in keys}
        used = sum((first[key] * times[key] for key in keys), 1e-9)
        rounds = max(int(min(rounds, at_most / used)), min(rounds, FEWEST_ROUNDS))
        for _ in range(rounds):
            for i in torch.randperm(len(keys), generator=generator).tolist():
                timer = timers[keys[i]]
                seconds[keys[i]].append(min(timer() for _ in range(times[keys[i]])))
    return seconds


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


_METHOD = "chains"  # how layers are timed: a file of times that were measured in another way is not used
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
