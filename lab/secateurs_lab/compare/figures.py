"""What is made of the rows of a comparison: tables, figures by matplotlib (the extra `figures`), and the HTML page."""

from __future__ import annotations

import io
import logging
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from secateurs._util.files import write_bytes, write_text
from secateurs._util.format import plural
from secateurs.errors import InvalidInput, RunError
from secateurs_lab.compare.page import BudgetComparison, MethodComparison, closer_look, write_method_comparison
from secateurs_lab.compare.rows import Row, budget_words, budgets_of, comparison_rows, methods_of
from secateurs_lab.compare.run import ROWS
from secateurs_lab.compare.tables import (
    across_budgets,
    best_words,
    conditions,
    rows_sheet,
    sheets_of,
    summaries,
    tables_text,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TABLES, PAGE = "tables.md", "comparison.html"

# Okabe and Ito's colours, which people with any colour vision can distinguish; the yellow is too pale for a line on white
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
_RANDOM = {"color": "#8c8c8c", "marker": "x", "linestyle": "-"}
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "h", "*")
_LINES = ("-", "--", ":", "-.")
_MISSING = (
    "figures need matplotlib, which is not installed: pip install './lab[figures]'. "
    "Rows, tables and pages are written without it."
)


def can_draw(out: Path) -> bool:
    """Return whether matplotlib is installed; if not, log one line that says what is missing in the folder `out`."""
    found = find_spec("matplotlib") is not None
    if not found:
        logging.getLogger(__name__).warning("%s: %s", out, _MISSING)
    return found


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure, sizes in inches."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InvalidInput(_MISSING) from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, stem: Path) -> list[Path]:
    """Write a figure as `stem`.png and `stem`.svg, the same bytes for the same figure; returns both paths."""
    import matplotlib

    files = []
    # without a fixed salt and date the same figure would be another file each time
    with matplotlib.rc_context({"svg.hashsalt": "secateurs", "svg.fonttype": "path"}):
        for kind, options in (("png", {"dpi": 150}), ("svg", {"metadata": {"Date": None}})):
            buffer = io.BytesIO()
            figure.savefig(buffer, format=kind, **options)
            files.append(stem.with_name(f"{stem.name}.{kind}"))
            write_bytes(files[-1], buffer.getvalue())
    return files


def budget_figure(rows: Sequence[Row], budget: str) -> Figure:
    """Draw a curve for each method: means over seeds, bars of one standard deviation."""
    here = [row for row in rows if row.budget.name == budget]
    found, start = summaries(rows, budget), here[0].test.before
    curves = {method: [point for point in found if point.method == method] for method in methods_of(here)}
    floor = closer_look(start, [[point.test for point in points] for points in curves.values()])
    panels = 1 if floor is None else 2
    figure = new_figure(5.6 * panels + 2.4, 4.6)
    axes = [figure.add_subplot(1, panels, place + 1) for place in range(panels)]
    styles = _styles(methods_of(rows))
    for panel in axes:
        for method, points in curves.items():
            panel.errorbar(
                [0.0, *(100 * point.macs_removed for point in points)],
                [100 * start, *(100 * point.test for point in points)],
                yerr=[0.0, *(100 * point.test_spread for point in points)],
                label=method,
                linewidth=1.5,
                markersize=5,
                capsize=3,
                **styles[method],
            )
        panel.axhline(100 * start, color="0.6", linewidth=0.8, zorder=0)
        panel.set(xlabel="MACs removed, %", ylabel="test accuracy, %")
        panel.grid(alpha=0.3)
    if floor is not None:
        highest = max([start, *(point.test + point.test_spread for point in found)])
        axes[1].set_ylim(100 * floor, 100 * (highest + 0.06 * (highest - floor)))
        axes[0].set_title("all of it", fontsize=10)
        axes[1].set_title("the upper part", fontsize=10)
    figure.suptitle(f"{here[0].model}, {here[0].data}, budget {budget}: {budget_words(here[0].budget)}", fontsize=10, wrap=True)
    # all methods have a line in the first panel, so its legend is that of the figure
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", fontsize=9, frameon=False)
    return figure


def _styles(methods: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return colour, marker and line of each method; only random is grey."""
    chosen = zip(cycle(_COLOURS), cycle(_MARKERS), [line for line in _LINES for _ in _COLOURS] * len(methods), strict=False)
    names = ("color", "marker", "linestyle")
    return {m: _RANDOM if m.startswith("random") else dict(zip(names, next(chosen), strict=True)) for m in methods}


def render(out: Path) -> list[Path]:
    """Write tables.md, a figure of each budget (PNG, SVG) and comparison.html beside `out`/rows.jsonl; returns their paths.

    Without matplotlib there are no figures, and a line is logged that says so.
    """
    rows = comparison_rows(out / ROWS)
    if not rows:
        raise RunError(f"{out / ROWS}: no rows yet. Make some with: secateurs compare --out {out} …")
    write_text(out / TABLES, tables_text(rows))  # first: it refuses rows that cannot be compared
    drawn = budgets_of(rows) if can_draw(out) else ()
    figures = [file for budget in drawn for file in save_figure(budget_figure(rows, budget), out / f"accuracy-{budget}")]
    return [out / TABLES, *figures, write_method_comparison(comparison_of_methods(rows), out / PAGE)]


def comparison_of_methods(rows: Sequence[Row]) -> MethodComparison:
    """Return the content of the page."""
    first = rows[0]
    return MethodComparison(
        title=f"{len(methods_of(rows))} ways to make {first.model} smaller",
        headline=(
            f"On {first.data}: {first.model} is right on {100 * first.test.before:.2f} % of {first.test.count:,} test images "
            f"before anything is removed; same weights, data and training for every method."
        ),
        start=first.test.before,
        notes=tuple(conditions(rows)),
        warnings=tuple(_weaknesses(rows)),
        budgets=tuple(_budget(rows, budget) for budget in budgets_of(rows)),
        across=tuple(across_budgets(rows)),
        every=rows_sheet(rows),
    )


def _budget(rows: Sequence[Row], budget: str) -> BudgetComparison:
    return BudgetComparison(
        budget,
        budget_words(next(row.budget for row in rows if row.budget.name == budget)),
        best_words(rows, budget),
        tuple(summaries(rows, budget)),
        tuple(sheets_of(rows, budget)),
    )


def _weaknesses(rows: Sequence[Row]) -> list[str]:
    """Name what makes the comparison weaker than it looks."""
    found = []
    seeds: dict[tuple[str, str, float], set[int]] = {}
    for row in rows:
        seeds.setdefault((row.method, row.budget.name, row.target), set()).add(row.seed)
    if len({frozenset(some) for some in seeds.values()}) > 1:
        found.append("Not every method has every seed at every target: some means are of fewer networks than others.")
    elif max(len(some) for some in seeds.values()) < 2:
        found.append("One seed only: differences may be chance.")
    missed = [row for row in rows if not row.reached]
    if missed:
        found.append(
            f"{plural(len(missed), 'network')} kept more MACs than the target allows ({', '.join(methods_of(missed))})."
        )
    return found
