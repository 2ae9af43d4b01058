"""`secateurs demo`: trains, prunes and shows a small ResNet on digits, with what ships in the package."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from secateurs.cli.flags import Json
from secateurs.cli.inputs import Origin, fresh_model, load_data, run_folder
from secateurs.cli.progress import RunWatcher, TrainWatcher, display
from secateurs.cli.recipes import chosen_recipe, chosen_settings
from secateurs.cli.results import follow, holding, print_run_json, print_steps, step_fields
from secateurs.cli.terminal import clock, say

if TYPE_CHECKING:
    from torch import nn

    from secateurs.data import Data
    from secateurs.steps import Outcome
    from secateurs.training import EpochRecord

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
    from secateurs.run import prune
    from secateurs.timing import using_threads

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


def _print_closing(folder: Path, outcome: Outcome) -> None:
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
