"""Small runs for tests and torture: some digits, a perceptron and a residual network, and what two equal runs share."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from secateurs.data import Data, load
from secateurs.data.splits import subset
from secateurs.models import build

from .journals import entries_of


@cache
def few_digits(train: int, others: int = 96) -> Data:
    """Stratified subsets of the digits: `train` examples to train on, `others` each to validate and to test on."""
    whole = load("digits")
    sizes = ((whole.train, train), (whole.search, others), (whole.test, others))
    return Data("digits", *(subset(part, size, seed=0) for part, size in sizes), classes=whole.classes)


def perceptron(hidden: tuple[int, ...] = (12, 10), seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return build("mlp", hidden=hidden)


class ResidualNet(nn.Module):
    """A residual block of `middle` channels with BatchNorm, between a convolution and a linear layer, for images of digits."""

    def __init__(self, middle: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 6, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(6)
        self.conv1, self.norm1 = nn.Conv2d(6, middle, 3, padding=1, bias=False), nn.BatchNorm2d(middle)
        self.conv2, self.norm2 = nn.Conv2d(middle, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.out = nn.Linear(6, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(x)))
        y = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        logits: Tensor = self.out(torch.relu(x + y).mean((2, 3)))
        return logits


def without_times(folder: Path) -> list[dict[str, Any]]:
    """The entries of a run's journal without what was measured by a clock."""
    times = ("seconds", "training_seconds", "phases", "latency", "speeds", "layer_times")
    return [{k: v for k, v in entry.items() if k not in times} for entry in entries_of(folder)]


def differing_file(one: Path, other: Path) -> str | None:
    """The first of the plan and the pruned network that two runs did not write alike, or that the other lacks."""
    for name in ("plan.json", "pruned.safetensors"):
        if not (other / name).exists() or (one / name).read_bytes() != (other / name).read_bytes():
            return name
    return None
