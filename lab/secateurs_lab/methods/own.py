"""Whole procedures of the user: `compare` runs them as `package.module:function`, by the rules that hold for our own."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch

from secateurs.errors import InvalidInput, SecateursError
from secateurs.graph.cost import cost
from secateurs.graph.masking import copy_module
from secateurs.graph.sites import find_sites, share_sites
from secateurs.graph.trace import Graph
from secateurs_lab.methods.base import (
    Method,
    MethodRun,
    MethodState,
    OwnMethod,
    Pruned,
    Spent,
    Task,
    Trained,
    Watch,
    opened,
    recipe_for,
)
from secateurs_lab.methods.training import check_outcome, finished, train_rest

_MARK = "secateurs_procedure"
_GRAPH = "a Graph, as secateurs.compact gives it"
_WHOLE, _FINITE = (int, "a whole number, 0 or more"), (float, "a finite number, 0 or more")
_FIGURES: Mapping[str, tuple[type, str]] = {
    "images": _WHOLE,
    "rate_sum": _FINITE,
    "stages": _WHOLE,
    "passes": _WHOLE,
    "search_seconds": _FINITE,
    "training_seconds": _FINITE,
    "note": (str, "a text"),
}
"""The fields that `Trained`, `Spent` and `Pruned` have for figures."""

P = TypeVar("P", bound=Callable[..., Pruned])


def procedure(function: P) -> P:
    """Mark a function (task, *, watch=None, …) -> Pruned as a whole procedure; without the mark it is taken for a criterion.

    Its other arguments have defaults: they are the settings that follow its name in brackets.
    """
    signature = inspect.signature(function)
    try:
        signature.bind("task")
        signature.bind("task", watch=None)
    except TypeError as error:
        name = getattr(function, "__qualname__", repr(function))
        raise InvalidInput(
            f"procedure {name} takes {signature}: wanted (task, *, watch=None), and defaults for all settings."
        ) from error
    setattr(function, _MARK, True)
    return function


def is_procedure(function: Callable[..., Any] | None) -> bool:
    """Whether the function was marked by `procedure`."""
    return getattr(function, _MARK, False) is True


def cut_then_train(task: Task, cut: Callable[[MethodRun], MethodState], *, watch: Watch | None = None) -> Pruned:
    """Make the cut, unless the task's folder holds it already, then spend the budget: what most procedures do.

    `cut` gives the smaller network, made of `task.graph` by `compact`, with `Spent(passes=…, note=…)` if it has anything to
    say; the run that it gets has the sites, and knows whether a network reaches the target. It is timed here. The folder
    remembers its code and the settings that it uses: with others, the task is refused.
    """
    with opened(task, "procedure", recipe_for(task, "l1"), watch, procedure=cut) as run:
        state = run.load()
        if state is None:
            began = time.monotonic()
            made = cut(run)
            gave = "cut gave" if task.own is None else f"method {task.own.name!r}: cut gave"
            _expect(gave, made, MethodState, "a secateurs_lab.methods.MethodState")
            _expect(f"{gave} graph =", made.graph, Graph, _GRAPH)
            _expect(f"{gave} spent =", made.spent, Spent, "a secateurs_lab.methods.Spent")
            _check_figures(gave, made.spent)
            if not run.reached(made.graph):
                raise InvalidInput(
                    f"target_macs = {task.target_macs:g}: the procedure removed {run.removed(made.graph):.3f} of the MACs."
                )
            spent = replace(made.spent, search_seconds=time.monotonic() - began)
            state = run.save(replace(made, spent=spent))
        return finished(run, train_rest(run, state))


def checked(name: str, method: Method, *, function: Callable[..., Any] | None = None) -> Method:
    """The user's method with the rules of a comparison enforced: its failures have a name, and what it gives is compared.

    It gets a copy of the network, and is refused if it changes that, or the data. The training must be that of the budget, and
    the target reached. `function` is the user's, if the method is a whole procedure.
    """

    def run(task: Task, *, watch: Watch | None = None) -> Pruned:
        lent = replace(task, graph=_copied(task.graph), own=OwnMethod(name, function))
        given = lent.contents()
        try:
            pruned = method(lent, watch=watch)
        except (SecateursError, torch.OutOfMemoryError):
            raise
        except (Exception, SystemExit) as error:
            raise InvalidInput(f"method {name!r} failed: {type(error).__name__}: {error}") from error
        lent.refuse_changes(given)
        gave = f"method {name!r} gave"
        _expect(gave, pruned, Pruned, "a secateurs_lab.methods.Pruned")
        _expect(f"{gave} graph =", pruned.graph, Graph, _GRAPH)
        _expect(f"{gave} trained =", pruned.trained, Trained, "a secateurs_lab.methods.Trained")
        _check_figures(gave, pruned.trained)
        _check_figures(gave, pruned)
        sites = sum(site.channels > 1 for site in find_sites(task.graph, task.shortcut))
        check_outcome(task, sites, pruned.trained, 1 - cost(pruned.graph).macs / cost(task.graph).macs)
        return pruned

    return run


def _copied(graph: Graph) -> Graph:
    """A copy that shares nothing with the graph that may be changed in place."""
    fresh = replace(graph, module=copy_module(graph), example=tuple(part.clone() for part in graph.example))
    share_sites(graph, fresh)
    return fresh


def _expect(gave: str, value: Any, kind: type, wanted: str) -> None:
    if not isinstance(value, kind):
        raise InvalidInput(f"{gave} {type(value).__name__}: wanted {wanted}.")


def _check_figures(gave: str, record: Pruned | Spent | Trained) -> None:
    """Raise unless all numbers and notes of the record are what a row can hold."""
    for name, (kind, wanted) in _FIGURES.items():
        value: Any = getattr(record, name, kind())
        fits = isinstance(value, (int, float) if kind is float else kind) and not isinstance(value, bool)
        if not fits or (kind is not str and not 0 <= value < math.inf):
            raise InvalidInput(f"{gave} {name} = {value!r:.60}: wanted {wanted}.")
