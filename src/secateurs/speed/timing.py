"""The one timer: calls timed in rounds, in random order, on machines that do other things too.

Other processes take a core away in the middle of a call, empty its caches, and share the memory. The first is not counted:
work on one thread is timed by the processor time of that thread, and of calls that are timed by the clock those count that no
other process interrupted. The second and third only ever add time, so the fastest calls of a round count. What is left makes
estimates disagree that agree on an idle machine; the interval of a comparison covers all of them, and where it is too wide to
say anything, or others took a good part of the machine, it says that the machine is busy.
"""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

Timer = Callable[[], float]
"""Runs what is timed once, and returns the seconds."""
Load = Callable[[], Timer]
"""Loads what is timed afresh: its memory lies elsewhere each time, which alone makes a per cent or two."""

K = TypeVar("K")

MOST_CALLS = 20  # of short work in a round; the fastest counts
MORE_CALLS = 4  # where all were interrupted
SLICE = 2e-2  # seconds: longer work is interrupted in any case
ROUNDS, FEWEST_ROUNDS = 7, 3  # of a table, and where its time is limited
SHORTEST = 1e-2  # seconds: shorter work is repeated for as long in every round
LOADS = 3  # of a network that is compared
COMPARED_ROUNDS = (24, 72)  # of a comparison: at least, and as long as its interval is wider than wanted
LONGEST_COMPARED = 20.0  # seconds of a comparison, beyond the fewest rounds
NARROW = 0.03  # half-width of an interval that needs no more rounds
REPEATED = 0.015  # of the ratio: what two comparisons of the same networks differ by on an idle machine (benchmarks.timing)
TOO_WIDE = 1.3  # high over low: such an interval says that the machine is too busy
CROWDED = 0.15  # cores that others may use before a machine counts as busy
LEVEL = 0.95  # of intervals


class Clock:
    """What time is read from: the wall, the processor time of this thread, and signs of other processes."""

    def wall(self) -> float:
        """Seconds that have passed."""
        return time.perf_counter()

    def processor(self) -> float:
        """Seconds that this thread ran."""
        return time.thread_time()

    def waits(self) -> int:
        """How often this thread waited of its own accord, as for a device, a disk or another thread; 0 where not told."""
        return _switches("RUSAGE_THREAD", "ru_nvcsw")

    def interruptions(self) -> int:
        """How often others took a core away from this process; 0 where the system does not tell."""
        return _switches("RUSAGE_SELF", "ru_nivcsw")

    def used_by_others(self) -> float | None:
        """Core seconds that other processes have used since the machine started; None where the system does not tell."""
        busy = _busy_seconds()
        return None if busy is None else busy - time.process_time()


CLOCK = Clock()


def _switches(whose: str, kind: str) -> int:
    try:
        import resource  # not on Windows
    except ImportError:
        return 0
    who = getattr(resource, whose, None)  # threads are told of on Linux only
    return 0 if who is None else int(getattr(resource.getrusage(who), kind))


def _busy_seconds() -> float | None:
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return None
    user, nice, system, _, _, irq, softirq, steal = map(int, fields[:8])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def timed(run: Callable[[], object], *, alone: bool = False, clock: Clock = CLOCK) -> Timer:
    """A timer of one call of `run`.

    `alone`: its work is done by the calling thread. The processor time of that thread then counts, unless it waited for
    something: waiting takes the user's time too.
    """

    def by_wall() -> float:
        start = clock.wall()
        run()
        return clock.wall() - start

    def by_processor() -> float:
        waits, wall, start = clock.waits(), clock.wall(), clock.processor()
        run()
        worked, passed = clock.processor() - start, clock.wall() - wall
        return worked if clock.waits() == waits else passed

    return by_processor if alone else by_wall


def in_rounds(
    timers: Mapping[K, Timer],
    *,
    threads: int | None = None,
    rounds: int = ROUNDS,
    shortest: float = SHORTEST,
    at_most: float = math.inf,
    seed: int = 0,
    clock: Clock = CLOCK,
) -> dict[K, list[float]]:
    """Seconds of every timer in each of `rounds` rounds, in which all run once, in random order; a first round warms up.

    Work that takes less than `shortest` seconds is run for as long in every round, at most 20 times, and the fastest of the
    calls counts that nothing interrupted, of all where all were. Where all rounds would take more than `at_most` seconds there
    are fewer, but at least 3.
    """
    keys, generator = list(timers), torch.Generator().manual_seed(seed)
    seconds: dict[K, list[float]] = {key: [] for key in keys}
    with torch.inference_mode(), using_threads(threads), undisturbed():
        for key in keys:
            timers[key]()
        # not recorded: fits the number of calls to each timer
        first = {key: max(_fastest(timers[key], 1, clock), 1e-9) for key in keys}
        times = {key: min(MOST_CALLS, max(math.ceil(shortest / first[key]), 1)) for key in keys}
        used = sum((first[key] * times[key] for key in keys), 1e-9)
        rounds = max(int(min(rounds, at_most / used)), min(rounds, FEWEST_ROUNDS))
        for _ in range(rounds):
            for i in torch.randperm(len(keys), generator=generator).tolist():
                seconds[keys[i]].append(_fastest(timers[keys[i]], times[keys[i]], clock))
    return seconds


def _fastest(timer: Timer, times: int, clock: Clock) -> float:
    """Seconds of the fastest of some calls, of those that nothing interrupted; short work gets a few more to be one of them."""
    clean, best, called = math.inf, math.inf, 0
    before = clock.interruptions()
    while called < times or (clean == math.inf and best < SLICE and called < times + MORE_CALLS):
        seconds, called = timer(), called + 1
        after = clock.interruptions()
        best = min(best, seconds)
        if after == before:
            clean = min(clean, seconds)
        before = after
    return best if clean == math.inf else clean


# ---- comparing -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SpeedUp:
    """How many times as fast as the first network another one is, with the interval that a repetition falls into."""

    ratio: float  # above 1: faster than the first
    low: float
    high: float
    busy: str = ""  # what else the machine did meanwhile, if that was much: "other processes used 1.6 of its 2 cores"

    @property
    def measurable(self) -> bool:
        """Whether the interval excludes 1; otherwise the measurement cannot tell which network is faster."""
        return not self.low <= 1.0 <= self.high

    @property
    def known(self) -> bool:
        """Whether the interval is narrow enough for a figure to mean something."""
        return self.high <= TOO_WIDE * self.low

    @property
    def faster(self) -> bool:
        """Whether the interval lies above 1."""
        return self.low > 1.0

    def summary(self) -> str:
        """Return one phrase, such as "1.93x faster (1.85 to 2.01)" or "no measurable speed-up (0.97 to 1.04)"."""
        if not self.known:
            why = f"the machine is busy: {self.busy}; " if self.busy else ""
            return f"{why}speed not known, between {self.low:.2f}x and {self.high:.2f}x"
        if not self.measurable:
            return f"no measurable speed-up ({self.low:.2f} to {self.high:.2f})"
        if self.ratio >= 1:
            return f"{self.ratio:.2f}x faster ({self.low:.2f} to {self.high:.2f})"
        return f"{1 / self.ratio:.2f}x slower ({1 / self.high:.2f} to {1 / self.low:.2f})"


@dataclass(frozen=True, eq=False)
class Compared:
    """Networks timed in turns: seconds (N, R) in every round, and the speed-up of each over the first."""

    seconds: Tensor
    speedups: tuple[SpeedUp, ...]  # one for each network after the first

    @property
    def medians(self) -> tuple[float, ...]:
        """Seconds of each network that agree with the ratios: of the first its median, of each other that by its speed-up."""
        first = float(self.seconds[0].quantile(0.5))
        return (first, *(first / each.ratio for each in self.speedups))


def compare(
    loads: Sequence[Load],
    *,
    threads: int | None = None,
    rounds: tuple[int, int] = COMPARED_ROUNDS,
    at_most: float = LONGEST_COMPARED,
    shortest: float = SHORTEST,
    times_loaded: int = LOADS,
    clock: Clock = CLOCK,
) -> Compared:
    """Time networks in turns, each loaded several times, and compare each to the first.

    The rounds are divided over the loads. They go on, up to the larger number and for `at_most` seconds, while an interval is
    wider than 3 % to either side.
    """
    fewest, most = rounds
    began, others = clock.wall(), clock.used_by_others()
    rows: list[list[list[float]]] = []  # by load: of each network its rounds
    while True:
        timers = dict(enumerate(load() for load in loads))
        each = -(-fewest // times_loaded)
        found = in_rounds(
            timers, threads=threads, rounds=each, shortest=shortest, at_most=at_most / times_loaded, seed=len(rows), clock=clock
        )
        rows.append([found[i] for i in range(len(loads))])
        if len(rows) < times_loaded:
            continue
        elapsed = max(clock.wall() - began, 1e-9)
        busy = _busy(others, elapsed, clock)
        by_network = [[load[i] for load in rows] for i in range(len(loads))]
        speedups = tuple(_speedup(by_network[0], other, busy=busy) for other in by_network[1:])
        narrow = all(one.high / one.low <= (1 + NARROW) ** 2 for one in speedups)
        if narrow or len(rows) * each >= most or elapsed > at_most:
            seconds = [[each for load in network for each in load] for network in by_network]
            return Compared(torch.tensor(seconds, dtype=torch.float64), speedups)


def _busy(others: float | None, elapsed: float, clock: Clock) -> str:
    """What else the machine did since `others` was read; empty if it was little, or is not known."""
    now, cores = clock.used_by_others(), os.cpu_count() or 1
    if others is None or now is None:
        return ""
    used = max(now - others, 0.0) / elapsed
    return f"other processes used {used:.1f} of {cores} cores" if used > CROWDED else ""


def speedup(first: Tensor, other: Tensor) -> SpeedUp:
    """Compare two rows of seconds (R,) of the same rounds, of one load."""
    return _speedup([first.tolist()], [other.tolist()], repeated=0.0)


def _speedup(
    first: Sequence[Sequence[float]], other: Sequence[Sequence[float]], *, repeated: float = REPEATED, busy: str = ""
) -> SpeedUp:
    """The median of the ratios of the rounds, by load, with an interval that holds for a repetition.

    It covers the confidence interval of that median, the medians of all loads, what repetitions differ by on an idle machine,
    and, if the machine was busy, what the fastest rounds say: on an idle machine they agree with all of them.
    """
    ratios = [
        torch.tensor(a, dtype=torch.float64) / torch.tensor(b, dtype=torch.float64) for a, b in zip(first, other, strict=True)
    ]
    every = torch.cat(ratios)
    ratio = float(every.quantile(0.5))
    low, high = median_interval(every)
    said = [low, high, *(float(each.quantile(0.5)) for each in ratios)]
    if busy:
        fast, slow = (torch.tensor([s for row in rows for s in row], dtype=torch.float64) for rows in (other, first))
        said += [float(slow.quantile(q) / fast.quantile(q)) for q in (0.0, 0.1, 0.25)]
    return SpeedUp(ratio, min(said) / (1 + repeated), max(said) * (1 + repeated), busy)


def median_interval(values: Tensor, level: float = LEVEL) -> tuple[float, float]:
    """The interval between two of (R,) values that holds their median with probability `level`, whatever their distribution.

    With too few values for that level it is all of them.
    """
    ordered, count = values.sort().values.tolist(), len(values)
    rank, outside = 0, 2 * 0.5**count  # probability that the median lies outside of the values from `rank` to its mirror image
    while rank + 1 < count / 2 and outside + (more := 2 * math.comb(count, rank + 1) * 0.5**count) <= 1 - level:
        rank, outside = rank + 1, outside + more
    return ordered[rank], ordered[count - 1 - rank]


# ---- the process -----------------------------------------------------------------------------------------------------------


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
