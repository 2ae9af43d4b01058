"""The paper's Table 1: how often a network of 10 hidden neurons, pruned to 3 and retrained, still solves XOR.

The rows are the paper's; further methods and a sweep over P (share of neurons off) and M (number of masks) go beyond it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

import torch

from secateurs._util.format import interval
from secateurs.errors import InvalidInput
from secateurs_lab.reproduce.xor_methods import OTHER_METHODS, Choose, by_chance, by_the_paper
from secateurs_lab.reproduce.xor_nets import Nets, Setting, XorTask, accuracies, make_task, new_nets, one_thread, train
from secateurs_lab.reproduce.xor_weights import WAYS, delete_weights, shaped
from secateurs_lab.sheets import Sheet

HIDDEN = 10
SCHEDULES = {"one-shot": (3,), "iterative": (7, 5, 3)}  # how many neurons are left after each round
SUCCESS = 0.95  # the accuracy that the paper calls a success
PAPER = {
    ("FCN3", "", ""): 40.4,
    ("FCN10", "", ""): 99.5,
    ("FCN10", "random", "one-shot"): 39.8,
    ("FCN10", "ensembles", "one-shot"): 82.6,
    ("FCN10", "ensembles", "iterative"): 88.0,
}
PAPER_EXPERIMENTS = 1000  # a row
SWEPT_OFF = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
SWEPT_MASKS = (30, 100, 300)


@dataclass(frozen=True)
class Share:
    """Successes among experiments, and the confidence interval of the success rate."""

    successes: int
    experiments: int

    @property
    def percent(self) -> float:
        """Successes in a hundred experiments."""
        return 100 * self.successes / self.experiments

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval of the rate in percent: sound near 0 and 100 % too, where ± two standard errors is not."""
        low, high = interval(self.successes / self.experiments, self.experiments)
        return 100 * low, 100 * high

    @property
    def cells(self) -> tuple[str, str]:
        """Percent and interval as text."""
        low, high = self.interval
        return f"{self.percent:.1f}", f"{low:.1f}–{high:.1f}"

    def __add__(self, other: Share) -> Share:
        return Share(self.successes + other.successes, self.experiments + other.experiments)


@dataclass(frozen=True)
class ExperimentRow:
    """One line of the table: a network, trained or pruned and retrained, and how often it then solved its task."""

    network: str
    method: str  # "" where nothing was pruned
    schedule: str
    training: Share  # at least 95 % of the training points right, which is what the paper counts
    fresh: Share  # at least 95 % of fresh points right

    @property
    def key(self) -> tuple[str, str, str]:
        """What identifies the row."""
        return self.network, self.method, self.schedule

    @property
    def paper(self) -> float | None:
        """The paper's figure in percent, where it has this row."""
        return PAPER.get(self.key)


@dataclass(frozen=True)
class SweptPoint:
    """Success of one-shot ensembles at one share off and one number of masks."""

    off: float
    masks: int
    training: Share
    fresh: Share


# ---- experiments -----------------------------------------------------------------------------------------------------


def table(
    setting: Setting, *, beyond: bool = False, report: Callable[[ExperimentRow], None] | None = None
) -> tuple[ExperimentRow, ...]:
    """Run all rows of Table 1, with `beyond` also methods not in the paper; `report` gets each finished row."""
    _check(setting)
    rows: list[ExperimentRow] = []

    def add(network: str, method: str, schedule: str, nets: Nets) -> None:
        rows.append(ExperimentRow(network, method, schedule, *_solved(nets, task)))
        if report:
            report(rows[-1])

    with one_thread():
        task = make_task(setting)
        add("FCN3", "", "", train(new_nets(setting, 3, "FCN3"), task.train, setting, "FCN3"))
        whole = train_whole(task, setting)
        add("FCN10", "", "", whole)
        add("FCN10", "random", "one-shot", prune(whole, task, setting, by_chance, SCHEDULES["one-shot"]))
        others = OTHER_METHODS if beyond else {}
        for (method, choose), schedule in product({"ensembles": by_the_paper, **others}.items(), SCHEDULES):
            add("FCN10", method, schedule, prune(whole, task, setting, choose, SCHEDULES[schedule]))
    return tuple(rows)


def weights_table(setting: Setting, *, report: Callable[[ExperimentRow], None] | None = None) -> tuple[ExperimentRow, ...]:
    """Delete single weights of the networks of Table 1 until as many are left as a network of 3 neurons has."""
    _check(setting)
    rows: list[ExperimentRow] = []
    with one_thread():
        task = make_task(setting)
        whole = train_whole(task, setting)
        inputs = whole.w1.shape[-1]
        for method, delete in WAYS.items():
            cut, alive = delete_weights(whole, task.train, 3 * (inputs + 1) + 1, delete)
            again = train(cut, task.train, setting, "retrain weights", held=shaped(alive.double(), cut))
            for schedule, nets in (("deleted", cut), ("retrained", again)):
                rows.append(ExperimentRow("FCN10", f"weights by {method}", schedule, *_solved(nets, task)))
                if report:
                    report(rows[-1])
    return tuple(rows)


def weights_sheet(rows: Sequence[ExperimentRow]) -> Sheet:
    """Make the table of deleted weights."""
    found, lines = {row.key: row for row in rows}, []
    for method in dict.fromkeys(row.method for row in rows):
        cut, again = (found["FCN10", method, schedule] for schedule in ("deleted", "retrained"))
        cells = (*cut.training.cells, cut.fresh.cells[0], *again.training.cells, again.fresh.cells[0])
        lines.append((method.removeprefix("weights by "), *cells))
    columns = ("weights chosen by", "as deleted", "95 %", "fresh", "retrained", "95 %", "fresh")
    return Sheet(
        "31 weights cut to 10, one at a time: % of successes on the training points, and on fresh ones", columns, tuple(lines)
    )


def train_whole(task: XorTask, setting: Setting) -> Nets:
    """Train the networks of 10 hidden neurons."""
    return train(new_nets(setting, HIDDEN, "FCN10"), task.train, setting, "FCN10")


def prune(nets: Nets, task: XorTask, setting: Setting, choose: Choose, sizes: Sequence[int]) -> Nets:
    """Keep the chosen neurons and retrain from their weights, for each of the falling `sizes`."""
    for size in sizes:
        kept = choose(nets, task.train, size, setting)
        # The same order of batches for all methods: they differ by their choice and by nothing else.
        nets = train(nets.take(kept), task.train, setting, f"retrain {size}")
    return nets


def pooled(tables: Sequence[Sequence[ExperimentRow]]) -> tuple[ExperimentRow, ...]:
    """Add up the rows of several seeds."""
    nothing = Share(0, 0)
    return tuple(
        replace(same[0], training=sum((r.training for r in same), nothing), fresh=sum((r.fresh for r in same), nothing))
        for same in zip(*tables, strict=True)
    )


def sweep(
    setting: Setting,
    *,
    off: Sequence[float] = SWEPT_OFF,
    masks: Sequence[int] = SWEPT_MASKS,
    report: Callable[[SweptPoint], None] | None = None,
) -> tuple[SweptPoint, ...]:
    """Measure one-shot ensembles for every share off and every number of masks, on the same trained networks."""
    _check(setting)
    points = []
    with one_thread():
        task = make_task(setting)
        whole = train_whole(task, setting)
        for count, share in product(masks, off):
            pruned = prune(whole, task, replace(setting, off=share, masks=count), by_the_paper, SCHEDULES["one-shot"])
            points.append(SweptPoint(share, count, *_solved(pruned, task)))
            if report:
                report(points[-1])
    return tuple(points)


def explicit_solution(task: XorTask, bias: float = 0.01) -> Nets:
    """Return the paper's construction: 3 neurons that see a, b and their sum, and an output parallel to the plane they span.

    Before ReLU the three activations lie on a plane; ReLU leaves the points of label +1 on it and moves the others
    under it, by min(|a·x|, |b·x|) / √2. So with a small output bias every point is right whose distance to both axes
    exceeds √2 · bias. The normal's sign depends on whether b is left or right of a: it is turned so that "under" is
    negative.
    """
    w1 = torch.stack([task.a, task.b, torch.nn.functional.normalize(task.a + task.b, dim=-1)], 1)
    normal = torch.linalg.cross(w1[..., 0], w1[..., 1])
    return Nets(w1, normal * normal[:, 2:].sign(), torch.full_like(normal[:, 0], bias))


def _solved(nets: Nets, task: XorTask) -> tuple[Share, Share]:
    training, fresh = ((accuracies(nets, points) >= SUCCESS) for points in (task.train, task.fresh))
    return Share(int(training.sum()), len(training)), Share(int(fresh.sum()), len(fresh))


def _check(setting: Setting) -> None:
    for field in ("experiments", "points", "epochs", "batch", "masks"):
        if getattr(setting, field) < 1:
            raise InvalidInput(f"{field}: got {getattr(setting, field)}, wanted 1 or more.")
    if not setting.learning_rate > 0:
        raise InvalidInput(f"learning_rate: got {setting.learning_rate}, wanted a number above 0.")


# ---- tables ----------------------------------------------------------------------------------------------------------


def paper_sheet(rows: Sequence[ExperimentRow], tables: Sequence[Sequence[ExperimentRow]], seeds: Sequence[int]) -> Sheet:
    """Return Table 1: the paper's figure beside ours, over all seeds and, where there are several, for each."""
    several = len(seeds) > 1
    lines = []
    for place, row in enumerate(rows):
        if row.paper is None:
            continue
        name = (
            row.method if row.method == "random" else f"{row.method}, {row.schedule}" if row.method else f"train {row.network}"
        )
        low, high = row.training.interval
        each = [f"{table[place].training.percent:.1f}" for table in tables] if several else []
        inside = "yes" if low <= row.paper <= high else "no"
        difference = _difference(row.paper, row.training)
        lines.append((name, f"{row.paper:.1f}", *row.training.cells, inside, difference, *each, row.fresh.cells[0]))
    title = f"Table 1: % of {rows[0].training.experiments:,} experiments that reach 95 % accuracy on the training points"
    each = [f"seed {seed}" for seed in seeds] if several else []
    return Sheet(title, ("row", "paper", "ours", "95 %", "inside", "ours − paper", *each, "fresh"), tuple(lines))


def _difference(paper: float, share: Share) -> str:
    """Format ours less the paper's, ± 95 %: the paper's figure is a count among 1,000 experiments with its own error."""
    rates = ((paper / 100, PAPER_EXPERIMENTS), (share.percent / 100, share.experiments))
    return f"{share.percent - paper:+.1f} ± {196 * math.sqrt(sum(rate * (1 - rate) / n for rate, n in rates)):.1f}"


def methods_sheet(rows: Sequence[ExperimentRow]) -> Sheet:
    """Return a line for every pruning method that was run in both schedules, best one-shot success first."""
    found = {(row.method, row.schedule): row for row in rows}
    methods = [method for method, schedule in found if schedule == "iterative"]
    methods.sort(key=lambda method: -found[method, "one-shot"].training.successes)
    lines = []
    for method in methods:
        both = [found[method, schedule] for schedule in SCHEDULES]
        lines.append((method, *(cell for row in both for cell in (*row.training.cells, row.fresh.cells[0]))))
    columns = ("method", "one-shot", "95 %", "fresh", "iterative", "95 %", "fresh")
    return Sheet(
        "Ways to choose the 3 neurons: % of successes on the training points, and on fresh ones", columns, tuple(lines)
    )


def sweep_sheet(points: Sequence[SweptPoint]) -> Sheet:
    """Return a line for each share off and a column for each number of masks, for one-shot ensembles."""
    counts = tuple(dict.fromkeys(point.masks for point in points))
    shares = tuple(dict.fromkeys(point.off for point in points))
    cells = {(point.off, point.masks): "{} ({})".format(*point.training.cells) for point in points}
    lines = tuple((f"{off:.1f}", *(cells[off, count] for count in counts)) for off in shares)
    title = "One-shot ensembles by share of neurons off (P) and number of masks (M), training points"
    return Sheet(title, ("P", *(f"M = {count}" for count in counts)), lines)


def plain(record: ExperimentRow | SweptPoint) -> dict[str, Any]:
    """Return the record as plain values, shares with their percent and interval."""
    fields = asdict(record)
    for name in ("training", "fresh"):
        share: Share = getattr(record, name)
        fields[name] |= {"percent": share.percent, "interval": share.interval}
    return {**fields, "paper": record.paper} if isinstance(record, ExperimentRow) else fields
