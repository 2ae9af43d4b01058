"""Latency of networks, measured in turns, with an interval of the comparison that a repetition falls into."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor

from secateurs._util.modules import eval_mode
from secateurs.errors import InvalidInput
from secateurs.graph.cost import Example as Inputs
from secateurs.graph.cost import Network, runnable
from secateurs.speed.engines import TorchEngine
from secateurs.speed.timing import LOADS, SpeedUp, compare, using_threads

FEWEST = 5  # repeats of which a median and an interval mean something


@dataclass(frozen=True)
class Timing:
    """Seconds of one network for the example input, over all repeats."""

    median: float
    low: float  # 5 % of the repeats were faster
    high: float  # 5 % of the repeats were slower
    seconds: tuple[float, ...]  # each repeat, in the order measured


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
    threads: int | None = None,
    device: str | torch.device | None = None,
) -> Latency:
    """Time the networks on `example_input`, in turns, and compare each to the first.

    Every repeat runs all networks, in random order; short ones several times, of which the fastest call counts. On one thread
    of a CPU the processor time of that thread is taken, which other processes do not lengthen; see `speed.timing`.
    Without `example_input` the example of the first network, a traced one, is used. `threads` is torch's number of threads
    (None: unchanged). With `device`, copies of the networks are timed there. Networks run in eval and inference mode; their
    modes and the number of threads are restored.
    """
    check_settings(networks, repeats, threads)
    first, example = runnable(networks[0], example_input)
    modules = [first, *(runnable(network, example)[0] for network in networks[1:])]
    if device is not None:
        modules = [deepcopy(module).to(device) for module in modules]
    inputs = [runnable(module, example)[1] for module in modules]
    kinds = sorted({str(tensors[0].device) for tensors in inputs})
    if "meta" in kinds:
        raise InvalidInput("a network on the meta device computes nothing, so it has no latency. Load its weights first.")
    with eval_mode(*modules), using_threads(threads):
        used = torch.get_num_threads()
        engine = TorchEngine()  # of the user's own modules, as they are
        loads = [engine.loaded(module, tensors) for module, tensors in zip(modules, inputs, strict=True)]
        found = compare(loads, rounds=(repeats, repeats), times_loaded=min(LOADS, repeats // FEWEST))
    return Latency(
        tuple(timing(row) for row in found.seconds),
        found.speedups,
        batch=len(example[0]),
        threads=used,
        device=", ".join(kinds),
    )


def check_settings(networks: tuple[Network, ...], repeats: int, threads: int | None) -> None:
    """Check the arguments of `latency` before anything runs."""
    if not networks:
        raise InvalidInput("latency needs at least one network.")
    if repeats < FEWEST:
        raise InvalidInput(f"repeats is {repeats}, wanted at least {FEWEST}: fewer give no interval.")
    if threads is not None and threads < 1:
        raise InvalidInput(f"threads is {threads}, wanted 1 or more, or None for torch's own setting.")


def timing(seconds: Tensor) -> Timing:
    """Return median and spread of the repeats (R,) of one network."""
    low, middle, high = seconds.quantile(torch.tensor([0.05, 0.5, 0.95], dtype=seconds.dtype)).tolist()
    return Timing(middle, low, high, tuple(seconds.tolist()))
