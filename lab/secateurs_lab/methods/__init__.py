"""Whole procedures that make a network smaller: our own and its rivals, each under one budget."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

from secateurs.config import Repair, criterion_names
from secateurs.criteria import user_function
from secateurs.errors import InvalidInput, suggest
from secateurs_lab.methods.algorithm1 import paper
from secateurs_lab.methods.base import (
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
from secateurs_lab.methods.l0 import l0
from secateurs_lab.methods.obs_weights import surgeon
from secateurs_lab.methods.one_shot import BY_LOSS, BY_SENSITIVITY, BY_SHARE, cut_once
from secateurs_lab.methods.own import checked, cut_then_train, is_procedure, procedure
from secateurs_lab.methods.sfp import soft
from secateurs_lab.methods.ssl import ssl
from secateurs_lab.methods.thinet import pursuit, thinet
from secateurs_lab.methods.training import finished, train_rest
from secateurs_lab.methods.weights import by_damage, by_deviation, prune_weights

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
    "paper:backward": (
        partial(paper, name="paper:backward", direction="backward"),
        "Algorithm 1 from the last layer to the first, as the paper's best variant",
    ),
    "paper+repair": (
        partial(paper, name="paper+repair", repair=True),
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


_ALL = {**_by_criterion(*(name for name in criterion_names() if user_function(name) is None)), **_WHOLE}
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
        return _with_settings(name, _WHOLE[base][0], settings, reserved=_OURS)
    criterion = base.partition("+")[0].removesuffix(_UNIFORM)
    known = criterion_names()
    own = criterion.partition(":")[0] not in known or criterion in known  # l1:unifrom names no module l1
    function = user_function(criterion) if own else None
    if function is not None and is_procedure(function) and base == criterion and (settings or not bracket):
        procedure = _with_settings(name, function, settings) if settings else function
        return checked(name, procedure, function=procedure)
    if is_procedure(function):
        raise InvalidInput(
            f"method {name!r}: {criterion} is a whole procedure: wanted nothing behind it, or its settings: [name=value;…]."
        )
    found = _by_criterion(criterion) if function is not None else {}
    if name in found:
        return checked(name, found[name][0])
    raise InvalidInput(
        f"no method {name!r}.{suggest(name, METHODS)} A method is {', '.join(_WHOLE)}, or a criterion ({', '.join(known)}, "
        f"package.module:function) with '{_UNIFORM}' behind it, then '+repair' or '+refit', or none of these; obs wants one of "
        f"the last two. A function marked by secateurs_lab.methods.procedure is a whole method."
    )


_OURS = ("name", "scores", "order", "choice", "criterion", "repair")  # arguments that make a built-in procedure what it is
_READERS: Mapping[str, tuple[Callable[[str], Any], str]] = {
    "int": (int, "a whole number"),
    "float": (float, "a number"),
    "bool": (lambda text: {"true": True, "1": True, "false": False, "0": False}[text.lower()], "true or false"),
    "str": (str, "a text"),
}
"""How the text of a setting is read, and what is wanted, by type; without a type the first that fits."""


def _with_settings(name: str, found: Method, texts: Sequence[str], *, reserved: Sequence[str] = ()) -> Method:
    """The procedure with settings given as key=value, each of the type of its argument; `reserved` ones may not be given."""
    _, *arguments = inspect.signature(found).parameters.values()  # the first is the task
    known = {a.name: a for a in arguments if a.kind in (a.KEYWORD_ONLY, a.POSITIONAL_OR_KEYWORD)}
    closed = ("task", "watch", *reserved)
    others = any(argument.kind is argument.VAR_KEYWORD for argument in arguments)
    settings: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key or "[" in text or "]" in text:
            raise InvalidInput(f"method {name!r}: got {text!r}, wanted [name=value;…] with one pair of brackets, at the end.")
        if key in closed or (key not in known and not others):
            open_ones = [each for each in known if each not in closed]
            raise InvalidInput(f"method {name!r}: {text!r} is no setting of it.{suggest(key, open_ones)}")
        if key in settings:
            raise InvalidInput(f"method {name!r}: got {key} twice, wanted every setting once.")
        settings[key] = _setting(f"method {name!r}: setting {key}", value, known.get(key))
    return partial(found, **settings)


def _setting(where: str, text: str, argument: inspect.Parameter | None) -> Any:
    """The value of the text by the argument's annotation if that is a plain type, else by its default; guessed without both."""
    default = None if argument is None or argument.default is argument.empty else argument.default
    annotation = argument.annotation if argument is not None else ""
    words = str(annotation.__name__ if isinstance(annotation, type) else annotation).replace(" ", "").removesuffix("|None")
    kind = words if words in _READERS else "" if default is None else type(default).__name__
    if kind and kind not in _READERS:
        raise InvalidInput(
            f"{where} is a {kind} (default {default!r:.60}), which brackets cannot give. Call the procedure in Python."
        )
    for reader, _ in [_READERS[kind]] if kind else _READERS.values():
        try:
            return reader(text)
        except (ValueError, KeyError):
            continue
    raise InvalidInput(f"{where} = {text!r}: wanted {_READERS[kind][1]}.")
