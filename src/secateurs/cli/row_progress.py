"""What is shown while the rows of a comparison are made, with a forecast from the rows that are there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import TYPE_CHECKING

from secateurs.cli.progress import Display, Status
from secateurs.cli.terminal import clock, percent, warn

if TYPE_CHECKING:
    from secateurs.experiments.comparison import Entry
    from secateurs.experiments.comparison_rows import Row
    from secateurs.steps import Progress

_PHASES = {
    "score": "scoring masks",
    "search": "searching the cut",
    "divide": "dividing the cuts, trial",
    "finetune": "training between the cuts, step",
    "retrain": "training after the cuts, step",
}
_LAST = "retrain"


@dataclass
class RowForecast:
    """Predicts the seconds of rows from those of rows that were made.

    What a method measures is shared by its targets and budgets, so its first row with a seed, the opening one, is told apart.
    """

    taken: dict[tuple[str, str, bool], list[float]] = field(default_factory=dict)  # by method, budget, whether it opened
    opened: set[tuple[str, int]] = field(default_factory=set)  # method and seed

    def add(self, method: str, budget: str, seed: int, seconds: float) -> None:
        """A row was made."""
        self.taken.setdefault((method, budget, (method, seed) not in self.opened), []).append(seconds)
        self.opened.add((method, seed))

    def left(self, entries: Sequence[Entry], spent: float = 0.0, phase: float | None = None, *, last: bool = False) -> str:
        """How long the rows to come will take, in words, `spent` seconds after the first of them began.

        `phase` are the seconds that the phase at hand has yet to take, if it goes on at its own pace: the row will not be
        there before, whatever others took, nor later if it is the last one.
        """
        opened, total, unknown, sure = set(self.opened), 0.0, 0, True
        for place, entry in enumerate(entries):
            opens = (entry.method, entry.seed) not in opened
            opened.add((entry.method, entry.seed))
            seconds, alike = self._expected(entry.method, entry.budget.name, opens)
            if place == 0 and phase is not None:
                alike = last or (alike and seconds is not None)
                seconds = phase if last else max((seconds or 0.0) - spent, phase)
            elif place == 0 and seconds is not None:
                seconds = max(seconds - spent, 0.0)
            unknown, total, sure = unknown + (seconds is None), total + (seconds or 0.0), sure and alike
        if not total:
            return ""
        more = f" and {unknown} row{'s' * (unknown > 1)} with a budget that none has had yet" if unknown else ""
        return f"{'about' if sure else 'roughly'} {clock(total)}{more} left"

    def _expected(self, method: str, budget: str, opens: bool) -> tuple[float | None, bool]:
        """Seconds of a row, from those of rows as like it as there are; False: those of another kind or method."""
        rows = [(who, first, seconds) for (who, what, first), many in self.taken.items() if what == budget for seconds in many]
        own_kind = [seconds for who, first, seconds in rows if who == method and first == opens]
        kind = [seconds for _, first, seconds in rows if first == opens]
        own = [seconds for who, _, seconds in rows if who == method]
        alike = own_kind or kind or own or [seconds for _, _, seconds in rows]
        return (mean(alike) if alike else None), bool(own_kind) or not alike


@dataclass
class Pace:
    """How fast the phase at hand goes, by the sites or units of it that are done; to look at all sites is one phase."""

    now: Callable[[], float] = time.monotonic
    phase: str = ""
    first: tuple[int, float] = (0, 0.0)  # units done when the phase was seen first, and when that was
    latest: tuple[int, float] = (0, 0.0)  # the same for the unit that was done last
    total: int = 0

    def see(self, event: Progress) -> None:
        """The method has said where it is."""
        phase, done, total = event.phase, event.done, event.total
        if event.number:  # masks or looks at a site say little of the other sites
            phase, done, total = "sites", event.number - 1, event.sites
        if phase != self.phase or done < self.latest[0]:  # another one, or the sites once more
            self.phase, self.first, self.latest = phase, (done, self.now()), (done, self.now())
        elif done > self.latest[0]:
            self.latest = (done, self.now())
        self.total = total

    def left(self) -> float | None:
        """Seconds to the end of the phase; None when nothing is known."""
        units, seconds = (late - early for late, early in zip(self.latest, self.first, strict=True))
        if not units:
            return None
        return max(seconds / units * (self.total - self.latest[0]) - (self.now() - self.latest[1]), 0.0)


class RowWatcher:
    """Turns rows and what methods say into what a display shows."""

    def __init__(self, shown: Display, left: Sequence[Entry], known: Iterable[Row]) -> None:
        self.shown, self.left, self.total = shown, list(left), len(left)
        self.forecast = RowForecast()
        for row in known:
            self.forecast.add(row.method, row.budget_name, row.seed, row.search_seconds + row.training_seconds)
        self.began: float | None = None  # of the row at hand
        self.pace = Pace()

    @property
    def number(self) -> int:
        """Of the row at hand, from 1."""
        return self.total - len(self.left) + 1

    def start(self, entry: Entry) -> Callable[[Progress], None]:
        """A row begins; gives what shows the method's progress."""
        self.began, self.pace = time.monotonic(), Pace()
        headline = f"row {self.number} of {self.total}: {words(entry)}"
        self.shown.update(Status(headline, "starting", 0, 1, self._left()))

        def watch(event: Progress) -> None:
            self.pace.see(event)
            what = _PHASES.get(event.phase, event.phase)
            site = f", {event.site}" if event.site else ""
            self.shown.update(Status(headline + site, what, event.done, max(event.done, event.total), self._left()))

        return watch

    def end(self, entry: Entry, row: Row | None, failure: str = "") -> None:
        """A row is there, or is made elsewhere (None), or could not be made."""
        seconds = time.monotonic() - (self.began or 0.0)
        about = f"row {self.number} of {self.total}, {words(entry)}"
        self.left.remove(entry)
        self.began, self.pace = None, Pace()
        if failure:
            warn(f"{words(entry)}: {failure}")
        elif row is None:
            self.shown.line(f"{about}: another process is making it")
        else:
            self.forecast.add(row.method, row.budget_name, row.seed, seconds)
            tail = self._left()
            self.shown.line(
                f"{about}: {percent(row.macs.removed)} of the MACs removed, test accuracy {percent(row.test.before, 2)} → "
                f"{percent(row.test.after, 2)}; {clock(seconds)}" + (f", {tail}" if tail else "")
            )

    def _left(self) -> str:
        spent = 0.0 if self.began is None else time.monotonic() - self.began
        return self.forecast.left(self.left, spent, self.pace.left(), last=self.pace.phase == _LAST)


def words(entry: Entry) -> str:
    """A row to be made, for people."""
    return f"{entry.method}, {100 * entry.target:g} % of the MACs, budget {entry.budget.name}, seed {entry.seed}"
