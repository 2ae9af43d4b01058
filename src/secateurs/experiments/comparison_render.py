"""Tables, figures and the page of a comparison, from its rows alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from secateurs.errors import RunError
from secateurs.experiments.budgets import budget_words
from secateurs.experiments.comparison import ROWS
from secateurs.experiments.comparison_rows import Row, budgets_of, comparison_rows, methods_of
from secateurs.experiments.comparison_tables import (
    best_words,
    conditions,
    rows_sheet,
    sheets_of,
    summaries,
    tables_text,
)
from secateurs.experiments.xor_tables import Sheet
from secateurs.files import write_text
from secateurs.report.contest_page import Contest, ContestTable, CurvePoint, MethodCurve, Round, write_contest
from secateurs.report.words import plural

TABLES, PAGE = "tables.md", "comparison.html"


def render(out: Path) -> list[Path]:
    """Write tables.md, a figure of each budget (PNG, SVG) and comparison.html beside `out`/rows.jsonl; gives their paths."""
    rows = comparison_rows(out / ROWS)
    if not rows:
        raise RunError(f"{out / ROWS}: no row is there yet. Make some with: secateurs compare --out {out} …")
    text = tables_text(rows)  # first: it refuses rows that cannot be compared
    from secateurs.experiments.comparison_figures import draw_budget  # imports matplotlib, which nothing else here needs

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
