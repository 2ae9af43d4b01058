"""How far to trust a printed speed on a busy machine: `python -m benchmarks.timing` (a minute or two for each case).

A dense and a narrower network are compared as results are: first with nothing beside them, as the reference, then 40 times
with one to eight busy processes beside, which compute or move memory, on the same core and on others. A comparison is right
if its interval holds the reference, or if it says that the machine is too busy to know.

Rows are kept (benchmarks/results/timing.jsonl); cases that are there are not measured again but with `--again`. `--render`
only writes lab/notes/performance.md. Run it on one core, with one thread, with nothing else on the machine: `--engines torch
--batches 1` is one case.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import monotonic, sleep

import torch

from benchmarks.conditions import conditions
from benchmarks.render import PAGE, with_part
from secateurs import Graph, compact, find_sites, trace
from secateurs._util.files import write_text
from secateurs.export.engines import OnnxEngine
from secateurs.models import build, example_input
from secateurs.speed.engines import TorchEngine
from secateurs.speed.timing import SpeedUp, compare
from secateurs_lab.compare.rows import append_row, read_rows

ROWS = Path(__file__).parent / "results" / "timing.jsonl"
COMMAND = "python -m benchmarks.timing"
ENGINES = {"torch": TorchEngine, "onnxruntime": OnnxEngine}
BATCHES = (1, 64)
COMPARISONS = 40
MOST_BESIDE = 8  # busy processes
REFERENCES = 5  # comparisons with nothing beside, of which the median is the figure to hold; their spread is shown
WANTED = 0.9

BUSY = {
    "computes": "a = numpy.random.rand(96, 96)\nwhile True: a @ a",
    "moves memory": "a = numpy.ones(2**24); b = a.copy()\nwhile True: b[:] = a",
}
"""What a busy process does for ever, by kind: it stays within its caches, or empties those of all."""


@dataclass(frozen=True)
class Beside:
    """A busy process."""

    kind: str
    core: int


@dataclass(frozen=True)
class Comparison:
    """What was said of the pair, with so many busy processes beside it."""

    processes: int
    moving_memory: int
    on_its_core: int
    ratio: float
    low: float
    high: float
    busy: str
    seconds: float

    @property
    def speedup(self) -> SpeedUp:
        """As the product would print it."""
        return SpeedUp(self.ratio, self.low, self.high, self.busy)

    def right(self, reference: float) -> bool:
        """Whether the interval holds the figure, or the comparison says that it does not know."""
        return not self.speedup.known or self.low <= reference <= self.high


@dataclass(frozen=True)
class Row:
    """One engine at one batch."""

    engine: str
    batch: int
    milliseconds: tuple[float, float]  # dense, narrower
    references: tuple[float, ...]  # ratios with nothing beside
    comparisons: tuple[Comparison, ...]
    disturbed: str  # what others used while the reference was taken, if much
    conditions: str

    @property
    def case(self) -> tuple[str, int]:
        """What a row is not made twice of."""
        return self.engine, self.batch

    @property
    def reference(self) -> float:
        """The figure of an idle machine."""
        return median(self.references)

    @property
    def coverage(self) -> float:
        """Share of the comparisons that were right."""
        return sum(one.right(self.reference) for one in self.comparisons) / len(self.comparisons)

    @property
    def too_busy(self) -> float:
        """Share of the comparisons that said they do not know."""
        return sum(not one.speedup.known for one in self.comparisons) / len(self.comparisons)


def networks() -> tuple[Graph, Graph]:
    """ResNet-8 with random weights, whole and with half of its filters."""
    graph = trace(build("resnet8").eval(), example_input("resnet8"))
    generator, masks = torch.Generator().manual_seed(0), {}
    for site in find_sites(graph):
        masks[site.name] = torch.zeros(site.channels, dtype=torch.bool)
        masks[site.name][torch.randperm(site.channels, generator=generator)[: site.channels // 2]] = True
    return graph, compact(graph, masks)


@contextmanager
def running(beside: Sequence[Beside]) -> Iterator[None]:
    """Busy processes inside the block, ended behind it."""
    started = []
    try:
        for one in beside:
            code = f"import os, numpy\nos.sched_setaffinity(0, {{{one.core}}})\nprint(flush=True)\n{BUSY[one.kind]}"
            started.append(subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE))
        for process in started:
            assert process.stdout is not None
            process.stdout.readline()  # it has begun
        yield
    finally:
        for process in started:
            process.kill()
            process.communicate()


def mixture(number: int, own: int, cores: Sequence[int]) -> list[Beside]:
    """The processes beside comparison `number`: one to eight in turn, drawn with a seed, half of them on its own core."""
    drawn = random.Random(number)
    others = [core for core in cores if core != own] or [own]
    return [
        Beside(drawn.choice(list(BUSY)), own if drawn.random() < 0.5 else drawn.choice(others))
        for _ in range(1 + number % MOST_BESIDE)
    ]


def compared(engine: str, batch: int, pair: Sequence[Graph], beside: Sequence[Beside], own: int) -> tuple[Comparison, float]:
    """One comparison, and the seconds of the dense network."""
    runs = ENGINES[engine](batch, 1)
    loads = [runs.network(graph) for graph in pair]
    with running(beside):
        began = monotonic()
        found = compare(loads, threads=1)
        seconds = monotonic() - began
    (speed,) = found.speedups
    moving, here = sum(one.kind == "moves memory" for one in beside), sum(one.core == own for one in beside)
    figures = (speed.ratio, speed.low, speed.high, speed.busy, round(seconds, 2))
    return Comparison(len(beside), moving, here, *figures), found.medians[0]


def measure(engine: str, batch: int, count: int, say: Callable[[str], None]) -> Row:
    """All comparisons of a case, on one core; the references lie before, between and behind them."""
    own = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {own})
    pair, cores = networks(), range(os.cpu_count() or 1)
    references, dense, found, disturbed = list[float](), list[float](), list[Comparison](), ""
    where = conditions().sentence()

    def reference() -> None:
        nonlocal disturbed
        sleep(0.5)  # what the busy processes leave behind
        one, seconds = compared(engine, batch, pair, (), own)
        references.append(one.ratio)
        dense.append(seconds)
        disturbed = disturbed or one.busy
        say(f"{engine}, batch {batch}, nothing beside: {one.speedup.summary()} {one.busy}")

    for number in range(count):
        if number % -(-count // (REFERENCES - 1)) == 0:
            reference()
        one, _ = compared(engine, batch, pair, mixture(number, own, cores), own)
        found.append(one)
        say(f"{number + 1} of {count}, {one.processes} beside, {one.on_its_core} here: {one.speedup.summary()}")
    reference()
    both = (1e3 * median(dense), 1e3 * median(dense) / median(references))
    return Row(engine, batch, both, tuple(references), tuple(found), disturbed, where)


def rows() -> list[Row]:
    """Of each case the latest row."""
    return list({row.case: row for row in read_rows(ROWS, Row)}.values())


def page(found: Sequence[Row]) -> str:
    """The part of the page."""
    lines = [
        f"ResNet-8 whole and with half of its filters, compared {COMPARISONS} times with one to {MOST_BESIDE} busy processes "
        "beside (computing, or moving memory; half of them on the same core), as results are. *Right*: the interval holds the "
        f"figure of an idle machine (the median of {REFERENCES} comparisons with nothing beside, their range in brackets), or "
        "the comparison says that it does not know; *not known*: the share that says so. *Width*: median of high over low of "
        "the others.",
        "",
        "| engine | batch | ms, dense → narrower | idle machine | right | not known | width |",
        "| --- | ---: | --- | --- | ---: | ---: | ---: |",
    ]
    for row in found:
        widths = [one.high / one.low for one in row.comparisons if one.speedup.known]
        lines.append(
            f"| {row.engine} | {row.batch} | {row.milliseconds[0]:.2f} → {row.milliseconds[1]:.2f} | {row.reference:.2f}x "
            f"({min(row.references):.2f} to {max(row.references):.2f}) | {row.coverage:.0%} | {row.too_busy:.0%} | "
            f"{f'{median(widths):.2f}' if widths else '–'} |"
        )
    wheres = dict.fromkeys(
        f"Measured on: {row.conditions}{f'; while the reference was taken {row.disturbed}' * bool(row.disturbed)}."
        for row in found
    )
    return "\n".join([*lines, "", *wheres])


def main() -> int:
    """Measure what is missing, write the page; 1 where a case is right less often than wanted."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=list(ENGINES))
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--comparisons", type=int, default=COMPARISONS)
    parser.add_argument("--again", action="store_true", help="measure cases that have a row once more")
    parser.add_argument("--render", action="store_true", help="only write the page")
    options = parser.parse_args()
    torch.set_num_threads(1)

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    for engine, batch in ((engine, batch) for engine in options.engines for batch in options.batches):
        if options.render or (not options.again and (engine, batch) in {row.case for row in rows()}):
            continue
        row = measure(engine, batch, options.comparisons, say)
        append_row(ROWS, asdict(row))
        say(f"{engine}, batch {batch}: right {row.coverage:.0%}, not known {row.too_busy:.0%} {row.disturbed}")
    found = rows()
    write_text(PAGE, with_part(PAGE.read_text(), COMMAND, page(found)))
    return int(any(row.coverage < WANTED for row in found))


if __name__ == "__main__":
    sys.exit(main())
