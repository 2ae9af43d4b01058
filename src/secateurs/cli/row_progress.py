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

    def left(self, entries: Iterable[Entry], spent: float = 0.0) -> str:
        """How long the rows to come will take, in words, `spent` seconds after the first of them began."""
        opened, total, unknown, sure = set(self.opened), 0.0, 0, True
        for entry in entries:
            opens = (entry.method, entry.seed) not in opened
            opened.add((entry.method, entry.seed))
            seconds, alike = self._expected(entry.method, entry.budget.name, opens)
            unknown, total, sure = unknown + (seconds is None), total + (seconds or 0.0), sure and alike
        if not total:
            return ""
        more = f" and {unknown} row{'s' * (unknown > 1)} with a budget that none has had yet" if unknown else ""
        return f"{'about' if sure else 'at most'} {clock(max(total - spent, 0.0))}{more} left"

    def _expected(self, method: str, budget: str, opens: bool) -> tuple[float | None, bool]:
        """Seconds of a row, from those of rows as like it as there are; False: a later row is judged by first ones."""
        rows = [(who, first, seconds) for (who, what, first), many in self.taken.items() if what == budget for seconds in many]
        own_kind = [seconds for who, first, seconds in rows if who == method and first == opens]
        kind = [seconds for _, first, seconds in rows if first == opens]
        own = [seconds for who, _, seconds in rows if who == method]
        alike = own_kind or kind or own or [seconds for _, _, seconds in rows]
        return (mean(alike) if alike else None), opens or bool(own_kind or kind) or not alike


class RowWatcher:
    """Turns rows and what methods say into what a display shows."""

    def __init__(self, shown: Display, left: Sequence[Entry], known: Iterable[Row]) -> None:
        self.shown, self.left, self.total = shown, list(left), len(left)
        self.forecast = RowForecast()
        for row in known:
            self.forecast.add(row.method, row.budget_name, row.seed, row.search_seconds + row.training_seconds)
        self.began: float | None = None  # of the row at hand

    @property
    def number(self) -> int:
        """Of the row at hand, from 1."""
        return self.total - len(self.left) + 1

    def start(self, entry: Entry) -> Callable[[Progress], None]:
        """A row begins; gives what shows the method's progress."""
        self.began = time.monotonic()
        headline = f"row {self.number} of {self.total}: {words(entry)}"
        self.shown.update(Status(headline, "starting", 0, 1, self._left()))

        def watch(event: Progress) -> None:
            what = _PHASES.get(event.phase, event.phase)
            site = f", {event.site}" if event.site else ""
            self.shown.update(Status(headline + site, what, event.done, max(event.done, event.total), self._left()))

        return watch

    def end(self, entry: Entry, row: Row | None, failure: str = "") -> None:
        """A row is there, or is made elsewhere (None), or could not be made."""
        seconds = time.monotonic() - (self.began or 0.0)
        about = f"row {self.number} of {self.total}, {words(entry)}"
        self.left.remove(entry)
        self.began = None
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
        return self.forecast.left(self.left, 0.0 if self.began is None else time.monotonic() - self.began)


def words(entry: Entry) -> str:
    """A row to be made, for people."""
    return f"{entry.method}, {100 * entry.target:g} % of the MACs, budget {entry.budget.name}, seed {entry.seed}"
