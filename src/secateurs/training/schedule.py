"""Learning rates: a pure function of the step."""

from __future__ import annotations

from bisect import bisect_right
from math import ceil, cos, pi

from secateurs.config import TrainSettings

# one-cycle as in torch: starts at 1/25 of the peak, peaks at 30 % of the way, ends at 1/10,000 of its start
_START, _PEAK_AT, _END = 1 / 25, 0.3, 1e-4


def steps_in_epoch(count: int, batch: int) -> int:
    """Batches that `count` examples make; one example left over joins the batch before it."""
    # BatchNorm cannot normalise a single example
    return max(1, ceil(count / batch) - (count % batch == 1 and batch > 1))


def total_steps(settings: TrainSettings, per_epoch: int) -> int:
    """Optimiser steps of the whole training."""
    planned = settings.epochs * per_epoch
    return planned if settings.steps is None else min(planned, settings.steps)


def learning_rate(settings: TrainSettings, step: int, per_epoch: int) -> float:
    """The rate of optimiser step `step` (counted from 0) where an epoch has `per_epoch` steps."""
    peak, total = settings.rate, total_steps(settings, per_epoch)
    warmup = round(settings.warmup_share * total) if settings.warmup_share else settings.warmup * per_epoch
    if step < warmup:
        return peak * (step + 1) / warmup
    way = (step - warmup) / max(1, total - warmup)
    match settings.schedule:
        case "step":
            return peak * settings.factor ** bisect_right(settings.milestones, step // per_epoch)
        case "cosine":
            return _cosine(peak, 0.0, way)
        case "linear":
            return peak * (1 - way)
        case "one-cycle":
            return _one_cycle(peak, step, total)
    return peak


def _cosine(start: float, end: float, way: float) -> float:
    return end + (start - end) * (1 + cos(pi * way)) / 2


def _one_cycle(peak: float, step: int, total: int) -> float:
    top = _PEAK_AT * total - 1
    if step <= top:
        return _cosine(peak * _START, peak, step / top)
    return _cosine(peak, peak * _START * _END, (step - top) / (total - 1 - top))
