"""Table 2 as the paper prints it, in the same records as our own runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TableLayer:
    """A convolution, and what it has lost. The paper counts weights and their multiply-accumulates, nothing else."""

    name: str
    filters: int
    removed: int  # filters
    weights: int  # before
    macs: int  # before, for one image
    share: float  # of the weights, and so of the MACs, that is gone: a fraction


@dataclass(frozen=True)
class Column:
    """One variant: its convolutions in network order, and the shares of the whole network that are gone."""

    layers: tuple[TableLayer, ...]
    parameters: float  # fraction of `weights`
    macs: float
    weights: int  # of the whole network before: convolutions and the last linear layer

    @property
    def removed(self) -> int:
        """Filters, of all layers."""
        return sum(layer.removed for layer in self.layers)


LAYERS = ("conv1", *(f"layer{stage}.{block}.conv{place}" for stage in (1, 2, 3) for block in (0, 1, 2) for place in (1, 2)))
FILTERS = (16,) * 7 + (32,) * 6 + (64,) * 6
WEIGHTS = (432, *(2_304,) * 6, 4_608, *(9_216,) * 5, 18_432, *(36_864,) * 5)
MACS = (442_368, *(2_359_296,) * 6, 1_179_648, *(2_359_296,) * 5, 1_179_648, *(2_359_296,) * 5)
LINEAR = 640

# filters removed from each layer, and the percentage of its parameters, which is also that of its FLOPs
_REMOVED = {
    "BF": (1, 6, 4, 7, 6, 0, 0, 5, 1, 14, 20, 0, 2, 0, 4, 34, 30, 0, 24),
    "BB": (0, 1, 0, 1, 0, 0, 0, 0, 0, 7, 9, 1, 6, 16, 6, 16, 23, 21, 23),
    "AF": (2, 6, 3, 6, 1, 1, 0, 6, 4, 6, 0, 20, 0, 9, 7, 26, 5, 0, 21),
    "AB": (0, 9, 0, 8, 0, 0, 0, 2, 0, 13, 0, 0, 0, 19, 0, 18, 1, 16, 27),
}
_PERCENT = {
    "BF": "6.25 41.41 53.12 43.75 64.84 0.00 0.00 15.62 18.26 43.75 78.91 0.00 6.25 0.00 6.25 53.12 75.10 0.00 37.50",
    "BB": "0.00 6.25 6.25 6.25 6.25 0.00 0.00 0.00 0.00 21.88 43.85 3.12 21.29 25.00 32.03 25.00 51.95 32.81 56.96",
    "AF": "12.50 45.31 49.22 49.22 41.41 12.11 6.25 18.75 28.91 28.91 18.75 62.50 62.50 14.06 23.46 47.12 45.26 7.81 32.81",
    "AB": "0.00 56.25 56.25 50.00 50.00 0.00 0.00 6.25 6.25 40.62 40.62 0.00 0.00 29.69 29.69 28.12 29.25 26.17 56.64",
}
_TOTALS = {"BF": (30.70, 30.91), "BB": (32.33, 18.99), "AF": (31.55, 33.76), "AB": (30.41, 28.38)}
PRINTED_SUMS = {"BF": 187, "BB": 130, "AF": 123, "AB": 113}
"""The paper's last line; its column BF adds up to 158."""


def _column(variant: str) -> Column:
    shares = tuple(float(text) / 100 for text in _PERCENT[variant].split())
    rows = zip(LAYERS, FILTERS, _REMOVED[variant], WEIGHTS, MACS, shares, strict=True)
    parameters, macs = _TOTALS[variant]
    return Column(tuple(TableLayer(*row) for row in rows), parameters / 100, macs / 100, sum(WEIGHTS) + LINEAR)


PAPER = {variant: _column(variant) for variant in _REMOVED}
"""The paper's four columns: mask before (B) or after (A) the shortcut, forward (F) or backward (B)."""
