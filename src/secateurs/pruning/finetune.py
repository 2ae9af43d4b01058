"""Training within a run: BatchNorm statistics recalibrated, fine-tuning after a cut, retraining at the end; all resumable.

Where one budget covers the whole run, weights that would exceed it are rolled back.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from secateurs._util.modules import device_of, keeping_modes
from secateurs._util.tensors import first_non_finite
from secateurs.config import TrainSettings
from secateurs.data.dataset import derive
from secateurs.data.splits import subset
from secateurs.errors import RunError, TrainingError
from secateurs.metrics import cross_entropy
from secateurs.pruning.budget import AccuracyBudget
from secateurs.pruning.context import NetworkState, PruningContext
from secateurs.pruning.results import Retrained
from secateurs.training import recalibrate_
from secateurs.training.resumable import CHECKPOINT, train_resumably_

RETRAINED = "checkpoints/retrained"
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def recalibrate(context: PruningContext, budget: AccuracyBudget, state: NetworkState) -> NetworkState:
    """Recompute BatchNorm's statistics on training examples, if the recipe asks for that."""
    recipe, train = context.recipe, context.data.train
    if recipe.recalibrate is None:
        return state
    chosen = subset(train, min(recipe.recalibrate, len(train)), seed=derive(recipe.seed, "recalibrate"))

    def trained() -> NetworkState:
        recalibrate_(state.graph.module, chosen, batch=recipe.batch, device=context.runtime.device)
        return context.measured(state)

    return _rollback_if_over_budget(budget, state, trained)


def finetune(context: PruningContext, budget: AccuracyBudget, state: NetworkState, step: int) -> NetworkState:
    """Train the network after a cut, if the recipe asks for that."""
    if context.runtime.finetune is not None:
        train = context.runtime.finetune
        if context.recipe.budget == "site":
            return _train_by_user(context, state, train, step)
        return _rollback_if_over_budget(budget, state, lambda: _train_by_user(context, state, train, step))
    settings = context.recipe.finetune
    return state if settings is None else _train(context, budget, state, settings, "finetune", step)


def retrain(context: PruningContext, budget: AccuracyBudget, state: NetworkState, step: int) -> NetworkState:
    """Train the network at the end, if the recipe asks for that."""
    settings, journal = context.recipe.retrain, context.journal
    if settings is None:
        return state
    if known := journal.of(Retrained):
        journal.check_files(known[0])
        found = journal.load_tensors(RETRAINED)
        if found is None:
            raise RunError(f"{journal.path}: the retrained weights are missing. Restore checkpoints/ from a copy.")
        state.graph.module.load_state_dict(found[0])
        return state
    state = _train(context, budget, state, settings, "retrain", step)
    journal.save_tensors(RETRAINED, state.graph.module.state_dict(), listed=True)
    journal.append(Retrained(state.accuracy, state.loss, journal.file_digests(f"{RETRAINED}.safetensors")))
    journal.delete(CHECKPOINT)
    return state


def _train_by_user(context: PruningContext, state: NetworkState, train: Callable[..., Any], step: int) -> NetworkState:
    """Call the user's training, and check what it leaves: the same parameters, finite, where they were."""
    module = state.graph.module
    before, place = {name: tuple(p.shape) for name, p in module.named_parameters()}, device_of(module)
    wanted = [p for p in inspect.signature(train).parameters.values() if p.kind in _POSITIONAL and p.default is p.empty]
    context.progress.report("finetune", 0, 1)
    with keeping_modes(module), torch.enable_grad():
        train(module, step) if len(wanted) > 1 else train(module)
    module.to(place)
    after = {name: tuple(p.shape) for name, p in module.named_parameters()}
    if after != before:
        changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
        raise TrainingError(
            f"finetune changed the parameters {', '.join(changed[:3])} of the network: wanted the same names and shapes. Train "
            f"the network that is given in place."
        )
    wrong = first_non_finite(dict(module.named_parameters()))
    if wrong is not None:
        raise TrainingError(f"finetune left NaN or infinite values in {wrong!r}: lower its learning rate.")
    context.progress.report("finetune", 1, 1)
    return context.measured(replace(state, momentum={}))


def _train(
    context: PruningContext, budget: AccuracyBudget, state: NetworkState, settings: TrainSettings, phase: str, step: int
) -> NetworkState:
    runtime, recipe = context.runtime, context.recipe
    settings = replace(settings, seed=derive(recipe.seed, phase, step))

    def trained() -> NetworkState:
        history = train_resumably_(
            context.journal,
            state.graph.module,
            context.data.train if runtime.train is None else runtime.train,
            settings,
            phase=phase,
            step=step,
            search=context.validation,
            teacher=context.original.module if settings.distill else None,
            loss_fn=None if runtime.loss_fn is cross_entropy else runtime.loss_fn,
            metric=runtime.metric,
            device=runtime.device,
            momentum=state.momentum,
            on_epoch=lambda epoch: context.progress.report(phase, epoch.epoch + 1, settings.epochs),
        )
        found = replace(state, momentum=dict(history.momentum))
        last = history.epochs[-1] if history.epochs else None
        if last is None or last.search_accuracy is None or last.search_loss is None:
            return context.measured(found)
        return replace(found, accuracy=last.search_accuracy, loss=last.search_loss)  # measured after its last epoch

    return _rollback_if_over_budget(budget, state, trained) if recipe.budget == "run" else trained()


def _rollback_if_over_budget(budget: AccuracyBudget, state: NetworkState, train: Callable[[], NetworkState]) -> NetworkState:
    """Train the network of `state` in place; if that exceeds the budget, give it its weights back."""
    weights = copy.deepcopy(state.graph.module.state_dict())
    trained = train()
    if budget.still_within(trained):
        return trained
    state.graph.module.load_state_dict(weights)
    return state
