"""Live progress of a run on a terminal, plain lines elsewhere, nothing if quiet."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from secateurs._util.format import SPACE, Metric
from secateurs._util.terminal import clock, console, percent, say

if TYPE_CHECKING:
    from secateurs.config import Recipe
    from secateurs.pruning.results import Progress as Event
    from secateurs.pruning.results import Step

_LINE_SECONDS = 30.0  # between plain lines within one step
_SPEED_SECONDS = 3600.0  # that a speed is averaged over: a site may take minutes
PHASES = {
    "widths": "measuring which widths run well",
    "times": "timing layers at other widths, kind",
    "score": "scoring masks",
    "curve": "measuring what cuts at each site cost, site",
    "search": "searching for the cut",
    "divide": "allocating the cuts, trial",
    "trial": "training a trial, epoch",
    "reconstruct": "reconstructing the whole network, part",
    "finetune": "fine-tuning, epoch",
    "retrain": "retraining, epoch",
    "measure": "measuring the result, part",
}


@dataclass(frozen=True)
class Status:
    """What a command is doing: `done` of `total` units of `what`, below a headline and above a footer."""

    headline: str
    what: str
    done: int
    total: int
    footer: str = ""
    overall: tuple[int, int] | None = None  # what the headline counts: sites of this round that are done, and all of them


class Display(Protocol):
    """Shows the status of a command, and lines that stay."""

    def update(self, status: Status) -> None:
        """Replace the status that is shown."""

    def line(self, text: str) -> None:
        """Print a line that stays."""


@contextmanager
def display(*, quiet: bool = False) -> Iterator[Display]:
    """The display that suits stderr: live bars on a terminal, plain lines elsewhere, nothing when `quiet`."""
    found = console(stderr=True)
    found.quiet = quiet = quiet or found.quiet
    screen = Screen(found)
    live = found.is_terminal and not quiet
    with Live(get_renderable=screen.render, console=found, transient=True) if live else nullcontext():
        yield screen


class Screen:
    """Bars with elapsed and remaining times below the lines that stay; without a terminal a plain line every half minute."""

    def __init__(self, console: Console, every: float | None = None) -> None:
        columns = (MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        self.console, self.every, self.printed = console, _LINE_SECONDS if every is None else every, time.monotonic()
        self.bars = Progress(TextColumn("  {task.description}"), BarColumn(30), *columns, speed_estimate_period=_SPEED_SECONDS)
        self.overall, self.phase = self.bars.add_task("", visible=False), self.bars.add_task("", visible=False)
        self.status: Status | None = None

    def render(self) -> RenderableType:
        """The headline, the bars and the footer."""
        if self.status is None:
            return ""
        table = self.bars.make_tasks_table(self.bars.tasks)
        return Group(Text(self.status.headline, style="bold"), table, Text(f"  {self.status.footer}", style="dim"))

    def update(self, status: Status) -> None:
        """Move the bars, or print the status as a line if none was printed for a while."""
        self.status = status
        self._move(self.phase, status.what, status.done, status.total)
        if status.overall:
            self._move(self.overall, "sites of this round", *status.overall)
        self.bars.update(self.overall, visible=status.overall is not None)
        if not self.console.is_terminal and time.monotonic() - self.printed >= self.every:
            left = self.time_left(status)
            tail = "; ".join(part for part in (status.footer, left) if part)
            self.line(f"{status.headline}: {status.what} {status.done} of {status.total}" + (f"; {tail}" if tail else ""))

    def time_left(self, status: Status) -> str:
        """The time to the end of what is counted, at the speed so far, in words; empty if no speed is known."""
        left = self.bars.tasks[self.overall if status.overall else self.phase].time_remaining
        return "" if left is None else f"about {clock(left)} left" + " in this round" * (status.overall is not None)

    def line(self, text: str) -> None:
        """Print above the bars."""
        self.printed = time.monotonic()
        say(text, on=self.console)

    def _move(self, bar: TaskID, what: str, done: int, total: int) -> None:
        """Move a bar; its clock starts again where it counts something else, or counts from the beginning."""
        task = self.bars.tasks[bar]
        same = task.description == what and task.total == total and task.completed <= done
        (self.bars.update if same else self.bars.reset)(bar, description=what, total=total, completed=done, visible=True)


class RunWatcher:
    """Turns the events and steps of a run into what a display shows."""

    def __init__(self, shown: Display, recipe: Recipe, steps: Sequence[Step] = (), *, metric: str = "accuracy") -> None:
        self.shown, self.rounds, self.metric = shown, recipe.rounds, Metric.called(metric)
        self.latest: Step | None = steps[-1] if steps else None
        self.site, self.where = "", ""  # the latest site, and the same with its number

    def watch(self, event: Event) -> None:
        """Show an event of the run."""
        if event.site:
            self.site, self.where = event.site, f"site {event.number} of {event.sites}, {event.site}"
        ending = event.phase in ("retrain", "measure")
        headline = "All cuts are made" if ending else self._round(event.round) + self.where
        overall = (event.number - 1, event.sites) if event.number and not ending else None
        so_far = self._so_far(self.latest) if self.latest else ""
        self.shown.update(Status(headline, PHASES[event.phase], event.done, max(event.done, event.total), so_far, overall))

    def step(self, step: Step) -> None:
        """Show a finished step."""
        self.latest = step
        where = self.where if step.site == self.site else step.site
        filters = f"{step.channels} → {step.kept} {step.noun}"
        self.shown.line(f"{self._round(step.round)}{where}: {filters}; {self._so_far(step)}; {step.seconds:.1f} s")

    def _round(self, number: int) -> str:
        return f"round {number + 1} of at most {self.rounds}, " if self.rounds > 1 else ""

    def _so_far(self, step: Step) -> str:
        shares = f"{percent(step.parameters_removed)} of the parameters, {percent(step.macs_removed)} of the MACs"
        return f"{self.metric.name} {self.metric.value(step.accuracy).replace(SPACE, ' ')}, removed {shares}"
