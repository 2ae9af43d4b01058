"""Criteria that score a site's filters one by one, registered by name: the alternatives to ensembles.

A criterion is a function of a `CriterionContext` that gives one number for each filter, higher = more important. To add one,
decorate it with `@criterion("name")`; every file of this package is loaded with it, and recipes may name it.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor

from secateurs import config
from secateurs.data.dataset import Examples
from secateurs.errors import InvalidInput, suggest
from secateurs.graph.sites import Site
from secateurs.graph.trace import Graph
from secateurs.scoring.evaluator import SiteEvaluator
from secateurs.scoring.importance import Importance

__all__ = ["CRITERIA", "Criterion", "CriterionContext", "as_criterion", "criterion", "score_filters"]


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

_REGISTRY: dict[str, Criterion] = {}
_USERS: dict[str, Callable[..., Any]] = {}  # functions that were given as they are, by name
CRITERIA: Mapping[str, Criterion] = MappingProxyType(_REGISTRY)
"""The registered criteria by name."""

F = TypeVar("F", bound=Callable[..., Tensor])


def criterion(name: str) -> Callable[[F], F]:
    """Register the decorated function as the criterion called `name`, which recipes may use from now on.

    It takes (graph, site, data), or one `CriterionContext`, and returns a score for each filter, higher = more important.
    """

    def register(function: F) -> F:
        if name in _REGISTRY:
            raise InvalidInput(f"criterion {name!r} is registered already: choose another name.")
        _REGISTRY[name] = _checked(name, function)
        if name not in config.CRITERIA:
            config.CRITERIA.append(name)
        return function

    return register


def as_criterion(function: UserCriterion) -> str:
    """Register a user's function under its own name, and return that name; the same name may be given to a later function."""
    name = getattr(function, "__name__", type(function).__name__)
    if name in config.CRITERIA and name not in _USERS:
        raise InvalidInput(f"criterion: got a function called {name!r}, which is taken: give it another name.")
    _REGISTRY.pop(name, None)
    _USERS[name] = criterion(name)(function)
    return name


def _checked(name: str, function: Callable[..., Tensor]) -> Criterion:
    """The function of a `CriterionContext`, with a check of what it returns."""
    single = len(inspect.signature(function).parameters) == 1

    def scored(context: CriterionContext) -> Tensor:
        site = context.site
        found = function(context) if single else function(context.graph, site, context.examples)
        if not isinstance(found, Tensor) or found.shape != (site.channels,):
            what = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise InvalidInput(f"criterion {name!r} gave {what} for site {site.name!r}: wanted a tensor ({site.channels},).")
        return found

    return scored


def score_filters(name: str, evaluator: SiteEvaluator, examples: Examples | None = None, *, seed: int = 0) -> Importance:
    """Score the filters of the evaluator's site by the criterion called `name`; criteria of weights need no examples.

    No linear model is fitted, so everything but the coefficients is NaN.
    """
    if name not in CRITERIA:
        raise InvalidInput(f"criterion: got {name!r}.{suggest(name, CRITERIA)}")
    nothing = Examples(torch.zeros(0, 1), torch.zeros(0, dtype=torch.long))
    data = nothing if examples is None else examples
    found = evaluator.limit.run(
        evaluator.batch, lambda batch: CRITERIA[name](CriterionContext(replace(evaluator, batch=batch), data, seed))
    )
    coef = found.detach().cpu().double()
    unknown = torch.tensor(torch.nan, dtype=torch.float64)
    return Importance(coef, unknown, torch.full_like(coef, torch.nan), unknown, unknown, unknown)


for _module in pkgutil.iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
