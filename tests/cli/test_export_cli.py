"""`secateurs export`: on the folder of a run made by hand, so that nothing has to be trained."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
import torch

from nets import random_keep, randomise_
from secateurs import compact, find_sites, save, trace
from secateurs.cli import execute
from secateurs.cli.inputs import Origin
from secateurs.config import Recipe, write_recipe
from secateurs.data import load as load_data
from secateurs.models import build
from secateurs.report import read_run
from torture.journals import write_entries

HIDDEN = {"hidden": [8, 6]}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished run of a small network on digits."""
    monkeypatch.chdir(tmp_path)
    model = randomise_(build("mlp", **HIDDEN)).float()
    graph = trace(model, load_data("digits").test.batch(slice(0, 2)).inputs)
    save(compact(graph, random_keep(find_sites(graph), seed=0)), tmp_path / "run" / "pruned.safetensors")
    origin = Origin("mlp", "digits", HIDDEN).record()
    (tmp_path / "run" / "provenance.json").write_text(json.dumps({"origin": origin}))
    write_recipe(tmp_path / "run" / "recipe.toml", Recipe())
    write_entries(tmp_path / "run", [])
    return tmp_path / "run"


@pytest.mark.usefixtures("in_this_process")
def test_source_of_a_run_is_checked_on_its_test_examples(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["export", str(folder), "--source", "--repeats", "5", "--json"]) == 0
    (printed,) = json.loads(capsys.readouterr().out)["exports"]
    assert printed["agreement"]["examples"] == 64
    assert printed["agreement"]["given"]
    assert [speed["batch"] for speed in printed["speeds"]] == [1, 64]
    assert printed["original_bytes"] > printed["bytes"]
    network = runpy.run_path(str(folder / "model.py"))["load"]()
    assert network(torch.zeros(3, 1, 8, 8)).shape == (3, 10)
    (noted,) = json.loads((folder / "exports.json").read_text())["exports"]
    assert noted == printed


@pytest.mark.usefixtures("in_this_process")
def test_the_report_of_the_run_lists_the_export(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_entries(folder, [{"unit": "start", "accuracy": 0.5, "loss": 1.0, "seconds": 0.0}])
    assert execute(["export", str(folder), "--source", "--repeats", "5"]) == 0
    assert f"Report: {folder / 'report.html'}" in capsys.readouterr().out
    assert read_run(folder).exports[0].kind == "source"


@pytest.mark.usefixtures("in_this_process")
def test_a_file_with_its_model_is_compared_on_random_inputs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--model", "mlp", "--model-option", "hidden=[8, 6]", "--source", "--out", "deploy", "--repeats", "5"]
    assert execute(["export", str(folder / "pruned.safetensors"), *given]) == 0
    said = capsys.readouterr().out
    assert "random inputs" in said
    assert "no channels to align" in said
    assert sorted(p.name for p in Path("deploy").iterdir()) == ["model.py", "model.safetensors"]


def test_what_cannot_be_exported_is_an_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder.parent / "other.safetensors").write_bytes(b"")
    wrong = {
        ("run",): "one or more of --onnx, --pt2, --source and --int8",
        ("nowhere", "--onnx"): "nowhere: does not exist",
        ("run/pruned.safetensors", "--pt2"): "give --model",
        ("run", "--pt2", "--data", "mnist"): "was started with --data digits, the command line says --data mnist",
        ("other.safetensors", "--pt2", "--model", "mlp"): "is not a network that secateurs has pruned",
        ("run", "--pt2", "--model-option", "hidden=[8]"): "was started with --model-option hidden=[8, 6]",
        ("run/pruned.safetensors", "--pt2", "--model", "mlp"): "Build the model with the options it was pruned with",
    }
    for arguments, message in wrong.items():
        assert execute(["export", *arguments]) == 1
        assert message in capsys.readouterr().err


def test_an_unfinished_run_says_how_to_resume(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "pruned.safetensors").unlink()
    assert execute(["export", str(folder), "--source"]) == 1
    assert f"secateurs resume {folder}" in capsys.readouterr().err
    (folder / "pruned.safetensors").write_bytes(b"")
    (folder / "provenance.json").write_text("{}")
    write_entries(folder, [])
    assert execute(["export", str(folder), "--source"]) == 1
    assert "was started from Python" in capsys.readouterr().err
    (folder / "pruned.safetensors").unlink()
    (folder / "provenance.json").unlink()
    assert execute(["export", str(folder), "--source"]) == 1
    assert "not the folder of a run" in capsys.readouterr().err
