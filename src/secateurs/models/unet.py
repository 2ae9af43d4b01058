"""U-Net-like: down by pooling, up by transposed convolutions, with the finer features concatenated at each level."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def _double(in_channels: int, channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(inplace=True),
        nn.Conv2d(channels, channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(inplace=True),
    )


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
