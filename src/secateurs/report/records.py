"""What a report is made of: frozen records of one run, read from its folder or taken from a run in memory."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypedDict

import torch
from torch import Tensor

from secateurs._util.format import Metric, folder_name, removed
from secateurs.errors import SecateursError
from secateurs.graph.structure import Node
from secateurs.report.exports import ExportRecord
from secateurs.scoring.importance import Importance, PairImportance, fit_importance, fit_pairs, scores

State = Literal["finished", "running", "stopped"]


@dataclass(frozen=True)
class RankingRecord:
    """The importances of a site's C filters, in the site's order."""

    ids: tuple[int, ...]  # in the numbers of the untouched network
    coef: tuple[float, ...]
    stderr: tuple[float, ...]  # empty where none is known; inf where the masks cannot tell
    agreement: tuple[tuple[float, float], ...] = ()  # (predicted, realised) score of a mask; a sample where there are many
    of_loss: bool = False  # coefficients are losses, and their sums mean something

    def rise(self, removed: Collection[int]) -> float | None:
        """The loss that the linear model expects the removal of these filters to add; None where it does not tell."""
        if not self.of_loss:
            return None
        return sum(c for i, c in zip(self.ids, self.coef, strict=True) if i in set(removed))


@dataclass(frozen=True)
class StepRecord:
    """One step of a run as the journal has it; figures that an older journal lacks are None."""

    number: int
    round: int
    site: str
    channels: int
    removed: tuple[int, ...]
    accuracy_before: float
    accuracy_cut: float
    accuracy: float
    baseline: float  # the accuracy that the allowed drop counts from
    parameters_removed: float
    macs_removed: float
    evaluated: tuple[tuple[int, float], ...]
    masks: int
    r2: float | None
    split_half: float | None
    seconds: float
    criterion: str
    note: str
    loss_before: float | None = None  # on the search set, before the cut
    loss_cut: float | None = None  # and right after it, before any training
    examples: int = 0  # that the ranking rests on; 0 if that is not known
    bound: float | None = None  # upper bound on the drop right after the cut, at the recipe's confidence
    images: int = 0  # that the bound comes from
    by_estimate: int | None = None  # filters; the largest number tried whose drop, as seen on the search images, is allowed
    compared: tuple[tuple[str, float], ...] = ()  # criteria with the mean loss of each, best first
    repaired: tuple[float, float] | None = None  # error of the readers' outputs before and after repair, a share
    ranking: RankingRecord | None = None

    @property
    def kept(self) -> int:
        """Filters after the cut."""
        return self.channels - len(self.removed)

    @property
    def drop(self) -> float:
        """What the cut cost, counted as the allowed drop is, before any training."""
        return self.baseline - self.accuracy_cut

    @property
    def loss_rise(self) -> tuple[float | None, float | None]:
        """What the cut adds to the loss: as the linear model predicts it, and as it was measured; None where not known."""
        if not self.removed:
            return None, None
        predicted = None if self.ranking is None else self.ranking.rise(self.removed)
        measured = None if self.loss_before is None or self.loss_cut is None else self.loss_cut - self.loss_before
        return predicted, measured

    @property
    def decisive_drop(self) -> float:
        """What is held against the allowed drop: its upper bound where one was certified, the measured drop otherwise."""
        return self.drop if self.bound is None else self.bound


@dataclass(frozen=True)
class DivisionRecord:
    """How cuts were divided over the network. What is saved is a share, as the sites' curves add it up."""

    saved: float
    frontier: tuple[tuple[float, float], ...]  # saved, predicted rise of the loss
    tried: tuple[tuple[float, float, bool], ...]  # saved, accuracy on the images that steer, accepted
    bound: float | None = None  # upper bound on the drop of all cuts together, at the recipe's confidence
    images: int = 0  # that the bound comes from
    by_estimate: float | None = None  # saved by the largest division tried whose drop, as seen on the search images, is allowed


@dataclass(frozen=True)
class Event:
    """A moment when the accuracy on the search set was measured."""

    what: Literal["start", "cut", "finetune", "retrain"]
    step: int
    accuracy: float
    label: str
    macs_left: float  # share of the start's


@dataclass(frozen=True)
class LayerRecord:
    """A layer's weight before and after, and its place in the network."""

    name: str
    filters: int
    left: int
    weights: int
    weights_left: int
    macs: int | None  # for one example; None where the network's picture is not known

    @property
    def share_removed(self) -> float:
        """Of its filters."""
        return removed(self.filters, self.left)

    @property
    def weights_removed(self) -> float:
        """Of its weights, and so of its MACs: every weight of a layer is used equally often."""
        return removed(self.weights, self.weights_left)


@dataclass(frozen=True)
class Pair:
    """A figure before and after."""

    before: float
    after: float

    @property
    def removed(self) -> float:
        """The share that is gone."""
        return removed(self.before, self.after)

    @property
    def change(self) -> float:
        """After minus before."""
        return self.after - self.before


@dataclass(frozen=True)
class End:
    """How a finished run ended."""

    stopped: str
    search: Pair
    test: Pair
    test_count: int
    parameters: Pair
    macs: Pair
    bytes: Pair
    seconds: float
    classes: tuple[Pair, ...] = ()  # test accuracy by class; NaN for a class without examples
    latency: Mapping[str, Any] | None = None

    @property
    def speedup(self) -> float | None:
        """How many times faster than the original the network was measured to be."""
        known = self.latency or {}
        return _number(known.get("speedup", known.get("ratio")))

    @property
    def aligning(self) -> float:
        """The share of the network's time that goes into aligning channels; 0 where that was not measured."""
        return _number((self.latency or {}).get("aligning")) or 0.0

    @property
    def alignment_outweighs(self) -> bool:
        """Whether aligning channels takes longer than all that pruning saves."""
        # in units of the pruned network's time: it saves speedup - 1
        return self.speedup is not None and self.aligning > max(self.speedup - 1, 0.0)


@dataclass(frozen=True)
class RunRecord:
    """All that a report says of one run."""

    folder: Path | None
    state: State
    metric: Metric
    loss_name: str
    provenance: Mapping[str, Any]
    recipe: Mapping[str, Any]
    recipe_text: str
    start: float | None  # accuracy on the search set
    steps: tuple[StepRecord, ...]
    events: tuple[Event, ...]
    end: End | None
    division: DivisionRecord | None = None  # None: sites were cut one after the other
    nodes: tuple[Node, ...] = ()
    layers: tuple[LayerRecord, ...] = ()
    at: str = ""  # what an unfinished run is, or was, working on
    exports: tuple[ExportRecord, ...] = ()
    notes: tuple[str, ...] = field(default=())  # what is missing or damaged

    @property
    def name(self) -> str:
        """The last part of the folder's path."""
        return folder_name(self.folder)

    @property
    def model(self) -> str:
        """The network as its user calls it: the built-in or own name, or the class."""
        origin = self.provenance.get("origin") or {}
        known = self.provenance.get("model") or {}
        return str(origin.get("model") or str(known.get("class", "a network")).rpartition(".")[2])

    @property
    def data(self) -> str:
        """The data's name."""
        return str((self.provenance.get("data") or {}).get("name", "data"))

    @property
    def max_drop(self) -> float | None:
        """The accuracy that may be lost; None where the recipe is missing."""
        value = self.recipe.get("max_drop")
        return float(value) if isinstance(value, int | float) else None

    @property
    def saving(self) -> str:
        """What a division saves."""
        only_parameters = self.recipe.get("target_macs") is None and self.recipe.get("target_parameters") is not None
        return "parameters" if only_parameters else "MACs"

    @property
    def search_count(self) -> int:
        """Examples in the search set; 0 if that is not known."""
        sets = (self.provenance.get("data") or {}).get("sets") or {}
        return int((sets.get("search") or {}).get("count", 0))

    @property
    def class_names(self) -> tuple[str, ...]:
        """As the data names them."""
        return tuple(map(str, (self.provenance.get("data") or {}).get("classes") or ()))


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


InMemory: TypeAlias = "Importance | PairImportance"
_SHOWN = 120  # masks in the picture of predicted against realised scores


class RankingMeta(TypedDict):
    """Plain values beside the tensors of a ranking."""

    site: str
    original: list[int]  # the site's channels in the numbers of the untouched network
    criterion: str
    note: str


def ranking_from(tensors: Mapping[str, Tensor], meta: Mapping[str, Any], recipe: Mapping[str, Any]) -> RankingRecord:
    """The importances that a run kept of a ranking; ValueError if they cannot be used.

    Some criteria, such as obs, give an order and no importances: then there are none.
    """
    fitted = _fitted(tensors, recipe)
    if "coef" in tensors:
        coef, stderr = tensors["coef"], tensors.get("stderr")
    elif fitted is None and "order" in tensors:
        return RankingRecord((), (), ())
    elif fitted is None:
        raise ValueError("neither importances nor masks with losses in it")
    else:
        coef, stderr = _coefficients(fitted)
    ids = meta.get("original") or range(len(coef))
    if len(ids) != len(coef):
        raise ValueError(f"{len(coef)} importances for {len(ids)} filters")
    agreement = () if fitted is None else _agreement(tensors, fitted, recipe)
    found = _ranking(tuple(map(int, ids)), coef, stderr, agreement)
    # Masks that all keep the same number of filters cannot tell what a number of filters costs, only which: slopes can.
    slopes = meta.get("criterion") == "ensemble" and recipe.get("estimator", "losses") == "gradient"
    return replace(found, of_loss=slopes)


def ranking_of(importance: InMemory) -> RankingRecord:
    """The importances of a step in memory; filters are numbered as the site had them then."""
    coef, stderr = _coefficients(importance)
    return _ranking(tuple(range(len(coef))), coef, stderr, ())


def _ranking(
    ids: tuple[int, ...], coef: Tensor, stderr: Tensor | None, agreement: tuple[tuple[float, float], ...]
) -> RankingRecord:
    return RankingRecord(
        ids, tuple(coef.double().tolist()), () if stderr is None else tuple(stderr.double().tolist()), agreement
    )


def _coefficients(importance: InMemory) -> tuple[Tensor, Tensor | None]:
    if isinstance(importance, PairImportance):
        return importance.linear, None
    return importance.coef, importance.stderr


def _fitted(tensors: Mapping[str, Tensor], recipe: Mapping[str, Any]) -> InMemory | None:
    """The model of the run, on its masks; None where they were not kept, or say nothing of their filters.

    An estimate from slopes has a mask for each example: how their losses differ is a matter of the examples.
    """
    if "masks" not in tensors or "losses" not in tensors or recipe.get("estimator", "losses") != "losses":
        return None
    ridge = float(recipe.get("ridge", 0.0))
    try:
        scored = scores(tensors["losses"], recipe.get("transform", "linear"))
        if recipe.get("model") == "pairs":
            return fit_pairs(tensors["masks"], scored, ridge=ridge or 1e-4)
        return fit_importance(tensors["masks"], scored, ridge=ridge)
    except SecateursError:  # too few masks, or no finite loss: nothing can be fitted
        return None


def _agreement(tensors: Mapping[str, Tensor], fitted: InMemory, recipe: Mapping[str, Any]) -> tuple[tuple[float, float], ...]:
    """Predicted and realised score of each mask, thinned out evenly where there are many."""
    masks, realised = tensors["masks"], scores(tensors["losses"], recipe.get("transform", "linear"))
    predicted = _predicted(fitted, masks)
    chosen = torch.linspace(0, len(masks) - 1, min(_SHOWN, len(masks))).round().long()
    return tuple(zip(predicted[chosen].tolist(), realised[chosen].tolist(), strict=True))


def _predicted(fitted: InMemory, masks: Tensor) -> Tensor:
    if isinstance(fitted, PairImportance):
        return fitted.predict(masks)
    return fitted.intercept + masks.double() @ fitted.coef
