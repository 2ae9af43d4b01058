"""The recipe of a run: which fields it has, what they mean, and which of them exclude each other."""

# ruff: noqa: RUF009 - `setting` returns a dataclasses.field
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from secateurs._util.extensions import added, lab_hint
from secateurs.config.declared import MOST_AT_ONCE, MOST_EXAMPLES, SEEDS, declarations, setting
from secateurs.config.scoring import PAPER, EnsembleSettings, Scoring
from secateurs.config.training import Precision, TrainSettings, named_settings
from secateurs.errors import RecipeError, suggest

Shortcut = Literal["before", "after", "stream", "coupled"]
ShortcutChoice = Literal["before", "after", "stream", "coupled", "auto"]
Method = Literal["bisect", "paper", "scan"]
Direction = Literal["forward", "backward"]
Budget = Literal["site", "run"]
Repair = Literal["none", "least-squares", "every-layer", "whole-network"]
Allocation = Literal["sequential", "global"]
EngineName = Literal["auto", "torch", "compile", "onnxruntime", "none"]
Deploy = Literal["int8"]

REFITTED: tuple[Repair, ...] = ("every-layer", "whole-network")
"""Repairs that solve every layer again after all cuts."""

CRITERIA = [
    *("ensemble", "obs", "random", "l1", "l2", "fpgm", "batchnorm", "taylor", "leave-one-out", "portfolio"),
]
"""The criteria of this package, and those that a program registers; `criterion_names()` has those of other packages too."""

PORTFOLIO = ("ensemble", "obs", "l1", "fpgm")

TRAININGS = ("finetune", "retrain")
"""The fields of a recipe that are trainings."""

CHANGED_DEFAULTS = frozenset({"max_drop", "allocation", "criterion", "repair", "portfolio", "estimator", "off"})
"""Fields whose defaults were others in earlier releases, which wrote all of them into every run folder."""

_SITE_BY_SITE = {"max_drop": 0.005, "allocation": "sequential", "criterion": "ensemble", "repair": "none"}


def criterion_names() -> list[str]:
    """All names that recipes may use without naming a function."""
    return [*CRITERIA, *(name for name in added("criteria") if name not in CRITERIA)]


@dataclass(frozen=True, kw_only=True)
class Recipe(EnsembleSettings):
    """How a network is pruned. `Recipe()` is what `sc.prune` does: the best that was measured, without training.

    That is structured OBS, all cuts allocated together, every layer repaired. `Recipe.fast()` goes site by site and repairs
    nothing, `Recipe.paper()` is Algorithm 1 as published; all three take single fields. Training is off unless asked for.
    Drops are fractions: 0.005 is half a point.
    """

    max_drop: float = setting(
        0.01, "Accuracy on the validation set that may be lost, a fraction: 0.005 is half a point.", "pruning", low=0, high=1
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
        "global",
        "Cut each site in turn as far as possible (sequential, the paper), or weigh the cuts of all sites together (global).",
        "pruning",
    )
    direction: Direction = setting("forward", "Visit sites from the input to the output, or back.", "pruning")
    shortcut: ShortcutChoice = setting(
        None,
        "Mask a residual block's output before the add, after it, per stage (stream), or only as the model's code allows "
        "(coupled). auto: the first three, weighed together. By default auto where cuts are weighed by time, else before.",
        "pruning",
    )
    head_widths: bool = setting(
        False, "Also remove features within the heads of attention, the same from every head, besides whole heads.", "pruning"
    )
    rounds: int = setting(1, "Largest number of passes over the sites.", "pruning", low=1, high=1000)
    sites: tuple[str, ...] = setting((), "Only sites whose names match this pattern, such as 'layer3.*'.", "pruning")
    target_parameters: float | None = setting(
        None, "Stop when this share of the parameters is removed.", "pruning", low=0, high=1
    )
    target_macs: float | None = setting(
        None, "Stop when this share of the multiply-accumulates is removed.", "pruning", low=0, high=1
    )
    target_memory: float | None = setting(
        None,
        "Stop when the peak of the activations is this share of the original network's.",
        "pruning",
        above=0,
        below=1,
    )
    criterion: str = setting(
        None,
        f"Criterion that ranks the filters: {', '.join(CRITERIA)}, or your own as package.module:function. By default obs, or "
        "portfolio where one is given or nothing is repaired.",
        "scoring",
    )
    portfolio: tuple[str, ...] = setting(
        None, f"The criteria that criterion 'portfolio' compares, by default {', '.join(PORTFOLIO)}."
    )
    scoring_examples: int | Literal["all"] | None = setting(
        None,
        "Number of training examples that masks are scored on, a stratified subset; by default as many as the noise requires.",
        "scoring",
        low=2,
        high=MOST_EXAMPLES,
    )
    repair: Repair = setting(
        "every-layer",
        "Solve new weights in closed form: of the layers that read a cut (least-squares), and after all cuts of every layer "
        "(every-layer); whole-network: then train all layers together to their original outputs, without labels.",
        "pruning",
    )
    repair_examples: int = setting(1024, "Training examples that a repair is solved on.", "pruning", low=1, high=MOST_EXAMPLES)
    curve_examples: int = setting(
        1024,
        "Validation examples that compare orders and measure the loss that the cuts of each site cost.",
        "scoring",
        low=2,
        high=MOST_EXAMPLES,
    )
    search: Method = setting(
        "bisect",
        "How the number of filters to remove is found: by bisection, one by one upwards, or downwards (paper).",
        "pruning",
    )
    largest_share: float = setting(0.9, "Largest share of a site's filters that one cut may remove.", "pruning", low=0, high=1)
    branches: bool = setting(
        True,
        "With allocation = global: a branch of a sum may also go as a whole, whatever largest_share says.",
        "pruning",
    )
    round_to: int | Literal["auto"] = setting(
        "auto",
        "Keep a multiple of this number; auto: of 8 or 16, by a short measurement of the engine, of fewer at narrow sites.",
        "pruning",
        low=1,
        high=65_536,
    )
    engine: EngineName = setting(
        "auto",
        "The program that will run the network: cuts are weighed by the time that they save in it. auto: PyTorch on the "
        "model's device; none: cuts are weighed by MACs, as with a target in MACs, parameters or memory.",
        "pruning",
    )
    deploy: Deploy | None = setting(
        None,
        "Prune for an int8 file for ONNX Runtime: cuts are weighed by the time that they save in it, a fifth of max_drop is "
        "left for quantising, and the file is certified.",
        "pruning",
    )
    target_latency: float | None = setting(
        None, "Stop when the network takes this share of its original time in the engine.", "pruning", above=0, below=1
    )
    max_ms: float | None = setting(
        None, "Stop when the network takes this number of milliseconds in the engine.", "pruning", above=0, high=1e7
    )
    latency_batch: int | None = setting(
        None,
        "Examples at once where time is weighed; by default as many as the validation loader gives, and no slower at one.",
        "pruning",
        low=1,
        high=MOST_AT_ONCE,
    )
    latency_threads: int | None = setting(
        None, "Threads of the engine where time is measured; by default those of torch.", "pruning", low=1, high=4096
    )
    latency_seconds: float | None = setting(
        None, "Seconds that measuring the times of all layers may take; by default 300.", "pruning", above=0, high=1e6
    )
    finetune: TrainSettings | None = setting(None, "After every cut.")
    retrain: TrainSettings | None = setting(None, "After all cuts.")
    keep_best: bool = setting(
        True,
        "After training keep whichever weights are best on held-out data: before, after, averaged or interpolated (of your "
        "own training: before or after).",
        "training",
    )
    train_trials: bool = setting(
        False,
        "With allocation = global: train each candidate before judging it. Cuts deeper; one training per candidate.",
        "training",
    )
    recalibrate: int | None = setting(
        None,
        "Training examples on which BatchNorm statistics are measured again after every cut.",
        "training",
        low=1,
        high=MOST_EXAMPLES,
    )
    batch: int = setting(
        256, "Examples at once while scoring and searching; fewer where memory runs out.", "scoring", low=1, high=MOST_AT_ONCE
    )
    scoring_precision: Precision = setting(
        "float32",
        "Precision of the passes that score masks (autocast); accuracies are measured in the network's own.",
        "scoring",
    )
    seed: int = setting(0, "Seed of everything random.", "scoring", **SEEDS)

    @staticmethod
    def best(**changes: Any) -> Recipe:
        """The same as `Recipe(...)`: the defaults are the best recipe measured."""
        return Recipe(**changes)

    @staticmethod
    def fast(**changes: Any) -> Recipe:
        """Site by site, by ensembles that stop when the least important filters are stable; nothing repaired; half a point."""
        return Recipe(**{**_SITE_BY_SITE, "estimator": "gradient", **changes})

    @staticmethod
    def paper(**changes: Any) -> Recipe:
        """Algorithm 1 as published: 10 masks a filter on all training examples, α by point estimate, nothing repaired."""
        ensemble = {name: getattr(PAPER, name) for name in declarations(EnsembleSettings)}
        others = {"scoring_examples": PAPER.examples, "budget": "site", "confidence": 0.0, "search": "paper", "round_to": 1}
        return Recipe(**{**_SITE_BY_SITE, **ensemble, **others, "keep_best": False, **changes})

    def __post_init__(self) -> None:
        for name in TRAININGS:
            if isinstance(given := getattr(self, name), str):
                object.__setattr__(self, name, named_settings(given, name))
        if self.criterion is None:
            compared = self.portfolio is not None or self.repair == "none"
            object.__setattr__(self, "criterion", "portfolio" if compared else "obs")
        if self.portfolio is None:
            object.__setattr__(self, "portfolio", PORTFOLIO)
        if self.shortcut is None:
            object.__setattr__(self, "shortcut", "auto" if self.weighs_time else "before")
        if self.estimator is None and self._ranks_in_network():
            object.__setattr__(self, "estimator", "network")
        super().__post_init__()
        for field, name in (("criterion", self.criterion), *(("portfolio", name) for name in self.portfolio)):
            allowed = [other for other in criterion_names() if other != field]  # a portfolio holds no portfolio
            if name not in allowed and ":" not in name:  # a function is imported when a run begins
                raise RecipeError(
                    f"{field} = {name!r}: wanted one of {', '.join(allowed)}, or package.module:function."
                    f"{lab_hint('criteria', name) or suggest(name, allowed, listed=True)}"
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
        if self.engine == "none" and self.has_time_target:
            raise RecipeError("engine = 'none' with a target in time: name the engine whose time it is, or leave it out.")
        if self.deploy is not None and (not everywhere or self.engine not in ("auto", "onnxruntime")):
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

    def _ranks_in_network(self) -> bool:
        """Whether ensembles rank all sites in one network, with nothing said about how."""
        ranking = self.portfolio if self.criterion == "portfolio" else (self.criterion,)
        said = any(getattr(self, name) != default for name, (_, default, _) in declarations(EnsembleSettings).items())
        return self.allocation == "global" and "ensemble" in ranking and not said

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
        sizes = any(target is not None for target in (self.target_macs, self.target_parameters, self.target_memory))
        named = self.engine not in ("auto", "none") or self.deploy is not None or self.has_time_target
        return self.allocation == "global" and self.engine != "none" and (named or not sizes)

    def ensemble_settings(self) -> Scoring:
        """The part of the recipe that says how an ensemble is made."""
        return Scoring(examples=self.scoring_examples, **{name: getattr(self, name) for name in declarations(EnsembleSettings)})
