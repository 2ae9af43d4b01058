"""Recipes by file or by name: the shipped ones lie in the package, or beside it in a checkout."""

from __future__ import annotations

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
    from secateurs.recipe import read_settings, settings_from

    if name is None:
        return settings_from({}, where="the command line", **overrides)
    return read_settings(find_recipe(name), **overrides)
