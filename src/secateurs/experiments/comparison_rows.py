"""The row that one method leaves at one target: all that tables and figures are made of, without a path of this machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import isclose
from pathlib import Path
from typing import Any

import msgspec

from secateurs.decode import brief
from secateurs.errors import RunError
from secateurs.experiments.rows import read_rows

CONVENTION = (
    "counted on the compacted network; MACs: convolutions, linear layers and matrix products for one example, 1 MAC = 2 FLOPs; "
    "parameters: all, biases and BatchNorm included; weights: of convolutions and linear layers alone, as the paper counts"
)
Key = tuple[str, str, float, int]


@dataclass(frozen=True)
class Count:
    """Of something before and after."""

    before: int
    after: int

    @property
    def removed(self) -> float:
        """The share that is gone."""
        return 1 - self.after / self.before if self.before else 0.0


@dataclass(frozen=True)
class Answers:
    """Of one set of examples: how many are right before and after, as shares and as numbers."""

    before: float
    after: float
    right_before: float  # whole numbers, unless an example has many answers (the pixels of a segmentation)
    right_after: float
    count: int


@dataclass(frozen=True)
class Row:
    """One network that one method made of the base network, under one budget."""

    model: str
    model_options: dict[str, Any]
    weights: str  # what they are called
    weights_sha256: str
    data: str
    data_sha256: str
    images: dict[str, int]  # by set
    shortcut: str
    method: str
    budget: dict[str, Any]  # every setting
    target: float  # share of the MACs that was to go
    seed: int
    macs: Count
    parameters: Count
    counted_weights: Count  # by the paper's convention
    filters: dict[str, tuple[int, int]]  # by layer, before and after
    search: Answers
    test: Answers
    images_trained: int
    rate_sum: float  # learning rate times images, added up
    passes: int  # images brought through a network to decide what goes
    search_seconds: float
    training_seconds: float
    network_sha256: str  # of the file that holds the smaller network
    note: str = ""
    convention: str = CONVENTION
    versions: dict[str, str] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)

    @property
    def budget_name(self) -> str:
        """What the budget is called."""
        return str(self.budget["name"])

    @property
    def key(self) -> Key:
        """What tells this row from the others of its comparison."""
        return self.method, self.budget_name, self.target, self.seed

    @property
    def reached(self) -> bool:
        """Whether so much is gone as was to go."""
        return self.macs.removed >= self.target - 1e-9


def row_fields(row: Row) -> dict[str, Any]:
    """The row as plain values."""
    fields: dict[str, Any] = msgspec.to_builtins(asdict(row))
    return fields


def comparison_rows(path: Path) -> list[Row]:
    """All rows of a comparison's file, in order; of those with one key, the latest."""
    rows = [_row_from(fields, f"{path}, row {number}") for number, fields in enumerate(read_rows(path), 1)]
    return list({row.key: row for row in rows}.values())


def check_comparable(rows: Sequence[Row]) -> None:
    """Refuse rows of different networks or data, and methods that were not trained alike under one budget."""
    if not rows:
        return
    for row in rows:
        check_base(row, base_of(rows[0]), "the rows")
    for name in budgets_of(rows):
        _check_budget(name, [row for row in rows if row.budget_name == name])


def base_of(row: Row) -> dict[str, str]:
    """What all rows of a comparison have in common."""
    return {name: getattr(row, name) for name in ("model", "weights_sha256", "data_sha256", "shortcut")}


def check_base(found: Row | Mapping[str, str], wanted: Mapping[str, str], where: str) -> None:
    """Refuse what was made of another network, other weights, other data or with masks elsewhere."""
    known = base_of(found) if isinstance(found, Row) else found
    for name, value in wanted.items():
        if known[name] != value:
            what = {"weights_sha256": "weights", "data_sha256": "data or split"}.get(name, name)
            raise RunError(
                f"{where}: was made with another {what} ({_short(known[name])}, now {_short(value)}): rows of one comparison "
                f"have one base. Give what it was started with, or another --out."
            )


def methods_of(rows: Iterable[Row]) -> tuple[str, ...]:
    """The methods of the rows, in the order they first came."""
    return tuple(dict.fromkeys(row.method for row in rows))


def budgets_of(rows: Iterable[Row]) -> tuple[str, ...]:
    """The names of their budgets, in the order they first came."""
    return tuple(dict.fromkeys(row.budget_name for row in rows))


def _check_budget(name: str, rows: Sequence[Row]) -> None:
    first = rows[0]
    for row in rows:
        if row.budget != first.budget:
            raise RunError(
                f"budget {name!r}: {_who(row)} had other settings than {_who(first)}: give changed budgets new names."
            )
        if row.images_trained != first.images_trained or not isclose(row.rate_sum, first.rate_sum, rel_tol=1e-6):
            raise RunError(
                f"budget {name!r}: {_who(row)} was trained on {row.images_trained:,} images (learning rates add up to "
                f"{row.rate_sum:.6g}), {_who(first)} on {first.images_trained:,} ({first.rate_sum:.6g}): a comparison wants "
                f"the same training for all. Remove the rows that are wrong; they will be made again."
            )


def _row_from(fields: dict[str, Any], where: str) -> Row:
    try:
        return msgspec.convert(fields, Row)
    except msgspec.ValidationError as error:
        raise RunError(f"{where}: is no row of a comparison ({brief(error)}). Remove it: it will be made again.") from error


def _who(row: Row) -> str:
    return f"{row.method} (target {row.target:g}, seed {row.seed})"


def _short(value: str) -> str:
    return value[:12] if len(value) == 64 else repr(value)
