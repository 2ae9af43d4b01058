"""Runs: the allowed drop holds, runs resume to the same end, and everything that can go wrong with a folder is an error."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from kill_driver import RECIPE, network, small_data
from secateurs import load
from secateurs.api import prune, resume
from secateurs.config import Recipe, TrainSettings
from secateurs.data import Data, Examples
from secateurs.errors import DataError, InvalidInput, RunError, TrainingError
from secateurs.metrics import accuracy
from secateurs.models import build
from secateurs.pruning import checkpoints as keeping
from secateurs.pruning.journal import read_journal
from secateurs.pruning.results import Progress, Step
from torture.journals import entries_of, write_entries

DATA = small_data()
QUICK = Recipe.paper(max_drop=0.1, masks_per_filter=4, scoring_examples=64, search="bisect")


def same_files(one: Path, other: Path) -> None:
    for name in ("plan.json", "pruned.safetensors"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


def without_times(path: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in entry.items() if k not in ("seconds", "latency")} for entry in read_journal(path)]


@pytest.mark.parametrize(
    ("recipe", "kills", "moments"),
    [("paper", 25, {"masks", "epoch finetune", "epoch retrain"}), ("divided", 8, {"masks"})],
)
def test_killed_runs_end_like_the_one_that_was_left_alone(tmp_path: Path, recipe: str, kills: int, moments: set[str]) -> None:
    driver = Path(__file__).parent / "kill_driver.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(driver), str(tmp_path), str(kills), recipe],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert len(seen["kills"]) >= kills
    assert moments <= set(seen["kills"]), seen["kills"]
    for number in range(seen["finished"]):
        same_files(tmp_path / "whole", tmp_path / f"killed-{number}")
        assert without_times(tmp_path / "whole") == without_times(tmp_path / f"killed-{number}")


def test_a_run_killed_right_after_its_first_checkpoint_misses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = keeping._save

    def save_and_die(*given: Any) -> None:
        save(*given)
        raise KeyboardInterrupt

    prune(network(), DATA, QUICK, folder=tmp_path / "whole").finish()
    monkeypatch.setattr(keeping, "_save", save_and_die)
    with pytest.raises(KeyboardInterrupt):
        prune(network(), DATA, QUICK, folder=tmp_path / "killed")
    monkeypatch.undo()
    resume(tmp_path / "killed", network(), DATA).finish()
    assert without_times(tmp_path / "whole") == without_times(tmp_path / "killed")
    same_files(tmp_path / "whole", tmp_path / "killed")


def test_a_run_gives_a_smaller_network_that_reloads_to_the_reported_accuracy(tmp_path: Path) -> None:
    model = network()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    seen: list[Progress] = []
    run = prune(model, DATA, RECIPE, folder=tmp_path / "run", watch=seen.append)
    steps = list(run)
    outcome = run.finish()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert [step.number for step in steps] == list(range(1, len(steps) + 1))
    assert {event.phase for event in seen} == {"score", "search", "finetune", "retrain"}
    assert outcome.cost_after.parameters == sum(p.numel() for p in outcome.graph.module.parameters())
    assert outcome.cost_after.parameters < outcome.cost_before.parameters
    again = load(build("mlp", hidden=(12, 10)), tmp_path / "run" / "pruned.safetensors")
    assert accuracy(again.module, DATA.test) == outcome.test_after.accuracy
    assert f"→ {100 * outcome.test_after.accuracy:.2f} % on" in outcome.summary()
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["steps"]


@given(noise=st.lists(st.floats(0, 1), min_size=60, max_size=60), max_drop=st.floats(0, 0.3), total=st.booleans())
@settings(max_examples=15, deadline=None)
def test_the_allowed_drop_holds_whatever_the_metric_does(noise: list[float], max_drop: float, total: bool) -> None:
    """A metric that is anything but monotone: a fixed random number for every pattern of answers."""

    def erratic(outputs: Tensor, targets: Tensor) -> Tensor:
        right = (outputs.argmax(1) == targets).float()
        return torch.full_like(right, noise[int(right.sum()) % len(noise)])

    recipe = replace(QUICK, max_drop=max_drop, rounds=2, budget="run" if total else "site")
    recipe = replace(recipe, finetune=TrainSettings(epochs=1, lr=0.05)) if total else recipe
    run = prune(network(), DATA, recipe, metric=erratic)
    start = None
    for step in run:
        start = step.accuracy_before if start is None else start
        assert (step.accuracy_before if not total else start) - step.accuracy_cut <= max_drop + 1e-9
        if total:
            assert start - step.accuracy <= max_drop + 1e-9
    if total and start is not None:
        assert start - run.finish().search_after.accuracy <= max_drop + 1e-9


def test_a_target_ends_the_run() -> None:
    run = prune(network(), DATA, replace(QUICK, max_drop=1.0, target_parameters=0.05))
    outcome = run.finish()
    assert len(outcome.steps) == 1
    assert "of the parameters are removed" in outcome.stopped


def test_no_filter_within_the_drop_ends_the_run() -> None:
    def falls(outputs: Tensor, targets: Tensor) -> Tensor:
        calls.append(len(outputs))
        return torch.full((len(outputs),), 1.0 if len(calls) == 1 else 0.5)

    calls: list[int] = []
    outcome = prune(network(), DATA, replace(QUICK, rounds=5, max_drop=0.0, budget="run"), metric=falls).finish()
    assert [len(step.removed) for step in outcome.steps] == [0, 0]
    assert outcome.stopped == "no site yields a filter within the allowed drop"


def test_direction_and_choice_of_sites() -> None:
    forward = [step.site for step in prune(network(), DATA, QUICK)]
    backward = [step.site for step in prune(network(), DATA, replace(QUICK, direction="backward"))]
    assert backward == forward[::-1]
    chosen = [step.site for step in prune(network(), DATA, replace(QUICK, sites=(forward[1],)))]
    assert chosen == [forward[1]]
    with pytest.raises(InvalidInput, match="no site has such a name"):
        list(prune(network(), DATA, replace(QUICK, sites=("layer9.*",))))


def test_regression_with_an_own_loss_and_metric() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 6, generator=generator)
    y = (x[:, :2].sum(1, keepdim=True)).tanh()
    data = Data("sums", Examples(x[:200], y[:200]), Examples(x[200:250], y[200:250]), Examples(x[250:], y[250:]))

    def squared(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().mean(1)

    def closeness(outputs: Tensor, targets: Tensor) -> Tensor:
        return -(outputs - targets).abs().mean(1)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
    recipe = Recipe(max_drop=0.05, confidence=0, finetune=TrainSettings(epochs=5, lr=0.05, batch=32))
    outcome = prune(model, data, recipe, loss_fn=squared, metric=closeness).finish()
    assert outcome.search_before.accuracy - outcome.steps[0].accuracy_cut <= 0.05 + 1e-9
    assert outcome.graph.module(x).shape == (300, 1)
    before, after = ((-(net(x[250:]) - y[250:]).abs().mean()).item() for net in (model, outcome.graph.module))
    assert f"closeness {before:.4g} → {after:.4g} on 50 test" in outcome.summary()  # not as a percentage


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.left, self.right = nn.Linear(5, 12), nn.Linear(12, 3), nn.Linear(12, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.relu(self.body(x))
        return self.left(y), self.right(y)


def test_several_outputs_with_an_own_loss_and_metric() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(120, 5, generator=generator)
    targets = {"left": x[:, :3].argmax(1), "right": (x[:, 3] > 0).long()}

    def part(rows: slice) -> Examples:
        return Examples(x[rows], {name: t[rows] for name, t in targets.items()})

    def both(outputs: Any, wanted: Any) -> Tensor:
        one = nn.functional.cross_entropy(outputs[0], wanted["left"], reduction="none")
        return one + nn.functional.cross_entropy(outputs[1], wanted["right"], reduction="none")

    def right(outputs: Any, wanted: Any) -> Tensor:
        return (outputs[0].argmax(1) == wanted["left"]) & (outputs[1].argmax(1) == wanted["right"])

    data = Data("two", part(slice(0, 80)), part(slice(80, 100)), part(slice(100, 120)))
    outcome = prune(TwoHeads(), data, Recipe(max_drop=0.2, confidence=0), loss_fn=both, metric=right).finish()
    assert outcome.search_before.accuracy - outcome.search_after.accuracy <= 0.2 + 1e-9
    assert [tuple(o.shape) for o in outcome.graph.module(x)] == [(120, 3), (120, 2)]


def test_pairwise_model_drives_a_run() -> None:
    steps = list(prune(network(), DATA, replace(QUICK, model="pairs", masks=120)))
    assert all(math.isfinite(step.r2_held_out) for step in steps)


# ---- what can go wrong with a folder -------------------------------------------------------------------------------------


def started(folder: Path, recipe: Recipe = QUICK) -> list[Step]:
    """A run left after its first step."""
    run = prune(network(), DATA, recipe, folder=folder)
    steps = [next(iter(run))]
    run.close()
    return steps


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    run = prune(network(), DATA, QUICK, folder=tmp_path)
    with pytest.raises(RunError, match="another process is working on this run"):
        resume(tmp_path, network(), DATA)
    run.close()


def test_an_interrupted_run_can_be_resumed_in_the_same_process(tmp_path: Path) -> None:
    def interrupt(progress: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prune(network(), small_data(), QUICK, folder=tmp_path / "run", watch=interrupt).finish()
    assert resume(tmp_path / "run", network(), small_data()).finish().stopped


def test_a_folder_with_a_run_is_not_overwritten(tmp_path: Path) -> None:
    started(tmp_path)
    with pytest.raises(RunError, match="holds a run already"):
        prune(network(), DATA, QUICK, folder=tmp_path)


def test_a_changed_recipe_is_refused(tmp_path: Path) -> None:
    started(tmp_path)
    with pytest.raises(RunError, match="another recipe"):
        resume(tmp_path, network(), DATA, replace(QUICK, max_drop=0.2))
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(recipe.read_text().replace("max_drop = 0.1", "max_drop = 0.2"))
    with pytest.raises(RunError, match="was changed since the run started"):
        resume(tmp_path, network(), DATA)


def test_changed_data_is_refused(tmp_path: Path) -> None:
    started(tmp_path)
    flipped = Examples(DATA.search.inputs.flip(0), DATA.search.targets, DATA.search.scaling, DATA.search.ids)
    with pytest.raises(RunError, match="other data"):
        resume(tmp_path, network(), replace(DATA, search=flipped))


def test_a_changed_loss_or_metric_is_refused(tmp_path: Path) -> None:
    def right(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.argmax(1) == targets

    run = prune(network(), DATA, QUICK, folder=tmp_path, metric=right)
    next(iter(run))
    run.close()
    with pytest.raises(RunError, match=r"another metric \(right, now accuracy\)\. Give what it was started with"):
        resume(tmp_path, network(), DATA)  # our own metric is not what the steps so far were judged by
    with pytest.raises(RunError, match=r"another loss \(cross_entropy, now mse_loss\)"):
        resume(tmp_path, network(), DATA, loss_fn=nn.functional.mse_loss, metric=right)
    resume(tmp_path, network(), DATA, metric=right).close()


def test_no_run_at_all(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="not the folder of a run"):
        resume(tmp_path / "nowhere", network(), DATA)


def test_a_damaged_journal_is_an_error_but_a_torn_last_line_is_not(tmp_path: Path) -> None:
    started(tmp_path)
    journal = tmp_path / "journal.jsonl"
    whole = journal.read_bytes()
    journal.write_bytes(whole + b'{"unit": "mas')
    resume(tmp_path, network(), DATA).close()
    assert journal.read_bytes() == whole
    journal.write_bytes(whole[:50] + b"\n" + whole[50:])
    with pytest.raises(RunError, match=r"line \d+: damaged"):
        resume(tmp_path, network(), DATA)


def test_a_damaged_checkpoint_is_an_error(tmp_path: Path) -> None:
    recipe = replace(QUICK, max_drop=1.0)
    assert started(tmp_path, recipe)[0].removed
    path = tmp_path / "checkpoints" / "0001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(Exception, match="damaged"):
        resume(tmp_path, network(), DATA)


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prune(network(), DATA, RECIPE, folder=tmp_path / "whole").finish()
    run = prune(network(), DATA, RECIPE, folder=tmp_path / "full")
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
    resume(tmp_path / "full", network(), DATA).finish()
    same_files(tmp_path / "whole", tmp_path / "full")


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
            prune(network(), DATA, replace(QUICK, max_drop=0.2), folder=folder).finish()
        except RunError as error:
            assert str(error).endswith(f"Free some space, then go on with: secateurs resume {folder}")  # noqa: PT017
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
    with pytest.raises(RunError, match=f"journal.jsonl, {where}: ") as told:
        resume(tmp_path, network(), DATA)
    assert len(str(told.value)) < 600


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
    torch.manual_seed(seed)
    run = prune(build("mlp", hidden=(12, 10)), DATA, recipe, folder=folder)
    next(iter(run))
    run.close()


@pytest.mark.parametrize("name", ["0001.safetensors", "0001-momentum.safetensors"])
def test_a_checkpoint_that_is_missing_or_of_another_run_is_refused(tmp_path: Path, name: str) -> None:
    momentum_run(tmp_path / "run")
    momentum_run(tmp_path / "other", seed=1)
    file = tmp_path / "run" / "checkpoints" / name
    file.write_bytes((tmp_path / "other" / "checkpoints" / name).read_bytes())
    with pytest.raises(RunError, match=f"{name}: damaged, or not the file that the journal's 'step' relies on"):
        resume(tmp_path / "run", network(), DATA)
    file.unlink()
    with pytest.raises(RunError, match=f"{name}: cannot be read .*Restore it from a copy"):
        resume(tmp_path / "run", network(), DATA)


def test_other_weights_at_the_start_are_refused(tmp_path: Path) -> None:
    momentum_run(tmp_path / "run")
    momentum_run(tmp_path / "other", seed=1)
    name = "checkpoints/start.safetensors"
    (tmp_path / "run" / name).write_bytes((tmp_path / "other" / name).read_bytes())
    with pytest.raises(RunError, match=r"start\.safetensors: holds other weights than the run was started with"):
        resume(tmp_path / "run", network(), DATA)


def test_a_training_of_another_run_is_refused_and_may_be_deleted(tmp_path: Path) -> None:
    recipe = replace(QUICK, max_drop=1.0, finetune=TrainSettings(epochs=3, lr=0.05, batch=32))

    def stopped(folder: Path, seed: int) -> None:
        def stop(progress: Progress) -> None:
            if progress.phase == "finetune" and progress.done == 2:
                raise KeyboardInterrupt

        torch.manual_seed(seed)
        run = prune(build("mlp", hidden=(12, 10)), DATA, recipe, folder=folder, watch=stop)
        with pytest.raises(KeyboardInterrupt):
            run.finish()
        run.close()

    prune(network(), DATA, recipe, folder=tmp_path / "whole").finish()
    stopped(tmp_path / "run", 0)
    stopped(tmp_path / "other", 1)
    training = "checkpoints/training.safetensors"
    (tmp_path / "run" / training).write_bytes((tmp_path / "other" / training).read_bytes())
    with pytest.raises(RunError, match=r"training\.safetensors: not a file of this run.*Delete it and resume"):
        resume(tmp_path / "run", network(), DATA).finish()
    (tmp_path / "run" / training).unlink()
    resume(tmp_path / "run", network(), DATA).finish()
    same_files(tmp_path / "whole", tmp_path / "run")


def test_changed_provenance_is_refused(tmp_path: Path) -> None:
    started(tmp_path)
    file = tmp_path / "provenance.json"
    file.write_text(file.read_text().replace('"seed": 0', '"seed": 1'))
    with pytest.raises(RunError, match=r"line 1: does not continue from .*provenance\.json"):
        resume(tmp_path, network(), DATA)


def test_a_run_whose_journal_is_gone_begins_again_and_ends_the_same(tmp_path: Path) -> None:
    prune(network(), DATA, QUICK, folder=tmp_path / "whole").finish()
    started(tmp_path / "run")
    (tmp_path / "run" / "journal.jsonl").unlink()
    resume(tmp_path / "run", network(), DATA).finish()
    same_files(tmp_path / "whole", tmp_path / "run")
    assert without_times(tmp_path / "whole") == without_times(tmp_path / "run")


@pytest.mark.parametrize(
    ("unit", "field", "value"),
    [
        ("start", "accuracy", "high"),
        ("round", "sites", None),
        ("step", "removed", 3),
        ("step", "number", [1]),
        ("cut", "drop", {}),
    ],
)
def test_a_field_of_the_wrong_type_is_named(tmp_path: Path, unit: str, field: str, value: Any) -> None:
    """Signed as a wrong writer would: only the types can tell."""
    started(tmp_path)
    write_entries(tmp_path, [{**e, field: value} if e["unit"] == unit else e for e in entries_of(tmp_path)])
    with pytest.raises(RunError, match=rf"journal\.jsonl, line \d+: damaged \('{unit}': .*{field}"):
        resume(tmp_path, network(), DATA)


@pytest.mark.parametrize(("unit", "field"), [("trial", "accuracy"), ("curve", "order"), ("division", "removed")])
def test_a_line_of_a_division_without_a_field_is_named(tmp_path: Path, unit: str, field: str) -> None:
    recipe = Recipe(max_drop=0.2, confidence=0, criterion="l1", allocation="global")
    prune(network(), DATA, recipe, folder=tmp_path).finish()
    entries = [{k: v for k, v in e.items() if e["unit"] != unit or k != field} for e in entries_of(tmp_path)]
    write_entries(tmp_path, entries)
    with pytest.raises(RunError, match=rf"journal\.jsonl, line \d+: damaged \('{unit}': .*{field}"):
        resume(tmp_path, network(), DATA)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_unwritable_folder_is_an_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(RunError, match="cannot be written"):
        prune(network(), DATA, QUICK, folder=tmp_path / "run")


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RunError, match="file"):
        prune(network(), DATA, QUICK, folder=tmp_path / "file" / "run")


def test_a_diverging_training_is_an_error_and_the_run_is_not_lost(tmp_path: Path) -> None:
    recipe = replace(QUICK, max_drop=1.0, finetune=TrainSettings(epochs=2, lr=1e12, schedule="constant"))
    run = prune(network(), DATA, recipe, folder=tmp_path)
    with pytest.raises(TrainingError, match="epoch"):
        run.finish()
    run.close()
    assert [entry["unit"] for entry in read_journal(tmp_path)][-1] == "cut"


def test_provenance_records_what_made_the_run(tmp_path: Path) -> None:
    started(tmp_path)
    found = json.loads((tmp_path / "provenance.json").read_text())
    assert found["versions"]["torch"].startswith(torch.__version__.split("+")[0])
    assert found["data"]["sha256"] == DATA.digest()
    assert found["seed"] == QUICK.seed
    assert len(found["model"]["weights_sha256"]) == 64


# ---- what a run says must be true ----------------------------------------------------------------------------------------


def test_a_lambda_for_the_loss_and_one_for_the_metric_are_not_mixed_up() -> None:
    """Both are called <lambda> in one scope, and both are measured under the same masks on the same images."""

    def entropy(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, targets, reduction="none")

    def right(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.argmax(1) == targets

    recipe = replace(QUICK, criterion="portfolio", portfolio=("l1", "fpgm"), max_drop=0.05)
    named = prune(network(), DATA, recipe, loss_fn=entropy, metric=right).finish()
    lambdas = prune(
        network(),
        DATA,
        recipe,
        loss_fn=lambda o, t: nn.functional.cross_entropy(o, t, reduction="none"),
        metric=lambda o, t: o.argmax(1) == t,
    ).finish()
    assert [(s.removed, s.evaluated) for s in lambdas.steps] == [(s.removed, s.evaluated) for s in named.steps]


def test_a_shared_store_does_not_mix_up_repairs_networks_or_settings(tmp_path: Path) -> None:
    class Top:
        def __init__(self, k: int) -> None:
            self.k = k

        def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return (outputs.topk(self.k, 1).indices == targets[:, None]).any(1)

    def evaluated(recipe: Recipe, metric: Any, store: Path | None, activation: nn.Module) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), activation, nn.Linear(12, 10))
        return [s.evaluated for s in prune(model, DATA, recipe, metric=metric, store=store).finish().steps]

    plain = Recipe(max_drop=0.05, confidence=0, criterion="l1", repair="least-squares", repair_examples=8)
    for recipe, k, activation in [
        (plain, 5, nn.ReLU()),
        (plain, 1, nn.ReLU()),
        (replace(plain, repair_examples=256), 1, nn.ReLU()),
        (replace(plain, repair_examples=256), 1, nn.Tanh()),
    ]:
        shared = evaluated(recipe, Top(k), tmp_path / "shared.sqlite", activation)
        assert shared == evaluated(recipe, Top(k), None, activation)


def test_divided_cuts_stay_within_the_drop_when_trained() -> None:
    training = TrainSettings(epochs=1, steps=6, lr=0.1, batch=32)
    for seed in (0, 4):
        recipe = Recipe(max_drop=0.03, confidence=0, criterion="l1", allocation="global", finetune=training, seed=seed)
        outcome = prune(network(), DATA, recipe).finish()
        assert outcome.search_before.accuracy - outcome.search_after.accuracy <= 0.03 + 1e-9


def test_a_stopped_division_tries_nothing_twice(tmp_path: Path) -> None:
    recipe = Recipe(max_drop=0.2, confidence=0.8, criterion="l1", allocation="global")
    whole = prune(network(), DATA, recipe, folder=tmp_path / "whole").finish()

    def stop_at_third(progress: Progress) -> None:
        if progress.phase == "divide" and progress.done == 3:
            raise KeyboardInterrupt

    run = prune(network(), DATA, recipe, folder=tmp_path / "run", watch=stop_at_third)
    with pytest.raises(KeyboardInterrupt):
        run.finish()
    run.close()
    trials = [entry for entry in read_journal(tmp_path / "run") if entry["unit"] == "trial"]
    assert len(trials) == 2
    resume(tmp_path / "run", network(), DATA).finish()
    assert without_times(tmp_path / "run") == without_times(tmp_path / "whole")
    same_files(tmp_path / "whole", tmp_path / "run")
    assert len([entry for entry in read_journal(tmp_path / "run") if entry["unit"] == "trial"]) > 3
    assert whole.cost_after.macs < whole.cost_before.macs


def test_divided_cuts_reach_both_targets() -> None:
    recipe = Recipe(max_drop=1.0, confidence=0, allocation="global", criterion="l1", target_macs=0.3, target_parameters=0.7)
    outcome = prune(network(), DATA, recipe).finish()
    assert 1 - outcome.cost_after.macs / outcome.cost_before.macs >= 0.3
    assert 1 - outcome.cost_after.parameters / outcome.cost_before.parameters >= 0.7
    assert "are removed, of" in outcome.stopped


def test_a_step_counts_all_its_accuracies_on_the_same_images() -> None:
    for step in prune(network(), DATA, Recipe(max_drop=0.3, criterion="l1", confidence=0.9)):
        assert step.accuracy == step.accuracy_cut  # nothing was trained


def test_kept_rankings_are_those_of_their_steps(tmp_path: Path) -> None:
    recipe = Recipe(max_drop=0.3, confidence=0, allocation="global", criterion="l1")
    run = prune(network(), DATA, recipe, folder=tmp_path)
    steps = list(run)
    linear = {f"layers.{n}": m for n, m in enumerate(network().get_submodule("layers")) if isinstance(m, nn.Linear)}
    for step in steps:
        found = run.record.load_tensors(f"ensembles/{step.number:04d}")
        assert found is not None
        assert found[1]["site"] == step.site
        torch.testing.assert_close(found[0]["coef"], linear[step.site].weight.detach().abs().sum(1).double())


def test_only_fast_widths_are_kept_when_latency_counts(tmp_path: Path) -> None:
    recipe = Recipe(max_drop=1.0, confidence=0, criterion="l1", latency_aware=True)
    steps = list(prune(network(), DATA, recipe, folder=tmp_path))
    allowed = {entry["site"]: entry["widths"] for entry in read_journal(tmp_path) if entry["unit"] == "widths"}
    assert set(allowed) == {step.site for step in steps}
    assert all(step.kept in (*allowed[step.site], step.channels) for step in steps)


# ---- data that the network cannot take ---------------------------------------------------------------------------------


def changed_set(name: str, **parts: Tensor) -> Data:
    data = small_data()
    return replace(data, **{name: replace(data.splits()[name], **parts)})


@pytest.mark.parametrize("label", [-1, 1_000])
def test_a_label_without_an_output_is_refused_before_anything_is_written(tmp_path: Path, label: int) -> None:
    targets = small_data().search.targets
    assert isinstance(targets, Tensor)
    wrong = targets.clone()
    wrong[3] = label
    message = rf"the search set: example 3 has the label {label}, and the network has \d+ outputs: wanted labels from 0 to"
    with pytest.raises(DataError, match=message):
        prune(network(), changed_set("search", targets=wrong), RECIPE, folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["train", "search", "test"])
def test_nan_in_the_data_is_refused_before_anything_is_written(tmp_path: Path, name: str) -> None:
    inputs = small_data().splits()[name].ready().inputs.clone()
    inputs[5].view(-1)[0], inputs[7].view(-1)[0] = math.nan, math.inf
    with pytest.raises(DataError, match=rf"the {name} set of .*: input 5 holds NaN or infinite values \(2 of {len(inputs)}"):
        prune(network(), changed_set(name, inputs=inputs, scaling=None), RECIPE, folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_regression_targets_with_the_default_loss_and_metric_are_refused(tmp_path: Path) -> None:
    targets = torch.rand(len(small_data().train), 1)
    with pytest.raises(InvalidInput, match=r"the train set: its targets are torch.float32 .*give loss_fn=… of your own"):
        prune(network(), changed_set("train", targets=targets), RECIPE, folder=tmp_path / "run")
    with pytest.raises(InvalidInput, match=r"accuracy wants class numbers .*give metric=… of your own"):
        prune(network(), changed_set("train", targets=targets), RECIPE, folder=tmp_path / "run", loss_fn=nn.functional.mse_loss)
    assert not (tmp_path / "run").exists()
