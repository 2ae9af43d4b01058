"""Runs: the allowed drop holds, killed runs resume to the same end, and what a run reports is true."""

from __future__ import annotations

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

from kill_driver import RECIPE
from nets import assert_same_bits, seeded, weights_of
from secateurs import load, prune, read_recipe
from secateurs.api import Pruner, resume
from secateurs.config import Recipe, TrainSettings
from secateurs.data import Data, Examples
from secateurs.data import load as load_data
from secateurs.errors import DataError, InvalidInput
from secateurs.metrics import accuracy
from secateurs.models import build, load_public
from secateurs.pruning import folder
from secateurs.pruning.results import Progress
from secateurs.training import train_
from torture.journals import entries_of
from torture.runs import ResidualNet, differing_file, few_digits, perceptron, without_times

DATA = few_digits(384)
QUICK = Recipe.paper(max_drop=0.1, masks_per_filter=4, scoring_examples=64, search="bisect")


@pytest.mark.parametrize(
    ("kills", "moments"),
    [
        ({"paper": 4, "allocated": 3}, {}),
        pytest.param(
            {"paper": 25, "allocated": 8},
            {"paper": {"masks", "epoch finetune", "epoch retrain"}, "allocated": {"masks"}},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_killed_runs_resume_to_the_same_files(tmp_path: Path, kills: dict[str, int], moments: dict[str, set[str]]) -> None:
    driver = Path(__file__).parents[1] / "kill_driver.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(driver), str(tmp_path), *(f"{recipe}={count}" for recipe, count in kills.items())],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for recipe, seen in json.loads(done.stdout).items():
        assert len(seen["kills"]) >= kills[recipe]
        assert moments.get(recipe, set()) <= set(seen["kills"]), seen["kills"]
        runs = tmp_path / recipe
        for number in range(seen["finished"]):
            assert differing_file(runs / "whole", runs / f"killed-{number}") is None
            assert without_times(runs / "whole") == without_times(runs / f"killed-{number}")


def test_a_run_killed_right_after_its_first_checkpoint_resumes_to_the_same_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = folder.save

    def save_and_die(*given: Any) -> None:
        save(*given)
        raise KeyboardInterrupt

    Pruner(perceptron(), DATA, recipe=QUICK, folder=tmp_path / "whole").finish()
    monkeypatch.setattr(folder, "save", save_and_die)
    with pytest.raises(KeyboardInterrupt):
        Pruner(perceptron(), DATA, recipe=QUICK, folder=tmp_path / "killed")
    monkeypatch.undo()
    resume(tmp_path / "killed", perceptron(), DATA).finish()
    assert without_times(tmp_path / "whole") == without_times(tmp_path / "killed")
    assert differing_file(tmp_path / "whole", tmp_path / "killed") is None


def test_a_run_gives_a_smaller_network_that_reloads_to_the_reported_accuracy(tmp_path: Path) -> None:
    model = perceptron()
    before = weights_of(model)
    seen: list[Progress] = []
    run = Pruner(model, DATA, recipe=RECIPE, folder=tmp_path / "run", callback=seen.append)
    steps = list(run)
    outcome = run.finish()
    assert_same_bits(before, model.state_dict())
    assert [step.number for step in steps] == list(range(1, len(steps) + 1))
    work = {"score", "search", "finetune", "retrain", "measure"}
    assert {event.phase for event in seen} == {"original", "site", *work, "timing", "write"}
    assert outcome.cost_after.parameters == sum(p.numel() for p in outcome.graph.module.parameters())
    assert outcome.cost_after.parameters < outcome.cost_before.parameters
    again = load(perceptron(), tmp_path / "run" / "pruned.safetensors")
    assert accuracy(again.module, DATA.test) == outcome.test.after
    assert f"→ {100 * outcome.test.after:.2f} % on" in outcome.summary()
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["steps"]


@given(noise=st.lists(st.floats(0, 1), min_size=60, max_size=60), max_drop=st.floats(0, 0.3), total=st.booleans())
@settings(max_examples=10, deadline=None)
def test_the_allowed_drop_holds_whatever_the_metric_does(noise: list[float], max_drop: float, total: bool) -> None:
    """A metric that is anything but monotone: a fixed random number for every pattern of answers."""

    def erratic(outputs: Tensor, targets: Tensor) -> Tensor:
        right = (outputs.argmax(1) == targets).float()
        return torch.full_like(right, noise[int(right.sum()) % len(noise)])

    recipe = replace(QUICK, max_drop=max_drop, rounds=2, budget="run" if total else "site")
    recipe = replace(recipe, finetune=TrainSettings(epochs=1, lr=0.05)) if total else recipe
    run = Pruner(perceptron(), DATA, recipe=recipe, metric=erratic)
    start = None
    for step in run:
        start = step.accuracy_before if start is None else start
        assert (step.accuracy_before if not total else start) - step.accuracy_cut <= max_drop + 1e-9
        if total:
            assert start - step.accuracy <= max_drop + 1e-9
    if total and start is not None:
        assert start - run.finish().search.after <= max_drop + 1e-9


def test_a_target_ends_the_run() -> None:
    run = Pruner(perceptron(), DATA, recipe=replace(QUICK, max_drop=1.0, target_parameters=0.05))
    outcome = run.finish()
    assert len(outcome.steps) == 1
    assert "of the parameters are removed" in outcome.stopped


def test_no_filter_within_the_drop_ends_the_run() -> None:
    def falls(outputs: Tensor, targets: Tensor) -> Tensor:
        calls.append(len(outputs))
        return torch.full((len(outputs),), 1.0 if len(calls) == 1 else 0.5)

    calls: list[int] = []
    outcome = Pruner(perceptron(), DATA, recipe=replace(QUICK, rounds=5, max_drop=0.0, budget="run"), metric=falls).finish()
    assert [len(step.removed) for step in outcome.steps] == [0, 0]
    assert outcome.stopped == "no site can lose a filter within the allowed drop"


def test_direction_and_choice_of_sites() -> None:
    forward = [step.site for step in Pruner(perceptron(), DATA, recipe=QUICK)]
    backward = [step.site for step in Pruner(perceptron(), DATA, recipe=replace(QUICK, direction="backward"))]
    assert backward == forward[::-1]
    chosen = [step.site for step in Pruner(perceptron(), DATA, recipe=replace(QUICK, sites=(forward[1],)))]
    assert chosen == [forward[1]]
    with pytest.raises(InvalidInput, match="no site has such a name"):
        list(Pruner(perceptron(), DATA, recipe=replace(QUICK, sites=("layer9.*",))))


def test_regression_with_an_own_loss_and_metric() -> None:
    generator = seeded(0)
    x = torch.randn(300, 6, generator=generator)
    y = (x[:, :2].sum(1, keepdim=True)).tanh()
    data = Data("sums", Examples(x[:200], y[:200]), Examples(x[200:250], y[200:250]), Examples(x[250:], y[250:]))

    def squared(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().mean(1)

    def closeness(outputs: Tensor, targets: Tensor) -> Tensor:
        return -(outputs - targets).abs().mean(1)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
    recipe = Recipe.fast(max_drop=0.05, confidence=0, finetune=TrainSettings(epochs=5, lr=0.05, batch=32))
    outcome = Pruner(model, data, recipe=recipe, loss=squared, metric=closeness).finish()
    assert outcome.search.before - outcome.steps[0].accuracy_cut <= 0.05 + 1e-9
    assert outcome.graph.module(x).shape == (300, 1)
    before, after = ((-(net(x[250:]) - y[250:]).abs().mean()).item() for net in (model, outcome.graph.module))
    assert f"closeness {before:.4g} → {after:.4g} on 50 held-out test" in outcome.summary()  # not as a percentage


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.left, self.right = nn.Linear(5, 12), nn.Linear(12, 3), nn.Linear(12, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.relu(self.body(x))
        return self.left(y), self.right(y)


def test_several_outputs_with_an_own_loss_and_metric() -> None:
    generator = seeded(0)
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
    outcome = Pruner(TwoHeads(), data, recipe=Recipe.fast(max_drop=0.2, confidence=0), loss=both, metric=right).finish()
    assert outcome.search.before - outcome.search.after <= 0.2 + 1e-9
    assert [tuple(o.shape) for o in outcome.graph.module(x)] == [(120, 3), (120, 2)]


# ---- what a run says must be true ----------------------------------------------------------------------------------------


def test_a_lambda_for_the_loss_and_one_for_the_metric_are_not_mixed_up() -> None:
    """Both are called <lambda> in one scope, and both are measured under the same masks on the same images."""

    def entropy(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, targets, reduction="none")

    def right(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.argmax(1) == targets

    recipe = replace(QUICK, criterion="portfolio", portfolio=("l1", "fpgm"), max_drop=0.05)
    named = Pruner(perceptron(), DATA, recipe=recipe, loss=entropy, metric=right).finish()
    lambdas = Pruner(
        perceptron(),
        DATA,
        recipe=recipe,
        loss=lambda o, t: nn.functional.cross_entropy(o, t, reduction="none"),
        metric=lambda o, t: o.argmax(1) == t,
    ).finish()
    assert [(s.removed, s.evaluated) for s in lambdas.steps] == [(s.removed, s.evaluated) for s in named.steps]


def test_a_shared_cache_separates_repairs_networks_and_settings(tmp_path: Path) -> None:
    class Top:
        def __init__(self, k: int) -> None:
            self.k = k

        def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return (outputs.topk(self.k, 1).indices == targets[:, None]).any(1)

    def evaluated(recipe: Recipe, metric: Any, store: Path | None, activation: nn.Module) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), activation, nn.Linear(12, 10))
        return [s.evaluated for s in Pruner(model, DATA, recipe=recipe, metric=metric, store=store).finish().steps]

    plain = Recipe.fast(max_drop=0.05, confidence=0, criterion="l1", repair="least-squares", repair_examples=8)
    for recipe, k, activation in [
        (plain, 5, nn.ReLU()),
        (plain, 1, nn.ReLU()),
        (replace(plain, repair_examples=256), 1, nn.ReLU()),
        (replace(plain, repair_examples=256), 1, nn.Tanh()),
    ]:
        shared = evaluated(recipe, Top(k), tmp_path / "shared.sqlite", activation)
        assert shared == evaluated(recipe, Top(k), None, activation)


def test_allocated_cuts_stay_within_the_drop_when_trained() -> None:
    training = TrainSettings(epochs=1, steps=6, lr=0.1, batch=32)
    for seed in (0, 4):
        recipe = Recipe.fast(max_drop=0.03, confidence=0, criterion="l1", allocation="global", finetune=training, seed=seed)
        outcome = Pruner(perceptron(), DATA, recipe=recipe).finish()
        assert outcome.search.before - outcome.search.after <= 0.03 + 1e-9


def test_a_stopped_allocation_tries_nothing_twice(tmp_path: Path) -> None:
    recipe = Recipe.fast(max_drop=0.2, confidence=0.8, criterion="l1", allocation="global", engine="none")
    network = perceptron((24, 20))
    train_(network, DATA.train, TrainSettings(epochs=12, batch=32, lr=0.1))  # of one that knows nothing all may go at once
    whole = Pruner(network, DATA, recipe=recipe, folder=tmp_path / "whole").finish()

    def stop_at_third(progress: Progress) -> None:
        if progress.phase == "divide" and progress.done == 3:
            raise KeyboardInterrupt

    run = Pruner(network, DATA, recipe=recipe, folder=tmp_path / "run", callback=stop_at_third)
    with pytest.raises(KeyboardInterrupt):
        run.finish()
    run.close()
    trials = [entry for entry in entries_of(tmp_path / "run") if entry["unit"] == "trial"]
    assert len(trials) == 3
    resume(tmp_path / "run", perceptron((24, 20)), DATA).finish()
    assert without_times(tmp_path / "run") == without_times(tmp_path / "whole")
    assert differing_file(tmp_path / "whole", tmp_path / "run") is None
    assert len([entry for entry in entries_of(tmp_path / "run") if entry["unit"] == "trial"]) > 3
    assert whole.cost_after.macs < whole.cost_before.macs


def test_allocated_cuts_reach_both_targets() -> None:
    recipe = Recipe.fast(
        max_drop=1.0, confidence=0, allocation="global", criterion="l1", target_macs=0.3, target_parameters=0.7
    )
    outcome = Pruner(perceptron(), DATA, recipe=recipe).finish()
    assert 1 - outcome.cost_after.macs / outcome.cost_before.macs >= 0.3
    assert 1 - outcome.cost_after.parameters / outcome.cost_before.parameters >= 0.7
    assert "are removed, of" in outcome.stopped


def test_a_step_counts_all_its_accuracies_on_the_same_images() -> None:
    for step in Pruner(perceptron(), DATA, recipe=Recipe.fast(max_drop=0.3, criterion="l1", confidence=0.9)):
        assert step.accuracy == step.accuracy_cut  # nothing was trained


def test_kept_rankings_are_those_of_their_steps(tmp_path: Path) -> None:
    recipe = Recipe.fast(max_drop=0.3, confidence=0, allocation="global", criterion="l1")
    run = Pruner(perceptron(), DATA, recipe=recipe, folder=tmp_path)
    steps = list(run)
    linear = {f"layers.{n}": m for n, m in enumerate(perceptron().get_submodule("layers")) if isinstance(m, nn.Linear)}
    for step in steps:
        found = run.journal.load_tensors(f"ensembles/{step.number:04d}")
        assert found is not None
        assert found[1]["site"] == step.site
        torch.testing.assert_close(found[0]["coef"], linear[step.site].weight.detach().abs().sum(1).double())


def test_only_fast_widths_are_kept_where_time_counts(tmp_path: Path) -> None:
    recipe = Recipe.fast(max_drop=1.0, confidence=0, criterion="l1", allocation="global")
    steps = list(Pruner(perceptron(), DATA, recipe=recipe, folder=tmp_path))
    allowed = {entry["site"]: entry["widths"] for entry in entries_of(tmp_path) if entry["unit"] == "widths"}
    assert steps
    assert {step.site for step in steps} <= set(allowed)
    assert all(step.kept in (*allowed[step.site], step.channels) for step in steps)


# ---- data that the network cannot take ---------------------------------------------------------------------------------


def changed_set(name: str, **parts: Tensor) -> Data:
    data = few_digits(384)
    return replace(data, **{name: replace(data.splits()[name], **parts)})


@pytest.mark.parametrize("label", [-1, 1_000])
def test_a_label_without_an_output_is_refused_before_anything_is_written(tmp_path: Path, label: int) -> None:
    targets = few_digits(384).search.targets
    assert isinstance(targets, Tensor)
    wrong = targets.clone()
    wrong[3] = label
    message = rf"the validation set: example 3 has the label {label}, and the network has \d+ outputs: wanted labels from 0 to"
    with pytest.raises(DataError, match=message):
        Pruner(perceptron(), changed_set("search", targets=wrong), recipe=RECIPE, folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["train", "search", "test"])
def test_nan_in_the_data_is_refused_before_anything_is_written(tmp_path: Path, name: str) -> None:
    inputs = few_digits(384).splits()[name].ready().inputs.clone()
    inputs[5].view(-1)[0], inputs[7].view(-1)[0] = math.nan, math.inf
    said = "validation" if name == "search" else name
    with pytest.raises(DataError, match=rf"the {said} set of .*: input 5 holds NaN or infinite values \(2 of {len(inputs)}"):
        Pruner(perceptron(), changed_set(name, inputs=inputs, scaling=None), recipe=RECIPE, folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_regression_targets_with_the_default_loss_and_metric_are_refused(tmp_path: Path) -> None:
    targets = torch.rand(len(few_digits(384).train), 1)
    with pytest.raises(InvalidInput, match=r"the train set: its targets are torch.float32 .*give loss=… of your own"):
        Pruner(perceptron(), changed_set("train", targets=targets), recipe=RECIPE, folder=tmp_path / "run")
    with pytest.raises(InvalidInput, match=r"accuracy wants class numbers .*give metric=… of your own"):
        Pruner(
            perceptron(),
            changed_set("train", targets=targets),
            recipe=RECIPE,
            folder=tmp_path / "run",
            loss=nn.functional.mse_loss,
        )
    assert not (tmp_path / "run").exists()


# ---- on the real data ----------------------------------------------------------------------------------------------------


@pytest.mark.realdata
def test_the_last_block_of_resnet20_stays_within_its_budget(tmp_path: Path) -> None:
    data = load_data("cifar10", split="public")
    recipe = read_recipe(Path(__file__).parents[2] / "recipes" / "2core.toml")
    assert recipe.retrain is not None
    recipe = replace(recipe, sites=("layer3.2.*",), retrain=replace(recipe.retrain, epochs=1))
    outcome = Pruner(load_public(20), data, recipe=recipe, folder=tmp_path / "run").finish()
    assert outcome.search.before == pytest.approx(0.9182, abs=2e-4)  # 91.73 % over both halves
    assert outcome.search.before - outcome.search.after <= recipe.max_drop + 1e-9
    assert outcome.cost_after.parameters < outcome.cost_before.parameters
    again = load(build("resnet20"), tmp_path / "run" / "pruned.safetensors")
    assert accuracy(again.module, data.test) == outcome.test.after


@pytest.mark.parametrize("asked", [{"retrain": TrainSettings(epochs=1, batch=32, lr=0.01)}, {"recalibrate": 64}])
def test_a_network_of_another_type_than_the_images_is_trained_in_its_own(asked: dict[str, Any]) -> None:
    recipe = Recipe.best(max_drop=0.3, confidence=0, round_to=1, portfolio=("l1",), **asked)
    torch.manual_seed(0)
    result = Pruner(ResidualNet(12).double(), DATA, recipe=recipe).finish()
    assert DATA.train.batch(slice(0, 1)).args[0].dtype == torch.float32
    assert {weight.dtype for weight in result.graph.module.parameters()} == {torch.float64}


def test_training_images_that_are_right_already_are_not_copied() -> None:
    stored = DATA.train
    assert stored.scaling is not None  # bytes: a quarter of the memory
    assert Pruner(perceptron(), DATA, recipe=QUICK).context.train is stored
    ready = replace(DATA, train=stored.ready())
    assert Pruner(perceptron(), ready, recipe=QUICK).context.train is ready.train


class Unread(nn.Module):
    """An auxiliary head whose output goes nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.aux = nn.Linear(64, 12), nn.Linear(12, 10), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.body(x.flatten(1)))
        self.aux(hidden)
        out: Tensor = self.head(hidden)
        return out


def test_layers_that_nothing_reads_are_left_alone() -> None:
    data = few_digits(60)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Unread()
    result = prune(model, data.train, data.search, recipe=Recipe.best(target_macs=0.3, confidence=0, max_drop=1.0))
    assert {step.site for step in result.steps} == {"body"}
