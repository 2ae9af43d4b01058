"""What the user asks of a run, as a record and as a TOML file; every field is checked, unknown ones are errors."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
import tomli_w

from secateurs.contract import Contract
from secateurs.decode import MAX_TOML_BYTES, Malformed, brief, decode_toml, read_text_file
from secateurs.errors import InvalidInput, RecipeError, suggest
from secateurs.files import write_text
from secateurs.importance import Transform
from secateurs.masks import Design
from secateurs.ranking import CRITERIA, PORTFOLIO
from secateurs.scoring import FAST, PAPER, Estimator, Model, Scoring
from secateurs.search import Method
from secateurs.sites import Shortcut
from secateurs.training import TrainSettings

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
    criterion: str = "ensemble"  # who ranks the filters: see `secateurs.ranking.CRITERIA`
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
        for name in _FRACTIONS:
            if type(getattr(self, name)) is int:  # so that 0 and 0.0 are one recipe, in memory and in a file
                object.__setattr__(self, name, float(getattr(self, name)))
        for name, kind in _CHOICES.items():
            value = getattr(self, name)
            if value not in get_args(kind):
                raise RecipeError(
                    f"{name} = {value!r}: wanted one of {', '.join(get_args(kind))}.{suggest(str(value), get_args(kind))}"
                )
        for name, (low, high) in _RANGES.items():
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

    def asked_of_ensembles(self) -> Scoring:
        """The part of the recipe that says how an ensemble is made."""
        names = ("estimator", "adaptive", "masks_per_filter", "masks", "off", "design", "transform", "model", "ridge")
        return Scoring(examples=self.scoring_examples, **{name: getattr(self, name) for name in names})

    def contract(self) -> Contract:
        """What may be lost, and how sure that must be."""
        # without training, all that is asked after a refusal is more of what was refused: the first "no" may be final
        trains = self.finetune is not None or self.retrain is not None or self.recalibrate is not None
        final = self.budget == "run" and not trains
        return Contract(self.max_drop, self.confidence or None, self.worst_class, reserve=0.0 if final else 0.2)


_CHOICES = {
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
_MANY = float("inf")
_RANGES: dict[str, tuple[float, float]] = {
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
