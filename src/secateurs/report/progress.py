"""Live progress of a run on a terminal, plain lines elsewhere, nothing if quiet."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from secateurs._util.format import SPACE, MetricName
from secateurs._util.terminal import clock, console, percent, say
from secateurs.pruning.forecast import left_of

if TYPE_CHECKING:
    from secateurs.config import Recipe
    from secateurs.pruning.results import Progress as Event
    from secateurs.pruning.results import Step

_LINE_SECONDS = 30.0  # between plain lines within one step
PHASES = {
    "original": "measuring the original network",
    "widths": "measuring which widths run well",
    "times": "timing layers at other widths, kind",
    "sizes": "timing layers at the widths that were chosen, kind",
    "survey": "observing all sites at once",
    "site": "going on to the next site",
    "score": "scoring masks",
    "curve": "measuring what cuts at each site cost, site",
    "search": "searching for the cut",
    "solve": "weighing the cuts of all sites",
    "timed": "timing a network to correct the tables, batch size",
    "compare": "comparing where to cut, network",
    "divide": "trying whole networks on the images that search, network",
    "trained": "trying whole networks after their training, network",
    "certify": "certifying whole networks, network",
    "trial": "training a trial, epoch",
    "faster": "timing the network beside the original, network",
    "cut": "making the cuts, site",
    "reconstruct": "reconstructing the whole network, part",
    "finetune": "fine-tuning, epoch",
    "retrain": "retraining, epoch",
    "measure": "measuring the result, part",
    "timing": "timing the result, batch size",
    "write": "writing the result",
}
_AT_SITES = ("curve", "cut", "score", "search", "site", "finetune")  # phases that have a site; the others are of all together


@dataclass(frozen=True)
class Status:
    """What a command is doing: `done` of `total` units of `what`, below a headline and above a footer."""

    headline: str
    what: str
    done: int
    total: int
    footer: str = ""
    left: float | None = None  # seconds, to the end of all work


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
    """A bar with the elapsed and remaining times below the lines that stay; without a terminal a line every half minute."""

    def __init__(self, console: Console, every: float | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self.console, self.every, self.now = console, _LINE_SECONDS if every is None else every, now
        self.bars = Progress(
            TextColumn("  {task.description}"), BarColumn(30), MofNCompleteColumn(), TimeElapsedColumn(), get_time=now
        )
        self.phase = self.bars.add_task("", visible=False)
        self.status: Status | None = None
        self.printed = self.updated = now()

    def render(self) -> RenderableType:
        """The headline, the bar and the footer."""
        if self.status is None:
            return ""
        table, tail = self.bars.make_tasks_table(self.bars.tasks), self._tail(self.status)
        return Group(Text(self.status.headline, style="bold"), table, Text(f"  {tail}", style="dim"))

    def update(self, status: Status) -> None:
        """Move the bar, or print the status as a line if none was printed for a while."""
        self.status, self.updated = status, self.now()
        task = self.bars.tasks[self.phase]
        same = task.description == status.what and task.total == status.total and task.completed <= status.done
        move = self.bars.update if same else self.bars.reset  # its clock starts again where it counts something else
        move(self.phase, description=status.what, total=status.total, completed=status.done, visible=True)
        if not self.console.is_terminal and self.now() - self.printed >= self.every:
            tail, count = self._tail(status), f" {status.done} of {status.total}" * (status.total > 1)
            self.line(f"{status.headline}: {status.what}{count}" + (f"; {tail}" if tail else ""))

    def _tail(self, status: Status) -> str:
        return "; ".join(part for part in (status.footer, self.time_left(status)) if part)

    def time_left(self, status: Status) -> str:
        """The time to the end of all work, in words; empty if it is not known."""
        return "" if status.left is None else f"about {clock(left_of(status.left, self.now() - self.updated))} left in all"

    def line(self, text: str) -> None:
        """Print above the bar."""
        self.printed = self.now()
        say(text, on=self.console)


class RunWatcher:
    """Turns the events and steps of a run into what a display shows."""

    def __init__(self, shown: Display, recipe: Recipe, steps: Sequence[Step] = (), *, metric: str = "accuracy") -> None:
        self.shown, self.rounds, self.metric = shown, recipe.rounds, MetricName.called(metric)
        self.together = recipe.allocation == "global"
        self.latest: Step | None = steps[-1] if steps else None
        self.site, self.where = "", ""  # the latest site, and the same with its number
        self.more = False  # cuts to come, of those that are made together

    def watch(self, event: Event) -> None:
        """Show an event of the run."""
        if event.site:
            self.site, self.where = event.site, f"site {event.number} of {event.sites}, {event.site}"
        if event.phase == "cut":
            self.more = event.done + 1 < event.total
        headline = self._round(event.round) + self.where if event.phase in _AT_SITES and self.where else "All sites together"
        done = Status(headline, PHASES[event.phase], event.done, max(event.done, event.total), self._footer(event), event.left)
        self.shown.update(done)

    def step(self, step: Step) -> None:
        """Show a finished step; between cuts that are made together no figure of the network means anything."""
        self.latest = step
        where = self.where if step.site == self.site else step.site
        filters = f"{step.channels} → {step.kept} {step.noun}"
        so_far = self._removed(step) if self.together and self.more else self._so_far(step)
        self.shown.line(f"{self._round(step.round)}{where}: {filters}; {so_far}; {step.seconds:.1f} s")

    def _round(self, number: int) -> str:
        return f"round {number + 1} of at most {self.rounds}, " if self.rounds > 1 else ""

    def _footer(self, event: Event) -> str:
        """The latest step; where cuts are weighed together, the latest network that was tried."""
        if not self.together:
            return self._so_far(self.latest) if self.latest else ""
        if event.tried is None:
            return ""
        one = f"the network with {percent(event.tried.saved, 0)} of the {event.tried.of} saved: "
        if event.tried.accuracy is None:
            return one + ("certified" if event.tried.accepted else "not certified")
        within = "within the allowed drop" if event.tried.accepted else "too little"
        return f"{one}{self.metric.name} {self._value(event.tried.accuracy)}, {within}"

    def _value(self, accuracy: float) -> str:
        return self.metric.value(accuracy).replace(SPACE, " ")

    def _removed(self, step: Step) -> str:
        return f"removed {percent(step.parameters_removed)} of the parameters, {percent(step.macs_removed)} of the MACs"

    def _so_far(self, step: Step) -> str:
        return f"{self.metric.name} {self._value(step.accuracy)}, {self._removed(step)}"
