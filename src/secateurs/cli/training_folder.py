"""The folder of a training: where it came from, a checkpoint after every epoch, and in the end the weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from secateurs.decode import Malformed, checked, decode_json, read_text_file
from secateurs.errors import RunError
from secateurs.files import write_bytes, write_text

if TYPE_CHECKING:
    from torch import nn

    from secateurs.cli.inputs import Origin
    from secateurs.data import Data
    from secateurs.models import Pedigree
    from secateurs.record import RunFolder
    from secateurs.training import EpochRecord, TrainSettings, TrainState

TRAINING = "training.json"
WEIGHTS = "weights"
_CHECKPOINT = "checkpoints/training"


class SetOrigin(TypedDict):
    """One set of examples."""

    count: int
    sha256: str


class TrainingData(TypedDict):
    """The data that a training was started with."""

    name: str
    sha256: str
    origin: dict[str, Any]
    sets: dict[str, SetOrigin]


class Training(TypedDict):
    """What training.json holds."""

    origin: dict[str, Any]
    settings: dict[str, Any]
    data: TrainingData
    trained_on: list[dict[str, Any]]
    versions: dict[str, str]
    started: str


def is_training(path: Path) -> bool:
    """Whether the folder holds a training."""
    return (path / TRAINING).is_file()


def create(path: Path, origin: Origin, settings: TrainSettings, data: Data) -> None:
    """Start a training in `path`, which must not hold one, nor a run."""
    from secateurs.cli.inputs import training_sets
    from secateurs.journal import PROVENANCE
    from secateurs.record import disk_errors, environment

    if is_training(path) or (path / PROVENANCE).exists():
        raise RunError(
            f"{path}: holds a training or a run already. Go on with it (secateurs resume {path}), or choose another."
        )
    known = {
        "origin": origin.record(),
        "settings": asdict(settings),
        "data": data.record(),
        "trained_on": [asdict(trained) for trained in training_sets(origin)],  # by the weights that it begins with
        **environment(),
    }
    with disk_errors(path):
        path.mkdir(parents=True, exist_ok=True)
        write_text(path / TRAINING, json.dumps(known, indent=1) + "\n")


def read(path: Path) -> dict[str, Any]:
    """What was recorded when the training was started."""
    try:
        found: dict[str, Any] = decode_json(read_text_file(path / TRAINING), dict[str, Any])
        checked(found, Training)
    except OSError as error:
        raise RunError(f"{path / TRAINING}: cannot be read ({error.strerror}).") from error
    except Malformed as error:
        raise RunError(f"{path / TRAINING}: damaged ({error}). Restore it from a copy, or start a new training.") from error
    return found


def train_in(
    path: Path,
    model: nn.Module,
    data: Data,
    settings: TrainSettings,
    *,
    device: str | None,
    on_step: Callable[[int, int], None],
    on_epoch: Callable[[EpochRecord], None],
) -> list[EpochRecord]:
    """Train `model` to the end, from the last checkpoint if there is one; leaves the weights, and gives all epochs."""
    from secateurs.record import RunFolder, disk_errors
    from secateurs.tensorfile import dump
    from secateurs.training import train_

    if data.digest() != read(path)["data"]["sha256"]:
        raise RunError(f"{path}: was started on other data: contents or split have changed. Start a new training.")
    with RunFolder(path) as folder:
        state = _state(folder)

        def keep(now: TrainState) -> None:
            folder.save_tensors(_CHECKPOINT, now.tensors, now.meta)
            _note(folder, now)

        if state is not None:
            _note(folder, state)  # the line of its last epoch may have been lost
        history = train_(
            model,
            data.train,
            settings,
            search=data.search,
            device=device,
            resume=state,
            save=keep,
            on_step=on_step,
            on_epoch=on_epoch,
        )
        with disk_errors(path):
            write_bytes(weights_file(path), dump(model.state_dict(), pedigree(path, data).header()))
        return list(history.epochs)


def weights_file(path: Path) -> Path:
    """Where the trained weights are."""
    return path / f"{WEIGHTS}.safetensors"


def pedigree(path: Path, data: Data) -> Pedigree:
    """What the header of the trained weights says, from what the folder says and the data it was trained on."""
    from secateurs.data import SETS
    from secateurs.journal import read_journal
    from secateurs.models import Pedigree, TrainingSet
    from secateurs.models.pedigree import scaling_fields

    known = read(path)
    origin, found = known["origin"], known["data"]
    epochs = [entry for entry in read_journal(path) if entry["unit"] == "epoch"]
    # our own sets say what makes their split again, defaults and all; of others only what was given is known
    options = found["origin"] if origin["data"] in SETS else origin["data_options"]
    trained = TrainingSet(origin["data"], options, found["sets"]["train"]["count"], found["sets"]["train"]["sha256"])
    earlier: list[TrainingSet] = checked(known["trained_on"], list[TrainingSet])
    return Pedigree(
        model=origin["model"],
        model_options=origin["model_options"],
        recipe=known["settings"],
        seed=known["settings"]["seed"],
        epochs=len(epochs),
        trained_on=(*(other for other in earlier if other != trained), trained),
        sets={name: entry["count"] for name, entry in found["sets"].items()},
        data_sha256=found["sha256"],
        scaling=scaling_fields(data.train),
        versions=known["versions"],
        search_accuracy=epochs[-1]["search_accuracy"] if epochs else None,
    )


def _state(folder: RunFolder) -> TrainState | None:
    from secateurs.training import TrainState
    from secateurs.training.state import StateMeta

    found = folder.load_tensors(_CHECKPOINT, StateMeta)
    return None if found is None else TrainState(*found)


def _note(folder: RunFolder, state: TrainState) -> None:
    known = len(folder.units("epoch"))
    for record in state.meta["epochs"][known:]:
        folder.append("epoch", **record)
