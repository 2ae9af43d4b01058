"""What each method leaves of the public CIFAR-10 ResNets, without training: `python -m benchmarks.quality` (hours).

Every site's curve is measured once for each method, cuts are divided over the network by divergence per MAC, and networks
for a ladder of MAC targets are measured on the whole search half and on the test half, which chooses nothing. Rows go to
lab/benchmarks/results/quality.jsonl one by one: with `--resume` a killed run goes on, and processes with other seeds may run
beside it. `--rivals` measures what Torch-Pruning makes of the same network. `--render` only writes tables of
lab/notes/quality.md. `--all`, which is `make bench-quality`, measures whatever the page shows and has no row yet, two
processes side by side; with the variable QUALITY_RESULTS=FOLDER everything anew, into that folder.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from statistics import mean
from time import perf_counter, sleep

import torch

from benchmarks.quality_ladder import NO_LESSON, Lesson, Seeded, climb, untouched
from benchmarks.quality_page import render_page
from benchmarks.quality_rival import RIVALS, measure_rivals
from benchmarks.quality_setup import METHODS, Key, Method, Row, Subject, read_rows

MODELS = ("resnet20", "resnet56")
TARGETS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)
_TRAINED = ("--models", "resnet20", "--seeds", "0", "--finetune", "1", "--targets", "0.3")
PARTS = (
    *(("--models", "resnet20", "--seeds", str(seed)) for seed in range(3)),
    ("--models", "resnet56", "--seeds", "0", "--methods", "l1", "fpgm", "ensemble", "portfolio+repair", "portfolio+refit"),
    (*_TRAINED, "--rate", "0.01", "--methods", "l1", "fpgm", "taylor", "ensemble", "l1+repair", "portfolio+refit"),
    (*_TRAINED, "--rate", "0.001", "--methods", "l1", "fpgm", "l1+repair", "portfolio+refit"),
)
"""What the page shows, each part on one core; the fine-tuning comes last, as it starts from what the first has measured."""

Unit = tuple[str, int, Method]


@dataclass
class Clock:
    """How long is left: what is done tells of what is like it."""

    left: list[Unit]
    taken: dict[tuple[str, str], list[float]] = field(default_factory=dict)

    def done(self, unit: Unit, seconds: float) -> None:
        self.left.remove(unit)
        self.taken.setdefault(_kind(unit), []).append(seconds)

    def sentence(self) -> str:
        if not self.taken:
            return "time left unknown"
        overall = mean(seconds for many in self.taken.values() for seconds in many)
        rest = sum(mean(self.taken.get(_kind(unit), [overall])) for unit in self.left)
        return f"about {rest / 60:.0f} min left"


def _kind(unit: Unit) -> tuple[str, str]:
    model, _, method = unit
    return model, method.repair


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def measure(units: Sequence[Unit], targets: Sequence[float], lesson: Lesson, *, resume: bool) -> None:
    """All methods on all networks and seeds; one line for every network that was made."""
    clock, known = Clock(list(units)), {row.key: row for row in read_rows()} if resume else {}
    for (model, seed), methods in _by_network(units):
        seeded = Seeded(Subject(model), seed, say)
        if lesson.epochs:
            _follow(untouched(seeded, known, lesson), known, clock)
        for method in methods:
            began = perf_counter()
            _follow(climb(seeded, method, targets, known, lesson), known, clock)
            clock.done((model, seed, method), perf_counter() - began)


def _follow(rows: Iterator[Row], known: dict[Key, Row], clock: Clock) -> None:
    for row in rows:
        known[row.key] = row
        say(f"{described(row)}; {clock.sentence()}")


def described(row: Row) -> str:
    trained = f", {row.finetune} epochs from {row.rate:g}" if row.finetune else ""
    names = {(method.criterion, method.repair): name for name, method in METHODS.items()}
    method = names.get((row.method, row.repair), row.method)  # the untouched network has no method
    return (
        f"{row.model} seed {row.seed} {method}{trained}: {row.macs_removed:.1%} of the MACs, "
        f"search {row.search_after:.2%} ({-100 * row.search_drop:+.2f}), test {row.test_after:.2%} "
        f"({-100 * row.test_drop:+.2f}), {row.seconds:.0f} s"
    )


def _by_network(units: Sequence[Unit]) -> Iterator[tuple[tuple[str, int], list[Method]]]:
    for key in dict.fromkeys((model, seed) for model, seed, _ in units):
        yield key, [method for model, seed, method in units if (model, seed) == key]


def _side_by_side(parts: Sequence[Sequence[str]], jobs: int) -> int:
    """This command with the arguments of each part, so many at a time; rows go to the same file. The worst exit code."""
    waiting, started = list(parts), list[subprocess.Popen[bytes]]()
    while waiting or any(process.poll() is None for process in started):
        while waiting and sum(process.poll() is None for process in started) < jobs:
            started.append(subprocess.Popen([sys.executable, "-m", "benchmarks.quality", *waiting.pop(0)]))
        sleep(1)
    return max(abs(process.wait()) for process in started)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=MODELS[:1], choices=MODELS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS), metavar="METHOD")
    parser.add_argument("--targets", nargs="+", type=float, default=TARGETS, help="shares of the MACs that are to go")
    parser.add_argument("--finetune", type=int, default=0, metavar="EPOCHS", help="also train every network for so long")
    parser.add_argument("--rate", type=float, default=0.01, help="where the learning rate of that training starts")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--resume", action="store_true", help="measure only what has no row yet")
    parser.add_argument("--rivals", action="store_true", help="measure only what Torch-Pruning makes of ResNet-20")
    parser.add_argument("--all", action="store_true", help="measure whatever the page shows and has no row yet")
    parser.add_argument("--render", action="store_true", help="only write the tables and the figure")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    code = 0
    if options.all:
        rivals = () if RIVALS.exists() else (("--rivals",),)
        code = _side_by_side([*((*part, "--resume") for part in PARTS), *rivals], jobs=2)
    elif options.rivals:
        measure_rivals()
    elif not options.render:
        units = [(m, s, METHODS[name]) for m, s, name in product(options.models, options.seeds, options.methods)]
        lesson = Lesson(options.finetune, options.rate) if options.finetune else NO_LESSON
        measure(units, options.targets, lesson, resume=options.resume)
    say(render_page())
    return code


if __name__ == "__main__":
    sys.exit(main())
