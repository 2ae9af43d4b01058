"""Part 2: how well each way to rank filters agrees with a high-budget reference, and what accuracy it leaves, over its cost.

Cost is counted in seconds, measured on all cores, and in image-passes: one image through what lies behind the site once.
A backward pass counts as two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from benchmarks.scoring_setup import CORES, Bench, Losses, draw, means, measured_losses, removal_masks
from secateurs import Importance, Site, fit_importance, scores
from secateurs.config import FAST, Scoring
from secateurs.criteria import score_filters
from secateurs.data import subset
from secateurs.metrics import correct
from secateurs.scoring import EnsembleResult, score_site
from secateurs.scoring.engine import split_for
from secateurs.scoring.evaluator import SiteEvaluator
from secateurs.scoring.importance import rank_correlation
from secateurs.speed.timing import using_threads

SHARES = (0.25, 0.5, 0.75)
BACKWARD = 2  # image-passes that a backward pass counts as
ACCURACIES = 2  # rankings of each kind whose accuracy is measured; agreement is measured for all


@dataclass(frozen=True, eq=False)
class Ranked:
    """Rankings by one method at one cost, each from other masks and images where the method draws them."""

    method: str
    budget: str
    coefs: tuple[Tensor, ...]
    seconds: float | None  # for one ranking; None for the reference, which is no rival
    passes: float | None
    default: bool = False  # as the method is used, and not held to another budget


def measure_quality(bench: Bench, model: str, site: Site) -> dict[str, Any]:
    """All methods at one site."""
    reference = reference_importance(bench, model, site)
    ranked = [
        Ranked("reference", "", (reference.coef,), None, None, default=True),
        *paper_rankings(bench, model, site),
        *estimator_rankings(bench, model, site),
        *criterion_rankings(bench, model, site),
    ]
    left = accuracies(bench, model, site, ranked)
    return {
        "model": model,
        "site": site.name,
        "channels": site.channels,
        "reference": {"masks": bench.form.reference.count(site), "images": bench.form.reference.images},
        "reference split half": float(reference.split_half),
        "search images": len(bench.search),
        "rows": [row(one, reference.coef, accuracy) for one, accuracy in zip(ranked, left, strict=True)],
    }


def row(one: Ranked, reference: Tensor, accuracy: list[float]) -> dict[str, Any]:
    found = rank_correlation(torch.stack(one.coefs), reference.expand(len(one.coefs), -1))
    return {
        "method": one.method,
        "budget": one.budget,
        "default": one.default,
        "seconds": one.seconds,
        "passes": one.passes,
        "correlation": float(found.mean()),
        "sd": float(found.std()) if len(found) > 1 else None,
        "rankings": len(found),
        "accuracy": accuracy,
    }


def reference_importance(bench: Bench, model: str, site: Site) -> Importance:
    """From many masks on many images, neither shared with anything that is compared with it."""
    size = bench.form.reference
    examples = subset(bench.pools[0], size.images, seed=0).ready()
    masks = draw(site, size.count(site), "reference")
    losses = measured_losses(bench, model, site, masks, examples).values.mean(1)
    return fit_importance(masks, scores(losses))


def paper_losses(bench: Bench, model: str, site: Site) -> Losses:
    """The ensemble that stands for the paper's procedure, on the exact engine, one loss for each mask and image."""
    size = bench.form.paper
    masks = draw(site, size.count(site), "paper")
    return measured_losses(bench, model, site, masks, bench.images(size.images))


def paper_rankings(bench: Bench, model: str, site: Site) -> Iterator[Ranked]:
    """Parts of one ensemble: a part of its masks and of its images costs that part of its time."""
    found = paper_losses(bench, model, site)
    count, images = found.values.shape
    for share in (1, 2, 4, 8):
        for part in (1, 4):
            rows, few = count // share, images // part
            if rows < site.channels // 2:
                continue
            blocks = [slice(start, start + rows) for start in range(0, count - rows + 1, rows)]
            coefs = tuple(
                fit_importance(found.masks[block], scores(found.values[block, :few].mean(1))).coef for block in blocks
            )
            cost = rows / count * few / images
            yield Ranked("paper", f"{rows} masks, {few} images", coefs, found.seconds * cost, rows * few, cost == 1)


def estimator_rankings(bench: Bench, model: str, site: Site) -> Iterator[Ranked]:
    """`fast` as it is; slopes with a fixed number of masks; and losses in rounds that stop when they may."""
    yield repeated("fast", FAST, bench, model, site, default=True)
    for pairs in ladder(bench):
        yield repeated("gradient", held_to(pairs), bench, model, site)
    bound = max(1, int(bench.form.paper.masks))
    rounds = Scoring(estimator="losses", masks_per_filter=bound, examples=min(bench.form.paper.images, 512))
    yield repeated("losses in rounds", rounds, bench, model, site)


def ladder(bench: Bench) -> tuple[int, ...]:
    """Budgets of slopes: pairs of an example and its own mask."""
    return (512, 2048) if bench.form.name == "quick" else (256, 512, 1024, 2048, 4096, 8192, 16384)


def held_to(pairs: int) -> Scoring:
    """`fast` that stops after a fixed number of pairs, stable or not."""
    return replace(FAST, adaptive=False, masks=pairs)


def repeated(method: str, scoring: Scoring, bench: Bench, model: str, site: Site, *, default: bool = False) -> Ranked:
    """One estimator, run with several seeds: each draws its own masks and images."""
    runs, seconds = [], 0.0
    for seed in range(bench.form.seeds):
        scored, took = timed_scoring(bench, model, site, scoring, seed)
        runs.append(scored)
        seconds += took
    passes = sum(image_passes(scored, scoring) for scored in runs) / len(runs)
    return Ranked(method, budget_of(runs[0]), tuple(map(coef_of, runs)), seconds / len(runs), passes, default)


def timed_scoring(bench: Bench, model: str, site: Site, scoring: Scoring, seed: int) -> tuple[EnsembleResult, float]:
    """What an estimator finds, and its seconds on all cores; the same run is made once."""
    key = (model, site.name, scoring, seed)
    if key not in bench.memory:
        pool = bench.pools[1]
        with using_threads(CORES):
            start = perf_counter()
            scored = score_site(SiteEvaluator(bench.graph(model), site), pool, scoring, seed=seed)
            bench.memory[key] = scored, perf_counter() - start
    found: tuple[EnsembleResult, float] = bench.memory[key]
    return found


def coef_of(scored: EnsembleResult) -> Tensor:
    assert isinstance(scored.importance, Importance)
    return scored.importance.coef


def image_passes(scored: EnsembleResult, scoring: Scoring) -> int:
    """By slopes each mask has one image of its own, and a backward pass; by losses each meets all images."""
    return scored.used * (1 + BACKWARD) if scoring.estimator == "gradient" else scored.used * scored.examples


def budget_of(scored: EnsembleResult) -> str:
    return f"{scored.used:,} masks, {scored.examples:,} images"


CHEAP = ("l1", "l2", "fpgm", "batchnorm", "random")


def criterion_rankings(bench: Bench, model: str, site: Site) -> Iterator[Ranked]:
    """The rivals: those that look at data at two sizes, the others once; chance several times."""
    sizes = (256, 1024) if bench.form.name == "full" else (256,)
    for images in sizes:
        for name, each in (("taylor", 1 + BACKWARD), ("leave-one-out", site.channels + 1)):
            yield ranked_by(name, bench, model, site, images=images, passes=each * images, seeds=bench.form.seeds)
    for name in CHEAP:
        yield ranked_by(name, bench, model, site, images=1, passes=0, seeds=10 if name == "random" else 1)


def ranked_by(name: str, bench: Bench, model: str, site: Site, *, images: int, passes: int, seeds: int) -> Ranked:
    coefs, seconds = [], 0.0
    for seed in range(seeds):
        examples = bench.images(images, seed=seed)
        with using_threads(CORES):
            start = perf_counter()
            coefs.append(score_filters(name, SiteEvaluator(bench.graph(model), site), examples, seed=seed).coef)
            seconds += perf_counter() - start
    return Ranked(name, f"{images} images" if passes else "", tuple(coefs), seconds / seeds, passes)


def accuracies(bench: Bench, model: str, site: Site, ranked: Sequence[Ranked]) -> list[list[float]]:
    """Accuracy on the search images without 25, 50 and 75 % of the site's filters, for each method the mean of its rankings."""
    orders = [[ids_of(coef) for coef in one.coefs[:ACCURACIES]] for one in ranked]
    masks = removal_masks([ids for few in orders for ids in few], SHARES)
    different, which = masks.unique(dim=0, return_inverse=True)  # type: ignore[no-untyped-call]
    network = split_for(bench.graph(model), site, bench.search)
    with using_threads(CORES):
        found = means(network, different, correct)[which].view(-1, len(SHARES))
    return [part.mean(0).tolist() for part in torch.split(found, [len(few) for few in orders])]


def ids_of(coef: Tensor) -> Tensor:
    """Filters in the order to remove them, least important first."""
    return coef.argsort(stable=True)
