"""Training that cannot make a network worse: weights before, after, averaged and in between, compared on held-out examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Literal

import torch
from torch import Tensor, nn

from secateurs.training.state import copy_into_

START, END, AVERAGE = "start", "end", "average"
_BETWEEN = (0.25, 0.5, 0.75)  # of the way from the start to the end

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Candidate:
    """Weights that a training may leave, measured on held-out examples."""

    name: str
    loss: float | None  # None: not a finite number
    metric: float | None  # None: not measured, or not finite


@dataclass(frozen=True)
class KeptWeights:
    """Which of its candidates a training left, by which measure, and what was measured of each."""

    kept: str
    by: Literal["loss", "metric"]
    tried: tuple[Candidate, ...]  # the first is the start
    phase: str = "train"
    step: int = 0
    note: str = ""  # what was done otherwise than asked for

    def __post_init__(self) -> None:
        if not {self.kept, START, END} <= {each.name for each in self.tried}:
            raise ValueError(f"{self.kept!r} is kept, which is not among the weights that were tried")

    def summary(self) -> str:
        """One phrase, such as "average is kept: loss 0.0412 → 0.03 on held-out examples"."""
        found = {each.name: each.metric if self.by == "metric" else each.loss for each in self.tried}
        shown = {name: "not finite" if value is None else f"{value:.4g}" for name, value in found.items()}
        if self.by == "metric" and found[START] == found[END]:  # then the loss decided
            shown |= {each.name: f"{shown[each.name]} (loss {each.loss:.4g})" for each in self.tried if each.loss is not None}
        text = f"{self.kept} is kept: {self.by} {shown[START]} → {shown[self.kept]} on held-out examples"
        if self.kept == START:
            text = f"the weights before it are kept: {self.by} {shown[START]} on held-out examples, after it {shown[END]}"
        return f"{text}; {self.note}" if self.note else text


def candidates(start: Weights, end: Weights, last: Weights | None = None) -> dict[str, Weights]:
    """The weights to choose from, the start first; `last` are those of the last step where `end` is an average.

    Between start and end everything that is a floating-point number lies on the straight line; what did not move (an
    infinite value of an attention mask, say), and the rest, is the end's.
    """
    found = {START: start, END: {**end, **last}, AVERAGE: end} if last else {START: start, END: end}
    for share in _BETWEEN:
        found[f"{100 * share:.0f} % of the way"] = {
            name: torch.where(start[name] == tensor, tensor, start[name] + share * (tensor - start[name]))
            if tensor.is_floating_point()
            else tensor
            for name, tensor in end.items()
        }
    return found


def keep_best_(
    module: nn.Module,
    weights: Mapping[str, Weights],
    measure: Callable[[], tuple[float, float | None]],
    *,
    by: Literal["loss", "metric"],
) -> KeptWeights:
    """Give the module the best of several weights; the first, where no other is better.

    `measure` gives the loss and the metric of the module as it is. By "metric", the larger metric is better, and of equal ones
    the smaller loss. Weights with a loss or metric that is not finite are never better.
    """
    tried = []
    for name, each in weights.items():
        copy_into_(module, each)
        tried.append(Candidate(name, *(None if x is None or not isfinite(x) else x for x in measure())))
    best = tried[0]
    for candidate in tried[1:]:
        if better(candidate, best, by):
            best = candidate
    copy_into_(module, weights[best.name])
    return KeptWeights(best.name, by, tuple(tried))


def better(one: Candidate, other: Candidate, by: Literal["loss", "metric"]) -> bool:
    """Whether one candidate is better than another: see `keep_best_`."""
    if one.loss is None or (by == "metric" and one.metric is None):
        return False
    if other.loss is None or (by == "metric" and other.metric is None):
        return True
    if by == "metric" and one.metric != other.metric:
        assert one.metric is not None
        assert other.metric is not None
        return one.metric > other.metric
    return one.loss < other.loss
