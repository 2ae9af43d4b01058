"""Which sites a run visits, and why it stops."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch

from secateurs.config import Recipe
from secateurs.errors import InvalidInput, suggest
from secateurs.graph.sites import find_sites
from secateurs.graph.trace import Graph
from secateurs.pruning.context import RunContext


def sites_of_round(outfit: RunContext, graph: Graph, number: int) -> list[str]:
    """The names of the sites that a round visits, in turn: those that `graph` has when the round begins."""
    record, recipe = outfit.record, outfit.workshop.recipe
    if not record.units("round", round=number):
        names = _chosen(recipe, [site.name for site in find_sites(graph, recipe.shortcut)])
        record.append("round", round=number, sites=names if recipe.direction == "forward" else names[::-1])
    return list(record.units("round", round=number)[0]["sites"])


def _chosen(recipe: Recipe, names: Sequence[str]) -> list[str]:
    """The names that the recipe's patterns fit; without patterns, all."""
    if not recipe.sites:
        return list(names)
    chosen = [name for name in names if any(fnmatch(name, pattern) for pattern in recipe.sites)]
    if not chosen:
        wanted = ", ".join(recipe.sites)
        raise InvalidInput(f"sites = [{wanted}]: no site has such a name.{suggest(wanted, names)}")
    return chosen


def target_reached(outfit: RunContext, graph: Graph) -> str:
    """The target that `graph` reaches, in words; empty if it reaches none."""
    recipe, (parameters, macs) = outfit.workshop.recipe, outfit.shares_removed(graph)
    for what, wanted, got in (("parameters", recipe.target_parameters, parameters), ("MACs", recipe.target_macs, macs)):
        if wanted is not None and got >= wanted:
            return f"{got:.1%} of the {what} are removed, of {wanted:.1%} wanted"
    return ""


def why_rounds_end(rounds: int) -> str:
    """The reason where all rounds were gone through."""
    return f"all {rounds} rounds are done" if rounds > 1 else "all sites are done"


def why_division_ends(outfit: RunContext, graph: Graph) -> str:
    """The reason where all cuts of a division were made."""
    recipe, reached = outfit.workshop.recipe, target_reached(outfit, graph)
    if not outfit.record.units("step"):
        return "no division is within the allowed drop"
    if not reached and (recipe.target_macs is not None or recipe.target_parameters is not None):
        return "all cuts of the division are made; no larger one is within the allowed drop, so the target is not reached"
    return reached or "all cuts of the division are made"
