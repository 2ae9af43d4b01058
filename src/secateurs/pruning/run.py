"""Step 9 of 9: takes a network, data and a recipe, gives one `Step` per site and a `RunResult`. The loop is Algorithm 1.

Every unit of work goes through the journal: a run that is killed and resumed ends as one that was not.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

from secateurs._util.decode import brief
from secateurs._util.tensors import digest
from secateurs.compaction.serialization import save
from secateurs.config import Recipe, Shortcut
from secateurs.criteria.ranking import Ranking
from secateurs.data.dataset import Examples
from secateurs.data.stream import Stream, seeded_everywhere
from secateurs.errors import InvalidInput, RunError, suggest
from secateurs.graph.cost import cost
from secateurs.graph.node_info import info
from secateurs.graph.sites import Site, find_sites
from secateurs.graph.trace import Graph
from secateurs.metrics import Evaluation
from secateurs.pruning.budget import AccuracyBudget
from secateurs.pruning.context import NetworkState, PreparedSite, PruningContext
from secateurs.pruning.finetune import finetune, recalibrate, reconstruct, retrain, take_trial
from secateurs.pruning.folder import (
    call_to_resume,
    copy_ranking,
    describe_network,
    load_state,
    save_ranking,
    save_result,
    save_start,
    save_step,
)
from secateurs.pruning.global_allocation import CutsTogether, Frontier, allocate, frontiers_of, measure_curve
from secateurs.pruning.results import (
    NO_TEST,
    Change,
    ChosenAllocation,
    ClassAccuracies,
    ResultFigures,
    RunResult,
    SiteCurve,
    SiteOrder,
    SiteWidths,
    Start,
    Step,
    TestChange,
    Trial,
    curve_from,
    curve_tensors,
)
from secateurs.pruning.speeds import layer_times, measured_speeds
from secateurs.selection.search import Cut
from secateurs.speed.tables import fast_widths

_TIMED = 64  # examples at once when the speed is measured in eager mode
_SITES_A_WORKER = 16  # whose curves are measured before they are journaled


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


class Run:
    """A pruning of one network. Iterating does the work, one `Step` at a time; `finish` does all of it."""

    def __init__(self, context: PruningContext) -> None:
        self.context, self.journal, self.recipe = context, context.journal, context.recipe
        self.workers = context.journal.workers
        self.original, self.data = context.original, context.data
        self.budget = AccuracyBudget(context)
        self.state = NetworkState(context.original)
        self.steps: list[Step] = []
        self.result: RunResult | None = None
        self.stopped = ""  # why no further site is cut
        self._interrupted = False
        self._before = self.state  # the network when the current site was entered
        self._allocation: ChosenAllocation | None = None
        self._curves: Mapping[str, SiteCurve] = {}
        self._last_allocated = ""
        self._together: CutsTogether | None = None
        self._loss_cut, self._training = self.state.loss, 0.0  # right after the current cut; seconds of training after it
        assert context.acceptance_sets  # too few images for the contract are an error at once

    def algorithm1(self) -> Iterator[Step]:
        """Algorithm 1 (Sándor, Pável, Csató 2020); the numbers are its lines."""
        self.measure_original()
        for site in self.site_order():  # 1, 2, 8: l ← first or last layer, then the next, while no stopping condition is met
            ranking = self.rank(site)  # 3, 4: generate D_mask, calculate θ
            cut = self.find_cut(site, ranking)  # 5: find m by θ and D_val
            cut = self.remove(site, cut)  # 6: remove the m least important filters
            self.finetune(site, cut)  # 7: fine-tune f on D_train
            step = self.settle(site, ranking, cut)
            with self.context.paused():
                yield step

    def __iter__(self) -> Iterator[Step]:
        if self._interrupted:
            path = self.journal.path
            again = "start it again" if path is None else f'resume it: secateurs.resume("{path}", model, …)'
            raise RunError(f"this run was interrupted, and its network may be half trained: {again}.")
        steps = self.algorithm1()
        try:
            while True:
                with self.workers.active(self.journal.answers):  # not while the caller looks at a step
                    step = next(steps, None)
                    if step is None:
                        self._finish()
                        return
                yield step
        except GeneratorExit:  # a loop that was left may be continued
            raise
        except BaseException as error:  # Ctrl-C too: the run can then be resumed in the same process
            self._interrupted = True
            if isinstance(error, KeyboardInterrupt) and not error.args and self.journal.path is not None:
                error.args = (f"Interrupted. Finished work is kept. Resume with: {call_to_resume(self.journal.path)}",)
            self.workers.fail(error)
            self.close()
            raise

    # ---- lines 1, 2 and 8: which site is next, and when to stop ----------------------------------------------------------

    def measure_original(self) -> None:
        """Measure the original network on the validation set, once; also describes it in the journal."""
        describe_network(self.journal, self.original, self.context.clock)
        whole = self.context.runtime.evaluate
        values = None if whole is None else whole.count

        def measure() -> Start:
            self.context.progress.report("original", 0, 1)
            found = self.context.measured(self.state)
            return Start(found.accuracy, found.loss, values, self.context.clock.lap())

        start = self.journal.once(Start, measure)
        if start.values != values:
            raise RunError(
                f"evaluate gives {values or 1} values, and gave {start.values or 1} when the run was started. Give the one "
                f"that it was started with, or start a new run."
            )
        self._measured_original = NetworkState(self.original, start.accuracy, start.loss)
        if not self.steps:
            self.state = self._measured_original

    def site_order(self) -> Iterator[PreparedSite]:
        """The sites to visit, each looked up when its turn comes: an earlier cut may have narrowed it or removed it."""
        return self._allocated_sites() if self.recipe.allocation == "global" else self._sites_in_turn()

    def _sites_in_turn(self) -> Iterator[PreparedSite]:
        """Round by round, until a stopping condition is met."""
        progress = self.context.progress
        for number in range(self.recipe.rounds):
            names = self._sites_of_round(number)
            for place, name in enumerate(names, 1):
                progress.number, progress.sites = place, len(names)
                if self._done(number, name):
                    continue
                if self._reached_target() or self._spent():
                    return
                progress.round = number
                progress.report("site", number * len(names) + place - 1, self.recipe.rounds * len(names))
                yield from self._entered_site(name)
            if self._reached_target():
                return
            if not any(step.removed for step in self.steps if step.round == number):
                self.stopped = "no site can lose a filter within the allowed drop"
                return
        rounds = self.recipe.rounds
        self.stopped = f"all {rounds} rounds are done" if rounds > 1 else "all sites are done"

    def _allocated_sites(self) -> Iterator[PreparedSite]:
        """All sites compared first: measure every curve, choose an allocation, then visit its sites in network order."""
        self._allocation = self._allocate()
        self._together = CutsTogether(self.context, self._curves, self._allocation.removed)
        chosen = [name for name in self._curves if self._allocation.removed.get(name, 0)]
        self._last_allocated = chosen[-1] if chosen else ""
        places = {name: place for place, name in enumerate(self._curves, 1)}
        for number, name in enumerate(chosen):
            self.context.progress.report("cut", number, len(chosen))
            self.context.progress.number, self.context.progress.sites = places[name], len(places)
            if not self._done(0, name):
                yield from self._entered_site(name)
        if self._allocation.note:
            self.stopped = self._allocation.note
        elif not self.steps:
            self.stopped = "no allocation is within the allowed drop"
        elif not self._reached_target():
            self.stopped = "all cuts of the allocation are made"
            if self.recipe.has_target:
                self.stopped += "; no larger one is within the allowed drop, so the target is not reached"
        for trial in self.journal.of(Trial, judge="trained", place=self._allocation.place) if self.steps else ():
            self.stopped += f"; {trial.note}" if trial.note else ""

    def _allocate(self) -> ChosenAllocation:
        """How many filters each site loses, at the shortcut position where that saves most; the run goes on with that one."""
        known = self.journal.of(ChosenAllocation)
        found, curves, start = list[Frontier](), dict[str, dict[str, SiteCurve]](), self.context
        for position in [known[0].shortcut] if known else start.positions:
            self.context = replace(start, position=position) if self.recipe.shortcut == "auto" else start
            curves[position] = self._measure_curves()
            found += [Frontier(self.context, curves[position], ())] if known else frontiers_of(self.context, curves[position])
        chosen = allocate(found[0].context, self.budget, found)
        self.context = next(each.context for each in found if each.context.shortcut == chosen.shortcut)
        self._curves = curves[chosen.shortcut]
        return chosen

    def _entered_site(self, name: str) -> Iterator[PreparedSite]:
        """The site, prepared; nothing if the current network no longer has it."""
        site = self.context.site(self.state.graph, name)
        if site is not None:
            self._before, graph = self.state, self.state.graph
            surveyed = self._together is not None and self._together.possible
            yield PreparedSite(graph, site, None) if surveyed else self.context.prepare(graph, site)

    def _sites_of_round(self, number: int) -> tuple[str, ...]:
        """The names of the sites that a round visits, in turn: those that the network has when the round begins."""

        def choose() -> SiteOrder:
            chosen = chosen_sites(self.recipe, self.state.graph, self.context.shortcut)
            order = tuple(chosen if self.recipe.direction == "forward" else chosen[::-1])
            return SiteOrder(number, order, **self.context.of_position)

        return self.journal.once(SiteOrder, choose, round=number, **self.context.of_position).sites

    def _measure_curves(self) -> dict[str, SiteCurve]:
        """The ranking and the curve of every site of the original network, by name, in network order."""
        context = self.context
        places = [site.name for site in self.context.sites(self.original)]
        listed = self._sites_of_round(0)
        unknown = [name for name in listed if name not in places]
        if unknown:
            raise RunError(
                f"journal.jsonl: the first round has site {brief(repr(unknown[0]))}, which the network has not. Restore the "
                f"run from a copy, or start a new one."
            )
        if listed and context.by_time:
            context.time_price.times  # noqa: B018  # computed on the first request: tables come before curves
        if listed:
            context.survey  # noqa: B018  # so does what all sites are seen by
        with self.workers.keeping(f"curves, {context.shortcut}"):  # until all are journaled
            return self._journal_curves(sorted(listed, key=places.index))

    def _journal_curves(self, names: Sequence[str]) -> dict[str, SiteCurve]:
        context, progress = self.context, self.context.progress
        found, shared = dict[str, SiteCurve](), dict[str, SiteCurve]()
        for number, name in enumerate(names, 1):
            progress.number, progress.sites = number, len(names)
            site = context.site(self.original, name)
            if site is not None:
                progress.report("curve", number - 1, len(names), site)
                if self.workers.size > 1 and name not in shared and not self._has_curve(site):
                    shared = self._shared_curves(names[number - 1 :], number)
                measure = partial(self._measure_curve, site, shared.get(name))
                found[name] = self.journal.once(SiteCurve, measure, site=name, **context.at_node(site))
                if found[name].original != site.original:
                    raise RunError(
                        f"journal.jsonl: the curve of site {name!r} does not fit its {site.channels} channels. Restore the "
                        f"run from a copy, or start a new one."
                    )
        return found

    def _measure_curve(self, site: Site, known: SiteCurve | None) -> SiteCurve:
        """The curve of a site, measured unless it is `known`; its ranking is kept in the folder."""
        found = self._curve_at(site, self.context.progress.number) if known is None else known
        save_ranking(self.journal, f"curve-{site.node}", site, found.ranking)
        return replace(found, seconds=self.context.clock.lap(), node=self.context.at_node(site).get("node", ""))

    def _curve_at(self, site: Site, number: int) -> SiteCurve:
        prepared = self.context.prepare(self.original, site)
        return measure_curve(self.context, prepared, self._rank(prepared, number), self._allowed_widths(site))

    def _shared_curves(self, names: Sequence[str], number: int) -> dict[str, SiteCurve]:
        """The curves of the next sites, each measured by one worker; the first of the names is the site of that `number`."""
        found = [self.context.site(self.original, name) for name in names[: _SITES_A_WORKER * self.workers.size]]
        sites = [site for site in found if site is not None and not self._has_curve(site)]
        if not sites:
            return {}
        self._prepare_curves(sites)
        numbers = {name: number + place for place, name in enumerate(names)}
        curves = self.workers.map(
            f"curves, {self.context.shortcut}",
            len(sites),
            lambda ticket: curve_tensors(self._curve_at(sites[ticket], numbers[sites[ticket].name])),
            names=[site.node for site in sites],
        )
        return {site.name: curve_from(tensors) for site, tensors in zip(sites, curves, strict=True)}

    def _prepare_curves(self, sites: Sequence[Site]) -> None:
        """What all sites need, and what is journaled: all workers together, before each measures some sites alone."""
        context, recipe = self.context, self.recipe
        for site in sites:
            context.round_to(site.name)
            self._allowed_widths(site)
        if context.survey is not None:
            context.loss_of_few  # noqa: B018  # computed on the first request
        criteria = recipe.portfolio if recipe.criterion == "portfolio" else (recipe.criterion,)
        if "ensemble" in criteria and recipe.estimator == "network":  # one scoring ranks all sites
            self._rank(context.prepare(self.original, sites[0]), 1)

    def _has_curve(self, site: Site) -> bool:
        return bool(self.journal.of(SiteCurve, site=site.name, **self.context.at_node(site)))

    def _done(self, number: int, name: str) -> bool:
        return any(step.round == number and step.site == name for step in self.steps)

    def _reached_target(self) -> bool:
        """Whether all targets are reached; says so in `stopped`."""
        shares, recipe = self.context.shares_removed(self.state.graph), self.recipe
        wanted = zip(("parameters", "MACs"), (recipe.target_parameters, recipe.target_macs), shares, strict=True)
        known = [
            (got >= want, f"{got:.1%} of the {what} are removed, of {want:.1%} wanted")
            for what, want, got in wanted
            if want is not None
        ]
        if recipe.target_memory is not None:
            left = self.context.memory_left(self.state.graph)
            words = f"the activations' peak takes {left:.1%} of the original's, of {recipe.target_memory:.1%} wanted"
            known.append((left <= recipe.target_memory, words))
        share = self.context.time_price.target_share if self._allocation is not None and recipe.has_time_target else None
        if self._allocation is not None and share is not None:
            remains = 1 - self._allocation.saved
            known.append((remains <= share + 1e-9, f"{remains:.1%} of the time remain by prediction, of {share:.1%} wanted"))
        if not known or not all(met for met, _ in known):
            return False
        self.stopped = " and ".join(words for _, words in known)
        return True

    def _spent(self) -> bool:
        if self.budget.spent:
            self.stopped = "certification refused a cut, after which no other can be certified"
        return self.budget.spent

    # ---- lines 3 to 7 ----------------------------------------------------------------------------------------------------

    @property
    def step_number(self) -> int:
        """The number of the current step, from 1."""
        return len(self.steps) + 1

    def rank(self, prepared: PreparedSite) -> Ranking:
        """The site's filters, least important first, by the recipe's criterion."""
        if self._allocation is not None:
            return self._curves[prepared.site.name].ranking
        return self._ranked(prepared, self.step_number, f"{self.step_number:04d}")

    def _ranked(self, prepared: PreparedSite, number: int, name: str) -> Ranking:
        """Rank the site and keep the ranking in the folder under `name`; its random draws depend on `number`."""
        ranking = self._rank(prepared, number)
        save_ranking(self.journal, name, prepared.site, ranking)
        return ranking

    def _rank(self, prepared: PreparedSite, number: int) -> Ranking:
        progress = self.context.progress
        return self.context.rank(
            prepared, step=number, on_scored=lambda done, of: progress.report("score", done, of, prepared.site)
        )

    def find_cut(self, prepared: PreparedSite, ranking: Ranking) -> Cut:
        """How many of the least important filters are removed: as many as the allowed drop, or the allocation, says."""
        site, progress = prepared.site, self.context.progress
        if self._allocation is not None:
            return self._curves[site.name].cut(self._allocation.removed[site.name], site, self.state.accuracy)
        visited = (progress.round * progress.sites + progress.number) / (self.recipe.rounds * progress.sites)
        widths = self._allowed_widths(site)
        return self.budget.largest_cut(
            self.state, prepared, ranking, step=self.step_number, widths=widths, share_visited=visited
        )

    def _allowed_widths(self, site: Site) -> tuple[int, ...] | None:
        """The numbers of filters that may be kept at a site, measured once; None: all."""
        if not self.context.by_time:
            return None
        step = self.context.round_to(site.name)

        def measure() -> SiteWidths:
            widths, seconds = fast_widths(self.context.time_price.model, site, step)
            allowed = tuple(width for width in widths if width < site.channels)
            return SiteWidths(site.name, site.channels, allowed, tuple(seconds.items()), **self.context.at_node(site))

        known = {"site": site.name, "channels": site.channels, **self.context.at_node(site)}
        return self.journal.once(SiteWidths, measure, **known).widths

    def remove(self, prepared: PreparedSite, cut: Cut) -> Cut:
        """Make the cut; returns it with the accuracy of the smaller network.

        Where rounding takes the accuracy of the compacted network over the edge, one filter fewer is removed, or one multiple
        of filters where widths are multiples. After the last
        cut of an allocation the network is the one that was accepted as a whole.
        """
        context, step = self.context, self.context.round_to(prepared.site.name)
        while cut.m:
            if self._together is not None and self._together.possible:
                smaller = self._cut_together(self._together, prepared.site.name)
            else:
                smaller = context.with_cut(self.state, prepared, cut.keep)
            if self._allocation is not None and prepared.site.name == self._last_allocated:
                smaller = context.refitted(smaller)
                cut = replace(cut, bound=self._allocation.bound)
            by_search = self._allocation is None and context.acceptance_sets.by_means
            if not by_search or self.budget.allows(smaller.accuracy, baseline=cut.baseline):
                self.state = smaller
                return replace(cut, accuracy=smaller.accuracy, drop=round(cut.baseline - smaller.accuracy, 12))
            cut = replace(
                cut, removed=cut.removed[: max(cut.m - step, 0)], evaluated=(*cut.evaluated, (cut.m, smaller.accuracy))
            )
        return cut

    def _cut_together(self, together: CutsTogether, site: str) -> NetworkState:
        """The network with the allocation's cuts up to one made; measured as a whole only after the last, refitted."""
        graph = together.up_to(site, verify=site == self._last_allocated)
        repair = together.surveyed[site].solve(together.masks[site])
        smaller = replace(self.state, graph=graph, repair=repair)
        if site == self._last_allocated:
            return smaller
        return self.context.estimated(smaller, self._measured_original)

    def finetune(self, prepared: PreparedSite, cut: Cut) -> None:
        """Recalibrate and fine-tune the network after a cut, if the recipe asks for that; an allocation's cuts together."""
        self._loss_cut, self._training = self.state.loss, 0.0
        if not cut.m or (self._allocation is not None and prepared.site.name != self._last_allocated):
            return
        began = time.monotonic()
        if self._allocation is not None and self.recipe.train_trials:  # trained when it was tried
            self.state = take_trial(self.context, self.state, self._allocation.place)
            return
        self.state = reconstruct(self.context, self.budget, self.state, self.step_number)
        self.state = recalibrate(self.context, self.budget, self.state)
        self.state = finetune(self.context, self.budget, self.state, self.step_number)
        self._training = time.monotonic() - began

    def settle(self, prepared: PreparedSite, ranking: Ranking, cut: Cut) -> Step:
        """Journal the step, with a checkpoint if the network changed."""
        site, before = prepared.site, self._before
        if self._allocation is not None:
            place = self.context.site(self.original, site.name)
            assert place is not None
            copy_ranking(self.journal, f"curve-{place.node}", f"{self.step_number:04d}")
        parameters, macs = self.context.shares_removed(self.state.graph)
        repair = self.state.repair if cut.m else None
        step = Step(
            number=self.step_number,
            round=self.context.progress.round,
            site=site.name,
            channels=site.channels,
            noun=site.unit,
            removed=tuple(site.original[i] for i in cut.removed),
            accuracy_before=before.accuracy,
            accuracy_cut=cut.accuracy,
            accuracy=self.state.accuracy,
            loss=self.state.loss,
            parameters_removed=parameters,
            macs_removed=macs,
            evaluated=cut.evaluated,
            masks=ranking.masks,
            r2_held_out=ranking.r2_held_out,
            split_half=ranking.split_half,
            seconds=0.0,  # known when the checkpoint is written
            training_seconds=self._training,
            criterion=ranking.criterion,
            note=ranking.note,
            examples=ranking.examples,
            compared=ranking.compared,
            bound=cut.bound,
            bound_trained=self.budget.trained_bound,
            images=0 if cut.bound is None else self.context.acceptance_sets.certifying,
            by_estimate=cut.by_estimate,
            refused=cut.refused,
            answers=tuple(self.budget.answers),
            repaired=None if repair is None else (repair.error_before, repair.error_after),
            loss_cut=self._loss_cut if cut.m else None,
            baseline=cut.baseline,
            loss_before=before.loss,
            importance=ranking.importance,
        )
        if self.workers.size > 1:
            now = {"network": digest(dict(self.state.graph.module.state_dict()))}
            self.workers.check_same(f"after the cut at site {site.name!r}", now)
        self.steps.append(save_step(self.journal, self.state, step, self.context.clock))
        self.budget.answers, self.budget.trained_bound = [], None
        return self.steps[-1]

    # ---- the end ---------------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Retrain, then read the test set: once, for the original network and for the smaller one."""
        if any(step.removed for step in self.steps):
            self.state = retrain(self.context, self.budget, self.state, self.step_number)
        known = self.journal.of(ResultFigures)  # a finished run is not measured again: its test set need not be given
        measured = known[0] if known else self._measure_result()
        self.context.progress.report("write", 0, 1)
        figures = save_result(self.journal, self.state.graph, measured, self.context.clock)
        self.result = RunResult(
            **{each.name: getattr(figures, each.name) for each in fields(figures)},
            graph=self.state.graph,
            steps=tuple(self.steps),
            cost_before=self.context.cost_before,
            cost_after=cost(self.state.graph),
        )

    def _measure_result(self) -> ResultFigures:
        context, graph, original = self.context, self.state.graph, self.original
        given = context.runtime.test if self.data.test is None else self.data.test
        test = None if given is None else given.ready(context.dtype)
        context.progress.report("measure", 0, 2)
        before, after = (None if test is None else self._tested(network, test) for network in (original, graph))
        context.progress.report("measure", 1, 2)
        first, last = (context.measured(NetworkState(network)).accuracy for network in (original, graph))
        classes = [context.by_class(found, test) for found in (before, after) if isinstance(test, Examples) and found]
        cost_before, cost_after = context.cost_before, cost(graph)
        timed = test if isinstance(test, Examples) else context.validation
        return ResultFigures(
            stopped=self.stopped,
            metric=context.runtime.metric_name,
            search=Change(first, last),
            test=NO_TEST if before is None or after is None else TestChange(before.accuracy, after.accuracy, after.count),
            parameters=Change(cost_before.parameters, cost_after.parameters),
            macs=Change(cost_before.macs, cost_after.macs),
            bytes=Change(cost_before.bytes, cost_after.bytes),
            classes=ClassAccuracies(tuple(self.data.classes), *classes) if classes and all(classes) else ClassAccuracies(),
            **self._measure_times(timed)
            if any(step.removed for step in self.steps) and self.workers.first
            else {"latency": None},
            seconds=0.0,  # known when all is saved
        )

    def _tested(self, network: Graph, test: Examples | Stream) -> Evaluation:
        """What a network is worth on the test set; the user's random state, which a loader draws from, stays as it is."""
        with seeded_everywhere(self.recipe.seed, "test", loader=test.loader if isinstance(test, Stream) else None):
            return self.context.evaluate(network, test)

    def _measure_times(self, examples: Examples) -> dict[str, Any]:
        """The speed of the smaller network, also at batches of 1 and 64, and where the time goes in both networks."""
        context, saved = self.context, None if self._allocation is None else self._allocation.saved
        inputs = examples.batch(slice(0, context.runtime.limit.within(min(_TIMED, len(examples))))).args
        first, *others = measured_speeds(context, self.state.graph, inputs, saved)
        return {"latency": first, "speeds": tuple(others), "layer_times": layer_times(context, self.state.graph, first)}

    # ---- what a run can be asked for -------------------------------------------------------------------------------------

    @property
    def graph(self) -> Graph:
        """The current network."""
        return self.state.graph

    def finish(self) -> RunResult:
        """Do all that is left, and return the result."""
        if self.result is None:
            for _ in self:
                pass
        assert self.result is not None
        return self.result

    def close(self) -> None:
        """Release the run folder, so that others can resume it; a finished or failed run has done so."""
        self.journal.close()
        self.context.runtime.cache.close()

    def save(self, path: str | Path) -> Path:
        """Save the current network (see `secateurs.save`)."""
        return save(self.graph, path)

    def save_start(self) -> None:
        """Save the original network, from which a run is resumed."""
        save_start(self.journal, self.original, self.context.clock)

    def restore(self) -> None:
        """Continue from what the journal and the checkpoints hold."""
        self.steps = list(self.journal.of(Step))
        self.state = load_state(self.journal, self.original)
