"""The folder of a training: where it came from, a checkpoint after every epoch, and in the end the weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

from cyclopts import Group, Parameter, validators

from secateurs._util.decode import Malformed, checked, decode_json, read_text_file
from secateurs._util.files import write_bytes, write_text
from secateurs.cli import train as training_folder
from secateurs.cli.app import (
    Json,
    Options,
    Origin,
    TrainFlags,
    build_model,
    check_device,
    chosen_settings,
    load_data,
    options,
    origin_of,
    run_folder,
)
from secateurs.cli.progress import TrainWatcher, display
from secateurs.cli.results import interrupted
from secateurs.cli.terminal import percent, print_json, say
from secateurs.errors import RunError

if TYPE_CHECKING:
    from torch import nn

    from secateurs.cli.app import Origin
    from secateurs.config import TrainSettings
    from secateurs.data import Data
    from secateurs.models import Pedigree
    from secateurs.pruning.folder import RunFolder
    from secateurs.training import EpochRecord, TrainState


TRAINING = "training.json"
WEIGHTS = "weights"
_CHECKPOINT = "checkpoints/training"


class TrainingSetFields(TypedDict):
    """One set of examples."""

    count: int
    sha256: str


class TrainingData(TypedDict):
    """The data that a training was started with."""

    name: str
    sha256: str
    origin: dict[str, Any]
    sets: dict[str, TrainingSetFields]


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
    from secateurs.cli.app import training_sets
    from secateurs.pruning.folder import disk_errors, environment
    from secateurs.pruning.journal import PROVENANCE

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
    from secateurs._util.tensors import dump
    from secateurs.pruning.folder import RunFolder, disk_errors
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
    from secateurs.models import Pedigree, TrainingSet
    from secateurs.models.weights import scaling_fields
    from secateurs.pruning.journal import read_journal

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


_WHERE = Group("Folder", sort_key=20, validator=validators.mutually_exclusive)
_AS_USUAL = TrainFlags()


def train(
    *,
    model: str,
    data: str,
    model_option: Options = (),
    data_option: Options = (),
    weights: str | None = None,
    recipe: str | None = None,
    device: str | None = None,
    out: Annotated[Path | None, Parameter(group=_WHERE, show_default="runs/train-MODEL-DATA-N")] = None,
    name: Annotated[str | None, Parameter(group=_WHERE)] = None,
    flags: TrainFlags = _AS_USUAL,
    as_json: Json = False,
) -> None:
    """Train a network with SGD, and write its weights as safetensors.

    A checkpoint is written after every epoch: after Ctrl-C or a crash, `secateurs resume FOLDER` goes on, and ends with the
    same weights. The search set is measured after every epoch and changes nothing; the test set is not read. The file of
    weights says in its header how they were made and on which examples, so that nobody prunes by those unwarned.

    Examples:

    `secateurs train --model resnet20 --data cifar10 --recipe train-paper-resnet`

    `secateurs train --model mlp --data digits --epochs 20 --lr 0.1`

    Parameters
    ----------
    model
        A built-in network such as resnet20, or your own as package.module:function.
    data
        digits, cifar10, xor, folder:PATH, or package.module:function that returns DataLoaders.
    model_option
        name=value for the network's constructor; may be given several times.
    data_option
        name=value for the data set; may be given several times.
    weights
        Start from these weights: a file, "builtin" or "public".
    recipe
        A TOML file of settings, or the name of a shipped one (train-demo, train-2core, train-paper-resnet). The flags below
        override it.
    device
        Where to compute: cpu, cuda, mps. Without it, where the model is.
    out
        The folder for checkpoints and weights.
    name
        The folder, as a name under runs/.
    as_json
        Print one JSON document on stdout, and no progress.
    """
    settings = chosen_settings(recipe, flags.overrides())
    origin = Origin(
        model,
        data,
        options(model_option, "--model-option"),
        options(data_option, "--data-option"),
        weights,
        device,
        settings.seed,
    ).settled()
    check_device(device)
    folder = run_folder(out, name, "train", model, data)
    examples = load_data(origin)
    training_folder.create(folder, origin, settings, examples)
    _train(folder, origin, settings, examples, device=device, as_json=as_json)


def resume_training(folder: Path, *, device: str | None, as_json: bool) -> None:
    """Go on with the training in `folder`."""
    known = training_folder.read(folder)
    origin = origin_of(known["origin"], folder)
    device = device or origin.device
    check_device(device)
    settings = chosen_settings(None, known["settings"])
    _train(folder, origin, settings, load_data(origin), device=device, as_json=as_json)


def _train(folder: Path, origin: Origin, settings: TrainSettings, data: Data, *, device: str | None, as_json: bool) -> None:
    model = build_model(origin)
    with display(quiet=as_json) as shown:
        shown.line(f"Training {origin.model} on {data.name} in {folder}")
        watcher = TrainWatcher(shown, settings.epochs, f"Training {origin.model}")
        try:
            epochs = training_folder.train_in(
                folder, model, data, settings, device=device, on_step=watcher.step, on_epoch=watcher.epoch
            )
        except KeyboardInterrupt as stop:
            raise KeyboardInterrupt(interrupted(folder)) from stop
    weights = training_folder.weights_file(folder)
    last = epochs[-1].search_accuracy if epochs else None
    if as_json:
        print_json({"folder": str(folder), "state": "finished", "epochs": [vars(e) for e in epochs], "weights": str(weights)})
        return
    if last is not None:
        say(f"Accuracy on the search set: {percent(last, 2)}.")
    say(f"The weights: {weights}")
