"""What the tables of an engine say of networks, corrected by networks that were measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from secateurs.pruning.results import TimedAllocation
from secateurs.speed.correction import Correction
from secateurs.speed.engines import Engine
from secateurs.speed.sizes import Widths
from secateurs.speed.tables import LatencyModel, NetworkModel


@dataclass(eq=False)
class EngineTimes:
    """The engine at one batch: its tables, and what measured networks taught about them.

    What the whole network takes beyond its layers is spent between them: on calls, and on the work that they do. A call is gone
    where a branch is folded; there is less work wherever a channel is gone. How the two share that time is what the first
    measured network tells; until then all of it is for calls.
    """

    engine: Engine
    model: LatencyModel | NetworkModel
    original: float  # seconds of the whole network
    for_work: float = 0.0  # share of the time between the layers that is for work, not for calls
    timed: list[tuple[Widths, float]] = field(default_factory=list)  # networks, and what they were measured to save
    correction: Correction = field(default_factory=Correction)

    def saved(self, widths: Widths) -> float:
        """Predicted share of the original network's time that is saved."""
        return self.correction(self._uncorrected(widths))

    def correct(self, timed: TimedAllocation, widths: Widths) -> None:
        """Take the share of work with which the measured time comes out, as far as it does, and correct by what is left."""
        measured = max(1 - timed.seconds / timed.original, 0.0)
        layers, calls, work = self._saved(widths)
        if work > calls:
            self.for_work = min(max((measured - layers - calls) / (work - calls), 0.0), 1.0)
        self.timed.append((widths, measured))
        self.correction = Correction([(self._uncorrected(one), saved) for one, saved in self.timed])

    def _uncorrected(self, widths: Widths) -> float:
        layers, calls, work = self._saved(widths)
        return layers + (1 - self.for_work) * calls + self.for_work * work

    def _saved(self, widths: Widths) -> tuple[float, float, float]:
        """Shares of the original network's time: saved by layers, and between them, if calls and if work were all it is for."""
        whole, left = max(self.original, self._full), self.model.left_between(widths)
        between = 1 - self._full / whole
        return (self._full - self.model.seconds(widths)) / whole, between * (1 - left.calls), between * (1 - left.work)

    @cached_property
    def _full(self) -> float:
        return self.model.seconds({})
