"""Small networks and images that the tests of training share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from nets import seeded
from secateurs.config import TrainSettings
from secateurs.data import Examples, Scaling
from secateurs.training import learning_rate


def seeded_net(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build()


def small_net(seed: int = 0) -> nn.Module:
    """Everything that could break determinism: convolution, BatchNorm, dropout."""
    return seeded_net(
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(4 * 16, 3),
        ),
        seed,
    )


def small_images(count: int = 50, seed: int = 0) -> Examples:
    generator = seeded(seed)
    images = torch.randint(256, (count, 1, 4, 4), generator=generator, dtype=torch.uint8)
    return Examples(images, torch.randint(3, (count,), generator=generator), Scaling(255.0, (0.5,), (0.25,)))


def line(weight: float) -> nn.Linear:
    net = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.constant_(net.weight, weight)
    return net


def rates(settings: TrainSettings, per_epoch: int) -> list[float]:
    return [learning_rate(settings, step, per_epoch) for step in range(settings.epochs * per_epoch)]
