"""What the contract's bound costs, and whether its promise is kept: `python -m benchmarks.contract [slack|enumerate|simulate]`.

`slack` is arithmetic, `enumerate` adds up the probabilities of all outcomes, `simulate` prunes simulated networks whose
true drop is known in closed form: an image is right when its margin is above 0, margins are normal, and every filter
removed adds its own normal noise to each image's margin.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from statistics import NormalDist

import numpy as np
import torch
from torch import Tensor

from secateurs.contract import Contract, Promise, divide_images, paired_bound
from secateurs.search import Judgement, find_cut

NORMAL = NormalDist()
MARGIN = 1.4  # mean of the margins, in standard deviations: 91.9 % are right


# ---- slack -----------------------------------------------------------------------------------------------------------


def pairs(images: int, lost: int, won: int) -> tuple[Tensor, Tensor]:
    """Values before and after with so many images lost and won, half of the others right."""
    before = torch.zeros(images)
    before[: lost + (images - lost - won) // 2] = 1
    after = before.clone()
    after[:lost], after[images - won :] = 0, 1
    return before, after


def print_slack() -> None:
    print("| certifying images | images that changed | drop seen | slack: one look | in a run | one refusal |")
    print("| --- | --- | --- | --- | --- | --- |")
    contract = Contract(0.01)
    for images in (500, 1_000, 2_500, 5_000, 10_000):
        for changed, drop in ((0.0, 0.0), (0.01, 0.0), (0.02, 0.005), (0.04, 0.005)):
            lost, won = round(images * (changed + drop) / 2), round(images * (changed - drop) / 2)
            values = pairs(images, lost, won)
            slacks = [
                paired_bound(*values, 0.95).slack,
                contract.judge(*values).bound.slack,
                contract.judge(*values, answers=[True] * 9 + [False]).bound.slack,
            ]
            print(f"| {images:,} | {changed:.0%} | {drop * 100:.1f} | " + " | ".join(f"{s * 100:.2f}" for s in slacks) + " |")


# ---- enumeration -----------------------------------------------------------------------------------------------------


def uppers(images: int, most: int, chance: float) -> np.ndarray:
    """The bound for every (lost, won) up to `most`."""
    from secateurs import contract

    table = np.full((most + 1, most + 1), np.inf)
    for lost in range(most + 1):
        for won in range(min(most, images - lost) + 1):
            table[lost, won] = (lost - won) / images + contract._pairs_slack(lost, won, images, chance)
    return table


def miss(images: int, chance: float, most: int, rates: np.ndarray) -> tuple[float, tuple[float, float]]:
    """The largest chance, over pairs of true rates with a drop of 0 or more, that the drop is above the bound; and where."""
    bounds, count = uppers(images, most, chance), np.arange(most + 1)
    lost, won = count[:, None], count[None, :]
    rest = np.maximum(images - lost - won, 0)
    log_factorial = np.array([math.lgamma(k + 1) for k in range(images + 1)])
    ways = log_factorial[images] - log_factorial[lost] - log_factorial[won] - log_factorial[rest]
    ways[lost + won > images] = -np.inf
    worst = (0.0, (0.0, 0.0))
    for p in rates[rates > 0]:
        for q in rates[(rates <= p) & (p + rates < 1)]:
            logs = ways + lost * math.log(p) + (won * math.log(q) if q else np.where(won > 0, -np.inf, 0.0))
            found = float(np.exp(logs + rest * math.log1p(-p - q))[bounds < p - q - 1e-12].sum())
            worst = max(worst, (found, (float(p), float(q))))
    return worst


def print_enumeration() -> None:
    print("| images | chance allowed | largest chance found / allowed | at rates lost, won |")
    print("| --- | --- | --- | --- |")
    for images, most, largest in (
        (10, 10, 0.98),
        (60, 60, 0.98),
        (130, 130, 0.95),
        (250, 200, 0.5),
        (1_000, 110, 0.05),
        (5_000, 110, 0.01),
    ):
        rates = np.concatenate([[0.0], np.geomspace(largest / 300, largest, 28)])
        for chance in (0.2, 0.05, 0.04, 0.01, 1e-3, 1e-5, 1e-7):
            found, (p, q) = miss(images, chance, most, rates)
            print(f"| {images:,} | {chance:g} | {found / chance:.2f} | {p:.4f}, {q:.4f} |", flush=True)


# ---- simulation ------------------------------------------------------------------------------------------------------


class World:
    """Margins of some images, and the noise that removing the m least important filters of each site adds to them."""

    def __init__(self, images: int, sites: int, channels: int, generator: torch.Generator) -> None:
        strength = torch.rand(sites, generator=generator) + 0.5
        steps = (torch.arange(1, channels + 1) / channels) ** 2
        self.variances = (0.15 * strength[:, None] * steps).cumsum(1) / 4  # (sites, channels)
        self.variances = torch.cat([torch.zeros(sites, 1), self.variances], 1)
        self.margins = torch.randn(images, generator=generator) + MARGIN
        step_sizes = (self.variances[:, 1:] - self.variances[:, :-1]).sqrt()[:, :, None]
        noise = (torch.randn(sites, channels, images, generator=generator) * step_sizes).cumsum(1)
        self.noise = torch.cat([torch.zeros(sites, 1, images), noise], 1)  # (sites, channels + 1, images)

    def right(self, cuts: list[int], images: Tensor) -> Tensor:
        """Whether each image is right after `cuts` filters are gone from the first sites."""
        moved = self.margins[images].clone()
        for site, m in enumerate(cuts):
            if m:
                moved += self.noise[site, m][images]
        return (moved > 0).float()

    def drop(self, cuts: list[int]) -> float:
        """The true drop, on all images there could be."""
        total = sum(float(self.variances[site, m]) for site, m in enumerate(cuts))
        return NORMAL.cdf(MARGIN) - NORMAL.cdf(MARGIN / math.sqrt(1 + total))


Measure = Callable[[list[int], float], float | Judgement]
"""Takes cuts by site and the share of the drop that may be used up to here."""

Rule = Callable[[World, float], list[int]]
"""Takes a world and the allowed drop, gives the cuts."""


def walk(world: World, max_drop: float, measure: Measure, certify: Callable[[list[int]], Judgement] | None = None) -> list[int]:
    """Algorithm 1: site after site, the drop counted from the start; what may be used of it grows evenly on the way."""
    sites, channels = world.variances.shape[0], world.variances.shape[1] - 1
    cuts: list[int] = []
    for site in range(sites):
        share = (site + 1) / sites
        found = find_cut(
            range(channels),
            lambda keep: measure([*cuts, int((~keep).sum())], share),  # noqa: B023
            baseline=1.0,
            max_drop=max_drop,
            certify=None if certify is None else lambda keep: certify([*cuts, int((~keep).sum())]),
        )
        cuts.append(found.m)
    return cuts


def by_truth(world: World, max_drop: float) -> list[int]:
    """With the true drop known: the most that this walk could remove."""
    return walk(world, max_drop, lambda cuts, share: 1 - world.drop(cuts) / share)


def by_estimate(world: World, max_drop: float) -> list[int]:
    """The usual way: the drop seen on all images decides."""
    everything = torch.arange(len(world.margins))
    before = world.right([], everything).mean()
    return walk(world, max_drop, lambda cuts, share: float(1 - (before - world.right(cuts, everything).mean()) / share))


def by_contract(certifying: float) -> Rule:
    """Part of the images steer, the others certify."""

    def rule(world: World, max_drop: float) -> list[int]:
        contract, sides = Contract(max_drop), divide_images(len(world.margins), certifying=certifying)
        start = world.right([], sides.steering)
        promise = Promise(contract, world.right([], sides.certifying))

        def steer(cuts: list[int], share: float) -> Judgement:
            return contract.judge(start, world.right(cuts, sides.steering), answers=promise.answers, share=share)

        return walk(world, max_drop, steer, lambda cuts: promise.certify(world.right(cuts, sides.certifying)))

    return rule


def by_many_looks(looks: int) -> Rule:
    """A bound on all images at every look of the search, the chance of error divided by the number of looks."""

    def rule(world: World, max_drop: float) -> list[int]:
        everything = torch.arange(len(world.margins))
        contract, before = Contract(max_drop, 1 - 0.05 / 0.8 / looks), world.right([], everything)
        return walk(world, max_drop, lambda cuts, share: contract.judge(before, world.right(cuts, everything), share=share))

    return rule


def by_climbing(world: World, max_drop: float) -> list[int]:
    """All images certify an order that was fixed before: one filter more at every site in turn, until the first refusal."""
    everything = torch.arange(len(world.margins))
    promise = Promise(Contract(max_drop), world.right([], everything))
    sites, channels = world.variances.shape[0], world.variances.shape[1] - 1
    cuts = [0] * sites
    for step in range(sites * (channels - 1)):
        larger = [m + (site == step % sites) for site, m in enumerate(cuts)]
        if not promise.certify(world.right(larger, everything)).accepted:
            break
        cuts = larger
    return cuts


def print_simulation(runs: int, images: int, sites: int, channels: int, max_drop: float) -> None:
    rules: dict[str, Rule] = {
        "the truth (cannot be had)": by_truth,
        "point estimate, all images": by_estimate,
        f"bound on all images, chance / {5 * sites} looks": by_many_looks(5 * sites),
        "contract, 1/2 certify": by_contract(1 / 2),
        "contract, 2/3 certify": by_contract(2 / 3),
        "contract, 3/4 certify": by_contract(3 / 4),
        "contract, climbing a fixed order": by_climbing,
    }
    kept: dict[str, list[tuple[float, int]]] = {name: [] for name in rules}
    for run in range(runs):
        world = World(images, sites, channels, torch.Generator().manual_seed(run))
        for name, rule in rules.items():
            cuts = rule(world, max_drop)
            kept[name].append((world.drop(cuts), sum(cuts)))
    print(f"{runs} runs, {images:,} images, {sites} sites of {channels} filters, at most {max_drop * 100:g} points")
    print("| rule | promise broken | true drop, mean | largest | filters removed |")
    print("| --- | --- | --- | --- | --- |")
    for name, found in kept.items():
        drops, removed = np.array(found).T
        broken, share = (drops > max_drop + 1e-9).mean(), removed.mean() / (sites * channels)
        print(f"| {name} | {broken:.1%} | {drops.mean() * 100:.2f} | {drops.max() * 100:.2f} | {share:.1%} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["slack", "enumerate", "simulate"], default="slack")
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--images", type=int, default=5_000)
    parser.add_argument("--sites", type=int, default=19)
    parser.add_argument("--channels", type=int, default=16)
    parser.add_argument("--max-drop", type=float, default=0.01)
    asked = parser.parse_args()
    if asked.what == "slack":
        print_slack()
    elif asked.what == "enumerate":
        print_enumeration()
    else:
        print_simulation(asked.runs, asked.images, asked.sites, asked.channels, asked.max_drop)


if __name__ == "__main__":
    main()
