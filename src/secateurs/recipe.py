"""What the user asks of a run, as a record and as a TOML file; every field is checked, unknown ones are errors."""

from __future__ import annotations

import dataclasses
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
import tomli_w

from secateurs.errors import InvalidInput, RecipeError, suggest
from secateurs.files import write_text
from secateurs.importance import Transform
from secateurs.masks import Design
from secateurs.search import Method
from secateurs.sites import Shortcut
from secateurs.training import TrainSettings

Direction = Literal["forward", "backward"]
Budget = Literal["site", "run"]
Model = Literal["linear", "pairs"]
Scoring = Literal["train", "search"]
Asked = TypeVar("Asked")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a network is pruned (Algorithm 1). The defaults are the paper's, but for training, which is off unless asked for."""

    max_drop: float = 0.005  # accuracy that may be lost, a fraction: 0.005 is half a point
    budget: Budget = "site"  # the drop counts from the start of the "site", or of the whole "run"
    direction: Direction = "forward"
    shortcut: Shortcut = "before"
    rounds: int = 1  # how often the sites are gone through
    sites: tuple[str, ...] = ()  # patterns such as "layer3.*"; empty: all sites
    target_parameters: float | None = None  # stop when this share of the parameters is removed
    target_macs: float | None = None  # stop when this share of the MACs is removed
    masks_per_filter: int = 10
    masks: int | None = None  # masks at every site, whatever its width
    off: float = 0.3  # share of a site's filters that a mask switches off (the paper's P)
    design: Design = "exact"
    transform: Transform = "linear"
    model: Model = "linear"
    ridge: float = 0.0
    scoring: Scoring = "train"  # the set whose loss the masks are scored by
    scoring_examples: int | None = None  # so many of them, every class in its share; None: all
    search: Method = "bisect"
    largest_share: float = 0.9  # of a site's filters that one cut may remove
    finetune: TrainSettings | None = None  # after every cut
    retrain: TrainSettings | None = None  # at the end
    recalibrate: int | None = None  # BatchNorm statistics after a cut, from so many training examples
    batch: int = 256  # examples at once while scoring and searching
    seed: int = 0

    def __post_init__(self) -> None:
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


_CHOICES = {
    "budget": Budget,
    "direction": Direction,
    "shortcut": Shortcut,
    "design": Design,
    "transform": Transform,
    "model": Model,
    "scoring": Scoring,
    "search": Method,
}
_MANY = float("inf")
_RANGES: dict[str, tuple[float, float]] = {
    "max_drop": (0, 1),
    "rounds": (1, _MANY),
    "target_parameters": (0, 1),
    "target_macs": (0, 1),
    "masks_per_filter": (1, _MANY),
    "masks": (4, _MANY),
    "off": (0, 1),
    "ridge": (0, _MANY),
    "scoring_examples": (1, _MANY),
    "largest_share": (0, 1),
    "recalibrate": (1, _MANY),
    "batch": (1, _MANY),
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
        return tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read ({error.strerror}).") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: not TOML ({error}).") from error


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
        raise RecipeError(f"{where}: {error}") from error


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
            raise RecipeError(f"{where}: unknown field {prefix + name!r}.{suggest(name, hints)}")
        allowed = get_args(hints[name]) if get_origin(hints[name]) is Literal else (value,)
        if value not in allowed:
            raise RecipeError(
                f"{where}: {prefix}{name} = {value!r}: wanted one of {', '.join(allowed)}.{suggest(str(value), allowed)}"
            )


def _readable(error: msgspec.ValidationError, fields: dict[str, Any]) -> str:
    """msgspec's message with the field's name first and the value that was found."""
    text, _, path = str(error).partition(" - at `$.")
    path = path.rstrip("`")
    value: Any = fields
    for part in path.split("[")[0].split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return f"{path or 'recipe'} = {value!r}: {text[:1].lower()}{text[1:]}"


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return [_without_none(v) for v in value] if isinstance(value, list | tuple) else value
