"""What commands take: flags made from the declarations in `config`, names of models, weights, data and recipes, folders."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import date, time
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, get_origin

from cyclopts import Group, Parameter

from secateurs._util.decode import Malformed, TooLarge, brief, decode_toml
from secateurs._util.terminal import warn
from secateurs.config import (
    NAMED_SETTINGS,
    TRAININGS,
    Recipe,
    Shortcut,
    TrainSettings,
    declarations,
    read_recipe,
    read_settings,
    recipe_from,
    settings_from,
)
from secateurs.errors import InvalidInput, RecipeError, suggest

if TYPE_CHECKING:
    from torch import nn

    from secateurs.data import Data
    from secateurs.graph.trace import Graph
    from secateurs.models import TrainingSet

# ---- flags that several commands share ---------------------------------------------------------------------------------

_MODEL = Parameter(
    help="A built-in network such as resnet20, or your own as package.module:function that returns an nn.Module."
)
_DATA = Parameter(
    help="digits, cifar10, folder:PATH (a folder of images for each class), or package.module:function that "
    "returns loaders (train, val) or (train, val, test)."
)
ModelName = Annotated[str, _MODEL]
OptionalModelName = Annotated[str | None, _MODEL]
DataName = Annotated[str, _DATA]
OptionalDataName = Annotated[str | None, _DATA]
ModelOptions = Annotated[
    tuple[str, ...],
    Parameter(
        negative="", show_default=False, help="name=value for the network's constructor, such as widths=[8,16,32]; repeatable."
    ),
]
DataOptions = Annotated[
    tuple[str, ...],
    Parameter(negative="", show_default=False, help="name=value for the data set, such as split=public or seed=1; repeatable."),
]
Device = Annotated[str | None, Parameter(help="Where to compute: cpu, cuda, cuda:1, mps. Default: where the model is.")]
ShortcutFlag = Annotated[
    Shortcut,
    Parameter(
        help="Where the end of a residual block is masked: before or after the add, or with one mask for the whole stage."
    ),
]
Json = Annotated[
    bool,
    Parameter(name="--json", negative="", show_default=False, help="Print one JSON document on stdout, and no progress."),
]


# ---- flags of recipes and settings -------------------------------------------------------------------------------------

_HEADINGS = {
    "pruning": Group("Recipe: what may be lost, and the order of the sites", sort_key=10),
    "scoring": Group("Recipe: how filters are scored", sort_key=11),
    "training": Group("Recipe: training between and after the cuts", sort_key=12),
}


def _flag(hint: Any, default: Any, text: str, group: Group) -> Any:
    """The type of a flag; a default that is None or empty is not shown."""
    if get_origin(hint) is tuple:
        text = f"{text.rstrip('.')}; repeatable."
    shown = False if default in (None, ()) else str(default).lower() if isinstance(default, bool) else str(default)
    return Annotated[hint, Parameter(help=text, show_default=shown, group=group, negative=None if hint is bool else "")]


def field_flags(
    kind: Any, headings: Mapping[str, Group], example: str, tables: Iterable[str] = (), shown: Any = None
) -> dict[str, Any]:
    """The flags of a recipe or of settings: of its fields that have a group, of the usual ones of its tables, and --set.

    Help shows the defaults of the fields, or the values that `shown` has.
    """
    found = {
        name: _flag(hint, getattr(shown, name, default), declared.help, headings[declared.group])
        for name, (hint, default, declared) in declarations(kind).items()
        if declared.group
    }
    for table in tables:
        text = f"{declarations(kind)[table][2].help.rstrip('.')}: train, as named. One of {', '.join(NAMED_SETTINGS)}."
        found[table] = _flag(str, None, text, headings["training"])
    for table, name in product(tables, ("epochs", "steps", "lr")):
        when, (hint, default, declared) = declarations(kind)[table][2].help.rstrip("."), declarations(TrainSettings)[name]
        words = None if default is None else f"{default}, if any {table} flag is given"
        text = f"{when}: {declared.help[:1].lower()}{declared.help[1:]}"
        found[f"{table}_{name}"] = _flag(hint, words, text, headings["training"])
    text = f"Any other field as name=value, such as {example}."
    return found | {"set": _flag(tuple[str, ...], (), text, headings["training"])}


if TYPE_CHECKING:
    RecipeFlags = dict[str, Any]
    TrainFlags = dict[str, Any]
else:
    _recipe = field_flags(Recipe, _HEADINGS, "finetune.augment=crop-flip", TRAININGS, Recipe())
    _settings = field_flags(TrainSettings, {"training": Group("Settings of the training", sort_key=10)}, "clip_norm=1.0")
    RecipeFlags = Annotated[TypedDict("RecipeFlags", _recipe, total=False), Parameter(name="*")]
    TrainFlags = Annotated[TypedDict("TrainFlags", _settings, total=False), Parameter(name="*")]

NO_FLAGS: dict[str, Any] = {}


def overrides(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The flags that were given, under the names of their fields: finetune_lr is "finetune.lr"."""
    found = options(flags.get("set", ()), "--set")
    for flag, value in flags.items():
        table, _, inner = flag.partition("_")
        name = f"{table}.{inner}" if inner and table in TRAININGS else flag
        if name in found:
            raise InvalidInput(f"--set {name}=… and --{flag.replace('_', '-')} are the same field. Give one of them.")
        if flag != "set":
            found[name] = value
    return found


def options(pairs: Iterable[str], flag: str) -> dict[str, Any]:
    """Parse name=value pairs: values are TOML (1, 0.5, true, [8, 16]); anything else is text."""
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not name or not equals:
            raise InvalidInput(f"{flag} {pair!r}: wanted name=value.")
        try:
            read: dict[str, Any] = decode_toml(f"value = {text}")
        except TooLarge as error:
            raise InvalidInput(f"{flag} {brief(name, 60)}=…: {error}.") from error
        except Malformed:
            read = {"value": text}
        # two lines are not a value, and JSON has no dates
        found[name] = text if len(read) > 1 or isinstance(read["value"], date | time) else read["value"]
    return found


# ---- models, weights and data -------------------------------------------------------------------------------------------


RUNS = Path("runs")
PUBLIC, BUILTIN = "public", "builtin"  # weights that are named, not given as a file


@dataclass(frozen=True)
class Origin:
    """The names that a run was started with, from which its model and data are built again."""

    model: str
    data: str
    model_options: Mapping[str, Any] = field(default_factory=dict)
    data_options: Mapping[str, Any] = field(default_factory=dict)
    weights: str | None = None
    device: str | None = None
    seed: int = 0  # of the initial weights, if none are given
    folder: str = ""  # working directory of the command: says where it was started, and nothing is imported from it

    def settled(self) -> Origin:
        """Make paths absolute, and take the data split that the public or built-in weights were trained with."""
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


def named_origin(
    model: str,
    data: str,
    model_option: Iterable[str] = (),
    data_option: Iterable[str] = (),
    weights: str | None = None,
    device: str | None = None,
    seed: int = 0,
) -> Origin:
    """The origin that flags name, with everything decided."""
    built = (options(model_option, "--model-option"), options(data_option, "--data-option"))
    return Origin(model, data, *built, weights, device, seed).settled()


def build_model(origin: Origin) -> nn.Module:
    """The network with the weights that the origin names, or initialised from its seed."""
    model = fresh_model(origin)
    if origin.weights is not None:
        from secateurs.models import load_weights_

        load_weights_(model, _weights_file(origin))
    return model


def fresh_model(origin: Origin) -> nn.Module:
    """The network initialised from the seed, without the weights that the origin names."""
    from secateurs.data.dataset import seeded
    from secateurs.models import resolve

    with seeded(origin.seed, "model"):
        return resolve(origin.model, **origin.model_options)


def build_network(origin: Origin) -> nn.Module | Graph:
    """The network with the origin's weights, or the pruned network if they are the pruned.safetensors of a run."""
    if origin.weights in (None, PUBLIC, BUILTIN) or not is_pruned_file(Path(str(origin.weights))):
        return build_model(origin)
    from secateurs.compaction.serialization import load

    return load(fresh_model(origin), str(origin.weights))


def is_pruned_file(path: Path) -> bool:
    """Whether the file is the pruned network of a run: weights with a plan in their header."""
    from secateurs.models.weights import read_header

    return "secateurs_format" in read_header(path)


def training_sets(origin: Origin) -> tuple[TrainingSet, ...]:
    """The sets that the origin's weights are known to have been trained on."""
    from secateurs.models.weights import PUBLIC_TRAINED_ON, read_pedigree

    if origin.weights == PUBLIC:
        return (PUBLIC_TRAINED_ON,)
    pedigree = None if origin.weights is None else read_pedigree(_weights_file(origin))
    return () if pedigree is None else pedigree.trained_on


def load_data(origin: Origin) -> Data:
    """The data set, read into memory; warns if the weights were trained on examples of its validation set."""
    from secateurs.data import load

    data = load(origin.data, **origin.data_options)
    warn_of_overlap(origin, data)
    return data


def load_sources(origin: Origin) -> tuple[Any, Any, Any]:
    """What a run reads: the loaders (train, val, test) of the user's function, or (data set in memory, None, None)."""
    from torch.utils.data import Dataset

    from secateurs import data as sets

    found = sets.load_sources(origin.data, **origin.data_options)
    if isinstance(found, sets.Data):
        return found, None, None
    # pairs of tensors and datasets have no order or batches of their own: they are read, and trained on as the recipe says
    if any(isinstance(source, tuple | Dataset | sets.Examples) for source in found):
        return sets.from_loaders(*found, name=origin.data), None, None
    return found


def warn_of_overlap(origin: Origin, data: Data) -> None:
    """Warn if the origin's weights were trained on examples of the validation set."""
    from secateurs.models.weights import overlaps

    whose = f"the {origin.weights} weights" if origin.weights in (PUBLIC, BUILTIN) else "the weights"
    for overlap in overlaps(origin.data, data, training_sets(origin)):
        trained = overlap.trained
        flags = " ".join(f"--data-option {name}={value}" for name, value in trained.options.items())
        if overlap.shared is None:
            warn(
                f"{whose} were trained on {trained}. Whether examples of the validation set were among them is not known: "
                f"{overlap.why}."
            )
        else:
            warn(
                f"{whose} were trained on {trained}, which includes {overlap.shared:,} of the {len(data.search):,} examples of "
                f"the validation set: accuracies on those are too high. Use the split they were trained with: "
                f"{flags or 'no --data-option'}."
            )


def check_fit(model: nn.Module, data: Data, origin: Origin) -> None:
    """Raise InvalidInput if the network cannot take the examples, or does not give an output for each of their classes."""
    from secateurs._util.modules import eval_mode
    from secateurs.metrics import check_targets, correct, cross_entropy
    from secateurs.pruning.folder import example_for

    example = example_for(model, data)
    with eval_mode(model):
        try:
            outputs = model(*example)
        except (RuntimeError, ValueError, TypeError) as error:
            raise InvalidInput(
                f"{origin.model} cannot take the examples of {origin.data}, of shape {tuple(example[0].shape[1:])}: "
                f"{str(error).splitlines()[0]}. Give the network options that fit (--model-option), or other data."
            ) from error
    check_targets(data, outputs, {"loss": cross_entropy, "metric": correct})


def check_device(device: str | None) -> None:
    """Raise InvalidInput for a device that torch cannot use here, before anything runs."""
    if device is not None:
        from secateurs._util import modules

        modules.check_device(device, f"--device {device}")


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


def shared_run_folder(out: Path | None, name: str | None, *parts: str) -> Path:
    """The same as `run_folder`, as the first of several workers finds it."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return run_folder(out, name, *parts)
    from secateurs.distributed import join

    if out is None and name is None and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        raise InvalidInput(
            "torchrun --max-restarts: give the run folder, --out PATH or --name NAME, so that a restart finds the run again."
        )
    return Path(join().shared("the run folder", lambda: str(run_folder(out, name, *parts)).encode()).decode())


def own_device(device: str | None) -> str | None:
    """The device of this worker: of several on a machine, each has the GPU of its own number."""
    return f"cuda:{os.environ['LOCAL_RANK']}" if device == "cuda" and "LOCAL_RANK" in os.environ else device


def _weights_file(origin: Origin) -> Path:
    from secateurs.models import builtin_weights, public_weights

    if origin.weights in (PUBLIC, BUILTIN):
        return (public_weights if origin.weights == PUBLIC else builtin_weights)(origin.model)
    return Path(str(origin.weights))


# ---- recipes ------------------------------------------------------------------------------------------------------------

_PACKAGE = Path(__file__).resolve().parent.parent
_FOLDERS = (_PACKAGE / "recipes", _PACKAGE.parent.parent / "recipes")  # installed, or a checkout


def find_recipe(name: str) -> Path:
    """The path of a recipe file; a plain name such as "demo" is that of a shipped recipe."""
    path = Path(name)
    if path.exists() or path.suffix == ".toml" or len(path.parts) != 1:
        return path
    shipped = shipped_recipes()
    if name not in shipped:
        raise RecipeError(f"no recipe {name!r}: neither a file nor a shipped recipe.{suggest(name, shipped)}")
    return shipped[name]


def shipped_recipes() -> dict[str, Path]:
    """The recipes that come with secateurs, by name."""
    return {path.stem: path for folder in reversed(_FOLDERS) for path in sorted(folder.glob("*.toml"))}


def chosen_recipe(name: str | None, overrides: dict[str, Any]) -> Recipe:
    """The recipe of a file or name (None: `Recipe()`), with single fields overridden."""
    if name is None:
        return recipe_from({}, where="the command line", **overrides)
    return read_recipe(find_recipe(name), **overrides)


def chosen_settings(name: str | None, overrides: dict[str, Any]) -> TrainSettings:
    """The training settings of a file or name (None: the defaults), with single fields overridden."""
    if name is None:
        return settings_from({}, where="the command line", **overrides)
    return read_settings(find_recipe(name), **overrides)
