"""Small networks, one for each topology that makes surgery hard: flattened channels, concatenation, gates, groups, splits.

Saved plans hold the paths of these classes, and those of `mlp` and `vgg`: they must not move.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secateurs.models.resnet import conv_bn


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


class DenseLayer(nn.Module):
    """BatchNorm, ReLU, 1×1, BatchNorm, ReLU, 3×3; its `growth` new channels are concatenated behind the input."""

    def __init__(self, in_channels: int, growth: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_channels)
        self.conv1, self.bn2 = conv_bn(in_channels, 2 * growth, 1)
        self.conv2 = nn.Conv2d(2 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Concatenate the input and the new channels."""
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
        """Halve channels and resolution."""
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


class FCN(nn.Module):
    """One hidden ReLU layer: (N, inputs) → logits (N, outputs).

    The paper separates XOR with lines through the origin, so the hidden layer has no bias unless asked for.
    """

    def __init__(self, inputs: int = 2, hidden: int = 10, outputs: int = 1, *, bias: bool = False) -> None:
        super().__init__()
        self.hidden = nn.Linear(inputs, hidden, bias=bias)
        self.output = nn.Linear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Logits; the paper's sigmoid belongs to the loss."""
        logits: Tensor = self.output(F.relu(self.hidden(x)))
        return logits


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
        self.expand, self.bn1 = conv_bn(in_channels, wide, 1)
        self.depthwise, self.bn2 = conv_bn(wide, wide, stride=stride, groups=wide)
        self.excite = SqueezeExcite(wide, max(wide // 4, 1))
        self.project, self.bn3 = conv_bn(wide, channels, 1)
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
        self.stem, self.stem_bn = conv_bn(in_channels, width)
        self.blocks = nn.Sequential(
            InvertedResidual(width, width, stride=1, expansion=expansion),
            InvertedResidual(width, 2 * width, stride=2, expansion=expansion),
            InvertedResidual(2 * width, 2 * width, stride=1, expansion=expansion),
            InvertedResidual(2 * width, 4 * width, stride=2, expansion=expansion),
        )
        self.head, self.head_bn = conv_bn(4 * width, 8 * width, 1)
        self.classifier = nn.Linear(8 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, classes)."""
        x = self.blocks(F.hardswish(self.stem_bn(self.stem(x))))
        x = F.hardswish(self.head_bn(self.head(x)))
        logits: Tensor = self.classifier(x.mean([2, 3]))
        return logits


class GroupedBlock(nn.Module):
    """1×1 down, grouped 3×3, 1×1 up, beside a shortcut with a projection where the shape changes."""

    def __init__(self, in_channels: int, channels: int, *, stride: int, groups: int) -> None:
        super().__init__()
        inner = channels // 2
        self.conv1, self.bn1 = conv_bn(in_channels, inner, 1)
        self.conv2, self.bn2 = conv_bn(inner, inner, stride=stride, groups=groups)
        self.conv3, self.bn3 = conv_bn(inner, channels, 1)
        self.relu = nn.ReLU()
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != channels:
            self.shortcut = nn.Sequential(*conv_bn(in_channels, channels, 1, stride=stride))

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
        self.stem, self.bn = conv_bn(in_channels, width)
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


class ChunkBlock(nn.Module):
    """Sends half of the channels through a convolution and concatenates them with the other half."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv, self.bn = conv_bn(channels // 2, channels // 2)

    def forward(self, x: Tensor) -> Tensor:
        """Keep the number of channels."""
        left, right = x.chunk(2, dim=1)
        return torch.cat([left, F.relu(self.bn(self.conv(right)))], dim=1)


class SplitBlock(nn.Module):
    """A quarter of the channels through a 1×1, the rest through a 3×3 convolution, summed."""

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        self.sizes = [in_channels // 4, in_channels - in_channels // 4]
        self.narrow = nn.Conv2d(self.sizes[0], channels, 1, bias=False)
        self.wide, self.bn = conv_bn(self.sizes[1], channels)

    def forward(self, x: Tensor) -> Tensor:
        """Sum of both parts after its BatchNorm and ReLU."""
        few, many = torch.split(x, self.sizes, dim=1)
        return F.relu(self.bn(self.narrow(few) + self.wide(many)))


class SmallSplitNet(nn.Module):
    """Stem, chunk block, pool, uneven split, chunk block, linear layer: images → logits; `width` even, 4 or more."""

    def __init__(self, *, width: int = 16, in_channels: int = 3, classes: int = 10) -> None:
        super().__init__()
        self.stem, self.stem_bn = conv_bn(in_channels, width)
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


def _double(in_channels: int, channels: int) -> nn.Sequential:
    first, second = conv_bn(in_channels, channels), conv_bn(channels, channels)
    return nn.Sequential(*first, nn.ReLU(inplace=True), *second, nn.ReLU(inplace=True))


class SmallUNet(nn.Module):
    """Three resolutions: (N, in_channels, H, W) → logits of each pixel (N, classes, H, W); H and W multiples of 4."""

    def __init__(self, *, width: int = 8, in_channels: int = 3, classes: int = 2) -> None:
        super().__init__()
        self.down1 = _double(in_channels, width)
        self.down2 = _double(width, 2 * width)
        self.bottom = _double(2 * width, 4 * width)
        self.pool = nn.MaxPool2d(2)
        self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.merge2 = _double(4 * width, 2 * width)
        self.up1 = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.merge1 = _double(2 * width, width)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of each pixel."""
        fine = self.down1(x)
        coarse = self.down2(self.pool(fine))
        x = self.bottom(self.pool(coarse))
        x = self.merge2(torch.cat([self.up2(x), coarse], dim=1))
        x = self.merge1(torch.cat([self.up1(x), fine], dim=1))
        logits: Tensor = self.head(x)
        return logits
