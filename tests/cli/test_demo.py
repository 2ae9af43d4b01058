"""The demo keeps its promise for several seeds: half of the parameters are removed at a loss of at most a point of accuracy."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from secateurs import Pruner
from secateurs.cli import execute
from secateurs.cli import inputs as recipes
from secateurs.cli import prune as demo_command
from secateurs.cli.inputs import chosen_recipe, load_data
from secateurs.cli.prune import origin_for, trained
from secateurs.config import (
    TrainSettings,
)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_the_demo_removes_half_of_the_parameters_at_a_loss_of_at_most_a_point(seed: int) -> None:
    origin = origin_for(seed)
    data = load_data(origin)
    outcome = Pruner(trained(origin, data), data, recipe=chosen_recipe("demo", {"seed": seed})).finish()

    parameters = sum(p.numel() for p in outcome.graph.module.parameters())
    assert outcome.test.count == 500
    assert outcome.test.before > 0.95, "the network to prune is not trained"
    assert parameters <= 0.5 * outcome.cost_before.parameters, outcome.summary()
    assert outcome.test.before - outcome.test.after <= 0.01 + 1e-9, outcome.summary()


def test_the_demo_ends_with_lines_of_python_that_work(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    small = {"max_drop": 0.5, "masks_per_filter": 1, "scoring_examples": 16, "rounds": 1}
    monkeypatch.setattr(demo_command, "DEMO_OPTIONS", {"in_channels": 1, "widths": [8, 12, 16]})
    recipe = recipes.chosen_recipe
    monkeypatch.setattr(recipes, "chosen_recipe", lambda name, given: recipe("fast", {**small, **given}))
    monkeypatch.setattr(recipes, "chosen_settings", lambda name, given: TrainSettings(epochs=1, batch=256, lr=0.1, **given))
    assert execute(["demo", "--seed", "3"]) == 0
    said = capsys.readouterr().out
    assert re.search(
        r"(faster|slower).* at batch 64 in eager mode.*\n.*% of the MACs removed, accuracy .* on 500 held-out", said
    )
    lines = [line.strip() for line in said[said.index("The pruned network in Python:") :].splitlines()[1:] if line.strip()]
    assert len(lines) == 4
    names: dict[str, Any] = {}
    exec("\n".join(lines), names)
    assert names["small"](torch.zeros(2, 1, 8, 8)).shape == (2, 10)
    assert execute(["show", "runs/demo-1", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["provenance"]["origin"]["data_options"]["seed"] == 3
    assert printed["outcome"]["parameters"]["after"] == sum(p.numel() for p in names["small"].parameters())
