"""Latency of networks, measured in turns after a warm-up, with a confidence interval of the comparison."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, fx, nn

from secateurs._util.modules import eval_mode
from secateurs.errors import InvalidInput
from secateurs.graph.cost import Example as Inputs
from secateurs.graph.cost import Network, runnable
from secateurs.graph.layers import Align, SumInto
from secateurs.graph.node_info import called_module
from secateurs.graph.trace import Example, Graph, as_example, like_network

RESAMPLES = 2000  # bootstrap samples: the ends of a 95 % interval then rest on 50 of them each


@dataclass(frozen=True)
class Timing:
    """Seconds of one network for the example input, over all repeats."""

    median: float
    low: float  # 5 % of the repeats were faster
    high: float  # 5 % of the repeats were slower
    seconds: tuple[float, ...]  # each repeat, in the order measured


@dataclass(frozen=True)
class SpeedUp:
    """Speed-up of a network over the first one: the ratio of medians with its 95 % interval."""

    ratio: float  # above 1: faster than the first
    low: float
    high: float

    @property
    def measurable(self) -> bool:
        """Whether the interval excludes 1; otherwise the measurement cannot tell which network is faster."""
        return not self.low <= 1.0 <= self.high

    def summary(self) -> str:
        """Return one phrase, such as "1.93x faster (1.85 to 2.01)" or "no measurable speed-up (0.97 to 1.04)"."""
        if not self.measurable:
            return f"no measurable speed-up ({self.low:.2f} to {self.high:.2f})"
        if self.ratio >= 1:
            return f"{self.ratio:.2f}x faster ({self.low:.2f} to {self.high:.2f})"
        return f"{1 / self.ratio:.2f}x slower ({1 / self.high:.2f} to {1 / self.low:.2f})"


@dataclass(frozen=True)
class Latency:
    """Timings of networks run in turns, and the speed-up of each over the first."""

    timings: tuple[Timing, ...]  # one for each network, in the order given
    speedups: tuple[SpeedUp, ...]  # one for each network after the first
    batch: int
    threads: int
    device: str

    def summary(self) -> str:
        """Return the speed-ups in the order given, or the time of a single network."""
        if self.speedups:
            return "; ".join(speedup.summary() for speedup in self.speedups)
        only = self.timings[0]
        return f"{1e3 * only.median:.3g} ms ({1e3 * only.low:.3g} to {1e3 * only.high:.3g})"


def latency(
    *networks: Network,
    example_input: Inputs | None = None,
    repeats: int = 30,
    warmup: int = 3,
    threads: int | None = None,
    device: str | torch.device | None = None,
) -> Latency:
    """Time the networks on `example_input`, in turns, and compare each to the first.

    Every repeat runs each network once and starts with the next one, so that a change of the machine's speed affects all
    of them; the interval of a speed-up comes from resampling whole repeats. The first `warmup` repeats are not recorded.
    Without `example_input` the example of the first network, a traced one, is used. `threads` is torch's number of threads
    (None: unchanged). With `device`, copies of the networks are timed there. Networks run in eval and inference mode; their
    modes and the number of threads are restored.
    """
    check_settings(networks, repeats, warmup, threads)
    first, example = runnable(networks[0], example_input)
    modules = [first, *(runnable(network, example)[0] for network in networks[1:])]
    if device is not None:
        modules = [deepcopy(module).to(device) for module in modules]
    inputs = [runnable(module, example)[1] for module in modules]
    kinds = sorted({str(tensors[0].device) for tensors in inputs})
    if "meta" in kinds:
        raise InvalidInput("a network on the meta device computes nothing, so it has no latency. Load its weights first.")
    calls = [caller(module, tensors) for module, tensors in zip(modules, inputs, strict=True)]
    with eval_mode(*modules), torch.inference_mode(), using_threads(threads), undisturbed():
        seconds = in_turns(calls, warmup, repeats)
        used = torch.get_num_threads()
    return Latency(
        tuple(timing(row) for row in seconds),
        tuple(speedup(seconds[0], other) for other in seconds[1:]),
        batch=len(example[0]),
        threads=used,
        device=", ".join(kinds),
    )


def check_settings(networks: tuple[Network, ...], repeats: int, warmup: int, threads: int | None) -> None:
    """Check the arguments of `latency` before anything runs."""
    if not networks:
        raise InvalidInput("latency needs at least one network.")
    if repeats < 5:
        raise InvalidInput(f"repeats is {repeats}, wanted at least 5: fewer give no interval.")
    if warmup < 0:
        raise InvalidInput(f"warmup is {warmup}, wanted 0 or more.")
    if threads is not None and threads < 1:
        raise InvalidInput(f"threads is {threads}, wanted 1 or more, or None for torch's own setting.")


def in_turns(calls: list[Callable[[], None]], warmup: int, repeats: int) -> Tensor:
    """Return the seconds (calls, repeats); each repeat starts one call later, and `warmup` repeats are not recorded."""
    seconds = torch.zeros(len(calls), repeats, dtype=torch.float64)
    for repeat in range(-warmup, repeats):
        for turn in range(len(calls)):
            which = (repeat + turn) % len(calls)
            start = perf_counter()
            calls[which]()
            elapsed = perf_counter() - start
            if repeat >= 0:
                seconds[which, repeat] = elapsed
    return seconds


def timing(seconds: Tensor) -> Timing:
    """Return median and spread of the repeats (R,) of one network."""
    low, middle, high = seconds.quantile(torch.tensor([0.05, 0.5, 0.95], dtype=seconds.dtype)).tolist()
    return Timing(middle, low, high, tuple(seconds.tolist()))


def speedup(first: Tensor, other: Tensor) -> SpeedUp:
    """Return the ratio of the medians of two rows of seconds (R,) of the same repeats, with its 95 % bootstrap interval."""
    # The same repeats are drawn for both, or a slow minute that affected both would widen the interval.
    drawn = torch.randint(len(first), (RESAMPLES, len(first)), generator=torch.Generator().manual_seed(0))
    ratios = median(first[drawn]) / median(other[drawn])
    low, high = ratios.quantile(torch.tensor([0.025, 0.975], dtype=ratios.dtype)).tolist()
    return SpeedUp(float(median(first) / median(other)), low, high)


def median(seconds: Tensor) -> Tensor:
    """Return the median over the last dimension: the mean of the middle two of an even number."""
    return seconds.quantile(0.5, dim=-1)


def caller(module: Callable[..., Any], tensors: tuple[Tensor, ...]) -> Callable[[], None]:
    """Return a function that calls `module` once and waits until the device is done."""

    def run() -> None:
        module(*tensors)
        _wait_for(tensors[0])

    return run


@contextmanager
def using_threads(threads: int | None) -> Iterator[None]:
    """Set torch's number of threads inside the block."""
    before = torch.get_num_threads()
    try:
        if threads is not None:
            torch.set_num_threads(threads)
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Disable the garbage collector inside the block."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


RUNS = 5


def aligning_share(graph: Graph, inputs: Example) -> float:
    """Return the share, in [0, 1], of the network's time for `inputs` that is spent on aligning channels.

    Of a sum that widens a term, the time beyond that of a plain sum counts. Median of several runs, in eval mode, on the
    network's device.
    """
    if not any(isinstance(layer, Align | SumInto) for layer in graph.module.modules()):
        return 0.0
    given, shares = like_network(graph.module, as_example(inputs)), []
    with eval_mode(graph.module), torch.inference_mode():
        for run in range(RUNS + 1):
            timer = NodeTimer(graph.module)
            timer.run(*given)
            if run:  # the first run is the warm-up
                shares.append(timer.aligning / sum(timer.seconds.values()))
    return statistics.median(shares)


def by_module(graph: Graph, inputs: Example) -> dict[str, float]:
    """Seconds of every convolution and linear layer for `inputs`, by path: medians of several runs, node by node, eager."""
    given, found = like_network(graph.module, as_example(inputs)), dict[str, list[float]]()
    with eval_mode(graph.module), torch.inference_mode():
        for run in range(RUNS + 1):
            timer = NodeTimer(graph.module)
            timer.run(*given)
            for node, seconds in timer.seconds.items() if run else ():  # the first run is the warm-up
                layer = called_module(graph.module, node)
                if isinstance(layer, nn.Linear | nn.modules.conv._ConvNd):
                    found.setdefault(str(node.target), []).append(seconds)
    return {name: statistics.median(seconds) * len(seconds) / RUNS for name, seconds in found.items()}


class NodeTimer(fx.Interpreter):
    """Runs a network node by node and measures the seconds of each node, and those spent on aligning channels."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.seconds: dict[fx.Node, float] = {}
        self.aligning = 0.0

    def run_node(self, n: fx.Node) -> Any:
        """Run the node and record its time."""
        start = perf_counter()
        result = super().run_node(n)
        _wait_for(result)
        self.seconds[n] = perf_counter() - start
        layer = called_module(self.module, n)
        if isinstance(layer, Align):
            self.aligning += self.seconds[n]
        elif isinstance(layer, SumInto):
            start = perf_counter()
            _wait_for(result + result)
            self.aligning += max(self.seconds[n] - (perf_counter() - start), 0.0)
        return result


def _wait_for(value: Any) -> None:
    """Wait until a GPU has computed `value`."""
    if isinstance(value, Tensor) and value.device.type == "cuda":
        torch.cuda.synchronize(value.device)
