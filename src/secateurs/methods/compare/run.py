"""Many methods on one network and data: every combination of method, budget, target and seed makes one row, once.

A row that is there is never made again, a method that was killed goes on from its folder, and processes that are given the same
comparison share the work.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict

from torch import nn

from secateurs._util.decode import Malformed, decode_json, read_text_file
from secateurs._util.files import write_text
from secateurs._util.modules import Device
from secateurs._util.tensors import digest
from secateurs.compaction.serialization import load, save
from secateurs.config import Shortcut
from secateurs.data.dataset import Examples
from secateurs.data.splits import Data, subset
from secateurs.errors import InvalidInput, RunError
from secateurs.graph.cost import cost
from secateurs.graph.sites import find_sites
from secateurs.graph.structure import describe, nodes_from
from secateurs.graph.trace import Graph, trace
from secateurs.methods import Budget, Method, Pruned, Task, Watch
from secateurs.methods.compare.rows import (
    Answers,
    Count,
    Key,
    Row,
    append_row,
    budget_fields,
    check_base,
    comparison_rows,
    named_budget,
    row_fields,
)
from secateurs.metrics import Evaluation, evaluate
from secateurs.pruning.checkpoints import example_for
from secateurs.pruning.folder import environment

ROWS, GUARD, NETWORK, WORK = "rows.jsonl", "comparison.json", "pruned.safetensors", "work"


class _Base(TypedDict):
    model: str
    weights_sha256: str
    data_sha256: str
    shortcut: str


class _Budget(TypedDict):
    name: str
    between: dict[str, Any] | None
    after: dict[str, Any] | None


class _Guard(TypedDict):
    """What comparison.json holds: what the runs beside it were started with."""

    base: _Base
    budgets: dict[str, _Budget]


@dataclass(frozen=True)
class Entry:
    """A row that is to be made."""

    method: str
    budget: Budget
    target: float
    seed: int

    @property
    def key(self) -> Key:
        """What tells its row from the others."""
        return self.method, self.budget.name, self.target, self.seed

    @property
    def folder(self) -> str:
        """Where its network is kept, and its method works, seen from the folder of all runs."""
        return f"{self.budget.name}/{_file_name(self.method)}-{self.target:g}-seed{self.seed}"


@dataclass(frozen=True, eq=False)
class Comparison:
    """One network with its data, a file of rows, and a folder where methods work."""

    model: nn.Module  # trained, left as it is
    data: Data
    out: Path  # for rows.jsonl, and what is made of it
    runs: Path  # for what methods keep, and the smaller networks
    names: Mapping[str, Any] = field(default_factory=dict)  # "model", "model_options", "weights", "data": as rows call them
    shortcut: Shortcut = "before"
    batch: int = 256
    device: Device = None

    @property
    def rows(self) -> Path:
        """The file of rows."""
        return self.out / ROWS

    @cached_property
    def graph(self) -> Graph:
        """The untouched network, traced."""
        return trace(self.model, example_for(self.model, self.data))

    @cached_property
    def base(self) -> dict[str, str]:
        """What all rows have in common."""
        weights = {name: tensor.detach().cpu() for name, tensor in self.model.state_dict().items()}
        return {
            "model": str(self.names.get("model", type(self.model).__name__)),
            "weights_sha256": digest(weights),
            "data_sha256": self.data.digest(),
            "shortcut": self.shortcut,
        }

    @cached_property
    def untouched(self) -> tuple[Evaluation, Evaluation]:
        """The base network on the search and on the test set; asked for at the end of a row only."""
        return self._evaluated(self.graph, self.data.search), self._evaluated(self.graph, self.data.test)

    def budgets(self, names: Iterable[str]) -> tuple[Budget, ...]:
        """The budgets of those names, scaled to this network and data."""
        sites = len(find_sites(self.graph, self.shortcut))
        return tuple(dict.fromkeys(named_budget(name, self.data.train, sites=sites) for name in names))

    def check(self, budgets: Sequence[Budget]) -> None:
        """Refuse to go on with rows or runs of another network, other data, or budgets that meant something else."""
        for row in comparison_rows(self.rows):
            check_base(row, self.base, str(self.rows))
            for budget in budgets:
                _check_budget(row.budget, budget, self.rows)
        self._guard_runs(budgets)

    def done(self) -> dict[Key, Row]:
        """The rows that are there."""
        return {row.key: row for row in comparison_rows(self.rows)}

    def make(self, entry: Entry, method: Method, *, watch: Watch | None = None) -> Row | None:
        """Run the method, keep its network, measure it as it reloads, add its row; None: another process is doing it."""
        folder = self.runs / entry.folder
        with _claimed(folder) as ours:
            if not ours:
                return None
            known = self.done().get(entry.key)  # another process may have made it while this one was busy
            return known or self._made(entry, method, folder, watch)

    # ---- one row -----------------------------------------------------------------------------------------------------

    def _made(self, entry: Entry, method: Method, folder: Path, watch: Watch | None) -> Row:
        pruned = method(self._task(entry, folder), watch=watch)
        file = save(pruned.graph, folder / NETWORK)
        # what counts is the network that a user gets, so it is the reloaded one that is measured
        left = load(self.model, file, example_input=self.graph.example)
        row = self._row(entry, pruned, left, hashlib.sha256(file.read_bytes()).hexdigest())
        append_row(self.rows, row_fields(row))
        return row

    def _task(self, entry: Entry, folder: Path) -> Task:
        stores = self.runs / "measured"
        for needed in (stores, folder / WORK):
            needed.mkdir(parents=True, exist_ok=True)
        return Task(
            self.graph,
            self.data,
            entry.target,
            entry.budget,
            shortcut=self.shortcut,
            seed=entry.seed,
            batch=self.batch,
            device=self.device,
            folder=folder / WORK,
            # shared by the targets and budgets of a method, not by methods: else who comes first pays for the others' search
            store=stores / f"{_file_name(entry.method)}-seed{entry.seed}.sqlite",
        )

    def _row(self, entry: Entry, pruned: Pruned, left: Graph, network_sha256: str) -> Row:
        before, after = cost(self.graph), cost(left)
        paper_before, paper_after = (cost(graph, convention="paper") for graph in (self.graph, left))
        about = environment()
        search_before, test_before = self.untouched
        return Row(
            model=self.base["model"],
            model_options=dict(self.names.get("model_options", {})),
            weights_sha256=self.base["weights_sha256"],
            data_sha256=self.base["data_sha256"],
            shortcut=self.base["shortcut"],
            weights=str(self.names.get("weights", "as given")),
            data=str(self.names.get("data", self.data.name)),
            images={name: len(examples) for name, examples in self.data.splits().items()},
            method=entry.method,
            budget=budget_fields(entry.budget),
            target=entry.target,
            seed=entry.seed,
            macs=Count(before.macs, after.macs),
            parameters=Count(before.parameters, after.parameters),
            counted_weights=Count(paper_before.parameters, paper_after.parameters),
            filters=_filters(self.graph, left),
            search=_answers(search_before, self._evaluated(left, self.data.search)),
            test=_answers(test_before, self._evaluated(left, self.data.test)),
            images_trained=pruned.trained.images,
            rate_sum=pruned.trained.rate_sum,
            passes=pruned.passes,
            search_seconds=round(pruned.search_seconds, 3),
            training_seconds=round(pruned.training_seconds, 3),
            network_sha256=network_sha256,
            note=pruned.note,
            versions=about["versions"],
            machine=about["machine"],
        )

    def _evaluated(self, graph: Graph, examples: Examples) -> Evaluation:
        return evaluate(graph.module, examples, batch=self.batch, device=self.device)

    def _guard_runs(self, budgets: Sequence[Budget]) -> None:
        """Half-done methods must not go on with something else than they were started with."""
        path = self.runs / GUARD
        known: dict[str, Any] = {"base": self.base, "budgets": {}}
        if path.exists():
            try:
                known = decode_json(read_text_file(path), _Guard)
            except Malformed as error:
                raise RunError(f"{path}: damaged ({error}). Restore it from a copy, or give another --runs.") from error
        check_base(known["base"], self.base, f"{self.runs} (--runs)")
        for budget in budgets:
            for found in known["budgets"].values():
                _check_budget(found, budget, self.runs)
        known["budgets"] |= {budget.name: budget_fields(budget) for budget in budgets}
        write_text(path, json.dumps(known, indent=1))


def entries(methods: Sequence[str], budgets: Sequence[Budget], targets: Sequence[float], seeds: Sequence[int]) -> list[Entry]:
    """All combinations: budget by budget and seed by seed, so that an early look already shows whole curves."""
    for target in targets:
        if not 0 < target < 1:
            raise InvalidInput(f"target {target:g}: wanted a share of the MACs between 0 and 1, such as 0.3.")
    for seed in seeds:
        if seed < 0:
            raise InvalidInput(f"seed {seed}: wanted 0 or more.")
    for name, given in (("methods", methods), ("budgets", budgets), ("targets", targets), ("seeds", seeds)):
        if not given:
            raise InvalidInput(f"{name}: got none, wanted at least one.")
    chosen = [
        Entry(method, budget, float(target), seed)
        for budget in budgets
        for seed in seeds
        for target in targets
        for method in methods
    ]
    return list({entry.key: entry for entry in chosen}.values())


def fewer(data: Data, count: int | None) -> Data:
    """The data with at most `count` examples in each set, to try things out; all of it when that is None."""
    if count is None:
        return data
    train, search, test = (subset(part, min(count, len(part)), seed=0) for part in data.splits().values())
    note = f"at most {count:,} examples of each set are used: enough to try things out, not to report from"
    return replace(data, train=train, search=search, test=test, notes=(*data.notes, note))


def _answers(before: Evaluation, after: Evaluation) -> Answers:
    return Answers(before.accuracy, after.accuracy, _right(before), _right(after), after.count)


def _right(found: Evaluation) -> float:
    right = found.accuracy * found.count
    return float(round(right)) if abs(right - round(right)) < 1e-6 else right


def _filters(before: Graph, after: Graph) -> dict[str, tuple[int, int]]:
    left = {node.name: node.filters for node in nodes_from(describe(after)) if node.is_layer}
    return {node.name: (node.filters, left.get(node.name, 0)) for node in nodes_from(describe(before)) if node.is_layer}


def _check_budget(found: Mapping[str, Any], budget: Budget, where: Path) -> None:
    if found["name"] == budget.name and dict(found) != budget_fields(budget):
        raise RunError(f"{where}: budget {budget.name!r} had other settings there: give the changed one another name.")


def _file_name(method: str) -> str:
    return method.replace(":", "-").replace("/", "-")


@contextmanager
def _claimed(folder: Path) -> Iterator[bool]:
    """Whether this process alone works in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".claim").open("a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
