"""What one call gives back, and what it says on the way."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from digit_loaders import ONE_CUT, QUICK, RECIPE, build, digits, loader, loaders, pruned, right, trained

import secateurs as sc
from secateurs.errors import InvalidInput
from torture.journals import entries_of


@pytest.mark.usefixtures("in_this_process")
def test_one_call_gives_a_smaller_network_and_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = trained()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    test = digits()[2]
    result = sc.prune(model, *loaders(), test=loader(test), max_drop=0.05)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert result.accuracy_before == pytest.approx(right(model, test))
    assert result.accuracy_after == pytest.approx(right(result.model, test))
    assert result.macs.after < result.macs.before
    assert sum(p.numel() for p in result.model.parameters()) == result.parameters.after
    assert result.bound is not None
    assert result.bound <= 0.05
    lines = str(result).splitlines()
    assert len(lines) == 5
    assert "at batch 64 in eager mode" in lines[0]  # the time comes first
    assert f"{100 * result.macs.removed:.1f} % of the MACs" in lines[1]
    assert f"{100 * result.accuracy_after:.2f} % on 400 held-out test examples" in lines[1]
    assert "At 95 % confidence the drop is at most" in lines[2]
    assert lines[3].startswith("Not fast enough?")
    assert all(what in lines[3] for what in ("target_latency", "retrain", "engine"))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Cuts are weighed by the time that they save in PyTorch's eager mode at batch 64, as the ")
    assert all(what in lines[0] for what in ("and 1;", "engine='onnxruntime'", "engine='compile'", "deploy='int8'", "macs="))
    assert sum("filters; " in line for line in lines) == len(result.steps)  # progress without a terminal: a line a step
    assert sum("filters; accuracy" in line for line in lines) == 1  # the last, when all cuts are made
    again = sc.load(build(), result.save(tmp_path / "small.safetensors")).module
    assert right(again, test) == pytest.approx(result.accuracy_after)
    assert result.export(tmp_path / "small.pt2").exists()
    with pytest.raises(InvalidInput, match=r"'small.txt', wanted a name that ends in .onnx or .pt2"):
        result.export(tmp_path / "small.txt")


def test_no_line_is_shown_without_progress(capsys: pytest.CaptureFixture[str]) -> None:
    events: list[Any] = []
    sc.prune(trained(), *loaders(), callback=events.append, **QUICK)
    assert capsys.readouterr() == ("", "")
    assert {event.phase for event in events} >= {"curve", "divide"}


def test_without_a_test_set_the_validation_figures_are_named_as_such() -> None:
    result = pruned()
    assert result.accuracy_before == pytest.approx(right(trained(), digits()[1]))
    assert "on the validation set, which chose the cuts" in str(result)


def test_a_target_of_macs_is_met() -> None:
    result = sc.prune(trained(), *loaders(), macs=0.3, max_drop=0.9, progress=False)
    assert result.macs.removed >= 0.3


def test_too_few_validation_examples_promise_nothing_and_say_so() -> None:
    few = loader(digits()[1].take(torch.arange(40)))
    result = sc.prune(trained(), loaders()[0], few, max_drop=0.01, progress=False)
    assert result.bound is None
    assert "Nothing is promised" in str(result)
    assert any("cannot be certified at 95 % with 40 validation images" in note for note in result.notes)


def test_a_time_budget_takes_a_cheaper_recipe_and_says_so() -> None:
    pruner = sc.Pruner(trained(), *loaders(), max_drop=0.05, engine="torch")  # timers of a known engine take no time
    needed = pruner.estimate().seconds
    began = time.process_time()  # other processes do not count
    pruner.finish()
    assert needed / 5 < time.process_time() - began < 3 * needed
    short = sc.Pruner(trained(), *loaders(), max_drop=0.05, engine="torch", time_budget=needed / 10)
    assert short.recipe.criterion == "fpgm"
    assert any("may take longer than the time budget" in note for note in short.notes)
    assert sc.Pruner(trained(), *loaders(), max_drop=0.05, engine="torch", time_budget=100 * needed).recipe.criterion == "obs"


def test_a_pruner_is_watched_step_by_step() -> None:
    pruner = sc.Pruner(trained(), *loaders(), recipe=RECIPE)
    sites = [step.site for step in pruner]
    assert sites == [step.site for step in pruner.finish().steps]


def test_both_sets_have_their_figures() -> None:
    result = sc.prune(trained(), *loaders(), test=loader(digits()[2]), **ONE_CUT)
    for found, examples in ((result.validation, digits()[1]), (result.test, digits()[2])):
        assert found.before == pytest.approx(right(trained(), examples))
        assert found.after == pytest.approx(right(result.model, examples))


@pytest.mark.parametrize("folder", [None, "run"])
def test_the_times_of_the_phases_add_up_to_the_time_that_passed(
    folder: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda file: None)  # how long the disk takes for the very last line is not counted
    recipe = replace(RECIPE, finetune=sc.TrainSettings(epochs=1, lr=0.01), retrain=sc.TrainSettings(epochs=1, lr=0.01))
    sc.prune(trained(), *loaders(), **ONE_CUT)  # whatever is imported late
    began = time.monotonic()
    pruner = sc.Pruner(trained(), *loaders(), recipe=recipe, folder=None if folder is None else tmp_path / folder)
    monkeypatch.setattr(sc.Pruner, "report", lambda self: None)
    for _ in pruner:
        time.sleep(0.05)  # the user's own time does not count
        began += 0.05
    passed = time.monotonic() - began
    assert pruner.result is not None
    phases = dict(pruner.result.phases)
    assert sum(phases.values()) == pytest.approx(pruner.result.seconds)
    assert pruner.result.seconds == pytest.approx(passed, rel=0.02, abs=0.02)
    assert all(phases[name] > 0 for name in ("preparation", "curves", "allocation", "steps", "training", "final measurement"))
    if folder is not None:
        (end,) = [entry for entry in entries_of(tmp_path / folder) if entry["unit"] == "end"]
        assert end["seconds"] == pruner.result.seconds
    pruner.close()


def test_modules_are_taken_where_graphs_are() -> None:
    model, example = trained(), digits()[0].inputs[:2]
    graph = sc.trace(model, example)
    assert [site.name for site in sc.find_sites(model, example)] == [site.name for site in sc.find_sites(graph)]
    assert sc.cost(model, example).macs == sc.cost(graph).macs == 64 * (12 * 9 + 16 * 12 * 9) + 640
    smaller = sc.compact(graph, {"0": torch.arange(12) < 6})
    for networks in ((model, smaller), (model, smaller.module), (graph, smaller.module)):
        timed = sc.latency(*networks, example_input=example, repeats=5)
        assert timed.batch == 2
        assert len(timed.speedups) == 1
    with pytest.raises(InvalidInput, match=r"Sequential without an example.* find_sites\(model, example_input\)"):
        sc.find_sites(model)
    with pytest.raises(InvalidInput, match="example"):
        sc.cost(model)


def test_a_resumed_run_has_the_notes_and_figures_of_the_run_itself(tmp_path: Path) -> None:
    recipe = replace(ONE_CUT["recipe"], confidence=0.0)
    test = loader(digits()[2])
    options: dict[str, Any] = {"recipe": recipe, "macs": 0.9, "max_drop": 0.05}
    whole = sc.prune(trained(), *loaders(), test=test, progress=False, **options)
    pruner = sc.Pruner(trained(), *loaders(), test=test, folder=tmp_path / "run", time_budget=1e-9, **options)
    noted = tuple(pruner.notes)
    assert "time budget" in noted[0]
    for _ in pruner:
        break
    pruner.close()
    resumed = sc.resume(tmp_path / "run", build(), test=test).finish()
    missed = f"only {resumed.macs.removed:.1%} of the MACs are removed, of 90.0% wanted: all sites are done"
    assert resumed.notes == (*noted, missed)
    assert whole.notes[-1].endswith("of 90.0% wanted: all sites are done")
    assert "longer than the time budget" in (tmp_path / "run/report.html").read_text()
    finished = sc.resume(tmp_path / "run", build()).finish()  # the test set is not needed: it was measured
    assert finished.test == resumed.test
    assert finished.latency == resumed.latency
    assert finished.notes == resumed.notes


def test_of_two_targets_both_are_met_or_missed_aloud() -> None:
    recipe = sc.Recipe.fast(max_drop=0.9, confidence=0, criterion="l1")
    result = sc.prune(trained(), *loaders(), recipe=recipe, macs=0.05, parameters=0.7, progress=False)
    assert result.macs.removed >= 0.05
    assert result.parameters.removed >= 0.7 or "of 70.0% wanted" in str(result)


def test_a_drop_of_everything_is_noted() -> None:
    result = sc.prune(trained(), *loaders(), recipe=replace(ONE_CUT["recipe"], max_drop=1.0), progress=False)
    assert result.notes == ("max_drop=1 allows all accuracy to be lost: 0.01 is one point",)


def test_examples_of_one_class_do_not_make_a_network_seem_untrained() -> None:
    val = digits()[1]
    ones = val.take((val.targets == 1).nonzero().flatten())  # type: ignore[union-attr]
    recipe = replace(ONE_CUT["recipe"], confidence=0.0)
    assert sc.prune(trained(), loaders()[0], loader(ones), recipe=recipe, progress=False).notes == ()


def test_a_folder_may_be_given_from_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    result = sc.prune(trained(), *loaders(), folder="~/run", **ONE_CUT)
    assert result.folder == tmp_path / "run"
    assert (tmp_path / "run" / "plan.json").exists()
    assert sc.resume("~/run", trained()).finish().macs == result.macs
