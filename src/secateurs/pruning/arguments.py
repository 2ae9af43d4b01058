"""What the arguments of `prune` ask for: refused where they cannot be, and brought into one recipe."""

from __future__ import annotations

import glob
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from secateurs._util.decode import brief
from secateurs._util.modules import device_of, eval_mode
from secateurs.config import Recipe, declarations
from secateurs.criteria import as_criterion, resolved
from secateurs.data.dataset import class_labels, derive
from secateurs.data.drawn import Loaders, open_loaders
from secateurs.data.forms import PAIR, Forward
from secateurs.data.splits import Data, refuse_nonfinite
from secateurs.distributed import Workers
from secateurs.errors import DataError, InvalidInput, suggest
from secateurs.graph.sites import find_sites
from secateurs.graph.trace import Graph
from secateurs.metrics import Measure, check_targets
from secateurs.pruning.context import Runtime
from secateurs.pruning.estimate import CHEAPER, within_time
from secateurs.pruning.judge import check_contract, contract_of
from secateurs.pruning.whole_metric import Evaluate, WholeMetric

_ARGUMENTS = {"target_macs": "macs", "target_parameters": "parameters"}
"""Names of arguments that are not those of the recipe's fields."""

Ignored = str | nn.Module | type[nn.Module]
Ignore = Ignored | Sequence[Ignored]
"""Layers that keep all their filters, with all layers in them: by pattern of names, by module, or by type."""


def recipe_for(recipe: Recipe | None, criterion: str | Callable[..., Any] | None, **changes: Any) -> Recipe:
    """The recipe with the arguments of the call; the best one known where none is given."""
    known: dict[str, Any] = {name: value for name, value in changes.items() if value is not None}
    drop = known.get("max_drop")
    if isinstance(drop, int | float) and drop >= 1:
        raise InvalidInput(f"max_drop={drop:g}: wanted a fraction below 1: 0.01 is one point of accuracy.")
    if criterion is not None:
        known["criterion"] = criterion if isinstance(criterion, str) else as_criterion(criterion)
    if recipe is None:
        return resolved(Recipe(**known))
    asked = replace(recipe, **known)
    for name in known:
        _refuse_two_values(name, getattr(recipe, name), getattr(asked, name), recipe)
    return resolved(asked)


def _refuse_two_values(name: str, own: Any, given: Any, recipe: Recipe) -> None:
    """InvalidInput where the recipe says one thing of a field and the call another.

    A recipe does not remember which fields were set. A value that stands in one without being set is taken for unset: what the
    other fields make of it, and what `Recipe.fast()` and `Recipe.paper()` have.
    """
    unset = replace(recipe, **{name: declarations(Recipe)[name][1]}), Recipe.fast(), Recipe.paper()
    if given == own or own in [getattr(each, name) for each in unset]:
        return
    argument = _ARGUMENTS.get(name, name)
    raise InvalidInput(
        f"{argument}={brief(repr(given))}, and the recipe has {name}={brief(repr(own))}: two values for one thing. Leave "
        f"{argument} out, or change the recipe: dataclasses.replace(recipe, {name}=…)."
    )


def without_ignored(recipe: Recipe, graph: Graph, model: nn.Module, ignore: Ignore) -> Recipe:
    """The recipe restricted to sites none of whose layers is ignored."""
    if not ignore:
        return recipe
    ignored: set[str] = set()
    for one in [ignore] if isinstance(ignore, str | nn.Module | type) else ignore:
        if not isinstance(one, str | nn.Module | type):
            raise InvalidInput(f"ignore: got {one!r:.60}, wanted patterns of layers' names, modules, or types of modules.")
        found = [
            (name, module)
            for name, module in model.named_modules()
            if (
                fnmatch(name, one)
                if isinstance(one, str)
                else isinstance(module, one)
                if isinstance(one, type)
                else module is one
            )
        ]
        if not found:
            raise InvalidInput(f"ignore: no layer of the network is {_unfound(one, model)}")
        ignored |= {f"{name}.{inner}".strip(".") for name, module in found for inner, _ in module.named_modules()}
    widths = recipe.head_widths
    positions = [site for shortcut in recipe.shortcuts for site in find_sites(graph, shortcut, head_widths=widths)]
    wanted = recipe.sites or ("*",)
    sites = [
        site
        for site in positions
        if not ignored.intersection(site.layers) and any(fnmatch(site.name, pattern) for pattern in wanted)
    ]
    if not sites:
        raise InvalidInput("ignore: no site is left to prune.")
    return replace(recipe, sites=tuple(glob.escape(site.name) for site in sites))


def _unfound(one: Ignored, model: nn.Module) -> str:
    """What no layer is, with what may have been meant."""
    if isinstance(one, str):
        return f"{one!r}.{suggest(one, [name for name, _ in model.named_modules() if name])}"
    if isinstance(one, type):
        return f"a {one.__name__}.{suggest(one.__name__, sorted({type(module).__name__ for module in model.modules()}))}"
    return f"this {type(one).__name__}: give a layer of the model itself, not of a copy, or its name."


def feasible(recipe: Recipe, data: Data, whole: WholeMetric | None, *, trains: bool, given: bool, notes: list[str]) -> Recipe:
    """The recipe, without its promise where nothing can be certified: by one number, or by too few examples and no recipe."""
    if whole is not None and whole.count is None and recipe.confidence:
        recipe = replace(recipe, confidence=0.0)
        notes.append("evaluate gives one number for the whole set, so nothing can be certified: point estimates decide")
    if recipe.max_drop >= 1:
        notes.append(f"max_drop={recipe.max_drop:g} allows all accuracy to be lost: 0.01 is one point")
    count = len(data.search) if whole is None or whole.count is None else whole.count
    contract, labels = contract_of(recipe, trains=trains), class_labels(data.search.targets)
    try:
        check_contract(count, labels, contract, seed=derive(recipe.seed, "certify"))
    except InvalidInput as error:
        if given:
            raise
        notes.append(f"nothing is promised: {str(error).split('. ')[0]}; point estimates decide")
        return replace(recipe, confidence=0.0)
    return recipe


def within_time_budget(
    workers: Workers, seconds: float, recipe: Recipe, graph: Graph, data: Data, runtime: Runtime, notes: list[str]
) -> Recipe:
    """The recipe that takes no longer, as the first worker measured it."""

    def chosen() -> bytes:
        found = within_time(seconds, recipe, graph, data, runtime, notes)
        return json.dumps({name: getattr(found, name) for name in CHEAPER}).encode()

    return replace(recipe, **json.loads(workers.shared("the time budget", chosen)))


def check_autograd() -> None:
    """Refuse to begin where torch makes tensors that can never be trained."""
    if torch.is_inference_mode_enabled():
        raise InvalidInput(
            "this is called inside torch.inference_mode(), whose tensors cannot be trained: call it outside, or under "
            "torch.no_grad()."
        )


def check_call(model: nn.Module, recipe: object, time_budget: float | None, functions: Mapping[str, object]) -> None:
    """Refuse what no call can be made with, before anything is read."""
    if device_of(model).type == "meta":
        raise InvalidInput(
            "the model is on the meta device: it has shapes and no weights, so nothing can be measured. Build it on a real "
            "device and load its weights: model.to_empty(device='cpu'), then model.load_state_dict(...)."
        )
    check_functions(**functions)
    if recipe is not None and not isinstance(recipe, Recipe):
        raise InvalidInput(f"recipe: got {recipe!r:.40}, wanted a Recipe: Recipe(…), Recipe.fast(…) or Recipe.paper(…).")
    if time_budget is not None and not (isinstance(time_budget, Real) and time_budget > 0):
        raise InvalidInput(f"time_budget: got {time_budget!r:.40}, wanted a number of seconds above 0.")


def open_sets(
    model: nn.Module, train: Any, val: Any, test: Any, evaluate: object, *, forward: Forward | None, **options: Any
) -> Loaders:
    """Open loaders as `open_loaders` does; a `Data` in place of `train` has all three sets, in memory."""
    if evaluate is not None and test is not None:
        raise InvalidInput(
            "evaluate measures a set of its own, and cannot measure the test set: give no test, and measure result.model "
            "on your test data."
        )
    if not isinstance(train, Data):
        return open_loaders(model, train, val, test, forward=forward, **options)
    if val is not None or test is not None or forward is not None:
        raise InvalidInput("train is a Data, which has its validation and test sets: give no val, test or forward.")
    return Loaders(train, None, None, PAIR, None)


def check_trials(recipe: Recipe, *, trains: bool) -> None:
    """Refuse trials that are to be trained where no training is given."""
    if recipe.train_trials and recipe.retrain is None and not trains:
        raise InvalidInput("train_trials = true, and no training is given: set retrain, such as 'gentle', or give finetune.")


def check_functions(**given: object) -> None:
    """Refuse arguments that are given and cannot be called."""
    for name, function in given.items():
        if function is not None and not callable(function):
            raise InvalidInput(f"{name}: got {type(function).__name__} ({function!r:.40}), wanted a function.")


def check_data(graph: Graph, data: Data, loss_fn: Measure, metric: Measure, evaluate: Evaluate | None) -> None:
    """Refuse data that the network or our own loss and metric cannot take, before anything is written."""
    refuse_nonfinite(data)
    with eval_mode(graph.module):
        kinds = [_kind_of(part) for part in data.train.batch(slice(0, 1)).args]
        for name, examples in data.named_sets().items():
            few = examples.batch(slice(0, 2)).args
            for place, (part, kind) in enumerate(zip(few, kinds, strict=True)):
                if _kind_of(part) != kind:
                    raise DataError(
                        f"the {name} set: input {place} holds {_kind_of(part)} ({part.dtype}), and in the training set {kind}: "
                        f"wanted the same, on the same scale. Convert it as the training loader does."
                    )
            few = tuple(part.to(like) for part, like in zip(few, graph.example, strict=True))
            try:
                graph.module(*few)
            except (RuntimeError, ValueError, IndexError) as error:
                shapes = ", ".join(str(tuple(part.shape)) for part in few)
                raise DataError(
                    f"the {name} set: the network does not run on its inputs of shape {shapes} ({error}). Wanted inputs as in "
                    f"the training set: {', '.join(str(tuple(part.shape)) for part in graph.example)}."
                ) from error
        measures = {"loss": loss_fn} if evaluate is not None else {"loss": loss_fn, "metric": metric}
        check_targets(data, graph.module(*graph.example), measures)


def _kind_of(values: Tensor) -> str:
    """What the values of an input are, whatever their precision."""
    if values.is_floating_point() or values.is_complex():
        return "numbers with a point"
    return "truth values" if values.dtype == torch.bool else "whole numbers"
