"""Ranks a site's filters by a named criterion and gives their ids, least important first.

Besides the registered criteria there are ensembles ("ensemble"), the order of structured OBS ("obs"), and "portfolio".
The portfolio measures the network that each of several criteria would leave, repaired if the run repairs, at the same numbers
of filters, on held-out examples: a memorised training example has no loss left to tell orders apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from secateurs.config import PORTFOLIO, Scoring
from secateurs.criteria import score_filters, short_name
from secateurs.data.dataset import Examples, derive
from secateurs.data.splits import subset
from secateurs.graph.sites import Site, find_sites
from secateurs.graph.trace import Graph
from secateurs.metrics import Measure
from secateurs.repair import Reconstruction
from secateurs.repair.survey import Curvature
from secateurs.scoring import OnScored, score_site
from secateurs.scoring.ensemble import Ensemble
from secateurs.scoring.evaluator import SiteEvaluator
from secateurs.scoring.importance import order
from secateurs.scoring.network import RankedSite, score_network

_SHARES = (0.25, 0.5, 0.75)  # of a site's filters: where a portfolio compares orders
_EXAMPLES = 1024  # for the registered criteria


@dataclass(frozen=True, eq=False)
class Ranking:
    """The order of a site's filters, the criterion that gave it, and the evidence."""

    criterion: str
    order: Tensor  # (C,) filter ids, least important first
    importance: Any = field(default=None, metadata={"journal": False})  # Importance, or None if read back
    ensemble: Ensemble | None = field(default=None, metadata={"journal": False})
    masks: int = 0
    examples: int = 0
    note: str = ""
    r2_held_out: float = math.nan
    split_half: float = math.nan
    compared: tuple[tuple[str, float], ...] = ()  # by a portfolio: mean loss over the cuts compared, best first
    predicted: tuple[float, ...] = ()  # by obs: losses without the first 1, 2, … filters, up to a factor


@dataclass(frozen=True, eq=False)
class Ranker:
    """What ranking needs besides the site: examples and a loss to score by, and the settings of ensembles and portfolios."""

    pool: Examples
    loss_fn: Measure
    scoring: Scoring
    held_out: Examples  # where a portfolio compares
    held_out_loss: Measure
    portfolio: Sequence[str] = PORTFOLIO
    seed: int = 0
    sites: Callable[[Graph], Sequence[Site]] = find_sites  # whose masks are drawn together
    networks: list[tuple[Graph, dict[str, RankedSite]]] = field(default_factory=list)  # the latest one that was scored whole


def rank(
    name: str,
    evaluator: SiteEvaluator,
    ranker: Ranker,
    *,
    reconstruction: Reconstruction | None = None,
    curvature: Curvature | None = None,
    step: int = 1,
    on_scored: OnScored | None = None,
) -> Ranking:
    """Rank the filters of the evaluator's site by the criterion called `name`.

    `evaluator` measures the network as a cut would leave it, repaired if the run repairs: a portfolio compares orders by it.
    With the `curvature` of the loss, obs weighs errors by what they cost, and predicts losses.
    """
    if name == "portfolio":
        return _portfolio(evaluator, ranker, reconstruction, curvature, step, on_scored)
    if name == "obs":
        if reconstruction is None:
            note = "no consumer of the site can be observed: ranked by l1 instead of obs"
            return replace(rank("l1", evaluator, ranker, step=step), note=note)
        if curvature is None or not reconstruction.is_predictable(curvature):
            return Ranking(name, reconstruction.order().order)
        found = reconstruction.order(curvature=curvature)
        return Ranking(name, found.order, predicted=tuple(found.increases.cumsum(0).tolist()))
    plain = evaluator.unrepaired(ranker.loss_fn)
    if name == "ensemble" and ranker.scoring.estimator == "network":
        return _by_network(plain, ranker, on_scored)
    if name == "ensemble":
        return _ensemble(plain, ranker, step, on_scored)
    few = subset(ranker.pool, min(_EXAMPLES, len(ranker.pool)), seed=derive(ranker.seed, "scoring"))
    scores = score_filters(name, plain, few, seed=ranker.seed + step)
    return Ranking(short_name(name), order(scores), scores, examples=len(few))


def _by_network(evaluator: SiteEvaluator, ranker: Ranker, on_scored: OnScored | None) -> Ranking:
    """The ranking by masks of all sites at once: one scoring of a network ranks each of its sites."""
    graph, site, known = evaluator.graph, evaluator.site, ranker.networks
    count = ranker.scoring.examples if isinstance(ranker.scoring.examples, int) else _EXAMPLES
    few = subset(ranker.pool, min(count, len(ranker.pool)), seed=derive(ranker.seed, "scoring"))
    if not known or known[0][0] is not graph or site.name not in known[0][1]:
        sites = {site.name: site, **{each.name: each for each in ranker.sites(graph) if each.channels > 1}}
        found = evaluator.limit.run(
            evaluator.batch,
            lambda batch: score_network(
                graph,
                list(sites.values()),
                few.ready(evaluator.dtype),
                ranker.loss_fn,
                off=ranker.scoring.off,
                batch=batch,
                device=evaluator.device,
                seed=ranker.seed,
            ),
        )
        known[:] = [(graph, found)]
        if on_scored is not None:
            on_scored(len(few), len(few))
    ranked, note = known[0][1][site.name], f"masks of all sites at once, {len(few)} examples"
    return Ranking(
        "ensemble",
        ranked.order,
        ranked.importance,
        masks=len(few),
        examples=len(few),
        note=note,
        split_half=float(ranked.importance.split_half),
    )


def _ensemble(evaluator: SiteEvaluator, ranker: Ranker, step: int, on_scored: OnScored | None) -> Ranking:
    scored = score_site(evaluator, ranker.pool, ranker.scoring, seed=ranker.seed, step=step, on_scored=on_scored)
    found = scored.importance
    return Ranking(
        "ensemble",
        order(found),
        found,
        scored.ensemble,
        masks=scored.used,
        examples=scored.examples,
        note=scored.note,
        r2_held_out=float(found.r2_held_out),
        split_half=float(found.split_half),
    )


def _portfolio(
    evaluator: SiteEvaluator,
    ranker: Ranker,
    reconstruction: Reconstruction | None,
    curvature: Curvature | None,
    step: int,
    on_scored: OnScored | None,
) -> Ranking:
    """The ranking that leaves the smallest loss, a mean over cuts of several sizes."""
    names = [name for name in ranker.portfolio if name != "obs" or reconstruction is not None]
    found = {
        name: rank(name, evaluator, ranker, reconstruction=reconstruction, curvature=curvature, step=step, on_scored=on_scored)
        for name in names
    }
    channels = evaluator.site.channels
    counts = sorted({min(max(round(share * channels), 1), channels - 1) for share in _SHARES})
    measured = replace(evaluator, measure=ranker.held_out_loss).on(ranker.held_out)
    losses = {name: _typical(measured.means(cuts_along(ranking.order, counts))) for name, ranking in found.items()}
    compared = tuple(sorted(losses.items(), key=lambda entry: entry[1]))
    (winner, least), *others = compared
    margin = f"with a loss of {least:.4f} against {others[0][1]:.4f} of {others[0][0]}" if others else "being alone"
    note = f"{winner} won the portfolio, {margin}"
    won = found[winner]
    return replace(won, note=f"{note}; {won.note}" if won.note else note, compared=compared)


def cuts_along(order: Tensor, counts: Sequence[int]) -> Tensor:
    """The masks (len(counts), C) that remove the first filters of an order: counts[i] of them in row i."""
    keeps = torch.ones(len(counts), len(order), dtype=torch.bool)
    for row, count in enumerate(counts):
        keeps[row, order[:count]] = False
    return keeps


def _typical(losses: Tensor) -> float:
    """The geometric mean of losses above 0, so that the largest cut does not outweigh all others; else the plain mean."""
    return float(losses.log().mean().exp() if bool((losses > 0).all()) else losses.mean())
