"""Test accuracy against MACs removed, a figure for each budget, as PNG and SVG: all of it, and the best part enlarged."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from secateurs.experiments.budgets import budget_words
from secateurs.experiments.comparison_rows import Row, methods_of
from secateurs.experiments.comparison_tables import Summary, summaries
from secateurs.experiments.figures import new_figure, save_figure
from secateurs.report.contest_page import closer_look

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
