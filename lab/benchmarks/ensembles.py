"""How linear models of masks rank filters, beside L1 norms and the geometric median: `python -m benchmarks.ensembles` (hours).

Random masks at all sites at once, on training images. The models are of the loss or of the log odds of the right class.
Filters go by the signed mean of single images' slopes (the linear model of the mean), by the mean size of the slopes, or by
sets: the mean square of what all that goes changes in an image (`ensemble` is log odds by sets). `bonsai` is a ridge regression
of the loss on complementary masks of the filters with the smallest activations, chosen by cross-validation (Dery et al., 2024).

Then the same share is removed at every site, or cuts are allocated by loss per MAC; nothing is repaired or trained. Accuracies
are on validation images that no curve is measured on; the orders that one can ask for are measured on the test set too, which
chooses nothing. Rows go to lab/results/ensembles.jsonl, and one that is there is not made again; `--render` prints their
tables.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import chain
from math import nan
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import process_time
from typing import Literal

import torch
from torch import Tensor, fx, nn

from benchmarks.conditions import conditions
from benchmarks.finetuning import BATCH, NETWORKS, Subject
from secateurs import cost, find_sites
from secateurs.criteria import score_filters
from secateurs.data.dataset import Examples, generator_for
from secateurs.data.splits import subset
from secateurs.graph.masking import masked
from secateurs.graph.sites import Site
from secateurs.metrics import accuracy, cross_entropy, log_odds
from secateurs.scoring.evaluator import SiteEvaluator
from secateurs.scoring.importance import order_by_sets, rank_correlation
from secateurs.scoring.network import network_slopes, with_factors
from secateurs_lab.compare.rows import append_row, read_rows
from secateurs_lab.methods import Task, method
from secateurs_lab.sheets import Sheet

RESULTS = Path(__file__).parent / "results" / "ensembles.jsonl"
OURS = "ensemble"  # log odds by sets
RIVALS = ("l1", "fpgm")
MODELS = {"loss": cross_entropy, "log odds": log_odds}
RIDGES = tuple(10.0**power for power in range(-3, 4))
FOLDS = 5
Orders = Mapping[str, Tensor]
Removed = Literal["filters", "MACs"]


@dataclass(frozen=True)
class Case:
    """One order of all filters, and how much goes. Shares are fractions."""

    network: str
    order: str
    removed: Removed  # filters: the same share at every site; MACs: cuts are allocated by loss per MAC
    share: float  # that is removed; of the MACs, at least
    off: float | None  # filters that masks switch off, a share of one site's, spread over all sites; None: as a method does
    images: int | None  # that the slopes are from; None: as a method does
    curve_images: int
    validation: int  # images
    test_images: int


@dataclass(frozen=True)
class Row(Case):
    """What an order leaves. Accuracies are fractions."""

    split_half: float  # rank correlation of halves of the images, median of the sites
    carried: float  # by the 1 % of the images with the largest slopes: share of all sizes
    cpu_seconds: float  # for the order of all filters; with MACs, for the curves too, and all cuts up to this one
    accuracy: float
    dense: float
    test: float | None
    conditions: str

    @property
    def case(self) -> Case:
        return Case(**{name: getattr(self, name) for name in Case.__dataclass_fields__})


def read_ensembles() -> list[Row]:
    """The rows of all runs, in order; those of MACs once recorded `--off` and `--images`, which a method does not get."""
    rows: list[Row] = read_rows(RESULTS, Row)
    return [replace(row, off=None, images=None) if row.removed == "MACs" else row for row in rows]


@dataclass(frozen=True)
class Found:
    """An order of the filters of every site, least important first."""

    orders: Orders
    seconds: float
    split_half: float = nan
    carried: float = nan


class Setup:
    """A network with the images of the comparison: those of curves are no part of those that accuracies are measured on."""

    def __init__(self, network: str, given: argparse.Namespace) -> None:
        self.subject = Subject(network, Path("runs") / "ensembles", None)
        self.graph, self.data = self.subject.graph, self.subject.data
        self.sites = [site for site in find_sites(self.graph, "before") if site.channels > 1]
        self.off, self.images, self.curve_images = given.off, given.images, given.curves
        search = torch.randperm(len(self.data.search), generator=generator_for(0, "validation"))
        self.validation = self.data.search.take(search[: given.validation]).ready(torch.float32)
        self.curves = self.data.search.take(search[given.validation : given.validation + given.curves])
        assert self.data.test is not None
        self.test = subset(self.data.test, min(given.test, len(self.data.test)), seed=0).ready(torch.float32)
        self.few = subset(self.data.train, given.images, seed=1).ready(torch.float32)

    @cached_property
    def dense(self) -> float:
        return self.accuracy(self.graph.module, self.validation)

    def accuracy(self, module: nn.Module, examples: Examples) -> float:
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return accuracy(module, examples, batch=BATCH)

    def case(self, order: str, removed: Removed, share: float) -> Case:
        own = (self.off, self.images, 0) if removed == "filters" else (None, None, self.curve_images)
        return Case(self.subject.network, order, removed, share, *own, len(self.validation), len(self.test))

    def row(self, case: Case, found: Found, module: nn.Module) -> Row:
        return Row(
            **asdict(case),
            split_half=found.split_half,
            carried=found.carried,
            cpu_seconds=round(found.seconds, 1),
            accuracy=self.accuracy(module, self.validation),
            dense=self.dense,
            test=self.accuracy(module, self.test) if case.order in (OURS, *RIVALS) else None,
            conditions=conditions().sentence(),
        )


# ---- orders -------------------------------------------------------------------------------------------------------------


def by_criterion(name: str, setup: Setup) -> Found:
    began = process_time()
    scores = {site.name: score_filters(name, SiteEvaluator(setup.graph, site)).coef for site in setup.sites}
    return Found({name: each.argsort(stable=True) for name, each in scores.items()}, process_time() - began)


def by_sign(slopes: Tensor) -> Tensor:
    return slopes.mean(0).argsort(stable=True)


def by_size(slopes: Tensor) -> Tensor:
    return slopes.abs().mean(0).argsort(stable=True)


def slope_orders(of: str) -> dict[str, Callable[[Tensor], Tensor]]:
    """What makes an order of slopes (images, C), by name: their signed mean, their mean size, or sets."""
    sets = OURS if of == "log odds" else f"{of}, sets"
    return {f"{of}, signed": by_sign, f"{of}, size": by_size, sets: order_by_sets}


ORDERS = (*RIVALS, *(name for of in MODELS for name in slope_orders(of)), "bonsai")


def by_slopes(of: str, setup: Setup, wanted: Container[str]) -> Iterator[tuple[str, Found]]:
    """The orders that the slopes of a measure give; the seconds of the slopes count for each."""
    ways, measure = {name: order for name, order in slope_orders(of).items() if name in wanted}, MODELS[of]
    if not ways:
        return
    began, sign = process_time(), -1 if measure is cross_entropy else 1
    batches = [slopes for _, slopes in network_slopes(setup.graph, setup.sites, setup.few, measure, off=setup.off)]
    slopes = {site.name: sign * torch.cat([each[site.name] for each in batches]).double() for site in setup.sites}
    seconds = process_time() - began
    sizes = torch.cat(list(slopes.values()), 1).abs().sum(1).sort(descending=True).values
    carried = float(sizes[: len(sizes) // 100].sum() / sizes.sum())
    for name, order in ways.items():
        began = process_time()
        orders = {site: order(each) for site, each in slopes.items()}
        spent = seconds + process_time() - began
        halves = [rank_correlation(order(each[::2]).argsort(), order(each[1::2]).argsort()) for each in slopes.values()]
        yield name, Found(orders, spent, median(map(float, halves)), carried)


def bonsai(setup: Setup, share: float) -> Found:
    """Dery et al. at as many passes as slopes take, with masks of each image's own instead of a few for all.

    At every site the filters with the smallest mean activations are candidates, twice as many as are to go. A mask switches off
    half of the candidates of every site, its complement the others. One ridge regression of the differences of both losses.
    """
    began, generator = process_time(), generator_for(0, "bonsai")
    prior = activations(setup)
    candidates = {site.name: prior[site.name].argsort()[: round(2 * share * site.channels)] for site in setup.sites}
    pairs = subset(setup.data.train, 3 * setup.images // 2, seed=1).ready(torch.float32)  # a slope takes three passes
    signs, masks = [], []
    for site in setup.sites:
        some = candidates[site.name]
        shuffled = torch.rand(len(pairs), len(some), generator=generator).argsort(1)
        kept = shuffled < len(some) // 2
        both = torch.ones(2, len(pairs), site.channels)
        both[0][:, some], both[1][:, some] = kept.float(), 1 - kept.float()
        signs.append(2 * kept.double() - 1)
        masks.append(both)
    module, saved = with_factors(setup.graph, setup.sites).eval(), []
    with torch.no_grad():
        for start in range(0, len(pairs), BATCH):
            each = pairs.batch(slice(start, start + BATCH))
            one, two = (
                cross_entropy(module(*each.args, *(mask[side, start : start + BATCH] for mask in masks)), each.targets)
                for side in (0, 1)
            )
            saved.append((two - one).double())
    x, y = torch.cat(signs, 1), torch.cat(saved)
    coef = ridge(x, y, max(RIDGES, key=partial(agreement, x, y)))
    orders = {}
    for site, worth in zip(setup.sites, coef.split([each.shape[1] for each in signs]), strict=True):
        others = prior[site.name].argsort()[len(worth) :]
        orders[site.name] = torch.cat([candidates[site.name][worth.argsort()], others])
    return Found(orders, process_time() - began)


def activations(setup: Setup) -> Orders:
    """Mean size of the activations of every filter."""
    sums = {site.node: torch.zeros(site.channels) for site in setup.sites}

    class Recorder(fx.Interpreter):
        def run_node(self, n: fx.Node) -> object:
            found = super().run_node(n)
            if n.name in sums:
                sums[n.name] += found.abs().transpose(0, 1).flatten(1).mean(1)
            return found

    with torch.no_grad():
        for each in setup.few.batches(BATCH):
            Recorder(setup.graph.module).run(*each.args)
    return {site.name: sums[site.node] for site in setup.sites}


def ridge(x: Tensor, y: Tensor, penalty: float) -> Tensor:
    centred = x - x.mean(0)
    damped = centred.mT @ centred / len(x) + penalty * torch.eye(x.shape[1], dtype=x.dtype)
    return torch.linalg.solve(damped, centred.mT @ (y - y.mean()) / len(x))


def agreement(x: Tensor, y: Tensor, penalty: float) -> float:
    """Mean rank correlation of predictions with what was measured, on the fold that was not fitted."""
    fold = torch.arange(len(x)) % FOLDS
    found = [rank_correlation(x[fold == k] @ ridge(x[fold != k], y[fold != k], penalty), y[fold == k]) for k in range(FOLDS)]
    return float(torch.stack(found).mean())


# ---- what orders leave --------------------------------------------------------------------------------------------------


def uniform(setup: Setup, shares: Sequence[float], wanted: Sequence[str], known: Container[Case]) -> Iterator[Row]:
    """The same share of every site's filters removed; no order is made that only rows which are there need."""

    def orders(share: float, names: Container[str]) -> Iterator[tuple[str, Found]]:
        for name in RIVALS:
            if name in names:
                yield name, by_criterion(name, setup)
        for of in MODELS:
            yield from by_slopes(of, setup, names)
        if "bonsai" in names:
            yield "bonsai", bonsai(setup, share)

    for share in shares:
        missing = {name: case for name in wanted if (case := setup.case(name, "filters", share)) not in known}
        for name, found in orders(share, missing):
            masks: dict[str | Site, Tensor] = {}
            for site in setup.sites:
                masks[site.name] = torch.ones(site.channels, dtype=torch.bool)
                masks[site.name][found.orders[site.name][: round(share * site.channels)]] = False
            yield setup.row(missing[name], found, masked(setup.graph, masks))


def allocated(setup: Setup, targets: Sequence[float], wanted: Sequence[str], known: Container[Case]) -> Iterator[Row]:
    """Cuts allocated by loss per MAC, along curves that are measured once for all targets."""
    data = replace(setup.data, search=setup.curves)
    for name in wanted:
        missing = {target: case for target in targets if (case := setup.case(name, "MACs", target)) not in known}
        with TemporaryDirectory() as folder:
            spent = 0.0
            for target in sorted(target for target in targets if target <= max(missing, default=-1)):  # seconds add up
                began = process_time()
                made = method(name)(Task(setup.graph, data, target, store=Path(folder) / "store.sqlite"))
                spent += process_time() - began
                gone = 1 - cost(made.graph).macs / cost(setup.graph).macs
                assert gone >= target, (name, gone)
                if target in missing:
                    yield setup.row(missing[target], Found({}, spent), made.graph.module)


# ---- tables -------------------------------------------------------------------------------------------------------------


def rendered() -> str:
    rows = read_ensembles()
    places = {network: place for place, network in enumerate(NETWORKS)}
    rows.sort(key=lambda row: (places[row.network], row.share))
    percent, number = (lambda value: "–" if value is None else f"{100 * value:.1f}"), (lambda v: "–" if v != v else f"{v:.2f}")
    one = Sheet(
        "The same share of every site's filters removed",
        ("network", "order", "split-half", "sizes of 1 % of the images", "CPU s", "removed", "validation, %", "test, %"),
        tuple(
            (
                *(row.network, row.order, number(row.split_half), number(row.carried), f"{row.cpu_seconds:.1f}"),
                *(f"{row.share:.0%}", percent(row.accuracy), percent(row.test)),
            )
            for row in rows
            if row.removed == "filters"
        ),
    )
    two = Sheet(
        "Cuts allocated by loss per MAC",
        ("network", "order", "MACs removed", "CPU s, curves included", "validation, %", "test, %"),
        tuple(
            (row.network, row.order, f"{row.share:.0%}", f"{row.cpu_seconds:.0f}", percent(row.accuracy), percent(row.test))
            for row in rows
            if row.removed == "MACs"
        ),
    )
    return f"{one.markdown()}\n\n{two.markdown()}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--images", type=int, default=1024, help="training images that give slopes")
    parser.add_argument("--validation", type=int, default=2000)
    parser.add_argument("--test", type=int, default=2500)
    parser.add_argument("--curves", type=int, default=256, help="validation images that curves are measured on")
    parser.add_argument("--shares", type=float, nargs="*", default=[0.25], help="of the filters of every site")
    parser.add_argument("--targets", type=float, nargs="*", default=[0.1, 0.3], help="of the MACs")
    parser.add_argument("--orders", nargs="+", default=list(ORDERS), choices=ORDERS, metavar="ORDER", help="only these")
    parser.add_argument("--off", type=float, default=0.9)
    parser.add_argument("--render", action="store_true", help="only print the tables of the rows")
    given = parser.parse_args()
    for network in [] if given.render else given.networks:
        setup, known = Setup(network, given), {row.case for row in read_ensembles()}
        asked_for = [name for name in (*RIVALS, OURS) if name in given.orders]
        made = uniform(setup, given.shares, given.orders, known), allocated(setup, given.targets, asked_for, known)
        for row in chain(*made):
            append_row(RESULTS, asdict(row))
            sys.stdout.write(f"{row.network} {row.order}: {row.share:.1%} of the {row.removed} removed, {row.accuracy:.2%}\n")
            sys.stdout.flush()
    sys.stdout.write(rendered() + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
