"""A run whose cuts are made from one survey of the network: resumed after any step it ends as one that was not interrupted."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import secateurs as sc
from nets import seeded

RECIPE = sc.Recipe.best(max_drop=0.9, confidence=0.0, round_to=1, target_macs=0.4, repair_examples=64)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 3)
    ).eval()


def loaders() -> tuple[DataLoader[tuple[torch.Tensor, ...]], DataLoader[tuple[torch.Tensor, ...]]]:
    generator = seeded(1)
    sets = []
    for count in (96, 80):
        inputs = torch.randn(count, 6, generator=generator)
        sets.append(DataLoader(TensorDataset(inputs, inputs[:, :3].argmax(1)), batch_size=32))
    return sets[0], sets[1]


@pytest.mark.parametrize("done", [0, 1, 2])
def test_a_resumed_run_ends_as_an_uninterrupted_one(tmp_path: Path, done: int) -> None:
    whole = sc.prune(network(), *loaders(), recipe=RECIPE, progress=False)
    assert [step.criterion for step in whole.steps] == ["obs"] * len(whole.steps)
    assert whole.macs.removed >= 0.4
    pruner = sc.Pruner(network(), *loaders(), recipe=RECIPE, folder=tmp_path / "run")
    assert len(list(islice(pruner, done))) == done
    pruner.close()
    resumed = sc.resume(tmp_path / "run", network(), *loaders())
    result = resumed.finish()
    expected = whole.model.state_dict()
    assert result.model.state_dict().keys() == expected.keys()
    for name, tensor in result.model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    assert [step.accuracy for step in result.steps] == [step.accuracy for step in whole.steps]
