"""What a training minimises: the loss on labels, the distance to a teacher's outputs, or both."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from secateurs._util.modules import Device, eval_mode, on_device
from secateurs.config import TrainSettings
from secateurs.data.dataset import Batch, Examples
from secateurs.errors import InvalidInput
from secateurs.graph.features import FeaturePairs
from secateurs.metrics import Measure, by_batch, cross_entropy, logits_of, total

Objective = Callable[[tuple[Tensor, ...], Any, Any], Tensor]
"""Takes the network's arguments, the network's outputs and targets; gives the scalar to minimise."""

Penalty = Callable[[], Tensor]
"""A scalar of the weights alone, called once for every batch."""

_LEAST = 1e-8  # of a standard deviation: constant outputs have no correlation


def objective_for(
    settings: TrainSettings,
    *,
    loss_fn: Measure | None,
    teacher: nn.Module | None,
    pairs: FeaturePairs | None = None,
    penalty: Penalty | None = None,
) -> Objective:
    """The mean loss that `settings` ask for; the teacher runs only where they distil from it.

    With `pairs` the objective takes the outputs of `pairs.ours`, features first, and `settings.features` counts. `penalty` is
    added as a whole, whatever the share of the loss that is distilled.
    """
    aim = _aim(settings, loss_fn, teacher, pairs)
    if penalty is None:
        return aim
    return lambda inputs, outputs, targets: aim(inputs, outputs, targets) + penalty()


def _aim(settings: TrainSettings, loss_fn: Measure | None, teacher: nn.Module | None, pairs: FeaturePairs | None) -> Objective:
    if loss_fn is not None and settings.label_smoothing:
        raise InvalidInput(f"label_smoothing = {settings.label_smoothing} with a loss of your own: it is for cross-entropy")
    smoothed = partial(cross_entropy, label_smoothing=settings.label_smoothing)
    plain = loss_fn or (lambda outputs, targets: smoothed(_full_precision(logits_of(outputs)), targets))
    if settings.distill == 0:
        return lambda inputs, outputs, targets: plain(outputs, targets).mean()
    if teacher is None:
        raise InvalidInput(f"distill = {settings.distill} needs a teacher: give teacher=…, or set distill = 0")
    share, temperature = settings.distill, settings.temperature

    def apart_from(wanted: Any, outputs: Any, targets: Any) -> Tensor:
        kind = settings.distance
        if kind == "auto":  # what a loss of the user's own takes need not be class logits
            kind = "kl" if loss_fn is None or _are_classes(targets, logits_of(outputs)) else "squared"
        apart = distance(outputs, wanted, temperature, kind)
        return apart if share == 1 else (1 - share) * plain(outputs, targets).mean() + share * apart

    def with_teacher(inputs: tuple[Tensor, ...], outputs: Any, targets: Any) -> Tensor:
        with torch.no_grad():
            wanted = teacher(*inputs)
        return apart_from(wanted, outputs, targets)

    def with_features(inputs: tuple[Tensor, ...], outputs: Any, targets: Any) -> Tensor:
        assert pairs is not None
        with torch.no_grad():
            *features, answers = pairs.theirs(*inputs)
        *own, last = outputs
        return apart_from(answers, last, targets) + settings.features * pairs.error(own, features)

    return with_teacher if pairs is None else with_features


def distance(outputs: Any, wanted: Any, temperature: float, kind: Literal["kl", "dist", "squared"] = "kl") -> Tensor:
    """Distance of the student's outputs from the teacher's.

    Of class probabilities, softened by the temperature, and times temperature²: "kl": their mean divergence (Hinton); "dist":
    1 - Pearson's correlation over the classes of an example, plus 1 - that over the examples of a class (Huang 2022). The
    square keeps gradients as large as those of the plain loss at any temperature. The pixels of a dense prediction are
    examples. "squared": the squared error as a share of the variance of the teacher's outputs over the batch.
    """
    outputs, wanted = _full_precision(logits_of(outputs)), _full_precision(logits_of(wanted))
    if not isinstance(outputs, Tensor) or not isinstance(wanted, Tensor) or outputs.shape != wanted.shape:
        raise InvalidInput(
            "distillation needs one tensor of outputs, of the same shape, from network and teacher. Set distill = 0 to train "
            "by the loss."
        )
    if kind == "squared":
        return _squared(outputs, wanted)
    if outputs.ndim < 2 or outputs.shape[1] < 2:  # the probabilities of one class are always equal: nothing would be trained
        raise InvalidInput(
            f"distance = {kind!r} compares probabilities of classes; the network gives outputs of shape "
            f"{tuple(outputs.shape)}, wanted (N, K, …) with 2 classes or more. Set distance = 'squared', or distill = 0 to "
            f"train by the loss."
        )
    student, teacher = (
        functional.log_softmax(logits / temperature, 1).movedim(1, -1).flatten(0, -2)  # (examples, classes)
        for logits in (outputs, wanted)
    )
    if kind == "kl":
        return temperature**2 * functional.kl_div(student, teacher, reduction="batchmean", log_target=True)
    one, other = student.exp(), teacher.exp()
    return temperature**2 * ((1 - _pearson(one, other, 1)).mean() + (1 - _pearson(one, other, 0)).mean())


def _are_classes(targets: Any, logits: Any) -> bool:
    """Whether targets are class numbers (N, …), each for the logits (N, K, …) of 2 classes or more."""
    if not isinstance(targets, Tensor) or targets.is_floating_point() or not isinstance(logits, Tensor) or logits.ndim < 2:
        return False
    return logits.shape[1] > 1 and targets.shape == (len(logits), *logits.shape[2:])


def _squared(outputs: Tensor, wanted: Tensor) -> Tensor:
    spread = (wanted - wanted.mean(0)).square().mean()
    scale = torch.where(spread > 0, spread, wanted.square().mean())  # a single example, or the same output for all
    return (outputs - wanted).square().mean() / torch.where(scale > 0, scale, 1.0)


def judge_for(settings: TrainSettings, *, loss_fn: Measure | None, teacher: nn.Module | None) -> Objective:
    """The mean loss by which weights are compared on held-out examples: the user's own where there is one.

    Else it is what the training minimises. Networks that are near to a teacher need not be near to what the user wants.
    """
    if loss_fn is None:
        return objective_for(settings, loss_fn=None, teacher=teacher)
    return lambda inputs, outputs, targets: loss_fn(outputs, targets).mean()


def _full_precision(outputs: Any) -> Any:
    """Logits of a network that ran in half precision as float32: the logarithms of two near distributions differ by less."""
    return outputs.float() if isinstance(outputs, Tensor) and outputs.dtype in (torch.bfloat16, torch.float16) else outputs


def _pearson(one: Tensor, other: Tensor, axis: int) -> Tensor:
    one, other = one - one.mean(axis, keepdim=True), other - other.mean(axis, keepdim=True)
    return functional.cosine_similarity(one, other, axis, eps=_LEAST)


def held_out_means(
    module: nn.Module,
    examples: Examples,
    objective: Objective,
    *,
    teacher: nn.Module | None = None,
    metric: Measure | None = None,
    batch: int = 256,
    device: Device = None,
) -> tuple[float, float | None]:
    """Mean objective, and mean metric if there is one, of a network in eval mode; not augmented."""
    sums, count = torch.zeros(2, dtype=torch.float64), 0
    beside = module if teacher is None else teacher
    with on_device(module, device) as place, on_device(beside, place), eval_mode(module, beside):

        def measured(each: Batch) -> list[Tensor]:
            outputs, found = module(*each.args), torch.zeros(2, dtype=torch.float64)
            found[0] = total(objective(each.args, outputs, each.targets), each.size)
            found[1] = 0.0 if metric is None else total(metric(outputs, each.targets), each.size)
            return [found, torch.tensor(each.size)]

        for found, size in by_batch("held-out means", examples, batch, place, measured):
            sums, count = sums + found, count + int(size)
    loss, mean = (sums / max(count, 1)).tolist()
    return loss, None if metric is None else mean
