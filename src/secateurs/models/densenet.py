"""DenseNet-like: every layer reads the concatenation of all before it, through a BatchNorm of its own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DenseLayer(nn.Module):
    """BatchNorm, ReLU, 1×1, BatchNorm, ReLU, 3×3; its `growth` new channels are concatenated behind the input."""

    def __init__(self, in_channels: int, growth: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_channels)
        self.conv1 = nn.Conv2d(in_channels, 2 * growth, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(2 * growth)
        self.conv2 = nn.Conv2d(2 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The input and the new channels."""
        new = self.conv1(F.relu(self.bn1(x)))
        new = self.conv2(F.relu(self.bn2(new)))
        return torch.cat([x, new], dim=1)


class Transition(nn.Module):
    """Halves channels by a 1×1 convolution and resolution by average pooling."""

    def __init__(self, in_channels: int) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(in_channels)
        self.conv = nn.Conv2d(in_channels, in_channels // 2, 1, bias=False)
        self.pool = nn.AvgPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        """Half the channels at half the resolution."""
        halved: Tensor = self.pool(self.conv(F.relu(self.bn(x))))
        return halved


class SmallDenseNet(nn.Module):
    """Two dense blocks with a transition between them: images → logits."""

    def __init__(self, *, growth: int = 8, layers: int = 3, in_channels: int = 3, classes: int = 10) -> None:
        super().__init__()
        channels = 2 * growth
        self.stem = nn.Conv2d(in_channels, channels, 3, padding=1, bias=False)
        self.block1 = nn.Sequential(*(DenseLayer(channels + k * growth, growth) for k in range(layers)))
        channels += layers * growth
        self.transition = Transition(channels)
        channels //= 2
        self.block2 = nn.Sequential(*(DenseLayer(channels + k * growth, growth) for k in range(layers)))
        channels += layers * growth
        self.bn = nn.BatchNorm2d(channels)
        self.classifier = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, classes)."""
        x = self.block2(self.transition(self.block1(self.stem(x))))
        x = F.adaptive_avg_pool2d(F.relu(self.bn(x)), 1)
        logits: Tensor = self.classifier(torch.flatten(x, 1))
        return logits
