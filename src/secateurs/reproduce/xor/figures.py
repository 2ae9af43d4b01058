"""The figures of the XOR experiment, each as PNG and SVG: data, hidden representation, success against P."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from secateurs.methods.compare.figures import new_figure, save_figure
from secateurs.reproduce.xor.experiment import PAPER, SweptPoint, explicit_solution
from secateurs.reproduce.xor.nets import Points, Setting, XorTask, make_task

_COLOURS = ("#c44e52", "#4c72b0")  # label -1, label +1
_LINES = ("#8c8c8c", "#dd8452", "#4c72b0", "#55a868", "#8172b3")
_SHOWN = 600  # points in a figure: more hide each other


def draw_all(folder: Path, setting: Setting, swept: Sequence[SweptPoint] = ()) -> list[Path]:
    """Write every figure there is data for into `folder`; returns the files written."""
    task = make_task(Setting(seed=setting.seed, experiments=1, points=_SHOWN))
    files = save_figure(data_figure(task), folder / "xor-data")
    files += save_figure(hidden_figure(task), folder / "xor-hidden")
    if swept:
        files += save_figure(sweep_figure(swept), folder / "xor-sensitivity")
    return files


def data_figure(task: XorTask) -> Figure:
    """The first experiment's points by label, with the directions a and b that decide it."""
    figure = new_figure(5.2, 4.8)
    axes = figure.add_subplot()
    _scatter(axes, task.train, task.train.x[0])
    for name, direction in (("a", task.a[0]), ("b", task.b[0])):
        x, y = direction.tolist()
        axes.axline((0, 0), (x, y), color="0.75", linewidth=0.8, zorder=0)
        arrow = {"arrowstyle": "-|>", "linewidth": 2.2, "color": "black", "shrinkA": 0, "shrinkB": 0, "mutation_scale": 18}
        axes.annotate("", (1.5 * x, 1.5 * y), (0, 0), arrowprops=arrow)
        box = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.8}
        axes.text(1.8 * x, 1.8 * y, name, fontsize=16, fontweight="bold", ha="center", va="center", bbox=box)
    axes.set(xlabel="$x_1$", ylabel="$x_2$", xlim=(-3.4, 3.4), ylim=(-3.4, 3.4), aspect="equal")
    axes.set_title("label = sign of (a · x)(b · x); arrows 1.5 long", fontsize=10)
    axes.legend(loc="upper right", framealpha=0.9)
    return figure


def hidden_figure(task: XorTask) -> Figure:
    """The explicit solution's three activations before and after ReLU: there the output's plane divides the labels."""
    figure = new_figure(10.5, 5)
    nets = explicit_solution(task)
    before = (task.train.x @ nets.w1.mT)[0]
    panels = (("before ReLU: all points on one plane", before), ("after ReLU: label −1 falls below the plane", before.relu()))
    for place, (title, values) in enumerate(panels, start=1):
        axes = figure.add_subplot(1, 2, place, projection="3d")
        _plane(axes, nets.w2[0])
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
    """Success of one-shot ensembles against the share of neurons off, a line for each number of masks."""
    figure = new_figure(6.4, 4.4)
    axes = figure.add_subplot()
    for colour, count in zip(_LINES[1:] * len(points), dict.fromkeys(point.masks for point in points), strict=False):
        line = sorted((point for point in points if point.masks == count), key=lambda point: point.off)
        shares = [point.off for point in line]
        low, high = zip(*(point.training.interval for point in line), strict=True)
        axes.plot(shares, [point.training.percent for point in line], "o-", color=colour, label=f"M = {count} masks")
        axes.fill_between(shares, low, high, color=colour, alpha=0.15, linewidth=0)
    for key, label in (
        (("FCN10", "ensembles", "one-shot"), "paper, ensembles"),
        (("FCN10", "random", "one-shot"), "paper, random"),
    ):
        axes.axhline(PAPER[key], color="0.35", linewidth=1, linestyle="--" if "ens" in label else ":", label=label)
    axes.set(xlabel="P: share of neurons off in a mask", ylabel="success, % of experiments", ylim=(0, 100))
    axes.set_title("3 of 10 neurons kept by one-shot ensembles; bands are 95 % intervals", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def _scatter(axes: Any, points: Points, values: Tensor) -> None:
    for label in (0, 1):
        chosen = values[points.y[0] == label]
        axes.scatter(
            *chosen.T.tolist(), s=9, alpha=0.6, color=_COLOURS[label], label="−1" if label == 0 else "+1", linewidths=0
        )


def _plane(axes: Any, normal: Tensor) -> None:
    """The plane through the origin across `normal`, and the normal itself."""
    n1, n2, n3 = normal.tolist()
    x, y = np.meshgrid([-2.0, 2.0], [-2.0, 2.0])
    axes.plot_surface(x, y, -(n1 * x + n2 * y) / n3, color="0.5", alpha=0.2, linewidth=0)
    axes.quiver(0, 0, 0, n1, n2, n3, color="black", linewidth=1.8, length=1.4)
