"""Recipes and settings as TOML files and as plain values; errors name the file and the field."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from secateurs._util.decode import MAX_TOML_BYTES, Malformed, brief, decode_toml, read_text_file
from secateurs._util.files import write_text
from secateurs.config.declared import declarations, refuse_unknown
from secateurs.config.recipe import TRAININGS, Recipe
from secateurs.config.scoring import EnsembleSettings
from secateurs.config.training import TrainSettings, named_settings
from secateurs.errors import InvalidInput, RecipeError


def read_recipe(path: str | Path, **overrides: Any) -> Recipe:
    """Read a recipe from a TOML file, with single fields overridden ("finetune.epochs" is a field of a table)."""
    return recipe_from(read_fields(Path(path)), where=str(path), **overrides)


def read_settings(path: str | Path, **overrides: Any) -> TrainSettings:
    """Read the settings of a training from a TOML file, with single fields overridden."""
    return settings_from(read_fields(Path(path)), where=str(path), **overrides)


def recipe_from(fields: dict[str, Any], *, where: str = "recipe", **overrides: Any) -> Recipe:
    """Make a recipe from nested plain values; `where` is named in errors."""
    given = _overridden(fields, overrides, where)
    for name in TRAININGS:
        if isinstance(given.get(name), dict):
            given[name] = _made(TrainSettings, given[name], where, f"{name}.")
    recipe: Recipe = _made(Recipe, given, where)
    return recipe


def settings_from(fields: dict[str, Any], *, where: str = "settings", **overrides: Any) -> TrainSettings:
    """Make the settings of a training from plain values; `where` is named in errors."""
    settings: TrainSettings = _made(TrainSettings, _overridden(fields, overrides, where), where)
    return settings


def recipe_fields(recipe: Recipe) -> dict[str, Any]:
    """The recipe as plain values, without fields that are None."""
    fields: dict[str, Any] = _without_none(msgspec.to_builtins(dataclasses.asdict(recipe)))
    ensemble = declarations(EnsembleSettings)  # last: in a file, max_drop is looked for first
    return {name: fields[name] for name in sorted(fields, key=lambda name: name in ensemble)}


def write_recipe(path: Path, recipe: Recipe) -> None:
    """Write the recipe as TOML, whole or not at all."""
    write_text(path, tomli_w.dumps(recipe_fields(recipe)))


def read_fields(path: Path) -> dict[str, Any]:
    """The values of a TOML file as they stand there; RecipeError if it cannot be read."""
    try:
        return decode_toml(read_text_file(path, max_bytes=MAX_TOML_BYTES))
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read ({error.strerror}).") from error
    except Malformed as error:
        raise RecipeError(f"{path}: {error}.") from error


def _overridden(fields: dict[str, Any], overrides: dict[str, Any], where: str) -> dict[str, Any]:
    result = {key: dict(value) if isinstance(value, dict) else value for key, value in fields.items()}
    for key, value in sorted(overrides.items(), key=lambda item: "." in item[0]):  # tables first, then fields of them
        table, dot, name = key.partition(".")
        if dot and table in TRAININGS and isinstance(named := result.get(table), str):
            result[table] = dataclasses.asdict(named_settings(named, f"{where}: {table}"))
        inside = result.setdefault(table, {}) if dot else result
        if not isinstance(inside, dict):
            raise RecipeError(f"{where}: {table} = {brief(repr(inside))} with {key}: wanted a table of settings.")
        inside[name or key] = value
    return result


def _made(kind: Any, fields: dict[str, Any], where: str, prefix: str = "") -> Any:
    refuse_unknown(kind, fields, where, prefix)
    try:
        return kind(**fields)
    except InvalidInput as error:
        raise RecipeError(f"{where}: {prefix}{error}") from error


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return [_without_none(v) for v in value] if isinstance(value, list | tuple) else value
