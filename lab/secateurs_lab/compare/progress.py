"""Progress of comparisons on the command line."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from statistics import mean
from typing import TYPE_CHECKING

from secateurs._util.terminal import clock, percent, warn
from secateurs.report.progress import PHASES, Display, Status

if TYPE_CHECKING:
    from secateurs.pruning.results import Progress as Event
    from secateurs_lab.compare.rows import Entry, Row

_ROW_PHASES = PHASES | {"finetune": "training between the cuts, step", "retrain": "training after the cuts, step"}


class RowWatcher:
    """Turns the rows of a comparison, and the events of its methods, into what a display shows."""

    def __init__(self, shown: Display, left: Sequence[Entry], known: Iterable[Row]) -> None:
        self.shown, self.left, self.total = shown, list(left), len(left)
        self.seconds: dict[str, list[float]] = defaultdict(list)  # of rows by budget, which decides most of their time
        for row in known:
            self.seconds[row.budget_name].append(row.search_seconds + row.training_seconds)
        self.began = time.monotonic()  # of the current row

    def start(self, entry: Entry) -> Callable[[Event], None]:
        """Begin a row; returns the callback that shows the method's events."""
        self.began = time.monotonic()
        headline = f"{self._number()}: {words(entry)}"
        self.shown.update(Status(headline, "starting", 0, 1, self.time_left()))

        def watch(event: Event) -> None:
            site = f", {event.site}" if event.site else ""
            what = _ROW_PHASES.get(event.phase, event.phase)
            self.shown.update(Status(headline + site, what, event.done, max(event.done, event.total), self.time_left()))

        return watch

    def end(self, entry: Entry, row: Row | None, failure: str = "") -> None:
        """Show a row that is made, that another process makes (None), or that failed."""
        about, seconds = f"{self._number()}, {words(entry)}", time.monotonic() - self.began
        self.left.remove(entry)
        if failure:
            warn(f"{words(entry)}: {failure}")
        elif row is None:
            self.shown.line(f"{about}: another process is making it")
        else:
            self.seconds[row.budget_name].append(seconds)
            self.began = time.monotonic()
            accuracies = f"{percent(row.test.before, 2)} → {percent(row.test.after, 2)}"
            result = f"{percent(row.macs.removed)} of the MACs removed, test accuracy {accuracies}"
            self.shown.line(", ".join(part for part in (f"{about}: {result}; {clock(seconds)}", self.time_left()) if part))

    def time_left(self) -> str:
        """How long the missing rows will take if each takes the mean time of its budget, in words; empty if one is unknown."""
        if not self.left or not all(self.seconds.get(entry.budget.name) for entry in self.left):
            return ""
        expected = [mean(self.seconds[entry.budget.name]) for entry in self.left]
        return f"roughly {clock(sum(expected) - min(expected[0], time.monotonic() - self.began))} left"

    def _number(self) -> str:
        return f"row {self.total - len(self.left) + 1} of {self.total}"


def words(entry: Entry) -> str:
    """A row to be made, for people."""
    return f"{entry.method}, {100 * entry.target:g} % of the MACs, budget {entry.budget.name}, seed {entry.seed}"
