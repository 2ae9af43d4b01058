"""Criteria that score a site's filters one by one, registered by name: the alternatives to ensembles.

A criterion is a function of a `CriterionContext` that gives one number for each filter, higher = more important. To add one,
decorate it with `@criterion("name")`; every file of this package is loaded with it, and recipes may name it. A criterion of
another installed package is loaded when it is named: an entry point in the group secateurs.criteria. A user's function is also
found as `package.module:function`, which is how the recipe of a run records it.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor

from secateurs import config
from secateurs._util.entrypoints import find
from secateurs._util.extensions import added, load_added
from secateurs._util.modules import keeping_modes, network_digest
from secateurs.config import Recipe
from secateurs.data.dataset import Examples
from secateurs.errors import InvalidInput, RunError, SecateursError, suggest
from secateurs.graph.sites import Site
from secateurs.graph.trace import Graph
from secateurs.scoring.evaluator import SiteEvaluator
from secateurs.scoring.importance import Importance

__all__ = [
    "CRITERIA",
    "Criterion",
    "CriterionContext",
    "as_criterion",
    "criterion",
    "passes_of",
    "resolved",
    "score_filters",
    "short_name",
    "taken_up",
    "user_function",
]


@dataclass(frozen=True, eq=False)
class CriterionContext:
    """A site and everything that a criterion may look at."""

    evaluator: SiteEvaluator  # the network as it is now, and the loss
    examples: Examples
    seed: int = 0

    @property
    def graph(self) -> Graph:
        """The network."""
        return self.evaluator.graph

    @property
    def site(self) -> Site:
        """The site whose filters are scored."""
        return self.evaluator.site


Criterion = Callable[[CriterionContext], Tensor]
"""Gives the importance (C,) of each of the site's filters."""

UserCriterion = Callable[[Graph, Site, Examples], Tensor]
"""The same as users write it: (graph, site, data) -> scores (C,)."""

Passes = Callable[[int, int], int]
"""Gives how often a network runs for each example at a site, backward as two, for its channels and the classes of the data."""

_REGISTRY: dict[str, Criterion] = {}
_OWN: dict[str, Criterion] = {}  # the user's functions, by module:function
_FUNCTIONS: dict[str, Callable[..., Any]] = {}  # the functions of both, as they were written
_PASSES: dict[str, Passes] = {}
CRITERIA: Mapping[str, Criterion] = MappingProxyType(_REGISTRY)
"""The registered criteria by name."""

F = TypeVar("F", bound=Callable[..., Tensor])


def criterion(name: str, *, passes: Passes | None = None) -> Callable[[F], F]:
    """Register the decorated function as the criterion called `name`, which recipes may use from now on.

    It takes (graph, site, data), or one `CriterionContext`, and returns a score for each filter, higher = more important. One
    that runs the network says by `passes` how often, for the forecast of a run's time.
    """

    def register(function: F) -> F:
        known = name in config.CRITERIA or name in added("criteria")
        if known and (name in _REGISTRY or not _is_installed(name, function)):
            raise InvalidInput(f"criterion {name!r} is registered already: choose another name.")
        if ":" in name:
            raise InvalidInput(f"criterion {name!r}: wanted a name without a colon, which package.module:function has.")
        _REGISTRY[name], _FUNCTIONS[name] = _checked(name, function), function
        if passes is not None:
            _PASSES[name] = passes
        if not known:
            config.CRITERIA.append(name)
            as_criterion(function)  # a run that is resumed looks for it under this name
        return function

    return register


def as_criterion(function: UserCriterion, name: str = "") -> str:
    """Register a user's function under `name`, by default its own `module:function`, and return that name.

    The same name may be given to a later function.
    """
    own: Any = function if hasattr(function, "__qualname__") else type(function)
    # the call in the name of an object's type keeps the type itself from being imported in its place
    name = name or f"{_module_of(own) or '__main__'}:{own.__qualname__}{'' if own is function else '()'}"
    _OWN[name], _FUNCTIONS[name] = _checked(name, function), function
    return name


def resolved(recipe: Recipe) -> Recipe:
    """The recipe with every criterion of the user's found, and named so that another process finds it: `module:function`."""
    portfolio = tuple(_located(name) for name in recipe.portfolio)
    return replace(recipe, criterion=_located(recipe.criterion), portfolio=portfolio)


def taken_up(recipe: Recipe, functions: Sequence[UserCriterion], where: object) -> Recipe:
    """The recipe of a folder with the functions of the user's that it names, given again.

    Nothing is imported by a name from a folder, which may come from anybody: a name that is neither among `functions` nor
    registered in this process is an error.
    """
    for function in functions:
        as_criterion(function)
    if len(functions) == 1 and ":" in recipe.criterion:  # for people it may have another name now
        as_criterion(functions[0], recipe.criterion)
    used = (recipe.criterion, *(recipe.portfolio if recipe.criterion == "portfolio" else ()))
    missing = [name for name in dict.fromkeys(used) if ":" in name and name not in _OWN]
    if missing:
        raise RunError(
            f"{where}: names {' and '.join(map(repr, missing))} as its criterion, which is not imported, because a folder may "
            f"come from anybody. Give the function again: secateurs.resume(folder, model, criterion=…), or on the command "
            f"line with --criterion package.module:function."
        )
    return named(recipe)


def named(recipe: Recipe) -> Recipe:
    """The recipe with the criteria that are registered under names of their own as `module:function`; nothing is imported."""

    def known(name: str) -> str:
        return name if ":" in name else _located(name)

    return replace(recipe, criterion=known(recipe.criterion), portfolio=tuple(map(known, recipe.portfolio)))


def user_function(name: str) -> Callable[..., Any] | None:
    """The user's own function behind a criterion, imported if `name` is `package.module:function`; None for installed ones."""
    _load(name)
    if ":" in name and name not in _OWN:
        if name.startswith("__main__:") or "<" in name or name.endswith("()"):
            raise InvalidInput(
                f"criterion {name!r} cannot be imported: wanted package.module:function, or the function itself."
            )
        as_criterion(find(name, f"criterion {name!r}"), name)
    found = _FUNCTIONS.get(name)
    return None if found is None or _is_installed(name, found) else found


def passes_of(name: str, channels: int, classes: int) -> int:
    """How often a criterion runs the network for each example at a site; 0 for one that does not say."""
    _load(name)
    return _PASSES[name](channels, classes) if name in _PASSES else 0


def short_name(name: str) -> str:
    """A criterion's name for people: of a user's own, that of the function without its module."""
    short = name.rpartition(":")[2].rpartition(".")[2] if ":" in name else name
    # the name of a built-in criterion would be taken for that one
    return name if short in config.CRITERIA and _FUNCTIONS.get(short) is not _FUNCTIONS.get(name) else short


def _located(name: str) -> str:
    function = user_function(name)
    return name if function is None or ":" in name else as_criterion(function)


def _load(name: str) -> None:
    """Import the criterion of another installed package, which registers itself."""
    if name not in _REGISTRY:
        load_added("criteria", name)


def _is_installed(name: str, function: Callable[..., Any]) -> bool:
    """Whether every process finds the function under this name: it is of this package, or of another with an entry point."""
    module, entry = _module_of(function), added("criteria").get(name)
    return module.startswith(f"{__name__}.") or (entry is not None and entry.module == module)


def _module_of(function: Callable[..., Any]) -> str:
    """Empty for code that was executed outside of any module."""
    return getattr(function, "__module__", None) or ""


def _checked(name: str, function: Callable[..., Tensor]) -> Criterion:
    """The function of a `CriterionContext`, with checks of its signature and of what it returns."""
    own, name = not _is_installed(name, function), short_name(name)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:  # no function, or one that is written in C
        raise InvalidInput(f"criterion: got {function!r:.60}, wanted a name, or a function (graph, site, data).") from error
    three, single = _takes(signature, 3), _takes(signature, 1)
    if not three and not single:
        raise InvalidInput(f"criterion {name!r} takes {signature}: wanted (graph, site, data), or one CriterionContext.")

    def scored(context: CriterionContext) -> Tensor:
        site, module = context.site, context.graph.module
        before = network_digest(module) if own else ""
        try:
            with keeping_modes(module):
                found = function(context.graph, site, context.examples) if three else function(context)
        except (SecateursError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise InvalidInput(f"criterion {name!r} failed at site {site.name!r}: {what}") from error
        if own and network_digest(module) != before:
            raise InvalidInput(
                f"criterion {name!r} changed the network's weights or buffers at site {site.name!r}, or its modules: wanted "
                f"them as they were. Work on a copy.deepcopy of graph.module."
            )
        if not isinstance(found, Tensor) or found.shape != (site.channels,) or found.is_complex() or found.is_meta:
            got: Any = type(found).__name__
            if isinstance(found, Tensor):
                got = tuple(found.shape) if found.shape != (site.channels,) else f"{found.dtype} on {found.device}"
            raise InvalidInput(
                f"criterion {name!r} gave {got} for site {site.name!r}: wanted a tensor ({site.channels},) of real numbers."
            )
        unknown = int(found.isnan().sum())
        if unknown:
            raise InvalidInput(
                f"criterion {name!r} gave NaN for {unknown} of the {site.channels} filters of site {site.name!r}: wanted a "
                f"number for each."
            )
        return found

    return scored


def _takes(signature: inspect.Signature, count: int) -> bool:
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True


def score_filters(name: str, evaluator: SiteEvaluator, examples: Examples | None = None, *, seed: int = 0) -> Importance:
    """Score the filters of the evaluator's site by the criterion called `name`; criteria of weights need no examples.

    No linear model is fitted, so everything but the coefficients is NaN.
    """
    _load(name)
    scorer = CRITERIA.get(name) or _OWN.get(name)
    if scorer is None:
        raise InvalidInput(f"criterion: got {name!r}.{suggest(name, CRITERIA)}")
    nothing = Examples(torch.zeros(0, 1), torch.zeros(0, dtype=torch.long))
    data = nothing if examples is None else examples
    found = evaluator.limit.run(
        evaluator.batch, lambda batch: scorer(CriterionContext(replace(evaluator, batch=batch), data, seed))
    )
    coef = found.detach().cpu().double()
    unknown = torch.tensor(torch.nan, dtype=torch.float64)
    return Importance(coef, unknown, torch.full_like(coef, torch.nan), unknown, unknown, unknown)


for _module in pkgutil.iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
