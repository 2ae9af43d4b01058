"""Trainers: what trains the network of a run, between the cuts and after them: nothing, our own training, or the user's.

Of each training the best weights are kept, by held-out examples. Where one budget covers the whole run, weights that would
exceed it are rolled back. All of it is resumable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from secateurs._util.modules import device_of, eval_mode
from secateurs._util.tensors import digest
from secateurs.config import TrainSettings
from secateurs.data.dataset import Examples, derive
from secateurs.data.splits import subset
from secateurs.data.stream import Stream
from secateurs.distributed import active
from secateurs.errors import Diverged, InvalidInput, RunError
from secateurs.graph.features import paired_features
from secateurs.graph.trace import Graph
from secateurs.metrics import Measure, cross_entropy, display_name, loss
from secateurs.pruning.context import NetworkState, PruningContext
from secateurs.pruning.judge import Judge
from secateurs.pruning.results import Retrained
from secateurs.pruning.user_training import Training, train_by_user_
from secateurs.repair import reconstruct_
from secateurs.training import History, KeptWeights, candidates, keep_best_, recalibrate_
from secateurs.training.checks import check_trainable
from secateurs.training.guard import AVERAGE, END, START, Candidate, better
from secateurs.training.objective import held_out_means, judge_for, objective_for
from secateurs.training.resumable import CHECKPOINT, seeded_for, train_resumably_
from secateurs.training.state import copy_into_, named_tensors, snapshot

RETRAINED = "checkpoints/retrained"


class Trainer(Protocol):
    """Trains a network in place."""

    trains: bool  # whether it changes anything

    def trained(self, state: NetworkState, phase: str, step: int) -> NetworkState:
        """The network after the training, whatever that did to it."""

    def guarded(self, judge: Judge, state: NetworkState, phase: str, step: int) -> NetworkState:
        """The same, or the network as it was, where the training made it worse or exceeded what may be lost."""


class Nothing:
    """No training."""

    trains = False

    def trained(self, state: NetworkState, phase: str, step: int) -> NetworkState:
        """The network as it is."""
        return state

    def guarded(self, judge: Judge, state: NetworkState, phase: str, step: int) -> NetworkState:
        """The network as it is."""
        return state


@dataclass(frozen=True, eq=False)
class Users:
    """The user's own function."""

    context: PruningContext
    function: Training
    trains = True

    def trained(self, state: NetworkState, phase: str, step: int) -> NetworkState:
        """Call it for the network; its optimiser is its own, so momentum is forgotten."""
        progress = self.context.progress
        progress.report("finetune", 0, 1)
        train_by_user_(state.graph.module, self.function, step)
        progress.report("finetune", 1, 1)
        return self.context.measured(replace(state, momentum={}))

    def guarded(self, judge: Judge, state: NetworkState, phase: str, step: int) -> NetworkState:
        """Undone where it exceeds the budget, or where it made the network worse and `keep_best` is set.

        Worse is a lower metric, or the same metric and a larger loss, on images that do not certify.
        """
        context, module, keep_best = self.context, state.graph.module, self.context.recipe.keep_best
        chosen: list[KeptWeights] = []

        def candidate(name: str, found: NetworkState) -> Candidate:
            found = context.measured_to_choose(found) if keep_best else found
            return Candidate(name, *(value if isfinite(value) else None for value in (found.loss, found.accuracy)))

        def trained() -> NetworkState:
            start, before = candidate(START, state), snapshot(module)
            found = self.trained(state, phase, step)
            end, same = candidate(END, found), _same_bits(module, before)
            worse = keep_best and not same and better(start, end, "metric")
            note = "it changed no weights" if same else ""
            chosen.append(KeptWeights(START if worse else END, "metric", (start, end), phase, step, note))
            if worse:
                copy_into_(module, before)
            return state if worse else found

        result = trained() if context.recipe.budget == "site" else within_budget(judge, state, trained, no_worse=keep_best)
        undone = result is state
        _journal_kept(context, chosen if undone or keep_best else (), refusal=judge.refusal if undone else "")
        return result


@dataclass(frozen=True, eq=False)
class Ours:
    """Our own training, by its settings."""

    context: PruningContext
    settings: TrainSettings
    trains = True

    def trained(self, state: NetworkState, phase: str, step: int) -> NetworkState:
        """Train; one that diverges is an error."""
        found, kept = self._run(state, phase, step, forgiving=False)
        _journal_kept(self.context, kept)
        return found

    def guarded(self, judge: Judge, state: NetworkState, phase: str, step: int) -> NetworkState:
        """Undone where it exceeds the budget, or diverges."""
        context, chosen = self.context, list[KeptWeights]()

        def trained() -> NetworkState:
            found, kept = self._run(state, phase, step, forgiving=True)
            chosen.extend(kept)
            return found

        site = context.recipe.budget == "site"
        result = trained() if site else within_budget(judge, state, trained, no_worse=context.recipe.keep_best)
        _journal_kept(context, chosen, refusal=judge.refusal if result is state else "")
        return result

    def _run(self, state: NetworkState, phase: str, step: int, *, forgiving: bool) -> tuple[NetworkState, list[KeptWeights]]:
        """Train, and keep the best weights; with what was kept. Where it is `forgiving`, one that diverges is undone."""
        context = self.context
        runtime, recipe = context.runtime, context.recipe
        settings = seeded_for(self.settings, recipe.seed, phase, step)
        module, teacher = state.graph.module, context.original.module if settings.distill else None
        loss_fn = None if runtime.loss_fn is cross_entropy else runtime.loss_fn
        held_out = context.held_out_examples.ready(context.dtype)
        # a teacher's answers tell far more of an image than right or wrong; with labels, or a loss of the user's own, what is
        # asked for is the metric
        by: Literal["loss", "metric"] = "metric" if settings.distill < 1 or loss_fn is not None else "loss"
        chosen: list[KeptWeights] = []

        def measure() -> tuple[float, float | None]:
            objective = judge_for(settings, loss_fn=loss_fn, teacher=teacher)
            metric = runtime.metric if runtime.evaluate is None else None
            options: dict[str, Any] = {"teacher": teacher, "metric": metric, "device": runtime.device}
            loss, found = runtime.limit.run(
                recipe.batch, lambda n: held_out_means(module, held_out, objective, batch=n, **options)
            )
            return loss, context.metric.mean(state.graph) if runtime.evaluate is not None and by == "metric" else found

        def trained() -> NetworkState:
            before = snapshot(module)
            context.progress.report(phase, 0, settings.epochs)
            try:
                history = train_resumably_(
                    context.journal,
                    module,
                    context.train if runtime.train is None else runtime.train.ready(context.dtype),
                    settings,
                    phase=phase,
                    step=step,
                    search=context.validation,
                    held_out=held_out,
                    teacher=teacher,
                    features=partial(paired_features, state.graph, context.original),
                    loss_fn=loss_fn,
                    metric=runtime.metric,
                    device=runtime.device,
                    momentum=state.momentum,
                    on_epoch=lambda epoch: context.progress.report(phase, epoch.epoch + 1, settings.epochs),
                )
            except Diverged as error:
                if not forgiving or active().size > 1:  # one worker may diverge alone, while the others wait for it
                    raise
                copy_into_(module, before)
                start = Candidate(START, *(None if x is None or not isfinite(x) else x for x in measure()))
                why = str(error).partition(". ")[0]
                chosen.append(KeptWeights(START, by, (start, Candidate(END, None, None)), phase, step, why))
                return state
            if active().size > 1:
                active().check_same(f"after {phase} (step {step})", {"network": digest(named_tensors(module))})
            found = replace(state, momentum=dict(history.momentum))
            if recipe.keep_best and history.epochs:
                chosen.append(best_of(before, history))
                if chosen[0].kept == START:
                    return state
                if chosen[0].kept != (AVERAGE if history.last else END):
                    return context.measured(found)
            return self._measured_last(found, history)

        def best_of(before: Mapping[str, Tensor], history: History) -> KeptWeights:
            """Leave the best of the weights before, after and in between in the module."""
            found = keep_best_(module, candidates(before, snapshot(module), history.last), measure, by=by)
            return replace(found, phase=phase, step=step, note=history.note)

        return trained(), chosen

    def _measured_last(self, found: NetworkState, history: History) -> NetworkState:
        """The network with what was measured after the last epoch, or is measured now where that was not."""
        last = history.epochs[-1] if history.epochs else None
        whole = self.context.runtime.evaluate
        if last is None or last.search_accuracy is None or last.search_loss is None or whole is not None:
            return self.context.measured(found)
        return replace(found, accuracy=last.search_accuracy, loss=last.search_loss)


def trainer_between(context: PruningContext) -> Trainer:
    """What trains after a cut, or after all cuts of an allocation: the user's own takes the place of the recipe's."""
    if context.runtime.finetune is not None:
        return Users(context, context.runtime.finetune)
    return Nothing() if context.recipe.finetune is None else Ours(context, context.recipe.finetune)


def trainer_at_end(context: PruningContext) -> Trainer:
    """What trains at the end; where every network that is tried was trained, nothing is left to do."""
    settings = context.recipe.retrain
    return Nothing() if settings is None or context.recipe.train_trials else Ours(context, settings)


def retrain(context: PruningContext, trainer: Trainer, judge: Judge, state: NetworkState, step: int) -> NetworkState:
    """Train the network at the end, once; a finished run has its weights in the folder."""
    journal = context.journal
    if not trainer.trains:
        return state
    if known := journal.of(Retrained):
        journal.check_files(known[0])
        found = journal.load_tensors(RETRAINED)
        if found is None:
            raise RunError(f"{journal.path}: the retrained weights are missing. Restore checkpoints/ from a copy.")
        state.graph.module.load_state_dict(found[0])
        return state
    state = trainer.guarded(judge, state, "retrain", step)
    journal.save_tensors(RETRAINED, state.graph.module.state_dict(), listed=True)
    files = journal.file_digests(f"{RETRAINED}.safetensors")
    asked, judge.answers = tuple(judge.answers), []
    journal.append(Retrained(state.accuracy, state.loss, files, context.clock.lap(), judge.bound_trained, asked))
    journal.delete(CHECKPOINT)
    return state


# ---- repairs that are guarded as trainings are ---------------------------------------------------------------------------


def recalibrate(context: PruningContext, judge: Judge, state: NetworkState) -> NetworkState:
    """Recompute BatchNorm's statistics on training examples, if the recipe asks for that."""
    recipe, train = context.recipe, context.train
    if recipe.recalibrate is None:
        return state
    chosen = subset(train, min(recipe.recalibrate, len(train)), seed=derive(recipe.seed, "recalibrate"))

    def trained() -> NetworkState:
        module, device = state.graph.module, context.runtime.device
        context.runtime.limit.run(recipe.batch, lambda batch: recalibrate_(module, chosen, batch=max(batch, 2), device=device))
        return context.measured(state)

    return within_budget(judge, state, trained)


def reconstruct(context: PruningContext, judge: Judge, state: NetworkState, step: int) -> NetworkState:
    """Train all layers together to give what they give in the original, if the recipe repairs the whole network.

    The best weights are kept, as of any training. A killed one starts again from its beginning, with the same result.
    """
    recipe, runtime, module = context.recipe, context.runtime, state.graph.module
    if recipe.repair != "whole-network":
        return state
    chosen: list[KeptWeights] = []

    def measure() -> tuple[float, float | None]:
        held_out, device = context.held_out, runtime.device

        def mean(batch: int) -> float:
            return loss(module, held_out.examples, loss_fn=held_out.loss_fn, batch=batch, device=device)

        return runtime.limit.run(recipe.batch, mean), None

    def trained() -> NetworkState:
        before, seed = snapshot(module), derive(recipe.seed, "reconstruct")
        context.progress.report("reconstruct", 0, 1)
        reconstruct_(state.graph, context.original, context.repair_examples, device=runtime.device, seed=seed)
        context.progress.report("reconstruct", 1, 1)
        found = keep_best_(module, candidates(before, snapshot(module)), measure, by="loss")
        chosen.append(replace(found, phase="reconstruct", step=step))
        return state if found.kept == START else context.measured(state)

    result = within_budget(judge, state, trained, no_worse=True)
    _journal_kept(context, chosen, refusal=judge.refusal if result is state else "")
    return result


def _journal_kept(context: PruningContext, chosen: Sequence[KeptWeights], *, refusal: str = "") -> None:
    """Journal what was kept, once; with a `refusal` the weights before the training are back."""
    for kept in chosen:
        if refusal and kept.kept != START:
            start, end = kept.tried[0], next(each for each in kept.tried if each.name == kept.kept)
            note = f"{kept.kept} is {'better on them, but ' if better(end, start, kept.by) else ''}{refusal}"
            kept = replace(kept, kept=START, note="; ".join(filter(None, (note, kept.note))))
        if not context.journal.of(KeptWeights, phase=kept.phase, step=kept.step):
            context.journal.append(kept)


def within_budget(
    judge: Judge, state: NetworkState, train: Callable[[], NetworkState], *, no_worse: bool = False
) -> NetworkState:
    """Train the network of `state` in place; if that exceeds the budget, give it its weights back.

    `no_worse`: also if the certified bound on its drop is worse than before. Where no bit changed, nothing is asked: the
    network was accepted, and after a refusal the same question may be answered otherwise.
    """
    module, weights = state.graph.module, snapshot(state.graph.module)
    bound = judge.bound(state.graph) if no_worse else None
    trained = train()
    if trained is state or _same_bits(module, weights) or judge.still_within(trained.graph, trained.accuracy, bound=bound):
        return trained
    copy_into_(module, weights)
    return state


def _same_bits(module: nn.Module, weights: Mapping[str, Tensor]) -> bool:
    return digest(named_tensors(module)) == digest(weights)


def check_training(
    graph: Graph, settings: TrainSettings, examples: Examples, stream: Stream | None, *, loss_fn: Measure
) -> None:
    """Refuse a training that the network, its loss or its loader cannot have, before hours of scoring.

    The objective is computed once, of the network against itself.
    """
    own = None if loss_fn is cross_entropy else loss_fn
    objective, place = objective_for(settings, loss_fn=own, teacher=graph.module), device_of(graph.module)
    few = examples.batch(slice(0, 2)).mapped(lambda part: part.to(place))
    args = tuple(part.to(like) for part, like in zip(few.args, graph.example, strict=True))
    sample = Examples(args if len(args) > 1 else args[0], few.targets)
    check_trainable(graph.module, examples if stream is None else stream, settings, sample=sample)
    with eval_mode(graph.module), torch.enable_grad():
        found = objective(args, graph.module(*args), few.targets)
    if not found.requires_grad:
        raise InvalidInput(
            f"the loss ({display_name(loss_fn)}) has no gradient: it counts errors, is detached, or computed elsewhere. Give "
            f"one that can be differentiated, or no training."
        )
