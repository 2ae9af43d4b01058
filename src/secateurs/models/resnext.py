"""ResNeXt-like: bottleneck blocks whose 3×3 convolution is grouped."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class GroupedBlock(nn.Module):
    """1×1 down, grouped 3×3, 1×1 up, beside a shortcut that is projected where the shape changes."""

    def __init__(self, in_channels: int, channels: int, *, stride: int, groups: int) -> None:
        super().__init__()
        inner = channels // 2
        self.conv1 = nn.Conv2d(in_channels, inner, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride=stride, padding=1, groups=groups, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU()
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, channels, 1, stride=stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Residual sum after its ReLU."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        total: Tensor = self.relu(self.bn3(self.conv3(out)) + self.shortcut(x))
        return total


class SmallResNeXt(nn.Module):
    """Stem, four grouped blocks over two resolutions, linear layer: images → logits; `groups` divides `width`."""

    def __init__(self, *, width: int = 16, groups: int = 4, in_channels: int = 3, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(in_channels, width, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.blocks = nn.Sequential(
            GroupedBlock(width, 2 * width, stride=1, groups=groups),
            GroupedBlock(2 * width, 2 * width, stride=1, groups=groups),
            GroupedBlock(2 * width, 4 * width, stride=2, groups=groups),
            GroupedBlock(4 * width, 4 * width, stride=1, groups=groups),
        )
        self.pool = nn.AdaptiveAvgPool2d((1, 1))
        self.classifier = nn.Linear(4 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, classes)."""
        x = self.blocks(self.relu(self.bn(self.stem(x))))
        logits: Tensor = self.classifier(torch.flatten(self.pool(x), 1))
        return logits
