"""Who is compared in the quality benchmark, on which networks and images, and where what was measured is kept."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

from secateurs import Graph, trace
from secateurs._util.download import home
from secateurs.config import Recipe, Repair
from secateurs.data import Data, Examples, load, subset
from secateurs.data.dataset import derive
from secateurs.metrics import Evaluation, correct, cross_entropy, evaluate
from secateurs.models import example_input, load_public
from secateurs.pruning.context import PruningContext, Runtime
from secateurs.scoring.cache import MeasurementCache

_ELSEWHERE = os.environ.get("QUALITY_RESULTS")  # a folder: all is measured anew, whatever was measured before
RESULTS = Path(_ELSEWHERE or Path(__file__).parent / "results")
JOURNAL = RESULTS / "quality.jsonl"
FOLDER = RESULTS / "measured" if _ELSEWHERE else home() / "bench" / "quality"
PAGE = RESULTS / "quality.md" if _ELSEWHERE else Path(__file__).parents[2] / "lab" / "notes" / "quality.md"
STEERING = 1_000  # search images that curves are measured on; drops are measured on the whole half
REPAIR_EXAMPLES = 512
BATCH = 64  # images at once: a core's cache holds no more
UNTOUCHED = "untouched"


@dataclass(frozen=True)
class Size:
    """How much is measured; a deep network gets less of everything."""

    steering: int = STEERING
    search: int | None = None  # images that drops are measured on; None: the whole half
    masks: int | None = None  # of an ensemble at every site; None: as `fast` has it


SIZES = {"resnet20": Size(), "resnet56": Size(steering=500, search=2_000, masks=2_048)}

Key = tuple[str, int, str, str, float, int, float]


@dataclass(frozen=True)
class Method:
    """A criterion, and whether what reads a cut site is repaired."""

    criterion: str
    repair: Repair

    @property
    def name(self) -> str:
        return self.criterion + {"none": "", "least-squares": "+repair", "every-layer": "+refit"}[self.repair]


BOTH = ("l1", "fpgm", "taylor", "ensemble")
METHODS = {
    method.name: method
    for method in (
        *(Method(criterion, "none") for criterion in ("random", *BOTH)),
        *(Method(criterion, "least-squares") for criterion in (*BOTH, "obs", "portfolio")),
        Method("portfolio", "every-layer"),
    )
}


@dataclass(frozen=True)
class Row:
    """One network that one method made. Shares and accuracies are fractions; `finetune` counts epochs, at first at `rate`."""

    model: str
    seed: int
    method: str  # the criterion
    repair: str
    target: float  # share of the MACs that was to go
    finetune: int
    macs_removed: float
    parameters_removed: float
    search_before: float
    search_after: float
    test_before: float
    test_after: float
    seconds: float  # to make and measure it; courses are not in it
    conditions: str
    rate: float = 0.01

    @property
    def key(self) -> Key:
        return self.model, self.seed, self.method, self.repair, self.target, self.finetune, self.rate if self.finetune else 0.0

    @property
    def search_drop(self) -> float:
        return round(self.search_before - self.search_after, 12)

    @property
    def test_drop(self) -> float:
        return round(self.test_before - self.test_after, 12)


def read_rows() -> list[Row]:
    """All rows that were written; of those that say the same, the latest."""
    lines = JOURNAL.read_text().splitlines() if JOURNAL.exists() else []
    rows = [Row(**json.loads(line)) for line in lines if line.endswith("}")]  # a killed run may leave half a line
    return list({row.key: row for row in rows}.values())


def append_row(row: Row) -> None:
    """One line, in one write: two processes may share the file."""
    JOURNAL.parent.mkdir(parents=True, exist_ok=True)
    with JOURNAL.open("a") as file:
        file.write(json.dumps(asdict(row)) + "\n")


@dataclass(frozen=True, eq=False)
class Subject:
    """A public network with CIFAR-10, halves of the official test images as search and test sets."""

    model: str

    @cached_property
    def graph(self) -> Graph:
        return trace(load_public(int(self.model.removeprefix("resnet"))), example_input(self.model))

    @cached_property
    def data(self) -> Data:
        return load("cifar10", split="public", download=False)

    def search(self, graph: Graph) -> Evaluation:
        """On the search half, or as many of its images as the network's size allows."""
        return evaluate(graph.module, self._searched, batch=BATCH)

    @cached_property
    def _searched(self) -> Examples:
        few = SIZES[self.model].search
        return self.data.search if few is None else subset(self.data.search, few, seed=0)

    def test(self, graph: Graph) -> Evaluation:
        """On the test half, which chooses nothing."""
        return evaluate(graph.module, self.data.test, batch=BATCH)

    def context(self, method: Method, seed: int, store: MeasurementCache) -> PruningContext:
        """What a divided run of this method works with; few of the search images steer."""
        size = SIZES[self.model]
        steering = subset(self._searched, size.steering, seed=derive(seed, "steering"))
        recipe = Recipe.fast(
            criterion=method.criterion,
            repair=method.repair,
            repair_examples=REPAIR_EXAMPLES,
            allocation="global",
            confidence=0,
            round_to=1,
            shortcut="before",
            batch=BATCH,
            masks=size.masks,
            seed=seed,
        )
        tools = Runtime(cross_entropy, correct, None, store, None)
        return PruningContext(self.graph, replace(self.data, search=steering), recipe, tools)


def store_of(model: str, seed: int) -> MeasurementCache:
    """What was measured once for a network and a seed, whoever asks."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    return MeasurementCache(FOLDER / f"{model}-{seed}.sqlite")


def series(rows: list[Row], *, finetune: int = 0) -> Iterator[tuple[tuple[str, str], list[Row]]]:
    """(network, method's name) with its rows by MACs removed, methods in the order of `METHODS`."""
    models = sorted({row.model for row in rows}, key=lambda model: int(model.removeprefix("resnet")))
    for model in models:
        for name, method in METHODS.items():
            found = [
                row
                for row in rows
                if (row.model, row.method, row.repair, row.finetune) == (model, method.criterion, method.repair, finetune)
            ]
            if found:
                yield (model, name), sorted(found, key=lambda row: (row.seed, row.macs_removed))
