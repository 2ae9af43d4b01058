"""What every method of a comparison gets and gives: the same network, data, goal and training for all of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict

from torch import Tensor

from secateurs._util.modules import Device
from secateurs._util.tensors import digest
from secateurs.compaction import replay
from secateurs.config import Recipe, Repair, Shortcut, TrainSettings
from secateurs.data.splits import Data
from secateurs.errors import InvalidInput, RunError
from secateurs.graph.cost import cost
from secateurs.graph.masking import copied
from secateurs.graph.plan import Plan
from secateurs.graph.sites import Site, find_sites
from secateurs.graph.trace import Graph
from secateurs.metrics import Measure, changed, correct, cross_entropy, display_name, fingerprints
from secateurs.pruning.context import PruningContext, Runtime
from secateurs.pruning.folder import Record, RunFolder, disk_errors
from secateurs.pruning.results import Progress
from secateurs.scoring.cache import MeasurementCache


@dataclass(frozen=True)
class Budget:
    """All the training that a method does, no more and no less.

    A method that cuts step by step divides the steps of `between` over its cuts, and does what is left of them after the last
    one; a method that cuts at once does them all straight after the cut. Then `after` follows for everybody.
    """

    name: str
    between: TrainSettings | None = None  # at a constant rate, so that its pieces add up to the whole
    after: TrainSettings | None = None

    def __post_init__(self) -> None:
        if self.between is not None and (self.between.schedule != "constant" or self.between.steps is None):
            raise InvalidInput(
                f"budget {self.name!r}: training between cuts has schedule = {self.between.schedule!r} and "
                f"steps = {self.between.steps}: wanted 'constant' and a number of steps, which the cuts can share"
            )


NO_TRAINING = Budget("none")


@dataclass(frozen=True, eq=False)
class Task:
    """One network to be made smaller. Methods never read the test set."""

    graph: Graph  # trained, and left as it is
    data: Data
    target_macs: float  # share of the MACs that has to go, counted on the compacted network
    budget: Budget = NO_TRAINING
    shortcut: Shortcut = "before"
    seed: int = 0
    loss_fn: Measure = cross_entropy
    metric: Measure = correct
    batch: int = 256  # examples at once outside training
    device: Device = None
    folder: Path | None = None  # where a killed method finds what it had done
    store: Path | None = None  # of measurements that several methods share


@dataclass(frozen=True)
class Trained:
    """What a stretch of training was: the settings in words are the budget's, these are the sums that must be equal."""

    images: int  # training examples seen, each as often as it was
    rate_sum: float  # learning rate times images, added up


@dataclass(frozen=True, eq=False)
class Pruned:
    """What a method gives."""

    graph: Graph  # compacted
    trained: Trained
    passes: int  # images brought through the network to decide what goes (search cost); training is not in it
    search_seconds: float
    training_seconds: float
    note: str = ""  # what the method says of its choice, such as thresholds


Watch = Callable[[Progress], None]

ENDINGS: Mapping[Repair, str] = {"none": "", "least-squares": "+repair", "every-layer": "+refit"}
"""What a method's name ends in, by the repair that it makes."""

_STANDING = "checkpoints/standing"
_MEASURED = "measured.sqlite"
_WEIGHTS, _MOMENTUM = "weights/", "momentum/"
_ROUNDING = 1e-12  # a share that is reached exactly must not be missed by the rounding of a division


@dataclass(frozen=True, eq=False)
class MethodState:
    """Where a method stands: the network as it is, and what it took to get there."""

    graph: Graph
    momentum: Mapping[str, Tensor] = field(default_factory=dict)  # of the optimiser, by parameter name
    trained: tuple[Trained, ...] = ()  # one for each stretch of the budget that is spent
    passes: int = 0
    search_seconds: float = 0.0
    training_seconds: float = 0.0
    note: str = ""
    state: Mapping[str, Any] = field(default_factory=dict)  # plain values that only the method itself understands


@dataclass(frozen=True, eq=False)
class MethodRun:
    """A task on the table of one method."""

    task: Task
    workshop: PruningContext
    record: Record
    watch: Watch | None
    asked: Mapping[str, Any]  # all that the outcome depends on, as JSON has it

    @cached_property
    def sites(self) -> tuple[Site, ...]:
        """The sites of the untouched network that have a filter to spare, in network order."""
        return tuple(site for site in find_sites(self.task.graph, self.task.shortcut) if site.channels > 1)

    @cached_property
    def macs(self) -> int:
        """Of the untouched network."""
        return cost(self.task.graph).macs

    def removed(self, graph: Graph) -> float:
        """The share of the MACs that is gone."""
        return 1 - cost(graph).macs / self.macs

    def reached(self, graph: Graph) -> bool:
        """Whether so much is gone as the task wants."""
        return self.removed(graph) >= self.task.target_macs - _ROUNDING

    def copied(self) -> Graph:
        """The untouched network, to be changed."""
        return copied(self.task.graph)

    def tell(self, phase: str, done: int, total: int, site: Site | None = None, number: int = 0) -> None:
        """Say where the method is: `done` of `total` units of the phase, at the site of that number (from 1)."""
        if self.watch is not None:
            self.watch(Progress(phase, done, total, "" if site is None else site.name, number, len(self.sites)))

    # ---- the folder --------------------------------------------------------------------------------------------------

    def keep(self, standing: MethodState) -> MethodState:
        """Write the standing down as a whole, and give it back."""
        tensors = {f"{_WEIGHTS}{name}": tensor for name, tensor in standing.graph.module.state_dict().items()}
        tensors |= {f"{_MOMENTUM}{name}": tensor for name, tensor in standing.momentum.items()}
        meta = {name: getattr(standing, name) for name in _FIGURES}
        trained = [asdict(stretch) for stretch in standing.trained]
        plan = standing.graph.plan.to_json()
        self.record.save_tensors(_STANDING, tensors, {**meta, "trained": trained, "plan": plan})
        return standing

    def standing(self) -> MethodState | None:
        """The standing that was written down last; None at the beginning."""
        found = self.record.load_tensors(_STANDING, _StandingMeta)
        if found is None:
            return None
        tensors, meta = found
        graph = replay(self.task.graph, Plan.from_json(meta["plan"], where=f"{self.record.path}"), verify=False)
        graph = self.copied() if graph is self.task.graph else graph
        graph.module.load_state_dict(_under(_WEIGHTS, tensors))
        trained = tuple(Trained(**stretch) for stretch in meta["trained"])
        return MethodState(graph, _under(_MOMENTUM, tensors), trained, **{name: meta[name] for name in _FIGURES})


class _StandingMeta(TypedDict):
    """The plain values of a standing."""

    passes: int
    search_seconds: float
    training_seconds: float
    note: str
    state: dict[str, Any]
    trained: list[Trained]
    plan: str


_FIGURES = ("passes", "search_seconds", "training_seconds", "note", "state")


@contextmanager
def opened(task: Task, name: str, recipe: Recipe, watch: Watch | None) -> Iterator[MethodRun]:
    """The work of the method called `name`, whose searching `recipe` describes; goes on with what the task's folder holds."""
    if not 0 < task.target_macs < 1:
        raise InvalidInput(f"target_macs = {task.target_macs:g}: wanted a share of the MACs between 0 and 1, such as 0.3")
    asked = _asked(task, name)
    record = Record() if task.folder is None else _folder(task.folder, task, asked)
    try:
        store = MeasurementCache(task.store or (None if record.path is None else record.path / _MEASURED))
        try:
            tools = Runtime(task.loss_fn, task.metric, task.device, store, cache_bytes=None)
            yield MethodRun(task, PruningContext(task.graph, task.data, recipe, tools), record, watch, asked)
        finally:
            store.close()
    finally:
        record.close()


def recipe_for(task: Task, criterion: str, *, repair: Repair = "none") -> Recipe:
    """How the filters of a task are ranked and measured; point estimates decide."""
    return Recipe(
        confidence=0.0,
        criterion=criterion,
        repair=repair,
        allocation="global" if repair == "every-layer" else "sequential",  # for what is solved when all cuts are made
        scoring_examples=_PAIRS_SEE if criterion == "pairs" else None,
        target_macs=task.target_macs,
        shortcut=task.shortcut,
        batch=task.batch,
        seed=task.seed,
    )


_PAIRS_SEE = 1024  # examples: pairwise terms are fitted to losses, which need a fixed number to be counted


def _folder(path: Path, task: Task, asked: Mapping[str, Any]) -> RunFolder:
    """The folder at `path`, new or of this very task and method."""
    with disk_errors(path):
        path.mkdir(parents=True, exist_ok=True)
    folder = RunFolder(path)
    try:
        measures = {"loss": task.loss_fn, "metric": task.metric}
        known = folder.units("task")
        if not known:
            folder.append("task", **asked, fingerprints=fingerprints(measures))
            return folder
        # what an older folder does not tell is taken to be the same
        others = [key for key in asked if key not in measures and known[0].get(key, asked[key]) != asked[key]]
        others += changed(measures, known[0], known[0].get("fingerprints", {}))
        if others:
            raise RunError(
                f"{path}: was started with another {' and '.join(others)}. Give what it was started with, or another folder."
            )
        return folder
    except BaseException:
        folder.close()
        raise


def _asked(task: Task, name: str) -> dict[str, Any]:
    """All that the outcome of a method depends on, as JSON gives it back; the test set is not looked at."""
    told = {
        "method": name,
        "weights": digest(dict(task.graph.module.state_dict())),
        "train": task.data.train.digest(),
        "search": task.data.search.digest(),
        "target_macs": task.target_macs,
        "budget": asdict(task.budget),
        "shortcut": task.shortcut,
        "seed": task.seed,
        "batch": task.batch,
        "loss": display_name(task.loss_fn),
        "metric": display_name(task.metric),
    }
    plain: dict[str, Any] = json.loads(json.dumps(told))
    return plain


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
