"""`secateurs reproduce ancestors`: the systems that the paper stands on, on the networks of MNIST that they were shown on."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import torch
from cyclopts import Parameter

from secateurs._util.files import write_text
from secateurs._util.journal import Journal
from secateurs._util.terminal import clock, print_json, print_table, say
from secateurs.cli.inputs import RUNS, Json
from secateurs.cli.progress import Display, Status, display
from secateurs.compaction import compact
from secateurs.compaction.serialization import save
from secateurs.config import TrainSettings
from secateurs.criteria import score_filters
from secateurs.data.splits import Data
from secateurs.errors import InvalidInput, RunError, suggest
from secateurs.graph.cost import cost
from secateurs.graph.sites import find_sites
from secateurs.graph.trace import Graph, trace
from secateurs.metrics import accuracy
from secateurs.models import build, example_input
from secateurs.pruning.figures import KINDS
from secateurs.pruning.folder import environment
from secateurs.scoring.evaluator import SiteEvaluator
from secateurs.training.resumable import train_resumably_
from secateurs.training.schedule import steps_in_epoch
from secateurs_lab.compare.command import Many
from secateurs_lab.compare.figures import can_draw
from secateurs_lab.compare.rows import append_row, read_rows
from secateurs_lab.compare.run import fewer
from secateurs_lab.data.mnist import load_mnist
from secateurs_lab.methods import Budget, Method, Pruned, Task, Trained, Watch, method
from secateurs_lab.methods.weights import weights_of
from secateurs_lab.reproduce.ancestors_figures import draw_all
from secateurs_lab.sheets import Sheet

ROWS, TABLE = "rows.jsonl", "ancestors.md"
_ANY = 1e-12  # a target that is always reached: the system's own settings decide how much goes
_OURS = 1 - 390_000 / 2_293_000  # L0's best LeNet-5 (9-18-65-25) has 390,735 multiply-accumulates; its 403 K count a bit more

# plain networks; LeNet-5 in bfloat16, which takes half the time on a CPU
_SGD = TrainSettings(batch=128, lr=0.1, weight_decay=5e-4)
_FAST = TrainSettings(batch=128, lr=0.05, weight_decay=5e-4, precision="bfloat16", channels_last=True)
_ADAM = replace(_FAST, optimiser="adamw", weight_decay=0.0)
BASES: dict[str, TrainSettings] = {
    "lenet300": replace(_SGD, epochs=12),
    "lenet5": replace(_FAST, epochs=3),
    "maxplus": TrainSettings(epochs=6, batch=128, lr=0.005, optimiser="adamw", weight_decay=0.0),
}


def winners(task: Task, *, criterion: str, least: float, watch: Watch | None = None) -> Pruned:
    """Keep the filters whose score is above `least`, and train nothing: max-plus selection."""
    began = time.monotonic()
    (site,) = find_sites(task.graph)
    scores = score_filters(criterion, SiteEvaluator(task.graph, site), task.data.train).coef
    smaller = compact(task.graph, {site.name: scores > least})
    note = f"{criterion} above {least:g}: {int((scores > least).sum())} filters of {site.channels}"
    return Pruned(smaller, Trained(0, 0.0), len(task.data.train), time.monotonic() - began, 0.0, note)


@dataclass(frozen=True)
class Ancestor:
    """One line of the table: a system on a network, what was published, and how it is run here."""

    name: str
    network: str
    published: str
    method: Method
    settings: str  # of the method, in words
    training: TrainSettings = _FAST
    before: tuple[int, float] = (0, 0.0)  # epochs between the cuts or under the penalty, and their constant rate
    after: tuple[int, float] = (0, 0.0)  # epochs after the cuts, and their first rate
    target: float = _ANY
    seeds: tuple[int, ...] = (0,)

    def budget(self, images: int) -> Budget:
        """The training on a number of images."""
        (between, rate), (epochs, end), given = self.before, self.after, self.training
        steps = between * steps_in_epoch(images, given.batch)
        return Budget(
            self.name,
            replace(given, epochs=between, steps=steps, lr=rate, schedule="constant") if between else None,
            replace(given, epochs=epochs, lr=end) if epochs else None,
        )

    @property
    def conditions(self) -> str:
        """All that decides the row but seed and data."""
        (between, rate), (epochs, end), given = self.before, self.after, self.training
        parts = [f"{between} epochs at {rate:g}"] if between else []
        parts += [f"{epochs} epochs from {end:g}"] if epochs else []
        how = f"{' + '.join(parts)} ({given.optimiser}, {given.precision})" if parts else "no training"
        return f"{self.settings}; {how}; {self.network} trained {BASES[self.network].epochs} epochs before"


ANCESTORS = (
    Ancestor(
        "han-lenet300",
        "lenet300",
        "1.64 → 1.59 % error, 267k → 22k weights",
        method("han[share=0.918]"),
        "91.8 % of the weights by |w| / deviation, in 2 rounds",
        _SGD,
        (4, 0.01),
        (8, 0.01),
    ),
    Ancestor(
        "obd-lenet300",
        "lenet300",
        "a quarter of the weights, on another network",
        method("obd-weights[share=0.918]"),
        "91.8 % of the weights by h w² / 2, in 2 rounds",
        _SGD,
        (4, 0.01),
        (8, 0.01),
    ),
    Ancestor(
        "han-lenet5",
        "lenet5",
        "0.80 → 0.77 % error, 431k → 36k weights",
        method("han[share=0.916]"),
        "91.6 % of the weights by |w| / deviation, in 3 rounds",
        before=(3, 0.01),
        after=(2, 0.01),
    ),
    Ancestor(
        "ssl-lenet5",
        "lenet5",
        "0.9 → 0.8 % at 5-19 filters, 1.0 % at 3-12",
        method("ssl[filters=0.005;channels=0.005]"),
        "λ = 0.005 for filters and for channels",
        before=(3, 0.05),
        after=(2, 0.02),
    ),
    Ancestor(
        "l0-lenet5",
        "lenet5",
        "0.9 % at 20-25-45-462",
        method("l0[price=0.1;droprate=0.2]"),
        "λ = 0.1 a weight",
        _ADAM,
        after=(3, 0.001),
    ),
    Ancestor(
        "l0-macs-lenet5",
        "lenet5",
        "1.0 % at 9-18-65-25, 403 K FLOPs",
        method("l0[price=0.1;by=macs;droprate=0.2]"),
        "λ = 0.1, MACs priced (published: a λ for each layer)",
        _ADAM,
        after=(2, 0.001),
    ),
    Ancestor(
        "thinet-lenet5",
        "lenet5",
        "no figure on MNIST",
        method("thinet"),
        "layer by layer, the same share",
        before=(2, 0.01),
        after=(3, 0.02),
        target=_OURS,
    ),
    Ancestor(
        "maxplus-wins",
        "maxplus",
        "no loss of accuracy",
        partial(winners, criterion="maxplus", least=0.005),
        "filters that win more than 0.5 % of a class",
    ),
    Ancestor(
        "maxplus-threshold",
        "maxplus",
        "no loss of accuracy",
        partial(winners, criterion="maxplus-threshold", least=0.6),
        "w ≥ 0.6 of the class's largest",
    ),
    Ancestor(
        "ours-lenet5",
        "lenet5",
        "(L0: 1.0 % at 403 K FLOPs)",
        method("portfolio+refit"),
        "our default: portfolio, all cuts allocated together, every layer repaired",
        after=(8, 0.02),
        target=_OURS,
        seeds=(0, 1, 2),
    ),
)


@dataclass(frozen=True)
class AncestorRow:
    """What came out of one system with one seed. Errors are fractions of the test set."""

    name: str
    seed: int
    network: str
    conditions: str
    images: int  # of the training set
    published: str
    error_before: float
    error_after: float
    weights_before: int
    weights_left: int  # that are not zero
    macs_before: int
    macs_after: int
    widths: tuple[int, ...]  # filters or neurons of each layer but the last
    note: str
    seconds: float
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, int, str, int]:
        """What identifies the row."""
        return self.name, self.seed, self.conditions, self.images


def ancestors(
    *,
    only: Annotated[tuple[str, ...], Many] = (),
    seeds: Annotated[tuple[int, ...], Many] = (),
    out: Path = Path("lab/results/ancestors"),
    runs: Path = RUNS / "ancestors",
    examples: int | None = None,
    render: Annotated[bool, Parameter(negative="")] = False,
    pictures: Path | None = None,
    as_json: Json = False,
) -> None:
    """The systems that the paper stands on: Han, OBD, SSL, L0, ThiNet and max-plus on MNIST, and ours beside them.

    Trains LeNet-300-100, LeNet-5 and a max-plus network, prunes each as published, and appends a row for every system and seed
    to OUT/rows.jsonl. Give the command again after Ctrl-C or a crash: finished rows are kept, others resume. Half an hour of
    one core in all. MNIST is downloaded if it is not there.

    Parameters
    ----------
    only
        Only these lines, by name: han-lenet300, l0-lenet5, ours-lenet5, ….
    seeds
        Instead of each line's own: 0, and 0 1 2 for ours.
    out
        Folder for the rows and the table.
    runs
        Folder for the runs and the networks.
    examples
        Use at most this number of images of each set: to try the command, not to report from.
    render
        Make the table again from the rows, and nothing else.
    pictures
        Draw a picture of each idea into this folder, and do nothing else (needs the extra `figures`).
    """
    if pictures is not None:
        if can_draw(pictures):
            say(f"Written: {', '.join(map(str, draw_all(pictures)))}")
        return
    chosen = [one for one in ANCESTORS if not only or one.name in only]
    for name in only:
        if name not in (one.name for one in ANCESTORS):
            raise InvalidInput(f"--only {name!r}: no such line.{suggest(name, [one.name for one in ANCESTORS])}")
    if not render:
        data = fewer(load_mnist(), examples)
        done = {row.key for row in read_rows(out / ROWS, AncestorRow)}
        with display(quiet=as_json) as shown:
            for one in chosen:
                for seed in seeds or one.seeds:
                    if (one.name, seed, one.conditions, len(data.train)) not in done:
                        row = _made(one, seed, data, runs, shown)
                        append_row(out / ROWS, asdict(row))
                        shown.line(f"{one.name}, seed {seed}: {_words(row)} ({clock(row.seconds)})")
    rows: list[AncestorRow] = read_rows(out / ROWS, AncestorRow)
    if not rows:
        raise RunError(f"{out / ROWS}: no rows to make a table of. Leave out --render, or name the folder with --out.")
    found = sheet(rows)
    write_text(out / TABLE, found.markdown())
    if as_json:
        print_json({"rows": [asdict(row) for row in rows]})
        return
    say(found.title)
    print_table(found.columns, found.lines)
    say(f"Written: {out / ROWS}, {out / TABLE}")


def _made(one: Ancestor, seed: int, data: Data, runs: Path, shown: Display) -> AncestorRow:
    """Train the network unless it is there, prune it, and measure both on the test set."""
    began = time.monotonic()
    graph = base(one.network, seed, data, runs, shown)
    folder = runs / f"{one.name}-seed{seed}-{len(data.train)}-{_mark(one.conditions)}"

    def watch(event: Any) -> None:
        shown.update(Status(f"{one.name}, seed {seed}", event.phase, event.done, max(event.done, event.total)))

    task = Task(graph, data, one.target, one.budget(len(data.train)), seed=seed, folder=folder)
    pruned = one.method(task, watch=watch)
    save(pruned.graph, folder / "pruned.safetensors")
    before, after = cost(graph), cost(pruned.graph)
    weights, left = weights_of(graph), weights_of(pruned.graph)
    return AncestorRow(
        one.name,
        seed,
        one.network,
        one.conditions,
        len(data.train),
        one.published,
        1 - accuracy(graph.module, data.test_set),
        1 - accuracy(pruned.graph.module, data.test_set),
        sum(weight.numel() for weight in weights.values()),
        sum(int((weight != 0).sum()) for weight in left.values()),
        before.macs,
        after.macs,
        tuple(len(weight) for name, weight in left.items() if len(weights[name]) != len(data.classes)),
        pruned.note,
        round(time.monotonic() - began, 1),
        environment()["versions"],
    )


def base(network: str, seed: int, data: Data, runs: Path, shown: Display) -> Graph:
    """The trained network; resumed, or not trained again."""
    settings = replace(BASES[network], seed=seed)
    folder = runs / f"{network}-seed{seed}-{len(data.train)}-{_mark(str(settings))}"
    torch.manual_seed(seed)
    model = build(network)
    folder.mkdir(parents=True, exist_ok=True)
    with Journal(folder, KINDS) as journal:
        train_resumably_(
            journal,
            model,
            data.train,
            settings,
            on_step=lambda done, total: shown.update(
                Status(f"Training {network}, seed {seed}", "optimiser steps", done, total)
            ),
        )
    return trace(model.eval(), example_input(network))


def _mark(text: str) -> str:
    """A short name for settings."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _words(row: AncestorRow) -> str:
    return (
        f"error {100 * row.error_before:.2f} → {100 * row.error_after:.2f} %, weights {row.weights_before:,} → "
        f"{row.weights_left:,}, MACs {row.macs_before:,} → {row.macs_after:,}, {'-'.join(map(str, row.widths))}"
    )


def sheet(rows: Sequence[AncestorRow]) -> Sheet:
    """The table: a line for every system, a mean over its seeds; of rows made under several conditions the last ones."""
    last = {row.name: row.conditions for row in rows if row.images == max(other.images for other in rows)}
    lines = []
    for name in (one.name for one in ANCESTORS if one.name in last):
        group = [row for row in rows if row.name == name and row.conditions == last[name]]
        errors = [f"{100 * row.error_after:.2f}" for row in group]
        lines.append(
            (
                name,
                group[0].published,
                f"{100 * mean(row.error_before for row in group):.2f} → {', '.join(errors)} %",
                "; ".join("-".join(map(str, row.widths)) for row in group),
                f"{group[0].weights_before / 1000:.0f}k → {mean(row.weights_left for row in group) / 1000:.1f}k",
                f"{group[0].macs_before / 1000:,.0f}k → {mean(row.macs_after for row in group) / 1000:,.0f}k",
                f"{group[0].conditions}; seeds {', '.join(str(row.seed) for row in group)}",
                clock(mean(row.seconds for row in group)),
            )
        )
    columns = ("system", "published", "test error", "widths left", "weights not zero", "MACs, dense", "conditions", "time")
    return Sheet("The paper's ancestors on MNIST: published, and ours", columns, tuple(lines))
