"""Writes a report: one self-contained file for one run, or for several side by side."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.metadata import version
from pathlib import Path
from string import Template

from secateurs.errors import InvalidInput, RunError
from secateurs.files import write_text
from secateurs.report import comparison
from secateurs.report import page as single
from secateurs.report.figure import asset
from secateurs.report.reading import read_run
from secateurs.report.records import RunRecord

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
