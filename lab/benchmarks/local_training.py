"""Cuts chosen in view of the training that follows: `python -m benchmarks.local_training` (about half an hour of a core).

The filters and their order are those of `obs+refit`; what differs is how many go at each site:

- `plain`: by the curves of that method, losses without training;
- `local`: the curves of the sites with most MACs are brought to losses measured after a short training (reconstruction of all
  layers) of the network with this site alone cut; those of the others fall as these do in the median;
- `power P`: losses to the power of P: training removes more of a large loss than of a small one, or less;
- `uniform`: the same share at every site (`obs:uniform+refit`).

Then one epoch of distillation as in `benchmarks.finetuning`. Every choice, target and seed is a row of
lab/results/local-training/rows.jsonl, every site that was trained one of sites.jsonl there: give the same command again after a
crash and it goes on. `--render` writes the table to lab/notes/training.md, and trains nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from statistics import median
from time import process_time

from benchmarks.conditions import conditions
from benchmarks.finetuning import BATCH, NETWORKS, PAGE, Cell, Subject, say
from benchmarks.render import with_part
from secateurs import Graph, cost
from secateurs._util.files import write_text
from secateurs.data import Examples
from secateurs.graph.masking import copied
from secateurs.metrics import divergence, loss, with_answers
from secateurs.pruning.cuts import CutsTogether
from secateurs.pruning.results import SiteCurve
from secateurs.repair import reconstruct_
from secateurs.selection.allocation import calibrated
from secateurs.training import train_
from secateurs_lab.compare.rows import append_row, read_rows
from secateurs_lab.methods import Task
from secateurs_lab.methods.base import MethodRun
from secateurs_lab.methods.one_shot import Choice, Counts, Curves, Reached, along_frontier, cut_once, loss_profile

METHOD, UNIFORM = "obs+refit", "obs:uniform+refit"
EIGHTHS = (2, 5)  # of the filters that are removed where a curve is brought to what is measured, as without training
PASSES = 2  # over the images of the repair, in batches of 64: 32 steps of Adam. So few of SGD move nothing, or upwards
COMMAND = "python -m benchmarks.local_training"


@dataclass(frozen=True)
class Case:
    """One way to choose the cuts."""

    network: str
    choice: str
    target: float  # share of the MACs that is to go
    rate: float
    seed: int
    examples: int | None  # of each set; None: all

    @property
    def cell(self) -> Cell:
        """The training that follows."""
        return Cell(
            *(self.network, self.choice, self.target, "distillation", "live", self.rate),
            *(self.seed, 1, "bfloat16", self.examples),
        )


@dataclass(frozen=True)
class Row(Case):
    """What came out. Accuracies are fractions, divergences those of the validation images from the untouched network."""

    macs_removed: float
    validation_before: float
    validation_after: float
    divergence_before: float
    divergence_after: float
    test_before: float
    test_after: float
    local_seconds: float  # of one core: what the choice takes beside the search of `obs+refit`
    training_seconds: float  # of one core
    conditions: str

    @property
    def case(self) -> Case:
        return Case(**{name: getattr(self, name) for name in Case.__dataclass_fields__})


@dataclass(frozen=True)
class TrainedSite:
    """What a short training leaves of the loss of a cut at one site."""

    network: str
    seed: int
    examples: int | None
    site: str
    removed: tuple[int, ...]
    repaired: tuple[float, ...]  # increase of the held-out divergence, before the training
    trained: tuple[float, ...]  # and after it
    seconds: float  # of one core


class ChosenSubject(Subject):
    """The same network, with cuts chosen in view of training."""

    def __init__(self, network: str, runs: Path, examples: int | None, sites: Path) -> None:
        super().__init__(network, runs, examples)
        self.sites = sites  # the file of what short trainings left

    @cached_property
    def answered(self) -> Examples:
        """The validation images with the untouched network's answers."""
        return with_answers(self.data.search, self.graph.module, batch=BATCH)

    def chosen(self, case: Case) -> Graph:
        """A fresh copy of the network with the cuts made and repaired; kept in its folder."""
        if case.choice in ("plain", "uniform"):
            return self.start(METHOD if case.choice == "plain" else UNIFORM, case.target, case.seed)[0]

        def series(run: MethodRun, curves: Curves) -> tuple[Sequence[Counts], Callable[[Reached], str]]:
            if case.choice == "local":
                return along_frontier(run, self.trained_curves(run, curves))
            power = float(case.choice.removeprefix("power "))
            return along_frontier(run, {name: _mapped(curve, lambda rise: rise**power) for name, curve in curves.items()})

        folder = self.runs / f"{self.network}-{METHOD}-{case.choice}-{case.target:g}-{case.seed}-{self.examples or 'all'}"
        store = self.runs / f"{self.network}.sqlite"  # curves without training are those of METHOD, whose name is a key there
        task = Task(self.graph, self.data, case.target, seed=case.seed, folder=folder, store=store)
        choice = Choice(loss_profile, series)
        return copied(cut_once(task, name=METHOD, criterion="obs", choice=choice, repair="every-layer").graph)

    def trained_curves(self, run: MethodRun, curves: Curves) -> Curves:
        """The curves as they are after a short training."""
        by_macs = sorted(curves, key=lambda name: -curves[name].curve.saved[-1])[: -(-len(curves) // 2)]
        found = {name: self.trained_site(run, curves, name) for name in by_macs}
        left = median(
            after / before for site in found.values() for before, after in zip(site.repaired, site.trained, strict=True)
        )
        return {name: _brought(curve, found.get(name), left) for name, curve in curves.items()}

    def trained_site(self, run: MethodRun, curves: Curves, name: str) -> TrainedSite:
        """Cut one site alone, repair it, train the network for some steps; measured once."""
        seed = run.task.seed
        for row in read_rows(self.sites, TrainedSite):
            if (row.network, row.seed, row.examples, row.site) == (self.network, seed, self.examples, name):
                return row
        began, context, channels = process_time(), run.context, len(curves[name].original)
        start = context.loss(self.graph, context.held_out)
        removed, repaired, trained = tuple(round(channels * part / 8) for part in EIGHTHS), list[float](), list[float]()
        for count in removed:
            smaller = CutsTogether(context, curves, {name: count}).up_to(name)
            repaired.append(context.loss(smaller, context.held_out) - start)
            reconstruct_(smaller, self.graph, context.repair_examples, passes=PASSES, seed=seed)
            trained.append(context.loss(smaller, context.held_out) - start)
        seconds = process_time() - began
        found = TrainedSite(self.network, seed, self.examples, name, removed, tuple(repaired), tuple(trained), seconds)
        append_row(self.sites, asdict(found))
        say(f"{name} without {removed} filters: {_shown(repaired)} → {_shown(trained)}, {seconds:.0f} s")
        return found

    def run(self, case: Case) -> Row:
        """Choose the cuts, make them, train."""
        graph = self.chosen(case)
        before, lost = self.accuracies(graph), self.divergence(graph)
        began = process_time()
        train_(graph.module, self.data.train, case.cell.settings(), teacher=self.graph.module)
        seconds, after = process_time() - began, self.accuracies(graph)
        known = (case.network, case.seed, case.examples)
        short = [row for row in read_rows(self.sites, TrainedSite) if (row.network, row.seed, row.examples) == known]
        return Row(
            **asdict(case),
            macs_removed=1 - cost(graph).macs / cost(self.graph).macs,
            validation_before=before[0],
            validation_after=after[0],
            divergence_before=lost,
            divergence_after=self.divergence(graph),
            test_before=before[1],
            test_after=after[1],
            local_seconds=sum(row.seconds for row in short) if case.choice == "local" else 0.0,
            training_seconds=seconds,
            conditions=conditions().sentence(),
        )

    def divergence(self, graph: Graph) -> float:
        """Mean over the validation images, from the untouched network."""
        return loss(graph.module, self.answered, loss_fn=divergence, batch=BATCH)


def _mapped(curve: SiteCurve, of: Callable[[float], float]) -> SiteCurve:
    """The curve with another increase of the loss."""
    start = curve.curve.loss[0]
    return replace(curve, curve=replace(curve.curve, loss=tuple(of(max(each - start, 0.0)) for each in curve.curve.loss)))


def _brought(curve: SiteCurve, site: TrainedSite | None, left: float) -> SiteCurve:
    """The curve brought to what a short training left; without one, `left` of it, as of a folded branch."""
    rises = () if site is None else calibrated(curve.ranking.predicted, dict(zip(site.removed, site.trained, strict=True)))
    scaled = _mapped(curve, lambda rise: left * rise)
    if not rises:
        return scaled
    folded = len(curve.original)
    pairs = zip(scaled.curve.removed, scaled.curve.loss, strict=True)
    return replace(scaled, curve=replace(scaled.curve, loss=tuple(old if m == folded else rises[m] for m, old in pairs)))


def _shown(rises: Sequence[float]) -> str:
    return ", ".join(f"{rise:.4f}" for rise in rises)


def table(rows: Sequence[Row]) -> str:
    """Accuracy and divergence by choice, before and after the epoch, as Markdown."""
    head = "| network | MACs ↓ | choice | seed | validation, % | divergence | test, % | beside the search, core s |"
    lines = [head, "| --- | --- | --- | --- | --- | --- | --- | --- |"]
    order = ("plain", "local", "uniform")
    known = {row.choice: (order.index(row.choice) if row.choice in order else len(order), row.choice) for row in rows}
    for row in sorted(rows, key=lambda row: (row.network, row.target, row.seed, known[row.choice])):
        network = row.network + (f", {row.examples} images" if row.examples else "")
        columns = [network, f"{row.macs_removed:.1%}", row.choice, str(row.seed)]
        columns += [f"{100 * row.validation_before:.2f} → {100 * row.validation_after:.2f}"]
        columns += [f"{row.divergence_before:.3f} → {row.divergence_after:.3f}"]
        columns += [f"{100 * row.test_before:.2f} → {100 * row.test_after:.2f}", f"{row.local_seconds:.0f}"]
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="resnet20", choices=sorted(NETWORKS))
    parser.add_argument("--targets", nargs="+", type=float, default=[0.45, 0.3])
    parser.add_argument("--choices", nargs="+", default=["plain", "local", "uniform", "power 0.5", "power 0.7"])
    parser.add_argument("--rate", type=float, default=0.01)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--examples", type=int, help="at most this number of each set: to try the command out")
    parser.add_argument("--out", type=Path, default=Path("lab/results/local-training"))
    parser.add_argument("--runs", type=Path, default=Path("runs/finetuning"))
    parser.add_argument("--render", action="store_true", help=f"only write the table to {PAGE.name}")
    given = parser.parse_args()
    path: Path = given.out / "rows.jsonl"
    known = {row.case for row in read_rows(path, Row)}
    subject = ChosenSubject(given.network, given.runs, given.examples, given.out / "sites.jsonl")
    for seed, target, choice in () if given.render else product(given.seeds, given.targets, given.choices):
        case = Case(given.network, choice, target, given.rate, seed, given.examples)
        if case in known:
            continue
        row = subject.run(case)
        append_row(path, asdict(row))
        say(
            f"{choice}, {target:.0%}, seed {seed}: validation {row.validation_before:.2%} → {row.validation_after:.2%}, "
            f"{row.training_seconds:.0f} s of training"
        )
    text = table(read_rows(path, Row))
    if given.render:
        write_text(PAGE, with_part(PAGE.read_text(), COMMAND, text.rstrip()))
    say("\n" + text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
