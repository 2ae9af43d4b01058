"""Reports as files, and their figures as objects for notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from secateurs._util.files import write_text
from secateurs.config import Recipe
from secateurs.errors import InvalidInput, RunError, UnknownSite, suggest
from secateurs.pruning.results import Step
from secateurs.report import charts
from secateurs.report.comparison import runs_page
from secateurs.report.load import RunReport, SiteImportances, read_run, run_in_memory
from secateurs.report.page import run_page
from secateurs.report.svg import Figure

REPORT, COMPARISON = "report.html", "comparison.html"


def write_report(folders: str | Path | Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Write the report of a run, or the comparison of several, as one HTML file, and return its path.

    Without `out`, the report of one run goes into its folder, and a comparison to `comparison.html` in the current one. The
    file is written whole or not at all, and needs no network and no other files. Runs are only read, also while they run.
    """
    given = [folders] if isinstance(folders, str | Path) else list(folders)
    if not given:
        raise InvalidInput("folders: got none, wanted the folder of at least one run.")
    runs = [read_run(folder) for folder in given]
    text = run_page(runs[0]) if len(runs) == 1 else runs_page(runs)
    path = Path(out) if out is not None else Path(COMPARISON) if len(runs) > 1 else Path(given[0]) / REPORT
    try:
        write_text(path, text)
    except OSError as error:
        raise RunError(
            f"{path}: the report cannot be written ({error.strerror}). Choose another place with out (--out)."
        ) from error
    return path


def plots(source: str | Path | Sequence[Any], *, recipe: Recipe | None = None) -> Plots:
    """The figures of the run in a folder, or of a run without one: the records of its journal, and its recipe."""
    return Plots(read_run(source) if isinstance(source, str | Path) else run_in_memory(source, recipe))


class Plots:
    """The figures of a run, a method for each; `InvalidInput` says what a run lacks. Of several rounds, the last is shown."""

    def __init__(self, run: RunReport) -> None:
        self.run = run

    def importances(self, site: str) -> Figure:
        """The importance of each filter of a site, sorted, with error bars; kept and removed filters differ in colour."""
        return _drawn(charts.importances(*self._site(site)), f"importances of {site!r} were not kept")

    def accuracy(self, site: str) -> Figure:
        """Accuracy against filters removed at a site, with the allowed drop and the chosen number."""
        figure = charts.accuracy(self._site(site)[0], self.run.metric, self.run.max_drop)
        return _drawn(figure, f"no cut of {site!r} was measured")

    def agreement(self, site: str) -> Figure:
        """Predicted against measured scores of a site's masks."""
        return _drawn(charts.agreement(*self._site(site)), f"masks and losses of {site!r} were not kept")

    def widths(self) -> Figure:
        """The network: every layer's width before and after, and its shortcuts."""
        return _drawn(charts.network(self.run), "the weights at the start were not kept")

    def timeline(self) -> Figure:
        """Accuracy after every cut and epoch, and MACs left."""
        return _drawn(charts.timeline(self.run), "fewer than two measurements were made")

    def frontier(self) -> Figure:
        """Accuracy against MACs left over all steps."""
        return _drawn(charts.frontier([self.run]), "no filter has been removed")

    def classes(self) -> Figure:
        """Test accuracy by class, before and after."""
        return _drawn(charts.classes(self.run), "accuracy by class was not measured")

    def _site(self, site: str) -> tuple[Step, SiteImportances | None]:
        found = [step for step in self.run.steps if step.site == site]
        if not found:
            known = dict.fromkeys(step.site for step in self.run.steps)
            raise UnknownSite(f"{self.run.name}: no step at a site {site!r}.{suggest(site, known)}")
        return found[-1], self.run.importances.get(found[-1].number)


def _drawn(figure: Figure | None, reason: str) -> Figure:
    if figure is None:
        raise InvalidInput(f"this figure cannot be drawn: {reason}.")
    return figure
