"""The user's own code on the command line: criteria and loaders by name, runs that were started from Python."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import secateurs as sc
from secateurs import config, criteria
from secateurs.cli import execute
from secateurs.config import Recipe, recipe_fields
from secateurs.criteria import criterion
from secateurs_lab.methods import method

CODE = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

number = 3

def build(width=8):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 2))

def tensors(val=400):
    x = torch.randn(600 + val, 2, generator=torch.Generator().manual_seed(0))
    y = (x.prod(1) > 0).long()
    return (x[:400], y[:400]), (x[400:400 + val], y[400:400 + val]), (x[400 + val:], y[400 + val:])

def loaders(val=400):
    return [DataLoader(TensorDataset(*part), batch_size=50) for part in tensors(val)]

def without_test():
    return loaders()[:2]

def last_first(graph, site, data):
    return -torch.arange(site.channels)

def of_two(graph, site):
    return torch.zeros(site.channels)

def of_three(graph, site, data):
    return torch.zeros(3)

def unknown(graph, site, data):
    return torch.full((site.channels,), torch.nan)

def broken(graph, site, data):
    raise ZeroDivisionError("by nothing")
"""
NET = ["--model", "owncode:build", "--data", "owncode:loaders"]
POINT = ["--recipe", "fast", "--max-drop", "0.9", "--confidence", "0", "--largest-share", "0.5"]


@pytest.fixture(autouse=True)
def own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder with the user's module, and no criterion registered after the test."""
    (tmp_path / "owncode.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    tables: list[Any] = [criteria._REGISTRY, criteria._OWN, criteria._FUNCTIONS]
    known, names = [dict(table) for table in tables], list(config.CRITERIA)
    yield
    sys.modules.pop("owncode", None)
    for table, before in zip(tables, known, strict=True):
        table.clear()
        table.update(before)
    config.CRITERIA[:] = names


def document(capsys: pytest.CaptureFixture[str], *tokens: str) -> Any:
    capsys.readouterr()
    code = execute([*tokens, "--json"])
    said = capsys.readouterr()
    assert code == 0, said.err
    return json.loads(said.out)


def failing(capsys: pytest.CaptureFixture[str], *tokens: str) -> str:
    capsys.readouterr()
    assert execute(list(tokens)) == 1
    return " ".join(capsys.readouterr().err.split())


# ---- the default recipe ------------------------------------------------------------------------------------------------


def test_without_a_recipe_the_best_one_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    printed = document(capsys, "prune", *NET, "--max-drop", "0.05")
    assert printed["recipe"] == json.loads(json.dumps(recipe_fields(Recipe.best(max_drop=0.05))))
    assert printed["steps"][0]["bound"] <= 0.05  # 320 of the 400 validation examples certify


def test_a_small_validation_set_gives_point_estimates_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    small = [*NET, "--data-option", "val=60", "--max-drop", "0.02"]
    printed = document(capsys, "prune", *small)
    assert printed["recipe"]["confidence"] == 0
    assert printed["notes"][0].startswith(
        "nothing is promised: max_drop=0.02 cannot be certified at 95 % with 60 validation images"
    )
    assert execute(["prune", *small, "--out", "again"]) == 0
    assert "Note: nothing is promised: max_drop=0.02 cannot be certified" in capsys.readouterr().err
    for asked in (["--recipe", "best"], ["--confidence", "0.95"]):
        assert "Use more images, a larger max_drop, or confidence=0." in failing(capsys, "prune", *small, *asked)


# ---- loaders -----------------------------------------------------------------------------------------------------------


def test_a_function_gives_train_val_and_test_in_this_order(capsys: pytest.CaptureFixture[str]) -> None:
    for function, kind in (("loaders", "streamed"), ("tensors", "read")):
        out = document(capsys, "prune", "--model", "owncode:build", "--data", f"owncode:{function}", *POINT, "--out", kind)
        assert out["outcome"]["test"]["count"] == 200
        known = json.loads(Path(kind, "provenance.json").read_text())["data"]["sets"]
        assert known["search"]["count"] == 400
    printed = document(capsys, "prune", "--model", "owncode:build", "--data", "owncode:without_test", *POINT, "--out", "two")
    assert printed["outcome"]["test"]["count"] == 0
    named = ["--model", "owncode:build", "--data", "owncode:without_test"]
    assert document(capsys, "eval", "two", "--split", "val", *named)["networks"]["pruned"]["count"] == 400
    assert "has no test set: measure another one with --split val" in failing(capsys, "eval", "two", *named)


# ---- criteria ----------------------------------------------------------------------------------------------------------


def test_a_criterion_by_name_ranks_and_is_found_again(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    printed = document(capsys, "prune", *NET, *POINT, "--criterion", "owncode:last_first", "--out", "flag")
    assert printed["steps"][0]["removed"] == [7, 6, 5, 4]
    assert printed["steps"][0]["criterion"] == "last_first"
    (tmp_path / "own.toml").write_text(
        'criterion = "portfolio"\nportfolio = ["owncode:last_first"]\nmax_drop = 0.9\nconfidence = 0\nlargest_share = 0.5\n'
        'allocation = "sequential"\nrepair = "none"\n'
    )
    assert document(capsys, "prune", *NET, "--recipe", "own.toml")["steps"][0]["removed"] == [7, 6, 5, 4]
    # as after a crash: the last line of the journal is gone, and so is the user's module
    lines = Path("flag/journal.jsonl").read_text().splitlines(keepends=True)
    Path("flag/journal.jsonl").write_text("".join(line for line in lines if json.loads(line)["unit"] in ("network", "start")))
    for file in Path("flag/checkpoints").glob("0*"):
        file.unlink()
    criteria._OWN.clear()
    sys.modules.pop("owncode")
    said = failing(capsys, "resume", "flag")
    assert said.endswith("The whole command: secateurs resume flag " + " ".join([*NET, "--criterion", "owncode:last_first"]))
    assert "owncode" not in sys.modules
    assert document(capsys, *said.rpartition("secateurs ")[2].split())["steps"][0]["removed"] == [7, 6, 5, 4]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("absent:scores", "criterion 'absent:scores': no module 'absent' in"),
        ("owncode:last_frist", "owncode has no 'last_frist'. Did you mean 'last_first'"),
        ("owncode:number", "owncode has a value of type int, not a function, named 'number'"),
        ("owncode:of_two", "criterion 'of_two' takes (graph, site): wanted (graph, site, data), or one CriterionContext."),
        ("owncode:of_three", "criterion 'of_three' gave (3,) for site '0': wanted a tensor (8,) of real numbers."),
        ("owncode:unknown", "criterion 'unknown' gave NaN for 8 of the 8 filters of site '0': wanted a number for each."),
        ("owncode:broken", "criterion 'broken' failed at site '0': ZeroDivisionError: by nothing"),
        (":scores", "wanted package.module:function"),
        ("ensmble", "or package.module:function. Did you mean 'ensemble'?"),
    ],
)
def test_a_wrong_criterion_is_a_clear_error(capsys: pytest.CaptureFixture[str], name: str, wanted: str) -> None:
    assert wanted in failing(capsys, "prune", *NET, *POINT, "--criterion", name)


def test_own_criteria_are_compared_like_built_in_ones(capsys: pytest.CaptureFixture[str]) -> None:
    @criterion("backwards")
    def backwards(context: criteria.CriterionContext) -> Tensor:
        return -torch.arange(context.site.channels)

    methods = ["owncode:last_first", "owncode:last_first:uniform+repair", "backwards"]
    asked = ["compare", *NET, "--only", "--targets", "0.4", "--out", "rows"]
    printed = document(capsys, *asked, "--methods", *methods)
    assert [row["method"] for row in printed["rows"]] == methods
    networks = [sc.load(sys.modules["owncode"].build(), file) for file in sorted(Path("runs").rglob("pruned.safetensors"))]
    assert len(networks) == 3
    for network in networks:  # 40 % of the MACs of 8 neurons are those of the last four
        assert network.plan.removed() == {"0": (4, 5, 6, 7)}
    assert "owncode has no 'last_frist'" in failing(capsys, *asked, "--methods", "owncode:last_frist+repair")
    assert "no method 'l1:unifrom'. Did you mean 'l1:uniform'" in failing(capsys, *asked, "--methods", "l1:unifrom")


# ---- runs that were started from Python --------------------------------------------------------------------------------


def in_python(folder: str, **options: Any) -> sc.Result:
    from owncode import build, loaders  # type: ignore[import-not-found]

    train, val, _ = loaders()
    recipe = Recipe.fast(max_drop=0.9, confidence=0, largest_share=0.5)
    return sc.prune(build(), train, val, recipe=recipe, folder=folder, progress=False, **options)


@pytest.fixture
def importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("importable", "in_this_process")
def test_a_run_of_python_is_shown_reported_exported_measured_and_resumed(capsys: pytest.CaptureFixture[str]) -> None:
    from owncode import last_first

    result = in_python("first", criterion=last_first)
    assert execute(["show", "first"]) == 0
    shown = capsys.readouterr().out
    assert "a model given in Python on loaders" in shown
    assert str(result).splitlines()[2] in shown  # what is promised
    assert execute(["report", "first"]) == 0
    for command in (["export", "first", "--source"], ["eval", "first"], ["resume", "first"]):
        assert "was started from Python" in failing(capsys, *command)
    named = ["--model", "owncode:build"]
    assert execute(["export", "first", "--source", "--repeats", "5", *named]) == 0
    printed = document(capsys, "eval", "first", *named, "--data", "owncode:loaders", "--split", "val")
    assert printed["networks"]["pruned"]["accuracy"] == pytest.approx(result.search.after)
    assert "give --data" in failing(capsys, "eval", "first", *named)
    assert "give --model too" in failing(capsys, "eval", "first", "--data", "owncode:loaders")
    assert document(capsys, "resume", "first", *named)["steps"][0]["removed"] == [7, 6, 5, 4]


@pytest.mark.usefixtures("importable")
def test_a_stopped_run_of_python_says_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    from owncode import build, loaders

    def mine(graph: sc.Graph, site: sc.Site, data: Any) -> Tensor:
        return -torch.arange(site.channels)

    def training(model: nn.Module) -> None:
        raise AssertionError("is not called before the first cut")

    train, val, test = loaders()
    recipe = Recipe.fast(max_drop=0.9, confidence=0, largest_share=0.5)
    sc.Pruner(build(), train, val, test=test, recipe=recipe, criterion=mine, folder="tested").close()
    sc.Pruner(build(), train, val, recipe=recipe, finetune=training, folder="trained").close()
    assert execute(["show", "tested"]) == 0
    assert "Resume with: secateurs.resume('tested', model, test=test, criterion=criterion).finish()" in (
        said := capsys.readouterr().out
    )
    assert (
        "Or: secateurs resume tested "
        + " ".join(f"--{what} package.module:function" for what in ("model", "data", "criterion"))
        in said
    )
    named = ["--model", "owncode:build"]
    criteria._OWN.clear()  # as in another process
    assert "with --criterion package.module:function" in failing(capsys, "resume", "tested", *named)
    named_too = [*named, "--criterion", "owncode:last_first"]
    assert "was started with test=…" in failing(capsys, "resume", "tested", *named_too)
    assert "was started with finetune=…" in failing(capsys, "resume", "trained", *named)
    printed = document(capsys, "resume", "tested", *named_too, "--data", "owncode:loaders")
    assert printed["outcome"]["test"]["count"] == 200
    assert printed["steps"][0]["removed"] == [7, 6, 5, 4]


@pytest.mark.usefixtures("importable")
def test_a_metric_that_is_no_share_is_shown_as_a_number(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")  # tables do not wrap

    def ten_times(outputs: Tensor, targets: Tensor) -> Tensor:
        return 10.0 * (outputs.argmax(1) == targets)

    result = in_python("ten", metric=ten_times)
    assert execute(["show", "ten"]) == 0
    said = capsys.readouterr().out
    assert "ten_times after the cut" in said
    row = next(line for line in said.splitlines() if re.match(r" *0 +1 +8 → ", line))
    assert row.split()[5:7] == [f"{result.steps[0].accuracy_cut:.4g}"] * 2


def test_a_network_that_cannot_take_the_examples_is_refused_before_training(capsys: pytest.CaptureFixture[str]) -> None:
    said = failing(capsys, "train", "--model", "resnet8", "--data", "digits", "--out", "wrong")
    assert "resnet8 cannot take the examples of digits, of shape (1, 8, 8)" in said
    assert "--model-option" in said
    assert not Path("wrong").exists()
    assert "resnet8 cannot take the examples" in failing(capsys, "eval", "--model", "resnet8", "--data", "digits")


def test_a_method_of_no_criterion_names_what_there_is() -> None:
    with pytest.raises(sc.errors.InvalidInput, match=r"no method 'l3'.*package\.module:function\) with ':uniform'"):
        method("l3")
