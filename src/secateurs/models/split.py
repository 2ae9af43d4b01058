"""Split: channels are divided, treated differently and joined again, in equal chunks and in uneven parts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ChunkBlock(nn.Module):
    """One half of the channels passes by, the other through a convolution; then they are concatenated."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels // 2, channels // 2, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(channels // 2)

    def forward(self, x: Tensor) -> Tensor:
        """As many channels as came in."""
        left, right = x.chunk(2, dim=1)
        return torch.cat([left, F.relu(self.bn(self.conv(right)))], dim=1)


class SplitBlock(nn.Module):
    """A quarter of the channels through a 1×1, the rest through a 3×3 convolution, summed."""

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        self.sizes = [in_channels // 4, in_channels - in_channels // 4]
        self.narrow = nn.Conv2d(self.sizes[0], channels, 1, bias=False)
        self.wide = nn.Conv2d(self.sizes[1], channels, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        """The sum of both parts after its BatchNorm and ReLU."""
        few, many = torch.split(x, self.sizes, dim=1)
        return F.relu(self.bn(self.narrow(few) + self.wide(many)))


class SmallSplitNet(nn.Module):
    """Stem, chunk block, pool, uneven split, chunk block, linear layer: images → logits; `width` even, 4 or more."""

    def __init__(self, *, width: int = 16, in_channels: int = 3, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(in_channels, width, 3, padding=1, bias=False)
        self.stem_bn = nn.BatchNorm2d(width)
        self.chunk1 = ChunkBlock(width)
        self.split = SplitBlock(width, 2 * width)
        self.chunk2 = ChunkBlock(2 * width)
        self.classifier = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, classes)."""
        x = self.chunk1(self.stem_bn(self.stem(x)).relu())
        x = self.chunk2(self.split(F.max_pool2d(x, 2)))
        logits: Tensor = self.classifier(x.mean((2, 3)))
        return logits
