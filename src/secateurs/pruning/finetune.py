"""What a network learns after a cut: new statistics for BatchNorm, fine-tuning, retraining. Training goes on after a crash.

Where the budget is one for the whole run, weights that would break it are not taken.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace

from secateurs.config import TrainSettings
from secateurs.data.dataset import derive
from secateurs.data.splits import subset
from secateurs.metrics import cross_entropy
from secateurs.pruning.checkpoints import TRAINING, keep_retrained, load_retrained_
from secateurs.pruning.context import AccuracyBudget, NetworkState, RunContext, measured
from secateurs.pruning.folder import Record
from secateurs.training import EpochRecord, TrainState, recalibrate_, train_
from secateurs.training.state import StateMeta


@dataclass(frozen=True)
class TrainingPhase:
    """A training within a run."""

    settings: TrainSettings
    phase: str  # "finetune", "retrain"
    step: int  # that it belongs to; retraining follows the last one


def recalibrate_statistics_(outfit: RunContext, standing: NetworkState) -> NetworkState:
    """Measure BatchNorm's statistics anew, if that is asked for."""
    workshop, count = outfit.workshop, outfit.workshop.recipe.recalibrate
    if count is None:
        return standing

    def recalibrate() -> NetworkState:
        train, recipe = workshop.data.train, workshop.recipe
        chosen = subset(train, min(count, len(train)), seed=derive(recipe.seed, "recalibrate"))
        recalibrate_(standing.graph.module, chosen, batch=recipe.batch, device=workshop.tools.device)
        return measured(workshop, standing)

    return _rollback_if_over_budget(outfit.judge, standing, recalibrate, if_within=True)


def finetune_(outfit: RunContext, standing: NetworkState) -> NetworkState:
    """Train the network after a cut, if that is asked for."""
    settings = outfit.workshop.recipe.finetune
    return standing if settings is None else _train_(outfit, standing, TrainingPhase(settings, "finetune", outfit.step))


def retrain_(outfit: RunContext, standing: NetworkState) -> NetworkState:
    """Train the network at the end, if that is asked for."""
    settings, record = outfit.workshop.recipe.retrain, outfit.record
    if settings is None:
        return standing
    if record.units("retrained"):
        load_retrained_(record, standing.graph)
        return standing
    standing = _train_(outfit, standing, TrainingPhase(settings, "retrain", outfit.step))
    keep_retrained(record, standing)
    return standing


def _train_(outfit: RunContext, standing: NetworkState, lesson: TrainingPhase) -> NetworkState:
    workshop, record = outfit.workshop, outfit.record
    tools, recipe = workshop.tools, workshop.recipe
    settings = replace(lesson.settings, seed=derive(recipe.seed, lesson.phase, lesson.step))
    resumed = _training_state(record, lesson)
    if resumed is not None:  # killed between the checkpoint and its line in the journal
        _note_epochs(record, lesson, resumed)

    def keep(state: TrainState) -> None:
        record.save_tensors(TRAINING, state.tensors, {**state.meta, "phase": lesson.phase, "step": lesson.step})
        _note_epochs(record, lesson, state)

    def tell(epoch: EpochRecord) -> None:
        outfit.whereabouts.tell(lesson.phase, epoch.epoch + 1, settings.epochs)

    def train() -> NetworkState:
        history = train_(
            standing.graph.module,
            workshop.data.train,
            settings,
            search=workshop.search,
            teacher=workshop.original.module if settings.distill else None,
            loss_fn=None if tools.loss_fn is cross_entropy else tools.loss_fn,
            metric=tools.metric,
            device=tools.device,
            momentum=standing.momentum,
            resume=resumed,
            save=keep,
            on_epoch=tell,
        )
        learnt = replace(standing, momentum=dict(history.momentum))
        last = history.epochs[-1] if history.epochs else None
        if last is None or last.search_accuracy is None or last.search_loss is None:
            return measured(workshop, learnt)
        return replace(learnt, accuracy=last.search_accuracy, loss=last.search_loss)  # it was measured after its last epoch

    return _rollback_if_over_budget(outfit.judge, standing, train, if_within=recipe.budget == "run")


def _rollback_if_over_budget(
    judge: AccuracyBudget, standing: NetworkState, learn_: Callable[[], NetworkState], *, if_within: bool
) -> NetworkState:
    """The network with the weights that `learn_` gives it.

    If that is wanted, and the new weights break the budget, the network gets its old ones again.
    """
    weights = copy.deepcopy(standing.graph.module.state_dict())
    learnt = learn_()
    if not if_within or judge.still_within(learnt):
        return learnt
    standing.graph.module.load_state_dict(weights)
    return standing


def _note_epochs(record: Record, lesson: TrainingPhase, state: TrainState) -> None:
    """Journal the epochs that a checkpoint holds and the journal does not."""
    known = record.units("epoch", step=lesson.step, phase=lesson.phase)
    for epoch in state.meta["epochs"][len(known) :]:
        record.append("epoch", step=lesson.step, phase=lesson.phase, **epoch)


def _training_state(record: Record, lesson: TrainingPhase) -> TrainState | None:
    """Where the lesson was stopped, if it was."""
    found = record.load_tensors(TRAINING, StateMeta)
    if found is None or (found[1].get("phase"), found[1].get("step")) != (lesson.phase, lesson.step):
        return None
    tensors, meta = found
    return TrainState(tensors, {key: value for key, value in meta.items() if key not in ("phase", "step")})
