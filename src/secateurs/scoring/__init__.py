"""How a site's filters are scored: which masks are drawn, on which examples, by losses or by slopes, and when to stop.

`PAPER` is the paper's procedure: a fixed number of masks, each measured on all examples. `FAST` gives every example masks of
its own and takes the slope of its loss along them, in rounds, until the set of the least important filters is stable.
"""

from __future__ import annotations

from secateurs.config import FAST, PAPER, Estimator, Scoring
from secateurs.data.dataset import Examples
from secateurs.errors import InvalidInput
from secateurs.scoring.ensemble import EnsembleJob, EnsembleResult, OnScored, by_fixed_masks, by_rounds
from secateurs.scoring.evaluator import SiteEvaluator
from secateurs.scoring.slopes import by_slopes

__all__ = [
    "FAST",
    "PAPER",
    "EnsembleResult",
    "Estimator",
    "OnScored",
    "Scoring",
    "score_site",
]


def score_site(
    evaluator: SiteEvaluator,
    pool: Examples,
    scoring: Scoring = FAST,
    *,
    seed: int = 0,
    step: int = 1,
    on_scored: OnScored | None = None,
) -> EnsembleResult:
    """Score the filters of the evaluator's site on examples of `pool`: draw masks, measure them, and fit the linear model.

    All randomness follows from `seed` (which examples) and from `seed` and `step` (which masks). Measurements go through the
    evaluator's store, so that an interrupted call, repeated, measures only the rest and ends the same. Where the evaluator's
    weights follow the mask, losses are those after repair.
    """
    if scoring.estimator == "network":
        raise InvalidInput("estimator 'network' scores all sites of a network together: call scoring.network.score_network.")
    job = EnsembleJob(evaluator, pool, scoring, seed, step, on_scored or (lambda done, bound: None))
    if scoring.estimator == "gradient":
        return by_slopes(job)
    return by_rounds(job) if scoring.adaptive else by_fixed_masks(job)
