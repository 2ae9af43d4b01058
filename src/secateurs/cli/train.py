"""`secateurs train` and `secateurs data get`: what comes before pruning. A training has a folder of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

from cyclopts import App, Group, Parameter, validators

from secateurs._util.decode import Malformed, checked, decode_json, read_text_file
from secateurs._util.files import write_bytes, write_text
from secateurs._util.terminal import percent, print_json, say, warn
from secateurs.cli import inputs, trust
from secateurs.cli.progress import Status, TrainWatcher, display
from secateurs.errors import InvalidInput, RunError, suggest

if TYPE_CHECKING:
    from torch import nn

    from secateurs.config import TrainSettings
    from secateurs.data import Data
    from secateurs.models import Pedigree
    from secateurs.training import EpochRecord


TRAINING = "training.json"


class SetFields(TypedDict):
    """One set of examples."""

    count: int
    sha256: str


class TrainingData(TypedDict):
    """The data that a training was started with."""

    name: str
    sha256: str
    origin: dict[str, Any]
    sets: dict[str, SetFields]


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


def create(path: Path, origin: inputs.Origin, settings: TrainSettings, data: Data) -> None:
    """Create the folder of a training, which must not hold a training or a run."""
    from secateurs._util.folders import disk_errors
    from secateurs._util.journal import PROVENANCE
    from secateurs.pruning.folder import FORMAT, environment

    if is_training(path) or (path / PROVENANCE).exists():
        raise RunError(
            f"{path}: holds a training or a run already. Resume it (secateurs resume {path}), or choose another folder."
        )
    known = {
        "format": FORMAT,
        "origin": origin.record(),
        "settings": asdict(settings),
        "data": data.record(),
        "trained_on": [asdict(trained) for trained in inputs.training_sets(origin)],  # the weights it starts from
        **environment(),
    }
    with disk_errors(path):
        path.mkdir(parents=True, exist_ok=True)
        write_text(path / TRAINING, json.dumps(known, indent=1) + "\n")


def read(path: Path) -> dict[str, Any]:
    """What was recorded when the training was started."""
    from secateurs.pruning.folder import check_format

    try:
        found: dict[str, Any] = decode_json(read_text_file(path / TRAINING), dict[str, Any])
        checked(found, Training)
        check_format(path / TRAINING, {"format": 2, **found})  # earlier releases did not say theirs
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
    """Train `model` to the end, from the last checkpoint if there is one; write the weights and return all epochs."""
    from secateurs._util.folders import disk_errors
    from secateurs._util.journal import Journal
    from secateurs._util.tensors import dump
    from secateurs.training.resumable import train_resumably_

    if data.digest() != read(path)["data"]["sha256"]:
        raise RunError(f"{path}: was started on other data: contents or split have changed. Start a new training.")
    with Journal(path, kinds()) as journal:
        history = train_resumably_(
            journal, model, data.train, settings, search=data.search, device=device, on_step=on_step, on_epoch=on_epoch
        )
        if history.note:
            warn(f"{history.note}.")
        with disk_errors(path):
            write_bytes(weights_file(path), dump(model.state_dict(), pedigree(path, data).header()))
        return list(history.epochs)


def kinds() -> dict[str, type]:
    """The records in the journal of a training."""
    from secateurs.training import EpochRecord, RateTrials

    return {"rate": RateTrials, "epoch": EpochRecord}


def weights_file(path: Path) -> Path:
    """The file of the trained weights."""
    return path / "weights.safetensors"


def pedigree(path: Path, data: Data) -> Pedigree:
    """The header of the trained weights: how, on what and by which settings they were trained."""
    from secateurs._util.journal import read_records
    from secateurs.data import set_names
    from secateurs.models import Pedigree, TrainingSet
    from secateurs.models.weights import scaling_fields

    known = read(path)
    origin, found = known["origin"], known["data"]
    epochs = read_records(path, kinds())
    # our own sets record all options of their split, defaults included; of others only what was given is known
    options = found["origin"] if origin["data"] in set_names() else origin["data_options"]
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
        search_accuracy=epochs[-1].search_accuracy if epochs else None,
    )


_WHERE = Group("Folder", sort_key=20, validator=validators.mutually_exclusive)


def train(
    *,
    model: inputs.ModelName,
    data: inputs.DataName,
    model_option: inputs.ModelOptions = (),
    data_option: inputs.DataOptions = (),
    weights: str | None = None,
    recipe: str | None = None,
    device: inputs.Device = None,
    out: Annotated[Path | None, Parameter(group=_WHERE, show_default="runs/train-MODEL-DATA-N")] = None,
    name: Annotated[str | None, Parameter(group=_WHERE)] = None,
    flags: inputs.TrainFlags = inputs.NO_FLAGS,
    as_json: inputs.Json = False,
) -> None:
    """Train a network with SGD, and write its weights as safetensors.

    A checkpoint is written after every epoch: after Ctrl-C or a crash, `secateurs resume FOLDER` continues, and ends with the
    same weights. The validation set is measured after every epoch and decides nothing; the test set is not read. The header of
    the weights says how and on which examples they were trained, so that pruning them on those examples gives a warning.

    Examples:

    `secateurs train --model resnet20 --data cifar10 --recipe train-paper-resnet`

    `secateurs train --model resnet8 --model-option in_channels=1 --data digits --epochs 20 --lr 0.1`

    Parameters
    ----------
    weights
        Start from these weights: a file, "builtin" or "public".
    recipe
        A TOML file of settings, or the name of a shipped one (train-demo, train-2core, train-paper-resnet). The flags below
        override it.
    out
        The folder for checkpoints and weights.
    name
        The folder, as a name under runs/.
    """
    settings = inputs.chosen_settings(recipe, inputs.overrides(flags))
    if settings.distill:
        raise InvalidInput(f"distill = {settings.distill:g}: here is no teacher. Set distill = 0, and train by labels.")
    origin = inputs.named_origin(model, data, model_option, data_option, weights, device, settings.seed)
    inputs.check_device(device)
    folder = inputs.run_folder(out, name, "train", model, data)
    examples = inputs.load_data(origin)
    inputs.check_fit(inputs.build_model(origin), examples, origin)
    create(folder, origin, settings, examples)
    _train(folder, origin, settings, examples, device=device, as_json=as_json)


def resume_training(folder: Path, given: trust.Repeated, *, device: str | None, as_json: bool) -> None:
    """Resume the training in `folder`, once its chain of digests is checked."""
    from secateurs._util.journal import JOURNAL, read_records

    known = read(folder)
    if (folder / JOURNAL).exists():  # it may have been stopped before its first epoch
        read_records(folder, kinds())
    origin = trust.repeated_origin(known["origin"], folder, given)
    device = device or origin.device
    inputs.check_device(device)
    settings = inputs.chosen_settings(None, known["settings"])
    _train(folder, origin, settings, inputs.load_data(origin), device=device, as_json=as_json)


def _train(
    folder: Path, origin: inputs.Origin, settings: TrainSettings, data: Data, *, device: str | None, as_json: bool
) -> None:
    model, weights = inputs.build_model(origin), weights_file(folder)
    with display(quiet=as_json) as shown:
        shown.line(f"Training {origin.model} on {data.name} in {folder}")
        watcher = TrainWatcher(shown, settings.epochs, f"Training {origin.model}")
        try:
            epochs = train_in(folder, model, data, settings, device=device, on_step=watcher.step, on_epoch=watcher.epoch)
        except KeyboardInterrupt as stop:
            raise KeyboardInterrupt(trust.interrupted(folder)) from stop
    if as_json:
        print_json({"folder": str(folder), "state": "finished", "epochs": [vars(e) for e in epochs], "weights": str(weights)})
        return
    last = epochs[-1].search_accuracy if epochs else None
    if last is not None:
        say(f"Accuracy on the validation set: {percent(last, 2)}.")
    say(f"Weights: {weights}")


# ---- data ---------------------------------------------------------------------------------------------------------------

data_app = App(name="data", help="Get data sets.", sort_key=7)
_MEGABYTE = 1_000_000


@data_app.command
def get(name: str, *, as_json: inputs.Json = False) -> None:
    """Download a data set unless it is there, check it, and print its folder.

    Data is kept in `~/.cache/secateurs/data`, or under `$SECATEURS_HOME`. A file is used only if its checksum is right. digits
    need no download.

    Parameters
    ----------
    name
        cifar10 (170 MB), or a set of another installed package, such as the lab's mnist (12 MB).
    """
    from secateurs._util.extensions import added, lab_hint, load_added
    from secateurs.data import get_cifar10, set_names

    get_set = get_cifar10 if name == "cifar10" else load_added("downloads", name)
    if get_set is None and name in set_names():
        raise InvalidInput(f"{name} needs no download: there is nothing to get.")
    if get_set is None:
        hint = lab_hint("downloads", name) or suggest(name, ["cifar10", *added("downloads")])
        raise InvalidInput(f"no data set {name!r} to get.{hint}")
    with display(quiet=as_json) as shown:

        def show(done: int, total: int | None) -> None:
            shown.update(Status(f"Downloading {name}", "megabytes", done // _MEGABYTE, (total or done) // _MEGABYTE))

        folder = get_set(progress=show)
    if as_json:
        print_json({"name": name, "folder": str(folder)})
    else:
        say(f"{name} is in {folder}")
