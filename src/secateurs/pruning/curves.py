"""Curves: what cuts cost and save at each site alone, along its ranking.

A curve holds the loss of the network, repaired if the recipe repairs, against the filters removed at one site.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatch
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from secateurs._util.decode import brief
from secateurs.compaction import compact
from secateurs.config import REFITTED, Recipe, Shortcut
from secateurs.criteria.ranking import Ranking, cuts_along
from secateurs.errors import InvalidInput, NonFinite, RunError, suggest
from secateurs.graph.channels import none_of
from secateurs.graph.consumers import find_layers
from secateurs.graph.node_info import info
from secateurs.graph.sites import Site, find_sites
from secateurs.graph.trace import Graph
from secateurs.pruning.context import HeldOut, PreparedSite, PruningContext
from secateurs.pruning.folder import save_ranking
from secateurs.pruning.results import SiteCurve, SiteOrder, curve_from, curve_tensors
from secateurs.selection.allocation import Curve, calibrated

if TYPE_CHECKING:
    from secateurs.pruning.run import Run

_SITES_A_WORKER = 16  # whose curves are measured before they are journaled
_GRID = 8  # points of a curve between nothing and all filters
_CALIBRATED_AT = (2, 5)  # of them: where a predicted curve is measured
_REFITTED_BEHIND = 4  # layers behind a folded branch that are solved again when its loss is measured


def chosen_sites(recipe: Recipe, graph: Graph, shortcut: Shortcut | None = None) -> list[str]:
    """The sites of `graph` that the recipe's patterns fit, in network order; without patterns, all.

    Of all positions that the recipe compares, or of one. A layer whose output nothing reads has nothing to be measured by.
    """
    positions = recipe.shortcuts if shortcut is None else (shortcut,)
    unread = {node.name for node in graph.module.graph.nodes if info(node).get("unused")}
    found = (site for position in positions for site in find_sites(graph, position, head_widths=recipe.head_widths))
    names = list(dict.fromkeys(site.name for site in found if not unread.issuperset(point.node for point in site.points)))
    chosen = [name for name in names if not recipe.sites or any(fnmatch(name, pattern) for pattern in recipe.sites)]
    if recipe.sites and not chosen:
        wanted = ", ".join(recipe.sites)
        raise InvalidInput(f"sites = [{wanted}]: no site has such a name.{suggest(wanted, names)}")
    return chosen


def measure_curves(run: Run, context: PruningContext) -> dict[str, SiteCurve]:
    """The curves of the sites at the context's position, by name, in network order; each is journaled."""
    places = [site.name for site in context.sites(context.original)]
    order = lambda: SiteOrder(0, tuple(chosen_sites(context.recipe, context.original, context.shortcut)), **context.of_position)  # noqa: E731
    listed = context.journal.once(SiteOrder, order, round=0, **context.of_position).sites
    unknown = [name for name in listed if name not in places]
    if unknown:
        raise RunError(
            f"journal.jsonl: the first round has site {brief(repr(unknown[0]))}, which the network has not. Restore the "
            f"run from a copy, or start a new one."
        )
    if listed:
        context.price.prepare()  # tables come before curves
        context.survey  # noqa: B018  # computed on the first request: so does what all sites are seen by
    with context.journal.workers.keeping(f"curves, {context.shortcut}"):  # until all are journaled
        return Curves(run, context).all(sorted(listed, key=places.index))


class Curves:
    """Measures the curves of one position; several workers share the sites."""

    def __init__(self, run: Run, context: PruningContext) -> None:
        self.run, self.context, self.workers = run, context, context.journal.workers

    def all(self, names: Sequence[str]) -> dict[str, SiteCurve]:
        """The curves of these sites, from the journal or measured now."""
        context, progress = self.context, self.context.progress
        found, shared = dict[str, SiteCurve](), dict[str, SiteCurve]()
        every = [context.site(context.original, name) for name in names]
        self._prepare([site for site in every if site is not None and not self._is_known(site)])
        for number, name in enumerate(names, 1):
            progress.number, progress.sites = number, len(names)
            site = context.site(context.original, name)
            if site is not None:
                progress.report("curve", number - 1, len(names), site)
                if self.workers.size > 1 and name not in shared and not self._is_known(site):
                    shared = self._shared(names[number - 1 :], number)
                measure = partial(self._kept, site, shared.get(name), number)
                found[name] = context.journal.once(SiteCurve, measure, site=name, **context.at_node(site))
                if found[name].original != site.original:
                    raise RunError(
                        f"journal.jsonl: the curve of site {name!r} does not fit its {site.channels} channels. Restore the "
                        f"run from a copy, or start a new one."
                    )
        return found

    def _kept(self, site: Site, known: SiteCurve | None, number: int) -> SiteCurve:
        """The curve of a site, measured unless it is `known`; its ranking is kept in the folder."""
        found = self._measured(site, number) if known is None else known
        save_ranking(self.context.journal, f"curve-{site.node}", site, found.ranking)
        return replace(found, seconds=self.context.clock.lap(), node=self.context.at_node(site).get("node", ""))

    def _measured(self, site: Site, number: int) -> SiteCurve:
        prepared = self.context.prepare(self.context.original, site)
        ranking = self.run.rank(prepared, number, self.context)
        return measure_curve(self.context, prepared, ranking, self.context.price.widths_of(site))

    def _shared(self, names: Sequence[str], number: int) -> dict[str, SiteCurve]:
        """The curves of the next sites, each measured by one worker; the first of the names is the site of that `number`."""
        context = self.context
        found = [context.site(context.original, name) for name in names[: _SITES_A_WORKER * self.workers.size]]
        sites = [site for site in found if site is not None and not self._is_known(site)]
        if not sites:
            return {}
        numbers = {name: number + place for place, name in enumerate(names)}
        curves = self.workers.map(
            f"curves, {context.shortcut}",
            len(sites),
            lambda ticket: curve_tensors(self._measured(sites[ticket], numbers[sites[ticket].name])),
            names=[site.node for site in sites],
        )
        return {site.name: curve_from(tensors) for site, tensors in zip(sites, curves, strict=True)}

    def _prepare(self, sites: Sequence[Site]) -> None:
        """What all sites need, and what is journaled: by all workers together, before each measures some sites alone."""
        context, recipe = self.context, self.context.recipe
        for site in sites:
            context.round_to(site.name)
            context.price.widths_of(site)
        if context.survey is not None and sites:
            context.loss_of_few  # noqa: B018  # computed on the first request
        criteria = recipe.portfolio if recipe.criterion == "portfolio" else (recipe.criterion,)
        if sites and "ensemble" in criteria and recipe.estimator == "network":  # one scoring ranks all sites
            self.run.rank(context.prepare(context.original, sites[0]), 1, context)

    def _is_known(self, site: Site) -> bool:
        return bool(self.context.journal.of(SiteCurve, site=site.name, **self.context.at_node(site)))


def counts_of(
    channels: int,
    largest_share: float,
    round_to: int,
    widths: Sequence[int] | None = None,
    at: Sequence[int] | None = tuple(range(1, _GRID)),
    *,
    folds: bool = False,
) -> tuple[int, ...]:
    """Numbers of filters at which a curve is known, from 0 on; kept ones are multiples of `round_to`, and in `widths`.

    They are those nearest to some eighths of the filters, `at`; None: all. Where the site's branch `folds`, all filters are the
    last of them.
    """
    most = min(math.floor(round(largest_share * channels, 12)), channels - 1)
    allowed = [m for m in range(1, most + 1) if (channels - m) % round_to == 0 and (widths is None or channels - m in widths)]
    wanted = {round(channels * step / _GRID) for step in at or ()}
    found = allowed if at is None or not allowed else sorted({min(allowed, key=lambda m: abs(m - want)) for want in wanted})
    return (0, *found, *([channels] if folds else ()))


def measure_curve(
    context: PruningContext, prepared: PreparedSite, ranking: Ranking, widths: Sequence[int] | None = None
) -> SiteCurve:
    """The held-out loss along the ranking, and what the cuts save: predicted and measured at two points, else all measured.

    `widths` that run fast have points besides those of the grid: between them a cut saves nothing alone, but may in pairs.
    """
    recipe, site = context.recipe, prepared.site
    folds = site.name in context.folding_sites
    counts_at = partial(counts_of, site.channels, recipe.largest_share, context.round_to(site.name), folds=folds)
    counts = counts_at(at=None)
    # on few examples seven points cost no more than two on many, and they are measured, not predicted
    predicts = ranking.predicted and len(context.held_out.examples) > len(context.held_out_few.examples)
    losses = _predicted_losses(context, prepared, ranking, counts_at(at=_CALIBRATED_AT)) if predicts else {}
    if losses:
        losses_at = tuple(losses[m] for m in counts)
    else:
        counts = tuple(sorted({*counts_at(), *counts_at(widths)}))
        losses_at = _measured_losses(context, prepared, ranking, counts, context.held_out)
    if not math.isfinite(losses_at[0]):
        raise NonFinite(
            f"site {site.name!r}: the loss of the uncut network on {len(context.held_out.examples)} validation examples is "
            f"{losses_at[0]}. Check its outputs and the examples for NaN."
        )
    return SiteCurve(ranking, site.original, Curve(site.name, counts, losses_at, context.price.alone(site, ranking, counts)))


def _predicted_losses(
    context: PruningContext, prepared: PreparedSite, ranking: Ranking, counts: Sequence[int]
) -> dict[int, float]:
    """The loss without 0, 1, 2, … filters as predicted, brought to what is measured at `counts`; empty if that cannot be.

    The prediction knows nothing of a folded branch: its loss is the measured one.
    """
    start = context.loss_of_few
    if not math.isfinite(start) or len(counts) < 2:
        return {}
    losses = dict(zip(counts[1:], _measured_losses(context, prepared, ranking, counts[1:], context.held_out_few), strict=True))
    folded = {m: loss for m, loss in losses.items() if m == prepared.site.channels}
    found = calibrated(ranking.predicted, {m: loss - start for m, loss in losses.items() if m not in folded})
    return {m: start + increase for m, increase in enumerate(found)} | folded if found else {}


def _measured_losses(
    context: PruningContext, prepared: PreparedSite, ranking: Ranking, counts: Sequence[int], held_out: HeldOut
) -> tuple[float, ...]:
    """The loss without the first filters of the ranking; without any, after the layers behind have made up for the branch.

    That is measured where time counts. By MACs, narrow layers are worth as much as whole branches, and lose less.
    """
    site, refits = prepared.site, context.price.makes_up_for_branches and context.recipe.repair in REFITTED
    some = [m for m in counts if m < site.channels or not refits]
    measured = context.evaluator(prepared, held_out.loss_fn).on(held_out.examples)
    losses = measured.means(cuts_along(ranking.order, some)).tolist() if some else []
    return (*losses, *(_folded_loss(context, site, held_out) for _ in counts[len(some) :]))


def _folded_loss(context: PruningContext, site: Site, held_out: HeldOut) -> float:
    """The loss without the branch of a site, with the next layers solved again.

    A cut site is measured with its readers repaired. A folded branch has none left, and the layers behind the sum, which the
    refit solves after all cuts, make up for most of it.
    """
    masks: dict[str | Site, Tensor] = {site.name: none_of(site.channels)}
    folded = compact(context.original, masks, verify=False)
    before, left = ([consumer.module for consumer, _ in find_layers(graph)] for graph in (context.original, folded))
    gone = [place for place, name in enumerate(before) if name not in left]
    behind = [name for name in before[max(gone, default=len(before)) + 1 :] if name in left]
    return context.loss(context.refit(folded, behind[:_REFITTED_BEHIND], context.few_repair_examples), held_out)
