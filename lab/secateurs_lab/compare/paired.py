"""Networks on the same test examples: which answers are right, and by how much one method is ahead of another."""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from secateurs.errors import RunError
from secateurs_lab.compare.rows import Row


@dataclass(frozen=True)
class Lead:
    """How far one method is ahead of another, as a fraction of the test examples, in the mean over seeds."""

    difference: float
    error: float  # standard error over the examples; the seeds are taken as given
    only_first: int  # right answers that the other one has wrong, all seeds together
    only_second: int
    seeds: int


def packed_answers(values: Tensor | None) -> str:
    """Which examples are right, one bit each, compressed, as text; empty where an answer is not just right or wrong."""
    if values is None or not bool(((values == 0) | (values == 1)).all()):
        return ""
    return base64.b64encode(zlib.compress(np.packbits(values.bool().numpy()).tobytes(), 9)).decode()


def right_answers(row: Row) -> NDArray[np.bool_] | None:
    """Which test examples the network of a row has right, (N,); None where the row does not say."""
    if not row.right_answers:
        return None
    count = row.test.count
    try:
        data = zlib.decompressobj().decompress(base64.b64decode(row.right_answers, validate=True), math.ceil(count / 8) + 1)
    except (ValueError, zlib.error) as error:
        raise _damaged(row, str(error)) from error
    right = np.unpackbits(np.frombuffer(data, np.uint8)).astype(bool)[:count]
    if len(data) != math.ceil(count / 8) or right.sum() != row.test.right_after:
        raise _damaged(row, f"{right.sum():,} right answers, wanted {row.test.right_after:,g} of {count:,}")
    return right


def lead_of(first: Sequence[Row], second: Sequence[Row]) -> Lead | None:
    """Compare two methods on the test examples of their common seeds; None if there are none with known answers."""
    answers = [{row.seed: found for row in rows if (found := right_answers(row)) is not None} for rows in (first, second)]
    seeds = sorted(answers[0].keys() & answers[1].keys())
    if not seeds:
        return None
    one, other = (np.stack([known[seed] for seed in seeds]) for known in answers)
    apart = (one.astype(float) - other).mean(0)  # of every example
    error = float(apart.std(ddof=1)) / math.sqrt(len(apart)) if len(apart) > 1 else math.inf
    return Lead(float(apart.mean()), error, int((one & ~other).sum()), int((other & ~one).sum()), len(seeds))


def _damaged(row: Row, what: str) -> RunError:
    return RunError(
        f"the row of {row.method} (budget {row.budget.name}, target {row.target:g}, seed {row.seed}): right_answers is damaged "
        f"({what}). Remove the row and give the command again: it makes it again."
    )
