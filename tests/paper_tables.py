"""Table 2 of the paper, typed from its page: filters removed and percentages by layer, and the totals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Column:
    """One column of Table 2: filters removed by layer, percent of weights (= of FLOPs) removed by layer, and in total."""

    shortcut: Literal["before", "after"]
    removed: tuple[int, ...]
    percent: str
    totals: tuple[str, str]  # parameters, FLOPs


TABLE_2 = {
    "BF": Column(
        "before",
        (1, 6, 4, 7, 6, 0, 0, 5, 1, 14, 20, 0, 2, 0, 4, 34, 30, 0, 24),
        "6.25 41.41 53.12 43.75 64.84 0.00 0.00 15.62 18.26 43.75 78.91 0.00 6.25 0.00 6.25 53.12 75.10 0.00 37.50",
        ("30.70", "30.91"),
    ),
    "BB": Column(
        "before",
        (0, 1, 0, 1, 0, 0, 0, 0, 0, 7, 9, 1, 6, 16, 6, 16, 23, 21, 23),
        "0.00 6.25 6.25 6.25 6.25 0.00 0.00 0.00 0.00 21.88 43.85 3.12 21.29 25.00 32.03 25.00 51.95 32.81 56.96",
        ("32.33", "18.99"),
    ),
    "AF": Column(
        "after",
        (2, 6, 3, 6, 1, 1, 0, 6, 4, 6, 0, 20, 0, 9, 7, 26, 5, 0, 21),
        "12.50 45.31 49.22 49.22 41.41 12.11 6.25 18.75 28.91 28.91 18.75 62.50 62.50 14.06 23.46 47.12 45.26 7.81 32.81",
        ("31.55", "33.76"),
    ),
    "AB": Column(
        "after",
        (0, 9, 0, 8, 0, 0, 0, 2, 0, 13, 0, 0, 0, 19, 0, 18, 1, 16, 27),
        "0.00 56.25 56.25 50.00 50.00 0.00 0.00 6.25 6.25 40.62 40.62 0.00 0.00 29.69 29.69 28.12 29.25 26.17 56.64",
        ("30.41", "28.38"),
    ),
}
LAYERS = ["conv1", *(f"layer{s}.{b}.conv{c}" for s in (1, 2, 3) for b in (0, 1, 2) for c in (1, 2))]
