"""1-d CNN: convolutions over time, and a flatten that spreads each channel over several inputs of the linear layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CNN1d(nn.Module):
    """Two convolutions, then linear layers over channel × time: (N, in_channels, length) → logits; 4 divides length."""

    def __init__(self, *, in_channels: int = 1, width: int = 16, length: int = 64, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(in_channels, width, 7, stride=2, padding=3)
        self.bn1 = nn.BatchNorm1d(width)
        self.conv2 = nn.Conv1d(width, 2 * width, 3, dilation=2, padding=2)
        self.bn2 = nn.BatchNorm1d(2 * width)
        self.hidden = nn.Linear(2 * width * (length // 4), 2 * width)
        self.output = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, classes)."""
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.max_pool1d(F.relu(self.bn2(self.conv2(x))), 2)
        logits: Tensor = self.output(F.relu(self.hidden(torch.flatten(x, 1))))
        return logits
