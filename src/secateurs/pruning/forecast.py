"""How much longer a run takes: its phases with what they are expected to take, corrected by what was measured.

Pure maths: a forecast is told where the run is, and reads the clock that it is given.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

Kind = Literal["site", "solve", "trial", "table", "timer", "training", "measure"]
"""What a unit does: prices of one kind err alike, so how far they are off in one phase says how far they are in another."""

OVERRUN = 0.25  # of the time that a unit took so far is left at least: what is late will not end at once
_TRUST = 0.03  # of all that is expected: as much as that must be measured before prices are corrected by half
_OTHERS = 0.4  # exponent: what other kinds tell of one that was not measured; a machine may be slow, or a price wrong


@dataclass(frozen=True)
class Phase:
    """A part of a run, with the seconds that each of its units is expected to take, in their order."""

    name: str
    seconds: tuple[float, ...]
    kind: Kind = "site"

    @property
    def total(self) -> float:
        """Seconds of all units."""
        return math.fsum(self.seconds)


class Forecast:
    """The time that is left of a run whose phases come in the order given; `report` says which of them it is in.

    A phase ends, whether or not all its units were done, when a later one is reported. A phase that is not among them is part
    of the unit that is being worked on.
    """

    def __init__(self, phases: Sequence[Phase], clock: Callable[[], float] = time.monotonic) -> None:
        self.phases, self.clock = [phase for phase in phases if phase.seconds], clock
        self._place, self._done = -1, 0  # the phase that is worked on, and its units that are done
        self._since = clock()  # the beginning of the unit that is worked on
        self._measured: dict[int, tuple[float, float]] = {}  # by phase: seconds of the units done, and what was expected

    def report(self, name: str, done: int, total: int) -> None:
        """`done` of `total` units of a phase are done."""
        place = self._find(name, done)
        if place is None:
            return
        if place != self._place:
            self._count(self._done + 1)
            self._place, self._done = place, 0
            self._since = self.clock()
        self._resize(max(total, done, 1))
        if done > self._done:
            self._count(done)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time that passes: it is the caller's own."""
        began = self.clock()
        try:
            yield
        finally:
            self._since += self.clock() - began

    @property
    def left(self) -> float:
        """Seconds to the end of the run."""
        found = math.fsum(self._pace(phase.kind) * phase.total for phase in self.phases[self._place + 1 :])
        if self._place < 0:
            return found
        now, *others = self.phases[self._place].seconds[self._done :] or (0.0,)
        scale = self._scale()
        return found + scale * math.fsum(others) + left_of(scale * now, self.clock() - self._since)

    def _find(self, name: str, done: int) -> int | None:
        if self._place >= 0 and self.phases[self._place].name == name and done >= self._done:
            return self._place
        return next((i for i in range(self._place + 1, len(self.phases)) if self.phases[i].name == name), None)

    def _resize(self, units: int) -> None:
        """Take the number of units that the run says there are; more of them cost what the others do on average."""
        phase = self.phases[self._place]
        if units != len(phase.seconds):
            more = (phase.total / len(phase.seconds),) * (units - len(phase.seconds))
            self.phases[self._place] = Phase(phase.name, (*phase.seconds[:units], *more), phase.kind)

    def _count(self, done: int) -> None:
        """The units up to `done` of the current phase took the time since the last ones."""
        now = self.clock()
        if self._place >= 0:
            spent, expected = self._measured.get(self._place, (0.0, 0.0))
            units = self.phases[self._place].seconds[self._done : done]
            self._measured[self._place] = (spent + now - self._since, expected + math.fsum(units))
        self._done, self._since = done, now

    def _pace(self, kind: Kind) -> float:
        """What the phases of a kind took, relative to what was expected; of one that had none yet as other kinds tell.

        Timers run for as long as they are told to: they tell nothing of others.
        """
        kinds = [phase.kind for phase in self.phases]
        working = [place for place, each in enumerate(kinds) if each not in ("table", "timer")]
        prior = 1.0 if kind in ("table", "timer") else self._ratio(working, 1.0) ** _OTHERS
        return self._ratio([place for place, each in enumerate(kinds) if each == kind], prior)

    def _ratio(self, places: Sequence[int], prior: float) -> float:
        """Seconds measured in phases over those expected, `prior` before any are."""
        trust = _TRUST * math.fsum(self.phases[place].total for place in places)
        known = [self._measured[place] for place in places if place in self._measured]
        spent, expected = math.fsum(one for one, _ in known), math.fsum(one for _, one in known)
        return (trust * prior + spent) / (trust + expected) if trust + expected > 0 else prior

    def _scale(self) -> float:
        """The same for the current phase: its own units tell most, and before there are any, those of its kind do."""
        phase, (spent, expected) = self.phases[self._place], self._measured.get(self._place, (0.0, 0.0))
        unit = phase.total / len(phase.seconds)
        return (unit * self._pace(phase.kind) + spent) / (unit + expected) if unit + expected > 0 else 1.0


def left_of(expected: float, elapsed: float) -> float:
    """What is left of work that was expected to take so many seconds, after some of them, or more than all, have passed."""
    return max(expected - elapsed, OVERRUN * elapsed)
