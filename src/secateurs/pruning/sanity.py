"""Input that is allowed and seldom meant: what a run says of it, in its notes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from secateurs.data.splits import Data

_CLEARLY = 6.0  # standard deviations: all offsets and orders of the labels are tried, on sets of any kind
_MORE = 0.01  # of the answers, by which a trained network is right more often than one that always names one class
_SHOWN = 3  # labels with another number


def shape_notes(data: Data) -> list[str]:
    """Sets whose inputs have another shape than those of the training set.

    Within a set all have one. The network runs on both, and may answer much worse at a size that it has never seen.
    """
    known, *others = ((name, [tuple(part.shape[1:]) for part in each.stored.args]) for name, each in data.named_sets().items())
    return [
        f"the {name} inputs have the shape {_shapes(shapes)} and the training inputs {_shapes(known[1])}: accuracies are those "
        f"at a size that the network may not have been trained at"
        for name, shapes in others
        if shapes != known[1]
    ]


def _shapes(shapes: list[tuple[int, ...]]) -> str:
    return " and ".join("×".join(map(str, shape)) or "()" for shape in shapes)


def better_than_guessing(accuracy: float, labels: Tensor) -> bool:
    """Whether a network is right more often than one that always names the most frequent of the labels (N,).

    Of one class alone nothing can be told: that is taken for better.
    """
    guessing = _guessing(labels)
    return accuracy > guessing + _MORE or guessing == 1


def accuracy_note(answers: Tensor, labels: Tensor, classes: int) -> str:
    """What may be wrong where a network with outputs for `classes` is no better than guessing, by its answers (N,)."""
    right, guessing = _share(answers == labels), _guessing(labels)
    said = f"the network is right on {100 * right:.1f} % of the validation examples"
    renumbered = _shifted(answers, labels, classes) or _reordered(answers, labels, classes)
    if renumbered is not None:
        return f"{said}; {renumbered}"
    frequencies = [torch.bincount(each, minlength=classes).double() / len(labels) for each in (answers, labels)]
    chance = float(frequencies[0] @ frequencies[1])  # if answers had nothing to do with labels
    if right < chance - _CLEARLY * _deviation(chance, len(labels)):
        return (
            f"{said}, clearly less often than by chance ({100 * chance:.1f} %): it is untrained, or the labels are not those "
            f"of its training"
        )
    return f"{said}, and always naming the most frequent class is right on {100 * guessing:.1f} %: it seems untrained"


def _shifted(answers: Tensor, labels: Tensor, classes: int) -> str | None:
    """By how much all labels may be shifted, if that makes the answers right."""
    up = max(range(1, classes), key=lambda offset: _share(answers == (labels + offset) % classes))
    right, down = _share(answers == (labels + up) % classes), classes - up
    if not _convincing(right, labels):
        return None
    if int(labels.max()) + up < classes:
        how = f"label + {up}"
    elif int(labels.min()) >= down:
        how = f"label − {down}"
    else:
        how = f"({f'label + {up}' if up <= down else f'label − {down}'}) modulo {classes}"
    return f"the labels seem shifted: with {how} it would be right on {100 * right:.1f} %"


def _reordered(answers: Tensor, labels: Tensor, classes: int) -> str | None:
    """Which labels may be meant for others, if another order makes the answers right.

    It is found on every second example, and tested on the rest.
    """
    counts, tested = torch.zeros(classes, classes), labels[1::2]
    counts.index_put_((labels[::2], answers[::2]), torch.tensor(1.0), accumulate=True)
    meant = {label: int(row.argmax()) for label, row in enumerate(counts) if row.any()}
    if not len(tested) or len(set(meant.values())) < len(meant):  # two labels cannot both be meant for one
        return None
    right = _share(answers[1::2] == torch.tensor([meant.get(int(label), -1) for label in tested]))
    if not _convincing(right, tested):
        return None
    moved = [f"{other} for {label}" for label, other in meant.items() if other != label]
    few = ", ".join(moved[:_SHOWN]) + ", …" * (len(moved) > _SHOWN)
    return f"the labels seem to have another order than its outputs: with {few} it would be right on {100 * right:.1f} %"


def _convincing(right: float, labels: Tensor) -> bool:
    """Whether no untrained network would be right so often, not even with the best of all orders."""
    guessing = _guessing(labels)
    enough = min(5 * guessing, (1 + guessing) / 2)
    return right > max(enough, guessing + _CLEARLY * _deviation(guessing, len(labels)))


def _guessing(labels: Tensor) -> float:
    """How often always naming the most frequent class is right."""
    return float(labels.bincount().max()) / len(labels)


def _share(which: Tensor) -> float:
    return float(which.double().mean())


def _deviation(share: float, count: int) -> float:
    return math.sqrt(max(share * (1 - share), 0.0) / count)
