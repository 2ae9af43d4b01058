"""MobileNet-like: inverted residuals with depthwise convolutions and squeeze-and-excitation."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class SqueezeExcite(nn.Module):
    """Multiplies each channel by a gate in [0, 1] computed from the means of all of them."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.reduce = nn.Conv2d(channels, squeezed, 1)
        self.expand = nn.Conv2d(squeezed, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """The gated input."""
        gate = F.relu(self.reduce(F.adaptive_avg_pool2d(x, 1)))
        return x * F.hardsigmoid(self.expand(gate))


class InvertedResidual(nn.Module):
    """Widen by 1×1, depthwise 3×3, squeeze-and-excite, narrow by 1×1; added to the input where the shapes are equal."""

    def __init__(self, in_channels: int, channels: int, *, stride: int, expansion: int) -> None:
        super().__init__()
        wide = in_channels * expansion
        self.expand = nn.Conv2d(in_channels, wide, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(wide)
        self.depthwise = nn.Conv2d(wide, wide, 3, stride=stride, padding=1, groups=wide, bias=False)
        self.bn2 = nn.BatchNorm2d(wide)
        self.excite = SqueezeExcite(wide, max(wide // 4, 1))
        self.project = nn.Conv2d(wide, channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(channels)
        self.residual = stride == 1 and in_channels == channels

    def forward(self, x: Tensor) -> Tensor:
        """Linear bottleneck output."""
        out: Tensor = F.hardswish(self.bn1(self.expand(x)))
        out = self.excite(F.hardswish(self.bn2(self.depthwise(out))))
        out = self.bn3(self.project(out))
        return x + out if self.residual else out


class SmallMobileNet(nn.Module):
    """Stem, four inverted residuals, 1×1 head, linear layer: images → logits."""

    def __init__(self, *, width: int = 8, expansion: int = 3, in_channels: int = 3, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(in_channels, width, 3, padding=1, bias=False)
        self.stem_bn = nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(
            InvertedResidual(width, width, stride=1, expansion=expansion),
            InvertedResidual(width, 2 * width, stride=2, expansion=expansion),
            InvertedResidual(2 * width, 2 * width, stride=1, expansion=expansion),
            InvertedResidual(2 * width, 4 * width, stride=2, expansion=expansion),
        )
        self.head = nn.Conv2d(4 * width, 8 * width, 1, bias=False)
        self.head_bn = nn.BatchNorm2d(8 * width)
        self.classifier = nn.Linear(8 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, classes)."""
        x = self.blocks(F.hardswish(self.stem_bn(self.stem(x))))
        x = F.hardswish(self.head_bn(self.head(x)))
        logits: Tensor = self.classifier(x.mean([2, 3]))
        return logits
