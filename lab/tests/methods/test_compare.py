"""Comparisons: rows are made once and hold what the smaller networks do, tables and figures come of the rows alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from comparisons import call, made_up_row, places, written
from secateurs import load
from secateurs.cli.inputs import Origin
from secateurs.config import TrainSettings
from secateurs.data import load as load_data
from secateurs.data.dataset import Examples
from secateurs.errors import InvalidInput, RecipeError, RunError, SecateursError
from secateurs.models import build
from secateurs.training import train_
from secateurs_lab.compare import command
from secateurs_lab.compare import run as comparing
from secateurs_lab.compare.command import compare, shares, split
from secateurs_lab.compare.figures import comparison_of_methods, render
from secateurs_lab.compare.page import closer_look, curves
from secateurs_lab.compare.paired import right_answers
from secateurs_lab.compare.rows import (
    Count,
    Row,
    budget_words,
    check_comparable,
    comparison_rows,
    named_budget,
    read_rows,
)
from secateurs_lab.compare.run import ROWS, Comparison, entries
from secateurs_lab.compare.tables import (
    MISSED,
    best_words,
    mean_spread,
    minutes_sheet,
    own_rate_sheet,
    summaries,
    tables_text,
)
from secateurs_lab.methods import NO_TRAINING, Budget, Pruned, Task, Trained, method

HIDDEN = (8, 6)
NET = ["--model", "mlp", "--model-option", "hidden=[8, 6]", "--data", "digits", "--examples", "150"]
ASKED = ["--methods", "l1:uniform", "fpgm:uniform", "--only", "--targets", "0.5", "--seeds", "0", "1"]
SHORT = "[between]\nsteps = 3\nbatch = 50\nlr = 0.05\n[after]\nepochs = 1\nbatch = 50\nlr = 0.1\n"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network of two hidden layers that has learned some digits."""
    torch.manual_seed(0)
    model = build("mlp", hidden=HIDDEN)
    train_(model, load_data("digits").train, TrainSettings(epochs=4, lr=0.2, batch=64))
    path = tmp_path_factory.mktemp("base") / "net.pt"
    torch.save(model.state_dict(), path)
    return path


@pytest.fixture(scope="module")
def finished(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a comparison: two methods, two seeds, without training and with a short one; nothing is drawn."""
    folder = tmp_path_factory.mktemp("compared")
    (folder / "brief.toml").write_text(SHORT)
    budgets = ["--budgets", f"none,{folder / 'brief.toml'}"]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(command, "rendered", lambda out: [])
        call(compare, *NET, *ASKED, *budgets, "--weights", str(weights), *places(folder))
    return folder


def rows_of(folder: Path) -> list[Row]:
    return comparison_rows(folder / "out" / ROWS)


# ---- what a row says -------------------------------------------------------------------------------------------------


def test_every_combination_has_one_row(finished: Path) -> None:
    rows = rows_of(finished)
    wanted = {(m, b, 0.5, s) for m in ("l1:uniform", "fpgm:uniform") for b in ("none", "brief") for s in (0, 1)}
    assert len(rows) == 8
    assert {row.key for row in rows} == wanted


def test_macs_and_parameters_are_those_of_the_filters_left(finished: Path) -> None:
    for row in rows_of(finished):
        first, second, last = (after for _, after in row.filters.values())
        assert [before for before, _ in row.filters.values()] == [*HIDDEN, 10]
        assert last == 10
        # 8 × 8 pixels; every layer has a bias, and no norm
        assert row.macs == Count(64 * 8 + 8 * 6 + 6 * 10, 64 * first + first * second + second * 10)
        assert row.parameters.after == row.macs.after + first + second + 10
        assert row.counted_weights.after == row.macs.after
        assert 1 - row.macs.after / row.macs.before == row.macs.removed >= row.target


def test_a_network_reloads_and_gives_the_reported_number_right(finished: Path) -> None:
    data = comparing.fewer(load_data("digits"), 150)
    x, y = data.test.batch(slice(0, 150))
    for row in rows_of(finished):
        budget, method = row.budget_name, row.method.replace(":", "-")
        file = finished / "runs" / budget / f"{method}-{row.target:g}-seed{row.seed}" / "pruned.safetensors"
        with torch.no_grad():
            answers = load(build("mlp", hidden=HIDDEN), file).module.eval()(x).argmax(1) == y
        right = int(answers.sum())
        assert row.test.right_after == right
        assert row.test.after == right / 150
        assert torch.equal(torch.from_numpy(right_answers(row)), answers)
        assert row.test.count == 150


def test_all_were_trained_alike_and_as_long_as_the_budget_says(finished: Path) -> None:
    rows = rows_of(finished)
    # 3 steps of 50 at a constant 0.05, and one epoch of 150 images in 3 steps that fall by a cosine: 0.1 × (1, 3/4, 1/4)
    wanted = {"none": (0, 0.0), "brief": (150 + 150, 50 * (3 * 0.05 + 0.1 * (1 + 0.75 + 0.25)))}
    for row in rows:
        images, rates = wanted[row.budget_name]
        assert row.images_trained == images
        assert row.rate_sum == pytest.approx(rates)
    lines = (finished / "out" / ROWS).read_text().splitlines()
    brief = next(budget for budget in (json.loads(line)["budget"] for line in lines) if budget["name"] == "brief")
    assert brief["between"]["lr"] == 0.05
    assert brief["after"]["schedule"] == "cosine"


def test_rows_hold_no_local_paths(finished: Path, weights: Path) -> None:
    text = (finished / "out" / ROWS).read_text()
    assert str(finished) not in text
    assert str(weights.parent) not in text
    assert str(Path.home()) not in text
    row = rows_of(finished)[0]
    assert (row.model, row.model_options, row.weights) == ("mlp", {"hidden": [8, 6]}, "net.pt")
    assert row.data == "digits (at most 150 examples of each set)"
    assert row.images == {"train": 150, "search": 150, "test": 150}
    assert row.versions["torch"] == torch.__version__


# ---- resuming -------------------------------------------------------------------------------------------------------


def test_finished_rows_are_not_made_again(finished: Path, weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> Callable[..., Pruned]:
        def method(task: Task, *, watch: Any = None) -> Pruned:
            raise AssertionError(f"{name} was run again")

        return method

    monkeypatch.setattr("secateurs_lab.methods.method", refuse)
    monkeypatch.setattr(command, "rendered", lambda out: [])
    before = (finished / "out" / ROWS).read_bytes()
    call(compare, *NET, *ASKED, "--budgets", "none", "--weights", str(weights), *places(finished))
    assert (finished / "out" / ROWS).read_bytes() == before


def test_a_half_written_row_is_made_again_and_comes_out_the_same(
    finished: Path, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = (finished / "out" / ROWS).read_text().splitlines()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ROWS).write_text("\n".join([*lines[:3], lines[3][:100]]))  # the last without training was cut short
    monkeypatch.setattr(command, "rendered", lambda out: [])
    call(compare, *NET, *ASKED, "--weights", str(weights), *places(tmp_path))
    took = ("search_seconds", "training_seconds")
    again, once = (json.loads(text) for text in ((tmp_path / "out" / ROWS).read_text().splitlines()[3], lines[3]))
    assert {k: v for k, v in again.items() if k not in took} == {k: v for k, v in once.items() if k not in took}


@pytest.mark.parametrize(
    ("change", "what"), [(["--data-option", "seed=3"], "data or split"), (["--shortcut", "after"], "shortcut")]
)
def test_another_base_with_the_same_out_is_refused(finished: Path, weights: Path, change: list[str], what: str) -> None:
    with pytest.raises(RunError, match=rf"rows\.jsonl: was made with different {what} .*another --out"):
        call(compare, *NET, *ASKED, *change, "--weights", str(weights), *places(finished))


def test_other_weights_are_refused_before_there_is_a_row(weights: Path, tmp_path: Path) -> None:
    data = comparing.fewer(load_data("digits"), 20)
    for seed in (0, 1):
        torch.manual_seed(seed)
        started = Comparison(build("mlp", hidden=HIDDEN), data, tmp_path / "out", tmp_path / "runs")
        if seed == 0:
            started.check([NO_TRAINING])
        else:
            with pytest.raises(RunError, match="different weights"):
                started.check([NO_TRAINING])


class TwoLayers(nn.Module):
    """A network whose options leave its weights as they are."""

    def __init__(self, act: type[nn.Module] = nn.ReLU, scale: float = 1.0, dropout: float = 0.1) -> None:
        super().__init__()
        self.first, self.act, self.dropout, self.last = nn.Linear(64, 8), act(), nn.Dropout(dropout), nn.Linear(8, 10)
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.dropout(self.act(self.first(x.flatten(1)) * self.scale)))


def begun(folder: Path, **options: Any) -> Comparison:
    torch.manual_seed(0)
    names = {"model": "mine:build"}
    return Comparison(TwoLayers(**options), comparing.fewer(load_data("digits"), 20), folder / "out", folder / "runs", names)


@pytest.mark.parametrize("options", [{"act": nn.Tanh}, {"scale": 2.0}, {"dropout": 0.2}])
def test_another_network_of_the_same_weights_is_refused(options: dict[str, Any], tmp_path: Path) -> None:
    begun(tmp_path).check([NO_TRAINING])
    with pytest.raises(RunError, match=r"\(--runs\): was made with different code or options of the model"):
        begun(tmp_path, **options).check([NO_TRAINING])
    begun(tmp_path).check([NO_TRAINING])
    (entry,) = entries(["l1:uniform"], [NO_TRAINING], [0.3], [0])
    begun(tmp_path).make(entry, method("l1:uniform"))
    other = replace(begun(tmp_path, **options), runs=tmp_path / "others")
    with pytest.raises(RunError, match=r"rows\.jsonl: was made with different code or options of the model"):
        other.check([NO_TRAINING])


def test_rows_and_folders_without_a_structure_go_on(tmp_path: Path) -> None:
    made = begun(tmp_path)
    made.check([NO_TRAINING])
    first, second = entries(["l1:uniform", "l2:uniform"], [NO_TRAINING], [0.3], [0])
    made.make(first, method("l1:uniform"))
    conditions, rows = tmp_path / "runs" / comparing.CONDITIONS, tmp_path / "out" / ROWS
    known, row = json.loads(conditions.read_text()), json.loads(rows.read_text())
    structure = known["base"].pop("structure_sha256")
    assert row.pop("structure_sha256") == structure != ""
    conditions.write_text(json.dumps(known))
    rows.write_text(json.dumps(row) + "\n")
    again = begun(tmp_path)
    again.check([NO_TRAINING])
    assert list(again.done()) == [first.key]
    again.make(second, method("l2:uniform"))
    assert [row.structure_sha256 for row in rows_of(tmp_path)] == ["", structure]
    tables_text(rows_of(tmp_path))
    assert json.loads(conditions.read_text())["base"]["structure_sha256"] == structure
    with pytest.raises(RunError, match="different code or options of the model"):
        begun(tmp_path, act=nn.Tanh).check([NO_TRAINING])


def test_rows_of_two_structures_are_not_compared() -> None:
    rows = [made_up_row("l1", 0.3, 0.8, structure_sha256=code) for code in ("", "d" * 64, "e" * 64)]
    tables_text([replace(row, method=str(place)) for place, row in enumerate(rows[:2])])
    with pytest.raises(RunError, match="different code or options of the model"):
        tables_text([replace(row, method=str(place)) for place, row in enumerate(rows)])


def test_the_structure_of_a_network_is_the_same_in_another_process(tmp_path: Path) -> None:
    source = "from test_compare import begun; from pathlib import Path; print(begun(Path('x')).base.structure_sha256)"
    path = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
    elsewhere = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path}; {source}"], capture_output=True, text=True, check=True
    )
    assert elsewhere.stdout.strip() == begun(tmp_path).base.structure_sha256


def test_ctrl_c_keeps_the_rows_and_says_how_to_resume(weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def method(name: str) -> Callable[..., Pruned]:
        def run(task: Task, *, watch: Any = None) -> Pruned:
            if made:
                raise KeyboardInterrupt
            made.append(name)
            return Pruned(task.graph, Trained(0, 0.0), 0, 0.0, 0.0)

        return run

    monkeypatch.setattr("secateurs_lab.methods.method", method)
    with pytest.raises(KeyboardInterrupt, match="same command again"):
        call(compare, *NET, "--methods", "l2", "--weights", str(weights), *places(tmp_path))
    assert [row.method for row in rows_of(tmp_path)] == ["l2"]


def test_one_failing_method_does_not_stop_the_others(weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def method(name: str) -> Callable[..., Pruned]:
        def run(task: Task, *, watch: Any = None) -> Pruned:
            if name == "l2":
                raise InvalidInput("no filter has a norm")
            return Pruned(task.graph, Trained(0, 0.0), 0, 0.0, 0.0)

        return run

    monkeypatch.setattr("secateurs_lab.methods.method", method)
    monkeypatch.setattr(command, "rendered", lambda out: [])
    with pytest.raises(RunError, match=r"1 row could not be made: l2, 40 % .*no filter has a norm"):
        call(compare, *NET, "--methods", "l2", "--targets", "0.4", "--weights", str(weights), *places(tmp_path))
    assert [row.method for row in rows_of(tmp_path)] == ["random", "l1"]  # which are always beside
    assert MISSED in tables_text(rows_of(tmp_path))  # nothing was removed: that does not go unsaid


def test_the_test_set_is_read_once_a_row(weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = comparing.fewer(load_data("digits"), 20)
    seen: list[str] = []
    names = {id(examples): name for name, examples in data.splits().items()}
    measure = comparing.evaluate

    def counting(module: Any, examples: Examples, **options: Any) -> Any:
        seen.append(names[id(examples)])
        return measure(module, examples, **options)

    def method(task: Task, *, watch: Any = None) -> Pruned:
        assert seen.count("test") == (0 if not seen else 1 + len(seen[2:]) // 2)
        return Pruned(task.graph, Trained(0, 0.0), 0, 0.0, 0.0)

    monkeypatch.setattr(comparing, "evaluate", counting)
    made = Comparison(build("mlp", hidden=HIDDEN), data, tmp_path / "out", tmp_path / "runs")
    for entry in entries(["one", "other"], [NO_TRAINING], [0.3], [0]):
        made.make(entry, method)
    assert seen.count("test") == 1 + 2  # the untouched network, and one for each row


def test_two_processes_do_not_make_the_same_row(tmp_path: Path) -> None:
    data = comparing.fewer(load_data("digits"), 20)
    made = Comparison(build("mlp", hidden=HIDDEN), data, tmp_path / "out", tmp_path / "runs")
    (entry,) = entries(["one"], [NO_TRAINING], [0.3], [0])
    inner: list[Row | None] = []

    def method(task: Task, *, watch: Any = None) -> Pruned:
        inner.append(made.make(entry, method))  # a lock is of an open file, so the same process may stand for another
        return Pruned(task.graph, Trained(0, 0.0), 0, 0.0, 0.0)

    assert made.make(entry, method) is not None
    assert inner == [None]
    assert len(rows_of(tmp_path)) == 1


# ---- what is asked ---------------------------------------------------------------------------------------------------


def test_words_may_be_joined_by_commas() -> None:
    assert split(["none,short", "full", "none"]) == ("none", "short", "full")
    assert shares(["0.1", "0.2,0.3"]) == (0.1, 0.2, 0.3)
    with pytest.raises(InvalidInput, match="--targets: could not convert string to float: 'half'"):
        shares(["half"])


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["--methods", "l3"], r"no method 'l3'\. Did you mean 'l"),
        (["--methods", "l1", "--budgets", "shrt"], r"no budget 'shrt'\. Did you mean 'short'"),
        (["--methods", "l1", "--targets", "30"], "target 30: wanted a share"),
        (["--methods", "l1", "--seeds", "-1"], "seed -1: wanted 0 or more"),
    ],
)
def test_wrong_words_are_errors_before_anything_runs(tokens: list[str], message: str, weights: Path, tmp_path: Path) -> None:
    with pytest.raises(SecateursError, match=message):
        call(compare, *NET, *tokens, "--weights", str(weights), *places(tmp_path))
    assert not (tmp_path / "out").exists()


def test_without_a_network_the_command_says_what_it_wants(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="wanted --model, --data and --out"):
        call(compare, "--methods", "l1")
    with pytest.raises(RunError, match="no rows yet"):
        call(compare, "--render", str(tmp_path))


def test_names_in_rows_have_no_folders() -> None:
    origin = Origin("resnet20", "folder:/home/user/pictures", weights="/home/user/net.pt")
    assert command._weights_name(origin) == "net.pt"
    assert command._data_name(origin, None) == "folder:pictures"
    assert command._data_name(replace(origin, data="cifar10", data_options={"split": "public"}), 9) == (
        "cifar10 (split public, at most 9 examples of each set)"
    )


# ---- budgets ---------------------------------------------------------------------------------------------------------


def images(count: int, *shape: int) -> Examples:
    return Examples(torch.zeros(1, *shape).expand(count, *shape), torch.zeros(1, dtype=torch.long).expand(count))


def test_budgets_are_scaled_to_the_data_and_the_network() -> None:
    cifar = images(45_000, 3, 32, 32)  # 352 steps of 128 an epoch
    assert named_budget("none", cifar, sites=19) == NO_TRAINING
    short, fast, paper = (named_budget(name, cifar, sites=19) for name in ("short", "2core", "paper"))
    assert short.between is None
    assert short.after is not None
    assert (short.after.epochs, short.after.augment, short.after.pad) == (1, "crop-flip", 4)
    assert fast.between is not None
    assert fast.after is not None
    assert fast.between.steps == 598  # about 600
    assert (fast.between.lr, fast.after.epochs, fast.after.lr, fast.after.schedule) == (0.01, 2, 0.02, "cosine")
    assert paper.between is not None
    assert paper.after is not None
    assert paper.between.steps == 10 * 352 * 19  # the paper: 10 epochs after each of 19 layers
    assert (paper.after.epochs, paper.after.lr, paper.after.milestones) == (80, 0.01, (20, 40, 60))
    assert named_budget("full", cifar, sites=19) == paper
    digits = named_budget("2core", images(1_197, 1, 8, 8), sites=7)
    assert digits.between is not None
    assert digits.between.steps == 17  # 1.7 epochs of 10 steps
    assert digits.between.augment == "none"  # a mirrored 3 is no 3


def test_a_budget_at_another_rate_has_a_name_of_its_own() -> None:
    cifar = images(45_000, 3, 32, 32)
    gentle, faster = (named_budget(name, cifar, sites=19) for name in ("gentle@2e-3", "gentle@1e-2"))
    assert faster.name == "gentle@0.01"
    assert gentle.after is not None
    assert faster.after == replace(gentle.after, lr=0.01)
    assert gentle.keep_best
    assert faster.keep_best
    assert (gentle.after.distill, gentle.after.augment) == (1.0, "crop-flip")
    fast = named_budget("2core@0.05", cifar, sites=19)
    assert fast.between is not None
    assert fast.after is not None
    assert (fast.between.lr, fast.after.lr) == (0.05, 0.05)
    for wrong, message in (
        ("none@0.1", "nothing is trained"),
        ("gentle@fast", "wanted a learning rate"),
        ("short@-1", "wanted"),
        ("gentle@", "wanted a learning rate"),
    ):
        with pytest.raises(InvalidInput, match=message):
            named_budget(wrong, cifar, sites=19)


def test_the_untouched_network_has_one_row_a_budget_that_trains() -> None:
    short = Budget("short", after=TrainSettings(epochs=1))
    wanted = entries(("l1", "untouched"), (NO_TRAINING, short), (0.3, 0.5), (0,))
    assert [entry.key for entry in wanted if entry.method == "untouched"] == [("untouched", "short", 0.0, 0)]
    assert len(wanted) == 5


def test_the_own_best_rate_is_chosen_by_the_validation_set() -> None:
    def row(method: str, rate: float, validation: float, test: float, target: float = 0.3) -> Row:
        budget = Budget(f"short@{rate:g}", after=TrainSettings(epochs=1, lr=rate))
        made = made_up_row(method, target, test, budget=budget)
        return replace(made, search=replace(made.search, after=validation))

    rows = [row("l1", 0.01, 0.88, 0.80), row("l1", 0.1, 0.87, 0.89)]  # the test set would choose otherwise
    rows += [row("obs+refit", 0.01, 0.85, 0.84), row("obs+refit", 0.1, 0.86, 0.83)]
    rows += [row("untouched", 0.01, 0.91, 0.905, 0.0), row("untouched", 0.1, 0.90, 0.9, 0.0)]
    sheet = own_rate_sheet(rows, "short")
    assert sheet is not None
    assert dict(sheet.lines) == {
        "l1": "80.00 @ 0.01 of 2",
        "obs+refit": "83.00 @ 0.1 of 2",
        "untouched": "90.50 @ 0.01 of 2",
    }
    assert sheet.columns == ("method", "30 % gone")
    assert own_rate_sheet(rows[:1], "short") is None
    plain = Budget("short", after=TrainSettings(epochs=1, lr=0.01))
    again = own_rate_sheet([*rows, replace(rows[0], budget=plain)], "short")
    assert again is not None
    assert dict(again.lines)["l1"] == "80.00 @ 0.01 of 2", "one rate by two names is one rate"


def test_at_equal_minutes_a_method_is_shown_by_the_best_budget_that_fits() -> None:
    def row(method: str, name: str, seconds: tuple[float, float], after: float) -> Row:
        budget = NO_TRAINING if name == "none" else Budget(name, after=TrainSettings(epochs=1))
        return made_up_row(method, 0.3, after, budget=budget, search_seconds=seconds[0], training_seconds=seconds[1])

    rows = [row("l1", "none", (1, 0), 0.5), row("l1", "short", (1, 299), 0.88), row("l1", "long", (1, 900), 0.87)]
    rows += [row("obs+refit", "none", (500, 0), 0.86), row("obs+refit", "short", (500, 300), 0.9)]
    sheet = minutes_sheet(rows)
    assert sheet is not None
    assert sheet.columns == ("MACs ↓", "method", "5 min", "10 min", "15 min", "30 min", "60 min", "120 min")
    l1, ours = sheet.lines
    assert l1[2:6] == ("88.00 (short)",) * 4  # the longer training fits, and is worse
    assert ours[2:5] == ("–", "86.00 (none)", "90.00 (short)")


def test_at_equal_minutes_a_budget_fits_with_all_its_seeds_and_its_whole_search() -> None:
    def row(target: float, seed: int, seconds: float, after: float, name: str = "none") -> Row:
        budget = NO_TRAINING if name == "none" else Budget(name, after=TrainSettings(epochs=1))
        return made_up_row("l1", target, after, seed=seed, budget=budget, search_seconds=seconds, training_seconds=0.0)

    rows = [row(0.3, 0, 294, 0.9, "short"), row(0.3, 1, 306, 0.6, "short"), row(0.3, 0, 1, 0.7), row(0.3, 1, 1, 0.7)]
    rows += [row(0.05, 0, 2, 0.8), row(0.05, 1, 2, 0.8)]  # found with what the search at 30 % had measured
    sheet = minutes_sheet(rows)
    assert sheet is not None
    assert [line[0] for line in sheet.lines] == ["5 %", "30 %"]
    assert sheet.columns[2] == "10 min", "nothing fits into five"
    assert [line[2] for line in sheet.lines] == ["80.00 ± 0.00 (none)", "75.00 ± 21.21 (short)"]


def test_at_equal_minutes_budgets_are_compared_by_the_seeds_that_all_have_run() -> None:
    def row(name: str, seed: int, after: float) -> Row:
        return made_up_row(
            "l1", 0.3, after, seed=seed, budget=Budget(name, after=TrainSettings(epochs=1)), training_seconds=1.0
        )

    rows = [row("short", seed, after) for seed, after in enumerate((0.90, 0.80, 0.70))]
    lucky = minutes_sheet([*rows, row("other", 0, 0.85)])  # above the mean of the three, below the seed that both have
    assert lucky is not None
    assert lucky.lines[0][2] == "80.00 ± 10.00 (short)"
    better = minutes_sheet([*rows, row("other", 0, 0.91)])
    assert better is not None
    assert better.lines[0][2] == "91.00 (other)"


def test_budgets_that_differ_in_more_than_the_rate_are_not_rates_of_one(tmp_path: Path) -> None:
    for folder, epochs in (("a", 1), ("b", 6)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.toml").write_text(f"[after]\nepochs = {epochs}\n")
    one, other = f"{tmp_path}/a/mine.toml@0.01", f"{tmp_path}/b/mine.toml@0.02"
    comparison = Comparison(build("mlp", hidden=HIDDEN), load_data("digits"), tmp_path / "out", tmp_path / "runs")
    message = "budgets 'mine@0.01' and 'mine@0.02' differ in more than the learning rate"
    with pytest.raises(RunError, match=message):
        comparison.budgets([one, other])
    comparison.check(comparison.budgets([one]))
    with pytest.raises(RunError, match=message):  # the file was edited before the second rate was tried
        comparison.check(comparison.budgets([other]))
    rows = [made_up_row("l1", 0.3, 0.9, budget=comparison.budgets([name])[0]) for name in (one, other)]
    with pytest.raises(RunError, match=message):
        check_comparable(rows)
    comparison.check(comparison.budgets([one, one.replace("0.01", "0.03")]))


def test_rows_of_a_release_without_a_distance_are_comparable_with_those_that_name_it() -> None:
    old, new = (Budget("mine", after=TrainSettings(epochs=1, distance=kind)) for kind in ("auto", "kl"))  # by default, by name
    check_comparable([made_up_row("l1", 0.3, 0.9, budget=old), made_up_row("fpgm", 0.3, 0.9, budget=new)])
    other = Budget("mine", after=TrainSettings(epochs=1, distance="dist"))
    with pytest.raises(RunError, match="budget 'mine' had other settings there"):
        check_comparable([made_up_row("l1", 0.3, 0.9, budget=old), made_up_row("fpgm", 0.3, 0.9, budget=other)])


def test_budgets_in_words_and_from_files(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(SHORT)
    mine = named_budget(str(path), images(100, 2), sites=1)
    assert mine.name == "mine"
    assert budget_words(mine) == (
        "3 steps of 50 between the cuts at learning rate 0.05, 1 epoch after the cuts from learning rate 0.1 (cosine)"
    )
    assert budget_words(NO_TRAINING) == "no training"
    aims = TrainSettings(epochs=2, lr=0.01, distill=1.0, features=25.0, average=0.99, optimiser="adamw", precision="bfloat16")
    assert budget_words(Budget("aims", between=replace(aims, steps=9, schedule="constant"), after=aims)) == (
        "9 steps of 128 between the cuts at learning rate 0.01, 2 epochs after the cuts from learning rate 0.01 (cosine), "
        "100% of the loss the distance to the original network, 25 times the error of feature maps added, AdamW, "
        "weights averaged with decay 0.99, computed in bfloat16"
    )
    for text, message in (("[during]\nlr = 1.0\n", "wanted the tables"), ("[after]\nrate = 1\n", "'rate'"), ("x", "not TOML")):
        path.write_text(text)
        with pytest.raises(RecipeError, match=message):
            named_budget(str(path), images(100, 2), sites=1)
    path.write_text("keep_best = 1\n[after]\nlr = 1.0\n")
    with pytest.raises(RecipeError, match=r"got keep_best = 1, wanted"):
        named_budget(str(path), images(100, 2), sites=1)
    with pytest.raises(RecipeError, match="cannot be read"):
        named_budget(str(tmp_path / "absent.toml"), images(100, 2), sites=1)


def test_files_of_budgets_may_lie_anywhere_and_have_names_of_their_own(tmp_path: Path) -> None:
    for folder, rate in (("me@home", 0.01), ("other", 0.02)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.toml").write_text(f"[after]\nlr = {rate}\n")
    first, second = (str(tmp_path / folder / "mine.toml") for folder in ("me@home", "other"))
    assert named_budget(first, images(100, 2), sites=1).name == "mine"
    assert named_budget(f"{first}@0.5", images(100, 2), sites=1).name == "mine@0.5"
    comparison = Comparison(build("mlp", hidden=HIDDEN), load_data("digits"), tmp_path / "out", tmp_path / "runs")
    assert len(comparison.budgets([first, first])) == 1
    with pytest.raises(InvalidInput, match="two of them are called 'mine'"):
        comparison.budgets([first, second])
    (tmp_path / "a@b.toml").write_text("[after]\nlr = 0.1\n")
    with pytest.raises(RecipeError, match="'@' in the name of a budget"):
        named_budget(str(tmp_path / "a@b.toml"), images(100, 2), sites=1)


def test_a_row_is_appended_where_another_process_has_just_removed_half_a_line(tmp_path: Path) -> None:
    """Two processes append to a file that ends in half a line: all their rows are there, and the half line is not."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"number": 0}\n{"num')
    code = (
        "import sys; from pathlib import Path; from secateurs_lab.compare.rows import append_row\n"
        "for number in range(25): append_row(Path(sys.argv[1]), {'number': int(sys.argv[2]) + number})"
    )
    started = [subprocess.Popen([sys.executable, "-c", code, str(path), str(1 + 25 * each)]) for each in range(2)]
    assert [process.wait() for process in started] == [0] * 2
    assert sorted(row["number"] for row in read_rows(path)) == list(range(51))


# ---- tables, figures and the page ------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=30)
@given(st.lists(st.floats(0, 1), min_size=2, max_size=6))
def test_spread_is_mean_and_sample_deviation(values: list[float]) -> None:
    middle, deviation = (float(part) for part in mean_spread(values, 6).split(" ± "))
    assert middle == pytest.approx(100 * np.mean(values), abs=1e-5)
    assert deviation == pytest.approx(100 * np.std(values, ddof=1), abs=1e-5)


def test_tables_hold_means_of_seeds_at_every_target() -> None:
    rows = [
        made_up_row("l1", 0.3, 0.80, 0),
        made_up_row("l1", 0.3, 0.82, 1),
        made_up_row("ensemble", 0.3, 0.85, 0),
        made_up_row("ensemble", 0.3, 0.85, 1),
    ]
    (first, second) = summaries(rows, "none")
    assert (first.method, first.test, first.seeds) == ("l1", pytest.approx(0.81), 2)
    assert first.test_spread == pytest.approx(0.02 / np.sqrt(2))
    text = tables_text(rows)
    assert "| l1 | 81.00 ± 1.41 |" in text
    assert "| ensemble | 85.00 ± 0.00 |" in text
    assert "8,200 of 10,000" in text
    assert best_words(rows, "none") == "30 %: ensemble 85.00 %, 4.00 points before l1"
    assert second.macs_removed == pytest.approx(0.3)
    assert best_words([made_up_row("l1", 0.3, 0.8), made_up_row("l2", 0.3, 0.8)], "none") == "30 %: l1 80.00 %, level with l2"


def test_unequal_training_is_an_error(tmp_path: Path) -> None:
    rows = [
        made_up_row("l1", 0.3, 0.8, images_trained=128, rate_sum=1.28),
        made_up_row("sfp", 0.3, 0.8, images_trained=256, rate_sum=1.28),
    ]
    with pytest.raises(RunError, match=r"budget 'none': sfp .* trained on 256 images .* l1 .* on 128"):
        tables_text(rows)
    with pytest.raises(RunError, match="the same training for all"):
        tables_text([rows[0], replace(rows[1], images_trained=128, rate_sum=1.3)])
    tables_text([rows[0], replace(rows[1], images_trained=128, rate_sum=1.28 * (1 + 1e-9))])  # rounding is no difference
    other = Budget("none", after=TrainSettings(lr=1.0))
    with pytest.raises(RunError, match="other settings"):
        tables_text([made_up_row("l1", 0.3, 0.8), made_up_row("l1", 0.5, 0.8, budget=other)])
    with pytest.raises(RunError, match="different weights"):
        tables_text([made_up_row("l1", 0.3, 0.8), made_up_row("l1", 0.5, 0.8, weights_sha256="d" * 64)])
    for line in (b"[" * 100_000, b"\xff\xfe", b"[1]", b'{"a": 1, "a": 2}'):
        (tmp_path / ROWS).write_bytes(line + b"\n")
        with pytest.raises(RunError, match=r"rows\.jsonl, line 1: damaged .*Remove the line"):
            comparison_rows(tmp_path / ROWS)
    (tmp_path / ROWS).write_text('{"method": "l1"}\n')
    with pytest.raises(RunError, match=r"rows\.jsonl, line 1: damaged \(.*missing required field"):
        comparison_rows(tmp_path / ROWS)


def test_a_comparison_is_drawn_from_its_rows_alone(tmp_path: Path) -> None:
    name = "<b>ours</b>&"
    rows = [
        made_up_row(m, t, a + s / 100, s)
        for s in (0, 1)
        for m, t, a in [("random", 0.5, 0.1), (name, 0.3, 0.89), (name, 0.5, 0.86)]
    ]
    files = render(written(tmp_path, rows))
    assert [file.name for file in files] == ["tables.md", "accuracy-none.png", "accuracy-none.svg", "comparison.html"]
    once = [file.read_bytes() for file in files]
    assert [file.read_bytes() for file in render(tmp_path)] == once  # the same files from the same rows
    assert once[1].startswith(b"\x89PNG\r\n\x1a\n")
    ElementTree.fromstring(once[2])
    page = once[3].decode()
    assert name not in page
    assert "&lt;b&gt;ours&lt;/b&gt;&amp;" in page
    assert "86.50 ± 0.71" in page
    assert "Not every method has every seed at every target" not in page
    for reference in ('src="', "url(", "<link rel=stylesheet", "@import"):
        assert reference not in page


def test_without_matplotlib_a_comparison_has_tables_and_a_page(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("secateurs_lab.compare.figures.find_spec", lambda name: None)
    files = render(written(tmp_path, [made_up_row("l1", 0.3, 0.8), made_up_row("random", 0.3, 0.2)]))
    assert [file.name for file in files] == ["tables.md", "comparison.html"]
    (logged,) = (record.getMessage() for record in caplog.records)
    assert logged.startswith(f"{tmp_path}: figures need matplotlib")
    assert "pip install './lab[figures]'" in logged


def test_the_package_and_its_commands_load_without_matplotlib() -> None:
    code = "import sys; sys.modules['matplotlib'] = None; import secateurs_lab.reproduce.cli, secateurs_lab.compare.figures"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_page_says_what_makes_a_comparison_weak() -> None:
    alone = comparison_of_methods([made_up_row("l1", 0.3, 0.8), made_up_row("random", 0.3, 0.2)])
    assert "One seed only: differences may be chance." in alone.warnings
    uneven = comparison_of_methods(
        [made_up_row("l1", 0.3, 0.8), made_up_row("l1", 0.3, 0.8, 1), made_up_row("random", 0.3, 0.2)]
    )
    assert any("Not every method has every seed" in sentence for sentence in uneven.warnings)
    missed = comparison_of_methods([made_up_row("l1", 0.3, 0.8, macs=Count(1000, 900)), made_up_row("random", 0.3, 0.2)])
    assert any("1\N{NO-BREAK SPACE}network kept more MACs than the target allows" in sentence for sentence in missed.warnings)


def test_a_bad_method_does_not_hide_the_good_ones() -> None:
    floor = closer_look(0.9, [[0.89, 0.86], [0.5, 0.1]])
    assert floor == pytest.approx(0.9 - 1.25 * 0.04)
    assert closer_look(0.9, [[0.5, 0.2], [0.5, 0.1]]) is None
    comparison = comparison_of_methods(
        [
            made_up_row("good", 0.3, 0.89),
            made_up_row("good", 0.5, 0.86),
            made_up_row("random", 0.3, 0.5),
            made_up_row("random", 0.5, 0.1),
        ]
    )
    closer = curves(comparison, comparison.budgets[0], floor)
    assert "good: 86.00" in closer.body
    assert "random: 10.00" not in closer.body  # below: its line leaves the figure, and no point is put at the edge


# ---- on the real data ------------------------------------------------------------------------------------------------


@pytest.mark.realdata
def test_compare_on_cifar10(tmp_path: Path) -> None:
    few = ["--targets", "0.3", "--budgets", "none,short", "--examples", "300"]
    asked = ["--model", "resnet20", "--weights", "public", "--data", "cifar10", "--methods", "l1:uniform", "sfp", "--only"]
    call(compare, *asked, *few, *places(tmp_path))
    rows = rows_of(tmp_path)
    assert [(row.method, row.budget_name) for row in rows] == [(m, b) for b in ("none", "short") for m in ("l1:uniform", "sfp")]
    x, y = comparing.fewer(load_data("cifar10", split="public"), 300).test.batch(slice(0, 300))
    for row in rows:
        file = tmp_path / "runs" / row.budget_name / f"{row.method.replace(':', '-')}-0.3-seed0" / "pruned.safetensors"
        with torch.no_grad():
            right = (load(build("resnet20"), file).module.eval()(x).argmax(1) == y).sum()
        assert row.test.right_after == int(right)
        assert row.images_trained == (0 if row.budget_name == "none" else 300)
