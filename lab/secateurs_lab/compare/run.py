"""Compare methods on one network and its data: each combination of method, budget, target and seed makes one row, once.

An existing row is never made again, a killed method resumes from its folder, and processes that run the same comparison share
the work.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from secateurs._util.decode import Malformed, decode_json, read_text_file
from secateurs._util.files import write_text
from secateurs._util.modules import Device, structure
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
from secateurs.metrics import Evaluation, evaluate
from secateurs.pruning.folder import environment, example_for
from secateurs_lab.compare.paired import packed_answers
from secateurs_lab.compare.rows import (
    Answers,
    Base,
    Conditions,
    Count,
    Entry,
    Key,
    Row,
    append_row,
    check_conditions,
    check_rates,
    comparison_rows,
    named_budget,
)
from secateurs_lab.methods import UNTOUCHED, Budget, Method, Pruned, Task, Watch

_LONG = 200  # bytes of a method's name in that of a file, which may have 255
ROWS, CONDITIONS, NETWORK, WORK = "rows.jsonl", "comparison.json", "pruned.safetensors", "work"


@dataclass(frozen=True, eq=False)
class Comparison:
    """One network with its data, a file of rows, and a folder for the runs of the methods."""

    model: nn.Module  # trained, left unchanged
    data: Data
    out: Path  # for rows.jsonl, tables and figures
    runs: Path  # for the runs and the smaller networks
    names: Mapping[str, Any] = field(default_factory=dict)  # display names: "model", "model_options", "weights", "data"
    shortcut: Shortcut = "before"
    batch: int = 256
    device: Device = None
    int8: bool = False  # quantise every network too, and measure the file

    @property
    def rows(self) -> Path:
        """The file of rows."""
        return self.out / ROWS

    @cached_property
    def graph(self) -> Graph:
        """The unpruned network, traced."""
        return trace(self.model, example_for(self.model, self.data))

    @cached_property
    def base(self) -> Base:
        """What all rows share."""
        name = str(self.names.get("model", type(self.model).__name__))
        code = hashlib.sha256(structure(self.graph.module).encode()).hexdigest()
        return Base(name, digest(self.model.state_dict()), self.data.digest(), self.shortcut, structure_sha256=code)

    @cached_property
    def baseline(self) -> tuple[Evaluation, Evaluation]:
        """The unpruned network on the validation and test sets; read for the rows only."""
        return self._evaluate(self.graph, self.data.search), self._evaluate(self.graph, self.data.test_set)

    def budgets(self, names: Iterable[str]) -> tuple[Budget, ...]:
        """Return the budgets of those names, scaled to this network and data; rows know them by name, so names differ."""
        sites = len(find_sites(self.graph, self.shortcut))
        found: dict[str, Budget] = {}
        for name in names:
            budget = named_budget(name, self.data.train, sites=sites)
            if found.setdefault(budget.name, budget) != budget:
                raise InvalidInput(f"budgets: two of them are called {budget.name!r}. Give one of the files another name.")
        check_rates(found.values())
        return tuple(found.values())

    def check(self, budgets: Sequence[Budget]) -> None:
        """Raise if existing rows or runs have another network, other data, or other settings of a budget; record ours."""
        wanted = Conditions(self.base, {budget.name: budget for budget in budgets})
        for row in comparison_rows(self.rows):
            check_conditions(self.rows, row, [row.budget], wanted)
        path, known = self.runs / CONDITIONS, Conditions(self.base, {})
        if path.exists():  # methods that are not finished have no row yet
            try:
                known = decode_json(read_text_file(path), Conditions)
            except Malformed as error:
                raise RunError(f"{path}: damaged ({error}). Restore it from a copy, or give another --runs.") from error
        check_conditions(f"{self.runs} (--runs)", known.base, known.budgets.values(), wanted)
        # an earlier release recorded no structure: ours is the one from now on
        write_text(path, json.dumps(asdict(Conditions(self.base, known.budgets | wanted.budgets)), indent=1))

    def done(self) -> dict[Key, Row]:
        """Return the existing rows that have all that is asked for."""
        return {row.key: row for row in comparison_rows(self.rows) if row.int8 is not None or not self.int8}

    def make(self, entry: Entry, method: Method, *, watch: Watch | None = None) -> Row | None:
        """Run the method, save its network, measure it after reloading, append its row; None if another process does."""
        folder = self.runs / entry.budget.name / f"{_file_name(entry.method)}-{entry.target:g}-seed{entry.seed}"
        with _claimed(folder) as ours:
            if not ours:
                return None
            known = self.done().get(entry.key)  # another process may have made it while this one was busy
            if known is not None:
                return known
            begun = {row.key: row for row in comparison_rows(self.rows)}.get(entry.key)
            if begun is not None and (folder / NETWORK).exists():  # made without int8 before
                graph = load(self.model, folder / NETWORK, example_input=self.graph.example)
                append_row(self.rows, asdict(row := replace(begun, int8=self._int8(graph))))
                return row
            if self.data.digest() != self.base.data_sha256:
                raise RunError(
                    "the data are not those that the comparison began with: code that ran here has changed them in place, and "
                    "rows are no longer comparable. Remove the method that does it, and give the command again."
                )
            _ = self.baseline  # measured before code of the user's may change anything
            pruned = method(self._task(entry, folder), watch=watch)
            file = save(pruned.graph, folder / NETWORK)
            row = self._row(entry, pruned, file)
            append_row(self.rows, asdict(row))
            return row

    def _task(self, entry: Entry, folder: Path) -> Task:
        stores = self.runs / "measured"
        stores.mkdir(parents=True, exist_ok=True)
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
            # shared by the targets and budgets of a method, not by methods: else the first pays for the search of the others
            store=stores / f"{_file_name(entry.method)}-seed{entry.seed}.sqlite",
            answers=stores / "teacher.sqlite",
        )

    def _row(self, entry: Entry, pruned: Pruned, file: Path) -> Row:
        # measure the reloaded network: it is what a user gets
        smaller = load(self.model, file, example_input=self.graph.example)
        before, after = cost(self.graph), cost(smaller)
        paper_before, paper_after = (cost(graph, convention="paper") for graph in (self.graph, smaller))
        about = environment()
        (search_before, test_before), test = self.baseline, self._evaluate(smaller, self.data.test_set)
        return Row(
            **vars(self.base),
            **vars(entry),
            model_options=dict(self.names.get("model_options", {})),
            weights=str(self.names.get("weights", "as given")),
            data=str(self.names.get("data", self.data.name)),
            images={name: len(examples) for name, examples in self.data.splits().items()},
            macs=Count(before.macs, after.macs),
            parameters=Count(before.parameters, after.parameters),
            counted_weights=Count(paper_before.parameters, paper_after.parameters),
            filters=_filters(self.graph, smaller),
            search=_answers(search_before, self._evaluate(smaller, self.data.search)),
            test=_answers(test_before, test),
            images_trained=pruned.trained.images,
            rate_sum=pruned.trained.rate_sum,
            passes=pruned.passes,
            search_seconds=round(pruned.search_seconds, 3),
            training_seconds=round(pruned.training_seconds, 3),
            network_sha256=hashlib.sha256(file.read_bytes()).hexdigest(),
            note=pruned.note,
            right_answers=packed_answers(test.values),
            int8=self._int8(smaller) if self.int8 else None,
            versions=about["versions"],
            machine=about["machine"],
        )

    def _int8(self, graph: Graph) -> Answers:
        """The network and its int8 file on the test set; calibrated on training examples, compared on validation ones."""
        from secateurs.export.int8 import CALIBRATED, COMPARED, Quantiser  # seconds to import

        pools = ((self.data.train, CALIBRATED), (self.data.search, COMPARED))
        quantiser = Quantiser(graph, *(subset(pool, min(count, len(pool)), seed=0).ready() for pool, count in pools))
        file = quantiser.quantised(quantiser.hurting).module()
        test = self.data.test_set.ready()
        return _answers(self._evaluate(graph, test), evaluate(file, test, batch=self.batch))

    def _evaluate(self, graph: Graph, examples: Examples) -> Evaluation:
        return evaluate(graph.module, examples, batch=self.batch, device=self.device)


def entries(methods: Sequence[str], budgets: Sequence[Budget], targets: Sequence[float], seeds: Sequence[int]) -> list[Entry]:
    """Return all combinations, budget by budget and seed by seed, so that whole curves exist early."""
    for target in targets:
        if not 0 < target < 1:
            raise InvalidInput(f"target {target:g}: wanted a share of the MACs between 0 and 1, such as 0.3.")
    for seed in seeds:
        if seed < 0:
            raise InvalidInput(f"seed {seed}: wanted 0 or more.")
    for name, given in (("methods", methods), ("budgets", budgets), ("targets", targets), ("seeds", seeds)):
        if not given:
            raise InvalidInput(f"{name}: got none, wanted at least one.")
    wanted = [
        Entry(method, budget, 0.0 if method == UNTOUCHED else float(target), seed)
        for budget in budgets
        for seed in seeds
        for target in targets
        for method in methods
        if method != UNTOUCHED or budget.between or budget.after  # what training alone does needs some
    ]
    return list({entry.key: entry for entry in wanted}.values())


def fewer(data: Data, count: int | None) -> Data:
    """Return the data with at most `count` examples in each set, to try things out; all of it if that is None."""
    if count is None:
        return data
    train, search, test = (subset(part, min(count, len(part)), seed=0) for part in data.splits().values())
    note = f"at most {count:,} examples of each set are used: enough to try things out, not to report from"
    return replace(data, train=train, search=search, test=test, notes=(*data.notes, note))


def _answers(before: Evaluation, after: Evaluation) -> Answers:
    def right(found: Evaluation) -> float:
        value = found.accuracy * found.count
        return float(round(value)) if abs(value - round(value)) < 1e-6 else value

    return Answers(before.accuracy, after.accuracy, right(before), right(after), after.count)


def _filters(before: Graph, after: Graph) -> dict[str, tuple[int, int]]:
    left = {node.name: node.filters for node in nodes_from(describe(after)) if node.is_layer}
    return {node.name: (node.filters, left.get(node.name, 0)) for node in nodes_from(describe(before)) if node.is_layer}


def _file_name(method: str) -> str:
    """The method's name as that of a file: ':' of the function's name becomes '-', and no two methods have the same.

    Settings that hold other characters than a file name takes, and long names, end in a hash of the whole name.
    """
    base, bracket, settings = method.partition("[")
    plain = base.replace(":", "-") + bracket + settings
    usable = re.sub(r"[/:\\\x00-\x1f]", "-", plain)
    if usable == plain and len(usable.encode()) <= _LONG:
        return usable
    end = f"-{hashlib.sha256(method.encode()).hexdigest()[:16]}"
    return usable.encode()[: _LONG - len(end)].decode(errors="ignore") + end


@contextmanager
def _claimed(folder: Path) -> Iterator[bool]:
    """Lock the folder; yields whether this process got the lock."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".claim").open("a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
