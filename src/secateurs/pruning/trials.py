"""Trained trials: networks that are tried get the training of the run before they are judged, and keep what was judged."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

from secateurs.distributed import active
from secateurs.errors import Diverged, RunError
from secateurs.graph.masking import copied
from secateurs.graph.trace import Graph
from secateurs.pruning.context import NetworkState, PruningContext
from secateurs.pruning.results import Trial
from secateurs.pruning.trainer import Ours, Users
from secateurs.training.resumable import CHECKPOINT

_TRIAL = "checkpoints/trial-{:04d}"  # weights of an allocation that was tried, trained, by its place on the frontier


def train_trial(context: PruningContext, graph: Graph, place: int, measure: Callable[[Graph], Trial]) -> Trial:
    """Give a copy of a network that is tried the training of the run, and judge it; what was judged is kept by its `place`.

    Where the training diverges, or is refused and the weights before it are accepted, these are judged, and the record's note
    says so. The record holds the digest of the file of weights. A training that is killed before it is journaled is repeated.
    """
    journal, recipe, kept = context.journal, context.recipe, copied(graph)
    state, note, found = NetworkState(kept), "", None
    try:
        if context.runtime.finetune is not None:
            # its number, from 1: the places on the frontier have gaps, and steps that a schedule depends on should not
            number = 1 + len({trial.place for trial in journal.of(Trial) if trial.judge != "steering"})
            state = Users(context, context.runtime.finetune).trained(state, "finetune", number)
        if recipe.retrain is not None:
            Ours(context, recipe.retrain).trained(state, "trial", place)
        found = measure(kept)
    except Diverged as error:
        if active().size > 1:  # one worker may diverge alone, while the others wait for it
            raise
        note = str(error)
    if found is None or not found.accepted:
        before = measure(graph)
        if found is not None and before.accepted:
            note = f"after it the metric is {found.accuracy:.4g} and refused, before it {before.accuracy:.4g} and accepted"
        if note:
            kept, found = graph, replace(before, note=f"the training was undone: {note}")
    assert found is not None
    name, weights = _TRIAL.format(place), kept.module.state_dict()
    if journal.path is None:
        context.trained_trials[place] = copy.deepcopy(weights)
    journal.save_tensors(name, weights, listed=True)
    return replace(found, files=journal.file_digests(f"{name}.safetensors"))


def load_trial(context: PruningContext, graph: Graph, place: int) -> Graph:
    """Give the network of an allocation, in place, the weights that it was judged with.

    RunError if their file is missing, or is not the one that the journal relies on: another training might end with others.
    """
    journal, name = context.journal, _TRIAL.format(place)
    for known in journal.of(Trial, place=place):
        journal.check_files(known)
    found = journal.load_tensors(name)  # by all workers, before what each has in memory
    weights = context.trained_trials.get(place) if found is None else found[0]
    if weights is None:
        raise RunError(
            f"{journal.path}/{name}.safetensors: the weights that were judged are missing. Restore checkpoints/ from a copy."
        )
    graph.module.load_state_dict(weights)
    return graph


def take_trial(context: PruningContext, state: NetworkState, place: int) -> NetworkState:
    """The network of the chosen allocation with the weights that it had when it was judged."""
    return context.measured(replace(state, graph=load_trial(context, state.graph, place)))


def forget_trials(context: PruningContext, chosen: int) -> None:
    """Delete the weights of all trials but the chosen one."""
    for place in {trial.place for trial in context.journal.of(Trial)} - {chosen}:
        context.trained_trials.pop(place, None)
        context.journal.delete(_TRIAL.format(place))
    context.journal.delete(CHECKPOINT)
