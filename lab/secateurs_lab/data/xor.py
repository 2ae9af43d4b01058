"""The paper's XOR points."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from secateurs.data.dataset import Examples, generator_for
from secateurs.data.splits import Data, split
from secateurs.errors import InvalidInput


@dataclass(frozen=True, eq=False)
class XorPoints:
    """One draw of the paper's XOR set: points labelled by the sign of the product of two orthogonal projections."""

    points: Tensor  # (N, 2), standard normal
    signs: Tensor  # (N,), +1 or -1: sign((a·x)(b·x))
    a: Tensor  # (2,), unit vector
    b: Tensor  # (2,), unit vector orthogonal to a


def sample_xor(count: int, generator: torch.Generator, *, dtype: torch.dtype = torch.float32) -> XorPoints:
    """Draw the orthonormal pair a, b uniformly, and `count` labelled points."""
    if count < 1:
        raise InvalidInput(f"XOR set of {count} points: wanted at least 1.")
    angle = 2 * math.pi * float(torch.rand((), generator=generator, dtype=torch.float64))
    handedness = 1 - 2 * int(torch.randint(2, (), generator=generator))
    a = torch.tensor([math.cos(angle), math.sin(angle)], dtype=dtype)
    b = handedness * torch.tensor([-math.sin(angle), math.cos(angle)], dtype=dtype)
    points = torch.randn(count, 2, generator=generator, dtype=dtype)
    # a point exactly on an axis has no sign in the paper; it counts as positive here
    signs = torch.where((points @ a) * (points @ b) >= 0, 1, -1)
    return XorPoints(points, signs, a, b)


def load_xor(train: int = 1000, search: int = 500, test: int = 1000, *, seed: int = 0) -> Data:
    """Draw an XOR set as two classes: class 1 where the paper's label is +1, class 0 where it is -1."""
    drawn = sample_xor(train + search + test, generator_for(seed, "xor"))
    fit, validation, held_out = split(Examples(drawn.points, (drawn.signs > 0).long()), (train, search, test), seed=seed)
    origin = {"seed": seed, "train": train, "search": search, "test": test}
    return Data("xor", fit, validation, held_out, classes=("-1", "+1"), origin=origin)
