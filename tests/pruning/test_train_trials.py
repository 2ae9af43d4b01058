"""Trials that are trained before they are judged: deeper cuts within the same drop, killed runs resume to the same end."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from nets import assert_same_bits
from secateurs import load
from secateurs.api import Pruner, resume
from secateurs.config import Recipe, TrainSettings
from secateurs.errors import InvalidInput, RecipeError
from secateurs.metrics import accuracy
from secateurs.pruning.results import Progress, Trial
from secateurs.training import train_
from torture.runs import differing_file, few_digits, perceptron, without_times

DATA = few_digits(384)
TRAINING = TrainSettings(epochs=2, batch=32, lr=0.05, distill=1.0, temperature=2.0)
RECIPE = Recipe.best(max_drop=0.04, confidence=0, round_to=1, repair="none", portfolio=("l1",), retrain=TRAINING)


@cache
def _weights() -> dict[str, Any]:
    model = perceptron((24, 20))
    train_(model, DATA.train, TrainSettings(epochs=12, batch=32, lr=0.1))
    return model.state_dict()


def network() -> nn.Module:
    model = perceptron((24, 20))
    model.load_state_dict(_weights())
    return model


def test_more_is_removed_within_the_same_drop_than_where_cuts_are_judged_before_training(tmp_path: Path) -> None:
    before = Pruner(network(), DATA, recipe=RECIPE)
    after = Pruner(network(), DATA, recipe=replace(RECIPE, train_trials=True), folder=tmp_path / "run")
    plain, deeper = before.finish(), after.finish()
    assert deeper.macs.removed > plain.macs.removed + 0.05
    assert deeper.search.before - deeper.search.after <= 0.04
    # the network is the one that was judged
    deepest = max((trial for trial in after.journal.of(Trial, judge="trained") if trial.accepted), key=lambda one: one.place)
    assert accuracy(deeper.graph.module, after.context.validation) == deeper.search.after == deepest.accuracy
    assert_same_bits(
        dict(load(network(), tmp_path / "run" / "pruned.safetensors").module.state_dict()), deeper.graph.module.state_dict()
    )
    assert len(list((tmp_path / "run" / "checkpoints").glob("trial-*"))) == 1  # the others are deleted


@pytest.mark.parametrize("moment", [1, 3, 6])
def test_a_run_that_is_stopped_within_a_trial_ends_as_one_that_was_not(tmp_path: Path, moment: int) -> None:
    recipe, epochs = replace(RECIPE, train_trials=True), 0

    def stop(event: Progress) -> None:
        nonlocal epochs
        epochs += event.phase == "trial"
        if event.phase == "trial" and epochs == moment:
            raise KeyboardInterrupt

    Pruner(network(), DATA, recipe=recipe, folder=tmp_path / "whole").finish()
    with pytest.raises(KeyboardInterrupt):
        Pruner(network(), DATA, recipe=recipe, folder=tmp_path / "stopped", callback=stop).finish()
    resume(tmp_path / "stopped", network(), DATA).finish()
    assert without_times(tmp_path / "whole") == without_times(tmp_path / "stopped")
    assert differing_file(tmp_path / "whole", tmp_path / "stopped") is None


def test_a_target_is_tried_first_and_training_makes_it_reachable() -> None:
    recipe = replace(RECIPE, target_macs=0.4, train_trials=True)
    run = Pruner(network(), DATA, recipe=recipe)
    result = run.finish()
    (only,) = run.journal.of(Trial, judge="trained")
    assert only.accepted
    assert result.macs.removed >= 0.4
    assert "wanted" in result.stopped


def test_what_is_certified_is_the_trained_network() -> None:
    recipe = replace(RECIPE, max_drop=0.12, confidence=0.9, train_trials=True)
    run = Pruner(network(), DATA, recipe=recipe)
    result = run.finish()
    values = run.budget.original.values
    assert values is not None
    asked = run.journal.of(Trial, judge="certifying")
    again = run.context.certified(result.graph, values, [])
    assert [trial.upper for trial in asked if trial.accepted][-1] == again.upper == result.steps[-1].bound
    assert again.upper <= 0.12


def test_the_users_own_training_is_called_for_every_trial() -> None:
    trained: list[int] = []

    def finetune(model: nn.Module, step: int) -> None:
        trained.append(step)
        train_(model, DATA.train, TrainSettings(epochs=2, batch=32, lr=0.05))

    recipe = replace(RECIPE, retrain=None, train_trials=True)
    run = Pruner(network(), DATA, recipe=recipe, finetune=finetune)
    result = run.finish()
    assert sorted(trained) == sorted({trial.place for trial in run.journal.of(Trial, judge="trained")})
    assert result.macs.removed > Pruner(network(), DATA, recipe=replace(RECIPE, retrain=None)).finish().macs.removed


def test_trials_that_cannot_be_trained_are_refused() -> None:
    with pytest.raises(InvalidInput, match="no training is given"):
        Pruner(network(), DATA, recipe=replace(RECIPE, retrain=None, train_trials=True))
    for wrong in ({"allocation": "sequential"}, {"finetune": TRAINING}, {"recalibrate": 10}):
        with pytest.raises(RecipeError, match="train_trials = true"):
            replace(RECIPE, train_trials=True, **wrong)
    with pytest.raises(RecipeError, match="every-layer"):
        Recipe.best(repair="whole-network", train_trials=True, retrain=TRAINING)
