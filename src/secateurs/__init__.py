"""secateurs makes trained PyTorch networks smaller by removing whole filters and neurons."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from secateurs.artefact import load, save
    from secateurs.compaction import Verification, compact, replay, verify
    from secateurs.costs import Cost, cost
    from secateurs.ensemble import Ensemble, score_masks
    from secateurs.errors import SecateursError
    from secateurs.flow import rule
    from secateurs.graph import Graph, trace
    from secateurs.importance import Importance, fit_importance, fit_pairs, scores
    from secateurs.masking import masked
    from secateurs.masks import sample_masks
    from secateurs.plan import Plan
    from secateurs.recipe import Recipe, read_recipe
    from secateurs.run import Run, prune, resume
    from secateurs.search import Cut, find_cut
    from secateurs.sites import Site, Unprunable, find_site, find_sites
    from secateurs.steps import Outcome, Step
    from secateurs.timing import Latency, latency
    from secateurs.training import TrainSettings, train_

# Names are loaded when they are first used: importing torch takes seconds, which `secateurs --help` should not.
_HOMES = {
    "artefact": ("load", "save"),
    "compaction": ("Verification", "compact", "replay", "verify"),
    "costs": ("Cost", "cost"),
    "ensemble": ("Ensemble", "score_masks"),
    "errors": ("SecateursError",),
    "flow": ("rule",),
    "graph": ("Graph", "trace"),
    "importance": ("Importance", "fit_importance", "fit_pairs", "scores"),
    "masking": ("masked",),
    "masks": ("sample_masks",),
    "plan": ("Plan",),
    "recipe": ("Recipe", "read_recipe"),
    "run": ("Run", "prune", "resume"),
    "search": ("Cut", "find_cut"),
    "sites": ("Site", "Unprunable", "find_site", "find_sites"),
    "steps": ("Outcome", "Step"),
    "timing": ("Latency", "latency"),
    "training": ("TrainSettings", "train_"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Cost",
    "Cut",
    "Ensemble",
    "Graph",
    "Importance",
    "Latency",
    "Outcome",
    "Plan",
    "Recipe",
    "Run",
    "SecateursError",
    "Site",
    "Step",
    "TrainSettings",
    "Unprunable",
    "Verification",
    "compact",
    "cost",
    "find_cut",
    "find_site",
    "find_sites",
    "fit_importance",
    "fit_pairs",
    "latency",
    "load",
    "masked",
    "prune",
    "read_recipe",
    "replay",
    "resume",
    "rule",
    "sample_masks",
    "save",
    "score_masks",
    "scores",
    "trace",
    "train_",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'secateurs' has no attribute {name!r}")
    # a function may share its module's name (cost): what is in __all__ wins over the module of the same name
    value = getattr(import_module(f"secateurs.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
