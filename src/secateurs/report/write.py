"""The figures of a run as objects, for notebooks: `plots(folder).importances("conv1")`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from importlib.metadata import version
from pathlib import Path
from string import Template
from typing import Any

from secateurs._util.files import write_text
from secateurs.errors import InvalidInput, RunError, UnknownSite, suggest
from secateurs.report import comparison
from secateurs.report import page as single
from secateurs.report.charts.accuracy import accuracy, agreement, classes
from secateurs.report.charts.allocation import frontier
from secateurs.report.charts.figure import Figure, asset
from secateurs.report.charts.sites import importances, network
from secateurs.report.charts.timeline import timeline
from secateurs.report.load import read_run, run_in_memory
from secateurs.report.records import InMemory, RunRecord, StepRecord


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


REPORT, COMPARISON = "report.html", "comparison.html"


def write_report(folders: str | Path | Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Write the report of a run, or the comparison of several, as one HTML file, whole or not at all; gives its path.

    Without `out`, one run's report goes into its folder, and a comparison to `comparison.html` in the current one. The file
    needs nothing else: no network, no other files. Runs are only read, also while they are going on.
    """
    given = [folders] if isinstance(folders, str | Path) else list(folders)
    if not given:
        raise InvalidInput("folders: got none, wanted the folder of at least one run.")
    runs = [read_run(folder) for folder in given]
    path = Path(out) if out is not None else _default_path(runs)
    text = render(runs)
    try:
        write_text(path, text)
    except OSError as error:
        raise RunError(
            f"{path}: the report cannot be written ({error.strerror}). Choose another place with out (--out)."
        ) from error
    return path


def render(runs: Sequence[RunRecord]) -> str:
    """The HTML of one run's report, or of the comparison of several."""
    title = single.title(runs[0]) if len(runs) == 1 else comparison.title(runs)
    body = single.page(runs[0]) if len(runs) == 1 else comparison.page(runs)
    return Template(asset("page.html")).substitute(
        title=escape(title),
        generator=f"secateurs {version('secateurs')}",
        style=asset("page.css") + asset("figure.css"),
        script=asset("page.js"),
        body=body,
    )


def _default_path(runs: Sequence[RunRecord]) -> Path:
    if len(runs) > 1 or runs[0].folder is None:
        return Path(COMPARISON)
    return runs[0].folder / REPORT
