"""Loss and accuracy of a network over a set of examples: batching, mode and device never show in the result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from secateurs.data.examples import Examples
from secateurs.errors import InvalidInput
from secateurs.masking import device_of

Measure = Callable[[Any, Any], Tensor]
"""Takes a network's outputs and targets for n examples; gives one number for each, or their mean as a scalar."""

Device = torch.device | str | None


@dataclass(frozen=True)
class Evaluation:
    """Means over a set of examples."""

    loss: float
    accuracy: float  # mean of the metric: by default the share of right answers, a fraction
    count: int
    values: Tensor | None = field(default=None, compare=False, repr=False)
    """The metric of every example, float64 (N,) on the CPU; None where it gives only means."""


def cross_entropy(outputs: Any, targets: Any, *, label_smoothing: float = 0.0) -> Tensor:
    """Cross-entropy of every example; class logits (n, K, …) against class numbers (n, …)."""
    _expect_tensors("cross-entropy", "loss_fn", outputs, targets)
    return functional.cross_entropy(outputs, targets, reduction="none", label_smoothing=label_smoothing)


def correct(outputs: Any, targets: Any) -> Tensor:
    """Whether the largest of the class logits (n, K, …) is that of the target (n, …), for every example."""
    _expect_tensors("accuracy", "metric", outputs, targets)
    right: Tensor = outputs.argmax(1) == targets
    return right


def evaluate(
    module: nn.Module,
    examples: Examples,
    *,
    loss_fn: Measure = cross_entropy,
    metric: Measure = correct,
    batch: int = 256,
    device: Device = None,
) -> Evaluation:
    """Mean loss and mean metric in one pass; the module comes back in the mode and on the device it was lent in."""
    single: list[Tensor] = []

    def noted(outputs: Any, targets: Any) -> Tensor:
        found = metric(outputs, targets)
        if found.ndim:
            single.append(each(found, len(found)))
        return found

    mean_loss, mean_metric = _means(module, examples, (loss_fn, noted), batch=batch, device=device)
    whole = sum(map(len, single)) == len(examples)
    return Evaluation(mean_loss, mean_metric, len(examples), torch.cat(single) if whole else None)


def loss(
    module: nn.Module, examples: Examples, *, loss_fn: Measure = cross_entropy, batch: int = 256, device: Device = None
) -> float:
    """Mean loss of the module in eval mode; may be NaN or infinite, as the network is."""
    return _means(module, examples, (loss_fn,), batch=batch, device=device)[0]


def accuracy(
    module: nn.Module, examples: Examples, *, metric: Measure = correct, batch: int = 256, device: Device = None
) -> float:
    """Mean of the metric (higher is better) of the module in eval mode; by default the share of right answers."""
    return _means(module, examples, (metric,), batch=batch, device=device)[0]


def values(module: nn.Module, examples: Examples, measure: Measure, *, batch: int = 256, device: Device = None) -> Tensor:
    """What the measure says of every example, float64 (N,) on the CPU; it must give one value for each."""
    with on_device(module, device) as place, evaluating(module):
        found = [each(measure(module(x), y), len(x)) for x, y in examples.batches(batch, device=place)]
    return torch.cat(found)


def outputs(module: nn.Module, examples: Examples, *, batch: int = 256, device: Device = None) -> Tensor:
    """What the module in eval mode says to every example, (N, …) on the CPU; it must give one tensor."""
    with on_device(module, device) as place, evaluating(module):
        found = [module(inputs) for inputs, _ in examples.batches(batch, device=place)]
    for given in found:
        if not isinstance(given, Tensor):
            raise InvalidInput(f"a network whose answers are wanted gave a {type(given).__name__}, wanted one tensor.")
    return torch.cat([given.cpu() for given in found])


def predictions(module: nn.Module, examples: Examples, *, batch: int = 256, device: Device = None) -> Tensor:
    """The class of the largest logit for every example, (N,) on the CPU."""
    return outputs(module, examples, batch=batch, device=device).argmax(1)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Eval mode without gradients inside the block; every submodule gets its own mode back, even after an error."""
    with keeping_modes(module), torch.no_grad():
        module.eval()
        yield


@contextmanager
def keeping_modes(module: nn.Module) -> Iterator[None]:
    """Give every submodule the mode back that it had before the block, even after an error."""
    modes = [(part, part.training) for part in module.modules()]
    try:
        yield
    finally:
        # part by part: train(True) on the whole would unfreeze what the user had put into eval mode
        for part, training in modes:
            part.training = training


@contextmanager
def on_device(module: nn.Module, device: Device) -> Iterator[torch.device]:
    """Move the module to `device` inside the block (None: it stays), and back afterwards; gives the device."""
    home = device_of(module)
    place = home if device is None else torch.device(device)
    if place == home:
        yield place
        return
    try:
        module.to(place)
        yield place
    finally:
        module.to(home)


def each(values: Tensor, count: int) -> Tensor:
    """One value for each of `count` examples in float64 (averaged over further dimensions); a mean alone is refused."""
    exact = values.detach().cpu().double()
    if exact.ndim == 0 or len(exact) != count:
        raise InvalidInput(
            f"a loss or metric gave a tensor of shape {tuple(values.shape)} for {count} examples: wanted one value for each. "
            f"Without single values nothing can be bounded: to go by the mean alone, set confidence = 0 and no worst_class."
        )
    return exact.reshape(count, -1).mean(1)


def total(values: Tensor, count: int) -> Tensor:
    """Sum over the examples in float64, from a value for each (averaged over further dimensions) or from their mean."""
    exact = values.detach().cpu().double()
    if exact.ndim == 0:
        return exact * count
    if len(exact) != count:
        raise InvalidInput(
            f"a loss or metric gave a tensor of shape {tuple(values.shape)} for {count} examples: "
            f"wanted one value for each example, or their mean as a scalar"
        )
    return exact.reshape(count, -1).mean(1).sum()


def _means(module: nn.Module, examples: Examples, measures: Sequence[Measure], *, batch: int, device: Device) -> list[float]:
    if len(examples) == 0:
        raise InvalidInput("evaluation over no examples: wanted at least one")
    sums = torch.zeros(len(measures), dtype=torch.float64)
    with on_device(module, device) as place, evaluating(module):
        for inputs, targets in examples.batches(batch, device=place):
            given = module(inputs)
            sums += torch.stack([total(measure(given, targets), len(inputs)) for measure in measures])
    means: list[float] = (sums / len(examples)).tolist()
    return means


def _expect_tensors(what: str, argument: str, outputs: Any, targets: Any) -> None:
    for name, value in (("outputs", outputs), ("targets", targets)):
        if not isinstance(value, Tensor):
            raise InvalidInput(f"{what} needs a tensor of {name}, got a {type(value).__name__}: give {argument}=… of your own")
