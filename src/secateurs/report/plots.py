"""The figures of a run as objects, for notebooks: `plots(folder).importances("conv1")`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from secateurs.errors import InvalidInput, UnknownSite, suggest
from secateurs.report.charts.accuracy import accuracy
from secateurs.report.charts.agreement import agreement
from secateurs.report.charts.classes import classes
from secateurs.report.charts.frontier import frontier
from secateurs.report.charts.importances import importances
from secateurs.report.charts.network import network
from secateurs.report.charts.timeline import timeline
from secateurs.report.figure import Figure
from secateurs.report.ranking import InMemory
from secateurs.report.reading import read_run, run_in_memory
from secateurs.report.records import RunRecord, StepRecord


def plots(
    source: str | Path | Sequence[Mapping[str, Any]],
    *,
    recipe: Mapping[str, Any] | None = None,
    importances: Mapping[int, InMemory] | None = None,
) -> Plots:
    """The figures of the run in a folder, or of a run in memory: the entries of its journal.

    A run in memory keeps no files: give its recipe's fields and its importances by step number for the figures that need them.
    """
    if isinstance(source, str | Path):
        return Plots(read_run(source))
    return Plots(run_in_memory(source, recipe=recipe, importances=importances))


class Plots:
    """One method a figure; `InvalidInput` says what a run lacks for it. A site pruned in several rounds shows its last."""

    def __init__(self, run: RunRecord) -> None:
        self.run = run

    def importances(self, site: str) -> Figure:
        """The importance of each filter of a site, sorted, with error bars, kept and removed marked."""
        return _drawn(importances(self._step(site)), f"importances of {site!r} were not kept")

    def accuracy(self, site: str) -> Figure:
        """Accuracy against filters removed at a site, with the allowed drop and the number chosen."""
        figure = accuracy(self._step(site), self.run.metric, self.run.max_drop)
        return _drawn(figure, f"no cut of {site!r} was measured")

    def agreement(self, site: str) -> Figure:
        """Predicted against realised scores of a site's masks."""
        return _drawn(agreement(self._step(site)), f"masks and losses of {site!r} were not kept")

    def widths(self) -> Figure:
        """The network: every layer's width before and after, and its shortcuts."""
        return _drawn(network(self.run), "the weights at the start were not kept")

    def timeline(self) -> Figure:
        """Accuracy after every cut and epoch, and MACs left."""
        return _drawn(timeline(self.run), "fewer than two measurements were made")

    def frontier(self) -> Figure:
        """Accuracy against MACs left over all steps."""
        return _drawn(frontier([self.run]), "no filter has been removed")

    def classes(self) -> Figure:
        """Test accuracy by class, before and after."""
        return _drawn(classes(self.run), "accuracy by class was not measured")

    def _step(self, site: str) -> StepRecord:
        found = [step for step in self.run.steps if step.site == site]
        if not found:
            known = dict.fromkeys(step.site for step in self.run.steps)
            raise UnknownSite(f"{self.run.name}: no step at a site {site!r}.{suggest(site, known)}")
        return found[-1]


def _drawn(figure: Figure | None, reason: str) -> Figure:
    if figure is None:
        raise InvalidInput(f"this figure cannot be drawn: {reason}.")
    return figure
