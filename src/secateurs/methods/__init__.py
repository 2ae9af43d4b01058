"""Whole procedures that make a network smaller: our own and its rivals, each under one budget."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

from secateurs.config import CRITERIA, Repair
from secateurs.criteria import user_function
from secateurs.errors import InvalidInput, suggest
from secateurs.methods.algorithm1 import paper
from secateurs.methods.base import (
    NO_TRAINING,
    UNTOUCHED,
    Budget,
    Method,
    MethodRun,
    MethodState,
    Pruned,
    Spent,
    Task,
    Trained,
    Watch,
    opened,
    recipe_for,
)
from secateurs.methods.l0 import l0
from secateurs.methods.obs_weights import surgeon
from secateurs.methods.one_shot import BY_LOSS, BY_SENSITIVITY, BY_SHARE, cut_once
from secateurs.methods.own import checked, cut_then_train, is_procedure, procedure
from secateurs.methods.sfp import soft
from secateurs.methods.ssl import ssl
from secateurs.methods.thinet import pursuit, thinet
from secateurs.methods.training import finished, train_rest
from secateurs.methods.weights import by_damage, by_deviation, prune_weights

__all__ = [
    "METHODS",
    "NO_TRAINING",
    "UNTOUCHED",
    "Budget",
    "Method",
    "MethodRun",
    "MethodState",
    "Pruned",
    "Spent",
    "Task",
    "Trained",
    "Watch",
    "cut_then_train",
    "method",
    "procedure",
]


def untouched(task: Task, *, watch: Watch | None = None) -> Pruned:
    """Remove nothing and spend the budget: what the training alone does to the network."""
    with opened(task, UNTOUCHED, recipe_for(task, "l1"), watch) as run:
        return finished(run, train_rest(run, run.load() or MethodState(run.copied())))


_UNIFORM = ":uniform"
_ENDINGS: Mapping[Repair, tuple[str, str]] = {
    "none": ("", ""),
    "least-squares": ("+repair", ", consumers repaired"),
    "every-layer": ("+refit", ", then every layer refitted"),
}
"""What a method's name and its description end in, by the repair that it makes."""
_WHOLE: Mapping[str, tuple[Method, str]] = {
    "li": (
        partial(cut_once, name="li", criterion="l1", choice=BY_SENSITIVITY),
        "L1 norms; each site as far as its own drop of accuracy stays within one threshold (Li et al., 2017)",
    ),
    "sfp": (
        partial(soft, name="sfp", criterion="l2"),
        "soft filter pruning: smallest L2 norms zeroed after every epoch, removed at the end (He et al., 2018)",
    ),
    "fpgm-sfp": (
        partial(soft, name="fpgm-sfp", criterion="fpgm"),
        "the same schedule, filters nearest to the geometric median zeroed (He et al., 2019)",
    ),
    "thinet": (
        thinet,
        "ThiNet: next layers' outputs kept, one scale a channel, the same share at every inner layer (Luo et al., 2017)",
    ),
    "thinet-pursuit": (pursuit, "ThiNet with the kept set grown by matching pursuit (Luo et al., 2018)"),
    "ssl": (ssl, "structured sparsity learning: group lasso while training, zero groups removed (Wen et al., 2016)"),
    "l0": (l0, "hard-concrete gates on filters, expected weights as penalty (Louizos et al., 2018)"),
    "han": (
        partial(prune_weights, name="han", scores=by_deviation),
        "single weights by magnitude over the layer's deviation, retrained; dead neurons removed (Han et al., 2015)",
    ),
    "obd-weights": (
        partial(prune_weights, name="obd-weights", scores=by_damage),
        "single weights by Optimal Brain Damage, retrained; dead neurons removed (LeCun et al., 1990)",
    ),
    "obs-weights": (surgeon, "single weights by Optimal Brain Surgeon, small networks only (Hassibi, Stork, 1993)"),
    "paper": (paper, "Algorithm 1: linear filter ensembles, site by site, trained after every cut"),
    "paper+repair": (
        partial(paper, repair=True),
        "Algorithm 1 with the best of several orders, consumers repaired after every cut",
    ),
    UNTOUCHED: (untouched, "nothing removed: what the training alone does"),
}


def _by_criterion(*criteria: str) -> dict[str, tuple[Method, str]]:
    """Every criterion with its cuts allocated by loss per MAC or uniform, with and without repair."""
    found: dict[str, tuple[Method, str]] = {}
    for criterion, (repair, (ending, words)) in product(criteria, _ENDINGS.items()):
        if criterion == "obs" and repair == "none":  # it ranks by what repairs can make up for
            continue
        for uniform, choice, how in (
            ("", BY_LOSS, "cuts allocated by loss per MAC"),
            (_UNIFORM, BY_SHARE, "the same share of filters at every site"),
        ):
            name = f"{criterion}{uniform}{ending}"
            method = partial(cut_once, name=name, criterion=criterion, choice=choice, repair=repair)
            found[name] = method, f"ranked once by {criterion}, {how}{words}"
    return found


_ALL = {**_by_criterion(*CRITERIA), **_WHOLE}
METHODS: Mapping[str, str] = {name: words for name, (_, words) in _ALL.items()}
"""What every built-in method does, by name."""


def method(name: str) -> Method:
    """The method of that name: one of `METHODS`, or one of a user's criterion, registered or `package.module:function`.

    A function that is marked as a `procedure` is a method itself. Settings of a whole procedure follow in brackets:
    `l0[price=0.2]`, `ssl[filters=0.01;depth=0.007]`.
    """
    if name in _ALL:
        return _ALL[name][0]
    base, bracket, rest = name.partition("[")
    settings = rest[:-1].split(";") if rest.endswith("]") else None
    if base in _WHOLE and settings:
        return _with_settings(name, _WHOLE[base][0], settings)
    criterion = base.partition("+")[0].removesuffix(_UNIFORM)
    own = criterion.partition(":")[0] not in CRITERIA or criterion in CRITERIA  # l1:unifrom names no module l1
    function = user_function(criterion) if own else None
    if function is not None and is_procedure(function) and base == criterion and (settings or not bracket):
        return checked(name, _with_settings(name, function, settings) if settings else function)
    if is_procedure(function):
        raise InvalidInput(
            f"method {name!r}: {criterion} is a whole procedure: wanted nothing behind it, or its settings: [name=value;…]."
        )
    found = _by_criterion(criterion) if function is not None else {}
    if name in found:
        return found[name][0]
    raise InvalidInput(
        f"no method {name!r}.{suggest(name, METHODS)} A method is {', '.join(_WHOLE)}, or a criterion ({', '.join(CRITERIA)}, "
        f"package.module:function) with '{_UNIFORM}' behind it, then '+repair' or '+refit', or none of these; obs wants one of "
        f"the last two. A function marked by secateurs.methods.procedure is a whole method."
    )


def _with_settings(name: str, found: Method, texts: Sequence[str]) -> Method:
    """The procedure with settings given as key=value; numbers are read as such."""
    known = inspect.signature(found).parameters
    settings: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if (
            not equals
            or key not in known
            or key in ("task", "watch", "name", "scores", "order", "choice", "criterion", "repair")
        ):
            raise InvalidInput(f"method {name!r}: {text!r} is no setting of it.{suggest(key, known)}")
        whole = value.isdigit() and isinstance(known[key].default, int)
        number = value.replace(".", "", 1).replace("e-", "", 1).isdigit()
        settings[key] = int(value) if whole else float(value) if number else value
    return partial(found, **settings)
