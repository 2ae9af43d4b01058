"""What the default call makes of 17 networks, in seconds: `python -m benchmarks.defaults` (hours; networks one by one).

Each network is pruned by `sc.prune(model, train, val, max_drop=…, engine=…, test=…)` for PyTorch in eager mode and for ONNX
Runtime, and once by MACs (`engine="none"`) at the same drop. What comes out is saved, loaded again and timed afresh, all three
networks in turns, at batches of 1 and 64, and a second time in another way: the fastest call of each of some blocks, by the
clock. Ratios are of the dense network's time.

Rows are kept (benchmarks/results/defaults.jsonl), and not made twice; `--retry` makes those again that failed or took too
long. Parts of the work: `--networks tutorial lenet5`, `--engines torch`, `--minutes 30`, after which nothing new begins.
`--render` only writes lab/notes/performance.md. Run it alone on the machine, with one thread.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import monotonic, perf_counter, process_time
from typing import Any

import torch
from torch import nn

import secateurs as sc
from benchmarks.conditions import conditions, keep_pages
from benchmarks.defaults_networks import BATCH, RUNS, SUBJECTS, Loaders, NotInstalled, Subject
from benchmarks.render import PAGE, with_part
from secateurs import Graph
from secateurs._util.files import write_text
from secateurs.compaction import serialization
from secateurs.errors import SecateursError
from secateurs.export.engines import OnnxEngine
from secateurs.pruning.results import ChosenAllocation, MeasuredSpeed, Progress
from secateurs.speed.engines import Engine, TorchEngine
from secateurs.speed.timing import REPEATED, Load, SpeedUp, compare, speedup
from secateurs_lab.compare.rows import append_row, read_rows

ROWS = Path(__file__).parent / "results" / "defaults.jsonl"
COMMAND = "python -m benchmarks.defaults"
ENGINES = {"torch": TorchEngine, "onnxruntime": OnnxEngine}
MACS = "none"  # the engine of a choice by MACs
BATCHES = (1, BATCH)
BLOCKS = 9  # of the second way to measure
SHORTEST = 0.02  # seconds of a block
CAP = 60.0  # minutes that pruning one network may take
NO_TRAINING = ("cifar10", "digits")  # kinds that the wanted median is about


@dataclass(frozen=True)
class Speed:
    """How fast the chosen network is at a batch, how fast the one by MACs, and the first in comparison with the second."""

    batch: int
    dense_ms: float
    chosen: SpeedUp | None  # None: the dense network was returned
    blocks: float | None  # the ratio by the second way
    by_macs: SpeedUp | None  # None: there is no network by MACs
    over_macs: SpeedUp | None  # above 1: the choice by time is the faster one


@dataclass(frozen=True)
class Printed:
    """What the run itself said."""

    batch: int
    speed: SpeedUp
    predicted: float | None  # share of the dense network's time


@dataclass(frozen=True)
class Row:
    """One network for one engine."""

    network: str
    engine: str
    max_drop: float
    macs_removed: float = 0.0
    parameters_removed: float = 0.0
    before: float = 0.0  # on the test set
    after: float = 0.0
    examples: int = 0
    bound: float | None = None
    dense: bool = False  # the network came back as it was
    why: str = ""
    error: str = ""
    seconds: float = 0.0  # of the search
    processor_seconds: float = 0.0
    printed: tuple[Printed, ...] = ()
    speeds: tuple[Speed, ...] = ()
    conditions: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """What no second row is made of."""
        return self.network, self.engine

    @property
    def file(self) -> Path:
        """The pruned network."""
        return RUNS / f"{self.network}-{self.engine}.safetensors"


class OutOfTime(Exception):
    """The search has had its time."""


def rows() -> dict[tuple[str, str], Row]:
    """The rows by network and engine, the latest of each."""
    return {row.key: row for row in read_rows(ROWS, Row)}


# ---- measuring -------------------------------------------------------------------------------------------------------------


def pruned(subject: Subject, engine: str, model: nn.Module, loaders: Loaders, minutes: float) -> Row:
    """Prune by the default call, and save what comes out."""
    deadline, phase = monotonic() + 60 * minutes, ""

    def watch(progress: Progress) -> None:
        nonlocal phase
        phase = progress.phase
        if monotonic() > deadline:
            raise OutOfTime

    options: dict[str, Any] = {"engine": engine, **subject.options}
    began, worked = monotonic(), process_time()
    row = Row(subject.name, engine, subject.max_drop)
    try:
        result = sc.prune(
            *(model, loaders.train, loaders.val),
            **{"max_drop": subject.max_drop, "test": loaders.test, "callback": watch, "progress": False, **options},
        )
    except OutOfTime:
        return _with(row, error=f"more than {minutes:g} minutes, in phase {phase!r}")
    except SecateursError as error:
        return _with(row, error=f"{type(error).__name__}: {error}")
    seconds, worked = monotonic() - began, process_time() - worked
    result.save(row.file)
    notes = [record.note for record in result.records if isinstance(record, ChosenAllocation) and record.note]
    return _with(
        row,
        macs_removed=result.macs.removed,
        parameters_removed=result.parameters.removed,
        before=result.accuracy_before,
        after=result.accuracy_after,
        examples=result.test.count,
        bound=result.bound,
        dense=not any(step.removed for step in result.steps),
        why=notes[-1] if notes else result.stopped,
        seconds=round(seconds, 1),
        processor_seconds=round(worked, 1),
        printed=tuple(_printed(one) for one in (result.latency, *result.speeds) if one is not None),
    )


def _with(row: Row, **changes: Any) -> Row:
    return Row(**{**row.__dict__, "conditions": conditions().sentence(), **changes})


def _printed(one: MeasuredSpeed) -> Printed:
    share = one.predicted / one.original if one.predicted is not None and one.original else None
    return Printed(one.batch, one.ratio, share)


def timed(row: Row, dense: Graph, by_macs: Graph | None, chosen: Graph | None) -> tuple[Speed, ...]:
    """Time the networks in turns in the row's engine, afresh."""
    batches = sorted({*BATCHES, *(one.batch for one in row.printed if one.predicted is not None)})
    return tuple(_timed(ENGINES[row.engine](batch, 1), dense, by_macs, chosen) for batch in batches)


def _timed(engine: Engine, dense: Graph, by_macs: Graph | None, chosen: Graph | None) -> Speed:
    graphs = {"dense": dense, "chosen": chosen, "macs": by_macs}
    loads = {name: engine.network(graph) for name, graph in graphs.items() if graph is not None}
    if len(loads) == 1:
        return Speed(engine.batch, 1e3 * compare(list(loads.values()), threads=1).medians[0], None, None, None, None)
    found = compare(list(loads.values()), threads=1)
    speeds = dict(zip(list(loads)[1:], found.speedups, strict=True))
    over = None
    if len(speeds) == 2:
        over = speedup(found.seconds[2], found.seconds[1])
        over = SpeedUp(over.ratio, over.low / (1 + REPEATED), over.high * (1 + REPEATED), found.speedups[0].busy)
    elif "macs" in speeds:
        rival = speeds["macs"]  # the choice by time is the dense network
        over = SpeedUp(1 / rival.ratio, 1 / rival.high, 1 / rival.low, rival.busy)
    blocks = in_blocks(loads["dense"], loads["chosen"]) if "chosen" in loads else None
    return Speed(engine.batch, 1e3 * found.medians[0], speeds.get("chosen"), blocks, speeds.get("macs"), over)


def in_blocks(dense: Load, chosen: Load) -> float:
    """The ratio in another way: the fastest call of each block, by the clock; the median over pairs of blocks."""
    ratios = []
    for number in range(BLOCKS):
        pair = [dense(), chosen()]
        fastest = [0.0, 0.0]
        for which in (0, 1) if number % 2 else (1, 0):
            calls, began = list[float](), perf_counter()
            while len(calls) < 3 or (perf_counter() - began < SHORTEST and len(calls) < 1000):
                start = perf_counter()
                pair[which]()
                calls.append(perf_counter() - start)
            fastest[which] = min(calls[1:])
        ratios.append(fastest[0] / fastest[1])
    return median(ratios)


def make(subject: Subject, engines: Sequence[str], minutes: float, until: float, *, retry: bool) -> None:
    """Make the rows of a network that are missing, the one by MACs first."""

    known = rows()

    def missing(engine: str) -> bool:
        row = known.get((subject.name, engine))
        return row is None or (retry and bool(row.error))

    todo = [engine for engine in engines if missing(engine)]
    if not todo:
        return
    rival = known.get((subject.name, MACS))
    if missing(MACS) or (rival is not None and not rival.error and not rival.file.exists()):
        todo.insert(0, MACS)  # compared with, from its file
    model, loaders = subject.ready()
    inputs = next(iter(loaders.val))[0][:2]
    for engine in todo:
        if monotonic() > until:
            return
        say(f"{subject.name}, {engine}: pruning")
        with torch.random.fork_rng():
            row = pruned(subject, engine, model, loaders, minutes)
        if engine != MACS and not row.error:
            rival = rows().get((subject.name, MACS))
            there = rival is not None and not rival.error and rival.macs_removed > 0 and rival.file.exists()
            by_macs = serialization.load(subject.build(), rival.file) if rival is not None and there else None
            chosen = None if row.dense else serialization.load(subject.build(), row.file)
            row = _with(row, speeds=timed(row, sc.trace(model, inputs), by_macs, chosen))
        append_row(ROWS, asdict(row))
        say(f"{subject.name}, {engine}: {row.error or f'{row.macs_removed:.0%} of the MACs gone in {row.seconds:.0f} s'}")
        for speed in row.speeds:
            say(f"  batch {speed.batch}: {speed}")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---- the page --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wanted:
    """A figure of the table, and whether it is what is wanted."""

    what: str
    now: str
    wanted: str
    reached: bool | None  # None: not measured


def wanted(found: Sequence[Row]) -> list[Wanted]:
    """The figures that this benchmark is there for, of rows that did not fail."""
    timed = [row for row in found if row.engine != MACS and not row.error]
    cells = [(row, speed) for row in timed for speed in row.speeds if speed.batch in BATCHES]
    figures = []

    behind = [f"{row.network} ({row.engine}, batch {s.batch})" for row, s in cells if s.over_macs and s.over_macs.high < 1]
    compared = sum(speed.over_macs is not None for _, speed in cells)
    figures.append(_figure("the choice by MACs is faster than the choice by time, at the same drop", behind, compared, "cells"))

    slower = [f"{row.network} ({row.engine}, batch {s.batch})" for row, s in cells if s.chosen and s.chosen.high < 1]
    figures.append(_figure("slower than dense", slower, len(cells), "cells"))

    usual = [
        1.0 if speed.chosen is None else speed.chosen.ratio
        for row, speed in cells
        if speed.batch == BATCH and row.max_drop == 0.01 and SUBJECTS[row.network].kind in NO_TRAINING
    ]
    what = "median speed at the loader's batch, max_drop 0.01, CIFAR-10 and digits, no training"
    middle = median(usual) if usual else None
    now = "–" if middle is None else f"{middle:.2f}x ({len(usual)} cells)"
    figures.append(Wanted(what, now, "≥ 1.4x", None if middle is None else middle >= 1.4))

    deep = {speed.batch: speed.chosen for row, speed in cells if row.key == ("resnet56", "onnxruntime")}
    ratios = [1.0 if deep[batch] is None else deep[batch].ratio for batch in BATCHES if batch in deep]
    drops = [row.before - row.after for row in timed if row.network == "resnet56" and row.engine == "onnxruntime"]
    now = f"{' / '.join(f'{ratio:.2f}x' for ratio in ratios)} at {100 * drops[0]:.2f} points" if ratios else "–"
    what = "public ResNet-56, one point of test accuracy, ONNX Runtime, batch 1 / 64"
    figures.append(Wanted(what, now, "≥ 1.6x / ≥ 1.6x", all(r >= 1.6 for r in ratios) and drops[0] <= 0.01 if ratios else None))

    missed = {f"{row.network} ({row.engine})": miss for row in timed if (miss := missed_by(row)) is not None}
    worst = max(missed, key=lambda name: missed[name], default="")
    now = f"at most {missed[worst]:.0%} ({worst}), median {median(missed.values()):.0%}" if missed else "–"
    figures.append(Wanted("predicted against measured time", now, "≤ 7 %", missed[worst] <= 0.07 if missed else None))

    said = [held for row in timed for held in printed_holds(row)]
    now = f"{sum(said)} of {len(said)}" if said else "–"
    what = "printed intervals that hold what was measured afresh"
    figures.append(Wanted(what, now, "≥ 90 %", sum(said) >= 0.9 * len(said) if said else None))
    return figures


def _figure(what: str, named: Sequence[str], of: int, noun: str) -> Wanted:
    shown = f": {', '.join(named)}" if named else ""
    return Wanted(what, f"{len(named)} of {of} {noun}{shown}" if of else "–", "0", not named if of else None)


def missed_by(row: Row) -> float | None:
    """By how much the predicted time of the result is off what was measured afresh, as a share of the latter."""
    chosen = {speed.batch: speed.chosen for speed in row.speeds}
    for one in row.printed:
        measured = chosen.get(one.batch)
        if one.predicted is not None and measured is not None:
            return abs(one.predicted * measured.ratio - 1)
    return None


def printed_holds(row: Row) -> list[bool]:
    """Whether what the run printed holds what was measured afresh, at each batch; saying that it is not known is right."""
    chosen = {speed.batch: speed.chosen for speed in row.speeds}
    both = [(one.speed, chosen.get(one.batch)) for one in row.printed]
    return [not one.known or one.low <= measured.ratio <= one.high for one, measured in both if measured is not None]


def page(found: Sequence[Row]) -> str:
    """The part of the page."""
    order = {name: place for place, name in enumerate(SUBJECTS)}
    found = sorted(found, key=lambda row: (order.get(row.network, len(order)), row.engine))
    lines = ["| figure | now | wanted | |", "| --- | --- | --- | --- |"]
    marks = {True: "reached", False: "**not reached**", None: "not measured"}
    lines += [f"| {one.what} | {one.now} | {one.wanted} | {marks[one.reached]} |" for one in wanted(found)]
    lines += [
        "",
        "Ratios to the dense network, timed afresh, one thread, 95 % intervals; in brackets those of the choice by MACs at the "
        f"same drop. Loaders give batches of {BATCH}. *Search*: seconds of processor time, on one core, tables of "
        "layers that were not known yet included. *Predicted*: how far the predicted time "
        "of the result is off. Networks at 224 pixels have random weights: their accuracy is how much of the variance of the "
        "dense network's outputs is kept, and a tenth may go.",
        "",
        "| network | data | engine | MACs gone | accuracy | batch 1 | batch 64 | predicted | search |",
        "| --- | --- | --- | ---: | --- | --- | --- | ---: | ---: |",
    ]
    notes = []
    for row in found:
        if row.engine == MACS:
            continue
        where = f"| {row.network} | {SUBJECTS[row.network].kind} | {row.engine} "
        if row.error:
            lines.append(f"{where}| – | – | – | – | – | – |")
            notes.append(f"- {row.network}, {row.engine}: {row.error}.")
            continue
        speeds, miss = {speed.batch: speed for speed in row.speeds}, missed_by(row)
        cells = " | ".join(_cell(speeds.get(batch)) for batch in BATCHES)
        off = "–" if miss is None else f"{miss:.0%}"
        accuracy = f"{100 * row.before:.2f} → {100 * row.after:.2f} %"
        lines.append(f"{where}| {row.macs_removed:.0%} | {accuracy} | {cells} | {off} | {row.processor_seconds:.0f} |")
        if row.dense:
            notes.append(f"- {row.network}, {row.engine}: the dense network was returned: {row.why}.")
    wheres = dict.fromkeys(f"Measured on: {row.conditions}." for row in found)
    return "\n".join([*lines, "", *notes, *([""] if notes else []), *wheres])


def _cell(speed: Speed | None) -> str:
    if speed is None:
        return "–"
    rival = f" [{speed.by_macs.ratio:.2f}]" if speed.by_macs is not None else ""
    if speed.chosen is None:
        return f"dense{rival}"
    return f"{speed.chosen.ratio:.2f} ({speed.chosen.low:.2f} to {speed.chosen.high:.2f}){rival}"


def main() -> int:
    """Make the rows that are missing, write the page; 1 where a figure is not what is wanted."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--networks", nargs="+", default=list(SUBJECTS), choices=list(SUBJECTS), metavar="NAME")
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=list(ENGINES))
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin nothing new after so many")
    parser.add_argument("--cap", type=float, default=CAP, help="minutes that pruning one network may take")
    parser.add_argument("--retry", action="store_true", help="make rows again that failed or took too long")
    parser.add_argument("--render", action="store_true", help="only write the page")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_pages()
    until = monotonic() + 60 * options.minutes
    for name in SUBJECTS if not options.render else ():
        if name in options.networks and monotonic() < until:
            try:
                make(SUBJECTS[name], options.engines, options.cap, until, retry=options.retry)
            except NotInstalled as error:
                say(f"{name} is left out: {error}")
    found = list(rows().values())
    write_text(PAGE, with_part(PAGE.read_text(), COMMAND, page(found)))
    for one in wanted(found):
        print(f"{one.what}: {one.now} (wanted {one.wanted})")
    return int(any(one.reached is False for one in wanted(found)))


if __name__ == "__main__":
    sys.exit(main())
