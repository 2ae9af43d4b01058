"""What a training run is asked to do, and the paper's recipes."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Literal, get_args

from secateurs.errors import InvalidInput, suggest

Schedule = Literal["constant", "step", "cosine", "one-cycle"]
Augment = Literal["none", "crop", "crop-flip"]
Precision = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """SGD with everything that decides its outcome; the same settings, data and start give the same weights."""

    epochs: int = 10
    steps: int | None = None  # end after so many optimiser steps, even within an epoch
    batch: int = 128
    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 1e-4
    nesterov: bool = False
    schedule: Schedule = "cosine"
    milestones: tuple[int, ...] = ()  # "step": the epochs (counted from 0) at which lr is multiplied by `factor`
    factor: float = 0.1
    warmup: int = 0  # epochs over which lr rises linearly, before the schedule counts
    augment: Augment = "none"
    pad: int = 4  # "crop", "crop-flip": pixels of zero padding on each side
    label_smoothing: float = 0.0
    clip_norm: float | None = None  # largest norm of the whole gradient
    distill: float = 0.0  # share of the loss that is the distance to the teacher's answers
    temperature: float = 4.0
    precision: Precision = "float32"  # of the forward pass; weights stay as they are
    channels_last: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for field, choices in (("schedule", Schedule), ("augment", Augment), ("precision", Precision)):
            _check_choice(field, getattr(self, field), get_args(choices))
        for field in ("epochs", "steps", "batch", "warmup", "pad", "seed"):
            _check_whole(field, getattr(self, field))
        for field, low, high in _RANGES:
            _check_range(field, getattr(self, field), low, high)
        for field in ("lr", "temperature", "factor", "clip_norm"):
            if getattr(self, field) == 0:
                raise InvalidInput(f"{field} = 0: wanted a number above 0")
        self._check_together()

    def _check_together(self) -> None:
        if (self.schedule == "step") != bool(self.milestones):
            raise InvalidInput(
                f"schedule = {self.schedule!r} with milestones = {list(self.milestones)}: "
                f"milestones go with schedule 'step', and only with it"
            )
        if list(self.milestones) != sorted(set(self.milestones)) or min(self.milestones, default=1) < 1:
            raise InvalidInput(f"milestones = {list(self.milestones)}: wanted rising epochs, from 1 on")
        if self.warmup and self.schedule == "one-cycle":
            raise InvalidInput(f"warmup = {self.warmup} with schedule 'one-cycle', which has its own: set warmup = 0")
        if self.warmup and self.warmup >= self.epochs:
            raise InvalidInput(f"warmup = {self.warmup} of epochs = {self.epochs}: wanted fewer warm-up epochs than epochs")
        if self.nesterov and self.momentum == 0:
            raise InvalidInput("nesterov = true with momentum = 0: it needs momentum")


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("epochs", 0, float("inf")),
    ("steps", 0, float("inf")),
    ("batch", 1, float("inf")),
    ("lr", 0, float("inf")),
    ("momentum", 0, 0.9999),
    ("weight_decay", 0, float("inf")),
    ("factor", 0, 1),
    ("warmup", 0, float("inf")),
    ("pad", 0, 1024),
    ("label_smoothing", 0, 0.9999),
    ("clip_norm", 0, float("inf")),
    ("distill", 0, 1),
    ("temperature", 0, float("inf")),
)


def _check_choice(field: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InvalidInput(f"{field} = {value!r}: wanted one of {', '.join(allowed)}.{suggest(str(value), allowed)}")


def _check_whole(field: str, value: object) -> None:
    if value is not None and not isinstance(value, int):
        raise InvalidInput(f"{field} = {value!r}: wanted a whole number")


def _check_range(field: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not (isfinite(value) and low <= value <= high):
        wanted = f"{low:g} or more" if high == float("inf") else f"{low:g} to {high:g}"
        raise InvalidInput(f"{field} = {value}: wanted {wanted}")


# "We divide the initial 0.1 learning rate by 10 at 100 and 150 epochs and stop the training at 200 epochs", the rest as
# in He et al. (2016): batches of 128, momentum 0.9, weight decay 1e-4, crop and flip.
PAPER_RESNET = TrainSettings(
    epochs=200, batch=128, lr=0.1, weight_decay=1e-4, schedule="step", milestones=(100, 150), augment="crop-flip"
)

# "After a layer is pruned, we apply fine-tuning for 10 epochs." The paper does not say at which learning rate: 0.01, at
# which its retraining starts, is our choice.
PAPER_FINETUNE = TrainSettings(epochs=10, batch=128, lr=0.01, schedule="constant", augment="crop-flip")

# "We retrain the network for 80 epochs by setting the learning rate to 0.01 and multiply it by 0.1 in every 20 epochs."
PAPER_RETRAIN = TrainSettings(epochs=80, batch=128, lr=0.01, schedule="step", milestones=(20, 40, 60), augment="crop-flip")
