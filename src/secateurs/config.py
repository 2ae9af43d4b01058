"""What a user asks for: the recipe of a run, how filters are ranked, how networks are trained. Imports no torch.

Each field is declared once: its type, default, meaning and range. Its checks and its flag on the command line come from that.
"""

# ruff: noqa: RUF009 - `setting` returns a dataclasses.field
from __future__ import annotations

import dataclasses
import math
import operator
from dataclasses import dataclass
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Self, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
import tomli_w

from secateurs._util.decode import MAX_TOML_BYTES, Malformed, brief, decode_toml, read_text_file
from secateurs._util.files import write_text
from secateurs.errors import InvalidInput, RecipeError, suggest

Shortcut = Literal["before", "after", "stream", "coupled"]
ShortcutChoice = Literal["before", "after", "stream", "coupled", "auto"]
Transform = Literal["linear", "log", "rank"]
Design = Literal["exact", "bernoulli", "balanced"]
Method = Literal["bisect", "paper", "scan"]
Estimator = Literal["losses", "gradient", "network"]
Model = Literal["linear", "pairs"]
Schedule = Literal["constant", "step", "cosine", "linear", "one-cycle"]
Optimiser = Literal["sgd", "adamw"]
Distance = Literal["kl", "dist"]
Augment = Literal["none", "crop", "crop-flip", "auto"]
Precision = Literal["float32", "bfloat16", "float16"]
Direction = Literal["forward", "backward"]
Budget = Literal["site", "run"]
Pool = Literal["train", "search"]
Signal = Literal["loss", "divergence"]
Repair = Literal["none", "least-squares", "every-layer", "whole-network"]
Allocation = Literal["sequential", "global"]
EngineName = Literal["torch", "compile", "onnxruntime"]
Deploy = Literal["int8"]

REFITTED: tuple[Repair, ...] = ("every-layer", "whole-network")
"""Repairs that solve every layer again after all cuts."""

CRITERIA = [
    *("ensemble", "pairs", "obs", "random", "l1", "l2", "fpgm", "batchnorm", "taylor", "obd", "leave-one-out", "thinet"),
    *("thinet-pursuit", "maxplus", "maxplus-threshold", "portfolio"),
]
PORTFOLIO = ("ensemble", "obs", "l1", "fpgm")

MOST_PAIRS = 16_384  # of masks and examples, unless `masks` is given: a slope covers all filters, so wide layers need no more

NETWORK_WIDE: dict[str, Any] = {"estimator": "network", "off": 0.9}
"""How ensembles rank filters where all sites are ranked in one network."""

T = TypeVar("T")
FlagGroup = Literal["pruning", "scoring", "training"]


# ---- declarations -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Declared:
    """What a field means, and the range of its values; one with a `group` has a flag under that heading."""

    help: str
    group: FlagGroup | None = None
    low: float | None = None
    above: float | None = None
    high: float | None = None
    below: float | None = None

    def check(self, name: str, value: float) -> None:
        """RecipeError unless the number is finite and in range."""
        every = (
            (operator.ge, self.low, "{:g} or more"),
            (operator.gt, self.above, "a number above {:g}"),
            (operator.le, self.high, "at most {:g}"),
            (operator.lt, self.below, "below {:g}"),
        )
        limits = [(within, limit, text) for within, limit, text in every if limit is not None]
        if math.isfinite(value) and all(within(value, limit) for within, limit, _ in limits):
            return
        wanted = " and ".join(text.format(limit) for _, limit, text in limits) or "a finite number"
        if self.low is not None and self.high is not None:
            wanted = f"{self.low:g} to {self.high:g}"
        raise RecipeError(f"{name} = {value!r}: wanted {wanted}.")


def setting(default: T, help: str, group: FlagGroup | None = None, **limits: float) -> T:
    """Declare a field of a recipe or of settings: its default, what it means, the heading of its flag, its range."""
    declared: T = dataclasses.field(default=default, metadata={"declared": Declared(help, group, **limits)})
    return declared


@cache
def declarations(kind: Any) -> dict[str, tuple[Any, Any, Declared]]:
    """Type, default and declaration of every field, by name."""
    hints = get_type_hints(kind)
    return {f.name: (hints[f.name], f.default, f.metadata["declared"]) for f in dataclasses.fields(kind)}


_KINDS: dict[Any, tuple[type, str, str]] = {
    float: (Real, "a number", "numbers"),
    int: (Integral, "a whole number", "whole numbers"),
    bool: (bool, "True or False", ""),
    str: (str, "text", "texts"),
}


def _refuse_unknown(kind: Any, fields: dict[str, Any], where: str, prefix: str = "") -> None:
    known = declarations(kind)
    for name in fields:
        if name not in known:
            raise RecipeError(f"{where}: unknown field {brief(repr(prefix + name))}.{suggest(brief(name), known)}")


class _Checked:
    """Settings whose fields are checked by their declarations; numbers become plain ints and floats, lists tuples."""

    def __new__(cls, *values: Any, **fields: Any) -> Self:
        if values:
            raise RecipeError(f"{cls.__name__}({brief(repr(values[0]))}): wanted fields by name, such as max_drop=0.01.")
        _refuse_unknown(cls, fields, cls.__name__)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        kind: Any = type(self)
        for name, (hint, _, declared) in declarations(kind).items():
            value = _checked(name, getattr(self, name), hint)
            if isinstance(value, int | float) and not isinstance(value, bool):
                declared.check(name, value)
            object.__setattr__(self, name, value)


def _checked(name: str, value: Any, hint: Any) -> Any:
    """The value in the type of its field; RecipeError if it has another, or is not one of the choices."""
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    choices = tuple(choice for part in parts if get_origin(part) is Literal for choice in get_args(part))
    kinds = [part for part in parts if part is not NoneType and get_origin(part) is not Literal]
    if (value is None and NoneType in parts) or (isinstance(value, str) and value in choices):
        return value
    shown = brief(repr(value))
    if not kinds:
        raise RecipeError(f"{name} = {shown}: wanted one of {', '.join(choices)}.{suggest(brief(value), choices, listed=True)}")
    (kind,) = kinds
    if kind in _KINDS:
        if isinstance(value, _KINDS[kind][0]) and (kind is bool or not isinstance(value, bool)):
            try:
                return kind(value)
            except OverflowError as error:
                raise RecipeError(f"{name} = {shown}: the number is out of range.") from error
        wanted = _KINDS[kind][1]
    elif get_origin(kind) is tuple:
        (element, _) = get_args(kind)
        if isinstance(value, tuple | list) and all(isinstance(part, element) for part in value):
            return tuple(value)
        wanted = f"a tuple of {_KINDS[element][2]}"
    elif isinstance(value, kind):
        return value
    else:
        wanted = kind.__name__
    others = [*map(repr, choices), *(["None"] if NoneType in parts else [])]
    raise RecipeError(
        f"{name} = {shown}: got {type(value).__name__}, wanted {', '.join([wanted, *others[:-1]])}"
        + (f" or {others[-1]}." if others else ".")
    )


# ---- ranking filters ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class EnsembleSettings(_Checked):
    """How an ensemble of masks ranks the filters of a site."""

    estimator: Estimator = setting(
        "gradient",
        "Fit the linear model to losses at masks (the paper), or to their slopes along the masks; network: one for each "
        "example, to slopes at masks of all sites at once.",
        "scoring",
    )
    adaptive: bool = setting(True, "Stop scoring a site when the set of its least important filters is stable.", "scoring")
    masks_per_filter: int = setting(256, "Largest number of masks for each filter of a site.", "scoring", low=1)
    masks: int | None = setting(None, "Number of masks at every site, whatever its width.", "scoring", low=4)
    off: float = setting(
        0.3,
        "Share of a site's filters that a mask switches off (the paper's P, 0.3); estimator network: spread over all sites.",
        "scoring",
        above=0,
        below=1,
    )
    design: Design = setting(
        "exact", "How masks are drawn: exactly the share off, each filter by chance, or every filter off equally often."
    )
    transform: Transform = setting("linear", "Transform of the losses before the fit; not for slopes.")
    model: Model = setting("linear", "The model of the scores: linear, or with terms for pairs of filters.")
    ridge: float = setting(0.0, "Ridge penalty of the fit.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.estimator == "network" and self.masks is not None:
            raise RecipeError(
                f"masks = {self.masks} with estimator = 'network', where every example has one mask at all sites: set "
                f"scoring_examples."
            )
        if self.estimator != "losses" and (self.model, self.transform, self.ridge) != ("linear", "linear", 0.0):
            raise RecipeError(
                f"estimator {self.estimator!r} fits the linear model to slopes of the loss: model={self.model!r}, "
                f"transform={self.transform!r}, ridge={self.ridge:g} belong to estimator='losses'."
            )


@dataclass(frozen=True, kw_only=True)
class Scoring(EnsembleSettings):
    """How filters are ranked. `masks` and `masks_per_filter` bound the number of masks; `adaptive` may stop before it."""

    agreement: float = setting(
        0.85, "Share of resampled sets of least important filters that must agree, beyond chance.", above=0, high=1
    )
    examples: int | Literal["all"] | None = setting(None, "Number of examples; None: as many as the noise requires.", low=2)

    def bound(self, channels: int) -> int:
        """Largest number of masks for a site of `channels` filters."""
        if self.masks is not None:
            return self.masks
        masks = self.masks_per_filter * channels
        return min(masks, MOST_PAIRS) if self.estimator == "gradient" else masks


PAPER = Scoring(estimator="losses", adaptive=False, masks_per_filter=10, examples="all")
FAST = Scoring()


# ---- training -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TrainSettings(_Checked):
    """SGD with everything that decides its result; the same settings, data and start give the same weights."""

    epochs: int = setting(10, "Passes over the training examples.", "training", low=0)
    steps: int | None = setting(None, "Stop after this number of optimiser steps, even within an epoch.", "training", low=0)
    batch: int = setting(128, "Examples in an optimiser step.", "training", low=1)
    optimiser: Optimiser = setting("sgd", "SGD with momentum, or AdamW.", "training")
    lr: float | Literal["auto"] = setting(
        0.01, "Learning rate; auto: the best of three, by short trials on held-out examples.", "training", above=0
    )
    momentum: float = setting(0.9, "Momentum of SGD.", "training", low=0, high=0.9999)
    weight_decay: float = setting(1e-4, "Weight decay.", "training", low=0)
    nesterov: bool = setting(False, "Use Nesterov's momentum.")
    schedule: Schedule = setting("cosine", "How the learning rate changes.", "training")
    milestones: tuple[int, ...] = setting(
        (), "With schedule step: the epochs, counted from 0, at which the learning rate is multiplied by factor.", "training"
    )
    factor: float = setting(0.1, "With schedule step: what the learning rate is multiplied by.", above=0, high=1)
    warmup: int = setting(
        0, "Epochs over which the learning rate rises linearly, before the schedule begins.", "training", low=0
    )
    warmup_share: float = setting(0.0, "The same as a share of all steps.", low=0, below=1)
    augment: Augment = setting(
        "none", "Random crops, and flips, of the training images; auto: both for colour images, else none.", "training"
    )
    pad: int = setting(4, "Crops: pixels of zero padding on each side.", low=0, high=1024)
    label_smoothing: float = setting(
        0.0, "Share of the target that is spread over all classes.", "training", low=0, high=0.9999
    )
    clip_norm: float | None = setting(None, "Largest norm of the whole gradient.", above=0)
    distill: float = setting(0.0, "Share of the loss that is the distance to the teacher's outputs.", low=0, high=1)
    temperature: float = setting(4.0, "Temperature of the distillation.", above=0)
    distance: Distance = setting(
        "kl", "Distance to the teacher: Kullback-Leibler divergence, or dist (correlations over classes and over the batch)."
    )
    features: float = setting(
        0.0, "Weight of the relative squared error of feature maps to the teacher's, besides the rest of the loss.", low=0
    )
    freeze_batchnorm: bool = setting(False, "Keep BatchNorm's means and variances; its weights are trained all the same.")
    average: float = setting(
        0.0, "Decay of the moving average of the weights, which the training ends with; 0: none.", low=0, below=1
    )
    precision: Precision = setting(
        "float32", "Precision of the forward pass; weights keep theirs. bfloat16 only on processors that can."
    )
    int8: bool = setting(False, "Round weights and inputs of layers as an int8 file does, straight-through.", "training")
    channels_last: bool = setting(False, "Compute with channels last in memory.")
    seed: int = setting(0, "Seed of everything random, the first weights included.", "training")

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
# BatchNorm is live: with the statistics that the repair was solved for, rates that help most diverge (docs/notes/training.md).
GENTLE = TrainSettings(
    epochs=1,
    batch=128,
    lr="auto",
    schedule="linear",
    warmup_share=0.1,
    distill=1.0,
    temperature=4.0,
    features=25.0,
    average=0.99,
    augment="auto",
)

TRAININGS = ("finetune", "retrain")
"""The fields of a recipe that are trainings."""

NAMED_SETTINGS = {
    "gentle": GENTLE,
    "gentle-int8": dataclasses.replace(GENTLE, int8=True),
    "paper-finetune": PAPER_FINETUNE,
    "paper-retrain": PAPER_RETRAIN,
}
"""Trainings that a recipe may ask for by name."""


# ---- recipes ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Recipe(EnsembleSettings):
    """How a network is pruned: `Recipe.best()`, Algorithm 1 as published by `Recipe.paper()`, or field by field.

    A field that is not given means the fast way: site by site, nothing repaired. Training is off unless asked for. Drops are
    fractions: 0.005 is half a point.
    """

    max_drop: float = setting(
        0.005, "Accuracy on the validation set that may be lost, a fraction: 0.005 is half a point.", "pruning", low=0, high=1
    )
    budget: Budget = setting(
        "run", "The drop counts from the start of the whole run, or from the start of each site (the paper).", "pruning"
    )
    confidence: float = setting(
        0.95,
        "Confidence that the drop holds on other images too; 0: the point estimate decides, without a guarantee.",
        "pruning",
        low=0,
        high=0.999999,
    )
    worst_class: float | None = setting(None, "Accuracy that any single class may lose, a fraction.", "pruning", low=0, high=1)
    allocation: Allocation = setting(
        "sequential",
        "Cut each site in turn as far as possible (the paper), or weigh the cuts of all sites together.",
        "pruning",
    )
    direction: Direction = setting("forward", "Visit sites from the input to the output, or back.", "pruning")
    shortcut: ShortcutChoice = setting(
        "before",
        "Where the last filters of a residual block are masked: before or after the add, or all of a stage's with one mask "
        "(stream), or all that the model's own code ties together (coupled); auto: where the same saving costs least, with all "
        "sites weighed together.",
        "pruning",
    )
    head_widths: bool = setting(
        False, "Also remove features within the heads of attention, the same from every head, besides whole heads.", "pruning"
    )
    rounds: int = setting(1, "Largest number of passes over the sites.", "pruning", low=1)
    sites: tuple[str, ...] = setting((), "Only sites whose names match this pattern, such as 'layer3.*'.", "pruning")
    target_parameters: float | None = setting(
        None, "Stop when this share of the parameters is removed.", "pruning", low=0, high=1
    )
    target_macs: float | None = setting(
        None, "Stop when this share of the multiply-accumulates is removed.", "pruning", low=0, high=1
    )
    target_memory: float | None = setting(
        None,
        "Stop when the activations take, at their peak, this share of what they took in the original network.",
        "pruning",
        above=0,
        below=1,
    )
    criterion: str = setting(
        "ensemble",
        f"Criterion that ranks the filters: {', '.join(CRITERIA)}, or your own as package.module:function.",
        "scoring",
    )
    portfolio: tuple[str, ...] = setting(PORTFOLIO, "The criteria that criterion 'portfolio' compares.")
    signal: Signal = setting(
        "loss",
        "Score masks by the loss, or by the divergence from the unpruned network's outputs, which needs no labels.",
        "scoring",
    )
    scoring: Pool = setting("train", "Set that masks are scored on; search is the validation set.", "scoring")
    scoring_examples: int | Literal["all"] | None = setting(
        None, "Number of its examples, a stratified subset; by default as many as the noise requires.", "scoring", low=2
    )
    repair: Repair = setting(
        "none",
        "Solve new weights, in closed form: of the layers that read what was cut, or finally of every layer; whole-network: "
        "then train all layers together to give what they gave, without labels.",
        "pruning",
    )
    repair_examples: int = setting(1024, "Training examples that a repair is solved on.", "pruning", low=1)
    repaired_masks: bool = setting(False, "Score masks after repair too, with one solution for each.")
    search: Method = setting(
        "bisect",
        "How the number of filters to remove is found: by bisection, one by one upwards, or downwards (paper).",
        "pruning",
    )
    largest_share: float = setting(0.9, "Largest share of a site's filters that one cut may remove.", "pruning", low=0, high=1)
    branches: bool = setting(
        True,
        "Where all sites are weighed together: a branch of a sum may also go as a whole, whatever largest_share says.",
        "pruning",
    )
    round_to: int | Literal["auto"] = setting(
        "auto",
        "The number of kept filters is a multiple of this; auto: of 8 or 16, which a short measurement of the engine decides, "
        "of fewer at narrow sites.",
        "pruning",
        low=1,
    )
    latency_aware: bool = setting(
        False, "Keep only numbers of filters that are measurably faster in the engine than any larger one.", "pruning"
    )
    engine: EngineName | None = setting(
        None, "What will run the network: cuts are then weighed by the time that they save in it.", "pruning"
    )
    deploy: Deploy | None = setting(
        None,
        "The file that will run is an int8 one for ONNX Runtime: cuts are weighed by the time that they save in it, a fifth of "
        "max_drop is left for quantising, and that file is what is certified.",
        "pruning",
    )
    target_latency: float | None = setting(
        None, "Stop when the network takes this share of its original time in the engine.", "pruning", above=0, below=1
    )
    max_ms: float | None = setting(
        None, "Stop when the network takes this number of milliseconds in the engine.", "pruning", above=0
    )
    latency_batch: int | None = setting(None, "Examples at once where time is measured; by default 1.", "pruning", low=1)
    latency_threads: int | None = setting(
        None, "Threads of the engine where time is measured; by default those of torch.", "pruning", low=1
    )
    latency_seconds: float | None = setting(
        None, "Seconds that measuring the times of all layers may take; by default 300.", "pruning", above=0
    )
    finetune: TrainSettings | None = setting(None, "After every cut.")
    retrain: TrainSettings | None = setting(None, "After all cuts.")
    keep_best: bool = setting(
        True,
        "After training, keep the best of the weights before it, after it, averaged, and in between, on held-out examples.",
        "training",
    )
    train_trials: bool = setting(
        False,
        "Where all sites are weighed together: train every network that is tried, and judge it after that, so that cuts go as "
        "deep as the trained network keeps within the drop; takes a training for each.",
        "training",
    )
    recalibrate: int | None = setting(
        None, "Training examples on which BatchNorm statistics are measured again after every cut.", "training", low=1
    )
    batch: int = setting(256, "Examples at once while scoring and searching; fewer where memory runs out.", "scoring", low=1)
    scoring_precision: Precision = setting(
        "float32",
        "Precision of the passes that score masks (autocast); accuracies are measured in the network's own.",
        "scoring",
    )
    seed: int = setting(0, "Seed of everything random.", "scoring")

    @staticmethod
    def best(**changes: Any) -> Recipe:
        """The best recipe measured: structured OBS, all cuts allocated together, every layer repaired, no training.

        With a `portfolio` given, or without repair, a portfolio of criteria ranks the filters.
        """
        by_repair = "portfolio" not in changes and changes.get("repair") != "none"
        chosen: dict[str, Any] = {"criterion": "obs" if by_repair else "portfolio", "repair": "every-layer"}
        if not set(changes) & set(declarations(EnsembleSettings)):
            chosen |= NETWORK_WIDE
        return Recipe(**{"max_drop": 0.01, "allocation": "global", **chosen, **changes})

    @staticmethod
    def paper(**changes: Any) -> Recipe:
        """Algorithm 1 as published: 10 masks a filter on all training examples, α by point estimate, nothing repaired."""
        ensemble = {name: getattr(PAPER, name) for name in declarations(EnsembleSettings)}
        others = {"scoring_examples": PAPER.examples, "budget": "site", "confidence": 0.0, "search": "paper", "round_to": 1}
        return Recipe(**{**ensemble, **others, "keep_best": False, **changes})

    def __post_init__(self) -> None:
        for name in TRAININGS:
            if isinstance(given := getattr(self, name), str):
                object.__setattr__(self, name, _named_settings(given, name))
        super().__post_init__()
        for field, name in (("criterion", self.criterion), *(("portfolio", name) for name in self.portfolio)):
            allowed = [other for other in CRITERIA if other != field]  # a portfolio holds no portfolio
            if name not in allowed and ":" not in name:  # a function is imported when a run begins
                raise RecipeError(
                    f"{field} = {name!r}: wanted one of {', '.join(allowed)}, or package.module:function."
                    f"{suggest(name, allowed, listed=True)}"
                )
        by_repair = self.criterion == "obs" or set(self.portfolio) <= {"obs"}
        everywhere = self.allocation == "global"
        if not self.portfolio:
            raise RecipeError("portfolio = []: wanted at least one criterion to compare.")
        if 0 < self.confidence <= 0.5:
            raise RecipeError(
                f"confidence = {self.confidence!r}: wanted more than 0.5 and less than 1, or 0 for no certificate."
            )
        if everywhere and self.budget == "site":
            raise RecipeError(
                "budget = 'site' with allocation = 'global': cuts weighed together share one budget: set budget = 'run'."
            )
        if everywhere and (self.rounds > 1 or self.direction == "backward"):
            raise RecipeError("allocation = 'global': all cuts are weighed together: set rounds = 1 and direction = 'forward'.")
        if self.shortcut == "auto" and not everywhere:
            raise RecipeError("shortcut = 'auto': allocations are compared: set allocation = 'global', or a shortcut.")
        if self.repair == "none" and by_repair:
            raise RecipeError(
                "criterion = 'obs': it ranks filters by what a repair cannot make up for: set repair = 'least-squares'."
            )
        if self.repair in REFITTED and not everywhere:
            raise RecipeError(
                f"repair = {self.repair!r}: comes after all cuts: set allocation = 'global', or repair = 'least-squares'."
            )
        if self.has_time_target and not everywhere:
            raise RecipeError("target_latency and max_ms: cuts are weighed by the time they save: set allocation = 'global'.")
        if self.deploy is not None and (not everywhere or self.engine not in (None, "onnxruntime")):
            raise RecipeError(
                f"deploy = {self.deploy!r}: cuts are weighed by the time that they save in ONNX Runtime: set allocation = "
                f"'global' and no other engine."
            )
        if self.train_trials and (not everywhere or self.finetune is not None or self.recalibrate is not None):
            raise RecipeError(
                "train_trials = true: networks with all cuts made are trained and judged: set allocation = 'global', and "
                "retrain in place of finetune and recalibrate."
            )
        if self.train_trials and self.repair == "whole-network":
            raise RecipeError("train_trials = true: a training follows every repair: set repair = 'every-layer'.")
        if self.repaired_masks and (self.repair == "none" or self.estimator != "losses"):
            raise RecipeError("repaired_masks = true: set repair = 'least-squares' and estimator = 'losses'.")

    @property
    def shortcuts(self) -> tuple[Shortcut, ...]:
        """The positions that are compared, or the one that is taken."""
        return ("before", "after", "stream") if self.shortcut == "auto" else (self.shortcut,)

    @property
    def has_time_target(self) -> bool:
        """Whether the run is to stop at a time."""
        return self.target_latency is not None or self.max_ms is not None

    @property
    def has_target(self) -> bool:
        """Whether the run is to stop at a size or a time."""
        sizes = (self.target_macs, self.target_parameters, self.target_memory)
        return self.has_time_target or any(size is not None for size in sizes)

    @property
    def weighs_time(self) -> bool:
        """Whether time in an engine counts, not MACs; a function of the user's own that measures it is no part of a recipe."""
        return self.engine is not None or self.deploy is not None or self.has_time_target or self.latency_aware

    def ensemble_settings(self) -> Scoring:
        """The part of the recipe that says how an ensemble is made."""
        return Scoring(examples=self.scoring_examples, **{name: getattr(self, name) for name in declarations(EnsembleSettings)})


# ---- files --------------------------------------------------------------------------------------------------------------


def read_recipe(path: str | Path, **overrides: Any) -> Recipe:
    """Read a recipe from a TOML file, with single fields overridden ("finetune.epochs" is a field of a table)."""
    return recipe_from(_read_toml(Path(path)), where=str(path), **overrides)


def read_settings(path: str | Path, **overrides: Any) -> TrainSettings:
    """Read the settings of a training from a TOML file, with single fields overridden."""
    return settings_from(_read_toml(Path(path)), where=str(path), **overrides)


def recipe_from(fields: dict[str, Any], *, where: str = "recipe", **overrides: Any) -> Recipe:
    """Make a recipe from nested plain values; `where` is named in errors."""
    given = _overridden(fields, overrides, where)
    for name in TRAININGS:
        if isinstance(given.get(name), dict):
            given[name] = _made(TrainSettings, given[name], where, f"{name}.")
    recipe: Recipe = _made(Recipe, given, where)
    return recipe


def settings_from(fields: dict[str, Any], *, where: str = "settings", **overrides: Any) -> TrainSettings:
    """Make the settings of a training from plain values; `where` is named in errors."""
    settings: TrainSettings = _made(TrainSettings, _overridden(fields, overrides, where), where)
    return settings


def recipe_fields(recipe: Recipe) -> dict[str, Any]:
    """The recipe as plain values, without fields that are None."""
    fields: dict[str, Any] = _without_none(msgspec.to_builtins(dataclasses.asdict(recipe)))
    ensemble = declarations(EnsembleSettings)  # last: in a file, max_drop is looked for first
    return {name: fields[name] for name in sorted(fields, key=lambda name: name in ensemble)}


def write_recipe(path: Path, recipe: Recipe) -> None:
    """Write the recipe as TOML, whole or not at all."""
    write_text(path, tomli_w.dumps(recipe_fields(recipe)))


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return decode_toml(read_text_file(path, max_bytes=MAX_TOML_BYTES))
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read ({error.strerror}).") from error
    except Malformed as error:
        raise RecipeError(f"{path}: {error}.") from error


def _overridden(fields: dict[str, Any], overrides: dict[str, Any], where: str) -> dict[str, Any]:
    result = {key: dict(value) if isinstance(value, dict) else value for key, value in fields.items()}
    for key, value in sorted(overrides.items(), key=lambda item: "." in item[0]):  # tables first, then fields of them
        table, dot, name = key.partition(".")
        if dot and table in TRAININGS and isinstance(named := result.get(table), str):
            result[table] = dataclasses.asdict(_named_settings(named, f"{where}: {table}"))
        inside = result.setdefault(table, {}) if dot else result
        if not isinstance(inside, dict):
            raise RecipeError(f"{where}: {table} = {brief(repr(inside))} with {key}: wanted a table of settings.")
        inside[name or key] = value
    return result


def _named_settings(name: str, where: str) -> TrainSettings:
    if name not in NAMED_SETTINGS:
        raise RecipeError(
            f"{where} = {brief(repr(name))}: wanted a table of settings, or one of {', '.join(NAMED_SETTINGS)}."
            f"{suggest(brief(name), NAMED_SETTINGS, listed=True)}"
        )
    return NAMED_SETTINGS[name]


def _made(kind: Any, fields: dict[str, Any], where: str, prefix: str = "") -> Any:
    _refuse_unknown(kind, fields, where, prefix)
    try:
        return kind(**fields)
    except InvalidInput as error:
        raise RecipeError(f"{where}: {prefix}{error}") from error


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return [_without_none(v) for v in value] if isinstance(value, list | tuple) else value
