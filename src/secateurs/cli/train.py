"""`secateurs train`: trains a network; stopped at any moment, it goes on from its last whole epoch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter, validators

from secateurs.cli import training_folder
from secateurs.cli.flags import Json, Options, TrainFlags, options
from secateurs.cli.inputs import Origin, build_model, check_device, load_data, origin_of, run_folder
from secateurs.cli.progress import TrainWatcher, display
from secateurs.cli.recipes import chosen_settings
from secateurs.cli.results import interrupted
from secateurs.cli.terminal import percent, print_json, say

if TYPE_CHECKING:
    from secateurs.data import Data
    from secateurs.training import TrainSettings

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
