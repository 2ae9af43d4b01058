"""What a user asks for: the recipe of a run, how filters are ranked, how networks are trained. Imports no torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from math import isfinite
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
import tomli_w

from secateurs._util.decode import MAX_TOML_BYTES, Malformed, brief, decode_toml, read_text_file
from secateurs._util.files import write_text
from secateurs.errors import InvalidInput, RecipeError, suggest

Shortcut = Literal["before", "after"]
Transform = Literal["linear", "log", "rank"]
Design = Literal["exact", "bernoulli", "balanced"]
Method = Literal["bisect", "paper", "scan"]
Estimator = Literal["losses", "gradient"]
Model = Literal["linear", "pairs"]

CRITERIA = ("ensemble", "pairs", "obs", "random", "l1", "l2", "fpgm", "batchnorm", "taylor", "leave-one-out", "portfolio")
PORTFOLIO = ("ensemble", "obs", "l1", "fpgm")

MOST_PAIRS = 16_384  # of masks and examples, unless told: a slope tells of all filters at once, so wide layers need no more


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """How filters are ranked. `masks` and `masks_per_filter` bound the number of masks; `adaptive` may stop before it."""

    estimator: Estimator = "gradient"  # the linear model from losses at masks, or from their slopes along the masks
    adaptive: bool = True  # stop when the set of the least important filters is settled
    agreement: float = 0.85  # of resampled sets with it, beyond chance, that counts as settled
    masks_per_filter: int = 256
    masks: int | None = None  # so many at every site, whatever its width
    examples: int | Literal["all"] | None = None  # None: as many as the noise asks for
    off: float = 0.3  # share of a site's filters that a mask switches off (the paper's P)
    design: Design = "exact"
    transform: Transform = "linear"  # of losses; slopes are those of the loss itself
    model: Model = "linear"
    ridge: float = 0.0

    def __post_init__(self) -> None:
        for name, kind in _CHOICES.items():
            if getattr(self, name) not in get_args(kind):
                raise InvalidInput(f"{name}: got {getattr(self, name)!r}.{suggest(str(getattr(self, name)), get_args(kind))}")
        if self.estimator == "gradient" and (self.model, self.transform, self.ridge) != ("linear", "linear", 0.0):
            raise InvalidInput(
                f"estimator 'gradient' fits the linear model to slopes of the loss: model={self.model!r}, "
                f"transform={self.transform!r}, ridge={self.ridge:g} belong to estimator='losses'."
            )
        if self.examples is not None and self.examples != "all" and self.examples < 2:
            raise InvalidInput(
                f"examples: got {self.examples}, wanted 2 or more, 'all', or None: as many as the noise asks for."
            )
        if not 0 < self.agreement <= 1:
            raise InvalidInput(f"agreement: got {self.agreement}, wanted a share above 0 and up to 1.")
        if self.masks_per_filter < 1 or (self.masks is not None and self.masks < 4):
            raise InvalidInput(
                f"masks_per_filter: got {self.masks_per_filter}, wanted 1 or more; masks: got {self.masks}, wanted 4 or more."
            )

    def bound(self, channels: int) -> int:
        """The most masks that a site with so many filters gets."""
        if self.masks is not None:
            return self.masks
        masks = self.masks_per_filter * channels
        return min(masks, MOST_PAIRS) if self.estimator == "gradient" else masks


_CHOICES = {"estimator": Estimator, "design": Design, "transform": Transform, "model": Model}

PAPER = Scoring(estimator="losses", adaptive=False, masks_per_filter=10, examples="all")
FAST = Scoring()
PRESETS = {"paper": PAPER, "fast": FAST}


Schedule = Literal["constant", "step", "cosine", "one-cycle"]
Augment = Literal["none", "crop", "crop-flip"]
Precision = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """SGD with everything that decides its outcome; the same settings, data and start give the same weights."""

    epochs: int = 10
    steps: int | None = None  # end after so many optimiser steps, even within an epoch
    batch: int = 128
    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 1e-4
    nesterov: bool = False
    schedule: Schedule = "cosine"
    milestones: tuple[int, ...] = ()  # "step": the epochs (counted from 0) at which lr is multiplied by `factor`
    factor: float = 0.1
    warmup: int = 0  # epochs over which lr rises linearly, before the schedule counts
    augment: Augment = "none"
    pad: int = 4  # "crop", "crop-flip": pixels of zero padding on each side
    label_smoothing: float = 0.0
    clip_norm: float | None = None  # largest norm of the whole gradient
    distill: float = 0.0  # share of the loss that is the distance to the teacher's answers
    temperature: float = 4.0
    precision: Precision = "float32"  # of the forward pass; weights stay as they are
    channels_last: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for field, choices in (("schedule", Schedule), ("augment", Augment), ("precision", Precision)):
            _check_choice(field, getattr(self, field), get_args(choices))
        for field in ("epochs", "steps", "batch", "warmup", "pad", "seed"):
            _check_whole(field, getattr(self, field))
        for field, low, high in _RANGES:
            _check_range(field, getattr(self, field), low, high)
        for field in ("lr", "temperature", "factor", "clip_norm"):
            if getattr(self, field) == 0:
                raise InvalidInput(f"{field} = 0: wanted a number above 0")
        self._check_together()

    def _check_together(self) -> None:
        if (self.schedule == "step") != bool(self.milestones):
            raise InvalidInput(
                f"schedule = {self.schedule!r} with milestones = {list(self.milestones)}: "
                f"milestones go with schedule 'step', and only with it"
            )
        if list(self.milestones) != sorted(set(self.milestones)) or min(self.milestones, default=1) < 1:
            raise InvalidInput(f"milestones = {list(self.milestones)}: wanted rising epochs, from 1 on")
        if self.warmup and self.schedule == "one-cycle":
            raise InvalidInput(f"warmup = {self.warmup} with schedule 'one-cycle', which has its own: set warmup = 0")
        if self.warmup and self.warmup >= self.epochs:
            raise InvalidInput(f"warmup = {self.warmup} of epochs = {self.epochs}: wanted fewer warm-up epochs than epochs")
        if self.nesterov and self.momentum == 0:
            raise InvalidInput("nesterov = true with momentum = 0: it needs momentum")


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("epochs", 0, float("inf")),
    ("steps", 0, float("inf")),
    ("batch", 1, float("inf")),
    ("lr", 0, float("inf")),
    ("momentum", 0, 0.9999),
    ("weight_decay", 0, float("inf")),
    ("factor", 0, 1),
    ("warmup", 0, float("inf")),
    ("pad", 0, 1024),
    ("label_smoothing", 0, 0.9999),
    ("clip_norm", 0, float("inf")),
    ("distill", 0, 1),
    ("temperature", 0, float("inf")),
)


def _check_choice(field: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InvalidInput(f"{field} = {value!r}: wanted one of {', '.join(allowed)}.{suggest(str(value), allowed)}")


def _check_whole(field: str, value: object) -> None:
    if value is not None and not isinstance(value, int):
        raise InvalidInput(f"{field} = {value!r}: wanted a whole number")


def _check_range(field: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not isinstance(value, Real):
        raise InvalidInput(f"{field} = {value!r}: got {type(value).__name__}, wanted a number")
    if value is not None and not (isfinite(value) and low <= value <= high):
        wanted = f"{low:g} or more" if high == float("inf") else f"{low:g} to {high:g}"
        raise InvalidInput(f"{field} = {value}: wanted {wanted}")


# "We divide the initial 0.1 learning rate by 10 at 100 and 150 epochs and stop the training at 200 epochs", the rest as
# in He et al. (2016): batches of 128, momentum 0.9, weight decay 1e-4, crop and flip.
PAPER_RESNET = TrainSettings(
    epochs=200, batch=128, lr=0.1, weight_decay=1e-4, schedule="step", milestones=(100, 150), augment="crop-flip"
)

# "After a layer is pruned, we apply fine-tuning for 10 epochs." The paper does not say at which learning rate: 0.01, at
# which its retraining starts, is our choice.
PAPER_FINETUNE = TrainSettings(epochs=10, batch=128, lr=0.01, schedule="constant", augment="crop-flip")

# "We retrain the network for 80 epochs by setting the learning rate to 0.01 and multiply it by 0.1 in every 20 epochs."
PAPER_RETRAIN = TrainSettings(epochs=80, batch=128, lr=0.01, schedule="step", milestones=(20, 40, 60), augment="crop-flip")


Direction = Literal["forward", "backward"]
Budget = Literal["site", "run"]
Pool = Literal["train", "search"]
Signal = Literal["loss", "divergence"]
Repair = Literal["none", "least-squares", "every-layer"]
Allocation = Literal["sequential", "global"]
Asked = TypeVar("Asked")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a network is pruned. The defaults are the fast way; `Recipe.paper()` is Algorithm 1 as published.

    Training is off unless asked for. Drops are fractions: 0.005 is half a point.
    """

    max_drop: float = 0.005  # accuracy that may be lost
    budget: Budget = "run"  # the drop counts from the start of the whole "run", or of each "site" anew (the paper)
    confidence: float = 0.95  # that the drop is kept on other images too; 0: the point estimate decides
    worst_class: float | None = None  # accuracy that any single class may lose
    allocation: Allocation = "sequential"  # each site in turn as far as it goes, or all cuts weighed against each other
    direction: Direction = "forward"
    shortcut: Shortcut = "before"
    rounds: int = 1  # how often the sites are gone through
    sites: tuple[str, ...] = ()  # patterns such as "layer3.*"; empty: all sites
    target_parameters: float | None = None  # stop when this share of the parameters is removed
    target_macs: float | None = None  # stop when this share of the MACs is removed
    criterion: str = "ensemble"  # who ranks the filters: see `CRITERIA`
    portfolio: tuple[str, ...] = PORTFOLIO  # the criteria that "portfolio" compares
    estimator: Estimator = FAST.estimator  # of an ensemble: from losses at masks, or from their slopes
    adaptive: bool = FAST.adaptive  # stop when the least important filters are settled
    masks_per_filter: int = FAST.masks_per_filter  # the most that a site gets
    masks: int | None = FAST.masks  # so many at every site instead, whatever its width
    off: float = FAST.off  # share of a site's filters that a mask switches off (the paper's P)
    design: Design = FAST.design
    transform: Transform = FAST.transform
    model: Model = FAST.model
    ridge: float = FAST.ridge
    signal: Signal = "loss"  # what masks are scored by: the loss, or the divergence from the unpruned network's answers
    scoring: Pool = "train"  # the set that masks are scored on
    scoring_examples: int | Literal["all"] | None = None  # so many of them, every class in its share; None: by the noise
    repair: Repair = "none"  # in closed form: of the layers that read what was cut, or in the end of every layer as well
    repair_examples: int = 1024  # training examples that a repair is solved on
    repaired_masks: bool = False  # masks are scored after repair too: one solution for each
    search: Method = "bisect"
    largest_share: float = 0.9  # of a site's filters that one cut may remove
    round_to: int = 1  # kept filters come in multiples of this
    latency_aware: bool = False  # keep only numbers of filters that are measurably faster here than any larger one
    finetune: TrainSettings | None = None  # after every cut
    retrain: TrainSettings | None = None  # at the end
    recalibrate: int | None = None  # BatchNorm statistics after a cut, from so many training examples
    batch: int = 256  # examples at once while scoring and searching
    seed: int = 0

    @staticmethod
    def paper(**changes: Any) -> Recipe:
        """Algorithm 1 as published: 10 masks a filter on all training examples, α by point estimate, nothing repaired."""
        return Recipe(**{**_PAPER, **changes})

    def __post_init__(self) -> None:
        self._check_types()
        for name in _FRACTIONS:
            if type(getattr(self, name)) is int:  # so that 0 and 0.0 are one recipe, in memory and in a file
                object.__setattr__(self, name, float(getattr(self, name)))
        for name, kind in _RECIPE_CHOICES.items():
            value = getattr(self, name)
            if value not in get_args(kind):
                raise RecipeError(
                    f"{name} = {value!r}: wanted one of {', '.join(get_args(kind))}.{suggest(str(value), get_args(kind))}"
                )
        for name, (low, high) in _RECIPE_RANGES.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                wanted = f"{low:g} or more" if high == float("inf") else f"{low:g} to {high:g}"
                raise RecipeError(f"{name} = {value!r}: wanted {wanted}")
        for name in (self.criterion, *self.portfolio):
            if name not in CRITERIA or (name == "portfolio" and name in self.portfolio):
                raise RecipeError(f"criterion = {name!r}: wanted one of {', '.join(CRITERIA)}.{suggest(name, CRITERIA)}")
        if self.allocation == "global" and self.budget == "site":
            raise RecipeError(
                "budget = 'site' with allocation = 'global': cuts that are weighed against each other share one budget"
            )
        if not 0 < self.off < 1:
            raise RecipeError(f"off = {self.off!r}: wanted a share between 0 and 1, both excluded (the paper uses 0.3)")
        if not self.portfolio:
            raise RecipeError("portfolio = []: wanted at least one criterion to compare")
        if self.repair == "none" and (self.criterion == "obs" or set(self.portfolio) <= {"obs"}):
            raise RecipeError("criterion = 'obs': it goes by what repairs can make up for: set repair = 'least-squares'")
        if self.allocation == "global" and (self.rounds > 1 or self.direction == "backward"):
            raise RecipeError("allocation = 'global': all cuts are weighed at once, so rounds = 1 and direction = 'forward'")
        if self.repair == "every-layer" and self.allocation == "sequential":
            raise RecipeError(
                "repair = 'every-layer': comes after all cuts: set allocation = 'global', or repair = 'least-squares'"
            )
        if self.repaired_masks and (self.repair == "none" or self.estimator != "losses"):
            raise RecipeError("repaired_masks = true: wants a repair and estimator = 'losses'")
        if 0 < self.confidence <= 0.5:
            raise RecipeError(f"confidence = {self.confidence!r}: wanted more than 0.5 and less than 1, or 0: none")
        try:
            self.asked_of_ensembles()
        except InvalidInput as error:
            raise RecipeError(str(error)) from error

    def _check_types(self) -> None:
        for name in (*_FRACTIONS, *_WHOLE):
            value, wanted = getattr(self, name), Real if name in _FRACTIONS else Integral
            if value is None and name in _OPTIONAL:
                continue
            if not isinstance(value, wanted) or isinstance(value, bool):
                raise RecipeError(
                    f"{name} = {value!r}: got {type(value).__name__}, wanted a {'number' if wanted is Real else 'whole number'}"
                )
        for name in ("adaptive", "repaired_masks", "latency_aware"):
            if not isinstance(getattr(self, name), bool):
                raise RecipeError(f"{name} = {getattr(self, name)!r}: wanted True or False")
        for name in ("sites", "portfolio"):
            value = getattr(self, name)
            if not isinstance(value, tuple | list) or not all(isinstance(part, str) for part in value):
                raise RecipeError(f"{name} = {value!r}: wanted a tuple of texts, such as ('layer3.*',)")
            object.__setattr__(self, name, tuple(value))
        for name in ("finetune", "retrain"):
            if not isinstance(getattr(self, name), TrainSettings | None):
                raise RecipeError(f"{name} = {getattr(self, name)!r}: wanted TrainSettings, or None for no training")
        if self.scoring_examples not in (None, "all") and type(self.scoring_examples) is not int:
            raise RecipeError(f"scoring_examples = {self.scoring_examples!r}: wanted a whole number, 'all' or None")

    def asked_of_ensembles(self) -> Scoring:
        """The part of the recipe that says how an ensemble is made."""
        names = ("estimator", "adaptive", "masks_per_filter", "masks", "off", "design", "transform", "model", "ridge")
        return Scoring(examples=self.scoring_examples, **{name: getattr(self, name) for name in names})


_RECIPE_CHOICES = {
    "budget": Budget,
    "allocation": Allocation,
    "direction": Direction,
    "shortcut": Shortcut,
    "estimator": Estimator,
    "design": Design,
    "transform": Transform,
    "model": Model,
    "signal": Signal,
    "scoring": Pool,
    "repair": Repair,
    "search": Method,
}
_FRACTIONS = ("max_drop", "confidence", "worst_class", "target_parameters", "target_macs", "off", "ridge", "largest_share")
_WHOLE = ("rounds", "masks_per_filter", "masks", "repair_examples", "round_to", "recalibrate", "batch", "seed")
_OPTIONAL = ("worst_class", "target_parameters", "target_macs", "masks", "recalibrate")
_MANY = float("inf")
_RECIPE_RANGES: dict[str, tuple[float, float]] = {
    "max_drop": (0, 1),
    "confidence": (0, 0.999999),
    "worst_class": (0, 1),
    "rounds": (1, _MANY),
    "target_parameters": (0, 1),
    "target_macs": (0, 1),
    "repair_examples": (1, _MANY),
    "largest_share": (0, 1),
    "round_to": (1, _MANY),
    "recalibrate": (1, _MANY),
    "batch": (1, _MANY),
}
_PAPER = {
    "estimator": PAPER.estimator,
    "adaptive": PAPER.adaptive,
    "masks_per_filter": PAPER.masks_per_filter,
    "scoring_examples": PAPER.examples,
    "budget": "site",
    "confidence": 0.0,
    "search": "paper",
}


def read_recipe(path: str | Path, **overrides: Any) -> Recipe:
    """The recipe in a TOML file, with single fields overridden ("finetune.epochs" reaches inside a table)."""
    return recipe_from(_read_toml(Path(path)), where=str(path), **overrides)


def read_settings(path: str | Path, **overrides: Any) -> TrainSettings:
    """The settings of a training in a TOML file, with single fields overridden."""
    return settings_from(_read_toml(Path(path)), where=str(path), **overrides)


def settings_from(fields: dict[str, Any], *, where: str = "settings", **overrides: Any) -> TrainSettings:
    """The settings of a training that plain values describe; `where` is named in errors."""
    fields = _overridden(fields, overrides)
    _refuse_unknown(fields, TrainSettings, where, "")
    return _converted(fields, TrainSettings, where)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return decode_toml(read_text_file(path, max_bytes=MAX_TOML_BYTES))
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read ({error.strerror}).") from error
    except Malformed as error:
        raise RecipeError(f"{path}: {error}.") from error


def recipe_from(fields: dict[str, Any], *, where: str = "recipe", **overrides: Any) -> Recipe:
    """The recipe that nested plain values describe; `where` is named in errors."""
    fields = _overridden(fields, overrides)
    _refuse_unknown(fields, Recipe, where, "")
    for name in ("finetune", "retrain"):
        if isinstance(fields.get(name), dict):
            _refuse_unknown(fields[name], TrainSettings, where, f"{name}.")
    return _converted(fields, Recipe, where)


def _converted(fields: dict[str, Any], kind: type[Asked], where: str) -> Asked:
    try:
        return msgspec.convert(fields, kind, strict=True)
    except msgspec.ValidationError as error:
        raise RecipeError(f"{where}: {_readable(error, fields)}") from error
    except InvalidInput as error:
        raise RecipeError(f"{where}: {brief(error, 400)}") from error


def recipe_fields(recipe: Recipe) -> dict[str, Any]:
    """The recipe as plain values, fields that are None left out."""
    fields: dict[str, Any] = _without_none(msgspec.to_builtins(dataclasses.asdict(recipe)))
    return fields


def write_recipe(path: Path, recipe: Recipe) -> None:
    """Write the recipe as TOML, whole or not at all."""
    write_text(path, tomli_w.dumps(recipe_fields(recipe)))


def _overridden(fields: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    result = {key: dict(value) if isinstance(value, dict) else value for key, value in fields.items()}
    for key, value in overrides.items():
        table, dot, name = key.partition(".")
        if dot:
            inside = result.setdefault(table, {})
            inside[name] = value
        else:
            result[key] = value
    return result


def _refuse_unknown(fields: dict[str, Any], kind: Any, where: str, prefix: str) -> None:
    hints = get_type_hints(kind)
    for name, value in fields.items():
        if name not in hints:
            raise RecipeError(f"{where}: unknown field {brief(repr(prefix + name))}.{suggest(brief(name), hints)}")
        allowed = get_args(hints[name]) if get_origin(hints[name]) is Literal else (value,)
        if value not in allowed:
            shown = brief(repr(value))
            raise RecipeError(
                f"{where}: {prefix}{name} = {shown}: wanted one of {', '.join(allowed)}.{suggest(brief(value), allowed)}"
            )


def _readable(error: msgspec.ValidationError, fields: dict[str, Any]) -> str:
    """msgspec's message with the field's name first and the value that was found."""
    text, _, path = str(error).partition(" - at `$.")
    path = path.rstrip("`")
    value: Any = fields
    for part in path.split("[")[0].split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return f"{brief(path)} = {brief(repr(value))}: {brief(text[:1].lower() + text[1:])}" if path else brief(text)


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return [_without_none(v) for v in value] if isinstance(value, list | tuple) else value
