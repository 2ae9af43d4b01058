"""Recipes by file or by name: the shipped ones lie in the package, or beside it in a checkout."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from secateurs.errors import RecipeError, suggest

if TYPE_CHECKING:
    from secateurs.recipe import Recipe
    from secateurs.training import TrainSettings

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
    from secateurs.recipe import read_recipe, recipe_from

    if name is None:
        return recipe_from({}, where="the command line", **overrides)
    return read_recipe(find_recipe(name), **overrides)


def chosen_settings(name: str | None, overrides: dict[str, Any]) -> TrainSettings:
    """The training settings of that file or name (None: all defaults), with single ones overridden."""
    from secateurs.recipe import recipe_from

    path = None if name is None else find_recipe(name)
    table = {} if path is None else _read(path)
    # the table that a pruning recipe holds for its last training has the same fields and the same checks
    inside = {f"retrain.{key}": value for key, value in overrides.items()}
    try:
        settings = recipe_from({"retrain": table}, where=str(path or "the command line"), **inside).retrain
    except RecipeError as error:
        raise RecipeError(str(error).replace("retrain.", "")) from error
    assert settings is not None
    return settings


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read ({error.strerror}).") from error
    except ValueError as error:
        raise RecipeError(f"{path}: not TOML ({error}).") from error
