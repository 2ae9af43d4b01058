"""Flags that stand for fields of a recipe: None means "as the recipe says"; the defaults shown are those without a recipe.

They are spelled out here, and not taken from `Recipe`, because that would import torch for `--help`; a test compares them.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import date, time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter

from secateurs.cli.terminal import warn
from secateurs.errors import InvalidInput, RecipeError, RunError, suggest

if TYPE_CHECKING:
    from torch import nn

    from secateurs.config import Recipe, TrainSettings
    from secateurs.data import Data
    from secateurs.graph.trace import Graph
    from secateurs.models import TrainingSet


_RECIPE = Group("Recipe: what may be lost, and in which order sites are visited", sort_key=10)
_SCORING = Group("Recipe: how filters are scored", sort_key=11)
_TRAINING = Group("Recipe: training between and after the cuts", sort_key=12)
_SETTINGS = Group("Settings of the training", sort_key=10)


Json = Annotated[bool, Parameter(name="--json", negative="", show_default=False)]
Options = Annotated[tuple[str, ...], Parameter(negative="", show_default=False)]


def _flag(default: str, group: Group) -> Parameter:
    return Parameter(show_default=default or False, group=group, negative="")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class RecipeFlags:
    """The usual fields of a recipe."""

    max_drop: Annotated[float | None, _flag("0.005", _RECIPE)] = None
    """Accuracy on the search set that may be lost, a fraction: 0.005 is half a point."""
    budget: Annotated[Literal["site", "run"] | None, _flag("run", _RECIPE)] = None
    """The drop counts from the start of the whole run, or of every site anew (the paper)."""
    confidence: Annotated[float | None, _flag("0.95", _RECIPE)] = None
    """How sure it must be that the drop is kept on other images too; 0: the point estimate decides, nothing is promised."""
    worst_class: Annotated[float | None, _flag("none", _RECIPE)] = None
    """Accuracy that any single class may lose, a fraction."""
    allocation: Annotated[Literal["sequential", "global"] | None, _flag("sequential", _RECIPE)] = None
    """Each site in turn as far as it goes (the paper), or all cuts weighed against each other."""
    direction: Annotated[Literal["forward", "backward"] | None, _flag("forward", _RECIPE)] = None
    """From the input to the output, or back."""
    shortcut: Annotated[Literal["before", "after"] | None, _flag("before", _RECIPE)] = None
    """Where the last filters of a residual block are masked: before or after the add."""
    rounds: Annotated[int | None, _flag("1", _RECIPE)] = None
    """How often the sites are gone through."""
    sites: Annotated[tuple[str, ...] | None, _flag("all", _RECIPE)] = None
    """Only sites whose names match this pattern, such as 'layer3.*'; may be given several times."""
    target_parameters: Annotated[float | None, _flag("none", _RECIPE)] = None
    """Stop when this share of the parameters is removed."""
    target_macs: Annotated[float | None, _flag("none", _RECIPE)] = None
    """Stop when this share of the multiply-accumulates is removed."""
    search: Annotated[Literal["bisect", "scan", "paper"] | None, _flag("bisect", _RECIPE)] = None
    """How the number of filters to remove is found: by halving, one by one upwards, or downwards (the paper)."""
    largest_share: Annotated[float | None, _flag("0.9", _RECIPE)] = None
    """Of a site's filters that one cut may remove."""
    round_to: Annotated[int | None, _flag("1", _RECIPE)] = None
    """Kept filters come in multiples of this."""
    latency_aware: Annotated[bool | None, Parameter(show_default="no-latency-aware", group=_RECIPE)] = None
    """Keep only numbers of filters that are measurably faster on this device than any larger one."""
    repair: Annotated[Literal["none", "least-squares", "every-layer"] | None, _flag("none", _RECIPE)] = None
    """Give the layers that read what was cut new weights, in closed form."""
    repair_examples: Annotated[int | None, _flag("1024", _RECIPE)] = None
    """Training examples that a repair is solved on."""
    criterion: Annotated[str | None, _flag("ensemble", _SCORING)] = None
    """Who ranks the filters: ensemble, pairs, obs, random, l1, l2, fpgm, batchnorm, taylor, leave-one-out or portfolio."""
    estimator: Annotated[Literal["losses", "gradient"] | None, _flag("gradient", _SCORING)] = None
    """An ensemble's linear model from losses at masks (the paper), or from their slopes."""
    adaptive: Annotated[bool | None, Parameter(show_default="adaptive", group=_SCORING)] = None
    """Stop scoring a site when its least important filters are settled."""
    signal: Annotated[Literal["loss", "divergence"] | None, _flag("loss", _SCORING)] = None
    """Masks are scored by the loss, or by the divergence from the unpruned network's answers, which needs no labels."""
    masks_per_filter: Annotated[int | None, _flag("256", _SCORING)] = None
    """The most masks that a site gets, for each of its filters."""
    masks: Annotated[int | None, _flag("none", _SCORING)] = None
    """So many at every site instead, whatever its width."""
    off: Annotated[float | None, _flag("0.3", _SCORING)] = None
    """Share of a site's filters that a mask switches off."""
    scoring: Annotated[Literal["train", "search"] | None, _flag("train", _SCORING)] = None
    """The set that masks are scored on."""
    scoring_examples: Annotated[int | Literal["all"] | None, _flag("by the noise", _SCORING)] = None
    """So many of its examples."""
    batch: Annotated[int | None, _flag("256", _SCORING)] = None
    """Examples at once while scoring and searching."""
    seed: Annotated[int | None, _flag("0", _SCORING)] = None
    """Everything random follows from it."""
    finetune_epochs: Annotated[int | None, _flag("none", _TRAINING)] = None
    """Epochs of training after every cut (10 if only other --finetune flags are given)."""
    finetune_steps: Annotated[int | None, _flag("none", _TRAINING)] = None
    """At most so many optimiser steps after every cut."""
    finetune_lr: Annotated[float | None, _flag("0.01", _TRAINING)] = None
    """Learning rate of the training after every cut."""
    retrain_epochs: Annotated[int | None, _flag("none", _TRAINING)] = None
    """Epochs of training at the end (10 if only --retrain-lr is given)."""
    retrain_lr: Annotated[float | None, _flag("0.01", _TRAINING)] = None
    """Learning rate of the training at the end."""
    recalibrate: Annotated[int | None, _flag("none", _TRAINING)] = None
    """Measure BatchNorm's statistics anew after every cut, on so many training examples."""
    set: Annotated[tuple[str, ...], _flag("", _TRAINING)] = ()
    """Any other field as name=value, such as finetune.augment=crop-flip; may be given several times."""

    def overrides(self) -> dict[str, Any]:
        """The fields that were given, under their names in a recipe."""
        return _given(self, tables=("finetune", "retrain"))


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class TrainFlags:
    """The usual settings of a training."""

    epochs: Annotated[int | None, _flag("10", _SETTINGS)] = None
    """Passes over the training examples."""
    steps: Annotated[int | None, _flag("none", _SETTINGS)] = None
    """End after so many optimiser steps, even within an epoch."""
    batch: Annotated[int | None, _flag("128", _SETTINGS)] = None
    """Examples in an optimiser step."""
    lr: Annotated[float | None, _flag("0.01", _SETTINGS)] = None
    """Learning rate."""
    momentum: Annotated[float | None, _flag("0.9", _SETTINGS)] = None
    """Momentum of SGD."""
    weight_decay: Annotated[float | None, _flag("0.0001", _SETTINGS)] = None
    """Weight decay."""
    schedule: Annotated[Literal["constant", "step", "cosine", "one-cycle"] | None, _flag("cosine", _SETTINGS)] = None
    """How the learning rate changes."""
    milestones: Annotated[tuple[int, ...] | None, _flag("none", _SETTINGS)] = None
    """With --schedule step: an epoch at which the rate is divided by 10; may be given several times."""
    warmup: Annotated[int | None, _flag("0", _SETTINGS)] = None
    """Epochs over which the rate rises."""
    augment: Annotated[Literal["none", "crop", "crop-flip"] | None, _flag("none", _SETTINGS)] = None
    """Random crops, and flips, of the training images."""
    label_smoothing: Annotated[float | None, _flag("0.0", _SETTINGS)] = None
    """Share of the target that is spread over all classes."""
    seed: Annotated[int | None, _flag("0", _SETTINGS)] = None
    """Everything random follows from it, the first weights too."""
    set: Annotated[tuple[str, ...], _flag("", _SETTINGS)] = ()
    """Any other setting as name=value, such as clip_norm=1.0; may be given several times."""

    def overrides(self) -> dict[str, Any]:
        """The settings that were given, under their names."""
        return _given(self)


def options(pairs: Iterable[str], flag: str) -> dict[str, Any]:
    """What was given as name=value, several times: values are TOML (1, 0.5, true, [8, 16]), and plain text without quotes."""
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not name or not equals:
            raise InvalidInput(f"{flag} {pair!r}: wanted name=value.")
        found[name] = _value(text)
    return found


def _given(flags: RecipeFlags | TrainFlags, tables: tuple[str, ...] = ()) -> dict[str, Any]:
    found = options(flags.set, "--set")
    for flag in fields(flags):
        value = getattr(flags, flag.name)
        if value is not None and flag.name != "set":
            table, _, inner = flag.name.partition("_")
            name = f"{table}.{inner}" if table in tables else flag.name
            if name in found:
                raise InvalidInput(f"--set {name}=… and --{flag.name.replace('_', '-')} are the same field. Give one of them.")
            found[name] = list(value) if isinstance(value, tuple) else value
    return found


def _value(text: str) -> Any:
    try:
        read = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    value = read["value"]
    # a date would not fit into JSON, and nobody means one; two lines are not a value
    return text if len(read) > 1 or isinstance(value, date | time) else value


RUNS = Path("runs")
PUBLIC, BUILTIN = "public", "builtin"  # weights that are named, not given as a file


@dataclass(frozen=True)
class Origin:
    """The names that a run was started with: enough to build its model and its data once more."""

    model: str
    data: str
    model_options: Mapping[str, Any] = field(default_factory=dict)
    data_options: Mapping[str, Any] = field(default_factory=dict)
    weights: str | None = None
    device: str | None = None
    seed: int = 0  # of the first weights, where none are given
    folder: str = ""  # where the command was given: own modules are looked for there too

    def settled(self) -> Origin:
        """The same with everything decided: absolute paths, and the split that goes with weights that are named."""
        options = dict(self.data_options)
        if self.weights in (PUBLIC, BUILTIN):
            trained = training_sets(self)[-1]
            options = {**trained.options, **options} if self.data == trained.data else options
        weights = self.weights if self.weights in (None, PUBLIC, BUILTIN) else str(Path(str(self.weights)).absolute())
        data = self.data
        if data.startswith("folder:"):
            data = f"folder:{Path(data.removeprefix('folder:')).absolute()}"
        return replace(self, data=data, data_options=options, weights=weights, folder=str(Path.cwd()))

    def record(self) -> dict[str, Any]:
        """Plain values, for the provenance."""
        return asdict(self)


def origin_of(record: Mapping[str, Any], where: Path) -> Origin:
    """The origin that a provenance keeps; modules of the folder it was started from become importable."""
    if not {"model", "data"} <= set(record) <= {known.name for known in fields(Origin)}:
        raise RunError(
            f"{where}: was not started from the command line, so it does not say how to build its model and its data. "
            f"Go on from Python: secateurs.resume({str(where)!r}, model, data)."
        )
    origin = Origin(**record)
    if origin.folder and origin.folder not in sys.path:
        sys.path.append(origin.folder)
    return origin


def build_model(origin: Origin) -> nn.Module:
    """The network, with its weights where some are given, else freshly initialised from the seed."""
    model = fresh_model(origin)
    if origin.weights is not None:
        from secateurs.models import load_weights_

        load_weights_(model, _weights_file(origin))
    return model


def fresh_model(origin: Origin) -> nn.Module:
    """The network without the weights that the origin names."""
    from secateurs.data.dataset import seeded
    from secateurs.models import resolve

    with seeded(origin.seed, "model"):
        return resolve(origin.model, **origin.model_options)


def build_network(origin: Origin) -> nn.Module | Graph:
    """The network of a file of weights, or of a file that a run has left (a pruned network with its plan)."""
    if origin.weights in (None, PUBLIC, BUILTIN) or not is_pruned_file(Path(str(origin.weights))):
        return build_model(origin)
    from secateurs.compaction.serialization import load

    return load(fresh_model(origin), str(origin.weights))


def is_pruned_file(path: Path) -> bool:
    """Whether a run has left this file: weights with a plan in their header."""
    from secateurs.models.weights import read_header

    return "secateurs_format" in read_header(path)


def training_sets(origin: Origin) -> tuple[TrainingSet, ...]:
    """All examples that the origin's weights are known to have been trained on."""
    from secateurs.models.weights import PUBLIC_TRAINED_ON, read_pedigree

    if origin.weights == PUBLIC:
        return (PUBLIC_TRAINED_ON,)
    pedigree = None if origin.weights is None else read_pedigree(_weights_file(origin))
    return () if pedigree is None else pedigree.trained_on


def load_data(origin: Origin) -> Data:
    """The data set; warns where its search set has been trained on."""
    from secateurs.data import load

    data = load(origin.data, **origin.data_options)
    _warn_of_overlap(origin, data)
    return data


def _warn_of_overlap(origin: Origin, data: Data) -> None:
    from secateurs.models.weights import overlaps

    whose = f"the {origin.weights} weights" if origin.weights in (PUBLIC, BUILTIN) else "the weights"
    for overlap in overlaps(origin.data, data, training_sets(origin)):
        trained = overlap.trained
        flags = " ".join(f"--data-option {name}={value}" for name, value in trained.options.items())
        if overlap.shared is None:
            warn(
                f"{whose} were trained on {trained}. Whether examples that decide here were among them cannot be found out: "
                f"{overlap.why}."
            )
        else:
            warn(
                f"{whose} were trained on {trained}, and {overlap.shared:,} of the {len(data.search):,} examples that decide "
                f"here are among them: accuracies on those promise too much. Take the split that they were trained with: "
                f"{flags or 'no --data-option'}."
            )


def check_device(device: str | None) -> None:
    """Refuse a device that this machine or this torch does not have, before anything runs."""
    if device is None:
        return
    import torch

    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        first = str(error).splitlines()[0]
        raise InvalidInput(f"--device {device}: torch cannot use it here ({first}). Try cpu.") from error


def run_folder(out: Path | None, name: str | None, *parts: str) -> Path:
    """The folder to write to: `out`, or runs/`name`, or the first free runs/PARTS-N."""
    if out is not None:
        return out
    if name is not None:
        if not Path(name).parts or Path(name).is_absolute() or ".." in Path(name).parts:
            raise InvalidInput(f"--name {name!r}: wanted the name of a folder under {RUNS}/. For another place use --out PATH.")
        return RUNS / name
    stem = "-".join(re.sub(r"[^A-Za-z0-9._]+", "-", part).strip("-.") for part in parts)
    number = 1
    while (RUNS / f"{stem}-{number}").exists():
        number += 1
    return RUNS / f"{stem}-{number}"


def _weights_file(origin: Origin) -> Path:
    from secateurs.models import builtin_weights, public_weights

    if origin.weights in (PUBLIC, BUILTIN):
        return (public_weights if origin.weights == PUBLIC else builtin_weights)(origin.model)
    return Path(str(origin.weights))


_PACKAGE = Path(__file__).resolve().parent.parent
_FOLDERS = (_PACKAGE / "recipes", _PACKAGE.parent.parent / "recipes")  # installed, or a checkout


def find_recipe(name: str) -> Path:
    """The recipe file of that path or, for a plain name such as "demo", the shipped one."""
    path = Path(name)
    if path.exists() or path.suffix == ".toml" or len(path.parts) != 1:
        return path
    shipped = shipped_recipes()
    if name not in shipped:
        raise RecipeError(f"no recipe {name!r}: no such file, and none of that name is shipped.{suggest(name, shipped)}")
    return shipped[name]


def shipped_recipes() -> dict[str, Path]:
    """The recipes that come with secateurs, by name."""
    return {path.stem: path for folder in reversed(_FOLDERS) for path in sorted(folder.glob("*.toml"))}


def chosen_recipe(name: str | None, overrides: dict[str, Any]) -> Recipe:
    """The recipe of that file or name (None: all defaults), with single fields overridden."""
    from secateurs.config import read_recipe, recipe_from

    if name is None:
        return recipe_from({}, where="the command line", **overrides)
    return read_recipe(find_recipe(name), **overrides)


def chosen_settings(name: str | None, overrides: dict[str, Any]) -> TrainSettings:
    """The training settings of that file or name (None: all defaults), with single ones overridden."""
    from secateurs.config import read_settings, settings_from

    if name is None:
        return settings_from({}, where="the command line", **overrides)
    return read_settings(find_recipe(name), **overrides)
