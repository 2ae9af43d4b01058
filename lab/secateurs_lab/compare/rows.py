"""Rows of results as JSON lines, the training budgets that they name, and the check that they can be compared."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import ceil, isclose
from pathlib import Path
from typing import Annotated, Any

import msgspec

from secateurs._util.decode import MAX_TOML_BYTES, Malformed, brief, decode_json, decode_toml, read_text_file
from secateurs.config import GENTLE, PAPER_FINETUNE, PAPER_RETRAIN, TrainSettings, settings_from
from secateurs.data.dataset import Examples
from secateurs.errors import InvalidInput, RecipeError, RunError, suggest
from secateurs.training.augment import suitable_augmentation
from secateurs.training.schedule import steps_in_epoch
from secateurs_lab.methods import NO_TRAINING, Budget

# ---- files of rows ---------------------------------------------------------------------------------------------------


def read_rows(path: Path, kind: Any = dict[str, Any]) -> list[Any]:
    """Read all rows of the file, in order, each as a `kind`; none if there is no file.

    A last line that a killed run left unfinished is skipped.
    """
    if not path.exists():
        return []
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({error.strerror}).") from error
    rows: list[Any] = []
    for number, line in enumerate(data[: data.rfind(b"\n") + 1].split(b"\n"), 1):
        try:
            rows += [decode_json(line, kind)] if line else []
        except Malformed as error:
            raise RunError(
                f"{path}, line {number}: damaged ({error}). Remove the line and give the command again: it makes the row again."
            ) from error
    return rows


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """Append one row as a JSON line and sync it to disk. Processes may share the file: each has it for itself meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        content = path.read_bytes()
        if content and not content.endswith(b"\n"):  # a killed run left half a line
            file.truncate(content.rfind(b"\n") + 1)
        file.write(json.dumps(row, sort_keys=True).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


# ---- budgets of training ---------------------------------------------------------------------------------------------

NAMES = ("none", "gentle", "short", "2core", "paper")
SYNONYMS = {"full": "paper"}
AT = "@"  # between the name of a budget and a learning rate in place of its own

COMMON_RATE = 1e-2  # of "gentle", where all methods train at one rate: the best on ResNet-20 (lab/notes/training.md)
_BETWEEN_2CORE = 1.7  # epochs: 598 steps of 128 over 45,000 images


def named_budget(name: str, examples: Examples, *, sites: int) -> Budget:
    """Return the budget of that name (or in that TOML file, tables `between` and `after`) for these training examples.

    "none"; "gentle": 1 epoch after the cuts as `config.GENTLE` says, the best weights kept; "short": 1 epoch of cross-entropy
    after the cuts; "2core": 1.7 epochs between the cuts and 2 after, which fits ResNet-20 on CIFAR-10 into 25 minutes of two
    cores; "paper" (or "full"): 10 epochs for each of the network's `sites`, and 80 at the end. Colour images are cropped and
    flipped at random. "gentle@0.002" is the same budget at another learning rate, by a name of its own.
    """
    if name.endswith(".toml"):
        return _read_budget(Path(name))
    stem, at, rate = name.rpartition(AT)
    if at:
        return at_rate(named_budget(stem, examples, sites=sites), rate)
    name = SYNONYMS.get(name, name)
    if name not in NAMES:
        raise InvalidInput(f"no budget {name!r}.{suggest(name, (*NAMES, *SYNONYMS))} A file of your own ends in .toml.")
    if name == "none":
        return NO_TRAINING
    if name == "gentle":
        return Budget(name, after=_with_augmentation(replace(GENTLE, lr=COMMON_RATE), examples), keep_best=True)
    if name == "short":
        return Budget(name, after=_with_augmentation(TrainSettings(epochs=1, lr=0.01), examples))
    between = _with_augmentation(PAPER_FINETUNE, examples)
    after = TrainSettings(epochs=2, lr=0.02) if name == "2core" else PAPER_RETRAIN
    epochs = _BETWEEN_2CORE if name == "2core" else PAPER_FINETUNE.epochs * max(sites, 1)
    steps = max(1, round(epochs * steps_in_epoch(len(examples), between.batch)))
    return Budget(name, replace(between, epochs=ceil(epochs), steps=steps), _with_augmentation(after, examples))


def at_rate(budget: Budget, rate: str) -> Budget:
    """The same budget at another learning rate, which its name then says."""
    try:
        number = float(rate)
        parts = {part: replace(found, lr=number) for part in ("between", "after") if (found := getattr(budget, part))}
    except (ValueError, RecipeError) as error:
        raise InvalidInput(f"budget {budget.name}{AT}{rate}: wanted a learning rate behind {AT!r} ({error}).") from error
    if not parts:
        raise InvalidInput(f"budget {budget.name}{AT}{rate}: nothing is trained there, so it takes no learning rate.")
    return replace(budget, name=f"{budget.name}{AT}{number:g}", **parts)


def _with_augmentation(settings: TrainSettings, examples: Examples) -> TrainSettings:
    """Add the paper's crops and flips for colour images, and none for others."""
    kind, pad = suitable_augmentation(examples)
    return _of_classes(replace(settings, augment=kind, pad=pad or settings.pad))


def _of_classes(settings: TrainSettings) -> TrainSettings:
    """Comparisons are of classifiers: rows record the distance that "auto" stands for there."""
    return replace(settings, distance="kl") if settings.distance == "auto" else settings


def _read_budget(path: Path) -> Budget:
    """Read a TOML file into a budget with the file's name; `between` gives its `steps` and has a constant learning rate."""
    try:
        tables: dict[str, Any] = decode_toml(read_text_file(path, max_bytes=MAX_TOML_BYTES))
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read ({error.strerror}).") from error
    except Malformed as error:
        raise RecipeError(f"{path}: {error}.") from error
    if AT in path.stem:
        raise RecipeError(f"{path}: {AT!r} in the name of a budget stands before a learning rate. Give the file another name.")
    keep_best = tables.pop("keep_best", False)
    wrong = [name for name, table in tables.items() if name not in ("between", "after") or not isinstance(table, dict)]
    wrong += [] if isinstance(keep_best, bool) else [f"keep_best = {keep_best!r}"]
    if wrong:
        raise RecipeError(
            f"{path}: got {brief(', '.join(wrong))}, wanted the tables 'between' and 'after', and keep_best = true or false."
        )
    if "between" in tables:  # its steps decide when it ends
        tables["between"] = {"schedule": "constant", "epochs": tables["between"].get("steps", 1), **tables["between"]}
    trainings = {name: _of_classes(settings_from(table, where=f"{path}, {name}")) for name, table in tables.items()}
    return Budget(path.stem, **trainings, keep_best=keep_best)


def budget_words(budget: Budget) -> str:
    """Describe the budget in a line."""
    parts, between, after = [], budget.between, budget.after
    if between is not None:
        parts.append(f"{between.steps:,} steps of {between.batch} between the cuts at learning rate {between.lr:g}")
    if after is not None:
        epochs = f"{after.epochs} epoch{'s' if after.epochs != 1 else ''}"
        length = epochs if after.steps is None else f"at most {after.steps:,} steps"
        parts.append(f"{length} after the cuts from learning rate {after.lr:g} ({after.schedule})")
    both = [settings for settings in (between, after) if settings]
    said = [f"{s.distill:.0%} of the loss the distance to the original network" for s in both if s.distill]
    said += [f"{s.features:g} times the error of feature maps added" for s in both if s.features]
    said += [f"up to {s.mixup:.0%} of another image mixed in" for s in both if s.mixup]
    said += ["AdamW" for s in both if s.optimiser == "adamw"]
    said += [f"weights averaged with decay {s.average:g}" for s in both if s.average]
    said += [f"computed in {s.precision}" for s in both if s.precision != "float32"]
    parts += [*dict.fromkeys(said), *(["the best weights kept"] if budget.keep_best else [])]
    augment = {settings.augment for settings in both} - {"none"}
    tail = f"; images augmented by {' and '.join(sorted(augment))}" if augment else ""
    return ", ".join(parts) + tail if parts else "no training"


# ---- a row of a comparison -------------------------------------------------------------------------------------------

CONVENTION = (
    "counted on the compacted network; MACs: convolutions, linear layers and matrix products for one example, 1 MAC = 2 FLOPs; "
    "parameters: all, biases and BatchNorm included; weights: of convolutions and linear layers alone, as the paper counts"
)
Key = tuple[str, str, float, int]


@dataclass(frozen=True)
class Count:
    """A count before and after pruning."""

    before: Annotated[int, msgspec.Meta(ge=1, le=2**53)]
    after: Annotated[int, msgspec.Meta(ge=0, le=2**53)]

    @property
    def removed(self) -> float:
        """The share that was removed."""
        return 1 - self.after / self.before


@dataclass(frozen=True)
class Answers:
    """Accuracy and number of right answers on one set of examples, before and after pruning."""

    before: float
    after: float
    right_before: float  # whole numbers, unless an example has many answers (the pixels of a segmentation)
    right_after: float
    count: int


@dataclass(frozen=True)
class Base:
    """The network, weights, data and mask position that all rows of a comparison share."""

    model: str
    weights_sha256: str
    data_sha256: str
    shortcut: str
    structure_sha256: str = field(default="", kw_only=True)  # of the modules and their calls; empty in rows of earlier releases


@dataclass(frozen=True)
class Conditions:
    """What a comparison was started with: its base, and the settings of its budgets by name."""

    base: Base
    budgets: dict[str, Budget]


@dataclass(frozen=True)
class Entry:
    """What identifies a row in its comparison."""

    method: str
    budget: Budget
    target: float  # share of the MACs to remove
    seed: int

    @property
    def budget_name(self) -> str:
        """The name of the budget."""
        return self.budget.name

    @property
    def key(self) -> Key:
        """The same, with the budget by name."""
        return self.method, self.budget.name, self.target, self.seed


@dataclass(frozen=True)
class Row(Entry, Base):
    """One network that one method made of the base network, under one budget."""

    model_options: dict[str, Any]
    weights: str  # display name
    data: str
    images: dict[str, int]  # by set
    macs: Count
    parameters: Count
    counted_weights: Count  # by the paper's convention
    filters: dict[str, tuple[int, int]]  # by layer, before and after
    search: Answers
    test: Answers
    images_trained: int
    rate_sum: float  # learning rate times images, added up
    passes: int  # forward passes of one image to decide what to remove
    search_seconds: float
    training_seconds: float
    network_sha256: str  # of the file that holds the smaller network
    note: str = ""
    right_answers: str = ""  # on the test set, by `paired.packed_answers`; empty in rows of earlier releases
    int8: Answers | None = None  # on the test set, of the smaller network before and after quantising; None: not asked for
    convention: str = CONVENTION
    versions: dict[str, str] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)

    @property
    def reached(self) -> bool:
        """Whether the target share of the MACs was removed."""
        return self.macs.removed >= self.target - 1e-9


def row_fields(row: Row) -> dict[str, Any]:
    """Return the row as plain values."""
    return asdict(row)


def comparison_rows(path: Path) -> list[Row]:
    """Read the rows of a comparison, in order; of several with one key, the latest."""
    rows: list[Row] = read_rows(path, Row)
    return list({row.key: row for row in rows}.values())


def methods_of(rows: Iterable[Row]) -> tuple[str, ...]:
    """Return the methods of the rows, in order of first appearance."""
    return tuple(dict.fromkeys(row.method for row in rows))


def budgets_of(rows: Iterable[Row]) -> tuple[str, ...]:
    """Return the names of the budgets, in order of first appearance."""
    return tuple(dict.fromkeys(row.budget.name for row in rows))


# ---- what can be compared --------------------------------------------------------------------------------------------


_WORDS = {
    "weights_sha256": "weights",
    "data_sha256": "data or split",
    "structure_sha256": "code or options of the model",
}


def check_conditions(where: str | Path, base: Base, budgets: Iterable[Budget], wanted: Conditions) -> None:
    """Raise if what was found at `where` was made of another base, or with other settings under the name of a budget."""
    for name in Base.__annotations__:
        started, now = getattr(base, name), getattr(wanted.base, name)
        if name == "structure_sha256" and "" in (started, now):
            continue
        if started != now:
            what = _WORDS.get(name, name)
            raise RunError(
                f"{where}: was made with different {what} ({started:.24}, now {now:.24}), but all rows of a "
                f"comparison share one base. Give what it was started with, or another --out and --runs."
            )
    for budget in budgets:
        if _settled(wanted.budgets.get(budget.name, budget)) != _settled(budget):
            raise RunError(f"{where}: budget {budget.name!r} had other settings there. Give the changed budget another name.")
        check_rates([budget, *wanted.budgets.values()], where=f"{where}: ")


def check_rates(budgets: Iterable[Budget], *, where: str = "") -> None:
    """Raise if a budget at several rates, which a table takes for one, has other settings than the rate at one of them."""
    first: dict[str, Budget] = {}
    for budget in budgets:
        one = first.setdefault(stem_of(budget), budget)
        if _without_rate(one) != _without_rate(budget):
            raise RunError(
                f"{where}budgets {one.name!r} and {budget.name!r} differ in more than the learning rate, and would be compared "
                f"as rates of one. Give one of them another name."
            )


def stem_of(budget: Budget) -> str:
    """The name of a budget without the learning rate in it."""
    return budget.name.partition(AT)[0]


def _without_rate(budget: Budget) -> Budget:
    return _settled(budget, lr=1.0, name=stem_of(budget))


def _settled(budget: Budget, *, name: str = "", **changes: Any) -> Budget:
    """The budget with changes to its trainings, and with the distance that rows of releases without that setting had."""
    parts: dict[str, Any] = {
        part: replace(_of_classes(found), **changes) for part in ("between", "after") if (found := getattr(budget, part))
    }
    return replace(budget, name=name or budget.name, **parts)


def check_comparable(rows: Sequence[Row]) -> None:
    """Raise if rows have different networks or data, or if methods were not trained alike under one budget."""
    first = {row.budget.name: row for row in reversed(rows)}
    base = next((row for row in rows if row.structure_sha256), rows[0]) if rows else None
    check_rates({row.budget.name: row.budget for row in rows}.values())
    for row in rows:
        one = first[row.budget.name]
        check_conditions(f"the row of {_name(row)}", row, [row.budget], Conditions(base or row, {one.budget.name: one.budget}))
        if row.images_trained != one.images_trained or not isclose(row.rate_sum, one.rate_sum, rel_tol=1e-6):
            raise RunError(
                f"budget {row.budget.name!r}: {_name(row)} was trained on {row.images_trained:,} images (learning rates add up "
                f"to {row.rate_sum:.6g}), {_name(one)} on {one.images_trained:,} ({one.rate_sum:.6g}), but a comparison needs "
                f"the same training for all. Remove the wrong rows and give the command again: it makes them again."
            )


def _name(row: Row) -> str:
    return f"{row.method} (target {row.target:g}, seed {row.seed})"
