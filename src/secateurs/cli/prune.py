"""`secateurs prune`, `resume` and `demo`: a network, data and a recipe in; a run folder with a smaller network out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter, validators

from secateurs._util.format import plural
from secateurs._util.terminal import say, warn
from secateurs.cli import inputs, trust
from secateurs.cli.progress import RunWatcher, TrainWatcher, display
from secateurs.cli.results import follow, holding, print_run
from secateurs.cli.train import is_training, resume_training

if TYPE_CHECKING:
    from torch import nn

    from secateurs.data import Data
    from secateurs.training import EpochRecord

_WHERE = Group("Run folder", sort_key=20, validator=validators.mutually_exclusive)
DEMO_MODEL, DEMO_OPTIONS = "resnet8", {"in_channels": 1, "widths": [20, 40, 80]}
DEMO_SETS = {"search": 400, "test": 500}


def prune(
    *,
    model: inputs.ModelName,
    data: inputs.DataName,
    model_option: inputs.ModelOptions = (),
    data_option: inputs.DataOptions = (),
    weights: str | None = None,
    recipe: Annotated[str | None, Parameter(show_default="best")] = None,
    device: inputs.Device = None,
    out: Annotated[Path | None, Parameter(group=_WHERE, show_default="runs/MODEL-DATA-N")] = None,
    name: Annotated[str | None, Parameter(group=_WHERE)] = None,
    store: Annotated[Path | None, Parameter(show_default="in the run folder")] = None,
    cache_bytes: Annotated[int | None, Parameter(show_default="a quarter of the free memory")] = None,
    report_every: Annotated[int, Parameter(show_default="1 step")] = 1,
    flags: inputs.RecipeFlags = inputs.NO_FLAGS,
    as_json: inputs.Json = False,
) -> None:
    """Remove filters from a trained network as long as the accuracy stays within what you allow.

    By default the filters of each site are ranked by the loss that the layers behind it, solved again by least squares, cannot
    make up for (structured OBS). The loss that cuts of each site cost and the time that they save are measured, and whole
    networks are built along the frontier of loss against time, with every layer solved again. The fastest within --max-drop is
    taken, and certified where the validation set is large enough for that: the drop then holds on other images too. Nothing is
    trained. `--recipe paper` is Algorithm 1 of the paper. The test set is read once, at the end. Everything is kept in a run
    folder; after Ctrl-C or a crash, `secateurs resume FOLDER` continues. Several processes share the work: `torchrun
    --nproc-per-node=2 -m secateurs prune …`.

    Examples:

    `secateurs prune --model resnet20 --weights public --data cifar10 --max-drop 0.01`

    `secateurs prune --model resnet20 --weights public --data cifar10 --recipe paper`

    `secateurs prune --model mynets:build --model-option width=64 --weights net.pt --data mydata:loaders --max-drop 0.01`

    Parameters
    ----------
    weights
        A state dict (.safetensors, .pt, .pth, .th), or "public" for the CIFAR-10 ResNets of depth 20, 32, 44, 56, 110,
        or "builtin" for the ResNet-20 that comes with the package.
    recipe
        A TOML file, or the name of a shipped recipe (best, fast, paper, 2core, paper-resnet, demo). Flags override its fields;
        the defaults below are those of best.
    out
        The run folder.
    name
        The run folder, as a name under runs/.
    store
        A file of measurements that several runs of one network share: no mask is measured twice.
    cache_bytes
        Memory for activations that are kept while masks are scored.
    report_every
        Write the report after every N steps; 0: only at the end.
    """
    from secateurs.api import start_or_continue

    given = inputs.overrides(flags)
    chosen = inputs.chosen_recipe(recipe, given)
    origin = inputs.named_origin(model, data, model_option, data_option, weights, device, chosen.seed)
    device = inputs.own_device(device)
    inputs.check_device(device)
    folder = inputs.shared_run_folder(out, name, model, data)
    if weights is None and ":" not in model:
        warn(f"no --weights: {model} is pruned untrained, with its initial weights.")
    network, (train, val, test) = inputs.build_model(origin), inputs.load_sources(origin)
    with display(quiet=as_json) as shown:
        watcher = RunWatcher(shown, chosen)
        shown.line(f"Pruning {model} on {data} in {folder}")
        run = start_or_continue(
            network,
            train,
            val,
            test=test,
            recipe=chosen,
            folder=folder,
            device=device,
            callback=watcher.watch,
            origin=origin.record(),
            store=store,
            cache_bytes=cache_bytes,
            uncertified=recipe is None and "confidence" not in given,
        )
        with holding(run, folder):
            inputs.warn_of_overlap(origin, run.data)
            result = follow(run, watcher, report_every)
    print_run(folder, run, result, as_json=as_json)


def resume(
    run: Path,
    *,
    model: inputs.OptionalModelName = None,
    data: inputs.OptionalDataName = None,
    model_option: inputs.ModelOptions = (),
    data_option: inputs.DataOptions = (),
    criterion: Annotated[tuple[str, ...], Parameter(negative="", show_default=False)] = (),
    device: Annotated[str | None, Parameter(show_default="as the run was started")] = None,
    as_json: inputs.Json = False,
) -> None:
    """Resume a run of `secateurs prune`, or a training of `secateurs train`, that was interrupted or killed.

    Model, data and recipe are those it was started with, and the result is the same as without the interruption. A finished
    run is shown again. Code of your own is run only if it is named again, since a folder may come from anybody: repeat --model,
    --data and --criterion with their options; the error says which. A run that was started from Python does not know how to
    build its network: name it by --model, and by --data the loaders that it trains on or measures at the end. What it drew for
    scoring and validation is in its folder.

    Examples:

    `secateurs resume runs/resnet20-cifar10-1`

    `secateurs resume runs/first --model mynets:build --data mydata:loaders`

    Parameters
    ----------
    run
        The folder.
    criterion
        A criterion of your own that the run was started with, as package.module:function; repeatable. For a run from Python
        also in place of a function of its script.
    device
        Where to compute.
    """
    given = trust.Repeated(model, data, model_option, data_option, criterion)
    if is_training(run):
        resume_training(run, given, device=device, as_json=as_json)
        return
    from secateurs._util.entrypoints import find
    from secateurs.api import resume as take_up
    from secateurs.data.drawn import has_drawn

    origin = trust.run_origin(run, given, resumed=True)
    device = inputs.own_device(device or origin.device)
    inputs.check_device(device)
    train, val, test = inputs.load_sources(origin) if origin.data else (None, None, None)
    if has_drawn(run) and val is None and train is not None:  # it keeps what it drew: the data are to train on and to test
        train, val, test = train.train, train.search, train.test
    with display(quiet=as_json) as shown:
        # events come only once the run is iterated over, so the watcher may be made after it, from its steps
        resumed = take_up(
            run,
            inputs.fresh_model(origin),
            train,
            val,
            test=test,
            criterion=[find(name, f"--criterion {name}") for name in criterion],
            device=device,
            callback=lambda event: watcher.watch(event),
        )
        watcher = RunWatcher(shown, resumed.recipe, resumed.steps)
        with holding(resumed, run):
            shown.line(f"Resuming {run}: {plural(len(resumed.steps), 'step')} done")
            result = follow(resumed, watcher)
    print_run(run, resumed, result, as_json=as_json)


def demo(
    *,
    seed: int = 0,
    out: Annotated[Path | None, Parameter(show_default="runs/demo-N")] = None,
    as_json: inputs.Json = False,
) -> None:
    """Train a small CIFAR-style ResNet on 1,797 handwritten digits, prune it by the paper's method, and show the result.

    About a minute on two cores, without any download. Recipes: `recipes/train-demo.toml`, `recipes/demo.toml`.

    Parameters
    ----------
    seed
        Seed of the split, the first weights, training and pruning.
    out
        The run folder.
    """
    from secateurs.api import Pruner
    from secateurs.pruning.folder import refuse_run
    from secateurs.speed.timing import using_threads

    origin, folder = origin_for(seed), inputs.run_folder(out, None, "demo")
    refuse_run(folder)  # before it trains
    data, recipe = inputs.load_data(origin), inputs.chosen_recipe("demo", {"seed": seed})
    with using_threads(1), display(quiet=as_json) as shown:  # networks this small only lose by a second thread
        settings = inputs.chosen_settings("train-demo", {"seed": seed})
        shown.line(f"1. Train {DEMO_MODEL} on {len(data.train):,} images of handwritten digits, {settings.epochs} epochs")
        training = TrainWatcher(shown, settings.epochs, "Training", lines=False)
        model = trained(origin, data, training.step, training.epoch)
        shown.line(f"2. Prune it with linear filter ensembles, accuracy drop at most {100 * recipe.max_drop:g} points")
        watcher = RunWatcher(shown, recipe)
        run = Pruner(model, data, recipe=recipe, folder=folder, callback=watcher.watch, origin=origin.record())
        with holding(run, folder):
            result = follow(run, watcher)
    print_run(folder, run, result, as_json=as_json)
    if not as_json:
        say("\nThe pruned network in Python:\n")
        say("    import secateurs")
        say("    from secateurs.models import resolve")
        say(f"    model = resolve({DEMO_MODEL!r}, in_channels=1, widths={DEMO_OPTIONS['widths']})")
        say(f"    small = secateurs.load(model, {str(folder / 'pruned.safetensors')!r}).module")


def origin_for(seed: int) -> inputs.Origin:
    """The demo's network and data."""
    return inputs.Origin(DEMO_MODEL, "digits", DEMO_OPTIONS, {**DEMO_SETS, "seed": seed}, seed=seed).settled()


def trained(
    origin: inputs.Origin,
    data: Data,
    on_step: Callable[[int, int], None] | None = None,
    on_epoch: Callable[[EpochRecord], None] | None = None,
) -> nn.Module:
    """The demo's network, trained from scratch."""
    from secateurs.training import train_

    model = inputs.fresh_model(origin)
    settings = inputs.chosen_settings("train-demo", {"seed": origin.seed})
    train_(model, data.train, settings, search=data.search, on_step=on_step, on_epoch=on_epoch)
    return model
