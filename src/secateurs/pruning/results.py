"""What a run records: one dataclass for each kind of line in its journal, read back as itself."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal

import msgspec
import torch
from torch import Tensor

from secateurs._util.journal import plain, record_from
from secateurs.config import Shortcut
from secateurs.config.declared import MOST_AT_ONCE
from secateurs.criteria.ranking import Ranking
from secateurs.graph.sites import Site
from secateurs.graph.structure import Node
from secateurs.scoring.ensemble import Ensemble
from secateurs.scoring.importance import Importance
from secateurs.selection.allocation import Curve
from secateurs.selection.search import Cut
from secateurs.speed.timing import SpeedUp

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
AtLeastOne = Annotated[int, msgspec.Meta(ge=1, le=MOST_AT_ONCE)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
Files = Mapping[str, str]
"""SHA-256 of the files of the run folder that a record relies on, by name."""


@dataclass(frozen=True)
class TriedNetwork:
    """A whole network that was tried while all cuts are weighed together: what it saves, and what was said of it."""

    saved: float  # share of the original's
    of: str  # time, MACs, parameters or activations
    accuracy: float | None  # of the metric, on the images that search; None: the images that certify were asked
    accepted: bool


@dataclass(frozen=True)
class Progress:
    """Where a run is, many times a step: `done` of `total` units of a phase, and the time that all of it still takes."""

    phase: str  # such as "times", "survey", "curve", "divide", "certify", "retrain", "measure"
    done: int
    total: int
    site: str = ""
    number: int = 0  # of the site in this round, from 1
    sites: int = 0
    round: int = 0
    left: Seconds | None = None  # to the end of the run, as far as is known
    tried: TriedNetwork | None = None  # the latest network that was tried


@dataclass(frozen=True)
class Structure:
    """The layers of the original network and how they are connected (see `graph.structure`)."""

    nodes: tuple[Node, ...]
    seconds: Seconds = 0.0  # to draw the data and to trace the network


@dataclass(frozen=True)
class Start:
    """Accuracy and loss of the original network on the validation set."""

    accuracy: float
    loss: float
    values: Count | None = None  # that the user's evaluate gives, one for each example; None: not its kind, or no evaluate
    seconds: Seconds = 0.0


@dataclass(frozen=True)
class SiteOrder:
    """The sites of a round, in the order in which they are visited."""

    round: Count
    sites: tuple[str, ...]
    shortcut: str = ""  # the position that they are of, if several are compared


@dataclass(frozen=True)
class SiteWidths:
    """The numbers of filters that run fast at a site, and the seconds measured for each."""

    site: str
    channels: Count
    widths: tuple[Count, ...]
    seconds: tuple[tuple[Count, float], ...]
    node: str = ""  # where the site lies, if several positions are compared


@dataclass(frozen=True)
class WidthMultiple:
    """What the number of kept filters is a multiple of, as measured (`round_to = "auto"`); fewer at narrow sites."""

    multiple: AtLeastOne
    engine: str


@dataclass(frozen=True)
class TimeTable:
    """Measured seconds of one kind of layer, or of the network with one site cut, by inputs, filters and groups."""

    of: str
    round: Count  # 0: the first of its kind; later ones add sizes
    seconds: tuple[tuple[tuple[Count, Count, Count], tuple[float, ...]], ...]


@dataclass(frozen=True)
class TimedBatches:
    """The batch sizes at which time counts, the one that is served first."""

    batches: Annotated[tuple[AtLeastOne, ...], msgspec.Meta(min_length=1)]


@dataclass(frozen=True)
class TimedAllocation:
    """An allocation whose compacted network was timed in the engine, in turns with the original one, to correct the tables."""

    round: Count  # 0: the original network alone
    removed: Mapping[str, Count]
    predicted: float  # seconds
    original: float  # seconds, measured
    seconds: float  # measured
    batch: Count
    shortcut: str = ""  # the position that it was measured for, if several are compared


@dataclass(frozen=True)
class SpeedTrial:
    """An allocation that may be lost as far as accuracy goes, timed in turns with the original network."""

    place: Count
    speeds: tuple[tuple[Count, SpeedUp], ...]  # by batch

    def summary(self) -> str:
        """The speeds in words."""
        return "; ".join(f"at batch {batch} {speed.summary()}" for batch, speed in self.speeds)


@dataclass(frozen=True)
class SiteCut:
    """The cut that was found at a site, journaled before it is made."""

    step: Count
    site: str
    cut: Cut
    answers: tuple[bool, ...]  # of the certification images, asked for this cut


@dataclass(frozen=True, eq=False)
class Step:
    """What happened at one site. Accuracies are on the validation set, fractions; shares are of the original network."""

    number: Count  # from 1
    round: Count
    site: str
    channels: Count  # filters before the cut
    removed: tuple[Count, ...]  # in original channel ids, least important first
    accuracy_before: float
    accuracy_cut: float  # right after the cut
    accuracy: float  # after fine-tuning
    loss: float
    parameters_removed: float
    macs_removed: float
    evaluated: tuple[tuple[Count, float], ...]  # (filters removed, accuracy on the images that search), in the order measured
    masks: Count
    r2_held_out: float
    split_half: float
    seconds: Seconds
    criterion: str
    note: str  # what the ranking says of itself, such as "stable after 212 of 640 masks"
    examples: Count  # that the ranking rests on
    compared: tuple[tuple[str, float], ...]  # by a portfolio: criterion and mean loss, best first
    bound: float | None  # upper bound on the drop right after the cut, at the recipe's confidence
    images: Count  # that the bound comes from
    by_estimate: Count | None  # largest number of filters tried whose drop, as seen on the images that search, is allowed
    refused: tuple[Count, ...]  # numbers of filters that the certification images refused
    answers: tuple[bool, ...]  # all that they answered in this step
    repaired: tuple[float, float] | None  # error of the consumers' outputs before and after repair, as a share
    loss_cut: float | None  # right after the cut, before any training; None: no cut
    baseline: float  # that `drop` counts from: as the allowed drop does; for a cut of an allocation the accuracy before it
    loss_before: float
    bound_trained: float | None = None  # the same after training; None: not trained, or the training was undone
    training_seconds: Seconds = 0.0  # of `seconds`
    noun: str = "filters"  # what one calls the channels of the site, such as heads
    files: Files = field(default_factory=dict)
    importance: Any = field(default=None, metadata={"journal": False})  # Importance, or None if read back

    @property
    def kept(self) -> int:
        """Filters after the cut."""
        return self.channels - len(self.removed)

    @property
    def drop(self) -> float:
        """What the cut cost, counted as the allowed drop is, before any training."""
        return self.baseline - self.accuracy_cut

    @property
    def decisive_drop(self) -> float:
        """What is compared with the allowed drop: its upper bound where one was certified, else the measured drop."""
        return self.drop if self.bound is None else self.bound


@dataclass(frozen=True)
class Retrained:
    """The end of retraining."""

    accuracy: float
    loss: float
    files: Files = field(default_factory=dict)
    seconds: Seconds = 0.0
    bound: float | None = None  # upper bound on the drop of the retrained network; None: not certified, or undone
    answers: tuple[bool, ...] = ()  # of the certification images


@dataclass(frozen=True)
class Trial:
    """One allocation that was tried, measured once: on the images that search, or on those that certify."""

    judge: Literal["steering", "trained", "certifying"]  # trained: on the images that search, after its training
    place: Count  # on the frontier
    accepted: bool  # by the search images: predicted to be certified
    accuracy: float | None = None  # on the search images
    by_estimate: bool | None = None  # the drop seen on the search images is within what is allowed
    upper: float | None = None  # bound on the drop, by the certification images
    seconds: Seconds = 0.0
    files: Files = field(default_factory=dict)  # of the weights that were judged; nothing where it was not trained
    note: str = ""  # why the weights before its training were judged; empty: those after it were

    def __post_init__(self) -> None:
        if self.judge != "certifying" and self.accuracy is None:
            raise ValueError("Object missing required field `accuracy`")


@dataclass(frozen=True)
class ChosenAllocation:
    """The allocation of cuts over all sites that was chosen, and what led to it. Savings are shares of the original."""

    removed: Mapping[str, Count]  # filters by site
    saved: float
    loss: float  # predicted rise
    tried: tuple[tuple[float, float, bool], ...]  # saved, accuracy on the search images, predicted to be certified
    answers: tuple[bool, ...]  # of the certification images
    bound: float | None  # upper bound on the drop of all cuts together; None: not certified
    images: Count  # that certify
    by_estimate: float  # largest saving tried whose drop, as seen on the search images alone, is allowed
    frontier: tuple[tuple[float, float], ...]  # saved, predicted rise of the loss
    place: Count = 0  # of what was chosen, on the frontier
    shortcut: Shortcut = "before"  # where its masks lie
    seconds: Seconds = 0.0  # besides those of the trials
    note: str = ""  # why nothing is removed, where nothing that is within the allowed drop is faster


@dataclass(frozen=True)
class FrontierTrial:
    """A network of one frontier, made and measured: by how much what the frontier predicts is wrong."""

    shortcut: Shortcut
    weighed: str  # what cuts were weighed by
    saved: float  # predicted share
    predicted: float  # rise of the loss
    rise: float  # measured on the held-out examples


@dataclass(frozen=True)
class ComparedFrontiers:
    """Frontiers of several shortcut positions and several weighings, each by one of its networks.

    Each is measured with all its cuts in place: what makes up for one folded branch cannot make up for its neighbours too.
    """

    tried: tuple[FrontierTrial, ...]

    def summary(self, taken: str) -> str:
        """One sentence; `taken` is the position of the network that was chosen."""
        best: dict[str, FrontierTrial] = {}
        for one in sorted(self.tried, key=lambda one: (one.rise, -one.saved)):
            best.setdefault(one.shortcut, one)
        each = ", ".join(f"{name} {one.rise:.3g} ({one.saved:.0%} saved)" for name, one in best.items())
        return (
            f"filters are masked at the position {taken!r}: networks of each were measured, with a rise of the loss of {each}"
        )


@dataclass(frozen=True, eq=False)
class SiteCurve:
    """A site's ranking, and what cuts along it cost and save at this site alone. Ids are positions in the original site."""

    ranking: Ranking
    original: tuple[Count, ...]  # the site's original channel ids, by position
    curve: Curve
    seconds: Seconds = 0.0  # for the ranking and the curve
    node: str = ""  # where the site lies, if several positions are compared

    def __post_init__(self) -> None:
        if sorted(self.ranking.order.tolist()) != list(range(len(self.original))):
            raise ValueError(f"the curve of site {self.site!r} does not rank each of its {len(self.original)} filters once")

    @property
    def site(self) -> str:
        """The site's name."""
        return self.curve.site

    def keep(self, m: int, site: Site) -> Tensor:
        """The mask (C,) without the first m filters, for the site as it is now; filters removed before stay removed."""
        dropped = {self.original[i] for i in self.ranking.order[:m].tolist()}
        return torch.tensor([channel not in dropped for channel in site.original])

    def cut(self, m: int, site: Site, before: float) -> Cut:
        """The cut of the first m filters, for the site as it is now; it was chosen by the allocation, not by a search."""
        positions = {channel: place for place, channel in enumerate(site.original)}
        ids = [self.original[i] for i in self.ranking.order[:m].tolist()]
        return Cut(site.channels, tuple(positions[i] for i in ids if i in positions), before, before, 0.0, ())


def curve_tensors(found: SiteCurve) -> list[Tensor]:
    """A curve as tensors, with the evidence of its ranking, as one worker sends it to the others."""
    ranking = found.ranking
    evidence, ensemble = ranking.importance, ranking.ensemble
    bare = plain(replace(found, ranking=replace(ranking, importance=None, ensemble=None)))
    text = torch.frombuffer(bytearray(json.dumps(bare).encode()), dtype=torch.uint8)
    tensors = [torch.tensor([evidence is not None, ensemble is not None]), text]
    tensors += [] if evidence is None else [getattr(evidence, each.name) for each in fields(evidence)]
    return tensors + ([] if ensemble is None else [ensemble.masks, ensemble.losses])


def curve_from(tensors: Sequence[Tensor]) -> SiteCurve:
    """The curve that `curve_tensors` was given."""
    (fitted, drawn), text, *rest = tensors
    found: SiteCurve = record_from(json.loads(text.numpy().tobytes()), SiteCurve)
    ensemble = Ensemble(found.site, *rest[-2:]) if drawn else None
    evidence = Importance(*rest[: len(rest) - 2 * int(drawn)]) if fitted else None
    return replace(found, ranking=replace(found.ranking, importance=evidence, ensemble=ensemble))


_ENGINES = {"torch": "eager mode", "onnxruntime-int8": "ONNX Runtime, both networks in int8"}
"""Engines in words, where their names say too little."""


@dataclass(frozen=True)
class MeasuredSpeed:
    """How many times faster the smaller network was measured to be, with its 95 % interval."""

    speedup: float
    low: float
    high: float
    batch: Count  # examples at once
    aligning: float  # share of the smaller network's time that goes into aligning channels
    engine: str = "torch"
    original: float | None = None  # seconds
    pruned: float | None = None
    predicted: float | None = None  # seconds of the smaller network; None: cuts were not weighed by time
    busy: str = ""  # what else the machine did meanwhile, if that was much

    @property
    def ratio(self) -> SpeedUp:
        """What was measured, as a comparison."""
        return SpeedUp(self.speedup, self.low, self.high, self.busy)

    def summary(self) -> str:
        """One phrase, such as "1.93x faster (1.85 to 2.01)"."""
        return self.ratio.summary()

    def headline(self) -> str:
        """The speed and the times, as the first words of a result; a network that is not measurably faster says so."""
        if not self.ratio.known:
            said = self.summary()
            return f"{said[0].upper()}{said[1:]} as fast at batch {self.batch} in {self.where}"
        if self.low > 1:
            return f"{self.summary().capitalize()}: {self.times()}"
        verdict = self.summary() if self.high < 1 else f"not measurably faster ({self.low:.2f} to {self.high:.2f})"
        return f"{verdict.capitalize()} than the original network: {self.times()}"

    def times(self) -> str:
        """The times in words, such as "3.1 → 1.4 ms at batch 1 in onnxruntime"; a prediction that is over 5 % off is named."""
        where = f"at batch {self.batch} in {self.where}"
        if self.original is None or self.pruned is None:
            return where
        found = f"{1e3 * self.original:.3g} → {1e3 * self.pruned:.3g} ms {where}"
        if self.predicted is None or abs(self.predicted / self.pruned - 1) <= 0.05:
            return found
        return f"{found}; the prediction, {1e3 * self.predicted:.3g} ms, missed by {abs(self.predicted / self.pruned - 1):.0%}"

    @property
    def where(self) -> str:
        """The engine, in words."""
        return _ENGINES.get(self.engine, self.engine)

    @property
    def alignment_outweighs(self) -> bool:
        """Whether aligning channels takes longer than all that pruning saves."""
        return self.aligning > max(self.speedup - 1, 0.0)  # in units of the pruned network's time it saves speedup - 1


@dataclass(frozen=True)
class LayerTime:
    """Seconds of a layer in the original network and in the smaller one; without a name: of all that is no such layer."""

    name: str
    before: float
    after: float
