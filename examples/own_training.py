"""Prune with a training loop and a metric of one's own: AdamW with an average of the weights, and macro-F1.

Run it: `python examples/own_training.py`, in less than a minute on one core.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import secateurs as sc
from secateurs.data import load


def build() -> nn.Module:
    """The network, untrained."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


def loaders() -> list[DataLoader[Any]]:
    """Digits for training, validation and test."""
    digits = load("digits")
    parts = (digits.train, digits.search, digits.test)
    return [DataLoader(TensorDataset(*part.batch(slice(None))), batch_size=64) for part in parts]


def train_with_average(model: nn.Module, train: DataLoader[Any], epochs: int, lr: float) -> None:
    """Train in place with AdamW; the network ends with an exponential moving average of its weights."""
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95), use_buffers=True)
    optimiser = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    model.train()
    for _ in range(epochs):
        for inputs, targets in train:
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets, label_smoothing=0.05).backward()
            optimiser.step()
            average.update_parameters(model)
    model.load_state_dict(average.module.state_dict())


def macro_f1(model: nn.Module, loader: DataLoader[Any]) -> float:
    """F1 of each class over the whole set, averaged over the classes."""
    model.eval()
    with torch.no_grad():
        pairs = [(model(inputs).argmax(1), targets) for inputs, targets in loader]
    answers, labels = (torch.cat(part) for part in zip(*pairs, strict=True))
    right = torch.stack([((answers == k) & (labels == k)).sum() for k in range(10)])
    return float((2 * right / (answers.bincount(minlength=10) + labels.bincount(minlength=10))).mean())


def main() -> sc.Result:
    """Train, prune with the same loop, and compare on the test set."""
    torch.manual_seed(0)
    train, val, test = loaders()
    model = build()
    train_with_average(model, train, epochs=6, lr=0.01)

    def validation_f1(network: nn.Module) -> float:
        return macro_f1(network, val)

    def finetune(network: nn.Module) -> None:
        train_with_average(network, train, epochs=2, lr=0.001)

    result = sc.prune(model, train, val, evaluate=validation_f1, finetune=finetune, max_drop=0.02)
    print(result)
    print(f"Macro-F1 on the test set: {macro_f1(model, test):.3f} → {macro_f1(result.model, test):.3f}")
    return result


if __name__ == "__main__":
    main()
