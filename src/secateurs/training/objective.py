"""What training minimises: the user's loss or cross-entropy, and the distance to a teacher's answers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from secateurs.errors import InvalidInput
from secateurs.evaluate import Measure, cross_entropy
from secateurs.training.settings import TrainSettings

Objective = Callable[[Tensor, Any, Any], Tensor]
"""Takes inputs, the network's outputs and targets; gives the scalar to minimise."""


def objective_for(settings: TrainSettings, *, loss_fn: Measure | None, teacher: nn.Module | None) -> Objective:
    """The mean loss that `settings` ask for; the teacher is asked only where they distil from it."""
    plain = _plain_loss(settings, loss_fn)
    if settings.distill == 0:
        return lambda inputs, outputs, targets: plain(outputs, targets).mean()
    if teacher is None:
        raise InvalidInput(f"distill = {settings.distill} needs a teacher: give teacher=…, or set distill = 0")
    share, temperature = settings.distill, settings.temperature

    def with_teacher(inputs: Tensor, outputs: Any, targets: Any) -> Tensor:
        with torch.no_grad():
            wanted = teacher(inputs)
        return (1 - share) * plain(outputs, targets).mean() + share * distance(outputs, wanted, temperature)

    return with_teacher


def distance(outputs: Any, wanted: Any, temperature: float) -> Tensor:
    """Mean divergence of the student's softened class probabilities from the teacher's, times temperature² (Hinton).

    The square keeps the gradients as large as those of the plain loss, whatever the temperature.
    """
    if not isinstance(outputs, Tensor) or not isinstance(wanted, Tensor) or outputs.shape != wanted.shape:
        raise InvalidInput("distillation needs one tensor of class logits, of the same shape, from network and teacher")
    student = functional.log_softmax(outputs / temperature, 1)
    teacher = functional.log_softmax(wanted / temperature, 1)
    return temperature**2 * functional.kl_div(student, teacher, reduction="batchmean", log_target=True)


def _plain_loss(settings: TrainSettings, loss_fn: Measure | None) -> Measure:
    if loss_fn is not None:
        if settings.label_smoothing:
            raise InvalidInput(f"label_smoothing = {settings.label_smoothing} with a loss of your own: it is for cross-entropy")
        return loss_fn
    return partial(cross_entropy, label_smoothing=settings.label_smoothing)
