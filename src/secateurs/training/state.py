"""The state of a training after an epoch as plain tensors and numbers, fit to be written to disk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from secateurs.config import TrainSettings
from secateurs.errors import TrainingError
from secateurs.graph.channels import Kept, take
from secateurs.graph.trace import Graph

_WEIGHTS, _MOMENTUM, _MOMENTS, _AVERAGE = "weights/", "momentum/", "moments/", "average/"


@dataclass(frozen=True)
class EpochRecord:
    """How one epoch went; accuracies are fractions, None where nothing was measured."""

    epoch: int  # counted from 0
    steps: int  # optimiser steps since the start of the training
    lr: float  # of the last step
    loss: float  # mean of what was minimised, while it was
    accuracy: float | None  # on the training batches as augmented, while the weights moved; None for mixtures, without labels
    search_loss: float | None = None  # on the validation set
    search_accuracy: float | None = None
    phase: str = "train"  # within a pruning run: "finetune" or "retrain"
    step: int = 0  # of the run that it belongs to
    note: str = ""  # what the training did otherwise than asked for


@dataclass(frozen=True)
class RateTrials:
    """The learning rate that "auto" stands for in one training, and the held-out losses that chose it."""

    lr: float
    tried: tuple[tuple[float, float | None], ...]  # rate, and loss after the trial; None: it diverged
    phase: str = "train"
    step: int = 0


@dataclass(frozen=True, eq=False)
class History:
    """All epochs of a training, and the momentum it ended with, by parameter name."""

    epochs: tuple[EpochRecord, ...]
    momentum: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    last: Mapping[str, Tensor] = field(
        default_factory=dict, repr=False
    )  # weights of the last step, where averages replace them
    note: str = ""  # what was done otherwise than asked for


@dataclass(frozen=True, eq=False)
class TrainState:
    """A checkpoint: `tensors` is flat and fit for safetensors, `meta` is fit for JSON; both together resume exactly."""

    tensors: dict[str, Tensor] = field(repr=False)
    meta: dict[str, Any]

    def records(self) -> list[EpochRecord]:
        """The epochs that are done."""
        return [EpochRecord(**record) for record in self.meta["epochs"]]

    def momentum(self) -> dict[str, Tensor]:
        """Momentum by parameter name."""
        return _under(_MOMENTUM, self.tensors)

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """Moments of AdamW by kind and parameter name."""
        found: dict[str, dict[str, Tensor]] = {}
        for name, tensor in _under(_MOMENTS, self.tensors).items():
            kind, _, parameter = name.partition("/")
            found.setdefault(kind, {})[parameter] = tensor
        return found

    def average(self) -> dict[str, Tensor]:
        """Averaged weights by name; empty where none are kept."""
        return _under(_AVERAGE, self.tensors)


class StateMeta(TypedDict):
    """The plain values of a checkpoint, and the training within a run that it belongs to."""

    epochs: list[EpochRecord]
    settings: dict[str, Any]
    examples: int
    scaler: dict[str, Any]
    phase: str
    step: int


def packed(
    module: nn.Module,
    momentum: Mapping[str, Tensor],
    moments: Mapping[str, Mapping[str, Tensor]] | None = None,
    average: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Copies of the module's weights and buffers, and of what the optimiser and the averages hold, as one flat dictionary."""
    found = {_WEIGHTS + name: tensor for name, tensor in named_tensors(module).items()}
    found |= {_MOMENTUM + name: tensor for name, tensor in momentum.items()}
    found |= {f"{_MOMENTS}{kind}/{name}": tensor for kind, each in (moments or {}).items() for name, tensor in each.items()}
    found |= {_AVERAGE + name: tensor for name, tensor in (average or {}).items()}
    # contiguous: a channels-last copy could not be written as safetensors
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in found.items()}


def restore_(module: nn.Module, state: TrainState) -> None:
    """Give the module the weights and buffers of `state`; names and shapes must be the same, or nothing is changed."""
    weights, own = _under(_WEIGHTS, state.tensors), named_tensors(module)
    for name in sorted(weights.keys() | own.keys()):
        got = tuple(weights[name].shape) if name in weights else "nothing"
        wanted = tuple(own[name].shape) if name in own else "nothing"
        if got != wanted:
            raise TrainingError(f"the checkpoint is of another network: it has {got} for {name!r}, the network {wanted}")
    copy_into_(module, weights)


def check_fits(state: TrainState, settings: TrainSettings, *, examples: int) -> None:
    """Refuse a checkpoint that was made with other settings or on another number of examples."""
    # a setting that an older checkpoint does not name had its default
    then, now = {**settings_record(TrainSettings()), **state.meta["settings"]}, settings_record(settings)
    changed = [f"{key} was {then.get(key)!r}, is {now.get(key)!r}" for key in now if then.get(key) != now[key]]
    if state.meta["examples"] != examples:
        changed.append(f"there were {state.meta['examples']} training examples, there are {examples}")
    if changed:
        raise TrainingError(f"cannot resume from a checkpoint of another training: {'; '.join(changed)}. Start a new training.")


def settings_record(settings: TrainSettings) -> dict[str, Any]:
    """The settings as JSON gives them back."""
    return {**asdict(settings), "milestones": list(settings.milestones)}


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer by name, those that a state dict leaves out included."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def snapshot(module: nn.Module) -> dict[str, Tensor]:
    """A copy of every parameter and buffer by name."""
    return {name: tensor.detach().clone() for name, tensor in named_tensors(module).items()}


def copy_into_(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Overwrite the module's parameters and buffers by those given; others stay."""
    own = named_tensors(module)
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)


@contextmanager
def undone_on_error(module: nn.Module) -> Iterator[None]:
    """If the block raises, the module gets the weights and buffers back that it had before."""
    before = snapshot(module)
    try:
        yield
    except BaseException:
        copy_into_(module, before)
        raise


def carry_momentum(momentum: Mapping[str, Tensor], kept: Mapping[str, Kept], parameters: Iterable[str]) -> dict[str, Tensor]:
    """The momentum of the weights that survive a cut: every buffer reduced as its parameter was (see `channels.take`).

    `parameters` names those of the narrower network; one that is not in `kept` was not narrowed. Those without momentum stay
    without.
    """
    there = [name for name in parameters if name in momentum]
    return {name: take(momentum[name], kept[name]) if name in kept else momentum[name] for name in there}


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def carry_optimizer(optimizer: torch.optim.Optimizer, before: nn.Module, after: Graph) -> torch.optim.Optimizer:
    """Give a narrower network an optimiser of the same class, options and state as that of the network it was cut from.

    `after` is what `compact` made of the network whose module is `before`. State of the shape of its parameter (momentum,
    Adam's moments) is narrowed with it, other state (step counts) is copied. Parameters that are new have no state.
    """
    if not isinstance(after, Graph):
        raise TrainingError(
            f"after: got {type(after).__name__}, wanted the Graph that compact gives: a module does not say what it kept."
        )
    names = {id(parameter): name for name, parameter in before.named_parameters()}
    parameters = dict(after.module.named_parameters())
    groups = []
    for group in optimizer.param_groups:
        known = [names.get(id(parameter)) for parameter in group["params"]]
        if None in known:
            raise TrainingError("the optimiser holds parameters that `before` has not: give the network it was made for.")
        options = {key: value for key, value in group.items() if key != "params"}
        groups.append({**options, "params": [parameters[str(name)] for name in known if name in parameters]})
    make: Any = type(optimizer)
    carried: torch.optim.Optimizer = make(groups)
    for old, state in optimizer.state.items():
        name = names[id(old)]
        if name in parameters:
            new, kept = parameters[name], after.kept.get(name)
            if (old if kept is None else take(old.detach(), kept)).shape != new.shape:
                raise TrainingError(
                    f"{name!r} has shape {tuple(old.shape)} in `before` and {tuple(new.shape)} in `after`, which was cut "
                    f"several times: carry the optimiser through every cut."
                )
            carried.state[new] = {key: _narrowed(value, old, kept) for key, value in state.items()}
    return carried


def _narrowed(value: Any, parameter: Tensor, kept: Kept | None) -> Any:
    if not isinstance(value, Tensor):
        return value
    return take(value, kept).clone() if kept is not None and value.shape == parameter.shape else value.clone()
