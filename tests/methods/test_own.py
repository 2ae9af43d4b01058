"""Whole procedures of the user: compared like our own, resumed by their folder, and refused where they break the rules."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from comparisons import call, places
from nets import assert_same_bits, weights_of
from pages import ROOT, blocks
from secateurs import compact, cost, criteria, load, trace
from secateurs.cli import compare as command
from secateurs.cli.compare import compare
from secateurs.config import TrainSettings
from secateurs.data import Data, load_digits, subset
from secateurs.errors import InvalidInput, RunError, TrainingError
from secateurs.graph.masking import copied
from secateurs.graph.trace import Graph
from secateurs.methods import Budget, MethodRun, MethodState, Pruned, Task, Trained, cut_then_train, method, procedure
from secateurs.methods.compare.rows import Row, comparison_rows
from secateurs.methods.compare.run import ROWS
from secateurs.models import build
from secateurs.pruning.results import Progress

PAGE = ROOT / "docs" / "comparisons.md"
NET = ["--model", "mlp", "--model-option", "hidden=[8, 6]", "--data", "digits", "--examples", "120"]
BRIEF = "[after]\nepochs = 2\nbatch = 50\nlr = 0.1\n"
BUDGET = Budget("brief", after=TrainSettings(epochs=2, batch=50, lr=0.1))


@pytest.fixture(autouse=True)
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder with the procedure of the page as mine.py, beside a criterion, and nothing registered after the test."""
    (code,) = (block.text for block in blocks(PAGE) if block.language == "python" and "@procedure" in block.text)
    (tmp_path / "mine.py").write_text(f"{code}\n\ndef even(graph, site, data):\n    return torch.zeros(site.channels)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "rendered", lambda out: [])
    tables: list[Any] = [criteria._OWN, criteria._FUNCTIONS]
    known = [dict(table) for table in tables]
    yield
    sys.modules.pop("mine", None)
    for table, before in zip(tables, known, strict=True):
        table.clear()
        table.update(before)


def few() -> Data:
    digits = load_digits()
    parts = {name: subset(part, 120, seed=0) for name, part in digits.splits().items()}
    return replace(digits, **parts)


def network() -> Graph:
    torch.manual_seed(0)
    return trace(build("mlp", hidden=(8, 6)).eval(), torch.randn(2, 1, 8, 8))


def task(**changes: Any) -> Task:
    return replace(Task(network(), few(), 0.3, BUDGET), **changes)


def rows_of(folder: Path) -> list[Row]:
    return comparison_rows(folder / "out" / ROWS)


def test_the_procedure_of_the_page_is_compared_like_ours(tmp_path: Path) -> None:
    (tmp_path / "brief.toml").write_text(BRIEF)
    methods = ["mine:widest_first", "mine:widest_first[power=2]", "l1:uniform"]
    asked = ["--methods", *methods, "--only", "--targets", "0.4", "--budgets", "none,brief.toml"]
    call(compare, *NET, *asked, *places(tmp_path))
    rows = rows_of(tmp_path)
    assert [row.key for row in rows] == [(name, budget, 0.4, 0) for budget in ("none", "brief") for name in methods]
    for row in rows:
        first, second, _ = (after for _, after in row.filters.values())
        assert row.macs.after == 64 * first + first * second + second * 10
        assert row.macs.removed >= 0.4
        assert row.images_trained == (240 if row.budget_name == "brief" else 0)
    own = rows[0]
    # at most 372 of 620 MACs may stay: 8, 6 filters become 7, 6; then 6, 6; 5, 6; 5, 5 (395 MACs); 4, 5 (326 MACs)
    assert [after for _, after in own.filters.values()] == [4, 5, 10]
    assert own.note == "5 filters"
    file = next((tmp_path / "runs" / "none").glob("mine-widest_first-*/pruned.safetensors"))
    assert cost(load(build("mlp", hidden=(8, 6)), file)).macs == own.macs.after == 326
    before = (tmp_path / "out" / ROWS).read_bytes()
    call(compare, *NET, *asked, *places(tmp_path))  # nothing is made again
    assert (tmp_path / "out" / ROWS).read_bytes() == before


def test_a_killed_procedure_goes_on_in_its_folder(tmp_path: Path) -> None:
    asked, cuts = task(folder=tmp_path / "work"), list[str]()

    def kill(event: Progress) -> None:
        if (event.phase, event.done) == ("retrain", 4):  # in the second epoch
            raise KeyboardInterrupt

    def counted(asked: Task, *, watch: Any = None, count: int = 3) -> Pruned:
        def cut(run: MethodRun) -> MethodState:
            cuts.append("cut")
            return MethodState(compact(asked.graph, {"layers.1": torch.arange(8) >= count}))

        return cut_then_train(asked, cut, watch=watch)

    with pytest.raises(KeyboardInterrupt):
        counted(asked, watch=kill)
    with pytest.raises(RunError, match="was started with another procedure"):
        counted(asked, count=4)
    again = counted(asked)
    assert cuts == ["cut"]
    whole = counted(replace(asked, folder=None))
    assert_same_bits(weights_of(again.graph.module), weights_of(whole.graph.module))
    assert again.trained == Trained(240, pytest.approx(whole.trained.rate_sum))
    assert again.search_seconds > 0


def small(asked: Task) -> Graph:
    return compact(asked.graph, {"layers.1": torch.arange(8) >= 3})


def untrained(asked: Task, *, watch: Any = None) -> Pruned:
    return Pruned(small(asked), Trained(0, 0.0), 0, 0.0, 0.0)


def whole(asked: Task, *, watch: Any = None) -> Pruned:
    return cut_then_train(asked, lambda run: MethodState(copied(asked.graph)), watch=watch)


def broken(asked: Task, *, watch: Any = None) -> Pruned:
    raise ZeroDivisionError("by nothing")


def nothing(asked: Task, *, watch: Any = None) -> Any:
    return None


def careless(asked: Task, *, watch: Any = None) -> Pruned:
    nn.init.zeros_(next(asked.graph.module.parameters()))
    return untrained(asked)


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (untrained, TrainingError, "budget 'brief': 0 images were trained on .* wanted 240 "),
        (whole, InvalidInput, r"target_macs = 0\.3: the procedure removed 0\.000 of the MACs"),
        (broken, InvalidInput, "method 'rival:broken' failed: ZeroDivisionError: by nothing"),
        (nothing, InvalidInput, r"method 'rival:nothing' gave NoneType: wanted a secateurs\.methods\.Pruned"),
        (careless, InvalidInput, "method 'rival:careless' changed the network of its task"),
    ],
)
def test_a_procedure_that_breaks_the_rules_is_refused(
    function: Any, error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rival = type(sys)("rival")
    setattr(rival, function.__name__, procedure(function))
    monkeypatch.setitem(sys.modules, "rival", rival)
    with pytest.raises(error, match=message):
        method(f"rival:{function.__name__}")(task())


def test_a_missed_target_is_refused_however_it_was_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    rate_sum = cut_then_train(task(), lambda run: MethodState(small(run.task))).trained.rate_sum

    def missing(asked: Task, *, watch: Any = None) -> Pruned:
        return Pruned(copied(asked.graph), Trained(240, rate_sum), 0, 0.0, 0.0)

    rival: Any = type(sys)("rival")
    rival.missing = procedure(missing)
    monkeypatch.setitem(sys.modules, "rival", rival)
    with pytest.raises(InvalidInput, match=r"target_macs = 0\.3: only 0\.000 of the MACs are removed at the end"):
        method("rival:missing")(task())


def test_names_of_procedures(tmp_path: Path) -> None:
    assert callable(method("mine:even:uniform+repair"))  # not marked: a criterion
    for name in ("mine:widest_first+repair", "mine:widest_first:uniform", "mine:widest_first[power=2"):
        with pytest.raises(InvalidInput, match="mine:widest_first is a whole procedure: wanted nothing behind it"):
            method(name)
    with pytest.raises(InvalidInput, match=r"'pwoer=2' is no setting of it\. Did you mean 'power'"):
        method("mine:widest_first[pwoer=2]")
    with pytest.raises(InvalidInput, match=r"procedure .*two takes \(task: .*: wanted \(task, \*, watch=None\)"):

        @procedure
        def two(task: Task, other: Any) -> Pruned:
            raise NotImplementedError
