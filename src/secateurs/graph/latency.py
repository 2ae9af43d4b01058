"""How fast networks run beside each other: interleaved, warmed up, with the uncertainty of the comparison."""

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
from secateurs.graph.trace import Example, Graph, as_example, like_network

RESAMPLES = 2000  # bootstrap samples: the ends of a 95 % interval then rest on 50 of them each


@dataclass(frozen=True)
class Timing:
    """The seconds that one network took for the example input, over all repeats."""

    median: float
    low: float  # 5 % of the repeats were faster
    high: float  # 5 % of the repeats were slower
    seconds: tuple[float, ...]  # each repeat, in the order measured


@dataclass(frozen=True)
class SpeedUp:
    """How many times faster than the first network another one is: the ratio of medians with its 95 % interval."""

    ratio: float  # above 1: faster than the first
    low: float
    high: float

    @property
    def measurable(self) -> bool:
        """False when the interval contains 1: the measurement cannot tell which network is faster."""
        return not self.low <= 1.0 <= self.high

    def summary(self) -> str:
        """One phrase, such as "1.93x faster (1.85 to 2.01)" or "no measurable speed-up (0.97 to 1.04)"."""
        if not self.measurable:
            return f"no measurable speed-up ({self.low:.2f} to {self.high:.2f})"
        if self.ratio >= 1:
            return f"{self.ratio:.2f}x faster ({self.low:.2f} to {self.high:.2f})"
        return f"{1 / self.ratio:.2f}x slower ({1 / self.high:.2f} to {1 / self.low:.2f})"


@dataclass(frozen=True)
class Latency:
    """Timings of networks run in turns, and how each of them compares to the first."""

    timings: tuple[Timing, ...]  # one for each network, in the order given
    speedups: tuple[SpeedUp, ...]  # one for each network after the first
    batch: int
    threads: int
    device: str

    def summary(self) -> str:
        """The speed-ups in the order given, or the time of a network measured alone."""
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

    Every repeat runs each network once, starting with another one each time, so that a machine that slows down or
    warms up does so for all of them; the interval of a speed-up comes from resampling whole repeats. `warmup` repeats
    are run before and thrown away. Without `example_input` the first network, a traced one, brings it. `threads` is
    torch's number of threads (None: as it is). With `device`, copies of the networks are timed there. All is measured
    in eval mode and inference mode, and the networks and the number of threads come back as they were.
    """
    check_settings(networks, repeats, warmup, threads)
    first, example = runnable(networks[0], example_input)
    modules = [first, *(runnable(network, example)[0] for network in networks[1:])]
    if device is not None:
        modules = [deepcopy(module).to(device) for module in modules]
    inputs = [runnable(module, example)[1] for module in modules]
    kinds = sorted({str(tensors[0].device) for tensors in inputs})
    if "meta" in kinds:
        raise InvalidInput("a network on the meta device computes nothing, so it has no latency: give it weights first.")
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
    """Refuse what cannot be timed, before anything runs."""
    if not networks:
        raise InvalidInput("latency needs at least one network.")
    if repeats < 5:
        raise InvalidInput(f"repeats is {repeats}, wanted at least 5: fewer give no interval.")
    if warmup < 0:
        raise InvalidInput(f"warmup is {warmup}, wanted 0 or more.")
    if threads is not None and threads < 1:
        raise InvalidInput(f"threads is {threads}, wanted 1 or more, or None for torch's own setting.")


def in_turns(calls: list[Callable[[], None]], warmup: int, repeats: int) -> Tensor:
    """Seconds (calls, repeats) of each call; every repeat starts one call later, `warmup` repeats are not recorded."""
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
    """Median and spread of the repeats (R,) of one network."""
    low, middle, high = seconds.quantile(torch.tensor([0.05, 0.5, 0.95], dtype=seconds.dtype)).tolist()
    return Timing(middle, low, high, tuple(seconds.tolist()))


def speedup(first: Tensor, other: Tensor) -> SpeedUp:
    """Ratio of the medians of two rows of seconds (R,) of the same repeats, with its 95 % bootstrap interval."""
    # The same repeats are drawn for both, or a slow minute that hit both would widen the interval.
    drawn = torch.randint(len(first), (RESAMPLES, len(first)), generator=torch.Generator().manual_seed(0))
    ratios = median(first[drawn]) / median(other[drawn])
    low, high = ratios.quantile(torch.tensor([0.025, 0.975], dtype=ratios.dtype)).tolist()
    return SpeedUp(float(median(first) / median(other)), low, high)


def median(seconds: Tensor) -> Tensor:
    """Median over the last dimension, the mean of the middle two where their number is even."""
    return seconds.quantile(0.5, dim=-1)


def caller(module: nn.Module, tensors: tuple[Tensor, ...]) -> Callable[[], None]:
    """One run of `module` to its end: a GPU is waited for."""
    if tensors[0].device.type != "cuda":
        return lambda: module(*tensors)

    def run_to_the_end() -> None:
        module(*tensors)
        torch.cuda.synchronize(tensors[0].device)

    return run_to_the_end


@contextmanager
def using_threads(threads: int | None) -> Iterator[None]:
    """Set torch's number of threads, and set it back."""
    before = torch.get_num_threads()
    try:
        if threads is not None:
            torch.set_num_threads(threads)
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Keep the garbage collector out of the measured time."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


RUNS = 5


def aligning_share(graph: Graph, inputs: Example) -> float:
    """The share, in [0, 1], of the network's time for `inputs` that goes into aligning channels; 0 where none is aligned.

    Where a sum widens a term as it adds it, what it takes beyond a plain sum counts. Median of several runs, in eval mode, on
    the network's device.
    """
    if not any(isinstance(layer, Align | SumInto) for layer in graph.module.modules()):
        return 0.0
    given, shares = like_network(graph.module, as_example(inputs)), []
    with eval_mode(graph.module), torch.inference_mode():
        for run in range(RUNS + 1):
            watch = _StopWatch(graph.module)
            watch.run(*given)
            if run:  # the first run warms up
                shares.append(watch.aligning / watch.all)
    return statistics.median(shares)


class _StopWatch(fx.Interpreter):
    """Runs a network node by node, each to its end."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.aligning, self.all = 0.0, 0.0

    def run_node(self, n: fx.Node) -> Any:
        """The node's value; its time is added up."""
        start = perf_counter()
        result = super().run_node(n)
        _wait_for(result)
        seconds = perf_counter() - start
        self.all += seconds
        layer = self.module.get_submodule(str(n.target)) if n.op == "call_module" else None
        if isinstance(layer, Align):
            self.aligning += seconds
        elif isinstance(layer, SumInto):
            self.aligning += max(seconds - _plain_sum(result), 0.0)
        return result


def _plain_sum(like: Tensor) -> float:
    start = perf_counter()
    _wait_for(like + like)
    return perf_counter() - start


def _wait_for(value: Any) -> None:
    """A GPU works behind Python's back."""
    if isinstance(value, Tensor) and value.device.type == "cuda":
        torch.cuda.synchronize(value.device)
