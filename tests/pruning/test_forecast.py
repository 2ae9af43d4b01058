"""The time that is left of a run, by a clock of the test's own: phases whose true seconds are known."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest

from secateurs.pruning.forecast import Forecast, Phase

Truth = Sequence[tuple[str, Sequence[float]]]


class Watched:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def lived(phases: Sequence[Phase], truth: Truth, *, tick: float = 1.0) -> Iterator[tuple[float, float]]:
    """A run through phases of true seconds: the time and what is said to be left, at every tick."""
    clock = Watched()
    forecast = Forecast(phases, clock)
    for name, seconds in truth:
        for done, each in enumerate(seconds):
            forecast.report(name, done, len(seconds))
            end = clock.now + each
            while clock.now < end:
                yield clock.now, forecast.left
                clock.now = min(clock.now + tick, end)


def error(phases: Sequence[Phase], truth: Truth) -> float:
    """The sum of |estimate - truth| from the first fifth of a run on, as a share of the sum of the truth."""
    whole = math.fsum(math.fsum(seconds) for _, seconds in truth)
    told = [(whole - now, left) for now, left in lived(phases, truth) if now >= whole / 5]
    return sum(abs(left - true) for true, left in told) / sum(true for true, _ in told)


PRICED = (
    Phase("times", (2.0,) * 20, "timer"),
    Phase("survey", (10.0,)),
    Phase("curve", (5.0,) * 12),
    Phase("divide", (8.0,) * 8, "trial"),
    Phase("certify", (8.0,) * 13, "trial"),
    Phase("faster", (6.0,) * 2, "timer"),
    Phase("retrain", (30.0,) * 2, "training"),
    Phase("measure", (4.0, 4.0), "measure"),
)
AS_PRICED = [(phase.name, phase.seconds) for phase in PRICED]


def changed(**factors: float) -> Truth:
    return [(name, [factors.get(name, factors.get("all", 1.0)) * each for each in seconds]) for name, seconds in AS_PRICED]


def test_a_run_as_priced_is_told_to_the_second() -> None:
    told = list(lived(PRICED, AS_PRICED))
    whole = sum(phase.total for phase in PRICED)
    assert told[0] == (0.0, whole)
    assert all(left >= whole - now - 1e-6 for now, left in told)
    assert error(PRICED, AS_PRICED) < 0.05


@pytest.mark.parametrize(
    "truth",
    [
        changed(all=2.0),  # a busy machine
        changed(all=0.6),
        changed(times=0.0),  # layers that were timed before
        changed(times=4.0),
        changed(curve=2.0, survey=2.0),
        changed(certify=0.5),
        changed(faster=3.0),
        changed(divide=2.0, certify=2.0),
        [*AS_PRICED[:4], ("certify", (8.0,) * 6), *AS_PRICED[5:]],  # refused early
        [*AS_PRICED[:4], ("certify", (8.0,) * 20), *AS_PRICED[5:]],
        [("times", (0.5,) * 80), *AS_PRICED[1:]],
    ],
)
def test_prices_that_are_wrong_are_corrected_by_what_is_measured(truth: Truth) -> None:
    assert error(PRICED, truth) < 0.3


def test_what_is_late_is_never_said_to_end_at_once() -> None:
    """The knapsack that was said to take a second and took half an hour."""
    truth = [("survey", (10.0,)), ("solve", (1800.0,)), ("measure", (5.0,))]
    priced = [Phase("survey", (10.0,)), Phase("solve", (1.0,)), Phase("measure", (5.0,))]
    late = [left for now, left in lived(priced, truth) if 60 < now < 1800]
    assert min(late) > 15
    assert late == sorted(late)


def test_what_is_left_falls_while_units_are_done_and_while_one_takes_its_time() -> None:
    told = [left for _, left in lived(PRICED, AS_PRICED)]
    assert sum(after > before for before, after in pairwise(told)) <= 2 * len(AS_PRICED)
    assert told[-1] < 5


def test_a_phase_within_another_is_part_of_its_unit() -> None:
    clock = Watched()
    forecast = Forecast([Phase("divide", (10.0, 10.0))], clock)
    forecast.report("divide", 0, 2)
    clock.now = 4.0
    forecast.report("trial", 3, 5)  # training within the first trial
    assert forecast.left == pytest.approx(16.0)


def test_a_phase_may_come_again_for_each_position_that_is_compared() -> None:
    clock = Watched()
    forecast = Forecast([Phase("curve", (2.0,) * 2), Phase("solve", (1.0,)), Phase("curve", (3.0,) * 2)], clock)
    for name, done, left in (("curve", 0, 11), ("curve", 1, 9), ("solve", 0, 7), ("curve", 0, 6), ("curve", 1, 3)):
        forecast.report(name, done, 1 if name == "solve" else 2)
        assert forecast.left == pytest.approx(left)
        clock.now += {"solve": 1.0}.get(name, 2.0 if clock.now < 4 else 3.0)


def test_time_between_steps_that_is_the_callers_own_does_not_count() -> None:
    clock = Watched()
    forecast = Forecast([Phase("cut", (2.0,) * 10)], clock)
    for done in range(9):
        forecast.report("cut", done, 10)
        clock.now += 2.0
        forecast.report("cut", done + 1, 10)
        with forecast.paused():
            clock.now += 100.0
    assert forecast.left == pytest.approx(2.0)
