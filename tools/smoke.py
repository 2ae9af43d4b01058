"""Check an installed secateurs, away from its sources: the commands answer, and a small network is pruned, saved and loaded.

`make wheel` runs it in a clean environment that holds the wheel and what it depends on.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import secateurs as sc
from secateurs.config import read_recipe
from secateurs.data import load
from secateurs.models import resolve
from secateurs.training import train_


def main() -> None:
    began = time.monotonic()
    home = Path(sc.__file__).parent
    assert "site-packages" in home.parts, f"secateurs is imported from {home}, wanted an installed one"
    for arguments in (["--help"], ["--version"], ["prune", "--help"]):
        command = [str(Path(sys.executable).parent / "secateurs"), *arguments]
        answer = subprocess.run(command, capture_output=True, text=True, check=True)
        assert answer.stdout.strip(), f"{' '.join(arguments)} prints nothing"
    lab = subprocess.run([command[0], "compare", "--render", "rows"], capture_output=True, text=True, check=False)
    assert lab.returncode == 1, "the wheel holds a command of the lab"
    assert "pip install ./lab" in lab.stderr, lab.stderr
    assert read_recipe(home / "recipes" / "best.toml") == sc.Recipe.best()
    torch.manual_seed(0)
    data = load("digits")
    model = resolve("resnet8", in_channels=1, widths=(8, 16, 32))
    train_(model, data.train, sc.TrainSettings(epochs=4, batch=64, lr=0.1, schedule="one-cycle"))
    sets = [[part.batch(slice(None))] for part in (data.train, data.search, data.test)]
    with tempfile.TemporaryDirectory() as folder:
        recipe = sc.Recipe.best(max_drop=0.03, confidence=0, criterion="l1")
        result = sc.prune(model, *sets[:2], test=sets[2], recipe=recipe, folder=Path(folder) / "run", progress=False)
        assert (Path(folder) / "run" / "report.html").stat().st_size > 10_000
        again = sc.load(model, result.save(Path(folder) / "small.safetensors")).module.eval()
    inputs, _ = sets[2][0]
    torch.testing.assert_close(again(inputs), result.model.eval()(inputs))
    assert result.macs.removed > 0.1, str(result)
    print(f"{result}\nThe wheel works; checked in {time.monotonic() - began:.0f} s.")


if __name__ == "__main__":
    main()
