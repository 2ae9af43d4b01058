"""CIFAR ResNets of He et al. (2015), section 4.2: three stages of residual blocks, 6n + 2 weighted layers.

Module names are those of the public CIFAR-10 checkpoints: conv1, bn1, layer1.0.conv1, …, layer3.2.bn2, linear.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from secateurs.errors import InvalidInput

Shortcut = Literal["A", "B"]


class PaddedShortcut(nn.Module):
    """Option A: every `stride`-th pixel, and zero channels on both sides up to `out_channels`; nothing to learn."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        if out_channels < in_channels:
            raise InvalidInput(
                f'shortcut "A" can add zero channels but not drop any: got {in_channels} channels in, '
                f'{out_channels} out. Give widths that do not shrink, or use shortcut="B".'
            )
        self.stride = stride
        self.before = (out_channels - in_channels) // 2
        self.after = out_channels - in_channels - self.before

    def forward(self, x: Tensor) -> Tensor:
        """Subsample and widen the input."""
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.before, self.after))


def conv_bn(in_channels: int, channels: int, kernel: int = 3, **options: Any) -> tuple[nn.Conv2d, nn.BatchNorm2d]:
    """A padded convolution without bias, and the BatchNorm behind it; `options` are the stride and the groups."""
    return nn.Conv2d(in_channels, channels, kernel, padding=kernel // 2, bias=False, **options), nn.BatchNorm2d(channels)


class Block(nn.Module):
    """Two 3×3 convolutions beside a shortcut, added before the last ReLU."""

    def __init__(self, in_channels: int, channels: int, stride: int, shortcut: Shortcut) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv_bn(in_channels, channels, stride=stride)
        self.conv2, self.bn2 = conv_bn(channels, channels)
        self.shortcut: nn.Module = nn.Sequential()  # empty: returns its input, and leaves no node in a traced graph
        if (stride != 1 or in_channels != channels) and shortcut == "A":
            self.shortcut = PaddedShortcut(in_channels, channels, stride)
        elif stride != 1 or in_channels != channels:
            self.shortcut = nn.Sequential(*conv_bn(in_channels, channels, 1, stride=stride))

    def forward(self, x: Tensor) -> Tensor:
        """Residual sum after its ReLU."""
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


class ResNet(nn.Module):
    """Stem, one stage of `blocks` residual blocks for each width, mean over space, linear layer: images → logits."""

    def __init__(
        self,
        blocks: int,
        *,
        shortcut: Shortcut = "A",
        widths: Sequence[int] = (16, 32, 64),
        in_channels: int = 3,
        classes: int = 10,
    ) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv_bn(in_channels, widths[0])
        self.layer1 = _stage(blocks, widths[0], widths[0], 1, shortcut)
        self.layer2 = _stage(blocks, widths[0], widths[1], 2, shortcut)
        self.layer3 = _stage(blocks, widths[1], widths[2], 2, shortcut)
        self.linear = nn.Linear(widths[2], classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, classes)."""
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        logits: Tensor = self.linear(x.mean((2, 3)))
        return logits


def _stage(blocks: int, in_channels: int, channels: int, stride: int, shortcut: Shortcut) -> nn.Sequential:
    widths = [in_channels] + [channels] * blocks
    strides = [stride] + [1] * (blocks - 1)
    return nn.Sequential(
        *(Block(wide, out, step, shortcut) for (wide, out), step in zip(pairwise(widths), strides, strict=True))
    )


def resnet(
    depth: int,
    *,
    shortcut: Shortcut = "A",
    widths: Sequence[int] = (16, 32, 64),
    in_channels: int = 3,
    classes: int = 10,
) -> ResNet:
    """Build a CIFAR ResNet of `depth` = 6n + 2 weighted layers (8, 14, 20, …, 110), freshly initialised.

    `shortcut`: "A" subsamples and pads with zero channels, as in the paper; "B" projects with a 1×1 convolution where
    the width or the resolution changes. `widths` are the filters of the three stages. Images need 4×4 pixels or more.
    """
    if depth < 8 or (depth - 2) % 6:
        raise InvalidInput(f"no CIFAR ResNet has depth {depth}: wanted 6n + 2, such as 8, 14, 20, 32, 44, 56, 110.")
    if shortcut not in ("A", "B"):
        raise InvalidInput(f'shortcut={shortcut!r}: wanted "A" (zero-padded channels) or "B" (1×1 projections).')
    if len(widths) != 3 or min(widths) < 1:
        raise InvalidInput(f"widths={tuple(widths)}: wanted three positive numbers of filters, one for each stage.")
    return ResNet((depth - 2) // 6, shortcut=shortcut, widths=widths, in_channels=in_channels, classes=classes)


def resnet20(*, shortcut: Shortcut = "A", in_channels: int = 3, classes: int = 10) -> ResNet:
    """CIFAR ResNet-20, freshly initialised; `load_public(20)` gives it with public weights."""
    return resnet(20, shortcut=shortcut, in_channels=in_channels, classes=classes)


def resnet32(*, shortcut: Shortcut = "A", in_channels: int = 3, classes: int = 10) -> ResNet:
    """CIFAR ResNet-32, freshly initialised; `load_public(32)` gives it with public weights."""
    return resnet(32, shortcut=shortcut, in_channels=in_channels, classes=classes)


def resnet56(*, shortcut: Shortcut = "A", in_channels: int = 3, classes: int = 10) -> ResNet:
    """CIFAR ResNet-56, freshly initialised; `load_public(56)` gives it with public weights."""
    return resnet(56, shortcut=shortcut, in_channels=in_channels, classes=classes)
