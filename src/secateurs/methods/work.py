"""What a method works with, and where it stands: both are kept in the task's folder, so that a killed method goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from secateurs.compaction import replay
from secateurs.costs import cost
from secateurs.errors import InvalidInput, RunError
from secateurs.graph import Graph
from secateurs.identity import called, changed, fingerprints
from secateurs.masking import copied
from secateurs.methods.task import Task, Trained
from secateurs.plan import Plan
from secateurs.recipe import Recipe, Repair
from secateurs.record import Record, RunFolder, disk_errors
from secateurs.sites import Site, find_sites
from secateurs.steps import Progress
from secateurs.store import Store
from secateurs.tensorfile import digest
from secateurs.workshop import Tools, Workshop

Watch = Callable[[Progress], None]

ENDINGS: Mapping[Repair, str] = {"none": "", "least-squares": "+repair", "every-layer": "+refit"}
"""What a method's name ends in, by the repair that it makes."""

_STANDING = "checkpoints/standing"
_MEASURED = "measured.sqlite"
_WEIGHTS, _MOMENTUM = "weights/", "momentum/"
_ROUNDING = 1e-12  # a share that is reached exactly must not be missed by the rounding of a division


@dataclass(frozen=True, eq=False)
class Standing:
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
class Work:
    """A task on the table of one method."""

    task: Task
    workshop: Workshop
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

    def keep(self, standing: Standing) -> Standing:
        """Write the standing down as a whole, and give it back."""
        tensors = {f"{_WEIGHTS}{name}": tensor for name, tensor in standing.graph.module.state_dict().items()}
        tensors |= {f"{_MOMENTUM}{name}": tensor for name, tensor in standing.momentum.items()}
        meta = {name: getattr(standing, name) for name in _FIGURES}
        trained = [asdict(stretch) for stretch in standing.trained]
        plan = standing.graph.plan.to_json()
        self.record.save_tensors(_STANDING, tensors, {**meta, "trained": trained, "plan": plan})
        return standing

    def standing(self) -> Standing | None:
        """The standing that was written down last; None at the beginning."""
        found = self.record.load_tensors(_STANDING)
        if found is None:
            return None
        tensors, meta = found
        graph = replay(self.task.graph, Plan.from_json(meta["plan"], where=f"{self.record.path}"), verify=False)
        graph = self.copied() if graph is self.task.graph else graph
        graph.module.load_state_dict(_under(_WEIGHTS, tensors))
        trained = tuple(Trained(**stretch) for stretch in meta["trained"])
        return Standing(graph, _under(_MOMENTUM, tensors), trained, **{name: meta[name] for name in _FIGURES})


_FIGURES = ("passes", "search_seconds", "training_seconds", "note", "state")


@contextmanager
def opened(task: Task, name: str, recipe: Recipe, watch: Watch | None) -> Iterator[Work]:
    """The work of the method called `name`, whose searching `recipe` describes; goes on with what the task's folder holds."""
    if not 0 < task.target_macs < 1:
        raise InvalidInput(f"target_macs = {task.target_macs:g}: wanted a share of the MACs between 0 and 1, such as 0.3")
    asked = _asked(task, name)
    record = Record() if task.folder is None else _folder(task.folder, task, asked)
    try:
        store = Store(task.store or (None if record.path is None else record.path / _MEASURED))
        try:
            tools = Tools(task.loss_fn, task.metric, task.device, store, cache_bytes=None)
            yield Work(task, Workshop(task.graph, task.data, recipe, tools), record, watch, asked)
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
        "loss": called(task.loss_fn),
        "metric": called(task.metric),
    }
    plain: dict[str, Any] = json.loads(json.dumps(told))
    return plain


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
