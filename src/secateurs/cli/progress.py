"""Live progress on a terminal, plain lines elsewhere, nothing where a machine reads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import mean
from typing import TYPE_CHECKING, Protocol

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from secateurs.cli.terminal import clock, percent, say, stderr, warn

if TYPE_CHECKING:
    from secateurs.config import Recipe
    from secateurs.methods.compare.rows import Row
    from secateurs.methods.compare.run import Entry
    from secateurs.pruning.results import Progress, Step
    from secateurs.training import EpochRecord


_HEARTBEAT_SECONDS = 30.0  # between plain lines within one step
_PHASES = {
    "score": "scoring masks",
    "search": "searching the cut",
    "divide": "dividing the cuts, trial",
    "finetune": "fine-tuning, epoch",
    "retrain": "retraining, epoch",
}


@dataclass(frozen=True)
class Status:
    """What is going on: `done` of `total` units of `what`, between a headline and a footer."""

    headline: str
    what: str
    done: int
    total: int
    footer: str = ""


class Display(Protocol):
    """Shows what is going on, and lines that stay."""

    def update(self, status: Status) -> None:
        """Show this instead of what was shown before."""

    def line(self, text: str) -> None:
        """Print a line that stays."""


@contextmanager
def display(*, quiet: bool = False) -> Iterator[Display]:
    """The display that suits where stderr goes: live on a terminal, plain lines elsewhere, none when `quiet`."""
    console = stderr()
    if quiet:
        yield Silence()
    elif console.is_terminal:
        with Live(console=console, transient=True, refresh_per_second=8) as live:
            yield LiveDisplay(live)
    else:
        yield LineDisplay()


class Silence:
    """Shows nothing."""

    def update(self, status: Status) -> None:
        """Show nothing."""

    def line(self, text: str) -> None:
        """Print nothing."""


class LiveDisplay:
    """A bar that moves, below the lines that stay."""

    def __init__(self, live: Live) -> None:
        self.live = live

    def update(self, status: Status) -> None:
        """Redraw the bar."""
        self.live.update(rendered(status))

    def line(self, text: str) -> None:
        """Print above the bar."""
        say(text, console=self.live.console)


class LineDisplay:
    """Plain lines; a status becomes one only when nothing has been printed for a while."""

    def __init__(self, every: float | None = None) -> None:
        self.every = _HEARTBEAT_SECONDS if every is None else every
        self.last = time.monotonic()

    def update(self, status: Status) -> None:
        """Print the status if it is time for a sign of life."""
        if time.monotonic() - self.last >= self.every:
            tail = f"; {status.footer}" if status.footer else ""
            self.line(f"{status.headline}: {status.what} {status.done} of {status.total}{tail}")

    def line(self, text: str) -> None:
        """Print at once."""
        self.last = time.monotonic()
        say(text, console=stderr())


def rendered(status: Status) -> Group:
    """A status as two or three rows of a terminal."""
    row = Table.grid(padding=(0, 1))
    bar = ProgressBar(total=max(status.total, 1), completed=min(status.done, status.total), width=30)
    row.add_row(Text(f"  {status.what}"), bar, Text(f"{status.done} of {status.total}"))
    rows: list[RenderableType] = [Text(status.headline, style="bold"), row]
    if status.footer:
        rows.append(Text(f"  {status.footer}", style="dim"))
    return Group(*rows)


@dataclass
class Forecast:
    """Predicts the seconds that are left from how long sites and epochs have taken so far."""

    rounds: int
    retrain_epochs: int = 0
    sites: list[float] = field(default_factory=list)  # seconds of each finished site
    epoch: float | None = None  # seconds of the latest epoch of training

    def left(self, event: Progress, round_number: int, elapsed: float) -> float | None:
        """Seconds to the end of the run, `elapsed` after the site at hand began; None when nothing is known yet."""
        if event.phase == "retrain":
            return None if self.epoch is None else (event.total - event.done) * self.epoch
        known = sum(self.sites) / len(self.sites) if self.sites else None
        if known is None and event.phase == "score" and event.done:
            known = elapsed * event.total / event.done
        if known is None:
            return None
        to_come = event.sites - event.number + (self.rounds - 1 - round_number) * event.sites
        return max(known - elapsed, 0.0) + to_come * known + self.retrain_epochs * (self.epoch or 0.0)


class RunWatcher:
    """Turns the events and steps of a run into what a display shows."""

    def __init__(self, shown: Display, recipe: Recipe, steps: Sequence[Step] = ()) -> None:
        self.shown, self.rounds = shown, recipe.rounds
        may_stop_early = recipe.rounds > 1 or recipe.target_parameters is not None or recipe.target_macs is not None
        self.about = "at most" if may_stop_early else "about"
        self.forecast = Forecast(recipe.rounds, recipe.retrain.epochs if recipe.retrain else 0, [s.seconds for s in steps])
        self.latest: Step | None = steps[-1] if steps else None
        self.began = self.marked = time.monotonic()
        self.place = (self.latest.round, 0) if self.latest else (0, 0)  # round and number of the site at hand
        self.site, self.sites = "", 0
        self.stepped = False  # the site at hand has had its step

    def watch(self, event: Progress) -> None:
        """Show an event of the run."""
        now = time.monotonic()
        if event.phase in ("finetune", "retrain"):
            self.forecast.epoch = now - self.marked
        self.marked = now
        self._place(event)
        left = self.forecast.left(event, self.place[0], now - self.began)
        footer = [self._so_far()] if self.latest else []
        footer += [f"{self.about} {clock(left)} left"] if left is not None else []
        self.shown.update(
            Status(self._headline(event), _PHASES[event.phase], event.done, max(event.done, event.total), ", ".join(footer))
        )

    def step(self, step: Step) -> None:
        """Show a finished step."""
        self.latest, self.stepped = step, True
        self.forecast.sites.append(step.seconds)
        self.began = self.marked = time.monotonic()
        self.place = (step.round, self.place[1])
        where = f"{self._round(step.round)}site {self.place[1]} of {self.sites}, {step.site}"
        self.shown.line(f"{where}: {step.channels} → {step.kept} filters; {self._so_far()}; {step.seconds:.1f} s")

    def _place(self, event: Progress) -> None:
        if event.number > self.place[1] > 0 and not self.stepped:  # its curve is measured; the cuts come later
            self.forecast.sites.append(time.monotonic() - self.began)
            self.began = time.monotonic()
        self.stepped = self.stepped and (event.number or self.place[1]) == self.place[1]
        self.place = (event.round, event.number or self.place[1])
        self.site, self.sites = event.site or self.site, event.sites

    def _headline(self, event: Progress) -> str:
        if event.phase == "retrain":
            return "All cuts are made"
        return f"{self._round(self.place[0])}site {self.place[1]} of {self.sites}, {self.site}"

    def _round(self, number: int) -> str:
        return f"round {number + 1} of {self.rounds}, " if self.rounds > 1 else ""

    def _so_far(self) -> str:
        assert self.latest is not None
        step = self.latest
        return (
            f"accuracy {percent(step.accuracy, 2)}, removed {percent(step.parameters_removed)} of the parameters, "
            f"{percent(step.macs_removed)} of the MACs"
        )


class TrainWatcher:
    """Turns the steps and epochs of a training into what a display shows."""

    def __init__(self, shown: Display, epochs: int, title: str, *, lines: bool = True) -> None:
        self.shown, self.epochs, self.title, self.lines = shown, epochs, title, lines
        self.began = time.monotonic()
        self.first: int | None = None
        self.latest = ""

    def step(self, done: int, total: int) -> None:
        """Show an optimiser step."""
        now = time.monotonic()
        if self.first is None:
            self.first, self.began = done, now
        footer = [self.latest] if self.latest else []
        if done > self.first:
            footer.append(f"about {clock((now - self.began) / (done - self.first) * (total - done))} left")
        self.shown.update(Status(self.title, "optimiser steps", done, total, ", ".join(footer)))

    def epoch(self, record: EpochRecord) -> None:
        """Show a finished epoch."""
        self.latest = f"loss {record.loss:.4f}"
        if record.search_accuracy is not None:
            self.latest += f", accuracy on the search set {percent(record.search_accuracy, 2)}"
        if self.lines or record.epoch + 1 == self.epochs:
            self.shown.line(f"epoch {record.epoch + 1} of {self.epochs}: {self.latest}, learning rate {record.lr:.3g}")


_ROW_PHASES = {
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
            what = _ROW_PHASES.get(event.phase, event.phase)
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
