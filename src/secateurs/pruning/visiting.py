"""What happens at one site: its filters are ranked, the largest cut within the budget is looked for, and made."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch

from secateurs.criteria.ranking import Ranking
from secateurs.errors import RunError
from secateurs.graph.sites import Site
from secateurs.graph.trace import Graph
from secateurs.pruning.budget import SearchOptions, caution_at, largest_cut
from secateurs.pruning.context import NetworkState, PreparedSite, RunContext, with_cut
from secateurs.pruning.results import Step, kept_of_ranking
from secateurs.selection.latency_widths import fast_widths
from secateurs.selection.search import Cut


@dataclass(frozen=True, eq=False)
class SiteResult:
    """What was done at a site."""

    place: PreparedSite
    ranking: Ranking
    cut: Cut
    before: float  # accuracy when it began
    loss: float  # right after the cut, before any training
    began: float  # by the monotonic clock


def rank_site(outfit: RunContext, place: PreparedSite, *, number: int, name: str) -> Ranking:
    """The order in which the site's filters would go; kept in the folder under `name`. Its draws depend on `number`."""

    def scored(done: int, of: int) -> None:
        outfit.whereabouts.tell("score", done, of, place.site)

    ranking = outfit.workshop.rank(place, step=number, on_scored=scored)
    outfit.record.save_tensors(f"ensembles/{name}", *kept_of_ranking(place.site, ranking))
    return ranking


def find_site_cut(outfit: RunContext, standing: NetworkState, place: PreparedSite, ranking: Ranking) -> Cut:
    """How many of the least important filters may go."""
    judge, record = outfit.judge, outfit.record
    known = record.units("cut", step=outfit.step)
    if known:
        judge.counts_from(standing)
        judge.answers = [bool(answer) for answer in known[0]["answers"]]
        return _cut_from(known[0], place.site)
    cut, judge.answers = _look_for_cut(outfit, standing, place, ranking)
    record.append("cut", step=outfit.step, site=place.site.name, answers=list(judge.answers), **_cut_fields(cut))
    return cut


def _look_for_cut(outfit: RunContext, standing: NetworkState, place: PreparedSite, ranking: Ranking) -> tuple[Cut, list[bool]]:
    """The cut, and what the certifying images answered on the way."""
    workshop, judge, site = outfit.workshop, outfit.judge, place.site
    recipe, looks = workshop.recipe, count(1)
    earlier, counted, done = judge.earlier_answers(), judge.counts_from(standing), _share_done(outfit)
    cut, answers = largest_cut(
        workshop.bench(place, workshop.tools.metric),
        ranking.order,
        judge.jury,
        counted.start,
        SearchOptions(recipe.search, recipe.largest_share, recipe.round_to, allowed_widths(outfit, standing.graph, site)),
        baseline=counted.accuracy,
        accuracy_now=standing.accuracy,
        answers=earlier,
        # with one budget for all sites and no training between, ever more of the drop may be used
        share=1.0 if recipe.budget == "site" or recipe.finetune is not None else done,
        caution=caution_at(done),
        on_look=lambda: outfit.whereabouts.tell("search", next(looks), site.channels.bit_length() + 1, site),
    )
    return cut, list(answers[len(earlier) :])


def _share_done(outfit: RunContext) -> float:
    """How far the run has come with the site at hand, as a share of all visits; 1 at the last one."""
    recipe, here = outfit.workshop.recipe, outfit.whereabouts
    return (here.round * here.sites + here.number) / (recipe.rounds * here.sites)


def allowed_widths(outfit: RunContext, graph: Graph, site: Site) -> tuple[int, ...] | None:
    """The numbers of filters that may be kept at a site of `graph`, as measured once; None: all."""
    workshop, record = outfit.workshop, outfit.record
    if not workshop.recipe.latency_aware:
        return None
    known = {"site": site.name, "channels": site.channels}
    if not record.units("widths", **known):
        found = fast_widths(graph, site, device=workshop.tools.device)
        record.append("widths", **known, widths=list(found.widths), seconds=list(found.seconds.items()))
    return tuple(record.units("widths", **known)[0]["widths"])


def remove_filters(outfit: RunContext, standing: NetworkState, place: PreparedSite, cut: Cut) -> tuple[NetworkState, Cut]:
    """Make the cut. Where rounding tips the accuracy of the compacted network over the edge, a filter less goes."""
    judge = outfit.judge
    while cut.m:
        smaller = with_cut(outfit.workshop, standing, place, cut.keep)
        if not judge.jury.by_means or judge.allows(smaller.accuracy, baseline=cut.baseline):
            return smaller, replace(cut, accuracy=smaller.accuracy, drop=round(cut.baseline - smaller.accuracy, 12))
        cut = _one_less(cut, smaller.accuracy)
    return standing, cut


def step_of(outfit: RunContext, standing: NetworkState, visit: SiteResult) -> Step:
    """The visit as a step, with the network that it left."""
    site, cut, ranking = visit.place.site, visit.cut, visit.ranking
    parameters, macs = outfit.shares_removed(standing.graph)
    certifying, repair = outfit.judge.jury.certifying, standing.repair if cut.m else None
    return Step(
        number=outfit.step,
        round=outfit.whereabouts.round,
        site=site.name,
        channels=site.channels,
        removed=tuple(site.original[i] for i in cut.removed),
        accuracy_before=visit.before,
        accuracy_cut=cut.accuracy,
        accuracy=standing.accuracy,
        loss=standing.loss,
        loss_cut=visit.loss if cut.m else None,
        parameters_removed=parameters,
        macs_removed=macs,
        evaluated=cut.evaluated,
        masks=ranking.masks,
        r2_held_out=ranking.r2_held_out,
        split_half=ranking.split_half,
        seconds=time.monotonic() - visit.began,
        criterion=ranking.criterion,
        note=ranking.note,
        examples=ranking.examples,
        compared=ranking.compared,
        bound=cut.bound,
        images=0 if certifying is None or cut.bound is None else len(certifying),
        by_estimate=cut.by_estimate,
        refused=cut.refused,
        answers=tuple(outfit.judge.answers),
        repaired=None if repair is None else (repair.error_before, repair.error_after),
        importance=ranking.importance,
    )


def _one_less(cut: Cut, accuracy: float) -> Cut:
    """The same cut with its most important filter put back; `accuracy` is what the larger one was found to have."""
    removed = cut.removed[:-1]
    keep = cut.keep.clone()
    keep[cut.removed[-1]] = True
    evaluated = (*cut.evaluated, (cut.m, accuracy))
    return replace(cut, keep=keep, removed=removed, m=len(removed), evaluated=evaluated)


def _cut_fields(cut: Cut) -> dict[str, Any]:
    names = ("removed", "evaluated", "baseline", "accuracy", "drop", "by_estimate", "bound", "refused")
    return {name: getattr(cut, name) for name in names}


def _cut_from(entry: Mapping[str, Any], site: Site) -> Cut:
    removed = tuple(int(i) for i in entry["removed"])
    if entry["site"] != site.name or len(set(removed)) < len(removed) or max(removed, default=0) >= site.channels:
        raise RunError(
            f"journal.jsonl: the cut of step {entry['step']} does not fit site {site.name!r} of {site.channels} channels. "
            f"Restore the run from a copy, or start a new one."
        )
    keep = torch.ones(site.channels, dtype=torch.bool)
    keep[list(removed)] = False
    evaluated = tuple((int(m), float(a)) for m, a in entry["evaluated"])
    figures = (entry["baseline"], entry["accuracy"], entry["drop"])
    more = (entry["by_estimate"], entry["bound"], tuple(int(m) for m in entry["refused"]))
    return Cut(keep, removed, len(removed), *figures, evaluated, *more)
