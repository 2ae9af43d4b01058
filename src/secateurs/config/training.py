"""How networks are trained: the settings of a training, and those that have a name."""

# ruff: noqa: RUF009 - `setting` returns a dataclasses.field
from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from secateurs._util.decode import brief
from secateurs.config.declared import MOST_AT_ONCE, SEEDS, Checked, setting
from secateurs.errors import RecipeError, suggest

Schedule = Literal["constant", "step", "cosine", "linear", "one-cycle"]
Optimiser = Literal["sgd", "adamw"]
Distance = Literal["auto", "kl", "dist", "squared"]
Augment = Literal["none", "crop", "crop-flip", "auto"]
Precision = Literal["float32", "bfloat16", "float16"]

MOST_EPOCHS = 100_000


@dataclass(frozen=True, kw_only=True)
class TrainSettings(Checked):
    """SGD with everything that decides its result; the same settings, data and start give the same weights."""

    epochs: int = setting(10, "Passes over the training examples.", "training", low=0, high=MOST_EPOCHS)
    steps: int | None = setting(
        None, "Stop after this number of optimiser steps, even within an epoch.", "training", low=0, high=1_000_000_000
    )
    batch: int = setting(128, "Examples in an optimiser step.", "training", low=1, high=MOST_AT_ONCE)
    optimiser: Optimiser = setting("sgd", "SGD with momentum, or AdamW.", "training")
    lr: float | Literal["auto"] = setting(
        0.01, "Learning rate; auto: the best of three, by short trials on held-out examples.", "training", above=0, high=1e38
    )
    momentum: float = setting(0.9, "Momentum of SGD.", "training", low=0, high=0.9999)
    weight_decay: float = setting(1e-4, "Weight decay.", "training", low=0, high=1000)
    nesterov: bool = setting(False, "Use Nesterov's momentum.")
    schedule: Schedule = setting("cosine", "How the learning rate changes.", "training")
    milestones: tuple[int, ...] = setting(
        (),
        "With schedule step: the epochs, counted from 0, at which the learning rate is multiplied by factor.",
        "training",
        low=1,
        high=MOST_EPOCHS,
    )
    factor: float = setting(0.1, "With schedule step: what the learning rate is multiplied by.", above=0, high=1)
    warmup: int = setting(
        0,
        "Epochs over which the learning rate rises linearly, before the schedule begins.",
        "training",
        low=0,
        high=MOST_EPOCHS,
    )
    warmup_share: float = setting(0.0, "The same as a share of all steps.", low=0, below=1)
    augment: Augment = setting(
        "none", "Random crops, and flips, of the training images; auto: both for colour images, else none.", "training"
    )
    pad: int = setting(4, "Crops: pixels of zero padding on each side.", low=0, high=1024)
    mixup: float = setting(
        0.0, "Largest share of another example of the batch that is mixed into each; for distillation alone.", low=0, high=1
    )
    label_smoothing: float = setting(
        0.0, "Share of the target that is spread over all classes.", "training", low=0, high=0.9999
    )
    clip_norm: float | None = setting(None, "Largest norm of the whole gradient.", above=0, high=1e9)
    distill: float = setting(0.0, "Share of the loss that is the distance to the teacher's outputs.", low=0, high=1)
    temperature: float = setting(4.0, "Temperature of the distillation.", above=0, high=1e4)
    distance: Distance = setting(
        "auto",
        "Distance to the teacher's outputs: kl (Kullback-Leibler divergence) and dist (correlations over classes and over the "
        "batch) are of class logits, squared (error as a share of the variance) of any; auto: kl of classes, else squared.",
    )
    features: float = setting(
        0.0,
        "Weight of the relative squared error of feature maps to the teacher's, besides the rest of the loss.",
        low=0,
        high=1e6,
    )
    freeze_batchnorm: bool = setting(
        False,
        "Keep the means and variances of BatchNorm, and of other norms with running ones; weights are trained all the same.",
    )
    average: float = setting(
        0.0, "Decay of the moving average of the weights, which the training ends with; 0: none.", low=0, below=1
    )
    precision: Precision = setting(
        "float32", "Precision of the forward pass; weights keep theirs. bfloat16 only on processors that can."
    )
    channels_last: bool = setting(False, "Compute with channels last in memory.")
    seed: int = setting(0, "Seed of everything random, the first weights included.", "training", **SEEDS)

    def __post_init__(self) -> None:
        super().__post_init__()
        epochs = list(self.milestones)
        if (self.schedule == "step") != bool(epochs):
            raise RecipeError(
                f"schedule = {self.schedule!r} with milestones = {epochs}: milestones go with schedule 'step' and no other."
            )
        if epochs != sorted(set(epochs)) or min(epochs, default=1) < 1:
            raise RecipeError(f"milestones = {epochs}: wanted rising epochs, from 1 on.")
        if self.warmup > 0 and self.warmup_share > 0:
            raise RecipeError(f"warmup = {self.warmup} with warmup_share = {self.warmup_share:g}: give one of them.")
        if (self.warmup or self.warmup_share) > 0 and self.schedule == "one-cycle":
            raise RecipeError(
                f"warmup = {self.warmup or self.warmup_share} with schedule 'one-cycle', which has its own: set warmup = 0."
            )
        if 0 < self.warmup >= self.epochs:
            raise RecipeError(f"warmup = {self.warmup} of epochs = {self.epochs}: wanted fewer warm-up epochs than epochs.")
        if self.features > 0 and self.distill == 0:
            raise RecipeError(f"features = {self.features:g} with distill = 0: feature maps are a teacher's, set distill too.")
        if self.mixup > 0 and self.distill < 1:
            raise RecipeError(
                f"mixup = {self.mixup:g} with distill = {self.distill:g}: a mixture has no label, set distill = 1 or mixup = 0."
            )
        if self.label_smoothing > 0 and self.distill == 1:
            raise RecipeError(
                f"label_smoothing = {self.label_smoothing:g} with distill = 1, which trains on no labels: set distill below 1, "
                f"or label_smoothing = 0."
            )
        if self.nesterov and (self.momentum == 0 or self.optimiser != "sgd"):
            raise RecipeError(
                f"nesterov = true with momentum = {self.momentum:g}, optimiser = {self.optimiser!r}: it needs momentum of SGD."
            )

    @property
    def rate(self) -> float:
        """The learning rate as a number; an error while it is "auto"."""
        if isinstance(self.lr, str):
            raise RecipeError("lr = 'auto' has not been chosen yet: this needs a number.")
        return self.lr


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


# After a repair the network is nearly right: labels are left alone, and the original network's answers and feature maps are
# the aim, which is worth more than twice the epochs by answers alone.
# BatchNorm is live: with the statistics that the repair was solved for, rates that help most diverge (lab/notes/training.md).
GENTLE = TrainSettings(
    epochs=1,
    batch=128,
    lr="auto",
    schedule="linear",
    warmup_share=0.1,
    distill=1.0,
    temperature=4.0,
    features=25.0,
    augment="auto",
)

NAMED_SETTINGS = {
    "gentle": GENTLE,
    "paper-finetune": PAPER_FINETUNE,
    "paper-retrain": PAPER_RETRAIN,
}
"""Trainings that a recipe may ask for by name."""


def named_settings(name: str, where: str) -> TrainSettings:
    """The training of that name; RecipeError, with `where` in it, if there is none."""
    if name not in NAMED_SETTINGS:
        raise RecipeError(
            f"{where} = {brief(repr(name))}: wanted a table of settings, or one of {', '.join(NAMED_SETTINGS)}."
            f"{suggest(brief(name), NAMED_SETTINGS, listed=True)}"
        )
    return NAMED_SETTINGS[name]
