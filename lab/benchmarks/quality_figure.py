"""Test accuracy against MACs removed, a panel for each network."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import matplotlib

from benchmarks.quality_setup import METHODS, Row, series

COLOURS = {
    "random": "#999999",
    "l1": "#4477aa",
    "fpgm": "#66ccee",
    "taylor": "#228833",
    "ensemble": "#ccbb44",
    "obs": "#ee6677",
    "portfolio": "#aa3377",
}


def draw(rows: list[Row], path: Path) -> None:
    """Write the figure: dashed without repair, solid with it; a point is the mean over seeds at one target."""
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "quality"  # the same figure from the same rows
    from matplotlib import pyplot

    models = list(dict.fromkeys(model for (model, _), _ in series(rows)))
    figure, panels = pyplot.subplots(1, len(models), figsize=(6.5 * len(models), 4.5), squeeze=False)
    for panel, model in zip(panels[0], models, strict=True):
        start = next(row for row in rows if row.model == model)
        for (here, name), found in series(rows):
            if here == model:
                method = METHODS[name]
                xs, ys = _means(found)
                line = "--" if method.repair == "none" else "-"
                panel.plot(
                    [0, *xs], [100 * start.test_before, *ys], line, color=COLOURS[method.criterion], marker=".", label=name
                )
        panel.set(
            title=f"{model}, CIFAR-10, no training",
            xlabel="MACs removed, %",
            ylabel="test accuracy, %",
            ylim=(100 * start.test_before - 8, 100 * start.test_before + 0.7),
        )
        panel.grid(alpha=0.3)
        panel.legend(fontsize=7, loc="lower left")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _means(rows: list[Row]) -> tuple[list[float], list[float]]:
    by_target = {target: [row for row in rows if row.target == target] for target in sorted({row.target for row in rows})}
    return (
        [100 * mean(row.macs_removed for row in many) for many in by_target.values()],
        [100 * mean(row.test_after for row in many) for many in by_target.values()],
    )
