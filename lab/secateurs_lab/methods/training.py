"""The one place where methods train: divides a budget into stages, the same for every method, and spends them in order.

The steps of `between` come in as many equal stages as the original network has sites. A method that cuts step by step takes
one after each cut, any other takes them in a row; either way all see the same batches at the same rates in the same order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Literal

from torch import Tensor

from secateurs.config import TrainSettings
from secateurs.errors import InvalidInput, TrainingError
from secateurs.graph.features import paired_features
from secateurs.metrics import cross_entropy
from secateurs.training import EpochRecord, History, KeptWeights, candidates, keep_best_, learning_rate
from secateurs.training.objective import Penalty, held_out_means, judge_for
from secateurs.training.resumable import seeded_for, train_resumably_
from secateurs.training.schedule import steps_in_epoch, total_steps
from secateurs.training.state import snapshot
from secateurs_lab.methods.base import ROUNDING, EpochSeconds, MethodRun, MethodState, Pruned, Task, Trained

AtEpoch = Callable[[int, int], None]
"""Gets the images of the whole budget that were seen before and after an epoch, or a part of one."""


@dataclass(frozen=True)
class TrainingStage:
    """A part of the budget that is spent at once."""

    phase: Literal["finetune", "retrain"]
    settings: TrainSettings  # with the seed of this stage


def training_stages(task: Task, sites: int) -> tuple[TrainingStage, ...]:
    """The budget of a task on a network with this number of sites, in the order in which every method spends it."""
    found: list[TrainingStage] = []
    examples, between, after = len(task.data.train), task.budget.between, task.budget.after
    if between is not None:
        planned = _steps(between, examples)
        bounds = [planned * stage // max(sites, 1) for stage in range(max(sites, 1) + 1)]
        stages = [end - start for start, end in pairwise(bounds) if end > start]
        for number, steps in enumerate(stages):
            found.append(TrainingStage("finetune", seeded_for(replace(between, steps=steps), task.seed, "between", number)))
    if after is not None and _steps(after, examples):
        found.append(TrainingStage("retrain", seeded_for(after, task.seed, "after")))
    return tuple(found)


def tally(settings: TrainSettings, examples: int, steps: int) -> Trained:
    """Images and learning rates of the first `steps` steps of a training on this number of examples."""
    per_epoch = steps_in_epoch(examples, settings.batch)
    last = examples - settings.batch * (per_epoch - 1)  # the last batch of an epoch holds the rest
    sizes = [last if step % per_epoch == per_epoch - 1 else settings.batch for step in range(steps)]
    rates = (learning_rate(settings, step, per_epoch) * size for step, size in enumerate(sizes))
    return Trained(sum(sizes), math.fsum(rates))


def total(parts: Sequence[Trained]) -> Trained:
    """The sum of several stages."""
    return Trained(sum(part.images for part in parts), math.fsum(part.rate_sum for part in parts))


def train_next(
    run: MethodRun,
    state: MethodState,
    at_epoch: AtEpoch | None = None,
    *,
    after_step: Callable[[], None] | None = None,
    penalty: Penalty | None = None,
) -> MethodState:
    """The state after the next stage of the budget, resumed after its last saved epoch; the network is trained in place.

    `at_epoch` may change the weights after every epoch, `after_step` after every step: training continues from what they
    leave, the momentum unchanged. `penalty` is added to what the budget's settings minimise. Of a stage that was killed the
    seconds of its saved epochs count.
    """
    task, spent = run.task, state.spent
    began = marked = _now(run)
    earlier = epoch_seconds(run, spent.stages)
    stages, examples = training_stages(task, len(run.sites)), len(task.data.train)
    stage, before = stages[spent.stages], _trained(stages[: spent.stages], examples).images
    assert state.graph.module is not task.graph.module, "the task's own network is never trained"
    start = snapshot(state.graph.module)  # also of a resumed stage, whose checkpoint is not loaded yet

    def after_epoch(records: list[EpochRecord]) -> None:
        nonlocal marked
        if at_epoch is not None:
            seen = [0, *(tally(stage.settings, examples, record.steps).images for record in records[-2:])]
            at_epoch(before + seen[-2], before + seen[-1])
        number, now = records[-1].epoch, _now(run)
        earlier.pop(number, None)  # killed before its checkpoint was written: the epoch was done again
        run.journal.append(EpochSeconds(spent.stages, number, now - marked))
        marked = now

    def on_step(done: int, planned: int) -> None:
        if after_step is not None:
            after_step()
        run.report(stage.phase, done, planned)

    history = train_resumably_(
        run.journal,
        state.graph.module,
        task.data.train,
        stage.settings,
        phase=stage.phase,
        step=spent.stages,
        after_epoch=after_epoch,
        teacher=run.teacher,
        features=partial(paired_features, state.graph, task.graph),
        loss_fn=None if task.loss_fn is cross_entropy else task.loss_fn,
        penalty=penalty,
        metric=task.metric,
        device=task.device,
        momentum=state.momentum,
        on_step=on_step,
    )
    assert history.epochs[-1].steps == _steps(stage.settings, examples), "a stage is spent as a whole"
    note = "; ".join(filter(None, (spent.note, history.note)))
    cut = at_epoch is None and penalty is None  # else the cut is still to come, and nothing is lost before it
    if stage.phase == "retrain" and task.budget.keep_best and cut:
        kept = _keep_best_(run, state, start, history, stage.settings)
        run.journal.once(KeptWeights, lambda: replace(kept, phase=stage.phase, step=spent.stages), step=spent.stages)
        note = "; ".join(filter(None, (note, kept.summary())))
    seconds = spent.training_seconds + sum(earlier.values()) + _now(run) - began
    spent = replace(spent, stages=spent.stages + 1, training_seconds=seconds, note=note)
    return replace(state, momentum=history.momentum, spent=spent)


def epoch_seconds(run: MethodRun, stage: int) -> dict[int, float]:
    """Seconds of the journaled epochs of a stage, by epoch."""
    return {record.epoch: record.seconds for record in run.journal.of(EpochSeconds, step=stage)}


def _now(run: MethodRun) -> float:
    """A clock that also counts answers that another row has paid for: rows are compared at equal time."""
    return time.monotonic() + (0.0 if run.teacher is None else run.teacher.spared)


def _keep_best_(
    run: MethodRun, state: MethodState, start: Mapping[str, Tensor], history: History, settings: TrainSettings
) -> KeptWeights:
    """Leave the best of the weights before, after and in between in the network, as a run does."""
    task, module = run.task, state.graph.module
    teacher = run.teacher
    own = None if task.loss_fn is cross_entropy else task.loss_fn
    judge = judge_for(settings, loss_fn=own, teacher=teacher)

    def measure() -> tuple[float, float | None]:
        options: dict[str, Any] = {"teacher": teacher, "metric": task.metric, "batch": task.batch, "device": task.device}
        return held_out_means(module, run.context.held_out_examples, judge, **options)

    by: Literal["loss", "metric"] = "metric" if settings.distill < 1 or own is not None else "loss"
    return keep_best_(module, candidates(start, snapshot(module), history.last), measure, by=by)


def train_rest(run: MethodRun, state: MethodState, at_epoch: AtEpoch | None = None) -> MethodState:
    """The state after all that is left of the budget, saved after each stage."""
    while state.spent.stages < len(training_stages(run.task, len(run.sites))):
        state = run.save(train_next(run, state, at_epoch))
    return state


def finished(run: MethodRun, state: MethodState) -> Pruned:
    """What the method gives, after a check that the target is reached and the budget spent, no less and no more."""
    task, spent = run.task, state.spent
    done = _trained(training_stages(task, len(run.sites))[: spent.stages], len(task.data.train))
    check_outcome(task, len(run.sites), done, run.removed(state.graph))
    return Pruned(state.graph, done, spent.passes, spent.search_seconds, spent.training_seconds, spent.note)


def check_outcome(task: Task, sites: int, done: Trained, removed: float) -> None:
    """Raise unless the training that was done is the budget's, and the share of the MACs that is removed the target."""
    due = _trained(training_stages(task, sites), len(task.data.train))
    if done.images != due.images or not math.isclose(done.rate_sum, due.rate_sum, rel_tol=1e-9):
        raise TrainingError(
            f"budget {task.budget.name!r}: {done.images:,} images were trained on (rates add up to {done.rate_sum:g}), "
            f"wanted {due.images:,} ({due.rate_sum:g}): methods that are trained differently cannot be compared."
        )
    if task.target_macs and removed < task.target_macs - ROUNDING:
        raise InvalidInput(f"target_macs = {task.target_macs:g}: only {removed:.3f} of the MACs are removed at the end.")


def _trained(stages: Sequence[TrainingStage], examples: int) -> Trained:
    return total([tally(stage.settings, examples, _steps(stage.settings, examples)) for stage in stages])


def _steps(settings: TrainSettings, examples: int) -> int:
    return total_steps(settings, steps_in_epoch(examples, settings.batch))
