"""Who ranks a site's filters: ensembles, a rival criterion, the surgeon's order, or the best of several (`portfolio`).

Whoever it is gives an order, least important first. The portfolio lets several give theirs, and measures the network that
each would leave, repaired if repairs are made, at the same numbers of filters, on examples that the network was not trained
on: a memorised example has no loss left that could tell orders apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from secateurs.config import PORTFOLIO, Scoring
from secateurs.criteria import criterion
from secateurs.data.dataset import Examples, derive
from secateurs.data.splits import subset
from secateurs.metrics import Measure
from secateurs.repair import Reconstruction
from secateurs.scoring import OnScored, score_bench
from secateurs.scoring.ensemble import Ensemble
from secateurs.scoring.evaluator import SiteEvaluator
from secateurs.scoring.importance import Importance, PairImportance, order

_SHARES = (0.25, 0.5, 0.75)  # of a site's filters: where a portfolio compares orders
_RIDGE = 1e-6  # of the repairs under an ensemble's masks
_RIVALS_SEE = 1024  # examples: of those rivals that look at any


@dataclass(frozen=True, eq=False)
class Ranking:
    """The order of a site's filters, who gave it, and what it rests on."""

    criterion: str
    order: Tensor  # (C,) filter ids, least important first
    importance: Importance | PairImportance | None = None
    ensemble: Ensemble | None = None
    masks: int = 0
    examples: int = 0
    note: str = ""
    r2_held_out: float = math.nan
    split_half: float = math.nan
    compared: tuple[tuple[str, float], ...] = ()  # by a portfolio: mean loss over the cuts compared, best first


@dataclass(frozen=True, eq=False)
class Ranker:
    """What ranking a site needs besides the site: examples to score on, a loss for them, and how ensembles are made."""

    pool: Examples
    loss_fn: Measure
    scoring: Scoring
    held_out: Examples  # where a portfolio compares
    held_out_loss: Measure
    portfolio: Sequence[str] = PORTFOLIO
    repaired_masks: bool = False  # the loss under a mask is that after the repair which the mask would get
    seed: int = 0


def rank(
    name: str,
    bench: SiteEvaluator,
    ranker: Ranker,
    *,
    reconstruction: Reconstruction | None = None,
    step: int = 1,
    on_scored: OnScored | None = None,
) -> Ranking:
    """The ranking of the bench's site by the criterion called `name`, one of `CRITERIA`."""
    if name == "portfolio":
        return _best_of(bench, ranker, reconstruction, step, on_scored)
    if name in ("ensemble", "pairs"):
        return _by_ensemble(name, bench, ranker, reconstruction, step, on_scored)
    if name == "obs":
        if reconstruction is None:
            return replace(rank("l1", bench, ranker, step=step), note="nothing that reads the site can be observed: l1 for obs")
        return Ranking(name, reconstruction.order().order)
    few = subset(ranker.pool, min(_RIVALS_SEE, len(ranker.pool)), seed=derive(ranker.seed, "scoring"))
    rival = criterion(name)
    found = rival(
        bench.graph, bench.site, few, seed=ranker.seed + step, loss_fn=ranker.loss_fn, batch=bench.batch, device=bench.device
    )
    return Ranking(name, order(found), found, examples=len(few))


def _by_ensemble(
    name: str,
    bench: SiteEvaluator,
    ranker: Ranker,
    reconstruction: Reconstruction | None,
    step: int,
    on_scored: OnScored | None,
) -> Ranking:
    scoring = ranker.scoring
    if name == "pairs":
        scoring = replace(scoring, estimator="losses", model="pairs", masks_per_filter=10, masks=None)
    bench = replace(bench, measure=ranker.loss_fn, weights=None, unfolded=(), variant="")
    if ranker.repaired_masks and reconstruction is not None:
        bench = replace(bench, weights=_solved(reconstruction), unfolded=reconstruction.readers, variant=f"ridge {_RIDGE}")
    scored = score_bench(bench, ranker.pool, scoring, seed=ranker.seed, step=step, on_scored=on_scored)
    found = scored.importance
    return Ranking(
        name,
        order(found),
        found,
        scored.ensemble,
        masks=scored.used,
        examples=scored.examples,
        note=scored.note,
        r2_held_out=float(found.r2_held_out),
        split_half=float(found.split_half) if isinstance(found, Importance) else math.nan,
    )


def _solved(reconstruction: Reconstruction) -> Callable[[Tensor], Mapping[str, Tensor]]:
    """The repair of each mask, by one factorisation: to choose the ridge anew for each would take longer than to measure it."""
    return lambda keep: reconstruction.solve(keep, ridge=_RIDGE).weights


def _best_of(
    bench: SiteEvaluator, ranker: Ranker, reconstruction: Reconstruction | None, step: int, on_scored: OnScored | None
) -> Ranking:
    """The ranking that leaves the smallest loss, a mean over cuts of several sizes."""
    names = [name for name in ranker.portfolio if name != "obs" or reconstruction is not None]
    found = {name: rank(name, bench, ranker, reconstruction=reconstruction, step=step, on_scored=on_scored) for name in names}
    channels = bench.site.channels
    counts = sorted({min(max(round(share * channels), 1), channels - 1) for share in _SHARES})
    measured = replace(bench, measure=ranker.held_out_loss).on(ranker.held_out)
    losses = {name: _typical(measured.means(cuts_along(ranking.order, counts))) for name, ranking in found.items()}
    compared = tuple(sorted(losses.items(), key=lambda entry: entry[1]))
    winner, least = compared[0]
    note = f"{winner} won the portfolio, {_margin(least, compared)}"
    won = found[winner]
    return replace(won, note=f"{note}; {won.note}" if won.note else note, compared=compared)


def cuts_along(order: Tensor, counts: Sequence[int]) -> Tensor:
    """The masks (len(counts), C) that remove the first so many filters of an order."""
    keeps = torch.ones(len(counts), len(order), dtype=torch.bool)
    for row, count in enumerate(counts):
        keeps[row, order[:count]] = False
    return keeps


def _typical(losses: Tensor) -> float:
    """The geometric mean of losses above 0, so that the largest cut does not outweigh all others; else the plain mean."""
    return float(losses.log().mean().exp() if bool((losses > 0).all()) else losses.mean())


def _margin(least: float, compared: Sequence[tuple[str, float]]) -> str:
    if len(compared) == 1:
        return "being alone"
    name, loss = compared[1]
    return f"with a loss of {least:.4f} against {loss:.4f} of {name}"
