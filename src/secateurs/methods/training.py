"""The one place where methods train: it divides a budget into stretches, the same for everybody, and spends them in order.

The steps of `between` come in as many equal pieces as the untouched network has sites. A method that cuts step by step takes
one after each cut, any other takes them in a row; either way all see the same batches at the same rates in the same order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from secateurs.config import TrainSettings
from secateurs.data.dataset import derive
from secateurs.errors import InvalidInput, TrainingError
from secateurs.methods.base import MethodRun, MethodState, Pruned, Task, Trained
from secateurs.metrics import cross_entropy
from secateurs.training import TrainState, learning_rate, train_
from secateurs.training.schedule import steps_in_epoch, total_steps
from secateurs.training.state import StateMeta, capture

Phase = Literal["finetune", "retrain"]
AtEpoch = Callable[[int, int], None]
"""Gets the images of the whole budget that were seen before and after an epoch, or what there was of it."""

_TRAINING = "checkpoints/training"


@dataclass(frozen=True)
class Stretch:
    """A part of the budget that is spent at once."""

    phase: Phase
    settings: TrainSettings  # with the seed of this stretch alone


def training_stages(task: Task, sites: int) -> tuple[Stretch, ...]:
    """The budget of a task on a network with so many sites, in the order in which everybody spends it."""
    found: list[Stretch] = []
    examples, between, after = len(task.data.train), task.budget.between, task.budget.after
    if between is not None:
        planned = _steps(between, examples)
        bounds = [planned * piece // max(sites, 1) for piece in range(max(sites, 1) + 1)]
        pieces = [end - start for start, end in pairwise(bounds) if end > start]
        for number, steps in enumerate(pieces):
            seed = derive(task.seed, "between", number)
            found.append(Stretch("finetune", replace(between, steps=steps, seed=seed)))
    if after is not None and _steps(after, examples):
        found.append(Stretch("retrain", replace(after, seed=derive(task.seed, "after"))))
    return tuple(found)


def tally(settings: TrainSettings, examples: int, steps: int) -> Trained:
    """What the first so many steps of a training on so many examples come to."""
    per_epoch = steps_in_epoch(examples, settings.batch)
    last = examples - settings.batch * (per_epoch - 1)  # the last batch of an epoch holds what is left
    sizes = [last if step % per_epoch == per_epoch - 1 else settings.batch for step in range(steps)]
    rates = (learning_rate(settings, step, per_epoch) * size for step, size in enumerate(sizes))
    return Trained(sum(sizes), math.fsum(rates))


def total(parts: Sequence[Trained]) -> Trained:
    """Stretches of training, added up."""
    return Trained(sum(part.images for part in parts), math.fsum(part.rate_sum for part in parts))


def owed(task: Task, sites: int) -> Trained:
    """What the budget of a task says that everybody gets."""
    examples = len(task.data.train)
    whole = [stretch.settings for stretch in training_stages(task, sites)]
    return total([tally(settings, examples, _steps(settings, examples)) for settings in whole])


def train_next(work: MethodRun, standing: MethodState, at_epoch: AtEpoch | None = None) -> MethodState:
    """The standing after the next stretch of the budget; as it is, where nothing of `between` is left.

    `at_epoch` may change the weights after every epoch: training goes on from what it leaves, with the momentum as it was.
    """
    left = training_stages(work.task, len(work.sites))[len(standing.trained) :]
    return _trained(work, standing, left[0], at_epoch) if left and left[0].phase == "finetune" else standing


def train_rest(work: MethodRun, standing: MethodState, at_epoch: AtEpoch | None = None) -> MethodState:
    """The standing after all that is left of the budget, each stretch written down when it is done."""
    for stretch in training_stages(work.task, len(work.sites))[len(standing.trained) :]:
        standing = work.keep(_trained(work, standing, stretch, at_epoch))
    return standing


def finished(work: MethodRun, standing: MethodState) -> Pruned:
    """What the method gives, after making sure that the target is reached and the budget spent, no less and no more."""
    spent, due = total(standing.trained), owed(work.task, len(work.sites))
    if spent != due:
        raise TrainingError(
            f"budget {work.task.budget.name!r}: {spent.images:,} images were trained on (rates add up to {spent.rate_sum:g}), "
            f"wanted {due.images:,} ({due.rate_sum:g}): methods that are trained differently cannot be compared."
        )
    if not work.reached(standing.graph):
        raise InvalidInput(
            f"target_macs = {work.task.target_macs:g}: only {work.removed(standing.graph):.3f} of the MACs are gone at the end."
        )
    return Pruned(standing.graph, spent, standing.passes, standing.search_seconds, standing.training_seconds, standing.note)


def _trained(work: MethodRun, standing: MethodState, stretch: Stretch, at_epoch: AtEpoch | None) -> MethodState:
    """One stretch, resumed after its last epoch that was kept; the network of the standing is trained in place."""
    task, settings, number = work.task, stretch.settings, len(standing.trained)
    module, examples = standing.graph.module, task.data.train
    assert module is not task.graph.module, "the network that was lent is never trained"
    before, began = total(standing.trained).images, time.monotonic()

    def kept(state: TrainState) -> None:
        if at_epoch is not None:
            seen = [0, *(tally(settings, len(examples), record.steps).images for record in state.records()[-2:])]
            at_epoch(before + seen[-2], before + seen[-1])
            scaler = state.meta["scaler"]
            state = capture(module, state.momentum(), state.records(), settings, examples=len(examples), scaler=scaler)
        work.record.save_tensors(_TRAINING, state.tensors, {**state.meta, "stretch": number})

    history = train_(
        module,
        examples,
        settings,
        teacher=task.graph.module if settings.distill else None,
        loss_fn=None if task.loss_fn is cross_entropy else task.loss_fn,
        metric=task.metric,
        device=task.device,
        momentum=standing.momentum,
        resume=_state(work, number),
        save=kept,
        on_step=lambda done, planned: work.tell(stretch.phase, done, planned),
    )
    trained = tally(settings, len(examples), history.epochs[-1].steps)
    return replace(
        standing,
        momentum=history.momentum,
        trained=(*standing.trained, trained),
        training_seconds=standing.training_seconds + time.monotonic() - began,
    )


def _state(work: MethodRun, number: int) -> TrainState | None:
    """The last epoch that was kept of the stretch of that number."""
    found = work.record.load_tensors(_TRAINING, StateMeta)
    if found is None or found[1].get("stretch") != number:
        return None
    tensors, meta = found
    return TrainState(tensors, {key: value for key, value in meta.items() if key != "stretch"})


def _steps(settings: TrainSettings, examples: int) -> int:
    return total_steps(settings, steps_in_epoch(examples, settings.batch))
