"""The folder of a run, finished or not, as one record: what is missing or damaged is left out and named in its notes."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar

import torch
from torch import Tensor

from secateurs._util.decode import Malformed, brief
from secateurs._util.files import is_held
from secateurs._util.format import MetricName, folder_name, plural, removed
from secateurs._util.journal import TRAINING, changed_files, read_lines, read_tensors, records_of
from secateurs._util.tensors import Damaged, read_header
from secateurs.config import Recipe, read_recipe
from secateurs.errors import RecipeError, RunError
from secateurs.export.deliver import ExportFigures
from secateurs.graph.structure import Node
from secateurs.pruning.figures import KINDS, Change, ResultFigures, promised_bound
from secateurs.pruning.folder import RECIPE, parse_provenance
from secateurs.pruning.results import (
    ChosenAllocation,
    ComparedFrontiers,
    MeasuredSpeed,
    Retrained,
    SiteCurve,
    SiteCut,
    SiteOrder,
    SiteWidths,
    Start,
    Step,
    Structure,
    Trial,
)
from secateurs.report.exports import read_exports
from secateurs.scoring.importance import Importance, scores
from secateurs.selection.allocation import Curve
from secateurs.training import EpochRecord, KeptWeights, RateTrials

R = TypeVar("R")
State = Literal["finished", "running", "stopped"]
_SHOWN = 120  # masks in the chart of predicted against measured scores

# ---- records ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SiteImportances:
    """The importances of a site's C filters, in the site's order."""

    ids: tuple[int, ...]  # original channel ids
    coef: tuple[float, ...]
    stderr: tuple[float, ...]  # empty where none is known; inf where the masks do not determine it
    agreement: tuple[tuple[float, float], ...] = ()  # (predicted, measured) score of a mask; a sample where there are many
    of_loss: bool = False  # coefficients are losses, and their sums mean something

    def predicted_rise(self, removed: Collection[int]) -> float | None:
        """The rise of the loss that the linear model predicts for the removal of these filters; None where it cannot."""
        if not self.of_loss or not removed:
            return None
        return sum(c for i, c in zip(self.ids, self.coef, strict=True) if i in removed)


@dataclass(frozen=True)
class Measured:
    """A network of the run, measured on the validation set."""

    macs_removed: float  # share of the original network's
    accuracy: float
    label: str
    what: Literal["start", "cut", "epoch", "step", "end"] = "step"
    step: int = 0


@dataclass(frozen=True)
class LayerChange:
    """Filters and weights of a layer before and after."""

    name: str
    filters: int
    left: int
    weights: int
    weights_left: int
    macs: int  # for one example, before

    @property
    def weights_removed(self) -> float:
        """Share of its weights, and so of its MACs: every weight of a layer is used equally often."""
        return removed(self.weights, self.weights_left)

    @property
    def macs_left(self) -> float:
        """For one example."""
        return self.macs * (1 - self.weights_removed)


@dataclass(frozen=True)
class RunReport:
    """All that a report shows of one run: the run's own records, and what its files say besides."""

    folder: Path | None
    state: State
    at: str  # what an unfinished run is, or was, working on
    recipe: Recipe | None  # None: missing or damaged
    provenance: Mapping[str, Any]
    start: Start | None
    steps: tuple[Step, ...]
    allocation: ChosenAllocation | None  # None: sites were cut one after the other
    end: ResultFigures | None
    promised: float | None  # bound on the drop of the network as it is now from the original one
    curves: Mapping[str, Curve]  # by site, where cuts were allocated
    events: tuple[Measured, ...]  # every measurement, in order
    networks: tuple[Measured, ...]  # the start, after every step that cut something (of an allocation the last), the final one
    importances: Mapping[int, SiteImportances]  # by the number of the step
    kept: tuple[KeptWeights, ...] = ()  # what trainings left, in order
    nodes: tuple[Node, ...] = ()
    layers: tuple[LayerChange, ...] = ()
    exports: tuple[ExportFigures, ...] = ()
    notes: tuple[str, ...] = ()  # what is missing or damaged
    left_alone: tuple[str, ...] = ()  # sites at which no number of filters measurably saves time
    frontiers: ComparedFrontiers | None = None  # where positions of masks were compared

    @property
    def speeds(self) -> tuple[MeasuredSpeed, ...]:
        """All speeds that were measured at the end, the recipe's batch first."""
        return () if self.end is None or self.end.latency is None else (self.end.latency, *self.end.speeds)

    @property
    def name(self) -> str:
        """The last part of the folder's path."""
        return folder_name(self.folder)

    @property
    def model(self) -> str:
        """The network as its user calls it: the built-in or own name, or the class."""
        kind = str(self.provenance.get("model", {}).get("class", "")).rpartition(".")[2]
        return str(self.provenance.get("origin", {}).get("model") or kind or "a network")

    @property
    def data(self) -> str:
        """The data's name."""
        return str(self.provenance.get("data", {}).get("name", "data"))

    @property
    def metric(self) -> MetricName:
        """The metric under the user's name for it."""
        return MetricName.called(self.provenance.get("measures", {}).get("metric", "accuracy"))

    @property
    def max_drop(self) -> float | None:
        """The accuracy that may be lost; None where the recipe is missing."""
        return None if self.recipe is None else self.recipe.max_drop

    @property
    def saving(self) -> str:
        """What an allocation saves."""
        recipe, speed = self.recipe, None if self.end is None else self.end.latency
        if (recipe is not None and recipe.weighs_time) or (speed is not None and speed.predicted is not None):
            return "time"
        parameters = recipe is not None and recipe.target_macs is None and recipe.target_parameters is not None
        return "parameters" if parameters else "MACs"

    @property
    def saving_scale(self) -> float:
        """What turns savings of allocations, summed over sites, into shares of the network: right for the one that was made."""
        if self.end is None or self.allocation is None or not self.allocation.saved or self.saving == "time":
            return 1.0
        made = self.end.parameters if self.saving == "parameters" else self.end.macs
        return made.removed / self.allocation.saved

    @property
    def outcome(self) -> Change | None:
        """The metric before and after, on the test set if one was given, else on the validation set; None before the end."""
        return None if self.end is None else self.end.test if self.end.test.count else self.end.search

    @property
    def seconds(self) -> float:
        """Of all steps."""
        return sum(step.seconds for step in self.steps)

    def loss_rise(self, step: Step) -> tuple[float | None, float | None]:
        """What the cut of a step adds to the loss, as the linear model predicts and as measured; None where not known."""
        found = self.importances.get(step.number)
        predicted = None if found is None else found.predicted_rise(step.removed)
        return predicted, None if step.loss_cut is None else step.loss_cut - step.loss_before


# ---- reading ------------------------------------------------------------------------------------------------------------


def read_run(folder: str | Path) -> RunReport:
    """Read the folder of a run, finished or not; `RunError` if it is none."""
    path = Path(folder)
    if (path / TRAINING).exists():
        raise RunError(f"{path}: the folder of a training, not of a pruning run. Show it with: secateurs show {path}")
    lines = read_lines(path, KINDS)
    notes = [f"{note} What follows it is not shown." if "damaged" in note else note for note in lines.notes]
    for end in lines.of(ResultFigures)[-1:]:
        notes += [f"{name}: {what}." for name, what in changed_files(path, end)]
    if not lines.records:
        notes.append("The journal is empty: nothing has been measured yet.")
    provenance, recipe, importances = {}, None, {}
    try:
        provenance = parse_provenance(path)
    except (OSError, Malformed) as error:
        what = f"cannot be read ({error.strerror})" if isinstance(error, OSError) else f"damaged ({error})"
        notes.append(f"provenance.json: {what}: model, data and versions are not known.")
    try:
        recipe = read_recipe(path / RECIPE)
    except RecipeError as error:
        notes.append(f"{error} What was asked of the run is not known.")
    for step in lines.of(Step):
        name = f"ensembles/{step.number:04d}"
        try:
            tensors, meta = read_tensors(path / f"{name}.safetensors", name, lines.digests, _RankingMeta)
            if "coef" in tensors:  # obs and others rank without importances
                importances[step.number] = _importances(tensors, meta, recipe)
        except (Malformed, ValueError, RuntimeError, IndexError) as error:
            what = str(error) if isinstance(error, Malformed) else f"damaged ({brief(error)})"
            notes.append(f"{name}.safetensors: {what}: the importances of step {step.number} are not shown.")
    return _report(lines.records, path, recipe, provenance, importances, notes)


def run_in_memory(records: Sequence[Any], recipe: Recipe | None = None) -> RunReport:
    """The report of a run without a folder, from the records of its journal. Filters are numbered as the site had them."""
    importances = {}
    for step in records_of(records, Step):
        found, ids = step.importance, tuple(range(step.channels))
        if isinstance(found, Importance):
            importances[step.number] = SiteImportances(ids, tuple(found.coef.tolist()), tuple(found.stderr.tolist()))
    return _report(records, None, recipe, {}, importances, [])


def _only(records: Sequence[Any], kind: type[R]) -> R | None:
    """The record of a kind that a journal holds once."""
    return next(iter(records_of(records, kind)), None)


def _report(
    records: Sequence[Any],
    folder: Path | None,
    recipe: Recipe | None,
    provenance: Mapping[str, Any],
    importances: Mapping[int, SiteImportances],
    notes: list[str],
) -> RunReport:
    steps = tuple(records_of(records, Step))
    start, end, chosen = _only(records, Start), _only(records, ResultFigures), _only(records, ChosenAllocation)
    networks = [] if start is None else [Measured(0.0, start.accuracy, "start")]
    networks += [
        Measured(s.macs_removed, s.accuracy, f"step {s.number}, {s.site}: {s.channels} → {s.kept}")
        for s in steps
        if s.removed and (chosen is None or s is steps[-1])  # the networks between the cuts of an allocation are no results
    ]
    if end is not None and len(networks) > 1:
        networks.append(Measured(end.macs.removed, end.search.after, "the end"))
    nodes = tuple(node for structure in records_of(records, Structure) for node in structure.nodes)
    return RunReport(
        folder=folder,
        state=state_of(folder, finished=end is not None),
        at=where_it_stands(records),
        recipe=recipe,
        provenance=provenance,
        start=start,
        steps=steps,
        allocation=chosen,
        promised=None if recipe is None else promised_bound(recipe.budget, records),
        end=end,
        curves={found.site: found.curve for found in records_of(records, SiteCurve)},
        events=_events(records),
        networks=tuple(networks),
        importances=importances,
        kept=tuple(records_of(records, KeptWeights)),
        nodes=nodes,
        layers=() if folder is None else _layers(folder, nodes, steps, notes),
        exports=() if folder is None else read_exports(folder, notes),
        notes=tuple(notes),
        left_alone=tuple(dict.fromkeys(found.site for found in records_of(records, SiteWidths) if not found.widths)),
        frontiers=_only(records, ComparedFrontiers),
    )


class _RankingMeta(TypedDict):
    """Plain values beside the tensors of a ranking."""

    site: str
    original: list[int]  # the site's original channel ids
    criterion: str
    note: str


def _importances(tensors: Mapping[str, Tensor], meta: Mapping[str, Any], recipe: Recipe | None) -> SiteImportances:
    """The importances that a run kept of a ranking; ValueError if tensors and channel ids do not fit."""
    coef, stderr = (tuple(tensors[name].double().tolist()) if name in tensors else () for name in ("coef", "stderr"))
    if len(meta["original"]) != len(coef):
        raise ValueError(f"{len(coef)} importances for {len(meta['original'])} filters")
    agreement = _agreement(tensors, recipe) if recipe is not None and recipe.estimator == "losses" else ()
    # masks that all keep the same number of filters show which filters cost less, not what a number of them costs
    of_loss = recipe is not None and recipe.estimator == "gradient" and meta["criterion"] == "ensemble"
    return SiteImportances(tuple(meta["original"]), coef, stderr, agreement, of_loss)


def _agreement(tensors: Mapping[str, Tensor], recipe: Recipe) -> tuple[tuple[float, float], ...]:
    """Predicted and measured score of at most `_SHOWN` masks, evenly chosen; none where no finite loss was kept."""
    if not {"masks", "losses"} <= tensors.keys() or not tensors["losses"].isfinite().any():
        return ()
    masks, measured = tensors["masks"].double(), scores(tensors["losses"], recipe.transform)
    predicted = masks @ tensors["coef"].double()
    predicted += (measured - predicted).mean()  # the intercept of least squares makes the mean of the residuals zero
    chosen = torch.linspace(0, len(masks) - 1, min(_SHOWN, len(masks))).round().long()
    return tuple(zip(predicted[chosen].tolist(), measured[chosen].tolist(), strict=True))


def _events(records: Sequence[Any]) -> tuple[Measured, ...]:
    """Every measurement of the accuracy on the validation set, in order, with the MACs removed by then.

    A step's own record comes after its cut and epochs, but its MACs hold from the cut on.
    """
    after = {step.number: step.macs_removed for step in records_of(records, Step)}
    found, macs = [], 0.0
    for record in records:
        match record:
            case Start():
                found.append(Measured(macs, record.accuracy, "at the start", "start"))
            case SiteCut():
                macs = after.get(record.step, macs)
                label = f"step {record.step}, {record.site}: {plural(record.cut.m, 'filter')} cut"
                found.append(Measured(macs, record.cut.accuracy, label, "cut", record.step))
            case EpochRecord(search_accuracy=float(accuracy)):
                if record.phase == "trial":  # of a network that need not have been chosen
                    continue
                when = "retraining" if record.phase == "retrain" else f"step {record.step}, fine-tuning"
                found.append(Measured(macs, accuracy, f"{when}, epoch {record.epoch + 1}", "epoch", record.step))
    return tuple(found)


def _layers(folder: Path, nodes: Sequence[Node], steps: Sequence[Step], notes: list[str]) -> tuple[LayerChange, ...]:
    """Every layer of the network, by the shapes of its weight at the start and in the latest network.

    A layer that the latest network no longer has was folded away: nothing is left of it.
    """
    cuts = [step.number for step in reversed(steps) if step.removed]
    start = "checkpoints/start.safetensors"
    saved = ["pruned.safetensors", *(f"checkpoints/{number:04d}.safetensors" for number in cuts)]
    latest = next((name for name in saved if (folder / name).exists()), None if cuts else start)
    if not nodes:
        return ()
    if latest is None:
        notes.append("checkpoints/: the network after the latest cut is missing: the widths of the layers are not shown.")
        return ()
    shapes: list[Mapping[str, tuple[int, ...]]] = []
    for name in (start, latest):
        try:
            shapes.append(read_header(folder / name)[1])
        except (OSError, Damaged) as error:
            what = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error})"
            notes.append(f"{name}: {what}: the widths of the layers are not shown.")
            return ()
    before, after = shapes
    found = []
    for node in nodes:
        had = before.get(f"{node.name}.weight", ())
        if node.is_layer and len(had) > node.axis:
            has = after.get(f"{node.name}.weight", ())
            left = round(node.filters * has[node.axis] / had[node.axis]) if len(has) == len(had) and had[node.axis] else 0
            weights_left = math.prod(has) if has else 0
            found.append(LayerChange(node.name, node.filters, left, math.prod(had), weights_left, node.macs))
    if not found:
        notes.append(f"{start}: not the network of this run: the widths of the layers are not shown.")
    return tuple(found)


# ---- progress -----------------------------------------------------------------------------------------------------------


def state_of(folder: Path | None, *, finished: bool) -> State:
    """Whether a run, or a training, is finished, running, or was stopped; one without a folder runs in this process."""
    if finished:
        return "finished"
    return "running" if folder is None or is_held(folder) else "stopped"


def where_it_stands(records: Sequence[Any]) -> str:
    """What a run is, or was, working on, from the records of its journal."""
    number = len(records_of(records, Step)) + 1
    match records[-1] if records else None:
        case ResultFigures():
            return "finished"
        case Retrained():
            return "retrained"
        case RateTrials(phase=phase) | EpochRecord(phase=phase) | KeptWeights(phase=phase):
            last = max((place for place, record in enumerate(records) if isinstance(record, Step)), default=-1)
            if phase == "trial":
                return f"{plural(len(records_of(records, Trial, judge='trained')), 'allocation')} tried and trained"
            what = "retraining" if phase == "retrain" else f"fine-tuning after the cut of step {number}"
            return f"{what}, {plural(len(records_of(records[last + 1 :], EpochRecord)), 'epoch')} done"
        case SiteCut():
            return f"step {number}, the cut is found"
        case ChosenAllocation():
            return "the cuts are allocated, none is made yet"
        case SiteCurve() | Trial():
            return f"allocating the cuts, {plural(len(records_of(records, SiteCurve)), 'site')} measured"
        case SiteOrder() | SiteWidths() | Step():
            return f"step {number}, ranking filters"
    return "before its first step"
