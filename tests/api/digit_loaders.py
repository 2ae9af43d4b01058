"""A small trained network, loaders of digits, a recipe that takes a second, and a training loop: what a user would bring."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import secateurs as sc
from secateurs.data import Examples, load_digits
from secateurs.training import train_

RECIPE = sc.Recipe.best(max_drop=0.05, engine="none", criterion="l1", repair="least-squares", repair_examples=128)
QUICK: dict[str, Any] = {"recipe": RECIPE, "progress": False}
ONE_CUT: dict[str, Any] = {"recipe": sc.Recipe.fast(max_drop=0.05, criterion="l1", sites=("0",)), "progress": False}


@cache
def digits() -> tuple[Examples, Examples, Examples]:
    data = load_digits(search=400, test=400)
    return data.train.ready(), data.search.ready(), data.test_set.ready()


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU()),
        *(nn.Conv2d(12, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 10)),
    )


@cache
def weights() -> dict[str, Tensor]:
    model = build()
    train_(model, digits()[0], sc.TrainSettings(epochs=6, lr=0.1, batch=64))
    return model.state_dict()


def trained() -> nn.Module:
    model = build()
    model.load_state_dict(weights())
    return model


def loader(examples: Examples, *, shuffle: bool = False) -> DataLoader[Any]:
    return DataLoader(TensorDataset(examples.inputs, examples.targets), batch_size=64, shuffle=shuffle)


def right(model: nn.Module, examples: Examples) -> float:
    """Accuracy by hand."""
    with torch.no_grad():
        return float((model.eval()(examples.inputs).argmax(1) == examples.targets).double().mean())


def loaders() -> tuple[DataLoader[Any], DataLoader[Any]]:
    return loader(digits()[0], shuffle=True), loader(digits()[1])


@cache
def pruned() -> sc.Result:
    """The network after the quick recipe, for tests that compare with it and change nothing."""
    return sc.prune(trained(), *loaders(), **QUICK)


def my_training(model: nn.Module) -> None:
    """One epoch of AdamW."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.train()
    for inputs, targets in loader(digits()[0]):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimiser.step()
