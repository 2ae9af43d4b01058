"""The paper's Table 1: how often a network of 10 hidden neurons, pruned to 3 and retrained, still solves XOR.

The rows are the paper's; further methods and a sweep over P (share of neurons off) and M (number of masks) go beyond
it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from secateurs.errors import InvalidInput
from secateurs.reproduce.xor.methods import OTHER_METHODS, Choose, by_chance, by_the_paper
from secateurs.reproduce.xor.nets import Nets, Setting, XorTask, accuracies, make_task, new_nets, one_thread, train

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

_Z = 1.959963984540054  # two-sided 95 % of the normal distribution


@dataclass(frozen=True)
class Share:
    """Successes among experiments, with what that says about the true rate."""

    successes: int
    experiments: int

    @property
    def percent(self) -> float:
        """Successes in a hundred experiments."""
        return 100 * self.successes / self.experiments

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval of the rate in percent: sound near 0 and 100 % too, where ± two standard errors is not."""
        n, rate = self.experiments, self.successes / self.experiments
        centre = rate + _Z**2 / (2 * n)
        reach = _Z * math.sqrt(rate * (1 - rate) / n + _Z**2 / (4 * n * n))
        return 100 * (centre - reach) / (1 + _Z**2 / n), 100 * (centre + reach) / (1 + _Z**2 / n)

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
        """What the row is, apart from its figures."""
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


def table(
    setting: Setting, *, beyond: bool = False, report: Callable[[ExperimentRow], None] | None = None
) -> tuple[ExperimentRow, ...]:
    """All rows of Table 1, with `beyond` those of methods not in the paper too; `report` gets each row as it is ready."""
    _check(setting)
    rows: list[ExperimentRow] = []

    def add(row: ExperimentRow) -> None:
        rows.append(row)
        if report:
            report(row)

    with one_thread():
        task = make_task(setting)
        add(_row("FCN3", "", "", train(new_nets(setting, 3, "FCN3"), task.train, setting, "FCN3"), task))
        whole = train_whole(task, setting)
        add(_row("FCN10", "", "", whole, task))
        for method, choose, schedule in _prunings(beyond):
            pruned = prune(whole, task, setting, choose, SCHEDULES[schedule])
            add(_row("FCN10", method, schedule, pruned, task))
    return tuple(rows)


def train_whole(task: XorTask, setting: Setting) -> Nets:
    """The networks of 10 hidden neurons, trained."""
    return train(new_nets(setting, HIDDEN, "FCN10"), task.train, setting, "FCN10")


def prune(nets: Nets, task: XorTask, setting: Setting, choose: Choose, sizes: Sequence[int]) -> Nets:
    """Keep the chosen neurons and retrain from the weights they have, for each of the falling `sizes`."""
    for size in sizes:
        kept = choose(nets, task.train, size, setting)
        # The same order of batches for all methods: they differ by their choice and by nothing else.
        nets = train(nets.take(kept), task.train, setting, f"retrain {size}")
    return nets


def pooled(tables: Sequence[Sequence[ExperimentRow]]) -> tuple[ExperimentRow, ...]:
    """The rows of several seeds added up."""
    return tuple(
        replace(same[0], training=_total(row.training for row in same), fresh=_total(row.fresh for row in same))
        for same in zip(*tables, strict=True)
    )


def sweep(
    setting: Setting,
    *,
    off: Sequence[float] = SWEPT_OFF,
    masks: Sequence[int] = SWEPT_MASKS,
    report: Callable[[SweptPoint], None] | None = None,
) -> tuple[SweptPoint, ...]:
    """Success of one-shot ensembles for every share off and every number of masks, on the same trained networks."""
    _check(setting)
    points = []
    with one_thread():
        task = make_task(setting)
        whole = train_whole(task, setting)
        for count in masks:
            for share in off:
                changed = replace(setting, off=share, masks=count)
                pruned = prune(whole, task, changed, by_the_paper, SCHEDULES["one-shot"])
                row = _row("FCN10", "ensembles", "one-shot", pruned, task)
                points.append(SweptPoint(share, count, row.training, row.fresh))
                if report:
                    report(points[-1])
    return tuple(points)


def explicit_solution(task: XorTask, bias: float = 0.01) -> Nets:
    """The paper's construction: 3 neurons that see a, b and their sum, and an output parallel to the plane they span.

    Before ReLU the three activations lie on a plane; ReLU leaves the points of label +1 on it and moves the others
    under it, by min(|a·x|, |b·x|) / √2. So with a small output bias every point is right whose distance to both axes
    exceeds √2 · bias. The normal's sign depends on whether b is left or right of a: it is turned so that "under" is
    negative.
    """
    w1 = torch.stack([task.a, task.b, torch.nn.functional.normalize(task.a + task.b, dim=-1)], 1)
    normal = torch.linalg.cross(w1[..., 0], w1[..., 1])
    return Nets(w1, normal * normal[:, 2:].sign(), torch.full_like(normal[:, 0], bias))


def _prunings(beyond: bool) -> Iterable[tuple[str, Choose, str]]:
    yield "random", by_chance, "one-shot"
    for schedule in SCHEDULES:
        yield "ensembles", by_the_paper, schedule
    others: Mapping[str, Choose] = OTHER_METHODS if beyond else {}
    for method, choose in others.items():
        for schedule in SCHEDULES:
            yield method, choose, schedule


def _row(network: str, method: str, schedule: str, nets: Nets, task: XorTask) -> ExperimentRow:
    solved = [Share(int((accuracies(nets, p) >= SUCCESS).sum()), len(p.y)) for p in (task.train, task.fresh)]
    return ExperimentRow(network, method, schedule, *solved)


def _total(shares: Iterable[Share]) -> Share:
    return sum(shares, start=Share(0, 0))


def _check(setting: Setting) -> None:
    for field in ("experiments", "points", "epochs", "batch", "masks"):
        if getattr(setting, field) < 1:
            raise InvalidInput(f"{field}: got {getattr(setting, field)}, wanted 1 or more.")
    if not setting.learning_rate > 0:
        raise InvalidInput(f"learning_rate: got {setting.learning_rate}, wanted a number above 0.")
