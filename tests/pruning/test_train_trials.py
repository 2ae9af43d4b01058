"""Trials that are trained before they are judged: deeper cuts within the same drop, killed runs resume to the same end."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from nets import assert_same_bits
from secateurs import load
from secateurs._util.journal import Journal
from secateurs._util.tensors import dump, parse
from secateurs.api import Pruner, resume
from secateurs.config import Recipe, TrainSettings
from secateurs.errors import InvalidInput, RecipeError, RunError, TrainingError
from secateurs.graph.trace import Graph
from secateurs.metrics import accuracy
from secateurs.pruning.context import PruningContext
from secateurs.pruning.figures import RunResult
from secateurs.pruning.results import Progress, Trial
from secateurs.pruning.trials import train_trial
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
    asked = run.journal.of(Trial, judge="certifying")
    again = run.judge.certify(result.graph, [])
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
    assert trained == list(range(1, 1 + len(run.journal.of(Trial, judge="trained"))))
    assert len(trained) > 1
    assert result.macs.removed > Pruner(network(), DATA, recipe=replace(RECIPE, retrain=None)).finish().macs.removed


def test_trials_that_cannot_be_trained_are_refused() -> None:
    with pytest.raises(InvalidInput, match="no training is given"):
        Pruner(network(), DATA, recipe=replace(RECIPE, retrain=None, train_trials=True))
    for wrong in ({"allocation": "sequential", "shortcut": "before"}, {"finetune": TRAINING}, {"recalibrate": 10}):
        with pytest.raises(RecipeError, match="train_trials = true"):
            replace(RECIPE, train_trials=True, **wrong)
    with pytest.raises(RecipeError, match="every-layer"):
        Recipe.best(repair="whole-network", train_trials=True, retrain=TRAINING)


def stopped_before_the_end(monkeypatch: pytest.MonkeyPatch, run: Pruner) -> None:
    """Stop a run when its allocation is chosen and none of its cuts is settled."""
    with monkeypatch.context() as patch:
        patch.setattr("secateurs.pruning.together.take_trial", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run.finish()


@pytest.mark.parametrize(("change", "recorded"), [("deleted", True), ("deleted", False), ("other weights", True)])
def test_weights_that_were_judged_and_are_gone_are_not_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, recorded: bool
) -> None:
    trained: list[int] = []

    def finetune(model: nn.Module) -> None:  # ends with other weights at every call
        trained.append(len(trained))
        train_(model, DATA.train, TrainSettings(epochs=1, batch=32, lr=0.3, seed=len(trained)))

    recipe = replace(RECIPE, retrain=None, max_drop=0.12, confidence=0.9, train_trials=True)
    folder = tmp_path / "run"
    if not recorded:  # the journal of an earlier release has no digests of these files
        monkeypatch.setattr("secateurs._util.journal.Journal.file_digests", lambda self, *files: {})
    stopped_before_the_end(monkeypatch, Pruner(network(), DATA, recipe=recipe, folder=folder, finetune=finetune))
    (file,) = (folder / "checkpoints").glob("trial-*")
    weights, calls = file.read_bytes(), len(trained)
    if change == "deleted":
        file.unlink()
    else:
        tensors, header = parse(weights)
        names = {name: text for name, text in header.items() if name != "digest"}
        file.write_bytes(dump({name: tensor + 1 for name, tensor in tensors.items()}, names))  # whole, and not what was judged
    with pytest.raises(RunError, match=f"{file.name}.*Restore"):
        resume(folder, network(), DATA, finetune=finetune).finish()
    file.write_bytes(weights)
    run = resume(folder, network(), DATA, finetune=finetune)
    result = run.finish()
    assert len(trained) == calls
    assert run.judge.certify(result.graph, []).upper == result.steps[-1].bound


def test_a_run_that_is_killed_between_the_weights_of_a_trial_and_its_record_ends_as_one_that_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, append = replace(RECIPE, train_trials=True), Journal.append

    def stopping(journal: Journal, record: object) -> None:
        if isinstance(record, Trial) and record.judge == "trained":
            raise KeyboardInterrupt
        append(journal, record)

    Pruner(network(), DATA, recipe=recipe, folder=tmp_path / "whole").finish()
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append", stopping)
        with pytest.raises(KeyboardInterrupt):
            Pruner(network(), DATA, recipe=recipe, folder=tmp_path / "stopped").finish()
    assert list((tmp_path / "stopped" / "checkpoints").glob("trial-*"))
    resume(tmp_path / "stopped", network(), DATA).finish()
    assert without_times(tmp_path / "whole") == without_times(tmp_path / "stopped")
    assert differing_file(tmp_path / "whole", tmp_path / "stopped") is None


UNTRAINED = replace(RECIPE, retrain=None)


@cache
def cut_without_training() -> RunResult:
    return Pruner(network(), DATA, recipe=UNTRAINED).finish()


def negate(model: nn.Module) -> None:
    """A training that makes every network useless."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.neg_()


def train_or_diverge(model: nn.Module) -> None:
    """A training that helps, and leaves NaN in networks that are cut deep."""
    train_(model, DATA.train, TrainSettings(epochs=2, batch=32, lr=0.05))
    if sum(weight.numel() for weight in model.parameters()) < 1350:
        with torch.no_grad():
            next(model.parameters()).fill_(float("nan"))


def leave_nan(model: nn.Module) -> None:
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))


def diverge(model: nn.Module) -> None:
    train_(model, DATA.train, TrainSettings(epochs=1, batch=32, lr=1e30))


@pytest.mark.parametrize("finetune", [negate, leave_nan, diverge, None])
def test_a_training_that_only_harms_leaves_what_is_cut_without_it(finetune: Callable[[nn.Module], None] | None) -> None:
    settings = replace(TRAINING, lr=1e30) if finetune is None else None
    run = Pruner(network(), DATA, recipe=replace(RECIPE, retrain=settings, train_trials=True), finetune=finetune)
    result, plain = run.finish(), cut_without_training()
    assert plain.macs.removed > 0.2
    assert result.macs.removed == plain.macs.removed
    assert_same_bits(dict(result.graph.module.state_dict()), dict(plain.graph.module.state_dict()))
    kept = max((trial for trial in run.journal.of(Trial, judge="trained") if trial.accepted), key=lambda one: one.place)
    assert "undone" in kept.note
    assert ("NaN" in kept.note or "diverge" in kept.note) == (finetune is not negate)
    assert kept.note in result.stopped


def test_a_trial_that_diverges_is_refused_and_the_others_count(tmp_path: Path) -> None:
    recipe = replace(UNTRAINED, train_trials=True)
    run = Pruner(network(), DATA, recipe=recipe, folder=tmp_path / "run", finetune=train_or_diverge)
    result = run.finish()
    tried = run.journal.of(Trial, judge="trained")
    assert {trial.accepted for trial in tried if trial.note} == {False}
    assert result.macs.removed > cut_without_training().macs.removed
    assert sum(weight.numel() for weight in result.graph.module.parameters()) >= 1350
    assert "undone" not in result.stopped


@pytest.mark.parametrize("finetune", [train_or_diverge, negate])
@pytest.mark.parametrize("moment", [1, 4])
@pytest.mark.parametrize("place", ["training", "record"])
def test_a_run_that_is_stopped_at_a_trial_that_is_undone_ends_as_one_that_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finetune: Callable[[nn.Module], None], moment: int, place: str
) -> None:
    recipe, append, seen = replace(UNTRAINED, max_drop=0.12, confidence=0.9, train_trials=True), Journal.append, 0

    def stop() -> None:
        nonlocal seen
        seen += 1
        if seen == moment:
            raise KeyboardInterrupt

    def training(model: nn.Module) -> None:
        finetune(model)
        if place == "training":
            stop()

    def appended(journal: Journal, record: object) -> None:
        if place == "record" and isinstance(record, Trial) and record.judge != "steering":
            stop()
        append(journal, record)

    Pruner(network(), DATA, recipe=recipe, folder=tmp_path / "whole", finetune=finetune).finish()
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append", appended)
        with pytest.raises(KeyboardInterrupt):
            Pruner(network(), DATA, recipe=recipe, folder=tmp_path / "stopped", finetune=training).finish()
    resume(tmp_path / "stopped", network(), DATA, finetune=finetune).finish()
    assert without_times(tmp_path / "whole") == without_times(tmp_path / "stopped")
    assert differing_file(tmp_path / "whole", tmp_path / "stopped") is None


def test_the_bound_is_that_of_the_weights_that_are_kept_and_few_networks_are_certified() -> None:
    recipe = replace(UNTRAINED, max_drop=0.12, confidence=0.9, train_trials=True)
    run = Pruner(network(), DATA, recipe=recipe, finetune=negate)
    result = run.finish()
    asked = run.journal.of(Trial, judge="certifying")
    assert 0 < len(asked) <= 5
    assert len({trial.place for trial in asked}) == len(asked)
    assert False not in [trial.accepted for trial in asked[:-1]]
    assert result.macs.removed > 0
    assert run.judge.certify(result.graph, []).upper == result.steps[-1].bound


def test_an_error_of_the_users_training_ends_the_run_which_can_be_resumed(tmp_path: Path) -> None:
    def broken(model: nn.Module) -> None:
        raise ValueError("no such file: the user's own")

    def another(model: nn.Module) -> nn.Module:
        return copy.deepcopy(model)

    recipe = replace(UNTRAINED, train_trials=True)
    with pytest.raises(ValueError, match="the user's own"):
        Pruner(network(), DATA, recipe=recipe, folder=tmp_path / "run", finetune=broken).finish()
    with pytest.raises(TrainingError, match="returned another network"):
        resume(tmp_path / "run", network(), DATA, finetune=another).finish()
    result = resume(tmp_path / "run", network(), DATA, finetune=train_or_diverge).finish()
    assert result.macs.removed > cut_without_training().macs.removed


def test_certification_is_not_asked_about_a_refused_trial_below_an_accepted_one(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = replace(UNTRAINED, max_drop=0.12, confidence=0.9, train_trials=True)
    whole = Pruner(network(), DATA, recipe=recipe, finetune=train_or_diverge)
    whole.finish()
    first, *others = [trial.place for trial in whole.journal.of(Trial, judge="certifying")]
    assert others

    def refusing(context: PruningContext, graph: Graph, place: int, measure: Callable[[Graph], Trial]) -> Trial:
        found = train_trial(context, graph, place, measure)
        return replace(found, accepted=False) if place == first else found

    monkeypatch.setattr("secateurs.pruning.choice.train_trial", refusing)
    run = Pruner(network(), DATA, recipe=recipe, finetune=train_or_diverge)
    run.finish()
    assert [trial.place for trial in run.journal.of(Trial, judge="certifying")] == others


def test_a_trial_has_the_same_number_after_a_resume(tmp_path: Path) -> None:
    def numbers_of(stop: int, seen: list[int]) -> Callable[[nn.Module, int], None]:
        def finetune(model: nn.Module, step: int) -> None:
            seen.append(step)
            if len(seen) == stop:
                raise KeyboardInterrupt
            train_(model, DATA.train, TrainSettings(epochs=2, batch=32, lr=0.05, seed=step))

        return finetune

    recipe = replace(UNTRAINED, max_drop=0.12, confidence=0.9, train_trials=True)
    whole, stopped, resumed = list[int](), list[int](), list[int]()
    Pruner(network(), DATA, recipe=recipe, folder=tmp_path / "whole", finetune=numbers_of(0, whole)).finish()
    with pytest.raises(KeyboardInterrupt):
        Pruner(network(), DATA, recipe=recipe, folder=tmp_path / "stopped", finetune=numbers_of(3, stopped)).finish()
    resume(tmp_path / "stopped", network(), DATA, finetune=numbers_of(0, resumed)).finish()
    assert len(whole) > 3
    assert whole == list(range(1, len(whole) + 1)) == stopped[:-1] + resumed
    assert without_times(tmp_path / "whole") == without_times(tmp_path / "stopped")
    assert differing_file(tmp_path / "whole", tmp_path / "stopped") is None


@pytest.mark.slow
def test_two_workers_take_the_weights_that_one_takes(tmp_path: Path) -> None:
    """The first has the folder, and all go on from the weights in it."""
    recipe = replace(UNTRAINED, max_drop=0.12, confidence=0.9, train_trials=True)
    Pruner(network(), DATA, recipe=recipe, folder=tmp_path / "one", finetune=negate).finish()
    script = tmp_path / "prune.py"
    script.write_text(
        "import sys\n"
        "from dataclasses import replace\n"
        "from test_train_trials import DATA, UNTRAINED, Path, Pruner, negate, network\n"
        "recipe = replace(UNTRAINED, max_drop=0.12, confidence=0.9, train_trials=True)\n"
        "Pruner(network(), DATA, recipe=recipe, folder=Path(sys.argv[1]), finetune=negate).finish()\n"
    )
    tests = Path(__file__).parents[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{tests}{os.pathsep}{tests / 'pruning'}"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(
        [*command, str(tmp_path / "two")], capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert differing_file(tmp_path / "one", tmp_path / "two") is None
