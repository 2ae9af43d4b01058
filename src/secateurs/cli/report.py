"""`secateurs report`: a run as one page to look at and to hand on, several runs as a comparison."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from secateurs.cli.terminal import say


def report(
    *runs: Path,
    out: Annotated[Path | None, Parameter(show_default="RUN/report.html, or comparison.html")] = None,
) -> None:
    """Write what a run did as one HTML file: figures, tables, warnings. Several runs give a comparison.

    The file needs nothing else: no network, no other files; it is readable on a phone and can be printed. A run that is going
    on, or that was stopped, gives a report that says so.

    Examples:

    `secateurs report runs/demo-1`

    `secateurs report runs/a runs/b --out compared.html`

    Parameters
    ----------
    runs
        One run folder, or several.
    out
        Where the page goes.
    """
    from secateurs.report import write_report

    say(str(write_report(runs, out)))
