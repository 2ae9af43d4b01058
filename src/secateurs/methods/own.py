"""Whole procedures of the user: `compare` runs them as `package.module:function`, by the rules that hold for our own."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch

from secateurs._util.tensors import digest
from secateurs.errors import InvalidInput, SecateursError
from secateurs.graph.cost import cost
from secateurs.graph.sites import find_sites
from secateurs.methods.base import Method, MethodRun, MethodState, Pruned, Task, Watch, opened, recipe_for
from secateurs.methods.training import check_outcome, finished, train_rest

_MARK = "secateurs_procedure"

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
            if not run.reached(made.graph):
                raise InvalidInput(
                    f"target_macs = {task.target_macs:g}: the procedure removed {run.removed(made.graph):.3f} of the MACs."
                )
            spent = replace(made.spent, search_seconds=time.monotonic() - began)
            state = run.save(replace(made, spent=spent))
        return finished(run, train_rest(run, state))


def checked(name: str, function: Method) -> Method:
    """The procedure with the rules of a comparison enforced: its failures have a name, and what it gives is compared.

    The training must be that of the budget, the target reached, and the task's own network unchanged.
    """

    def run(task: Task, *, watch: Watch | None = None) -> Pruned:
        before = digest(dict(task.graph.module.state_dict()))
        try:
            pruned = function(task, watch=watch)
        except (SecateursError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise InvalidInput(f"method {name!r} failed: {type(error).__name__}: {error}") from error
        if not isinstance(pruned, Pruned):
            raise InvalidInput(f"method {name!r} gave {type(pruned).__name__}: wanted a secateurs.methods.Pruned.")
        if digest(dict(task.graph.module.state_dict())) != before:
            raise InvalidInput(f"method {name!r} changed the network of its task: wanted it as it was. Work on a copy.")
        sites = sum(site.channels > 1 for site in find_sites(task.graph, task.shortcut))
        check_outcome(task, sites, pruned.trained, 1 - cost(pruned.graph).macs / cost(task.graph).macs)
        return pruned

    return run
