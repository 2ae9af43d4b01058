"""What every method of a comparison gets and gives: the same network, data, target and training budget for all of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypedDict

from torch import Tensor

from secateurs._util.folders import disk_errors
from secateurs._util.journal import Journal, plain, record_from
from secateurs._util.modules import Device, network_digest
from secateurs._util.tensors import digest
from secateurs.compaction import replay
from secateurs.config import REFITTED, Recipe, Repair, Shortcut, TrainSettings
from secateurs.criteria import user_function
from secateurs.data.splits import Data
from secateurs.errors import InvalidInput, RunError
from secateurs.graph.masking import copied
from secateurs.graph.plan import Plan
from secateurs.graph.sites import Site, find_sites
from secateurs.graph.trace import Graph
from secateurs.metrics import (
    Measure,
    changed,
    correct,
    cross_entropy,
    display_name,
    fingerprint,
    fingerprints,
    follows_helpers,
)
from secateurs.pruning.context import ProgressReporter, PruningContext, Runtime
from secateurs.pruning.figures import KINDS
from secateurs.pruning.folder import open_cache
from secateurs.pruning.results import Progress, SiteCurve
from secateurs.scoring.cache import MeasurementCache
from secateurs.training.state import TrainState, packed, restore_
from secateurs_lab.methods.teacher import RecallingTeacher


@dataclass(frozen=True)
class Budget:
    """All the training that a method does, no more and no less.

    A method that cuts step by step divides the steps of `between` over its cuts, and does the rest of them after the last
    one; a method that cuts at once does them all after the cut. Then `after` follows for every method.
    """

    name: str
    between: TrainSettings | None = None  # at a constant rate, so that its stages add up to the whole
    after: TrainSettings | None = None
    keep_best: bool = False  # of the weights before, after and along `after`, by held-out examples; not where the cut follows

    def __post_init__(self) -> None:
        if self.between is not None and (self.between.schedule != "constant" or self.between.steps is None):
            raise InvalidInput(
                f"budget {self.name!r}: training between cuts has schedule = {self.between.schedule!r} and "
                f"steps = {self.between.steps}: wanted 'constant' and a number of steps, which the cuts can share"
            )
        if any(part is not None and part.lr == "auto" for part in (self.between, self.after)):
            raise InvalidInput(f"budget {self.name!r}: lr = 'auto' trains every method at another rate: wanted a number")


@dataclass(frozen=True, eq=False)
class OwnMethod:
    """A method of the user's: code that may do anything, so that network and data are compared with what it was given."""

    name: str  # in full, with its settings
    function: Callable[..., Any] | None = None  # a whole procedure; None: a criterion


NO_TRAINING = Budget("none")
UNTOUCHED = "untouched"  # the method that removes nothing: what the training alone does


@dataclass(frozen=True, eq=False)
class Task:
    """One network to be made smaller. Methods never read the test set."""

    graph: Graph  # trained; methods work on copies
    data: Data
    target_macs: float  # share of the MACs to remove, counted on the compacted network
    budget: Budget = NO_TRAINING
    shortcut: Shortcut = "before"
    seed: int = 0
    loss_fn: Measure = cross_entropy
    metric: Measure = correct
    batch: int = 256  # examples at once outside training
    device: Device = None
    folder: Path | None = None  # where a killed method is resumed from
    store: Path | None = None  # of measurements that several methods share
    answers: Path | None = None  # of the teacher to batches: under one budget and seed all methods train on the same ones
    own: OwnMethod | None = None  # whose task it is; None: a method of ours

    def contents(self) -> dict[str, str]:
        """Digests of what no method may change: network and data."""
        return {"network": network_digest(self.graph.module), "data": self.data.digest()}

    def refuse_changes(self, given: Mapping[str, str]) -> None:
        """Raise if the user's method has changed what was `given`, the `contents` of before."""
        if self.own is None:
            return
        others = [what for what, known in self.contents().items() if known != given[what]]
        if others:
            warning = " Nothing that is measured on these data from now on counts." if "data" in others else ""
            raise InvalidInput(
                f"method {self.own.name!r} changed the {' and '.join(others)} of its task: wanted no change. Work on copies."
                f"{warning}"
            )


@dataclass(frozen=True)
class Trained:
    """The training that was done: the sums that must be equal for all methods."""

    images: int  # training examples seen, each as often as it was
    rate_sum: float  # learning rate times images, summed


@dataclass(frozen=True, eq=False)
class Pruned:
    """What a method gives."""

    graph: Graph  # compacted
    trained: Trained
    passes: int  # images run through the network to decide what is removed (search cost), without training
    search_seconds: float
    training_seconds: float
    note: str = ""  # what the method says of its choice, such as thresholds


Watch = Callable[[Progress], None]


class Method(Protocol):
    """Makes the task's network smaller until the target is reached, and spends the budget, no more and no less."""

    def __call__(self, task: Task, *, watch: Watch | None = ...) -> Pruned:
        """Return the smaller network; the task's own is unchanged. A killed method resumes in the task's folder."""
        ...


_STATE = "checkpoints/state"
ROUNDING = 1e-12  # a share that is reached exactly must not be missed by the rounding of a division


@dataclass(frozen=True)
class Spent:
    """What a method has spent so far, and what it has still to do."""

    stages: int = 0  # of the budget that are done
    passes: int = 0
    search_seconds: float = 0.0
    training_seconds: float = 0.0
    note: str = ""
    left: dict[str, int] | None = None  # soft pruning: how many filters each site loses at the end


class _StateMeta(TypedDict):
    spent: Spent
    plan: str


@dataclass(frozen=True, eq=False)
class MethodState:
    """The current network of a method, and what was spent on it."""

    graph: Graph
    spent: Spent = Spent()
    momentum: Mapping[str, Tensor] = field(default_factory=dict)  # of the optimiser, by parameter name


@dataclass(frozen=True, eq=False)
class TaskRecord:
    """What a folder was started with: all that the outcome of a method depends on."""

    asked: dict[str, Any]
    fingerprints: dict[str, Any]
    method: str = ""  # of a method of the user's its name in full


@dataclass(frozen=True, eq=False)
class SiteProfile:
    """A site's curve, and the cost of measuring it."""

    curve: SiteCurve
    passes: int
    seconds: float = 0.0

    @property
    def site(self) -> str:
        """The site's name."""
        return self.curve.site


@dataclass(frozen=True)
class StepCost:
    """What a step of Algorithm 1 spent, besides what the step itself records."""

    step: int
    passes: int
    training_seconds: float
    trained: bool  # False: no cut, or no stage of the budget left
    elsewhere: float = 0.0  # seconds of training that the step's clock misses: before a kill, or in another row


@dataclass(frozen=True)
class EpochSeconds:
    """What an epoch of training took; of several with one stage and epoch the last counts."""

    step: int  # stage of the budget, from 0
    epoch: int
    seconds: float


METHOD_KINDS = {**KINDS, "task": TaskRecord, "profile": SiteProfile, "cost": StepCost, "seconds": EpochSeconds}
"""The records of a method's journal: those of a run, and its own."""


@dataclass(frozen=True, eq=False)
class MethodRun:
    """A task in the hands of one method."""

    task: Task
    context: PruningContext
    teacher: RecallingTeacher | None  # the task's own network, if the budget distils from it
    asked: Mapping[str, Any]  # all that the outcome depends on, as JSON has it
    given: Mapping[str, str]  # the task's contents, if a method of the user's has it

    @property
    def journal(self) -> Journal:
        """The journal of the method's folder."""
        return self.context.journal

    @cached_property
    def sites(self) -> tuple[Site, ...]:
        """The sites of the original network with more than one filter, in network order."""
        return tuple(site for site in find_sites(self.task.graph, self.task.shortcut) if site.channels > 1)

    def removed(self, graph: Graph) -> float:
        """The share of the MACs that is removed."""
        return self.context.shares_removed(graph)[1]

    def reached(self, graph: Graph) -> bool:
        """Whether the task's target is reached."""
        return self.removed(graph) >= self.task.target_macs - ROUNDING

    def copied(self) -> Graph:
        """A copy of the original network, to be changed."""
        return copied(self.task.graph)

    def report(self, phase: str, done: int, total: int, site: Site | None = None, number: int = 0) -> None:
        """Report `done` of `total` units of a phase, at the site of that number (from 1)."""
        self.context.progress.number, self.context.progress.sites = number, len(self.sites)
        self.context.progress.report(phase, done, total, site)

    def save(self, state: MethodState) -> MethodState:
        """Write the state to the folder as a whole, and return it; refused if the user's method changed network or data."""
        self.task.refuse_changes(self.given)
        meta = {"spent": plain(state.spent), "plan": state.graph.plan.to_json()}
        self.journal.save_tensors(_STATE, packed(state.graph.module, state.momentum), meta)
        return state

    def load(self) -> MethodState | None:
        """The state that was saved last; None at the beginning."""
        found = self.journal.load_tensors(_STATE, _StateMeta)
        if found is None:
            return None
        known = TrainState(*found)
        graph = replay(self.task.graph, Plan.from_json(known.meta["plan"], where=f"{self.journal.path}"), verify=False)
        graph = self.copied() if graph is self.task.graph else graph
        restore_(graph.module, known)
        return MethodState(graph, record_from(known.meta["spent"], Spent), known.momentum())


@contextmanager
def opened(
    task: Task, name: str, recipe: Recipe, watch: Watch | None, *, procedure: Callable[..., Any] | None = None
) -> Iterator[MethodRun]:
    """Open the task for the method called `name`, whose search `recipe` describes; resumes what the task's folder holds.

    `procedure` is code of the user that decides what is removed: a folder that was started by other code is refused.
    """
    if not 0 < task.target_macs < 1 and name != UNTOUCHED:
        raise InvalidInput(f"target_macs = {task.target_macs:g}: wanted a share of the MACs between 0 and 1, such as 0.3")
    measures: dict[str, Callable[..., Any]] = {"loss": task.loss_fn, "metric": task.metric}
    if procedure is not None:
        measures["procedure"] = procedure
    if task.own is not None and task.own.function is not None:
        measures["code of the procedure"] = task.own.function
    found = {  # all that the outcome depends on; the test set is not read
        "method": name,
        "weights": digest(dict(task.graph.module.state_dict())),
        "train": task.data.train.digest(),
        "search": task.data.search.digest(),
        "target_macs": task.target_macs,
        "budget": asdict(task.budget),
        "shortcut": task.shortcut,
        "seed": task.seed,
        "batch": task.batch,
        **{role: display_name(measure) for role, measure in measures.items()},
    }
    if (own := user_function(recipe.criterion)) is not None:
        found["criterion"] = fingerprint(own)  # the code of a user's function may have changed
    asked: dict[str, Any] = json.loads(json.dumps(found))
    if task.folder is not None:
        with disk_errors(task.folder):
            task.folder.mkdir(parents=True, exist_ok=True)
    with Journal(task.folder, METHOD_KINDS) as journal:
        method = "" if task.own is None else task.own.name
        known = journal.once(TaskRecord, lambda: TaskRecord(asked, fingerprints(measures), method))
        compared, before = asked, {**known.asked, "budget": _completed(known.asked.get("budget", {}))}
        if own is not None and not follows_helpers(known.fingerprints):
            compared = {**asked, "criterion": fingerprint(own, helpers=False)}
        others = [key for key in asked if key not in measures and before.get(key) != compared[key]]
        others += changed(measures, known.asked, known.fingerprints)
        others += [f"method ({known.method}, now {method})"] if known.method and method not in ("", known.method) else []
        if others:
            raise RunError(
                f"{task.folder}: was started with another {' and '.join(others)}. Give what it was started with, or another "
                f"folder."
            )
        # code of the user's that runs between trainings may change the network, whose answers would then reach other methods
        alone = procedure is None and task.own is not None and task.own.function is not None
        distils = any(part is not None and part.distill for part in (task.budget.between, task.budget.after))
        shared = MeasurementCache(None if alone or not distils else task.answers)
        with closing(open_cache(journal, task.store)) as cache, closing(shared) as answers:
            runtime = Runtime(task.loss_fn, task.metric, task.device, cache, cache_bytes=None)
            context = PruningContext(task.graph, task.data, recipe, runtime, journal, ProgressReporter(watch))
            given = {} if task.own is None else task.contents()
            teacher = RecallingTeacher(task.graph.module, answers) if distils else None
            yield MethodRun(task, context, teacher, asked, given)


def _completed(budget: dict[str, Any]) -> dict[str, Any]:
    """A recorded budget with the defaults of all settings that the release which recorded it did not have.

    A setting that is gone counts only where it was on.
    """
    every: dict[str, Any] = json.loads(json.dumps(asdict(TrainSettings(distance="kl"))))  # there was no other distance
    found = dict[str, Any]()
    for name, value in budget.items():
        if isinstance(value, dict):
            value = every | {setting: part for setting, part in value.items() if setting in every or part}
        found[name] = value
    return {"keep_best": False, **found}


def recipe_for(task: Task, criterion: str, *, repair: Repair = "none") -> Recipe:
    """How the filters of a task are ranked and measured; point estimates decide."""
    return Recipe.fast(
        confidence=0.0,
        criterion=criterion,
        repair=repair,
        allocation="global" if repair in REFITTED else "sequential",  # refitting comes after all cuts
        round_to=1,  # methods are compared at equal MACs, which takes single filters
        target_macs=task.target_macs or None,
        shortcut=task.shortcut,
        batch=task.batch,
        seed=task.seed,
    )
