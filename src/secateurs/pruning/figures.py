"""What a run has found in the end: its figures and its result; and which records its journal may hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from secateurs._util.journal import records_of
from secateurs.graph.cost import Cost
from secateurs.graph.trace import Graph
from secateurs.pruning.results import (
    ChosenAllocation,
    ComparedFrontiers,
    Count,
    Files,
    LayerTime,
    MeasuredSpeed,
    Retrained,
    Seconds,
    SiteCurve,
    SiteCut,
    SiteOrder,
    SiteWidths,
    SpeedTrial,
    Start,
    Step,
    Structure,
    TimedAllocation,
    TimedBatches,
    TimeTable,
    Trial,
    WidthMultiple,
)
from secateurs.training.guard import KeptWeights
from secateurs.training.state import EpochRecord, RateTrials


@dataclass(frozen=True)
class Change:
    """A figure before and after."""

    before: float
    after: float

    @property
    def removed(self) -> float:
        """The share by which it fell."""
        return 1 - self.after / self.before if self.before else 0.0

    @property
    def change(self) -> float:
        """After minus before."""
        return self.after - self.before


@dataclass(frozen=True)
class TestChange(Change):
    """The metric on the test set before and after, and the number of its examples."""

    __test__ = False  # no test class for pytest

    count: Count


NO_TEST = TestChange(math.nan, math.nan, 0)
"""Where no test set was given."""


@dataclass(frozen=True)
class ClassAccuracies:
    """Test accuracy by class; NaN, or None in a file, for a class without examples. Empty where there are no classes."""

    names: tuple[str, ...] = ()
    before: tuple[float | None, ...] = ()
    after: tuple[float | None, ...] = ()

    def changes(self) -> tuple[Change, ...]:
        """Before and after of every class."""
        pairs = zip(self.before, self.after, strict=False)
        return tuple(Change(*(math.nan if value is None else value for value in pair)) for pair in pairs)


@dataclass(frozen=True, kw_only=True)
class ResultFigures:
    """The figures of a finished run: before and after, on data that decided nothing (test) and on the validation set."""

    stopped: str  # why no further site was cut
    metric: str  # as the user calls it
    search: Change  # metric on the validation set
    test: TestChange
    parameters: Change
    macs: Change
    bytes: Change
    classes: ClassAccuracies
    latency: MeasuredSpeed | None  # None: not measured
    seconds: Seconds  # of all phases
    phases: tuple[tuple[str, Seconds], ...] = ()  # in the order of the work; what a crash interrupted is not counted
    files: Files = field(default_factory=dict)
    speeds: tuple[MeasuredSpeed, ...] = ()  # the same at other batches
    layer_times: tuple[LayerTime, ...] = ()  # at the batch of `latency`

    def headline(self) -> str | None:
        """What was measured in time, at all batches, as the first words of a result; None where nothing was."""
        if self.latency is None:
            return None
        others = [f"at batch {other.batch} {other.speedup:.2f}x ({other.low:.2f} to {other.high:.2f})" for other in self.speeds]
        return "; ".join([self.latency.headline(), *others])

    def summary(self) -> str:
        """One sentence with the figures that matter; a metric of the user's own is no percentage."""
        figures: Change = self.test if self.test.count else self.search
        where = f"{self.test.count:,} held-out test examples" if self.test.count else "the validation set, which chose the cuts"
        return (
            f"{100 * self.parameters.removed:.1f} % of the parameters and {100 * self.macs.removed:.1f} % of the MACs removed, "
            f"{self.metric} {self.values(figures)} on {where}"
        )

    def values(self, figures: Change) -> str:
        """A metric before and after, as text."""
        if self.metric == "accuracy":
            return f"{100 * figures.before:.2f} → {100 * figures.after:.2f} %"
        return f"{figures.before:.4g} → {figures.after:.4g}"


@dataclass(frozen=True, kw_only=True, eq=False)
class RunResult(ResultFigures):
    """What a finished run gives: the smaller network, and all that is known about it."""

    graph: Graph = field(metadata={"journal": False})
    steps: tuple[Step, ...] = field(metadata={"journal": False})
    cost_before: Cost = field(metadata={"journal": False})
    cost_after: Cost = field(metadata={"journal": False})

    def figures(self) -> ResultFigures:
        """Its figures alone, as the journal holds them."""
        names = ResultFigures.__dataclass_fields__
        return ResultFigures(**{name: getattr(self, name) for name in names})


def phase_seconds(records: Sequence[Any]) -> tuple[tuple[str, float], ...]:
    """The seconds that each phase took so far, by the records of a journal, over all processes that worked on the run."""
    steps, trials = records_of(records, Step), records_of(records, Trial)
    training = sum(step.training_seconds for step in steps) + sum(found.seconds for found in records_of(records, Retrained))
    training += sum(trial.seconds for trial in trials if trial.judge == "trained")
    trials = [trial for trial in trials if trial.judge != "trained"]
    return (
        ("preparation", sum(found.seconds for found in records_of(records, Structure))),
        ("original network", sum(found.seconds for found in records_of(records, Start))),
        ("curves", sum(found.seconds for found in records_of(records, SiteCurve))),
        ("allocation", sum(trial.seconds for trial in trials) + sum(a.seconds for a in records_of(records, ChosenAllocation))),
        ("steps", sum(step.seconds - step.training_seconds for step in steps)),
        ("training", training),
    )


def promised_bound(budget: str, records: Sequence[Any]) -> float | None:
    """The bound on the drop of a run's network from the original one, by its records; None: nothing is promised.

    With a budget for every site each cut was certified against the network before it, and nothing is known of the whole.
    """
    cuts = [step for step in records_of(records, Step) if step.removed]
    if budget == "site" or not cuts:
        return None
    bounds = [cuts[-1].bound, cuts[-1].bound_trained, *(found.bound for found in records_of(records, Retrained))]
    return next((bound for bound in reversed(bounds) if bound is not None), None)


KINDS = {
    "network": Structure,
    "start": Start,
    "round": SiteOrder,
    "widths": SiteWidths,
    "multiple": WidthMultiple,
    "times": TimeTable,
    "batches": TimedBatches,
    "timed": TimedAllocation,
    "speed": SpeedTrial,
    "cut": SiteCut,
    "step": Step,
    "rate": RateTrials,
    "epoch": EpochRecord,
    "kept": KeptWeights,
    "retrained": Retrained,
    "curve": SiteCurve,
    "frontiers": ComparedFrontiers,
    "trial": Trial,
    "division": ChosenAllocation,
    "end": ResultFigures,
}
"""The record of a journal's line by its unit."""
