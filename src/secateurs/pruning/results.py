"""What a run says of itself: where it stands, what happened at a site, and how it ended; and each as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from secateurs.criteria.ranking import Ranking
from secateurs.graph.cost import Cost
from secateurs.graph.latency import SpeedUp
from secateurs.graph.sites import Site
from secateurs.graph.trace import Graph
from secateurs.metrics import Evaluation
from secateurs.scoring.importance import Importance, PairImportance

_KEPT_MASKS = 20_000  # a larger ensemble, as slopes have, is not worth its place in the folder


@dataclass(frozen=True)
class Progress:
    """Where a run stands, many times a step: `done` of `total` units of the phase at hand."""

    phase: str  # "score", "search", "divide", "finetune", "retrain"
    done: int
    total: int
    site: str = ""
    number: int = 0  # of the site in this round, from 1
    sites: int = 0
    round: int = 0


@dataclass(frozen=True, eq=False)
class Step:
    """What happened at one site. Accuracies are on the search set, fractions; shares are removed since the start of the run."""

    number: int  # from 1
    round: int
    site: str
    channels: int  # filters before the cut
    removed: tuple[int, ...]  # in original channel ids, least important first
    accuracy_before: float
    accuracy_cut: float  # right after the cut
    accuracy: float  # after fine-tuning
    loss: float
    parameters_removed: float
    macs_removed: float
    evaluated: tuple[tuple[int, float], ...]  # (filters removed, accuracy on the images that steer), in the order measured
    masks: int
    r2_held_out: float
    split_half: float
    seconds: float
    criterion: str = "ensemble"  # who ranked the filters
    note: str = ""  # what the ranking says of itself, such as "stable after 212 of 640 masks"
    examples: int = 0  # that the ranking rests on
    compared: tuple[tuple[str, float], ...] = ()  # by a portfolio: criterion and mean loss, best first
    bound: float | None = None  # upper bound on the drop right after the cut, at the recipe's confidence
    images: int = 0  # that the bound comes from
    by_estimate: int | None = None  # largest number of filters tried whose drop, as seen on the search images, is allowed
    refused: tuple[int, ...] = ()  # numbers of filters that certifying images refused
    answers: tuple[bool, ...] = ()  # all that they were asked in this step
    loss_cut: float | None = None  # on the search set right after the cut, before any training; None: no cut
    repaired: tuple[float, float] | None = None  # error of the readers' outputs before and after repair, as a share
    importance: Importance | PairImportance | None = None  # None for a step read back from the journal

    @property
    def kept(self) -> int:
        """Filters after the cut."""
        return self.channels - len(self.removed)


@dataclass(frozen=True, eq=False)
class Result:
    """What a finished run gives: the smaller network, and what it costs and can do beside the original."""

    graph: Graph
    steps: tuple[Step, ...]
    stopped: str  # why no further site was cut
    search_before: Evaluation
    search_after: Evaluation
    test_before: Evaluation
    test_after: Evaluation
    cost_before: Cost
    cost_after: Cost
    seconds: float
    metric: str = "accuracy"  # what the user calls the metric
    classes: tuple[tuple[str, float, float], ...] = ()  # name, test accuracy before and after; empty: no classes
    speed: SpeedUp | None = None  # of the smaller network; None: not measured
    batch: int = 0  # examples at once when the speed was measured
    aligning: float = 0.0  # share of the smaller network's time that goes into aligning channels

    def summary(self) -> str:
        """One sentence with the figures that matter."""
        return summary_of(outcome_fields(self))


STEP_FIELDS = (
    *("number", "round", "site", "channels", "removed", "accuracy_before", "accuracy_cut", "accuracy", "loss"),
    *("parameters_removed", "macs_removed", "evaluated", "masks", "r2_held_out", "split_half", "seconds", "criterion"),
    *("note", "examples", "compared", "bound", "images", "by_estimate", "refused", "answers", "repaired", "loss_cut"),
)


def step_fields(step: Step) -> dict[str, Any]:
    """The figures of a step as plain values."""
    return {name: getattr(step, name) for name in STEP_FIELDS}


def step_from(entry: Mapping[str, Any]) -> Step:
    """The step that was written down as plain values."""
    fields = {name: entry[name] for name in STEP_FIELDS if name in entry}
    for name in ("removed", "refused", "answers"):
        fields[name] = tuple(fields.get(name, ()))
    fields["compared"] = tuple((str(name), float(loss)) for name, loss in fields.get("compared", ()))
    if fields.get("repaired") is not None:
        before, after = fields["repaired"]
        fields["repaired"] = (float(before), float(after))
    fields["evaluated"] = tuple((int(m), float(a)) for m, a in fields["evaluated"])
    return Step(**fields)


def kept_of_ranking(site: Site, ranking: Ranking) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and plain values that a run folder keeps of a ranking."""
    tensors = {"order": ranking.order}
    ensemble, importance = ranking.ensemble, ranking.importance
    if ensemble is not None and len(ensemble.masks) <= _KEPT_MASKS:
        tensors |= {"masks": ensemble.masks, "losses": ensemble.losses}
    if isinstance(importance, Importance):
        tensors |= {"coef": importance.coef, "stderr": importance.stderr}
    elif importance is not None:
        tensors |= {"coef": importance.linear, "pairs": importance.pairs}
    names = ("criterion", "note")
    return tensors, {"site": site.name, "original": list(site.original), **{name: getattr(ranking, name) for name in names}}


def outcome_fields(outcome: Result) -> dict[str, Any]:
    """The figures of an outcome as plain values."""
    speed = outcome.speed
    return {
        "stopped": outcome.stopped,
        "metric": outcome.metric,
        "search": {"before": outcome.search_before.accuracy, "after": outcome.search_after.accuracy},
        "test": {
            "before": outcome.test_before.accuracy,
            "after": outcome.test_after.accuracy,
            "count": outcome.test_after.count,
        },
        "parameters": {"before": outcome.cost_before.parameters, "after": outcome.cost_after.parameters},
        "macs": {"before": outcome.cost_before.macs, "after": outcome.cost_after.macs},
        "bytes": {"before": outcome.cost_before.bytes, "after": outcome.cost_after.bytes},
        "classes": {
            "names": [name for name, _, _ in outcome.classes],
            "before": [before for _, before, _ in outcome.classes],
            "after": [after for _, _, after in outcome.classes],
        },
        "latency": None
        if speed is None
        else {
            "speedup": speed.ratio,
            "low": speed.low,
            "high": speed.high,
            "batch": outcome.batch,
            "aligning": outcome.aligning,
        },
        "seconds": outcome.seconds,
    }


def summary_of(fields: Mapping[str, Any]) -> str:
    """One sentence from the fields of an outcome; a metric of the user's own is no percentage."""
    parameters, macs = (100 * _removed(fields[name]) for name in ("parameters", "macs"))
    test, metric = fields["test"], fields.get("metric", "accuracy")
    before, after = test["before"], test["after"]
    values = f"{100 * before:.2f} → {100 * after:.2f} %" if metric == "accuracy" else f"{before:.4g} → {after:.4g}"
    return (
        f"{parameters:.1f} % of the parameters and {macs:.1f} % of the MACs removed, {metric} {values} "
        f"on {test['count']:,} test examples that chose nothing"
    )


def _removed(counts: Mapping[str, int]) -> float:
    return 1 - counts["after"] / counts["before"] if counts["before"] else 0.0
