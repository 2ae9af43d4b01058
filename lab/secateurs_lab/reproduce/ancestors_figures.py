"""The pictures of lab/results/ancestors/README.md: the idea of each system, drawn from the functions that compute it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from secateurs_lab.compare.figures import new_figure, save_figure
from secateurs_lab.criteria.thinet import error, pursuit_order, removal_order, scales
from secateurs_lab.methods.l0 import chance_open, sample
from secateurs_lab.methods.obs_weights import delete_weight
from secateurs_lab.methods.ssl import group_lasso
from secateurs_lab.models.lenet import MaxPlus

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SIZE = (4.2, 2.9)
_COLOURS = ("#4c72b0", "#dd8452", "#55a868")


def draw_all(folder: Path) -> list[Path]:
    """Write every picture into `folder`; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {"obd": obd(), "obs": obs(), "han": han(), "thinet": thinet(), "ssl": ssl(), "l0": l0(), "maxplus": maxplus()}
    return [file for name, figure in found.items() for file in save_figure(figure, folder / name)]


def obd() -> Figure:
    """Two weights of equal size on losses of different curvature."""
    figure = new_figure(*_SIZE)
    axes, u = figure.add_subplot(), np.linspace(-0.3, 1.6, 100)
    for curvature, colour in ((2.0, _COLOURS[1]), (0.4, _COLOURS[0])):
        axes.plot(
            u, curvature * (u - 1) ** 2 / 2, color=colour, label=f"h = {curvature:g}: saliency h u²/2 = {curvature / 2:g}"
        )
        axes.plot([0], [curvature / 2], "o", color=colour)
    axes.axvline(1, color="0.7", linewidth=0.8)
    axes.set(xlabel="weight; trained at u = 1, deleted at 0", ylabel="increase of the loss", ylim=(-0.05, 1.6))
    axes.legend(fontsize=8)
    return figure


def obs() -> Figure:
    """A deletion with and without the surgeon's move, on a loss whose weights depend on each other."""
    figure = new_figure(*_SIZE)
    axes = figure.add_subplot()
    hessian, start = torch.tensor([[1.0, 0.85], [0.85, 1.0]]).double(), torch.tensor([0.7, 1.0]).double()
    x, y = np.meshgrid(np.linspace(-0.4, 1.3, 80), np.linspace(0.0, 2.0, 80))
    d = np.stack([x - 0.7, y - 1.0], -1)
    axes.contour(
        x,
        y,
        0.5 * np.einsum("abi,ij,abj->ab", d, hessian.numpy(), d),
        levels=[0.01, 0.05, 0.13, 0.25, 0.45, 0.8],
        colors="0.75",
        linewidths=0.8,
    )
    first, second = delete_weight(start, torch.linalg.inv(hessian), torch.ones(2, dtype=torch.bool)).weights.tolist()
    for end, colour, label in (
        ((0.0, 1.0), _COLOURS[1], "OBD: only w₁ → 0"),
        ((first, second), _COLOURS[2], "OBS: w₂ makes up for it"),
    ):
        axes.annotate("", end, (0.7, 1.0), arrowprops={"arrowstyle": "-|>", "color": colour, "linewidth": 1.8})
        axes.plot(*end, "o", color=colour, label=label)
    axes.set(xlabel="w₁", ylabel="w₂")
    axes.legend(fontsize=8, loc="lower left")
    return figure


def han() -> Figure:
    """Weights of a layer before, and after those below a share of the deviation are gone."""
    figure = new_figure(*_SIZE)
    axes, w = figure.add_subplot(), torch.randn(40_000, generator=torch.Generator().manual_seed(0)).numpy() * 0.05
    threshold = w.std()
    axes.hist(w, 80, color="0.8", label="before")
    axes.hist(w[abs(w) > threshold], 80, range=(w.min(), w.max()), color=_COLOURS[0], label="|w| above quality × deviation")
    axes.set(xlabel="weight (normal, quality 1)", ylabel="count")
    axes.legend(fontsize=8)
    return figure


def thinet() -> Figure:
    """Error of the next layer against the channels kept, for both greedy orders, on correlated channels drawn at random."""
    figure = new_figure(*_SIZE)
    axes, generator = figure.add_subplot(), torch.Generator().manual_seed(1)
    shares = torch.randn(4000, 6, generator=generator).double() @ torch.randn(6, 16, generator=generator).double()
    shares = shares + 0.7 * torch.randn(4000, 16, generator=generator).double() + 0.5
    moments, counts = shares.T @ shares, range(1, 16)
    for name, order, scaled, colour in (
        ("first greedy", removal_order(moments), False, _COLOURS[1]),
        ("first greedy, scaled", removal_order(moments), True, _COLOURS[0]),
        ("second greedy, scaled", pursuit_order(moments), True, _COLOURS[2]),
    ):
        errors = []
        for count in counts:
            keep = torch.ones(16, dtype=torch.bool)
            keep[order[: 16 - count]] = False
            errors.append(error(moments, scales(moments, keep) if scaled else keep.double()))
        axes.plot(counts, errors, "o-", markersize=3, color=colour, label=name)
    axes.set(xlabel="channels kept of 16", ylabel="error of the next layer", yscale="log")
    axes.legend(fontsize=8)
    return figure


def ssl() -> Figure:
    """Norms of two filters under group lasso and under weight decay, with a loss that holds only one of them."""
    figure = new_figure(*_SIZE)
    axes = figure.add_subplot()
    for penalty, style in (("group lasso", "-"), ("weight decay", "--")):
        weight, path = torch.full((2, 4), 0.5).double(), []
        for _ in range(300):
            weight.requires_grad_()
            pull = 0.25 * weight.square().sum() if penalty == "weight decay" else group_lasso(weight, {"filters": 0.5})
            (slope,) = torch.autograd.grad(pull + (weight[0] - 0.6).square().sum(), weight)
            weight = (weight - 0.02 * slope).detach()
            weight = torch.where(weight.abs() < 0.006, 0.0, weight)
            path.append(weight.norm(dim=1).tolist())
        for place, name in enumerate(("needed", "not needed")):
            axes.plot([row[place] for row in path], style, color=_COLOURS[place], label=f"{name}, {penalty}")
    axes.set(xlabel="training step", ylabel="norm of the filter")
    axes.legend(fontsize=7)
    return figure


def l0() -> Figure:
    """Distributions of a hard-concrete gate for three values of log α."""
    figure = new_figure(*_SIZE)
    axes, u = figure.add_subplot(), torch.rand(60_000, generator=torch.Generator().manual_seed(0)).clamp(1e-6, 1 - 1e-6)
    for value, colour in zip((-2.0, 0.0, 2.0), _COLOURS, strict=True):
        log_alpha = torch.tensor(value)
        label = f"log α = {value:g}: P(z ≠ 0) = {float(chance_open(log_alpha)):.2f}"
        axes.hist(sample(log_alpha, u).numpy(), 40, histtype="step", linewidth=1.5, color=colour, density=True, label=label)
    axes.set(xlabel="gate z", ylabel="density", yscale="log")
    axes.legend(fontsize=7)
    return figure


def maxplus() -> Figure:
    """Four filters that compete for one output, as functions of one input; one never wins."""
    figure = new_figure(*_SIZE)
    axes, x = figure.add_subplot(), torch.linspace(-2, 2, 101)
    slopes, layer = torch.tensor([-1.0, -0.2, 0.3, 1.0]), MaxPlus(4, 1)
    layer.weight.data = torch.tensor([[0.0, 0.9, 0.2, 0.0]])
    sums = layer.sums(x[:, None] * slopes + 1e-9).detach()[:, 0]
    for place, values in enumerate(sums.T):
        wins = bool((sums.argmax(1) == place).any())
        axes.plot(
            x, values, "-" if wins else ":", color="0.6" if wins else _COLOURS[1], label=None if wins else "never wins: can go"
        )
    axes.plot(x, sums.amax(1), color=_COLOURS[0], linewidth=2, label="out = max of x_j + w_j")
    axes.set(xlabel="input", ylabel="x_j + w_j")
    axes.legend(fontsize=8)
    return figure
