"""The data set that needs no download: handwritten digits shipped with the package."""

from __future__ import annotations

import gzip
import io
from importlib import resources

import numpy as np
import torch

from secateurs.data.dataset import Examples, Scaling
from secateurs.data.splits import Data, split
from secateurs.errors import InvalidInput

_DIGITS = 1797
_DIGITS_SCALING = Scaling(full=16.0, mean=(0.305,), std=(0.376,))  # mean and deviation of all pixels, to three digits


def load_digits(search: int = 300, test: int = 300, *, seed: int = 0) -> Data:
    """Load 1,797 digits as (N, 1, 8, 8) images of ten classes; those not in `search` and `test` are for training.

    Their attribution is in files/LICENCE-digits.txt.
    """
    train = _DIGITS - search - test
    if min(train, search, test) < 1:
        raise InvalidInput(
            f"digits with search={search}, test={test}: wanted at least 1 each, and fewer than {_DIGITS} in all."
        )
    packed = resources.files("secateurs.data").joinpath("files", "digits.csv.gz").read_bytes()
    rows = torch.from_numpy(np.loadtxt(io.BytesIO(gzip.decompress(packed)), delimiter=",").astype(np.uint8))
    digits = Examples(rows[:, :-1].reshape(_DIGITS, 1, 8, 8), rows[:, -1].long(), _DIGITS_SCALING)
    fit, validation, held_out = split(digits, (train, search, test), seed=seed)
    classes = tuple(str(digit) for digit in range(10))
    return Data("digits", fit, validation, held_out, classes=classes, origin={"seed": seed, "search": search, "test": test})
