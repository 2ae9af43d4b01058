"""Part 3: what `fast` costs, as a share of the paper's procedure that is as reliable, and the whole of ResNet-20 in minutes.

Reliable is a procedure that ranks the filters alike when it is repeated. For the paper's: the rank correlation of the
rankings from two halves of its masks (split-half), averaged over ways to halve them. For `fast`: that of two runs with
other masks and other images. A half is compared with a run, so the cost of a run is set against that of a half.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from benchmarks.scoring_quality import budget_of, coef_of, held_to, image_passes, ladder, paper_losses, timed_scoring
from benchmarks.scoring_setup import CORES, PAPER_IMAGES, PAPER_MASKS, Bench, Losses, draw, seconds_of, stands_for
from benchmarks.scoring_speed import Naive
from secateurs import Site, fit_importance, scores
from secateurs.config import FAST, Scoring
from secateurs.data.dataset import generator_for
from secateurs.scoring.importance import rank_correlation
from secateurs.speed.timing import using_threads

HALVINGS = 20
NAIVE_IMAGES, NAIVE_MASKS = 512, 3
WHOLE = "resnet20"


def measure_reliability(bench: Bench, model: str, site: Site) -> dict[str, Any]:
    """The paper's ensemble against runs of `fast` at several budgets."""
    found = paper_losses(bench, model, site)
    halves = split_halves(found)
    return {
        "model": model,
        "site": site.name,
        "channels": site.channels,
        "paper": {
            "masks": len(found.masks),
            "images": found.values.shape[1],
            "seconds": found.seconds,
            "passes": found.values.numel(),
            "split half": float(halves.mean()),
            "low": float(halves.quantile(0.05)),
            "high": float(halves.quantile(0.95)),
        },
        "fast": runs_of(FAST, bench, model, site),
        "held to": [runs_of(held_to(pairs), bench, model, site) for pairs in ladder(bench)],
    }


def split_halves(found: Losses) -> Tensor:
    """Rank correlations of the coefficients from two halves of the masks, for several ways to halve them."""
    generator = generator_for(0, "halves")
    correlations = []
    for _ in range(HALVINGS):
        rows = torch.randperm(len(found.masks), generator=generator)
        one, other = (
            fit_importance(found.masks[half], scores(found.values[half].mean(1))).coef for half in (rows[::2], rows[1::2])
        )
        correlations.append(rank_correlation(one, other))
    return torch.stack(correlations)


def runs_of(scoring: Scoring, bench: Bench, model: str, site: Site) -> dict[str, Any]:
    """Runs with different seeds, and how far they agree."""
    runs = [timed_scoring(bench, model, site, scoring, seed=seed) for seed in range(max(2, bench.form.seeds))]
    agreed = [float(rank_correlation(coef_of(a), coef_of(b))) for (a, _), (b, _) in combinations(runs, 2)]
    return {
        "budget": budget_of(runs[0][0]),
        "note": runs[0][0].note,
        "seconds": sum(seconds for _, seconds in runs) / len(runs),
        "passes": sum(image_passes(scored, scoring) for scored, _ in runs) / len(runs),
        "agreement": sum(agreed) / len(agreed),
        "pairs": len(agreed),
    }


def measure_whole_site(bench: Bench, site: Site) -> dict[str, Any]:
    """`fast` at one site of the uncut ResNet-20, on all cores."""
    scored, seconds = timed_scoring(bench, WHOLE, site, FAST, seed=0)
    return {
        "site": site.name,
        "channels": site.channels,
        "filters for": stands_for(bench.sites(WHOLE), [other.name for other in whole_sites(bench)])[site.name],
        "seconds": seconds,
        "note": scored.note,
        "images": scored.examples,
    }


def whole_sites(bench: Bench) -> list[Site]:
    """The sites of ResNet-20 at which `fast` is timed: all, where the form names none."""
    wanted = bench.form.whole_sites
    return [site for site in bench.sites(WHOLE) if not wanted or site.name in wanted]


def measure_naive(bench: Bench) -> dict[str, Any]:
    """Seconds of the naive way for one mask and one image on all cores, from which the paper's cost is extrapolated.

    That is with a thread for each core, or a process: what is less, and processes taken as not disturbing each other.
    """
    site = bench.sites(WHOLE)[0]
    naive, examples, masks = Naive(bench.graph(WHOLE), site), bench.images(NAIVE_IMAGES), draw(site, NAIVE_MASKS, "naive")
    naive.losses(masks[:1], examples)
    turns = []
    for threads in (1, CORES, 1, CORES):
        with using_threads(threads):
            turns.append(seconds_of(lambda: naive.losses(masks, examples)) * threads / CORES)
    each = min(turns) / NAIVE_MASKS / NAIVE_IMAGES  # other programs only ever add time
    masks_in_all = PAPER_MASKS * sum(site.channels for site in bench.sites(WHOLE))
    return {
        "seconds for a mask and an image": each,
        "masks": masks_in_all,
        "images": PAPER_IMAGES,
        "hours": each * masks_in_all * PAPER_IMAGES / 3600,
        "cores": CORES,
    }


def cheapest(unit: dict[str, Any]) -> dict[str, Any] | None:
    """The cheapest runs that agree as the paper's halves do; None where none does."""
    enough = [run for run in (unit["fast"], *unit["held to"]) if run["agreement"] >= unit["paper"]["split half"]]
    return min(enough, key=lambda run: float(run["seconds"]), default=None)


def share_of_paper(unit: dict[str, Any], run: dict[str, Any], what: str = "seconds") -> float:
    """The cost of a run over that of half of the paper's masks."""
    return float(run[what] / (unit["paper"][what] / 2))
