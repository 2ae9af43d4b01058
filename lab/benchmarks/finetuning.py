"""What one epoch of training does to a cut network, and by which settings: `python -m benchmarks.finetuning` (hours).

Cross-entropy, distillation from the untouched network's answers, from its answers and feature maps, or from both to mixtures
of two images; BatchNorm live or frozen; three learning rates; averaged weights or those of the last step: from our repaired
network, from those that L1 norms and the geometric median leave without repair, and from the untouched one.
Every cell is a row of lab/results/finetuning/rows.jsonl: give the same command again after a crash and it goes on. The
validation set chooses the best cell; test accuracies are measured once and choose nothing. `python -m
benchmarks.finetuning_page` writes the tables of lab/notes/training.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import product
from os import getloadavg
from pathlib import Path
from time import perf_counter, process_time
from typing import Literal, get_args

import torch
from torch import Tensor

from benchmarks.conditions import conditions
from secateurs import Graph, cost, trace
from secateurs.cli.inputs import BUILTIN, PUBLIC, Origin, build_model, load_data
from secateurs.config import GENTLE, Precision, TrainSettings
from secateurs.data import Data, subset
from secateurs.data.dataset import derive
from secateurs.errors import Diverged
from secateurs.graph.features import paired_features
from secateurs.graph.masking import copied
from secateurs.metrics import accuracy
from secateurs.models import example_input
from secateurs.repair import reconstruct_
from secateurs.scoring.cache import MeasurementCache
from secateurs.training import RateTrials, find_rate, train_
from secateurs.training.state import copy_into_
from secateurs_lab.compare.rows import append_row, read_rows
from secateurs_lab.compare.run import fewer
from secateurs_lab.methods import Task, method
from secateurs_lab.methods.teacher import RecallingTeacher

PAGE = Path(__file__).parents[2] / "lab" / "notes" / "training.md"
NETWORKS = {"resnet20": BUILTIN, "resnet32": PUBLIC, "resnet56": PUBLIC}
UNTOUCHED = "untouched"
STARTS = (UNTOUCHED, "obs+refit", "l1", "fpgm")
WHOLE = "+whole"  # behind the name of a start: reconstructed as a whole network, after its own repair
REPAIRED_ON = 1024  # images
HELD_OUT, TRIALS_SEED = 1024, 3  # images that judge the trials of lr "auto", and what draws them
RATES = (5e-4, 2e-3, 1e-2)
DECAY = 0.99  # of the average
TEMPERATURE, WITH_FEATURES = 2.0, 4.0  # of distillation
BATCH = 64  # images at once while measuring: faster than 256 on one core

MIXED = 0.5  # largest share of another image in a mixture

Loss = Literal["cross-entropy", "distillation", "features", "mixtures"]
LOSSES = get_args(Loss)
BatchNorm = Literal["live", "frozen"]


@dataclass(frozen=True)
class Cell:
    """One training of one network."""

    network: str
    start: str
    target: float  # share of the MACs that was to go; 0: untouched
    loss: Loss
    batchnorm: BatchNorm
    rate: float
    seed: int
    epochs: int
    precision: Precision
    examples: int | None  # of each set; None: all

    def settings(self) -> TrainSettings:
        distilled, features = self.loss != "cross-entropy", self.loss in ("features", "mixtures")
        return TrainSettings(
            epochs=self.epochs,
            lr=self.rate,
            schedule="linear",
            warmup_share=0.1,
            augment="auto",
            distill=1.0 if distilled else 0.0,
            temperature=WITH_FEATURES if features else TEMPERATURE,
            features=GENTLE.features if features else 0.0,
            mixup=MIXED if self.loss == "mixtures" else 0.0,
            freeze_batchnorm=self.batchnorm == "frozen",
            average=DECAY,
            precision=self.precision,
            channels_last=True,  # faster, and the same but for rounding
            seed=self.seed,
        )


@dataclass(frozen=True)
class Row(Cell):
    """What a training left. Accuracies are fractions."""

    averaged: bool
    macs_removed: float
    validation_before: float  # of the network that is trained
    validation_after: float | None  # None: the training diverged
    test_before: float
    test_after: float | None
    test_dense: float  # of the untouched network, not trained
    search_seconds: float
    training_seconds: float  # of one core
    conditions: str

    @property
    def cell(self) -> Cell:
        return Cell(**{name: getattr(self, name) for name in Cell.__dataclass_fields__})


class Subject:
    """A trained network with its data, and what methods make of it."""

    def __init__(self, network: str, runs: Path, examples: int | None) -> None:
        self.network, self.runs, self.examples = network, runs, examples
        self._origin = Origin(network, "cifar10", weights=NETWORKS[network]).settled()
        self._measured: dict[tuple[str, float, int], tuple[float, float]] = {}
        self._reconstructed: dict[tuple[str, float, int], tuple[Graph, float]] = {}

    @cached_property
    def graph(self) -> Graph:
        return trace(build_model(self._origin), example_input(self.network))

    @cached_property
    def data(self) -> Data:
        return fewer(load_data(self._origin), self.examples)

    @cached_property
    def _teacher(self) -> RecallingTeacher:
        """Trainings of one seed and precision ask about the same batches: its answers are kept for all of them."""
        self.runs.mkdir(parents=True, exist_ok=True)
        return RecallingTeacher(self.graph.module, MeasurementCache(self.runs / f"{self.network}-teacher.sqlite"))

    def start(self, name: str, target: float, seed: int) -> tuple[Graph, float]:
        """A fresh copy of what a method makes, without training, and the seconds of its search; kept in its folder."""
        if name == UNTOUCHED:
            return copied(self.graph), 0.0
        if name.endswith(WHOLE):
            found, seconds = self._reconstruct(name.removesuffix(WHOLE), target, seed)
            return copied(found), seconds
        folder = self.runs / f"{self.network}-{name}-{target:g}-{seed}-{self.examples or 'all'}"
        task = Task(self.graph, self.data, target, seed=seed, folder=folder, store=self.runs / f"{self.network}.sqlite")
        found = method(name)(task)
        return copied(found.graph), found.search_seconds

    def search(self, name: str, target: float, seed: int) -> dict[str, object]:
        """What finding a start takes, in seconds of the clock and of the processor, and what it leaves, without training."""
        load, began, used = getloadavg()[0], perf_counter(), process_time()
        graph, seconds = self.start(name, target, seed)
        whole, cpu = perf_counter() - began, process_time() - used
        validation, test = self.accuracies(graph)
        return {
            **{"network": self.network, "start": name, "target": target, "seed": seed, "examples": self.examples},
            **{"seconds": whole, "search_seconds": seconds, "processor_seconds": cpu, "threads": torch.get_num_threads()},
            **{"load_before": load, "macs_removed": 1 - cost(graph).macs / cost(self.graph).macs},
            **{"validation": validation, "test": test, "conditions": conditions().sentence()},
        }

    def _reconstruct(self, name: str, target: float, seed: int) -> tuple[Graph, float]:
        """A start after whole-network reconstruction, label-free, on the images of a repair."""
        key = (name, target, seed)
        if key not in self._reconstructed:
            (graph, seconds), began = self.start(*key), process_time()
            few = subset(self.data.train, min(REPAIRED_ON, len(self.data.train)), seed=derive(seed, "repair"))
            reconstruct_(graph, self.graph, few, seed=seed)
            self._reconstructed[key] = graph, seconds + process_time() - began
        return self._reconstructed[key]

    def accuracies(self, graph: Graph) -> tuple[float, float]:
        """On the validation set and on the test set."""
        graph.module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        sets = (self.data.search, self.data.test)
        found = [accuracy(graph.module, examples, batch=BATCH) for examples in sets if examples is not None]
        return found[0], found[-1]

    def before(self, name: str, target: float, seed: int) -> tuple[float, float]:
        """The accuracies of a start, measured once."""
        key = (name, target, seed)
        if key not in self._measured:
            self._measured[key] = self.accuracies(self.start(*key)[0])
        return self._measured[key]

    def trials(self, cell: Cell) -> RateTrials:
        """What lr "auto" chooses for the cell, whatever rate that names."""
        graph, teacher = (
            self.start(cell.start, cell.target, cell.seed)[0],
            self.graph.module if cell.settings().distill else None,
        )
        held_out = subset(self.data.search, min(HELD_OUT, len(self.data.search)), seed=TRIALS_SEED)
        features = partial(paired_features, graph, self.graph)
        return find_rate(graph.module, self.data.train, cell.settings(), held_out=held_out, teacher=teacher, features=features)

    def rows(self, cell: Cell) -> Iterator[Row]:
        """Train once: the weights of the last step and their average are two rows."""
        graph, searched = self.start(cell.start, cell.target, cell.seed)
        settings, began = cell.settings(), process_time()
        teacher = self._teacher if settings.distill else None
        last: Mapping[str, Tensor] | None = None
        spared = self._teacher.spared
        with suppress(Diverged):  # which is a result
            features = partial(paired_features, graph, self.graph)
            last = train_(graph.module, self.data.train, settings, teacher=teacher, features=features).last
        seconds = process_time() - began + self._teacher.spared - spared  # that it would take alone
        before = self.before(cell.start, cell.target, cell.seed)
        for averaged in (True, False):
            if last is not None and not averaged:
                copy_into_(graph.module, last)
            after = (None, None) if last is None else self.accuracies(graph)
            yield Row(
                **asdict(cell),
                averaged=averaged,
                macs_removed=1 - cost(graph).macs / cost(self.graph).macs,
                validation_before=before[0],
                validation_after=after[0],
                test_before=before[1],
                test_after=after[1],
                test_dense=self.before(UNTOUCHED, 0.0, cell.seed)[1],
                search_seconds=searched,
                training_seconds=seconds,
                conditions=conditions().sentence(),
            )


def _share(value: float | None) -> str:
    return "diverged" if value is None else f"{value:.2%}"


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="+", default=["resnet20", "resnet56"], choices=sorted(NETWORKS))
    parser.add_argument("--targets", nargs="+", type=float, default=[0.3, 0.45])
    parser.add_argument("--starts", nargs="+", default=list(STARTS), help="methods of secateurs compare, each also with +whole")
    parser.add_argument("--losses", nargs="+", default=list(LOSSES), choices=LOSSES)
    parser.add_argument("--batchnorm", nargs="+", default=["live", "frozen"])
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--precision", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--examples", type=int, help="at most this number of each set: to try the command out")
    parser.add_argument("--out", type=Path, default=Path("lab/results/finetuning"))
    parser.add_argument("--runs", type=Path, default=Path("runs/finetuning"))
    parser.add_argument("--searches", action="store_true", help="only find the starts, and time that: OUT/searches.jsonl")
    parser.add_argument("--trials", action="store_true", help="only the trials by which lr auto chooses: OUT/trials.jsonl")
    given = parser.parse_args()
    path: Path = given.out / "rows.jsonl"
    known = {row.cell for row in read_rows(path, Row)}
    for network in given.networks:
        subject = Subject(network, given.runs, given.examples)
        for seed, target, start in product(given.seeds, given.targets, given.starts):
            share = 0.0 if start == UNTOUCHED else target
            if given.searches:
                found = subject.search(start, share, seed)
                append_row(given.out / "searches.jsonl", found)
                say(str(found))
                continue
            for loss, norm, rate in product(given.losses, given.batchnorm, given.rates):
                cell = Cell(network, start, share, loss, norm, rate, seed, given.epochs, given.precision, given.examples)
                if given.trials and rate == given.rates[0]:
                    found = subject.trials(cell)
                    append_row(given.out / "trials.jsonl", {**asdict(replace(cell, rate=found.lr)), "tried": found.tried})
                if cell in known or given.trials:
                    continue
                rows = list(subject.rows(cell))  # both or none: one training made them
                for row in rows:
                    append_row(path, asdict(row))
                    weights = "averaged" if row.averaged else "last"
                    say(
                        f"{network} {start} {share:.0%}, {loss}, BatchNorm {norm}, {rate:g}, {weights}: "
                        f"validation {row.validation_before:.2%} → {_share(row.validation_after)}, {row.training_seconds:.0f} s"
                    )
                known.add(cell)
    return 0


if __name__ == "__main__":
    sys.exit(main())
