"""Whole procedures that make a network smaller: our own and its rivals, each under one budget."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, Protocol

from secateurs.config import CRITERIA, Repair
from secateurs.criteria import user_function
from secateurs.errors import InvalidInput, suggest
from secateurs.methods.algorithm1 import paper
from secateurs.methods.base import NO_TRAINING, Budget, Pruned, Task, Trained, Watch
from secateurs.methods.l0 import l0
from secateurs.methods.obs_weights import surgeon
from secateurs.methods.one_shot import BY_LOSS, BY_SENSITIVITY, BY_SHARE, cut_once
from secateurs.methods.sfp import soft
from secateurs.methods.ssl import ssl
from secateurs.methods.thinet import pursuit, thinet
from secateurs.methods.weights import by_damage, by_deviation, prune_weights

__all__ = ["METHODS", "NO_TRAINING", "Budget", "Method", "Pruned", "Task", "Trained", "Watch", "method"]


class Method(Protocol):
    """Makes the task's network smaller until the target is reached, and spends the budget, no more and no less."""

    def __call__(self, task: Task, *, watch: Watch | None = ...) -> Pruned:
        """Return the smaller network; the task's own is unchanged. A killed method resumes in the task's folder."""
        ...


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

    Settings of a whole procedure follow in brackets: `l0[price=0.2]`, `ssl[filters=0.01;depth=0.007]`.
    """
    if name in _ALL:
        return _ALL[name][0]
    base, bracket, rest = name.partition("[")
    if bracket and base in _WHOLE and rest.endswith("]"):
        return _with_settings(name, _WHOLE[base][0], rest[:-1].split(";"))
    criterion = name.partition("+")[0].removesuffix(_UNIFORM)
    own = criterion.partition(":")[0] not in CRITERIA or criterion in CRITERIA  # l1:unifrom names no module l1
    found = _by_criterion(criterion) if own and user_function(criterion) is not None else {}
    if name in found:
        return found[name][0]
    raise InvalidInput(
        f"no method {name!r}.{suggest(name, METHODS)} A method is {', '.join(_WHOLE)}, or a criterion ({', '.join(CRITERIA)}, "
        f"package.module:function) with '{_UNIFORM}' behind it, then '+repair' or '+refit', or none of these; obs wants one of "
        f"the last two."
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
        settings[key] = float(value) if value.replace(".", "", 1).replace("e-", "", 1).isdigit() else value
    return partial(found, **settings)
