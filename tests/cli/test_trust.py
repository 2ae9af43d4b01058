"""A folder is data: no command runs what it names, unless the command line names the same."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import pickle
import re
import shlex
import shutil
import sqlite3
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch

import secateurs as sc
from secateurs import criteria
from secateurs.cli import app, execute
from secateurs.config import Recipe
from secateurs.data import load as load_data
from secateurs.models import build
from secateurs.training import precision
from torture.journals import entries_of, write_entries

NET = ["--model", "mlp", "--model-option", "hidden=[8, 6]", "--data", "digits"]
FAST = ["--recipe", "fast", "--max-drop", "0.5", "--confidence", "0", "--round-to", "1", "--criterion", "l1"]
EVIL = """
from pathlib import Path
Path({mark!r}).touch()

def touch(*given, **options):
    Path({mark!r}).touch()
"""


class Touch:
    """Executes a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, the same one stopped after the first site, and a training that was stopped."""
    root = tmp_path_factory.mktemp("runs")
    assert execute(["prune", *NET, *FAST, "--out", str(root / "finished")]) == 0
    shutil.copytree(root / "finished", root / "stopped")
    entries = entries_of(root / "stopped")
    write_entries(root / "stopped", [entry for entry in entries if entry["unit"] in ("network", "start")])
    for left in [*(root / "stopped").glob("checkpoints/0*"), root / "stopped" / "pruned.safetensors"]:
        left.unlink()
    assert execute(["train", *NET, "--epochs", "1", "--out", str(root / "training")]) == 0
    write_entries(root / "training", [])
    (root / "training" / "weights.safetensors").unlink()
    return root


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file that is there once anything of a stranger was executed; their module is importable from the current folder."""
    found = tmp_path / "EXECUTED"
    (tmp_path / "evil.py").write_text(EVIL.format(mark=str(found)))
    monkeypatch.chdir(tmp_path)
    path, own = list(sys.path), dict(criteria._OWN)
    yield found
    assert sys.path == path, "a folder got onto Python's path"
    assert own == criteria._OWN, "a criterion of the folder was imported"
    sys.modules.pop("evil", None)


def edited(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change provenance.json or training.json, and sign the journal again."""
    entries = entries_of(folder)
    (file,) = (folder / name for name in ("provenance.json", "training.json") if (folder / name).exists())
    known = json.loads(file.read_text())
    change(known)
    file.write_text(json.dumps(known))
    write_entries(folder, entries)


def of_origin(**fields: Any) -> Callable[[Path, Path], None]:
    def hostile(folder: Path, mark: Path) -> None:
        text = json.dumps(fields).replace("MARK", str(mark)).replace("HERE", str(mark.parent))
        edited(folder, lambda known: known["origin"].update(json.loads(text)))

    return hostile


def of_provenance(**fields: Any) -> Callable[[Path, Path], None]:
    def hostile(folder: Path, mark: Path) -> None:
        edited(folder, lambda known: known.update(json.loads(json.dumps(fields).replace("MARK", str(mark)))))

    return hostile


def of_recipe(**fields: Any) -> Callable[[Path, Path], None]:
    def hostile(folder: Path, mark: Path) -> None:
        if not (folder / "recipe.toml").exists():  # of a training they are in training.json
            edited(folder, lambda known: known["settings"].update(fields))
            return
        recipe = tomllib.loads((folder / "recipe.toml").read_text()) | fields
        (folder / "recipe.toml").write_text(tomli_w.dumps(recipe))
        digest = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()
        edited(folder, lambda known: known.update(recipe_sha256=digest))

    return hostile


def with_pickles(folder: Path, mark: Path) -> None:
    """Files of weights that execute when they are unpickled, where the folder says and where weights lie."""
    for name in ("weights.pt", "measured.sqlite", "plan.json", "checkpoints/start.safetensors", "pruned.safetensors"):
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_bytes(pickle.dumps(Touch(mark)))
    edited(folder, lambda known: known["origin"].update(weights=str(folder / "weights.pt")))


SHELL = {"args": "touch MARK", "shell": True}
HOSTILE: dict[str, Callable[[Path, Path], None]] = {
    "model": of_origin(model="subprocess:call", model_options=SHELL),
    "model of the current folder": of_origin(model="evil:touch", model_options={}),
    "model of our package": of_origin(
        model="secateurs._util.entrypoints:call", model_options={"target": "evil:touch", "what": "", "options": {}}
    ),
    "model by its file": of_origin(model="HERE/evil.py:touch", model_options={}),
    "model that is no text": of_origin(model=["evil:touch"]),
    "options of our model": of_origin(model_options={"spec": "evil:touch", "name": "evil:touch", "target": "evil:touch"}),
    "data": of_origin(data="subprocess:call", data_options=SHELL),
    "options of our data": of_origin(data_options={"name": "evil:touch", "target": "evil:touch"}),
    "folder": of_origin(folder="HERE", model="evil:touch", model_options={}),
    "device": of_origin(device="evil:touch"),
    "criterion": of_recipe(criterion="evil:touch"),
    "portfolio": of_recipe(criterion="portfolio", portfolio=["l1", "evil:touch"]),
    "engine": of_recipe(engine="evil:touch"),
    "measures": of_provenance(measures={"loss": "evil:touch", "metric": "evil:touch", "time": "evil:touch"}),
    "what is given again": of_provenance(again=["evil:touch", "finetune"], fingerprints={"loss": "evil:touch"}),
    "leaves": of_provenance(model={"class": "evil:touch", "leaves": ["evil:touch", "evil.touch"], "weights_sha256": ""}),
    "store": of_provenance(store="MARK"),
    "trained on": of_provenance(trained_on=[{"data": "evil:touch", "options": {}, "count": 1}]),
    "pickles": with_pickles,
}
COMMANDS: dict[str, tuple[str, ...]] = {
    "show": ("show FINISHED", "show STOPPED", "show TRAINING"),
    "report": ("report FINISHED", "report STOPPED FINISHED"),
    "eval": ("eval FINISHED", "eval STOPPED", "eval TRAINING", "eval --model mlp --data digits --weights FINISHED/weights.pt"),
    "export": ("export FINISHED --source --repeats 5", "export FINISHED --int8 --uncertified", "export STOPPED --onnx"),
    "resume": ("resume FINISHED", "resume STOPPED", "resume TRAINING"),
    "prune": (
        "prune --model mlp --data digits --out FINISHED",
        "prune --model mlp --data digits --weights FINISHED/weights.pt",
    ),
    "train": ("train --model mlp --data digits --out TRAINING",),
    "demo": ("demo --out FINISHED",),
    "sites": ("sites --model mlp --data folder:FINISHED",),
    "compare": (
        "compare --render FINISHED",
        "compare --model mlp --data digits --targets 0.3 --only --methods l1 --out STOPPED",
    ),
    "data": ("data get FINISHED",),
    "reproduce": ("reproduce table3 --render FINISHED",),
}


def test_every_command_is_tried() -> None:
    assert {name for name in app if not name.startswith("-")} == COMMANDS.keys()


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("field", HOSTILE)
def test_no_command_executes_what_a_folder_names(
    field: str, command: str, runs: Path, mark: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for line in COMMANDS[command]:
        for name in ("finished", "stopped", "training"):
            shutil.rmtree(tmp_path / name, ignore_errors=True)
            if name.upper() in line:
                shutil.copytree(runs / name, tmp_path / name)
                HOSTILE[field](tmp_path / name, mark)
                line = line.replace(name.upper(), str(tmp_path / name))
        code = execute(line.split())
        said = capsys.readouterr().err
        assert not mark.exists(), f"{line}: {field} was executed"
        assert code in (0, 1, 2), said
        assert "Traceback" not in said


# ---- the chain of digests comes first ----------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["eval FINISHED", "export FINISHED --source", "resume FINISHED", "resume STOPPED"])
def test_a_changed_folder_is_refused_before_its_names_are_looked_at(
    command: str, runs: Path, mark: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "finished" if "FINISHED" in command else "stopped"
    folder = shutil.copytree(runs / name, tmp_path / name)
    known = json.loads((folder / "provenance.json").read_text())
    known["origin"] |= {"model": "evil:touch", "model_options": {}}
    (folder / "provenance.json").write_text(json.dumps(known))
    again = " --model evil:touch"  # not even then
    assert execute((command.replace(name.upper(), str(folder)) + again).split()) == 1
    assert "line 1: does not continue from" in capsys.readouterr().err
    assert not mark.exists()


def test_a_swapped_network_is_refused(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = shutil.copytree(runs / "finished", tmp_path / "finished")
    shutil.copy(folder / "checkpoints" / "start.safetensors", folder / "pruned.safetensors")
    for command in ("eval", "export --pt2", "resume"):
        assert execute([*command.split(), str(folder)]) == 1
        assert "pruned.safetensors: damaged, or not the file that the journal relies on" in capsys.readouterr().err


def test_a_folder_one_stands_in_is_not_where_packages_are_looked_up(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the processor trains in bfloat16 is tried in a process of its own, which imports torch."""
    folder, mark = shutil.copytree(runs / "training", tmp_path / "training"), tmp_path / "EXECUTED"
    shutil.rmtree(folder / "checkpoints")
    of_recipe(precision="bfloat16")(folder, mark)
    for name in ("torch", "numpy", "safetensors", "sitecustomize"):
        (folder / f"{name}.py").write_text(EVIL.format(mark=str(mark)))
    monkeypatch.chdir(folder)
    precision.bfloat16_works.cache_clear()
    try:
        assert execute(["resume", "."]) == 0
        assert precision.bfloat16_works.cache_info().misses == 1
    finally:
        precision.bfloat16_works.cache_clear()
    assert not mark.exists()


# ---- links -------------------------------------------------------------------------------------------------------------

LINKED = (
    "journal.jsonl",
    "provenance.json",
    ".lock",
    "measured.sqlite",
    "checkpoints",
    "ensembles",
    "checkpoints/0001.safetensors",
)


@pytest.mark.parametrize("linked", LINKED)
@pytest.mark.parametrize("command", ["show", "report", "eval", "export --source", "resume"])
def test_links_of_a_folder_are_not_followed(
    command: str, linked: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They could lead writing to any place: a line to a start-up file, a table into the data base of a browser."""
    name = "finished" if command.startswith("export") else "stopped"
    folder, own = shutil.copytree(runs / name, tmp_path / name), tmp_path / "own"
    own.mkdir()
    target, place = own / "file", folder / linked
    if place.is_dir():
        shutil.move(place, target)
    elif place.exists():
        place.rename(target)
    place.symlink_to(target)
    before = {path: path.read_bytes() for path in own.rglob("*") if path.is_file()}
    assert execute([*command.split(), str(folder)]) == 1
    assert f"{place}: is a link" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in own.rglob("*") if path.is_file()} == before


def test_a_pipe_in_a_folder_is_not_waited_for(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = shutil.copytree(runs / "stopped", tmp_path / "stopped")
    (folder / "journal.jsonl").unlink()
    os.mkfifo(folder / "journal.jsonl")
    for command in ("show", "report", "eval", "resume"):
        assert execute([command, str(folder)]) == 1
        assert "journal.jsonl: is no ordinary file" in capsys.readouterr().err


def test_a_data_base_that_is_no_store_of_ours_gets_no_table(runs: Path, tmp_path: Path) -> None:
    folder, theirs = shutil.copytree(runs / "stopped", tmp_path / "stopped"), tmp_path / "places.sqlite"
    with sqlite3.connect(theirs) as base:
        base.execute("create table visited (place text)")
    before = theirs.read_bytes()
    edited(folder, lambda known: known.update(store=str(theirs)))
    assert execute(["resume", str(folder)]) == 0
    assert theirs.read_bytes() == before


# ---- what the command line repeats -------------------------------------------------------------------------------------

MINE = """
import torch
from secateurs.data import load
from secateurs.models import build as ours

def build(hidden):
    return ours("mlp", hidden=hidden)

seeds = []

def digits(seed=0, note=""):
    seeds.append(seed)
    data = load("digits", seed=seed)
    return [(part.ready(torch.float32).inputs, part.targets) for part in (data.train, data.search, data.test)]

def first_last(graph, site, data):
    return -torch.arange(site.channels)

def last_first(graph, site, data):
    return torch.arange(site.channels)
"""


def said_by(capsys: pytest.CaptureFixture[str], *tokens: str) -> str:
    """What a command that fails says."""
    capsys.readouterr()
    assert execute(list(tokens)) == 1
    return capsys.readouterr().err


@pytest.fixture
def own_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_criteria: None) -> Iterator[Path]:
    """A run of the user's own network, data and criterion, stopped after the start; their module is forgotten."""
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    command = ["prune", "--model", "mine:build", "--model-option", "hidden=[8, 6]", "--data", "mine:digits"]
    command += ["--data-option", "note=two words; $HOME", *FAST[:-2], "--criterion", "mine:last_first"]
    assert execute([*command, "--out", "own"]) == 0
    write_entries(Path("own"), [entry for entry in entries_of(Path("own")) if entry["unit"] in ("network", "start")])
    for left in Path("own/checkpoints").glob("0*"):
        left.unlink()
    sys.modules.pop("mine")
    criteria._OWN.clear()
    yield tmp_path / "own"
    sys.modules.pop("mine", None)


def test_the_error_gives_the_command_that_runs_what_the_folder_names(own_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = said_by(capsys, "resume", "own")
    for name in ("model mine:build", "data mine:digits", "criterion mine:last_first"):
        assert name in said
    assert "It was not run, because a folder may come from anybody" in said
    assert f"It was started in {own_run.parent}" in said
    assert "mine" not in sys.modules
    (line,) = re.findall("^The whole command: secateurs (.*)$", said, re.M)
    words = shlex.split(line)
    assert words[words.index("--data-option") + 1] == "note=two words; $HOME"
    # each flag alone is not enough, and what is left to repeat is said
    for flag in ("--model", "--model-option", "--data", "--data-option", "--criterion"):
        place = words.index(flag)
        left = said_by(capsys, *words[:place], *words[place + 2 :])
        assert left.strip().endswith(shlex.join([flag, words[place + 1]]))
    assert "mine" not in sys.modules
    assert execute(words) == 0
    assert "Pruned network: own/pruned.safetensors" in capsys.readouterr().out
    names = words[words.index("--model") : words.index("--criterion")]
    for command in (["eval", "own"], ["resume", "own"]):
        assert "names code that is not part of secateurs" in said_by(capsys, *command)
        assert execute([*command, *names]) == 0


@pytest.mark.parametrize(
    ("flag", "was", "now"),
    [
        ("--model", "mine:build", "mine:other"),
        ("--model-option", "hidden=[8, 6]", "hidden=[8, 7]"),
        ("--data", "mine:digits", "digits"),
        ("--data-option", "no seed", "seed=1"),
        ("--criterion", "mine:last_first", "mine:first_last"),
    ],
)
@pytest.mark.usefixtures("own_run")
def test_another_name_than_the_folder_has_is_an_error_that_shows_both(
    flag: str, was: str, now: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", "mine:build", "--model-option", "hidden=[8, 6]", "--data", "mine:digits", "--criterion"]
    words += ["mine:last_first", "--data-option", "note=two words; $HOME"]
    given = dict(zip(words[::2], words[1::2], strict=True)) | {flag: now}
    said = said_by(capsys, "resume", "own", *itertools.chain(*given.items()))
    assert f"was started with {flag} {was}, the command line says {flag} {now}" in said
    assert "mine" not in sys.modules


def test_names_of_ours_may_be_repeated(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(shutil.copytree(runs / "finished", tmp_path / "finished"))
    assert execute(["eval", folder]) == 0
    assert execute(["eval", folder, *NET]) == 0
    said = said_by(capsys, "eval", folder, "--model", "lenet300")
    assert "was started with --model mlp, the command line says --model lenet300" in said


@pytest.mark.parametrize("name", ["os.system", "mine:build\x1b[2J", "mine:build; rm -rf ~", ":call", "mine:", "../mine:build"])
def test_a_name_that_is_no_function_is_not_proposed(
    name: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(runs / "finished", tmp_path / "finished")
    edited(folder, lambda known: known["origin"].update(model=name))
    said = said_by(capsys, "eval", str(folder))
    assert "neither ours nor package.module:function" in said
    assert "The whole command" not in said
    assert "\x1b" not in said


def test_weights_do_not_call_the_users_function_with_their_own_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the header of weights names another split of the same data, its overlap with the validation set is looked for."""
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    net = ["--model", "mlp", "--model-option", "hidden=[8]", "--data", "mine:digits"]
    assert execute(["train", *net, "--data-option", "seed=1", "--epochs", "0", "--out", "trained"]) == 0
    capsys.readouterr()
    assert execute(["eval", *net, "--weights", "trained/weights.safetensors"]) == 0
    assert "your function is not called with options that a file of weights names" in " ".join(capsys.readouterr().err.split())
    assert sys.modules.pop("mine").seeds == [1, 0]


# ---- in Python ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", HOSTILE)
def test_resume_and_load_execute_nothing_in_python(field: str, runs: Path, mark: Path, tmp_path: Path) -> None:
    for name in ("finished", "stopped"):
        folder = shutil.copytree(runs / name, tmp_path / name)
        HOSTILE[field](folder, mark)
        try:
            sc.resume(folder, build("mlp", hidden=[8, 6]), load_data("digits")).finish()
            sc.load(build("mlp", hidden=[8, 6]), folder / "pruned.safetensors")
        except sc.errors.SecateursError:
            pass
        assert not mark.exists()


@pytest.mark.usefixtures("own_criteria")
def test_own_criteria_are_given_again_in_python(tmp_path: Path) -> None:
    def one(graph: sc.Graph, site: sc.Site, data: Any) -> torch.Tensor:
        return torch.arange(site.channels)

    def two(graph: sc.Graph, site: sc.Site, data: Any) -> torch.Tensor:
        return -torch.arange(site.channels)

    names = tuple(criteria.as_criterion(function) for function in (one, two))
    recipe = Recipe.fast(max_drop=0.9, confidence=0, criterion="portfolio", portfolio=names)
    data, folder = load_data("digits"), tmp_path / "run"
    sc.Pruner(build("mlp", hidden=[8]), data, recipe=recipe, folder=folder).close()
    criteria._OWN.clear()  # as in another process
    for given in (None, one, [one]):
        with pytest.raises(sc.errors.RunError, match=r"two' as its criterion, which is not imported.*criterion=…"):
            sc.resume(folder, build("mlp", hidden=[8]), data, criterion=given)
        criteria._OWN.clear()
    assert sc.resume(folder, build("mlp", hidden=[8]), data, criterion=[one, two]).finish().steps[0].removed
