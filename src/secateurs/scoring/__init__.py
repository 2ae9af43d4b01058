"""How a site's filters are ranked: which masks are drawn, on which examples, by losses or by slopes, and when it is enough.

`PAPER` is the paper's procedure: a fixed number of masks, each measured on all examples. `FAST` lets every example have masks
of its own and takes the slope of its loss along them; rounds follow until the set of the least important filters is settled.
"""

from __future__ import annotations

from secateurs._util.modules import Device
from secateurs.config import FAST, PAPER, PRESETS, Estimator, Model, Scoring
from secateurs.data.dataset import Examples
from secateurs.graph.sites import Site
from secateurs.graph.trace import Graph
from secateurs.metrics import Measure, cross_entropy
from secateurs.scoring.cache import MeasurementCache
from secateurs.scoring.ensemble import EnsembleJob, EnsembleResult, OnScored, by_fixed_masks, by_rounds
from secateurs.scoring.evaluator import SiteEvaluator
from secateurs.scoring.slopes import by_slopes

__all__ = ["FAST", "PAPER", "PRESETS", "Estimator", "Model", "OnScored", "Scored", "Scoring", "score_bench", "score_site"]


def score_site(
    graph: Graph,
    site: Site,
    pool: Examples,
    scoring: Scoring = FAST,
    *,
    loss_fn: Measure = cross_entropy,
    batch: int = 256,
    device: Device = None,
    cache_bytes: int | None = None,
    seed: int = 0,
    step: int = 1,
    store: MeasurementCache | None = None,
    on_scored: OnScored | None = None,
) -> EnsembleResult:
    """Rank the filters of `site` by examples of `pool`: masks are drawn and measured, and the linear model is fitted to them.

    All that is random follows from `seed` (which examples) and from `seed` and `step` (which masks). What is measured goes
    through `store`, so that an interrupted call, made again, measures only what is left and ends the same. `on_scored` gets the
    number of masks measured so far and their bound.
    """
    bench = SiteEvaluator(graph, site, loss_fn, MeasurementCache() if store is None else store, batch, device, cache_bytes)
    return score_bench(bench, pool, scoring, seed=seed, step=step, on_scored=on_scored)


def score_bench(
    bench: SiteEvaluator,
    pool: Examples,
    scoring: Scoring = FAST,
    *,
    seed: int = 0,
    step: int = 1,
    on_scored: OnScored | None = None,
) -> EnsembleResult:
    """The same for a network that is set up already: if its weights follow the mask, losses are those after repair."""
    work = EnsembleJob(bench, pool, scoring, seed, step, on_scored or (lambda done, bound: None))
    if scoring.estimator == "gradient":
        return by_slopes(work)
    return by_rounds(work) if scoring.adaptive else by_fixed_masks(work)
