"""Batches of any form: where they hold the inputs of a network, and what its loss and metric are given of them.

A batch is any nesting of tuples, lists, dicts and dataclasses with tensors inside. What is no tensor is left out.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Collection, Mapping, MutableMapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from secateurs.data.dataset import Batch, Targets, target_parts
from secateurs.errors import DataError, InvalidInput

Forward = Callable[[Any, Any], Any]
"""Calls a model on a batch, once: `forward(model, batch) -> outputs`."""

Measured = Callable[[Any, Any], Tensor]
Place = tuple[int | str, ...]
"""The way to a tensor in a batch: indices, keys and names of fields."""

_LABELS = ("labels", "label", "targets", "target")


@dataclass(frozen=True)
class BatchForm:
    """Where a batch holds the arguments of the network, in their order, and what the loss and the metric are given.

    Measures are given what lies at `labels` if `whole` is False, else the batch again, with empty tensors (n, 0) in place of
    the network's inputs. `forward` is the user's own where it changes what the network gives. A network that `gives_loss` is
    called with the labels, too.
    """

    inputs: tuple[Place, ...] = ((0,),)
    labels: Place | None = (1,)
    whole: bool = False
    forward: Forward | None = None
    gives_loss: bool = False
    like: Any = field(default=None, repr=False, compare=False)  # a batch whose tensors have no rows

    def split(self, batch: Any, name: str) -> Batch:
        """Divide a batch of the loader `name` into the inputs of the network and what the measures are given."""
        if self == PAIR and not _is_pair(batch):
            raise DataError(
                f"a batch of the {name} loader is {describe_batch(batch)}, wanted (inputs, targets) with a tensor of inputs. "
                f"{_ADVICE}"
            )
        try:
            inputs = tuple(_at(batch, place) for place in self.inputs)
            targets: Any = None if self.whole or self.labels is None else _at(batch, self.labels)
        except (LookupError, AttributeError, TypeError) as error:
            raise DataError(
                f"a batch of the {name} loader is {describe_batch(batch)}: wanted the form of the first training batch, with "
                f"{', '.join(map(repr, map(_key, self.inputs)))}. {_ADVICE}"
            ) from error
        if self.whole:
            shown = {place: part for place, part in leaves(batch).items() if place == self.labels or place not in self.inputs}
            targets = {_key(place): part for place, part in shown.items()}
        for place, part in (*zip(map(_key, self.inputs), inputs, strict=True), *(targets.items() if self.whole else ())):
            if not isinstance(part, Tensor) or part.shape[:1] != inputs[0].shape[:1]:
                raise DataError(
                    f"a batch of the {name} loader has at {place!r} {describe_batch(part)}: wanted a tensor with a row for "
                    f"each of the {len(inputs[0])} examples."
                )
        return Batch(inputs[0] if len(inputs) == 1 else inputs, _checked_targets(targets, name))

    def measure(self, given: Measured | None, default: Measured) -> Measured:
        """A loss or metric of (outputs, targets): the user's, which may take a whole batch, or the default of the labels."""
        if not self.whole:
            return default if given is None else given
        if given is None and self.labels is None:
            return default  # it says that it wants a tensor of targets, and which argument to give

        def measured(outputs: Any, targets: dict[str, Tensor]) -> Tensor:
            count = len(next(iter(targets.values()))) if targets else 0
            batch = _mapped(self.like, lambda place, _: targets.get(_key(place), torch.empty(count, 0)))
            found = outputs if self.forward is None else self.forward(lambda *args, **options: outputs, batch)
            return default(found, _at(batch, self.labels or ())) if given is None else given(found, batch)

        # the name of a measure is that of the function it wraps
        return functools.update_wrapper(measured, default if given is None else given, assigned=(), updated=())


PAIR = BatchForm()
"""(inputs, targets)."""


def form_of(
    batch: Any, model: nn.Module, forward: Forward | None, *, name: str = "train", own: Collection[str] = ()
) -> BatchForm:
    """Find where a batch holds what the model takes: as `forward` calls it, or by the names of the model's arguments.

    `own`: which of "loss" and "metric" the user gives. These take (outputs, targets) for pairs of inputs and targets without a
    `forward`, and (outputs, batch) otherwise. Labels that are no class numbers are passed to a model that takes them, and then
    its outputs hold the loss, unless the user gives one.
    """
    if forward is not None:
        return _form_by_call(batch, model, forward, own=bool(own))
    if _is_pair(batch):
        return PAIR
    like = _mapped(batch, lambda *_: torch.empty(0))
    if isinstance(batch, tuple | list) and len(batch) == 2 and leaves(batch[0]):  # ((image, mask), labels)
        places = [(0, *place) for place in leaves(batch[0])]
        named = {str(place[-1]): place for place in places} if _names(batch[0]) else {}
        return BatchForm(_in_order(model, [] if named else places, named), (1,), like=like)
    tensors = {place: part for place, part in leaves(batch).items() if len(place) == 1} if _names(batch) else {}
    labels = [(known,) for known in _LABELS if (known,) in tensors]
    gives_loss = "loss" not in own and any(
        tensors[each].is_floating_point() and each[0] in _arguments(model) for each in labels
    )
    others = {str(place[0]): place for place in tensors if gives_loss or place not in labels}
    known = [argument for argument in _arguments(model) if argument in others]
    if len(labels) != 1 or not (known or len(others) == 1):
        raise DataError(
            f"a batch of the {name} loader is {describe_batch(batch)}, wanted (inputs, targets), or a dict of tensors with the "
            f"arguments of {type(model).__name__}.forward ({', '.join(_arguments(model))}) and 'labels'. {_ADVICE}"
        )
    inputs = _in_order(model, [], {key: others[key] for key in known}) if known else tuple(others.values())
    return BatchForm(inputs, labels[0], whole=bool(own), gives_loss=gives_loss, like=like)


_ADVICE = "For other batches give forward=lambda model, batch: …, and loss and metric of (outputs, batch)."


def _form_by_call(batch: Any, model: nn.Module, forward: Forward, *, own: bool) -> BatchForm:
    """Call `forward` with a stand-in for the model, and see which tensors of the batch it takes."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    given = object()

    def recorder(*args: Any, **options: Any) -> Any:
        calls.append((args, options))
        return given

    returned: Any = None
    try:
        returned = forward(recorder, batch)
    except Exception as error:
        if not calls:  # later it tried to take something out of what the model gave
            raise InvalidInput(
                f"forward(model, batch) failed before it called the model: {type(error).__name__}: {error}. The batch is "
                f"{describe_batch(batch)}; the model stands in for yours here, and can be called, but not looked into."
            ) from error
    if len(calls) != 1:
        done = "did not call the model" if not calls else f"called the model {len(calls)} times"
        raise InvalidInput(f"forward(model, batch) {done}: wanted exactly one call of it.")
    (args, options), places = calls[0], {id(part): place for place, part in leaves(batch).items()}
    for argument, value in (*enumerate(args), *options.items()):
        if id(value) not in places:
            raise InvalidInput(
                f"forward passes {describe_batch(value)} to the model as argument {argument!r}, which is no tensor of the "
                f"batch ({describe_batch(batch)}) as it is. Transform batches in the loader, and wrap the model for options."
            )
    inputs = _in_order(model, [places[id(a)] for a in args], {key: places[id(a)] for key, a in options.items()})
    rest = [place for place in leaves(batch) if place not in inputs]
    labels = [place for place in rest if place[-1] in _LABELS] if len(rest) > 1 else rest
    label = labels[0] if len(labels) == 1 else None
    like = _mapped(batch, lambda *_: torch.empty(0))
    unchanged = returned is given
    whole = own or label is None or not unchanged
    return BatchForm(inputs, label, whole=whole, forward=None if unchanged else forward, like=like)


def _arguments(model: nn.Module) -> list[str]:
    """Names of the arguments that the model takes by position."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [key for key, parameter in inspect.signature(model.forward).parameters.items() if parameter.kind in kinds]


def _in_order(model: nn.Module, args: list[Place], options: Mapping[str, Place]) -> tuple[Place, ...]:
    """Places of the model's arguments in the order of its signature: a traced network takes them by position."""
    if not options:
        return tuple(args)
    names = _arguments(model)
    wanted = names[len(args) : len(args) + len(options)]
    if set(wanted) != set(options):
        raise InvalidInput(
            f"{type(model).__name__}.forward({', '.join(names)}) is given {', '.join(map(repr, options))} by name: wanted the "
            f"first of its arguments without a gap, because a traced network takes them by position. Wrap the model in a "
            f"module whose forward takes the tensors of the batch alone."
        )
    return (*args, *(options[name] for name in wanted))


# ---- nested values -------------------------------------------------------------------------------------------------------


def leaves(value: Any) -> dict[Place, Tensor]:
    """All tensors in a batch by their places, in order."""
    found: dict[Place, Tensor] = {}
    _mapped(value, found.__setitem__)
    return found


def _names(value: Any) -> bool:
    """Whether the parts of a batch have names."""
    return isinstance(value, Mapping) or hasattr(value, "_fields") or (is_dataclass(value) and not isinstance(value, type))


def _mapped(value: Any, function: Callable[[Place, Tensor], Any], place: Place = ()) -> Any:
    """The same nesting with `function(place, tensor)` in place of each tensor, and None in place of all else."""

    def inner(key: int | str, part: Any) -> Any:
        return _mapped(part, function, (*place, key))

    if isinstance(value, Tensor):
        return function(place, value)
    if isinstance(value, Mapping):
        parts = {key: inner(key, part) for key, part in value.items()}
        if not isinstance(value, MutableMapping) or type(value) is dict:
            return parts
        filled = copy.copy(value)
        filled.update(parts)
        return filled
    if hasattr(value, "_fields"):
        return value._make(inner(key, getattr(value, key)) for key in value._fields)
    if is_dataclass(value) and not isinstance(value, type):
        clone = copy.copy(value)
        for each in fields(value):
            object.__setattr__(clone, each.name, inner(each.name, getattr(value, each.name)))
        return clone
    if isinstance(value, tuple | list):
        found = [inner(number, part) for number, part in enumerate(value)]
        return found if isinstance(value, list) else tuple(found)
    return None


def _at(batch: Any, place: Place) -> Any:
    for key in place:
        named = isinstance(key, str) and not isinstance(batch, Mapping)
        batch = getattr(batch, str(key)) if named else batch[key]
    return batch


def _key(place: Place) -> str:
    return ".".join(map(str, place))


def _is_pair(batch: Any) -> bool:
    return isinstance(batch, tuple | list) and len(batch) == 2 and isinstance(batch[0], Tensor)


def _checked_targets(targets: Any, name: str) -> Targets:
    found: Targets = tuple(targets) if isinstance(targets, list) else targets
    parts = target_parts(found)
    if (not parts and not isinstance(found, dict)) or not all(isinstance(part, Tensor) for part in parts):
        raise DataError(
            f"the targets of the {name} loader are {describe_batch(targets)}: wanted a tensor, or a tuple or dict of tensors."
        )
    return found


def describe_batch(value: Any) -> str:
    """What a batch is made of, for messages."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a dict with {', '.join(map(repr, value))}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)} ({', '.join(type(part).__name__ for part in value[:4])})"
    return f"a {type(value).__name__}"
