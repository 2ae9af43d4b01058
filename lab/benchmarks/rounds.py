"""Cut, repair and train in several rounds under one total of training: `python -m benchmarks.rounds` (about an hour a core).

With k rounds each removes the same share of the MACs that are left, by the same method, and gets an equal part of the optimiser
steps, its own schedule from start to end; the teacher is always the untouched network. Every k and seed is a row of
lab/results/rounds/rows.jsonl: give the same command again after a crash and it goes on. `--render` writes the table to
lab/notes/training.md, and trains nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import mean
from time import process_time

import torch

from benchmarks.conditions import conditions
from benchmarks.finetuning import NETWORKS, PAGE, Cell, Subject, say
from benchmarks.render import with_part
from secateurs import Graph, cost, trace
from secateurs._util.files import write_text
from secateurs.config import Precision
from secateurs.graph.masking import copied
from secateurs.training import train_
from secateurs.training.schedule import steps_in_epoch
from secateurs_lab.compare.rows import append_row, read_rows
from secateurs_lab.methods import Task, method


@dataclass(frozen=True)
class Plan:
    """One way to reach the target."""

    network: str
    method: str
    target: float  # share of the MACs to remove in all
    rounds: int
    epochs: float  # in all
    rate: float
    seed: int
    precision: Precision
    examples: int | None  # of each set; None: all

    @property
    def folder(self) -> Path:
        """Where its rounds are kept: another for every plan."""
        cut = f"{self.network}-{self.method}-{self.target:g}-{self.rounds}-{self.seed}"
        return Path(cut) / f"{self.examples or 'all'}-{self.epochs:g}-{self.rate:g}-{self.precision}"


@dataclass(frozen=True)
class Row(Plan):
    """What came out. Accuracies are fractions."""

    macs_removed: float
    steps: int  # of the optimiser, in all
    validation_after: float
    test_after: float
    test_dense: float
    search_seconds: float
    training_seconds: float  # of one core
    conditions: str

    @property
    def plan(self) -> Plan:
        return Plan(**{name: getattr(self, name) for name in Plan.__dataclass_fields__})


def run(subject: Subject, plan: Plan) -> Row:
    """Cut, repair and train, round after round; what is trained is kept in the folder of its round."""
    graph, searched, trained = subject.graph, 0.0, 0.0
    per_epoch = steps_in_epoch(len(subject.data.train), 128)
    planned = round(plan.epochs * per_epoch)
    bounds = [planned * number // plan.rounds for number in range(plan.rounds + 1)]
    cell = Cell(
        *(plan.network, plan.method, plan.target, "distillation", "live", plan.rate),
        *(plan.seed, 1, plan.precision, plan.examples),
    )
    for number in range(plan.rounds):
        left = (1 - plan.target) ** ((number + 1) / plan.rounds)  # of the MACs, after this round
        target = 1 - left * cost(subject.graph).macs / cost(graph).macs
        folder = subject.runs / "rounds" / plan.folder / str(number)
        found = method(plan.method)(Task(graph, subject.data, target, seed=plan.seed, folder=folder))
        smaller, steps = copied(found.graph), bounds[number + 1] - bounds[number]
        searched += found.search_seconds
        weights, began = folder / "trained.pt", process_time()
        if not weights.exists():
            settings = replace(cell.settings(), epochs=-(-steps // per_epoch), steps=steps, seed=plan.seed + 1000 * number)
            train_(smaller.module, subject.data.train, settings, teacher=subject.graph.module)
            torch.save((smaller.module.state_dict(), process_time() - began), weights)
        state, seconds = torch.load(weights, weights_only=True)
        smaller.module.load_state_dict(state)
        graph, trained = _again(smaller), trained + seconds
    after = subject.accuracies(graph)
    return Row(
        **asdict(plan),
        macs_removed=1 - cost(graph).macs / cost(subject.graph).macs,
        steps=planned,
        validation_after=after[0],
        test_after=after[1],
        test_dense=subject.before("untouched", 0.0, plan.seed)[1],
        search_seconds=searched,
        training_seconds=trained,
        conditions=conditions().sentence(),
    )


def _again(graph: Graph) -> Graph:
    """The network as one that nothing has been cut from."""
    return trace(graph.module, graph.example)


def table(rows: Sequence[Row]) -> str:
    """Accuracy by number of rounds as Markdown."""
    heads = ("network", "MACs ↓", "method", "epochs in all", "rate", "precision", "rounds", "seeds")
    heads += ("validation, %", "test, %", "search, s", "training, core s")
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    groups: dict[Plan, list[Row]] = {}
    for row in rows:
        groups.setdefault(replace(row.plan, seed=0), []).append(row)

    def place(plan: Plan) -> tuple[str | float, ...]:  # plans that differ in their rounds alone stand together
        return plan.network, plan.examples or 0, plan.target, plan.method, plan.epochs, plan.rate, plan.precision, plan.rounds

    for plan in sorted(groups, key=place):
        group = groups[plan]
        shown = [100 * mean(row.validation_after for row in group), 100 * mean(row.test_after for row in group)]
        times = [mean(row.search_seconds for row in group), mean(row.training_seconds for row in group)]
        name = plan.network + (f", {plan.examples} images" if plan.examples else "")
        columns = [name, f"{plan.target:.0%}", plan.method, f"{plan.epochs:g}", f"{plan.rate:g}", plan.precision]
        columns += [str(plan.rounds), str(len(group)), *(f"{each:.2f}" for each in shown), *(f"{each:.0f}" for each in times)]
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", default="resnet20", choices=sorted(NETWORKS))
    parser.add_argument("--method", default="obs+refit")
    parser.add_argument("--target", type=float, default=0.45)
    parser.add_argument("--rounds", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--epochs", type=float, default=2.0)
    parser.add_argument("--rate", type=float, default=0.01)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--precision", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--examples", type=int, help="at most this number of each set: to try the command out")
    parser.add_argument("--out", type=Path, default=Path("lab/results/rounds"))
    parser.add_argument("--runs", type=Path, default=Path("runs/finetuning"))
    parser.add_argument("--render", action="store_true", help=f"only write the table to {PAGE.name}")
    given = parser.parse_args()
    path: Path = given.out / "rows.jsonl"
    known = {row.plan for row in read_rows(path, Row)}
    subject = Subject(given.network, given.runs, given.examples)
    for seed, rounds in () if given.render else product(given.seeds, given.rounds):
        plan = Plan(
            *(given.network, given.method, given.target, rounds, given.epochs, given.rate, seed, given.precision),
            given.examples,
        )
        if plan not in known:
            row = run(subject, plan)
            append_row(path, asdict(row))
            say(
                f"{rounds} rounds, seed {seed}: validation {row.validation_after:.2%}, {row.training_seconds:.0f} s of training"
            )
    found = table(read_rows(path, Row))
    if given.render:
        write_text(PAGE, with_part(PAGE.read_text(), "python -m benchmarks.rounds", found.rstrip()))
    say("\n" + found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
