"""The statistics of the timer on made-up times, and the timer on a clock that another process takes slices of."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from nets import seeded
from secateurs.speed.timing import Clock, Load, SpeedUp, compare, in_rounds, median_interval, speedup, timed


def noisy(center: float, seed: int, repeats: int = 60) -> Tensor:
    generator = seeded(seed)
    return center * (1 + 0.05 * torch.randn(repeats, dtype=torch.float64, generator=generator).abs())


def test_a_constant_ratio_has_an_interval_of_no_width() -> None:
    slow = noisy(2.0, seed=0)
    compared = speedup(slow, slow / 2.5)
    assert (compared.ratio, compared.low, compared.high) == pytest.approx((2.5, 2.5, 2.5))
    assert compared.measurable


def test_a_drift_that_hits_both_networks_does_not_hide_their_ratio() -> None:
    drift = torch.linspace(1, 5, 60, dtype=torch.float64)
    compared = speedup(2 * drift * noisy(1, seed=0), drift * noisy(1, seed=1))
    assert 1.8 < compared.low < compared.ratio < compared.high < 2.2


def test_equal_networks_are_rarely_found_to_differ() -> None:
    verdicts = [speedup(noisy(1, seed), noisy(1, 1000 + seed)).measurable for seed in range(100)]
    assert sum(verdicts) <= 12  # 5 expected of a 95 % interval


def test_the_interval_covers_the_true_ratio() -> None:
    true = 1.3
    intervals = [speedup(true * noisy(1, seed), noisy(1, 1000 + seed)) for seed in range(100)]
    assert sum(interval.low <= true <= interval.high for interval in intervals) >= 88


@pytest.mark.parametrize(
    ("compared", "words"),
    [
        (SpeedUp(1.93, 1.85, 2.01), "1.93x faster (1.85 to 2.01)"),
        (SpeedUp(0.5, 0.45, 0.55), "2.00x slower (1.82 to 2.22)"),
        (SpeedUp(1.02, 0.97, 1.04), "no measurable speed-up (0.97 to 1.04)"),
        (SpeedUp(3.4, 3.12, 106.28), "speed not known, between 3.12x and 106.28x"),
    ],
)
def test_summary_in_words(compared: SpeedUp, words: str) -> None:
    assert compared.summary() == words


@pytest.mark.parametrize(("count", "rank"), [(6, 0), (10, 1), (25, 7), (50, 17), (100, 39)])
def test_the_interval_of_a_median_is_that_of_the_tables(count: int, rank: int) -> None:
    """Ranks of the tables for 95 % (Conover, Practical Nonparametric Statistics): 2 of 10, 8 of 25, 18 of 50, 40 of 100."""
    assert median_interval(torch.randperm(count).double()) == (rank, count - 1 - rank)


class Shared(Clock):
    """A core of which another process takes slices: after every `every` seconds of work it runs for `slices` seconds.

    Work after a slice takes `cold` more, until the caches are warm again.
    """

    def __init__(self, slices: float, every: float, cold: float = 0.0) -> None:
        self.slices, self.every, self.cold = slices, every, cold
        self.walked, self.worked, self.left, self.taken = 0.0, 0.0, every, 0

    def wall(self) -> float:
        return self.walked

    def processor(self) -> float:
        return self.worked

    def interruptions(self) -> int:
        return self.taken

    def used_by_others(self) -> float:
        return self.taken * self.slices

    def waits(self) -> int:
        return 0

    def work(self, seconds: float) -> None:
        while seconds > 0:
            done = min(seconds, self.left)
            self.walked += done
            self.worked += done
            self.left -= done
            seconds -= done
            if not self.left:
                self.walked += self.slices
                self.taken += 1
                self.left, seconds = self.every, seconds + self.cold


def loads(clock: Shared, *seconds: float, alone: bool) -> list[Load]:
    return [lambda each=each: timed(lambda: clock.work(each), alone=alone, clock=clock) for each in seconds]


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize(("dense", "pruned"), [(0.0004, 0.0002), (0.002, 0.0016), (0.0031, 0.0031)])
def test_slices_of_another_process_are_not_counted(dense: float, pruned: float, alone: bool) -> None:
    """Slices of 12 ms after every 5 ms, which four of five comparisons of wall times would be ruined by."""
    clock = Shared(slices=0.012, every=0.005, cold=0.0001)
    found = compare(loads(clock, dense, pruned, alone=alone), clock=clock).speedups[0]
    assert found.low <= dense / pruned <= found.high
    assert found.ratio == pytest.approx(dense / pruned, rel=0.02)
    assert found.known
    assert found.busy == f"other processes used 0.7 of {_cores()} cores"


def test_calls_that_are_longer_than_what_others_leave_say_that_the_machine_is_busy() -> None:
    """Of calls that are always interrupted, a multiple of a slice too much is counted: no figure without a warning."""
    clock = Shared(slices=0.012, every=0.005)
    found = compare(loads(clock, 0.0163, 0.0087, alone=False), clock=clock).speedups[0]
    assert "the machine is busy: other processes used" in found.summary() or found.low <= 163 / 87 <= found.high
    by_processor = compare(loads(clock, 0.0163, 0.0087, alone=True), clock=clock).speedups[0]
    assert by_processor.low <= 163 / 87 <= by_processor.high


def test_an_idle_machine_is_not_called_busy() -> None:
    clock = Shared(slices=0.012, every=math.inf)
    found = compare(loads(clock, 0.003, 0.002, alone=False), clock=clock).speedups[0]
    assert found.busy == ""
    assert (found.ratio, found.low, found.high) == pytest.approx((1.5, 1.5 / 1.015, 1.5 * 1.015))


def test_networks_are_loaded_several_times_and_an_interval_covers_all_loads() -> None:
    """Where memory lies makes a difference that no repetition within one load shows."""
    clock, slower = Shared(slices=0.0, every=math.inf), iter([1.0, 1.04, 0.98])

    def load() -> object:
        seconds = 0.001 * next(slower)
        return timed(lambda: clock.work(seconds), clock=clock)

    first, _ = loads(clock, 0.002, 0.002, alone=True)
    found = compare([first, load], clock=clock, rounds=(24, 24)).speedups[0]  # type: ignore[list-item]
    assert found.low < 2 / 1.04
    assert found.high > 2 / 0.98


def test_rounds_run_all_in_random_order() -> None:
    order: list[int] = []
    in_rounds({which: lambda which=which: order.append(which) or 0.02 for which in range(3)}, rounds=20)  # type: ignore[func-returns-value]
    rounds = [tuple(order[start : start + 3]) for start in range(6, len(order), 3)]
    assert all(sorted(each) == [0, 1, 2] for each in rounds)
    assert len(set(rounds)) > 3
    assert any(one != other for one, other in pairwise(rounds))


def test_rounds_go_on_while_an_interval_is_wide() -> None:
    clock, generator = Shared(slices=0.0, every=math.inf), seeded(0)

    def noisy_work() -> None:
        clock.work(0.02 * (1 + 0.3 * float(torch.rand(1, generator=generator))))

    noisy_loads: list[Load] = [lambda: timed(noisy_work, clock=clock)] * 2
    steady = compare(loads(clock, 0.02, 0.02, alone=True), clock=clock, rounds=(24, 72))
    assert steady.seconds.shape == (2, 24)
    assert compare(noisy_loads, clock=clock, rounds=(24, 72)).seconds.shape == (2, 72)
    assert compare(noisy_loads, clock=clock, rounds=(24, 720), at_most=2.0).seconds.shape[1] < 72


def test_medians_agree_with_the_ratio() -> None:
    clock = Shared(slices=0.012, every=0.005)
    found = compare(loads(clock, 0.004, 0.001, alone=True), clock=clock)
    dense, pruned = found.medians
    assert dense / pruned == pytest.approx(found.speedups[0].ratio)


def _cores() -> int:
    import os

    return os.cpu_count() or 1
