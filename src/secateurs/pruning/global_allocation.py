"""Cuts of all sites chosen together: each site's curve is measured once, and the allowed loss is spent where it saves most.

A curve holds the loss of the network, repaired if the recipe repairs, against the filters removed at one site alone. From all
curves follows the frontier of predicted loss against saving; the cuts of one of its allocations are made together and measured.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from torch import Tensor

from secateurs._util.decode import brief
from secateurs.compaction import compact
from secateurs.config import REFITTED
from secateurs.criteria.ranking import Ranking, cuts_along
from secateurs.errors import NonFinite, RunError
from secateurs.graph.channels import none_of
from secateurs.graph.consumers import find_layers
from secateurs.graph.masking import copied
from secateurs.graph.sites import Site
from secateurs.graph.structure import activations
from secateurs.graph.trace import Graph
from secateurs.pruning.budget import AccuracyBudget
from secateurs.pruning.context import HeldOut, PreparedSite, PruningContext
from secateurs.pruning.finetune import forget_trials, load_trial, train_trial
from secateurs.pruning.results import (
    ChosenAllocation,
    ComparedFrontiers,
    FrontierTrial,
    SiteCurve,
    SiteWidths,
    SpeedTrial,
    Trial,
    TriedNetwork,
)
from secateurs.pruning.speeds import is_faster, judged
from secateurs.repair import solve_together, write_
from secateurs.selection.allocation import Allocation, Curve, calibrated, frontier
from secateurs.selection.knapsack import ascending

_MOST_TRIED = 160  # allocations that a search looks among: neighbours then differ by less than their accuracies are known
_MOST_TIMED = 4  # allocations that are timed against the original network before it is returned as it was
_MOST_WRONG = 10.0  # factor between the rise of the loss that is predicted for a network, and the one that is measured
_TINY = 1e-12  # sums of shares are rounded
_GRID = 8  # points of a curve between nothing and all filters
_CALIBRATED_AT = (2, 5)  # of them: where a predicted curve is measured
_REFITTED_BEHIND = 4  # layers behind a folded branch that are solved again when its loss is measured
_FIRST = (0.4, 0.5)  # of the saving at the predicted edge: the first allocations that are certified
FINE = 1.06  # saving of the next allocation that is certified, relative to the one before
COARSE = 1.3  # the same where training follows, which a refusal makes harder to certify
_TRAINED_FROM, _TRAINED_STEP = 0.7, 1.1  # of the saving at the edge before training: where trained trials begin; their steps


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
    """The held-out loss along the ranking, and what the cuts save: predicted and measured at two points, else all measured."""
    recipe, site = context.recipe, prepared.site
    folds = site.name in context.folding_sites
    counts_at = partial(counts_of, site.channels, recipe.largest_share, context.round_to(site.name), widths, folds=folds)
    counts = counts_at(at=None)
    # on few examples seven points cost no more than two on many, and they are measured, not predicted
    predicts = ranking.predicted and len(context.held_out.examples) > len(context.held_out_few.examples)
    losses = _predicted_losses(context, prepared, ranking, counts_at(at=_CALIBRATED_AT)) if predicts else {}
    if losses:
        losses_at = tuple(losses[m] for m in counts)
    else:
        counts = counts_at()
        losses_at = _measured_losses(context, prepared, ranking, counts, context.held_out)
    if not math.isfinite(losses_at[0]):
        raise NonFinite(
            f"site {site.name!r}: the loss of the uncut network on {len(context.held_out.examples)} validation examples is "
            f"{losses_at[0]}. Check its outputs and the examples for NaN."
        )
    return SiteCurve(ranking, site.original, Curve(site.name, counts, losses_at, _savings(context, site, ranking, counts)))


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
    site, refits = prepared.site, context.by_time and context.recipe.repair in REFITTED
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
    return context.loss(context.refit(folded, behind[:_REFITTED_BEHIND]), held_out)


def _savings(context: PruningContext, site: Site, ranking: Ranking, counts: Sequence[int]) -> tuple[float, ...]:
    """What the cuts of a site alone save: share of the layers' time in the tables, or of MACs or parameters."""
    if context.by_time:
        cuts = cuts_along(ranking.order, counts)
        model = context.time_price.model
        seconds = [model.seconds({site.name: int(keep.sum())}) for keep in cuts]
        return tuple((seconds[0] - each) / seconds[0] for each in seconds)
    some, *whole = (counts[:-1], counts[-1]) if counts[-1] == site.channels else (counts,)
    most = _saved_alone(context, site, ranking, some[-1])
    found = [most * count / max(some[-1], 1) for count in some]
    return (*found, *(_saved_alone(context, site, ranking, count) for count in whole))


def _saved_alone(context: PruningContext, site: Site, ranking: Ranking, count: int) -> float:
    """The share of the MACs that a cut of one site saves; of the parameters or activations if they alone are the target."""
    recipe = context.recipe
    masks: dict[str | Site, Tensor] = {site.name: cuts_along(ranking.order, [count])[0]}
    smaller = compact(context.original, masks, verify=False)
    if recipe.target_memory is not None and recipe.target_macs is None and recipe.target_parameters is None:
        return 1 - activations(smaller).total / activations(context.original).total
    parameters, macs = context.shares_removed(smaller)
    by_parameters = recipe.target_macs is None and recipe.target_parameters is not None
    return parameters if by_parameters else macs


def allocate(context: PruningContext, budget: AccuracyBudget, found: Sequence[Frontier]) -> ChosenAllocation:
    """Choose how many filters each site loses: the most that is within the contract, or enough for the target.

    Every trial is journaled, and so is the choice: a killed run repeats none of them.
    """
    chosen = context.journal.once(ChosenAllocation, lambda: _choose(context, budget, joined(found)))
    curves = next((each.curves for each in found if each.context.shortcut == chosen.shortcut), {})
    wrong = [name for name, m in chosen.removed.items() if name not in curves or m not in curves[name].curve.removed]
    if wrong:
        raise RunError(
            f"journal.jsonl: the allocation does not fit site {brief(repr(wrong[0]))}. Restore the run from a copy, or start a "
            f"new one."
        )
    if context.recipe.train_trials:
        forget_trials(context, chosen.place)
    return chosen


def _choose(context: PruningContext, budget: AccuracyBudget, best: JoinedFrontier) -> ChosenAllocation:
    """Try allocations as whole networks."""
    baseline, sets = budget.original, context.acceptance_sets
    values, allocations = baseline.values, best.allocations
    networks: dict[int, Graph] = {}
    train = context.recipe.train_trials

    def network(index: int) -> Graph:
        if index not in networks:
            networks.clear()  # one at a time: they are as large as the user's
            networks[index] = best.network(index)
        return networks[index]

    def measure(judge: Literal["trained", "steering"], index: int, graph: Graph) -> Trial:
        if values is None:
            whole = context.runtime.evaluate
            found = context.evaluate(graph, sets.search).accuracy if whole is None else float(whole(graph).mean())
            within = round(baseline.accuracy - found, 12) <= context.drop_of_cuts
            return Trial(judge, index, within, found, within)
        verdict = context.predicted(graph, values)
        return Trial(judge, index, verdict.accepted, verdict.accuracy, verdict.by_estimate)

    def once(judge: str, index: int, compute: Callable[[], Trial]) -> Trial:
        found = context.journal.once(Trial, lambda: replace(compute(), seconds=context.clock.lap()), judge=judge, place=index)
        context.progress.tried = TriedNetwork(allocations[index].saved, context.currency, found.accuracy, found.accepted)
        return found

    def search_trained(index: int) -> Trial:
        judged = partial(measure, "trained", index)
        return once("trained", index, lambda: train_trial(context, network(index), index, judged))

    def ask(index: int, answers: Sequence[bool]) -> Trial:
        assert values is not None
        graph = load_trial(context, copied(network(index)), index) if train else network(index)
        verdict = context.certified(graph, values, list(answers))
        return Trial("certifying", index, verdict.accepted, upper=verdict.upper)

    def certify(index: int, answers: Sequence[bool]) -> Trial | None:
        if train and not context.journal.of(Trial, judge="certifying", place=index) and not search_trained(index).accepted:
            tried = context.journal.of(Trial, judge="trained")
            if any(trial.accepted and trial.place > index for trial in tried):
                return None  # such as a training that diverged: a refusal here would end the questions
        return once("certifying", index, lambda: ask(index, answers))

    certifies = values is not None and sets.sides is not None
    chosen = choose_allocation(
        allocations,
        lambda index: once("steering", index, lambda: measure("steering", index, network(index))),
        certify if certifies else None,
        search_trained=search_trained if train else None,
        bounded=context.recipe.has_target,
        growth=COARSE if sets.contract.reserve else FINE,
        images=sets.certifying,
        on_trial=context.progress.report,
    )
    if context.by_time and any(chosen.removed.values()):
        judge = "certifying" if certifies else "trained" if train else "steering"
        passed = {each.place: each.upper for each in context.journal.of(Trial, judge=judge) if each.accepted}
        chosen = _fastest(context, chosen, allocations, passed, network)
    return replace(chosen, shortcut=best.sources[chosen.place].context.shortcut, seconds=context.clock.lap())


def _fastest(
    context: PruningContext,
    chosen: ChosenAllocation,
    allocations: Sequence[Allocation],
    passed: Mapping[int, float | None],
    network: Callable[[int], Graph],
) -> ChosenAllocation:
    """The allocation chosen, if it is faster than the original network; else the next of those that may be lost that is.

    Where none is, nothing is removed, and the note says so: nobody gets a slower network back. `passed` are the allocations
    that are within the allowed drop, with their bounds.
    """

    def timed(place: int) -> SpeedTrial:
        return SpeedTrial(place, tuple(judged(context, network(place)).items()))

    tried = []
    smaller = sorted((place for place in passed if 0 < place < chosen.place), reverse=True)
    for number, place in enumerate([chosen.place, *smaller][:_MOST_TIMED]):
        context.progress.report("faster", number, number + 1)
        trial = context.journal.once_timed(SpeedTrial, partial(timed, place), place=place)
        if is_faster(dict(trial.speeds)):
            if place == chosen.place:
                return chosen
            one = allocations[place]
            return replace(
                chosen, removed=dict(one.removed), saved=one.saved, loss=one.predicted_loss, bound=passed[place], place=place
            )
        tried.append(trial)
    steady = [widths.site for widths in context.journal.of(SiteWidths) if not widths.widths]
    why = f"; no width is faster at {', '.join(steady[:3])}{', …' * (len(steady) > 3)}" if steady else ""
    engine = "eager mode" if context.time_price.engine.name == "torch" else context.time_price.engine.name
    note = (
        f"nothing within the allowed drop is measurably faster in {engine} ({tried[0].summary()}{why}), so the network is "
        f"returned as it was: allow a larger max_drop, train after the cuts (retrain='gentle'), name another engine, or give a "
        f"target in macs"
    )
    nothing = dict.fromkeys(chosen.removed, 0)
    return replace(chosen, removed=nothing, saved=0.0, loss=0.0, bound=None, place=0, note=note)


def choose_allocation(
    allocations: Sequence[Allocation],
    search: Callable[[int], Trial],
    certify: Callable[[int, Sequence[bool]], Trial | None] | None,
    *,
    search_trained: Callable[[int], Trial] | None = None,
    bounded: bool = False,
    growth: float = FINE,
    images: int = 0,
    on_trial: Callable[[str, int, int], None] = lambda phase, done, of: None,
) -> ChosenAllocation:
    """Choose the allocation that saves most within the contract; each saves more than the one before, the first nothing.

    `search` measures an allocation, by its index, on the search images. The edge, the largest one that they predict to be
    certified, is found by bisection. The certification images are then asked about ever larger allocations (`to_certify`),
    which were fixed without them; `certify` takes an index and their answers so far. Every acceptance is free, the first
    refusal is final, and the last accepted allocation is taken. Without `certify` the edge itself is. Where it gives None, the
    search images alone decided not to ask about this allocation, which is passed over.

    `search_trained` measures an allocation after its training: first the one at the edge before training, or the last where
    a target is what `bounded` them, and few in all (`to_train`). `certify` is then asked about trained ones.
    """
    tried: dict[int, Trial] = {}
    verdicts: list[Trial] = []

    def accepted(index: int) -> bool:
        on_trial("divide", len(tried), max(len(allocations).bit_length(), len(tried) + 1))
        tried[index] = search(index)
        return tried[index].accepted

    def accepted_trained(index: int) -> bool:
        assert search_trained is not None
        on_trial("trained", len(tried), max(len(ladder).bit_length(), len(tried) + 1))
        tried[index] = search_trained(index)
        return tried[index].accepted

    best = _largest(len(allocations), accepted)
    ladder, asked = to_train(allocations, best), to_certify(allocations, best, growth)
    if search_trained is not None:
        tried.clear()  # what trained networks lose is what counts
        start = len(ladder) - 1 if bounded or best not in ladder else ladder.index(best)
        rung = _climbed(len(ladder), start, lambda rung: accepted_trained(ladder[rung]))
        best = 0 if rung is None else ladder[rung]
        asked = tuple(ladder[place] for place in _few_up_to(rung or 0, len(ladder)))
    if certify is not None:
        likely = min(sum(index <= best for index in asked) + 1, len(asked))  # the first one beyond the edge is refused
        best = 0
        for done, index in enumerate(asked):
            on_trial("certify", done, max(likely, done + 1))
            verdict = certify(index, [earlier.accepted for earlier in verdicts])
            if verdict is None:
                continue
            verdicts.append(verdict)
            if not verdict.accepted:
                break
            best = index
    bounds = [verdict.upper for verdict in verdicts if verdict.accepted]
    chosen = allocations[best]
    return ChosenAllocation(
        removed=dict(chosen.removed),
        saved=chosen.saved,
        loss=chosen.predicted_loss,
        tried=tuple((allocations[index].saved, trial.accuracy or 0.0, trial.accepted) for index, trial in tried.items()),
        answers=tuple(verdict.accepted for verdict in verdicts),
        bound=bounds[-1] if bounds else None,
        images=images,
        by_estimate=max((allocations[index].saved for index, trial in tried.items() if trial.by_estimate), default=0.0),
        frontier=tuple((each.saved, each.predicted_loss) for each in allocations),
        place=best,
    )


def to_certify(allocations: Sequence[Allocation], edge: int, growth: float = FINE) -> tuple[int, ...]:
    """Indices of the allocations that certification is asked about, ascending: from 0.4 of the saving at `edge` to the last.

    The search images are few, so the true edge may lie well below the predicted one, or above it.
    """
    if len(allocations) < 2:
        return ()
    savings = [share * allocations[max(edge, 1)].saved for share in _FIRST]
    while savings[-1] < allocations[-1].saved:
        savings.append(savings[-1] * growth)
    reached = {bisect_right([each.saved for each in allocations], saving + _TINY) - 1 for saving in savings}
    return tuple(sorted(reached - {0}))


def to_train(allocations: Sequence[Allocation], edge: int) -> tuple[int, ...]:
    """Indices of the allocations that may be trained, ascending: from 0.7 of the saving at `edge`, that, and ever a tenth more.

    `edge` is the largest allocation that is within the contract before training, which rarely takes anything away.
    """
    if len(allocations) < 2:
        return ()
    savings = [_TRAINED_FROM * allocations[max(edge, 1)].saved, allocations[max(edge, 1)].saved]
    while savings[-1] < allocations[-1].saved:
        savings.append(savings[-1] * _TRAINED_STEP)
    reached = {bisect_right([each.saved for each in allocations], saving + _TINY) - 1 for saving in savings}
    return tuple(sorted(reached - {0}))


class CutsTogether:
    """The cuts of an allocation, in network order, each repaired as the survey of the original network says.

    What each layer really sees between the others' cuts comes with the refit, after the last one.
    """

    def __init__(self, context: PruningContext, curves: Mapping[str, SiteCurve], removed: Mapping[str, int]) -> None:
        self.context, self.masks, self._solved = context, dict[str, Tensor](), dict[bytes, dict[str, Tensor]]()
        for name, curve in curves.items():
            site = context.site(context.original, name) if removed.get(name, 0) else None
            if site is not None:
                self.masks[name] = curve.keep(removed[name], site)
        survey = context.survey
        self.surveyed = {} if survey is None else survey.reconstructions
        self.possible = context.recipe.repair in REFITTED and bool(self.masks) and set(self.masks) <= set(self.surveyed)

    def up_to(self, last: str, *, verify: bool = False) -> Graph:
        """The network with the cuts up to that at the site `last` made and repaired, not refitted."""
        names = list(self.masks)
        masks: dict[str | Site, Tensor] = {name: self.masks[name] for name in names[: names.index(last) + 1]}
        graph, some = copied(self.context.prepared(self.masks)), {str(name): mask for name, mask in masks.items()}
        write_(graph, solve_together({name: self.surveyed[name] for name in some}, some, self._solved))
        return compact(graph, masks, verify=verify)


def apply_allocation(
    context: PruningContext, curves: Mapping[str, SiteCurve], allocation: Allocation, *, verify: bool = False
) -> Graph:
    """The original network with all cuts of an allocation made, repaired, and refitted if the recipe wants that."""
    together = CutsTogether(context, curves, allocation.removed)
    if together.possible:
        return context.refit(together.up_to(list(together.masks)[-1], verify=verify))
    graph = context.original
    for name, curve in curves.items():  # in network order, each repaired after those before it
        m = allocation.removed.get(name, 0)
        site = context.site(graph, name) if m else None
        if site is not None:
            graph, _ = context.compacted(context.prepare(graph, site), curve.keep(m, site), verify=verify)
    return context.refit(graph) if any(allocation.removed.values()) else graph


# ---- frontiers -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Frontier:
    """Allocations of one shortcut position and one price of folded branches, each of which saves more than the last."""

    context: PruningContext  # of that position
    curves: Mapping[str, SiteCurve]
    allocations: Sequence[Allocation]
    price: float = 1.0
    reaches: bool = False  # the last one reaches all targets

    def network(self, allocation: Allocation) -> Graph:
        """The network with all cuts of an allocation made and repaired."""
        return apply_allocation(self.context, self.curves, allocation)


def frontiers_of(context: PruningContext, curves: Mapping[str, SiteCurve]) -> list[Frontier]:
    """The frontiers of the context's position: one, or where time counts and branches can be folded, one for each price."""
    if not curves:
        return [Frontier(context, curves, (Allocation({}, 0.0, 0.0),))]
    if not context.by_time:
        return [
            _up_to_target(context, curves, frontier([each.curve for each in curves.values()], context.branches(curves)), 1.0)
        ]
    by_price = context.time_price.allocations(curves)
    refits = context.recipe.repair in REFITTED
    return [_up_to_target(context, curves, found, price) for price, found in by_price.items() if refits or price == 1.0]


def _up_to_target(
    context: PruningContext, curves: Mapping[str, SiteCurve], allocations: Sequence[Allocation], price: float
) -> Frontier:
    """The allocations up to the first whose cuts, made together, reach all targets; else all of them."""
    recipe = context.recipe
    share = context.time_price.target_share if context.by_time else None
    by_structure = any(t is not None for t in (recipe.target_macs, recipe.target_parameters, recipe.target_memory))

    def reaches(index: int) -> bool:
        """By structure and predicted time alone: nothing is repaired or measured."""
        if share is not None and allocations[index].saved < 1 - share:
            return False
        if not by_structure:
            return share is not None
        masks: dict[str | Site, Tensor] = {}
        for name, curve in curves.items():
            site, m = context.site(context.original, name), allocations[index].removed[name]
            if m and site is not None:
                masks[name] = curve.keep(m, site)
        smaller = compact(context.original, masks, verify=False) if masks else context.original
        parameters, macs = context.shares_removed(smaller)
        enough = macs >= (recipe.target_macs or 0.0) and parameters >= (recipe.target_parameters or 0.0)
        return enough and context.memory_left(smaller) <= (recipe.target_memory or 1.0)

    if not by_structure and share is None:
        return Frontier(context, curves, allocations, price)
    last = bisect_left(range(len(allocations) - 1), True, key=reaches)
    return Frontier(context, curves, allocations[: last + 1], price, reaches(last))


@dataclass(frozen=True, eq=False)
class JoinedFrontier:
    """Allocations of several frontiers, each of which saves more than the last, and the frontier that each is from."""

    allocations: tuple[Allocation, ...]
    sources: tuple[Frontier, ...]

    def network(self, index: int) -> Graph:
        """The network of the allocation with that index."""
        return self.sources[index].network(self.allocations[index])


def joined(found: Sequence[Frontier]) -> JoinedFrontier:
    """The best allocations of all frontiers.

    Predictions of different positions and prices are wrong by different factors: what cuts lose together is not what they lose
    alone. So a network of each frontier is made and measured, and what the frontier predicts is multiplied by that factor.
    """
    losses = [1.0] if len(found) == 1 else [_factor(one) for one in _compared(found).tried]
    source: dict[int, Frontier] = {}
    every = list[Allocation]()
    for each, factor in zip(found, losses, strict=True):
        scaled = [replace(one, predicted_loss=factor * one.predicted_loss) for one in each.allocations]
        every += scaled
        source |= {id(one): each for one in scaled}
    enough = {id(one) for one in every if source[id(one)].reaches and one.saved == source[id(one)].allocations[-1].saved}
    best = ascending(every)
    best = best[: next((i for i, one in enumerate(best) if id(one) in enough), len(best)) + 1]
    step = -(-len(best) // _MOST_TRIED)  # predicted curves have a point for every filter
    best = (*best[:-1:step], best[-1]) if step > 1 else best
    return JoinedFrontier(best, tuple(source[id(one)] for one in best))


def _factor(one: FrontierTrial) -> float:
    """What a frontier's predicted losses are multiplied by."""
    if one.predicted <= 0:
        return 1.0
    return min(max(one.rise / one.predicted, 1 / _MOST_WRONG), _MOST_WRONG)


def _compared(found: Sequence[Frontier]) -> ComparedFrontiers:
    """A network of each frontier, measured; all are to save as much.

    The saving is that of a target in time; without one, half of the most that any frontier saves. Targets of structure are
    reached by the last allocation.
    """
    recipe, journal = found[0].context.recipe, found[0].context.journal
    half = max(each.allocations[-1].saved for each in found) / 2
    by_structure = any(t is not None for t in (recipe.target_macs, recipe.target_parameters, recipe.target_memory))

    def compare() -> ComparedFrontiers:
        known, tried = dict[str, float](), []
        for number, each in enumerate(found):
            context, allocations = each.context, each.allocations
            context.progress.report("compare", number, len(found))
            target = context.time_price.target_share if recipe.has_time_target and context.by_time else None
            wanted = 1 - target if target is not None else allocations[-1].saved if by_structure else half
            chosen = next((one for one in allocations if one.saved >= wanted - _TINY), allocations[-1])
            name = f"{context.shortcut} {sorted(chosen.removed.items())}"
            if name not in known:
                start = context.loss(context.original, context.held_out)
                known[name] = context.loss(each.network(chosen), context.held_out) - start
            tried.append(FrontierTrial(context.shortcut, each.price, chosen.saved, chosen.predicted_loss, known[name]))
        return ComparedFrontiers(tuple(tried))

    compared = journal.once(ComparedFrontiers, compare)
    if [(one.shortcut, one.price) for one in compared.tried] != [(each.context.shortcut, each.price) for each in found]:
        raise RunError(
            "journal.jsonl: the compared networks are of other shortcut positions or prices of branches than this run's. "
            "Restore the run from a copy, or start a new one."
        )
    return compared


def _few_up_to(rung: int, count: int) -> list[int]:
    """Rungs that certification is asked about, each of which takes a training: few up to the predicted one, and the next."""
    return sorted({0, rung // 2, rung * 4 // 5, rung, min(rung + 1, count - 1)}) if count else []


def _climbed(count: int, start: int, accepted: Callable[[int], bool]) -> int | None:
    """The largest rung that is accepted, if acceptance only ever ends; None if there is none.

    From `start` on, in steps that double, so that rungs far above what is accepted are not asked about.
    """
    passing, failing, step = -1, count, 1
    rung = min(start, count - 1)
    while failing - passing > 1:
        if accepted(rung):
            passing, step = rung, 2 * step
            rung = min(passing + step, failing - 1) if failing == count else (passing + failing) // 2
        else:
            failing = rung
            rung = (passing + failing) // 2
        rung = max(rung, passing + 1)
    return None if passing < 0 else passing


def _largest(count: int, accepted: Callable[[int], bool]) -> int:
    """The largest index below `count` that is accepted, if acceptance only ever ends; 0 is not asked about."""
    if count > 1 and accepted(count - 1):
        return count - 1
    passing, failing = 0, count - 1
    while failing - passing > 1:
        middle = (passing + failing) // 2
        passing, failing = (middle, failing) if accepted(middle) else (passing, middle)
    return passing
