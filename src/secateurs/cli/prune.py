"""`secateurs prune`: a network, data and a recipe in; a run folder with a smaller network out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter, validators

from secateurs.cli.flags import Json, Options, RecipeFlags, options
from secateurs.cli.inputs import Origin, build_model, check_device, load_data, run_folder
from secateurs.cli.progress import RunWatcher, display
from secateurs.cli.recipes import chosen_recipe
from secateurs.cli.results import follow, holding, print_outcome, print_run_json
from secateurs.cli.terminal import warn

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
    from secateurs.run import prune as start

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
