"""Folders of runs: what is damaged, changed, locked or full is an error that says what to do, and never another result."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kill_driver import RECIPE
from nets import assert_same_bits, weights_of
from secateurs.api import Pruner, resume
from secateurs.config import Recipe, TrainSettings, files, recipe_fields
from secateurs.data import Examples
from secateurs.errors import InvalidInput, RunError
from secateurs.pruning import folder
from secateurs.pruning.results import Progress, Step
from secateurs.report import read_run, write_report
from torture.journals import entries_of, write_entries
from torture.runs import differing_file, few_digits, perceptron, without_times

DATA = few_digits(384)
QUICK = Recipe.paper(max_drop=0.1, masks_per_filter=4, scoring_examples=64, search="bisect")


def started(folder: Path, recipe: Recipe = QUICK) -> list[Step]:
    """A run left after its first step."""
    run = Pruner(perceptron(), DATA, recipe=recipe, folder=folder)
    steps = [next(iter(run))]
    run.close()
    return steps


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    run = Pruner(perceptron(), DATA, recipe=QUICK, folder=tmp_path)
    with pytest.raises(RunError, match="another process is working on this run"):
        resume(tmp_path, perceptron(), DATA)
    run.close()


def test_an_interrupted_run_can_be_resumed_in_the_same_process(tmp_path: Path) -> None:
    def interrupt(progress: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Pruner(perceptron(), few_digits(384), recipe=QUICK, folder=tmp_path / "run", callback=interrupt).finish()
    assert resume(tmp_path / "run", perceptron(), few_digits(384)).finish().stopped


def test_a_folder_with_a_run_is_not_overwritten(tmp_path: Path) -> None:
    started(tmp_path)
    with pytest.raises(RunError, match="holds a run already"):
        Pruner(perceptron(), DATA, recipe=QUICK, folder=tmp_path)


def test_a_changed_recipe_is_refused(tmp_path: Path) -> None:
    started(tmp_path)
    with pytest.raises(RunError, match="another recipe"):
        resume(tmp_path, perceptron(), DATA, recipe=replace(QUICK, max_drop=0.2))
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(recipe.read_text().replace("max_drop = 0.1", "max_drop = 0.2"))
    with pytest.raises(RunError, match="was changed since the run started"):
        resume(tmp_path, perceptron(), DATA)


def test_a_run_of_a_release_with_fewer_settings_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a release neither wrote the settings that came later, nor counted them in the digest of the recipe."""
    retrained = replace(QUICK, retrain=TrainSettings(epochs=1, batch=64))
    expected = Pruner(perceptron(), DATA, recipe=retrained, folder=tmp_path / "whole").finish()

    def fewer(recipe: Recipe) -> dict[str, Any]:
        found = recipe_fields(recipe)
        for name in ("mixup", "features"):
            del found["retrain"][name]
        return found

    with monkeypatch.context() as earlier:
        earlier.setattr(files, "recipe_fields", fewer)
        earlier.setattr(folder, "recipe_fields", fewer)
        started(tmp_path / "run", retrained)
    assert "mixup" not in (tmp_path / "run" / "recipe.toml").read_text()
    found = resume(tmp_path / "run", perceptron(), DATA).finish()
    assert_same_bits(found.model.state_dict(), expected.model.state_dict())


def test_a_recipe_without_a_field_whose_default_has_changed_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Filled in by today's defaults it would be another run."""

    def fewer(recipe: Recipe) -> dict[str, Any]:
        return {name: value for name, value in recipe_fields(recipe).items() if name not in ("allocation", "repair")}

    with monkeypatch.context() as earlier:
        earlier.setattr(files, "recipe_fields", fewer)
        earlier.setattr(folder, "recipe_fields", fewer)
        started(tmp_path)
    with pytest.raises(RunError, match=r"recipe\.toml: no allocation, repair: the release that started the run had other"):
        resume(tmp_path, perceptron(), DATA)


def test_changed_data_is_refused(tmp_path: Path) -> None:
    started(tmp_path)
    flipped = Examples(DATA.search.inputs.flip(0), DATA.search.targets, DATA.search.scaling, DATA.search.ids)
    with pytest.raises(RunError, match="other data"):
        resume(tmp_path, perceptron(), replace(DATA, search=flipped))


def test_a_changed_loss_or_metric_is_refused(tmp_path: Path) -> None:
    def right(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.argmax(1) == targets

    run = Pruner(perceptron(), DATA, recipe=QUICK, folder=tmp_path, metric=right)
    next(iter(run))
    run.close()
    with pytest.raises(RunError, match=r"another metric \(right, now accuracy\)\. Give what it was started with"):
        resume(tmp_path, perceptron(), DATA)  # our own metric did not decide the steps so far
    with pytest.raises(RunError, match=r"another loss \(cross_entropy, now mse_loss\)"):
        resume(tmp_path, perceptron(), DATA, loss=nn.functional.mse_loss, metric=right)
    resume(tmp_path, perceptron(), DATA, metric=right).close()


def test_resuming_a_folder_without_a_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="not the folder of a run"):
        resume(tmp_path / "nowhere", perceptron(), DATA)


def test_a_damaged_journal_is_an_error_but_a_torn_last_line_is_not(tmp_path: Path) -> None:
    started(tmp_path)
    journal = tmp_path / "journal.jsonl"
    whole = journal.read_bytes()
    journal.write_bytes(whole + b'{"unit": "mas')
    resume(tmp_path, perceptron(), DATA).close()
    assert journal.read_bytes() == whole
    journal.write_bytes(whole[:50] + b"\n" + whole[50:])
    with pytest.raises(RunError, match=r"line \d+: damaged"):
        resume(tmp_path, perceptron(), DATA)


def test_a_damaged_checkpoint_is_an_error(tmp_path: Path) -> None:
    recipe = replace(QUICK, max_drop=1.0)
    assert started(tmp_path, recipe)[0].removed
    path = tmp_path / "checkpoints" / "0001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(Exception, match="damaged"):
        resume(tmp_path, perceptron(), DATA)


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Pruner(perceptron(), DATA, recipe=RECIPE, folder=tmp_path / "whole").finish()
    run = Pruner(perceptron(), DATA, recipe=RECIPE, folder=tmp_path / "full")
    real, calls = os.fsync, 0

    def full(handle: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 12:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match="the disk is full"):
        run.finish()
    monkeypatch.undo()
    run.close()
    resume(tmp_path / "full", perceptron(), DATA).finish()
    assert differing_file(tmp_path / "whole", tmp_path / "full") is None


def test_a_full_disk_says_what_to_do_whatever_was_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipe, provenance, journal, checkpoints, the pruned network and the report: the disk is full at each in turn."""
    real, left = os.fsync, 0

    def full(handle: int) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle)

    monkeypatch.setattr(os, "fsync", full)
    for number in range(0, 200, 3):
        left, folder = number, tmp_path / str(number)
        try:
            Pruner(perceptron(), DATA, recipe=replace(QUICK, max_drop=0.2), folder=folder).finish()
        except RunError as error:
            assert str(error).endswith(f"Free some space, then resume with: secateurs resume {folder}")  # noqa: PT017
        else:
            break
    assert number > 20


# ---- what decides a result is covered by the journal ---------------------------------------------------------------------


def lines_of(folder: Path) -> list[bytes]:
    return (folder / "journal.jsonl").read_bytes().splitlines(keepends=True)


def swap_first_two(lines: list[bytes]) -> list[bytes]:
    return [lines[1], lines[0], *lines[2:]]


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda lines: [line.replace(b'"accuracy": 0.', b'"accuracy": 1.', 1) for line in lines], "line 2"),
        (swap_first_two, "line 1"),
        (lambda lines: [lines[0], *lines[2:]], "line 2"),
        (lambda lines: [lines[0], lines[1], lines[1], *lines[2:]], "line 3"),
        (lambda lines: [*lines[:2], b'{"unit": "start", "accuracy": 0.5, "loss": 1.0}\n', *lines[2:]], "line 3"),
    ],
)
def test_changed_swapped_deleted_and_repeated_lines_are_refused(tmp_path: Path, change: Any, where: str) -> None:
    started(tmp_path)
    (tmp_path / "journal.jsonl").write_bytes(b"".join(change(lines_of(tmp_path))))
    with pytest.raises(RunError, match=f"journal.jsonl, {where}: ") as caught:
        resume(tmp_path, perceptron(), DATA)
    assert len(str(caught.value)) < 600


def test_a_line_is_chained_by_sha256_to_the_line_before_and_to_the_provenance(tmp_path: Path) -> None:
    started(tmp_path)
    before = hashlib.sha256((tmp_path / "provenance.json").read_bytes()).hexdigest()
    for line in lines_of(tmp_path):
        body, _, digest = line.rstrip().removesuffix(b'"}').rpartition(b', "digest": "')
        before = hashlib.sha256(before.encode() + body + b"}").hexdigest()
        assert digest.decode() == before


def momentum_run(folder: Path, seed: int = 0) -> None:
    """A run left after its first step, which has trained: its checkpoint has momentum."""
    recipe = replace(QUICK, max_drop=1.0, finetune=TrainSettings(epochs=2, lr=0.05, batch=32))
    run = Pruner(perceptron(seed=seed), DATA, recipe=recipe, folder=folder)
    next(iter(run))
    run.close()


@pytest.mark.parametrize("name", ["0001.safetensors", "0001-momentum.safetensors"])
def test_a_checkpoint_that_is_missing_or_of_another_run_is_refused(tmp_path: Path, name: str) -> None:
    momentum_run(tmp_path / "run")
    momentum_run(tmp_path / "other", seed=1)
    file = tmp_path / "run" / "checkpoints" / name
    file.write_bytes((tmp_path / "other" / "checkpoints" / name).read_bytes())
    with pytest.raises(RunError, match=f"{name}: damaged, or not the file that the journal relies on"):
        resume(tmp_path / "run", perceptron(), DATA)
    file.unlink()
    with pytest.raises(RunError, match=f"{name}: cannot be read .*Restore it from a copy"):
        resume(tmp_path / "run", perceptron(), DATA)


def test_other_weights_at_the_start_are_refused(tmp_path: Path) -> None:
    momentum_run(tmp_path / "run")
    momentum_run(tmp_path / "other", seed=1)
    name = "checkpoints/start.safetensors"
    (tmp_path / "run" / name).write_bytes((tmp_path / "other" / name).read_bytes())
    with pytest.raises(RunError, match=r"start\.safetensors: holds other weights than the run was started with"):
        resume(tmp_path / "run", perceptron(), DATA)


def test_a_training_of_another_run_is_refused_and_may_be_deleted(tmp_path: Path) -> None:
    recipe = replace(QUICK, max_drop=1.0, finetune=TrainSettings(epochs=3, lr=0.05, batch=32))

    def stopped(folder: Path, seed: int) -> None:
        def stop(progress: Progress) -> None:
            if progress.phase == "finetune" and progress.done == 2:
                raise KeyboardInterrupt

        run = Pruner(perceptron(seed=seed), DATA, recipe=recipe, folder=folder, callback=stop)
        with pytest.raises(KeyboardInterrupt):
            run.finish()
        run.close()

    Pruner(perceptron(), DATA, recipe=recipe, folder=tmp_path / "whole").finish()
    stopped(tmp_path / "run", 0)
    stopped(tmp_path / "other", 1)
    training = "checkpoints/training.safetensors"
    (tmp_path / "run" / training).write_bytes((tmp_path / "other" / training).read_bytes())
    with pytest.raises(RunError, match=r"training\.safetensors: not a file of this run.*Delete it and resume"):
        resume(tmp_path / "run", perceptron(), DATA).finish()
    (tmp_path / "run" / training).unlink()
    resume(tmp_path / "run", perceptron(), DATA).finish()
    assert differing_file(tmp_path / "whole", tmp_path / "run") is None


def test_changed_provenance_is_refused(tmp_path: Path) -> None:
    started(tmp_path)
    file = tmp_path / "provenance.json"
    file.write_text(file.read_text().replace('"seed": 0', '"seed": 1'))
    with pytest.raises(RunError, match=r"line 1: does not continue from .*provenance\.json"):
        resume(tmp_path, perceptron(), DATA)


def test_a_run_without_its_journal_starts_again_and_ends_the_same(tmp_path: Path) -> None:
    Pruner(perceptron(), DATA, recipe=QUICK, folder=tmp_path / "whole").finish()
    started(tmp_path / "run")
    (tmp_path / "run" / "journal.jsonl").unlink()
    resume(tmp_path / "run", perceptron(), DATA).finish()
    assert differing_file(tmp_path / "whole", tmp_path / "run") is None
    assert without_times(tmp_path / "whole") == without_times(tmp_path / "run")


@pytest.mark.parametrize(
    ("unit", "field", "value"),
    [
        ("start", "accuracy", "high"),
        ("round", "sites", None),
        ("step", "removed", 3),
        ("step", "number", [1]),
        ("cut", "cut", {"drop": {}}),
    ],
)
def test_a_field_of_the_wrong_type_is_named(tmp_path: Path, unit: str, field: str, value: Any) -> None:
    """Signed as a wrong writer would: only the types are wrong."""
    started(tmp_path)
    write_entries(tmp_path, [{**e, field: value} if e["unit"] == unit else e for e in entries_of(tmp_path)])
    with pytest.raises(RunError, match=rf"journal\.jsonl, line \d+: damaged \('{unit}': .*{field}"):
        resume(tmp_path, perceptron(), DATA)


@pytest.mark.parametrize(("unit", "field"), [("trial", "accuracy"), ("curve", "ranking"), ("division", "removed")])
def test_a_journal_line_of_an_allocation_without_a_field_is_named(tmp_path: Path, unit: str, field: str) -> None:
    recipe = Recipe.fast(max_drop=0.2, confidence=0, criterion="l1", allocation="global")
    Pruner(perceptron(), DATA, recipe=recipe, folder=tmp_path).finish()
    entries = [{k: v for k, v in e.items() if e["unit"] != unit or k != field} for e in entries_of(tmp_path)]
    write_entries(tmp_path, entries)
    with pytest.raises(RunError, match=rf"journal\.jsonl, line \d+: damaged \('{unit}': .*{field}"):
        resume(tmp_path, perceptron(), DATA)


@pytest.mark.parametrize(("field", "value"), [("batches", []), ("batches", [0]), ("multiple", 0)])
def test_a_measured_condition_that_cannot_be_is_named(tmp_path: Path, field: str, value: Any) -> None:
    """Nothing is served in batches of no example, or of none at all; no width is a multiple of 0."""
    recipe = Recipe.fast(max_drop=0.2, confidence=0, criterion="l1", allocation="global")
    Pruner(perceptron(), DATA, recipe=recipe, folder=tmp_path).finish()
    write_entries(tmp_path, [{**e, field: value} if e["unit"] == field else e for e in entries_of(tmp_path)])
    with pytest.raises(RunError, match=rf"journal\.jsonl, line \d+: damaged \('{field}': "):
        resume(tmp_path, perceptron(), DATA)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_unwritable_folder_is_an_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(RunError, match="cannot be written"):
        Pruner(perceptron(), DATA, recipe=QUICK, folder=tmp_path / "run")


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RunError, match="file"):
        Pruner(perceptron(), DATA, recipe=QUICK, folder=tmp_path / "file" / "run")


def test_trainings_that_diverge_are_recorded_and_the_run_is_not_lost(tmp_path: Path) -> None:
    recipe = replace(QUICK, max_drop=1.0, finetune=TrainSettings(epochs=2, lr=1e12, schedule="constant"))
    result = Pruner(perceptron(), DATA, recipe=recipe, folder=tmp_path).finish()
    untrained = Pruner(perceptron(), DATA, recipe=replace(recipe, finetune=None)).finish()
    assert_same_bits(weights_of(result.model), weights_of(untrained.model))
    kept = [entry for entry in entries_of(tmp_path) if entry["unit"] == "kept"]
    assert [entry["step"] for entry in kept] == [step.number for step in result.steps if step.removed]
    assert {entry["kept"] for entry in kept} == {"start"}
    assert all("diverged in epoch" in entry["note"] for entry in kept)
    assert f"Note: {len(kept)} trainings were undone" in str(result)


def test_provenance_records_what_made_the_run(tmp_path: Path) -> None:
    started(tmp_path)
    found = json.loads((tmp_path / "provenance.json").read_text())
    assert found["versions"]["torch"].startswith(torch.__version__.split("+")[0])
    assert found["data"]["sha256"] == DATA.digest()
    assert found["seed"] == QUICK.seed
    assert len(found["model"]["weights_sha256"]) == 64


def test_a_folder_of_another_release_is_not_called_damaged_and_nothing_in_it_changes(tmp_path: Path) -> None:
    started(tmp_path)
    known = json.loads((tmp_path / "provenance.json").read_text())
    (tmp_path / "provenance.json").write_text(json.dumps({**known, "format": 3}))
    recipe = (tmp_path / "recipe.toml").read_text()
    (tmp_path / "recipe.toml").write_text(f'signal = "loss"\nrepaired_masks = false\n{recipe}')  # fields that are gone
    (tmp_path / "report.html").write_text("of that release")
    for read in (lambda: resume(tmp_path, perceptron(), DATA), lambda: write_report(tmp_path), lambda: read_run(tmp_path)):
        with pytest.raises(RunError, match="got folder format 3, wanted 4: another release wrote it, and it is whole"):
            read()
    assert (tmp_path / "report.html").read_text() == "of that release"


def test_an_interrupted_run_is_not_continued_from_a_half_trained_network() -> None:
    def interrupt(event: Progress) -> None:
        if event.phase == "retrain":
            raise KeyboardInterrupt

    recipe = replace(QUICK, retrain=TrainSettings(epochs=3, batch=64, lr=0.05))
    run = Pruner(perceptron(), DATA, recipe=recipe, callback=interrupt)
    with pytest.raises(KeyboardInterrupt):
        run.finish()
    with pytest.raises(RunError, match="this run was interrupted, and its network may be half trained: start it again"):
        run.finish()


def test_a_pattern_that_fits_no_site_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no site has such a name"):
        Pruner(perceptron(), DATA, recipe=replace(QUICK, sites=("nosuch",)), folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_ranking_of_the_wrong_type_is_named(tmp_path: Path) -> None:
    recipe = Recipe.fast(max_drop=0.2, confidence=0, criterion="l1", allocation="global")
    Pruner(perceptron(), DATA, recipe=recipe, folder=tmp_path).finish()
    spoilt = [{**e, "ranking": {**e["ranking"], "order": "all"}} if e["unit"] == "curve" else e for e in entries_of(tmp_path)]
    write_entries(tmp_path, spoilt)
    with pytest.raises(RunError, match=r"journal\.jsonl, line \d+: damaged \('curve': .*Expected a list of numbers"):
        resume(tmp_path, perceptron(), DATA)
