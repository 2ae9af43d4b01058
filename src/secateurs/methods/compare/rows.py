"""Rows of results: JSON lines, appended one by one as runs end, from which all tables and figures are made."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import ceil, isclose
from pathlib import Path
from typing import Any

import msgspec

from secateurs._util.decode import MAX_TOML_BYTES, Malformed, brief, decode_json, decode_toml, read_text_file
from secateurs.config import PAPER_FINETUNE, PAPER_RETRAIN, TrainSettings, settings_from
from secateurs.data.dataset import Examples
from secateurs.errors import InvalidInput, RecipeError, RunError, suggest
from secateurs.methods import NO_TRAINING, Budget
from secateurs.training.schedule import steps_in_epoch


def read_rows(path: Path, kind: Any = dict[str, Any]) -> list[dict[str, Any]]:
    """Read all rows of the file, in order, each of the type `kind`; none where there is no file.

    A last line that a killed run left unfinished is skipped.
    """
    if not path.exists():
        return []
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({error.strerror}).") from error
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(data[: data.rfind(b"\n") + 1].split(b"\n"), 1):
        if not line:
            continue
        try:
            rows.append(decode_json(line, kind))
        except Malformed as error:
            raise RunError(f"{path}, line {number}: damaged ({error}). Remove the line: its run will be done again.") from error
    return rows


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """Add one row; on return it is on the disk. Processes may share the file: a line is one write."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _drop_half_line(path)
    with path.open("ab") as file:
        file.write(json.dumps(row, sort_keys=True).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _drop_half_line(path: Path) -> None:
    content = path.read_bytes() if path.exists() else b""
    if content and not content.endswith(b"\n"):
        os.truncate(path, content.rfind(b"\n") + 1)


NAMES = ("none", "short", "2core", "paper")
SYNONYMS = {"full": "paper"}

_BETWEEN_2CORE = 1.7  # epochs: 598 steps of 128 over 45,000 images


def named_budget(name: str, examples: Examples, *, sites: int) -> Budget:
    """The budget of that name (or in that TOML file, tables `between` and `after`) on these training examples.

    "none"; "short": 1 epoch after the cuts; "2core": 1.7 epochs between the cuts and 2 after, which fits ResNet-20 on CIFAR-10
    into 25 minutes of two cores; "paper" (or "full"): 10 epochs for each of the network's `sites`, and 80 at the end. Colour
    images are cropped and flipped at random.
    """
    if name.endswith(".toml"):
        return read_budget(Path(name))
    name = SYNONYMS.get(name, name)
    if name not in NAMES:
        raise InvalidInput(f"no budget {name!r}.{suggest(name, (*NAMES, *SYNONYMS))} A file of your own ends in .toml.")
    if name == "none":
        return NO_TRAINING
    if name == "short":
        return Budget(name, after=_suited(TrainSettings(epochs=1, lr=0.01), examples))
    if name == "2core":
        between, after = _suited(PAPER_FINETUNE, examples), _suited(TrainSettings(epochs=2, lr=0.02), examples)
        return Budget(name, lasting(between, _BETWEEN_2CORE, examples), after)
    between = lasting(_suited(PAPER_FINETUNE, examples), PAPER_FINETUNE.epochs * max(sites, 1), examples)
    return Budget(name, between, _suited(PAPER_RETRAIN, examples))


def read_budget(path: Path) -> Budget:
    """The budget in a TOML file, named as the file is; `between` says its `steps`, and has a constant rate."""
    try:
        tables: dict[str, Any] = decode_toml(read_text_file(path, max_bytes=MAX_TOML_BYTES))
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read ({error.strerror}).") from error
    except Malformed as error:
        raise RecipeError(f"{path}: {error}.") from error
    unknown = [name for name in tables if name not in ("between", "after")]
    if unknown or not all(isinstance(table, dict) for table in tables.values()):
        raise RecipeError(
            f"{path}: got {brief(', '.join(map(repr, unknown or tables)))}, wanted the tables 'between' and 'after'."
        )
    between = tables.get("between")
    if between is not None:
        between = {"schedule": "constant", "epochs": between.get("steps", 1), **between}  # the steps say when it ends
    return Budget(
        path.stem,
        None if between is None else settings_from(between, where=f"{path}, between"),
        None if "after" not in tables else settings_from(tables["after"], where=f"{path}, after"),
    )


def budget_fields(budget: Budget) -> dict[str, Any]:
    """The budget as plain values, every setting in full."""
    return {
        "name": budget.name,
        "between": None if budget.between is None else _plain(budget.between),
        "after": None if budget.after is None else _plain(budget.after),
    }


def budget_words(fields: dict[str, Any]) -> str:
    """What the fields of a budget say, in a line."""
    parts = []
    if fields["between"] is not None:
        asked = fields["between"]
        parts.append(f"{asked['steps']:,} steps of {asked['batch']} between the cuts at learning rate {asked['lr']:g}")
    if fields["after"] is not None:
        asked = fields["after"]
        epochs = f"{asked['epochs']} epoch{'s' if asked['epochs'] != 1 else ''}"
        length = epochs if asked["steps"] is None else f"at most {asked['steps']:,} steps"
        parts.append(f"{length} after the cuts from learning rate {asked['lr']:g} ({asked['schedule']})")
    augment = {asked["augment"] for asked in (fields["between"], fields["after"]) if asked} - {"none"}
    tail = f"; images augmented by {' and '.join(sorted(augment))}" if augment else ""
    return ", ".join(parts) + tail if parts else "no training"


def lasting(settings: TrainSettings, epochs: float, examples: Examples) -> TrainSettings:
    """The settings for so many epochs, also fractions of one, told in steps."""
    steps = max(1, round(epochs * steps_in_epoch(len(examples), settings.batch)))
    return replace(settings, epochs=ceil(epochs), steps=steps)


def _suited(settings: TrainSettings, examples: Examples) -> TrainSettings:
    """With the paper's crops and flips where the examples are colour images, and none elsewhere: a flipped digit is another."""
    shape = examples.inputs.shape[1:]
    if len(shape) == 3 and shape[0] == 3 and min(shape[1:]) >= 8:
        return replace(settings, augment="crop-flip", pad=min(shape[1:]) // 8)
    return replace(settings, augment="none")


def _plain(settings: TrainSettings) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(settings).items()}


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
