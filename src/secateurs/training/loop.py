"""The training loop: augmented batches, distillation, averaged weights; deterministic, resumable after every epoch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from math import ceil, inf, isfinite
from typing import Any

import torch
from torch import Tensor, nn

from secateurs._util.modules import Device, channels_last, eval_mode, keeping_gradients, keeping_modes, on_device
from secateurs.config import Optimiser, TrainSettings
from secateurs.data.dataset import Examples, generator_for
from secateurs.data.stream import Stream
from secateurs.errors import Diverged, InvalidInput
from secateurs.graph.features import FeaturePairs
from secateurs.metrics import Measure, correct, cross_entropy, evaluate, loss
from secateurs.training.checks import check_paired, check_trainable
from secateurs.training.epochs import Loop
from secateurs.training.objective import Penalty, held_out_means, judge_for, objective_for
from secateurs.training.schedule import steps_in_epoch, total_steps
from secateurs.training.state import EpochRecord, History, RateTrials, TrainState, copy_into_, snapshot, undone_on_error

Features = Callable[[], FeaturePairs | None]
"""Pairs the network that is trained with its teacher; called when both are where they are trained."""

AUTO_RATES: dict[Optimiser, tuple[float, ...]] = {"sgd": (5e-4, 2e-3, 1e-2), "adamw": (5e-5, 2e-4, 1e-3)}
"""What lr "auto" chooses from."""

_PILOT_STEPS, _PILOT_EXAMPLES = 50, 512


def train_(
    module: nn.Module,
    examples: Examples | Stream,
    settings: TrainSettings,
    *,
    search: Examples | None = None,
    held_out: Examples | None = None,
    teacher: nn.Module | None = None,
    features: Features | None = None,
    loss_fn: Measure | None = None,
    penalty: Penalty | None = None,
    metric: Measure | None = None,
    device: Device = None,
    momentum: Mapping[str, Tensor] | None = None,
    resume: TrainState | None = None,
    save: Callable[[TrainState], None] | None = None,
    on_epoch: Callable[[EpochRecord], None] | None = None,
    on_step: Callable[[int, int], None] | None = None,
) -> History:
    """Train the module in place; ends with the same weights however often it was stopped and resumed after an epoch.

    The loss is cross-entropy and the metric accuracy unless others are given (with a loss of your own and no metric,
    only losses are recorded). `search` (the validation set) is measured after every epoch and changes nothing; `held_out`
    chooses the rate where that is "auto" (see `find_rate`). `teacher` runs only where `settings.distill` is above 0; `features`
    pairs the module with it where `settings.features` is, and may find nothing to pair. `penalty` is added to all of it.
    `momentum` (by parameter name) starts SGD. Averaged weights are what is measured, and what the training ends with; those of
    the last step are then in `History.last`. After every epoch `save` gets the state that `resume` takes, then `on_epoch`
    its record; `on_step` gets the number of optimiser steps done and of those planned. The user's random state, the module's
    mode, device and gradients are as before afterwards; after an error the weights are those of the start of its epoch.
    """
    if teacher is module:
        raise InvalidInput("the teacher is the network that is trained: give a copy of it from before")
    check_trainable(module, examples, settings)
    shown = metric if metric is not None or loss_fn is not None else correct
    if settings.lr == "auto" and resume is not None:
        settings = replace(settings, lr=resume.meta["settings"]["lr"])
    elif settings.lr == "auto":
        found = find_rate(
            *(module, examples, settings),
            held_out=held_out,
            teacher=teacher,
            features=features,
            loss_fn=loss_fn,
            penalty=penalty,
            device=device,
            momentum=momentum,
        )
        settings = replace(settings, lr=found.lr)
    if settings.features and features is None:
        raise InvalidInput(
            f"features = {settings.features:g} needs to know which feature maps are compared: give "
            f"features=partial(paired_features, graph, original), or set features = 0"
        )

    def measure() -> tuple[float | None, float | None]:
        chosen = cross_entropy if loss_fn is None else loss_fn
        if search is None or shown is None:
            return None if search is None else loss(module, search, loss_fn=chosen, batch=settings.batch), None
        found = evaluate(module, search, loss_fn=chosen, metric=shown, batch=settings.batch)
        return found.loss, found.accuracy

    with ExitStack() as stack:
        stack.enter_context(keeping_gradients(module))
        place = stack.enter_context(on_device(module, device))
        if teacher is not None:
            stack.enter_context(on_device(teacher, place))
            stack.enter_context(eval_mode(teacher))
        pairs = features() if settings.features and features is not None else None  # of tensors that are where they are trained
        if pairs is not None:
            stack.enter_context(on_device(pairs.theirs, place))  # the teacher may be a copy of it
            stack.enter_context(eval_mode(pairs.theirs))
            check_paired(module, pairs)
        stack.enter_context(keeping_modes(module))
        stack.enter_context(torch.enable_grad())
        if settings.channels_last:
            stack.enter_context(channels_last(module))
        objective = objective_for(settings, loss_fn=loss_fn, teacher=teacher, pairs=pairs, penalty=penalty)
        counted = None if settings.mixup else shown  # a mixture has no label
        loop = Loop(module, examples, settings, objective, pairs, counted, place, on_step)
        records = loop.start(resume, momentum)
        while loop.step < loop.planned:
            record = loop.epoch(len(records), measure)
            records.append(record)
            if save is not None:
                save(loop.state(records))
            if on_epoch is not None:
                on_epoch(record)
        last = loop.take_average_()
        return History(tuple(records), loop.momentum(), last, loop.note)


def find_rate(
    module: nn.Module,
    examples: Examples | Stream,
    settings: TrainSettings,
    *,
    held_out: Examples | None = None,
    teacher: nn.Module | None = None,
    features: Features | None = None,
    loss_fn: Measure | None = None,
    penalty: Penalty | None = None,
    device: Device = None,
    momentum: Mapping[str, Tensor] | None = None,
) -> RateTrials:
    """Choose the learning rate: the one of `AUTO_RATES` that lowers the loss on `held_out` most in a training of 50 steps.

    Each trial runs through the whole schedule, from the same weights, which the module has again afterwards. Without
    `held_out`, a quarter of the examples, at most 512, are kept out of the trials.
    """
    if held_out is None:
        if isinstance(examples, Stream):
            raise InvalidInput("lr = 'auto' on a loader: give held_out=… to judge the rates by, or a number as lr")
        if len(examples) < 2:
            raise InvalidInput("lr = 'auto' needs at least 2 training examples: give a number as lr")
        order = torch.randperm(len(examples), generator=generator_for(settings.seed, "pilot"))
        aside = max(1, min(_PILOT_EXAMPLES, len(examples) // 4))
        held_out, examples = examples.take(order[:aside]), examples.take(order[aside:])
    count = examples.length or 1 if isinstance(examples, Stream) else steps_in_epoch(len(examples), settings.batch)
    steps = min(_PILOT_STEPS, total_steps(settings, count))
    short = replace(settings, steps=steps, epochs=max(1, ceil(steps / count)), warmup=0, average=0.0)
    judge, tried = judge_for(settings, loss_fn=loss_fn, teacher=teacher), list[tuple[float, float | None]]()
    before = snapshot(module)
    with undone_on_error(module):
        for rate in AUTO_RATES[settings.optimiser]:
            options: dict[str, Any] = {"teacher": teacher, "features": features, "loss_fn": loss_fn, "device": device}
            try:
                train_(
                    module, examples, replace(short, lr=rate), metric=_no_metric, penalty=penalty, momentum=momentum, **options
                )
                found, _ = held_out_means(module, held_out, judge, teacher=teacher, batch=settings.batch, device=device)
            except Diverged:
                found = inf
            tried.append((rate, found if isfinite(found) else None))
            copy_into_(module, before)
    best = min(tried, key=lambda trial: inf if trial[1] is None else trial[1])
    if best[1] is None:
        raise Diverged(
            f"lr = 'auto': training diverges at all of {', '.join(f'{rate:g}' for rate, _ in tried)}. Check that inputs and "
            f"weights are finite and scaled, or give a lower rate as lr."
        )
    return RateTrials(best[0], tuple(tried))


def _no_metric(outputs: Any, targets: Any) -> Tensor:
    """Trials need no metric, and the user's own may be slow."""
    return torch.zeros(())
