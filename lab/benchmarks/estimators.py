"""Ways to estimate the importance of filters, compared on the public ResNet-20: `python -m benchmarks.estimators`.

Losses at masks that all images share (the paper's way), slopes at masks that a batch shares, slopes at masks of each image's
own in several forms, losses of the same pairs, and both together. Cost is counted in image-passes through what lies behind the
site, a gradient pass as `GRADIENT_PASS` of them. Writes lab/benchmarks/results/estimators.json and tables in
lab/notes/scoring.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.conditions import Conditions, conditions
from secateurs import Graph, Site, find_sites, fit_importance, sample_masks, trace
from secateurs._util.download import home
from secateurs._util.files import write_text
from secateurs.config import FAST
from secateurs.data import Data, Examples, load_cifar10, subset
from secateurs.data.dataset import derive, generator_for
from secateurs.metrics import correct, cross_entropy
from secateurs.models import example_input, load_public
from secateurs.scoring import score_site
from secateurs.scoring.cache import MeasurementCache
from secateurs.scoring.engine import split_for
from secateurs.scoring.evaluator import SiteEvaluator
from secateurs.scoring.importance import Importance, rank_correlation
from secateurs.scoring.slopes import GRADIENT_PASS, MaskedSlopes, per_example_coefficients

RESULT = Path(__file__).parent / "results" / "estimators.json"
PAGE = Path(__file__).parents[2] / "lab" / "notes" / "scoring.md"
BEGIN, END = "<!-- begin: made by `python -m benchmarks.estimators` -->", "<!-- end -->"
SHARES = (0.25, 0.5, 0.75)
SEARCH = 1000  # images for accuracy
POOL = 2048  # images with masks of their own
BATCH = 256  # images that share a mask, where they do
PAPER_MASKS, PAPER_IMAGES = 10, 2048  # for each filter; the cost that all others are a share of


@dataclass(frozen=True)
class Plan:
    """How much is measured at a site."""

    site: str
    reference_masks: int  # for each filter
    reference_images: int
    masks_each: int  # for each image of the pool


PLANS = (
    Plan("layer1.2.conv1", 20, 1024, 4),
    Plan("layer1.2.conv2", 20, 1024, 4),
    Plan("layer3.2.conv1", 10, 2048, 16),
    Plan("layer3.1.conv2", 10, 1024, 16),
)


@dataclass(frozen=True)
class Row:
    """One estimator at one cost."""

    name: str
    cost: float  # share of the paper's procedure: 10 masks a filter on 2,048 images
    correlation: float  # rank correlation with the reference
    split_half: float  # rank correlation of two halves: of the masks where images are shared, else of the images
    accuracy: list[float]  # on search images, without 25, 50 and 75 % of the site's filters


@dataclass(frozen=True, eq=False)
class Estimate:
    """Coefficients, what they took, and how far two halves of that agree."""

    name: str
    passes: float
    coef: Tensor
    split_half: Tensor


def from_losses(name: str, masks: Tensor, losses: Tensor) -> Estimate:
    """The paper's way: least squares of the mean loss (M, N) on the masks."""

    def fit(rows: slice) -> Tensor:
        return fit_importance(masks[rows], -losses[rows].double().mean(1)).coef

    halves = fit(slice(0, None, 2)), fit(slice(1, None, 2))
    return Estimate(name, losses.numel(), fit(slice(None)), rank_correlation(*halves))


def from_pairs(name: str, pairs: MaskedSlopes, estimator: Callable[[MaskedSlopes], Tensor], each: float) -> Estimate:
    one, other = (MaskedSlopes(pairs.masks[i::2], pairs.losses[i::2], pairs.slopes[i::2]) for i in (0, 1))
    return Estimate(name, each * pairs.losses.numel(), estimator(pairs), rank_correlation(estimator(one), estimator(other)))


def mean_slope(pairs: MaskedSlopes) -> Tensor:
    return -pairs.slopes.double().mean((0, 1))


def corrected(pairs: MaskedSlopes) -> Tensor:
    """Slopes, corrected where losses contradict them by more than chance: what the library does."""
    return per_example_coefficients(pairs).mean(0)


def trapezoid(pairs: MaskedSlopes) -> Tensor:
    """Half the mean slope where the filter is kept, half that where it is off: nearer to a difference of losses."""
    z, saved = pairs.masks.double(), -pairs.slopes.double()
    return ((saved * z).sum((0, 1)) / z.sum((0, 1)) + (saved * (1 - z)).sum((0, 1)) / (1 - z).sum((0, 1))) / 2


def robust(pairs: MaskedSlopes) -> Tensor:
    """Slopes longer than all but a tenth are shortened to that length."""
    slopes = -pairs.slopes.double().flatten(0, 1)
    length = slopes.norm(dim=1)
    limit = length.sort().values[int(0.9 * len(length))]
    shortened: Tensor = (slopes * (limit / length.clamp_min(1e-30)).clamp_max(1)[:, None]).mean(0)
    return shortened


def losses_alone(pairs: MaskedSlopes) -> Tensor:
    """Least squares of the pairs' losses on their masks, every image with a level of its own."""
    z, saved = within_images(pairs)
    moments = torch.einsum("nkc,nkd->cd", z, z)
    coef: Tensor = torch.linalg.pinv(moments, rtol=1e-9, hermitian=True) @ torch.einsum("nkc,nk->c", z, saved)
    return coef


def losses_and_slopes(pairs: MaskedSlopes) -> Tensor:
    """One regression on both, each weighted by the inverse of the variance of what it leaves."""
    z, saved = within_images(pairs)
    slope_noise = pairs.slopes.double().var((0, 1)).mean()
    loss_noise = saved.square().sum() / (saved.numel() - len(saved))
    weight = slope_noise / loss_noise / saved.numel()
    moments = weight * torch.einsum("nkc,nkd->cd", z, z) + torch.eye(z.shape[-1], dtype=z.dtype)
    coef: Tensor = torch.linalg.solve(moments, weight * torch.einsum("nkc,nk->c", z, saved) + mean_slope(pairs))
    return coef


def within_images(pairs: MaskedSlopes) -> tuple[Tensor, Tensor]:
    z, losses = pairs.masks.double(), pairs.losses.double()
    return z - z.mean(1, keepdim=True), losses.mean(1, keepdim=True) - losses


def estimates(bench: SiteEvaluator, data: Data, plan: Plan) -> Iterator[Estimate]:
    """All of them at one site, the reference first."""
    channels = bench.site.channels
    examples = subset(data.train, plan.reference_images, seed=derive(0, "scoring"))
    masks = sample_masks(channels, plan.reference_masks * channels, generator=generator_for(0, "reference"))
    losses = bench.on(examples).values(masks)
    yield from_losses("reference", masks, losses)
    yield from_losses("losses, 10 C masks", masks[: 10 * channels], losses[: 10 * channels])
    yield from_losses("losses, 2 C masks, 512 images", masks[: 2 * channels], losses[: 2 * channels, :512])
    pool = subset(data.train, POOL, seed=derive(1, "scoring"))
    shared = shared_pairs(bench, pool, plan.masks_each)
    yield from_pairs("slopes, a mask for each batch", shared, mean_slope, GRADIENT_PASS * BATCH)
    whole = own_pairs(bench, pool, plan.masks_each)
    for each in (2, plan.masks_each):
        pairs = MaskedSlopes(whole.masks[:, :each], whole.losses[:, :each], whole.slopes[:, :each])
        label = f"{POOL:,} images, {each} masks each"
        yield from_pairs(f"slopes, {label}", pairs, mean_slope, GRADIENT_PASS)
        yield from_pairs(f"slopes by trapezoid, {label}", pairs, trapezoid, GRADIENT_PASS)
        yield from_pairs(f"slopes, long ones cut, {label}", pairs, robust, GRADIENT_PASS)
        yield from_pairs(f"losses of pairs, {label}", pairs, losses_alone, 1)
        yield from_pairs(f"losses and slopes in one regression, {label}", pairs, losses_and_slopes, GRADIENT_PASS)
        yield from_pairs(f"slopes corrected by losses, {label}", pairs, corrected, GRADIENT_PASS)
    yield fast(bench, data)


def own_pairs(bench: SiteEvaluator, pool: Examples, each: int) -> MaskedSlopes:
    masks = sample_masks(bench.site.channels, each * len(pool), generator=generator_for(1, "own"))
    turns = torch.split(masks, len(pool))
    losses, slopes = zip(*(bench.on(pool).slopes(turn) for turn in turns), strict=True)
    return MaskedSlopes(torch.stack(turns, 1), torch.stack(losses, 1), torch.stack(slopes, 1))


def shared_pairs(bench: SiteEvaluator, pool: Examples, each: int) -> MaskedSlopes:
    """A batch under one mask counts as one example: its mean loss and slope."""
    batches, channels = len(pool) // BATCH, bench.site.channels
    masks = sample_masks(channels, each * batches, generator=generator_for(1, "shared"))
    found = [bench.on(pool).slopes(turn.repeat_interleave(BATCH, 0)) for turn in torch.split(masks, batches)]
    losses = torch.cat([losses.view(batches, BATCH).mean(1) for losses, _ in found])
    slopes = torch.cat([slopes.view(batches, BATCH, channels).mean(1) for _, slopes in found])
    return MaskedSlopes(masks[:, None], losses[:, None], slopes[:, None])


def fast(bench: SiteEvaluator, data: Data) -> Estimate:
    """The default, as it stops by itself."""
    scored = score_site(bench, data.train, FAST, seed=2)
    assert isinstance(scored.importance, Importance)
    name = f"fast: {scored.note}, {scored.examples:,} images"
    return Estimate(name, GRADIENT_PASS * scored.used, scored.importance.coef, scored.importance.split_half)


def measure(graph: Graph, site: Site, data: Data, plan: Plan, store: MeasurementCache) -> dict[str, object]:
    bench = SiteEvaluator(graph, site, cross_entropy, store)
    found = list(estimates(bench, data, plan))
    paper = PAPER_MASKS * site.channels * PAPER_IMAGES
    left = accuracies(graph, site, subset(data.search, SEARCH, seed=0), [one.coef for one in found])
    rows = [
        Row(
            one.name,
            one.passes / paper,
            float(rank_correlation(one.coef, found[0].coef)),
            float(one.split_half),
            accuracy,
        )
        for one, accuracy in zip(found, left, strict=True)
    ]
    return {**asdict(plan), "channels": site.channels, "rows": [asdict(row) for row in rows]}


def accuracies(graph: Graph, site: Site, examples: Examples, coefs: list[Tensor]) -> list[list[float]]:
    masks = torch.ones(len(coefs), len(SHARES), site.channels, dtype=torch.bool)
    for row, coef in enumerate(coefs):
        for column, share in enumerate(SHARES):
            masks[row, column, coef.argsort(stable=True)[: round(share * site.channels)]] = False
    different, place = torch.unique(masks.flatten(0, 1), dim=0, return_inverse=True)
    found = split_for(graph, site, examples).measure(different, [correct])[:, 0]
    accuracy: list[list[float]] = found[place].view(len(coefs), len(SHARES)).tolist()
    return accuracy


def tables(report: dict[str, Any]) -> str:
    """A table for each site, as lab/notes/scoring.md shows them."""
    lines = []
    for site in report["sites"]:
        masks = site["reference_masks"] * site["channels"]
        lines += [f"### {site['site']}, {site['channels']} filters", ""]
        lines += [f"Reference: {masks} masks on {site['reference_images']:,} images.", ""]
        lines += ["| estimator | cost | with reference | split-half | accuracy, % |", "| --- | --- | --- | --- | --- |"]
        for row in site["rows"]:
            accuracy = " / ".join(f"{100 * value:.1f}" for value in row["accuracy"])
            numbers = f"{100 * row['cost']:.1f} % | {row['correlation']:.2f} | {row['split_half']:.2f}"
            lines.append(f"| {row['name']} | {numbers} | {accuracy} |")
        lines.append("")
    return "\n".join(lines)


def update_page(report: dict[str, Any]) -> None:
    """Put the tables between the page's two marks."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    measured = f"Measured on: {Conditions(**report['conditions']).sentence()}.\n\n{tables(report)}"
    write_text(PAGE, f"{before}{BEGIN}\n\n{measured}\n{END}{after}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--store", type=Path, default=home() / "bench" / "estimators.sqlite", help="what was measured is kept here"
    )
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.store.parent.mkdir(parents=True, exist_ok=True)
    store, data = MeasurementCache(options.store), load_cifar10("public", download=False)
    graph = trace(load_public(20), example_input("resnet20"))
    sites = {site.name: site for site in find_sites(graph)}
    measured = [measure(graph, sites[plan.site], data, plan, store) for plan in PLANS]
    report = {"conditions": asdict(conditions()), "search_images": SEARCH, "sites": measured}
    write_text(RESULT, json.dumps(report, indent=1) + "\n")
    update_page(report)
    sys.stdout.write(f"{RESULT}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
