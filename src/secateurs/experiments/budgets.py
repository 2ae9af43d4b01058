"""Budgets of training by name, scaled to the data and to the network, so that one name means as much work to everybody."""

from __future__ import annotations

from dataclasses import asdict, replace
from math import ceil
from pathlib import Path
from typing import Any

from secateurs.data.examples import Examples
from secateurs.decode import MAX_TOML_BYTES, Malformed, brief, decode_toml, read_text_file
from secateurs.errors import InvalidInput, RecipeError, suggest
from secateurs.methods import NO_TRAINING, Budget
from secateurs.recipe import settings_from
from secateurs.training import PAPER_FINETUNE, PAPER_RETRAIN, TrainSettings
from secateurs.training.schedule import steps_in_epoch

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
