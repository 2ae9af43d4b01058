"""The figures of the XOR experiment, each as PNG and SVG: data, hidden representation, success against P."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from secateurs_lab.compare.figures import new_figure, save_figure
from secateurs_lab.reproduce.xor import PAPER, SweptPoint, explicit_solution
from secateurs_lab.reproduce.xor_nets import Points, Setting, XorTask, make_task

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = ("#c44e52", "#4c72b0")  # label -1, label +1
_LINES = ("#dd8452", "#4c72b0", "#55a868", "#8172b3")
_SHOWN = 600  # points in a figure: more hide each other


def draw_all(folder: Path, setting: Setting, swept: Sequence[SweptPoint] = ()) -> list[Path]:
    """Write every figure there is data for into `folder`; returns the files written."""
    task = make_task(Setting(seed=setting.seed, experiments=1, points=_SHOWN))
    figures = {"data": data_figure(task), "hidden": hidden_figure(task)}
    if swept:
        figures["sensitivity"] = sweep_figure(swept)
    return [file for name, figure in figures.items() for file in save_figure(figure, folder / f"xor-{name}")]


def data_figure(task: XorTask) -> Figure:
    """Draw the first experiment's points by label, with the directions a and b that decide it."""
    figure = new_figure(5.2, 4.8)
    axes = figure.add_subplot()
    _scatter(axes, task.train, task.train.x[0])
    arrow = {"arrowstyle": "-|>", "linewidth": 2.2, "color": "black", "shrinkA": 0, "shrinkB": 0, "mutation_scale": 18}
    box = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.8}
    for name, direction in (("a", task.a[0]), ("b", task.b[0])):
        x, y = direction.tolist()
        axes.axline((0, 0), (x, y), color="0.75", linewidth=0.8, zorder=0)
        axes.annotate("", (1.5 * x, 1.5 * y), (0, 0), arrowprops=arrow)
        axes.text(1.8 * x, 1.8 * y, name, fontsize=16, fontweight="bold", ha="center", va="center", bbox=box)
    axes.set(xlabel="$x_1$", ylabel="$x_2$", xlim=(-3.4, 3.4), ylim=(-3.4, 3.4), aspect="equal")
    axes.set_title("label = sign of (a · x)(b · x); arrows 1.5 long", fontsize=10)
    axes.legend(loc="upper right", framealpha=0.9)
    return figure


def hidden_figure(task: XorTask) -> Figure:
    """Draw the explicit solution's three activations before and after ReLU: there the output's plane divides the labels."""
    figure = new_figure(10.5, 5)
    nets = explicit_solution(task)
    before = (task.train.x @ nets.w1.mT)[0]
    panels = (("before ReLU: all points on one plane", before), ("after ReLU: label −1 falls below the plane", before.relu()))
    n1, n2, n3 = nets.w2[0].tolist()  # the normal of the plane through the origin
    x, y = np.meshgrid([-2.0, 2.0], [-2.0, 2.0])
    for place, (title, values) in enumerate(panels, start=1):
        axes = figure.add_subplot(1, 2, place, projection="3d")
        axes.plot_surface(x, y, -(n1 * x + n2 * y) / n3, color="0.5", alpha=0.2, linewidth=0)
        axes.quiver(0, 0, 0, n1, n2, n3, color="black", linewidth=1.8, length=1.4)
        _scatter(axes, task.train, values)
        axes.set_title(title, fontsize=11)
        axes.set(xlabel="a · x", ylabel="b · x", xlim=(-3, 3), ylim=(-3, 3), zlim=(-3, 3))
        axes.set_zlabel("(a + b) · x / √2")
        axes.view_init(elev=7, azim=-54)  # nearly along the plane, so that "below" can be seen
        axes.set_box_aspect((1, 1, 1), zoom=0.92)  # else the outer label is cut off
        if place == 1:
            axes.legend(loc="upper left", framealpha=0.9)
    return figure


def sweep_figure(points: Sequence[SweptPoint]) -> Figure:
    """Draw success of one-shot ensembles against the share of neurons off, a line for each number of masks."""
    figure = new_figure(6.4, 4.4)
    axes = figure.add_subplot()
    for colour, count in zip(_LINES * len(points), dict.fromkeys(point.masks for point in points), strict=False):
        line = sorted((point for point in points if point.masks == count), key=lambda point: point.off)
        shares = [point.off for point in line]
        low, high = zip(*(point.training.interval for point in line), strict=True)
        axes.plot(shares, [point.training.percent for point in line], "o-", color=colour, label=f"M = {count} masks")
        axes.fill_between(shares, low, high, color=colour, alpha=0.15, linewidth=0)
    for method, style in (("ensembles", "--"), ("random", ":")):
        height = PAPER["FCN10", method, "one-shot"]
        axes.axhline(height, color="0.35", linewidth=1, linestyle=style, label=f"paper, {method}")
    axes.set(xlabel="P: share of neurons off in a mask", ylabel="success, % of experiments", ylim=(0, 100))
    axes.set_title("3 of 10 neurons kept by one-shot ensembles; bands are 95 % intervals", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def _scatter(axes: Any, points: Points, values: Tensor) -> None:
    for label, name in enumerate(("−1", "+1")):
        chosen = values[points.y[0] == label]
        axes.scatter(*chosen.T.tolist(), s=9, alpha=0.6, color=_COLOURS[label], label=name, linewidths=0)
