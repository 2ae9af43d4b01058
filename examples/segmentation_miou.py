"""Prune a small U-Net within an allowed loss of mean IoU, a metric of the whole validation set.

Handwritten digits of 8 × 8 pixels are covered with noise. The network labels every pixel as background, stroke of
an even digit, or stroke of an odd digit. Run it: `python examples/segmentation_miou.py`, in less than a minute on one core.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import secateurs as sc
from secateurs.data import load

CLASSES = 3


def block(inputs: int, outputs: int) -> nn.Sequential:
    """A convolution with BatchNorm and ReLU."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())


class UNet(nn.Module):
    """Features at half the resolution, brought back by a transposed convolution and concatenated with those at the full one."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.enter = block(1, width)
        self.down = nn.Sequential(nn.MaxPool2d(2), block(width, 2 * width), block(2 * width, 2 * width))
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.leave = nn.Sequential(block(2 * width, width), nn.Conv2d(width, CLASSES, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, 3, H, W) of every pixel of (N, 1, H, W)."""
        fine = self.enter(x)
        return self.leave(torch.cat([fine, self.up(self.down(fine))], dim=1))


def build() -> nn.Module:
    """The network, untrained."""
    return UNet()


def loaders() -> list[DataLoader[Any]]:
    """Pictures and masks for training, validation and test."""
    digits = load("digits")
    generator = torch.Generator().manual_seed(0)
    found = []
    for part in (digits.train, digits.search, digits.test):
        images, labels = part.batch(slice(None))
        stroke = images[:, 0] > images.mean()
        masks = torch.where(stroke, 1 + labels[:, None, None] % 2, 0)
        noisy = images + 0.3 * images.std() * torch.randn(images.shape, generator=generator)
        found.append(DataLoader(TensorDataset(noisy, masks), batch_size=64))
    return found


def trained(model: nn.Module, train: DataLoader[Any], epochs: int = 8) -> nn.Module:
    """Train the network in place."""
    torch.manual_seed(0)
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, max_lr=0.01, total_steps=epochs * len(train))
    model.train()
    for _ in range(epochs):
        for images, masks in train:
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(images), masks).backward()
            optimiser.step()
            schedule.step()
    return model.eval()


def mean_iou(model: nn.Module, loader: DataLoader[Any]) -> float:
    """Intersection over union of each class over the whole set, averaged over the classes."""
    both, either = torch.zeros(CLASSES), torch.zeros(CLASSES)
    with torch.no_grad():
        for images, masks in loader:
            answers = model(images).argmax(1)
            for k in range(CLASSES):
                both[k] += ((answers == k) & (masks == k)).sum()
                either[k] += ((answers == k) | (masks == k)).sum()
    return float((both / either).mean())


def main() -> sc.Result:
    """Train, prune, and compare on the test set."""
    train, val, test = loaders()
    model = trained(build(), train)

    def validation_iou(network: nn.Module) -> float:
        return mean_iou(network, val)

    result = sc.prune(model, train, val, evaluate=validation_iou, max_drop=0.02)
    print(result)
    print(f"Mean IoU on the test set: {mean_iou(model, test):.3f} → {mean_iou(result.model, test):.3f}")
    return result


if __name__ == "__main__":
    main()
