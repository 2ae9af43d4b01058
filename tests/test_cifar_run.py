"""The public ResNet-20 on the real CIFAR-10, pruned in its last block by the recipe for 2 cores, which trains for less here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from secateurs import load, prune, read_recipe
from secateurs.data import load as load_data
from secateurs.metrics import accuracy
from secateurs.models import build, load_public

RECIPE = Path(__file__).parent.parent / "recipes" / "2core.toml"


@pytest.mark.realdata
def test_the_last_block_of_resnet20_stays_within_its_budget(tmp_path: Path) -> None:
    data = load_data("cifar10", split="public")
    recipe = read_recipe(RECIPE)
    assert recipe.retrain is not None
    recipe = replace(recipe, sites=("layer3.2.*",), retrain=replace(recipe.retrain, epochs=1))
    outcome = prune(load_public(20), data, recipe, folder=tmp_path / "run").finish()
    assert outcome.search_before.accuracy == pytest.approx(0.9182, abs=2e-4)  # 91.73 % over both halves
    assert outcome.search_before.accuracy - outcome.search_after.accuracy <= recipe.max_drop + 1e-9
    assert outcome.cost_after.parameters < outcome.cost_before.parameters
    again = load(build("resnet20"), tmp_path / "run" / "pruned.safetensors")
    assert accuracy(again.module, data.test) == outcome.test_after.accuracy
