"""secateurs makes trained PyTorch networks smaller by removing whole filters and neurons."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from secateurs.api import Pruner, prune, resume
    from secateurs.compaction import Verification, compact, replay, verify
    from secateurs.compaction.in_place import cut_
    from secateurs.compaction.serialization import load, save
    from secateurs.config import Recipe, TrainSettings, read_recipe
    from secateurs.criteria import criterion
    from secateurs.errors import SecateursError
    from secateurs.graph.cost import Cost, cost
    from secateurs.graph.flow import rule
    from secateurs.graph.masking import masked
    from secateurs.graph.plan import Plan
    from secateurs.graph.sites import Site, Unprunable, find_site, find_sites
    from secateurs.graph.trace import Graph, trace
    from secateurs.pruning.results import Step
    from secateurs.report.result import Result
    from secateurs.scoring.ensemble import Ensemble, score_masks
    from secateurs.scoring.importance import Importance, fit_importance, fit_pairs, scores
    from secateurs.scoring.masks import sample_masks
    from secateurs.selection.search import Cut, find_cut
    from secateurs.speed.latency import Latency, latency
    from secateurs.training import carry_optimizer, train_

# Names are loaded when they are first used: importing torch takes seconds, which `secateurs --help` should not.
_HOMES = {
    "api": ("Pruner", "prune", "resume"),
    "compaction": ("Verification", "compact", "replay", "verify"),
    "compaction.in_place": ("cut_",),
    "compaction.serialization": ("load", "save"),
    "criteria": ("criterion",),
    "config": ("Recipe", "TrainSettings", "read_recipe"),
    "errors": ("SecateursError",),
    "graph.cost": ("Cost", "cost"),
    "graph.flow": ("rule",),
    "speed.latency": ("Latency", "latency"),
    "graph.masking": ("masked",),
    "graph.plan": ("Plan",),
    "graph.sites": ("Site", "Unprunable", "find_site", "find_sites"),
    "graph.trace": ("Graph", "trace"),
    "pruning.results": ("Step",),
    "report.result": ("Result",),
    "scoring.ensemble": ("Ensemble", "score_masks"),
    "scoring.importance": ("Importance", "fit_importance", "fit_pairs", "scores"),
    "scoring.masks": ("sample_masks",),
    "selection.search": ("Cut", "find_cut"),
    "training": ("carry_optimizer", "train_"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Cost",
    "Cut",
    "Ensemble",
    "Graph",
    "Importance",
    "Latency",
    "Plan",
    "Pruner",
    "Recipe",
    "Result",
    "SecateursError",
    "Site",
    "Step",
    "TrainSettings",
    "Unprunable",
    "Verification",
    "carry_optimizer",
    "compact",
    "cost",
    "criterion",
    "cut_",
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
    if name == "__version__":
        from importlib.metadata import version  # takes long to import

        return version("secateurs")
    if name not in _HOME:
        raise AttributeError(f"module 'secateurs' has no attribute {name!r}")
    # a function may share its module's name (cost): what is in __all__ wins over the module of the same name
    value = getattr(import_module(f"secateurs.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
