"""`secateurs prune`: a network, data and a recipe in; a run folder with a smaller network out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter, validators

from secateurs.cli.inputs import (
    Json,
    Options,
    Origin,
    RecipeFlags,
    build_model,
    check_device,
    chosen_recipe,
    chosen_settings,
    fresh_model,
    load_data,
    options,
    origin_of,
    run_folder,
)
from secateurs.cli.progress import RunWatcher, TrainWatcher, display
from secateurs.cli.results import follow, holding, print_outcome, print_run_json, print_steps, step_fields
from secateurs.cli.terminal import clock, say, warn
from secateurs.cli.train import is_training, resume_training

if TYPE_CHECKING:
    from torch import nn

    from secateurs.data import Data
    from secateurs.pruning.results import Result
    from secateurs.training import EpochRecord


_WHERE = Group("Run folder", sort_key=20, validator=validators.mutually_exclusive)
_AS_USUAL = RecipeFlags()


def prune(
    *,
    model: str,
    data: str,
    model_option: Options = (),
    data_option: Options = (),
    weights: str | None = None,
    recipe: str | None = None,
    device: str | None = None,
    out: Annotated[Path | None, Parameter(group=_WHERE, show_default="runs/MODEL-DATA-N")] = None,
    name: Annotated[str | None, Parameter(group=_WHERE)] = None,
    store: Annotated[Path | None, Parameter(show_default="in the run folder")] = None,
    cache_bytes: Annotated[int | None, Parameter(show_default="a quarter of the free memory")] = None,
    report_every: Annotated[int, Parameter(show_default="1 step")] = 1,
    flags: RecipeFlags = _AS_USUAL,
    as_json: Json = False,
) -> None:
    """Remove filters from a trained network, site by site, as long as the accuracy stays within what you allow.

    At every site masks switch off random filters, the loss under each mask is measured, a linear model tells from that how
    important each filter is, and the least important ones go: as many as --max-drop allows on the search set. The test set is
    read once, at the end. All is kept in a run folder; after Ctrl-C or a crash, `secateurs resume FOLDER` goes on.

    Examples:

    `secateurs prune --model resnet20 --weights public --data cifar10 --recipe 2core`

    `secateurs prune --model mynets:build --model-option width=64 --weights net.pt --data mydata:loaders --max-drop 0.01`

    Parameters
    ----------
    model
        A built-in network such as resnet20, vgg16 or mlp, or your own as package.module:function that returns an nn.Module.
    data
        digits, cifar10, xor, folder:PATH (a folder of images for each class), or package.module:function that returns
        (train, test) or (train, search, test) DataLoaders.
    model_option
        name=value for the network's constructor, such as widths=[8,16,32]; may be given several times.
    data_option
        name=value for the data set, such as split=public or seed=1; may be given several times.
    weights
        A state dict (.safetensors, .pt, .pth, .th), or "public" for the CIFAR-10 ResNets of depth 20, 32, 44, 56, 110,
        or "builtin" for the ResNet-20 that comes with the package.
    recipe
        A TOML file, or the name of a shipped one (fast, best, paper, 2core, paper-resnet, demo). Flags override its fields.
    device
        Where to compute: cpu, cuda, cuda:1, mps. Without it, where the model is.
    out
        The run folder.
    name
        The run folder, as a name under runs/.
    store
        A file where what is measured is kept, to be shared by several runs of one network: a mask is never measured twice.
    cache_bytes
        Memory for activations that are kept while masks are scored.
    report_every
        Write the report anew after every so many steps; 0: only at the end.
    as_json
        Print one JSON document on stdout, and no progress.
    """
    from secateurs.api import prune as start

    chosen = chosen_recipe(recipe, flags.overrides())
    origin = Origin(
        model,
        data,
        options(model_option, "--model-option"),
        options(data_option, "--data-option"),
        weights,
        device,
        chosen.seed,
    ).settled()
    check_device(device)
    folder = run_folder(out, name, model, data)
    if weights is None and ":" not in model:
        warn(f"no --weights: {model} is pruned as it is initialised, untrained.")
    network, examples = build_model(origin), load_data(origin)
    with display(quiet=as_json) as shown:
        watcher = RunWatcher(shown, chosen)
        shown.line(f"Pruning {model} on {examples.name} in {folder}")
        for note in examples.notes:
            shown.line(f"Note: {note}.")
        run = start(
            network,
            examples,
            chosen,
            folder=folder,
            device=device,
            watch=watcher.watch,
            origin=origin.record(),
            store=store,
            cache_bytes=cache_bytes,
        )
        with holding(run, folder):
            outcome = follow(run, watcher, report_every)
    if as_json:
        print_run_json(folder, run, outcome)
    else:
        print_outcome(folder, outcome)


def resume(
    run: Path,
    *,
    device: Annotated[str | None, Parameter(show_default="as the run was started")] = None,
    as_json: Json = False,
) -> None:
    """Go on with a run of `secateurs prune`, or a training of `secateurs train`, that was interrupted or killed.

    Model, data and recipe are those it was started with; the outcome is the one it would have had. A run that is finished is
    shown once more.

    Parameters
    ----------
    run
        The folder.
    device
        Where to compute.
    as_json
        Print one JSON document on stdout, and no progress.
    """
    if is_training(run):
        resume_training(run, device=device, as_json=as_json)
        return
    from secateurs.api import resume as take_up
    from secateurs.pruning.folder import read_provenance

    origin = origin_of(read_provenance(run).get("origin", {}), run)
    device = device or origin.device
    check_device(device)
    examples = load_data(origin)
    with display(quiet=as_json) as shown:
        # the watcher needs the steps that lie behind, which the run only knows once it is taken up
        watchers: list[RunWatcher] = []
        taken = take_up(run, fresh_model(origin), examples, device=device, watch=lambda event: watchers[0].watch(event))
        watchers.append(RunWatcher(shown, taken.recipe, taken.steps))
        with holding(taken, run):
            shown.line(f"Going on with {run}: {len(taken.steps)} steps are done")
            outcome = follow(taken, watchers[0])
    if as_json:
        print_run_json(run, taken, outcome)
    else:
        print_outcome(run, outcome)


MODEL, OPTIONS = "resnet8", {"in_channels": 1, "widths": [20, 40, 80]}
DATA, SETS = "digits", {"search": 400, "test": 500}


def demo(
    *,
    seed: int = 0,
    out: Annotated[Path | None, Parameter(show_default="runs/demo-N")] = None,
    as_json: Json = False,
) -> None:
    """Train a small CIFAR-style ResNet on 1,797 real handwritten digits, prune it by the paper's method, show what is left.

    About a minute on two cores, without any download. Steps and recipe: `recipes/train-demo.toml`, `recipes/demo.toml`.

    Parameters
    ----------
    seed
        Of the split, the first weights, training and pruning.
    out
        The run folder.
    as_json
        Print one JSON document on stdout, and no progress.
    """
    from secateurs.api import prune
    from secateurs.graph.latency import using_threads

    origin, folder = origin_for(seed), run_folder(out, None, "demo")
    data, recipe = load_data(origin), chosen_recipe("demo", {"seed": seed})
    with using_threads(1), display(quiet=as_json) as shown:  # networks this small only lose by a second thread
        settings = chosen_settings("train-demo", {"seed": seed})
        shown.line(f"1. Train {MODEL} on {len(data.train):,} images of handwritten digits, {settings.epochs} epochs")
        watcher = TrainWatcher(shown, settings.epochs, "Training", lines=False)
        model = trained(origin, data, watcher.step, watcher.epoch)
        shown.line(f"2. Prune it with linear filter ensembles: at most {100 * recipe.max_drop:g} points down at any cut")
        told = RunWatcher(shown, recipe)
        run = prune(model, data, recipe, folder=folder, watch=told.watch, origin=origin.record())
        with holding(run, folder):
            outcome = follow(run, told)
    if as_json:
        print_run_json(folder, run, outcome)
        return
    print_steps([step_fields(step) for step in outcome.steps])
    _print_closing(folder, outcome)


def origin_for(seed: int) -> Origin:
    """The demo's network and data."""
    return Origin(MODEL, DATA, OPTIONS, {**SETS, "seed": seed}, seed=seed).settled()


def trained(
    origin: Origin,
    data: Data,
    on_step: Callable[[int, int], None] | None = None,
    on_epoch: Callable[[EpochRecord], None] | None = None,
) -> nn.Module:
    """The demo's network, trained from scratch."""
    from secateurs.training import train_

    model = fresh_model(origin)
    settings = chosen_settings("train-demo", {"seed": origin.seed})
    train_(model, data.train, settings, search=data.search, on_step=on_step, on_epoch=on_epoch)
    return model


def _print_closing(folder: Path, outcome: Result) -> None:
    speed = "" if outcome.speed is None else f", {outcome.speed.summary()} on batches of {outcome.batch}"
    say(f"{outcome.summary()}{speed}.")
    say("")
    say(f"The run folder: {folder} ({clock(outcome.seconds)}). The smaller network in Python:")
    say("")
    for line in (
        "import secateurs",
        "from secateurs.models import resolve",
        f"model = resolve({MODEL!r}, in_channels=1, widths={OPTIONS['widths']})",
        f"small = secateurs.load(model, {str(folder / 'pruned.safetensors')!r}).module",
    ):
        say(f"    {line}")
