"""Figures on disk: the same bytes for the same figure."""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from secateurs._util.files import write_bytes, write_text
from secateurs._util.format import plural
from secateurs._util.tables import Sheet
from secateurs.errors import RunError
from secateurs.methods.compare.rows import Row, budget_words, budgets_of, comparison_rows, methods_of
from secateurs.methods.compare.run import ROWS
from secateurs.methods.compare.tables import Summary, best_words, conditions, rows_sheet, sheets_of, summaries, tables_text
from secateurs.report.comparison import Contest, ContestTable, CurvePoint, MethodCurve, Round, closer_look, write_contest


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of so many inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, stem: Path) -> list[Path]:
    """Write a figure as `stem`.png and `stem`.svg; gives both paths."""
    files = []
    # without a fixed salt and date the same figure would be another file each time
    with matplotlib.rc_context({"svg.hashsalt": "secateurs", "svg.fonttype": "path"}):
        for kind, options in (("png", {"dpi": 150}), ("svg", {"metadata": {"Date": None}})):
            buffer = io.BytesIO()
            figure.savefig(buffer, format=kind, **options)
            files.append(stem.with_name(f"{stem.name}.{kind}"))
            write_bytes(files[-1], buffer.getvalue())
    return files


# Okabe and Ito's colours, which people with any colour vision can tell apart; the yellow is too pale for a line on white
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
_RANDOM = "#8c8c8c"
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "h", "*")
_LINES = ("-", "--", ":", "-.")


def draw_budget(rows: Sequence[Row], budget: str, stem: Path) -> list[Path]:
    """Write the figure of one budget as `stem`.png and `stem`.svg; gives both paths."""
    return save_figure(budget_figure(rows, budget), stem)


def budget_figure(rows: Sequence[Row], budget: str) -> Figure:
    """A curve for each method: means over seeds, bars of one standard deviation."""
    here = [row for row in rows if row.budget_name == budget]
    found, start = summaries(rows, budget), here[0].test.before
    floor = closer_look(start, [[one.test for one in found if one.method == method] for method in methods_of(here)])
    panels = 1 if floor is None else 2
    figure = new_figure(5.6 * panels + 2.4, 4.6)
    axes = [figure.add_subplot(1, panels, place + 1) for place in range(panels)]
    styles = _styles(methods_of(rows))
    for panel in axes:
        for method in methods_of(here):
            _curve(panel, [one for one in found if one.method == method], start, styles[method])
        panel.axhline(100 * start, color="0.6", linewidth=0.8, zorder=0)
        panel.set(xlabel="MACs removed, %", ylabel="test accuracy, %")
        panel.grid(alpha=0.3)
    if floor is not None:
        highest = max([start, *(one.test + one.test_spread for one in found)])
        axes[1].set_ylim(100 * floor, 100 * (highest + 0.06 * (highest - floor)))
        axes[0].set_title("all of it", fontsize=10)
        axes[1].set_title("the upper part", fontsize=10)
    figure.suptitle(f"{here[0].model}, {here[0].data}, budget {budget}: {budget_words(here[0].budget)}", fontsize=10, wrap=True)
    # all methods have a line in the first panel, so its legend is that of the figure
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", fontsize=9, frameon=False)
    return figure


def _styles(methods: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Colour, marker and line of each method; only chance is grey."""
    chosen = zip(cycle(_COLOURS), cycle(_MARKERS), [line for line in _LINES for _ in _COLOURS] * len(methods), strict=False)
    styles = {}
    for method in methods:
        if method.startswith("random"):
            styles[method] = {"color": _RANDOM, "marker": "x", "linestyle": "-"}
        else:
            colour, marker, line = next(chosen)
            styles[method] = {"color": colour, "marker": marker, "linestyle": line}
    return styles


def _curve(panel: Any, found: Sequence[Summary], start: float, style: dict[str, Any]) -> None:
    panel.errorbar(
        [0.0, *(100 * one.macs_removed for one in found)],
        [100 * start, *(100 * one.test for one in found)],
        yerr=[0.0, *(100 * one.test_spread for one in found)],
        label=found[0].method,
        linewidth=1.5,
        markersize=5,
        capsize=3,
        **style,
    )


TABLES, PAGE = "tables.md", "comparison.html"


def render(out: Path) -> list[Path]:
    """Write tables.md, a figure of each budget (PNG, SVG) and comparison.html beside `out`/rows.jsonl; gives their paths."""
    rows = comparison_rows(out / ROWS)
    if not rows:
        raise RunError(f"{out / ROWS}: no row is there yet. Make some with: secateurs compare --out {out} …")
    text = tables_text(rows)  # first: it refuses rows that cannot be compared
    pass

    write_text(out / TABLES, text)
    figures = [file for budget in budgets_of(rows) for file in draw_budget(rows, budget, out / f"accuracy-{budget}")]
    return [out / TABLES, *figures, write_contest(contest_of(rows), out / PAGE)]


def contest_of(rows: Sequence[Row]) -> Contest:
    """What the page says of the rows."""
    first = rows[0]
    count = len(methods_of(rows))
    return Contest(
        title=f"{count} ways to make {first.model} smaller",
        headline=(
            f"On {first.data}: {first.model} is right on {100 * first.test.before:.2f} % of {first.test.count:,} test images "
            f"before anything is removed; same weights, data and training for every method."
        ),
        start=first.test.before,
        notes=tuple(conditions(rows)),
        troubles=tuple(_troubles(rows)),
        rounds=tuple(_round(rows, budget) for budget in budgets_of(rows)),
        every=_table(rows_sheet(rows)),
    )


def _round(rows: Sequence[Row], budget: str) -> Round:
    found = summaries(rows, budget)
    curves = {
        method: tuple(CurvePoint(s.macs_removed, s.test, s.test_spread, s.seeds) for s in found if s.method == method)
        for method in dict.fromkeys(one.method for one in found)
    }
    words = budget_words(next(row.budget for row in rows if row.budget_name == budget))
    return Round(
        budget,
        words,
        best_words(rows, budget),
        tuple(MethodCurve(method, points) for method, points in curves.items()),
        tuple(_table(sheet) for sheet in sheets_of(rows, budget)),
    )


def _troubles(rows: Sequence[Row]) -> list[str]:
    """What makes the comparison weaker than it looks."""
    found = []
    seeds = {key: {row.seed for row in rows if (row.method, row.budget_name, row.target) == key} for key in _cells(rows)}
    if len({frozenset(some) for some in seeds.values()}) > 1:
        found.append("Not every method has every seed at every target: some means are of fewer networks than others.")
    elif max(len(some) for some in seeds.values()) < 2:
        found.append("One seed only: differences may be chance.")
    missed = [row for row in rows if not row.reached]
    if missed:
        names = ", ".join(methods_of(missed))
        found.append(f"More MACs were kept than was asked by {plural(len(missed), 'network')} ({names}).")
    return found


def _cells(rows: Sequence[Row]) -> set[tuple[str, str, float]]:
    return {(row.method, row.budget_name, row.target) for row in rows}


def _table(sheet: Sheet) -> ContestTable:
    return ContestTable(sheet.title, sheet.columns, sheet.lines)
