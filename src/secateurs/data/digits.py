"""1,797 real handwritten digits of 8×8 pixels, shipped with the package (attribution: files/LICENCE-digits.txt)."""

from __future__ import annotations

import gzip
import io
from importlib import resources

import numpy as np
import torch

from secateurs.data.dataset import Examples, Scaling
from secateurs.data.splits import Data, split
from secateurs.errors import InvalidInput

COUNT = 1797
SCALING = Scaling(full=16.0, mean=(0.305,), std=(0.376,))  # mean and deviation of all pixels, to three digits


def load_digits(search: int = 300, test: int = 300, *, seed: int = 0) -> Data:
    """The digits as (N, 1, 8, 8) images of ten classes; what `search` and `test` leave is for training."""
    train = COUNT - search - test
    if min(train, search, test) < 1:
        raise InvalidInput(f"digits with search={search}, test={test}: wanted at least 1 each, and fewer than {COUNT} in all")
    fit, choose, report = split(_read(), (train, search, test), seed=seed)
    classes = tuple(str(digit) for digit in range(10))
    return Data("digits", fit, choose, report, classes=classes, origin={"seed": seed, "search": search, "test": test})


def _read() -> Examples:
    packed = resources.files("secateurs.data").joinpath("files", "digits.csv.gz").read_bytes()
    rows = np.loadtxt(io.BytesIO(gzip.decompress(packed)), delimiter=",").astype(np.uint8)
    table = torch.from_numpy(rows)
    return Examples(table[:, :-1].reshape(COUNT, 1, 8, 8), table[:, -1].long(), SCALING)
