"""VGG-16 with BatchNorm for CIFAR: one straight chain of 13 convolutions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

# Width of each convolution in units of the first; "M" halves the resolution.
_VGG16 = (1, 1, "M", 2, 2, "M", 4, 4, 4, "M", 8, 8, 8, "M", 8, 8, 8, "M")


class VGG16(nn.Module):
    """13 convolutions of `width` to 8·`width` filters with BatchNorm and ReLU, and one linear layer: images → logits.

    Convolutions have biases beside their BatchNorm, as in the public VGG networks. Images need 32×32 pixels or more.
    """

    def __init__(self, *, width: int = 64, in_channels: int = 3, classes: int = 10) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for item in _VGG16:
            if isinstance(item, str):
                layers.append(nn.MaxPool2d(2))
                continue
            channels = item * width
            layers += [nn.Conv2d(in_channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
            in_channels = channels
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(in_channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, classes)."""
        logits: Tensor = self.classifier(torch.flatten(self.pool(self.features(x)), 1))
        return logits
