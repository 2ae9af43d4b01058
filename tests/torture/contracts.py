"""Simulated runs under the accuracy contract, on networks whose true drop is known in closed form.

    python -m tests.torture.contracts --count 400 --seed 0

An image is right if its margin is above 0; margins are normal, and every filter removed adds its own normal noise to each
image's margin. Sites, filters and validation images are drawn for every contract; the split of the images, the bounds, the
search and the certification are those of real runs.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from statistics import NormalDist, fmean
from typing import Any, cast

import torch
from torch import Tensor

from secateurs._util.journal import Journal
from secateurs.config import Recipe
from secateurs.pruning.climb import choose_allocation
from secateurs.pruning.curves import counts_of
from secateurs.pruning.figures import KINDS as RECORDS
from secateurs.pruning.judge import Judge, contract_of, judge_for
from secateurs.pruning.measure import Side, divided
from secateurs.pruning.results import ChosenAllocation, Start, Trial
from secateurs.selection.allocation import Allocation, Curve, frontier
from secateurs.selection.contract import Sides

from .tally import Tally

KINDS = ("global", "sequential", "site")
MARGIN = 1.4  # mean of the margins, in standard deviations: 91.9 % are right
IMAGES, MAX_DROP = 5_000, 0.01
SITES, CHANNELS = 19, 16
HELD_OUT = 1024  # search images that curves are measured on
UNLIKELY = 0.01  # that number of violations or more must have at least this probability at a rate of 1 - confidence


class World:
    """A network of `SITES` sites with `CHANNELS` filters each, and what its validation images do without filters."""

    def __init__(self, seed: int, images: int = IMAGES) -> None:
        generator = torch.Generator().manual_seed(seed)
        strength = torch.rand(SITES, generator=generator) + 0.5
        steps = (torch.arange(1, CHANNELS + 1) / CHANNELS) ** 2
        sizes = 0.0375 * strength[:, None] * steps  # variance that each filter's noise has
        self.variances = torch.cat([torch.zeros(SITES, 1), sizes.cumsum(1)], 1).tolist()
        macs = torch.rand(SITES, generator=generator) + 0.5
        self.macs: list[float] = (macs / macs.sum()).tolist()  # of each site, as a share of all
        self.margins = torch.randn(images, generator=generator) + MARGIN
        noise = torch.randn(SITES, CHANNELS, images, generator=generator) * sizes.sqrt()[:, :, None]
        self.noise = torch.cat([torch.zeros(SITES, 1, images), noise.cumsum(1)], 1)  # (sites, removed, images)

    def right(self, cuts: Sequence[int], images: Tensor) -> Tensor:
        """Whether each image is right after `cuts` filters are removed from the first sites, float64."""
        margins = self.margins[images].clone()
        for site, m in enumerate(cuts):
            if m:
                margins += self.noise[site, m][images]
        return (margins > 0).double()

    def accuracy(self, cuts: Sequence[int]) -> float:
        """The true accuracy, on all images there could be."""
        variance = 1 + math.fsum(self.variances[site][m] for site, m in enumerate(cuts))
        return NormalDist().cdf(MARGIN / math.sqrt(variance))

    def saved(self, cuts: Sequence[int]) -> float:
        """The share of the MACs that is removed."""
        return math.fsum(self.macs[site] * m / CHANNELS for site, m in enumerate(cuts))


@dataclass(frozen=True)
class Ended:
    """A simulated run."""

    drop: float  # true, of the final network; where every site has its own budget, the largest of any site
    saved: float  # share of the MACs


def simulate(kind: str, world: World, confidence: float, *, certifying: float | None = None) -> Ended:
    """Prune a world as a run of that kind would; confidence 0: by point estimate."""
    recipe = Recipe.fast(
        max_drop=MAX_DROP,
        confidence=confidence,
        budget="site" if kind == "site" else "run",
        allocation="global" if kind == "global" else "sequential",
        round_to=1,
    )
    contract = contract_of(recipe)
    images = torch.arange(len(world.margins))
    more = {} if certifying is None else {"certifying": certifying}
    metric = WorldMetric(world, images, divided(len(images), contract, seed=recipe.seed, **more))
    judge = judge_for(
        cast(Any, metric),
        contract,
        original=cast(Any, []),
        journal=Journal(None, RECORDS),
        max_drop=MAX_DROP,
        of_run=kind != "site",
    )
    judge.journal.append(Start(metric.mean([]), 0.0))
    if kind == "global":
        cuts = _allocated(world, recipe, judge)
        return Ended(world.accuracy([]) - world.accuracy(cuts), world.saved(cuts))
    cuts, drops = _site_by_site(world, recipe, judge)
    drop = max(drops) if kind == "site" else world.accuracy([]) - world.accuracy(cuts)
    return Ended(drop, world.saved(cuts))


@dataclass(frozen=True, eq=False)
class WorldMetric:
    """What a network of the world, which is its cuts, is worth (see `secateurs.pruning.measure.Metric`)."""

    world: World
    images: Tensor
    sides: Sides | None
    name: str = "accuracy"

    def on(self, side: Side) -> Tensor:
        if self.sides is None:
            return self.images
        return self.images[self.sides.search if side == "look" else self.sides.certification]

    def values(self, graph: Any, side: Side) -> Tensor:
        return self.world.right(graph, self.on(side))

    def mean(self, graph: Any) -> float:
        return float(self.values(graph, "look").mean())


@dataclass(frozen=True)
class NextSite:
    """Masks of the next site (see `secateurs.pruning.measure.UnderMasks`)."""

    metric: WorldMetric
    cuts: list[int]

    def values(self, keep: Tensor, side: Side) -> Tensor:
        return self.metric.values([*self.cuts, int((~keep).sum())], side)

    def mean(self, keep: Tensor) -> float:
        return float(self.values(keep, "look").mean())


def _allocated(world: World, recipe: Recipe, judge: Judge) -> list[int]:
    """Measure curves, then look and certify along the frontier."""
    few = cast(WorldMetric, judge.metric).on("look")[:HELD_OUT]
    counts = counts_of(CHANNELS, recipe.largest_share, 1)
    curves = [
        Curve(
            str(site),
            counts,
            tuple(float(world.noise[site, m][few].square().mean()) for m in counts),
            tuple(world.macs[site] * m / CHANNELS for m in counts),
        )
        for site in range(SITES)
    ]
    divisions = frontier(curves)

    def look(index: int) -> Trial:
        found = judge.look(cast(Any, _cuts(divisions[index])))
        return Trial("steering", index, found.accepted, found.accuracy, found.by_estimate)

    def certify(index: int, answers: Sequence[bool]) -> Trial:
        found = judge.certify(cast(Any, _cuts(divisions[index])), answers)
        return Trial("certifying", index, found.accepted, upper=found.upper)

    return _cuts(choose_allocation(divisions, look, certify if judge.certifies else None))


def _site_by_site(world: World, recipe: Recipe, judge: Judge) -> tuple[list[int], list[float]]:
    """Algorithm 1: the cuts, and what each cost, truly."""
    cuts: list[int] = []
    drops: list[float] = []
    metric = cast(WorldMetric, judge.metric)
    for site in range(SITES):
        since = judge.enter(cast(Any, cuts), metric.mean(cuts))
        found = judge.largest_cut(
            torch.arange(CHANNELS),
            NextSite(metric, cuts),
            since,
            visited=(site + 1) / SITES,
            trains=False,
            method=recipe.search,
            largest_share=recipe.largest_share,
            accuracy_now=metric.mean(cuts),
        )
        drops.append(world.accuracy(cuts) - world.accuracy([*cuts, found.m]))
        cuts = [*cuts, found.m]
    return cuts, drops


def _cuts(allocation: Allocation | ChosenAllocation) -> list[int]:
    return [allocation.removed[str(site)] for site in range(SITES)]


# ---- many of them ----------------------------------------------------------------------------------------------------


def _pair(kind: str, seed: int, **options: Any) -> tuple[Ended, Ended]:
    """A run under the contract, and one by point estimate, on the same images."""
    torch.set_num_threads(1)
    world = World(seed)
    return simulate(kind, world, 0.95, **options), simulate(kind, world, 0.0)


def ended(kind: str, seeds: Sequence[int], workers: int = 1, **options: Any) -> list[tuple[Ended, Ended]]:
    """Runs under the contract and by point estimate, one pair for every seed."""
    each = partial(_pair, kind, **options)
    if workers == 1:
        return [each(seed) for seed in seeds]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        return list(pool.map(each, seeds, chunksize=8))


def tail(violations: int, count: int, rate: float = 0.05) -> float:
    """The probability of at least that number of violations."""
    return 1 - math.fsum(math.comb(count, k) * rate**k * (1 - rate) ** (count - k) for k in range(violations))


def run(count: int, seed: int, workers: int = 2) -> Tally:
    """Simulate `count` contracts of every kind; a failure is a number of violations that 5 % cannot explain."""
    began, outcomes, failures = time.monotonic(), {}, []
    for kind in KINDS:
        pairs = ended(kind, range(seed, seed + count), workers)
        violated = sum(held.drop > MAX_DROP + 1e-12 for held, _ in pairs)
        used = fmean(held.drop for held, _ in pairs) / MAX_DROP
        ratio = fmean(held.saved for held, _ in pairs) / fmean(guessed.saved for _, guessed in pairs)
        outcomes |= {f"{kind}: kept": count - violated, f"{kind}: violated": violated}
        outcomes |= {f"{kind}: % of the allowed drop used": round(100 * used)}
        outcomes |= {f"{kind}: % of the MACs that the point estimate removes": round(100 * ratio)}
        if tail(violated, count) < UNLIKELY:
            failures.append(f"{kind}: {violated} of {count} contracts were violated, where 5 % are allowed")
    return Tally("contracts", count * len(KINDS), outcomes, tuple(failures), time.monotonic() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    asked = parser.parse_args()
    found = run(asked.count, asked.seed, asked.workers)
    print(f"{found.tried} contracts in {found.seconds:.0f} s")
    for name, number in found.outcomes.items():
        print(f"{name}: {number}")
    for line in found.failures:
        print(f"FAILED {line}")


if __name__ == "__main__":
    main()
