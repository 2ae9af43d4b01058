"""Int8 programs by torchao: near the float network, saved and loaded, with int8 weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("torchao")

from secateurs import Pruner, Recipe, trace
from secateurs.data import Examples, load
from secateurs.errors import InvalidInput
from secateurs.export.torchao import ProgramModule, ProgramQuantiser
from secateurs.training import TrainSettings, train_


@pytest.mark.filterwarnings("ignore")
def test_a_program_gives_what_the_network_gives_to_int8_rounding() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 3)).eval()
    data = Examples(torch.randn(64, 2, 6, 6), torch.randint(3, (64,)))
    made = ProgramQuantiser(trace(net, data.inputs[:2]), data, data, classes=False).quantised()
    found, wanted = made.module().eval()(data.inputs), net(data.inputs).detach()
    error = float((found - wanted).square().mean() / wanted.square().mean())
    assert 0 < error < 1e-3
    assert made.how.divergence == pytest.approx(error, rel=0.2)
    held = ProgramModule(made.model)._called[0].state_dict().values()
    assert any(tensor.dtype == torch.int8 for tensor in held)
    with pytest.raises(InvalidInput, match="no examples"):
        ProgramQuantiser(trace(net, data.inputs[:2]), data.take(torch.arange(0)), data)


@pytest.mark.filterwarnings("ignore")
def test_a_run_certifies_a_program_that_gives_its_accuracy_in_a_fresh_process(tmp_path: Path) -> None:
    digits = load("digits", search=400, test=300, seed=0)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10))
    train_(net, digits.train, TrainSettings(epochs=3, lr=0.05, batch=32))
    recipe = Recipe.best(max_drop=0.05, target_macs=0.1, round_to=1)
    result = Pruner(net, digits, recipe=recipe, folder=tmp_path / "run").finish()
    path = result.export(tmp_path / "small.pt2", int8=True)
    (figures,) = [one["int8"] for one in json.loads((tmp_path / "run" / "exports.json").read_text())["exports"]]
    assert figures["bound"] <= 0.05
    certifying = result.context.metric.examples("certify")
    assert certifying is not None
    batch = certifying.batch(slice(None))
    torch.save((batch.args[0], batch.targets), tmp_path / "images.pt")
    script = (
        "import sys, torch, torchao\n"
        "x, y = torch.load(sys.argv[2], weights_only=True)\n"
        "print(int((torch.export.load(sys.argv[1]).module()(x).argmax(1) == y).sum()))\n"
    )
    command = [sys.executable, "-c", script, str(path), str(tmp_path / "images.pt")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) == round(figures["accuracy"] * len(certifying))
