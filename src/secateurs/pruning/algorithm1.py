"""Algorithm 1 (Sándor, Pável, Csató 2020): site after site, each cut as far as the allowed drop permits."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING

from secateurs.criteria.ranking import Ranking
from secateurs.errors import RunError
from secateurs.pruning.context import PreparedSite
from secateurs.pruning.curves import chosen_sites
from secateurs.pruning.folder import save_ranking
from secateurs.pruning.results import SiteCut, SiteOrder, Step
from secateurs.pruning.trainer import recalibrate, trainer_between
from secateurs.selection.search import Cut

if TYPE_CHECKING:
    from secateurs.pruning.run import Run


def algorithm1(run: Run, lines: Lines | None = None) -> Iterator[Step]:
    """Prune site by site; the numbers are the lines of the paper's Algorithm 1."""
    line = lines or Lines(run)
    run.measure_original()
    for site in line.sites():  # 1, 2, 8: l ← first or last layer, then the next, while no stopping condition is met
        ranking = line.rank(site)  # 3, 4: generate D_mask, calculate θ
        cut = line.find_cut(site, ranking)  # 5: find m by θ and D_val
        cut = line.remove(site, cut)  # 6: remove the m least important filters
        line.finetune(cut)  # 7: fine-tune f on D_train
        yield run.record(site.site, ranking, cut)


class Lines:
    """What each line of the algorithm does to a run."""

    def __init__(self, run: Run) -> None:
        self.run, self.recipe, self.progress = run, run.recipe, run.context.progress

    def sites(self) -> Iterator[PreparedSite]:
        """The sites in turn, round by round, until a stopping condition is met.

        Each is looked up when its turn comes: an earlier cut may have narrowed it or removed it.
        """
        run, rounds = self.run, self.recipe.rounds
        for number in range(rounds):
            names = self._order(number)
            for place, name in enumerate(names, 1):
                self.progress.number, self.progress.sites = place, len(names)
                if run.done(name, number):
                    continue
                if reached := run.reached_target() or self._spent():
                    run.stopped = reached
                    return
                self.progress.round = number
                self.progress.report("site", number * len(names) + place - 1, rounds * len(names))
                site = run.enter(name)
                if site is not None:
                    yield run.context.prepare(run.graph, site)
            if reached := run.reached_target():
                run.stopped = reached
                return
            if not any(step.removed for step in run.steps if step.round == number):
                run.stopped = "no site can lose a filter within the allowed drop"
                return
        run.stopped = f"all {rounds} rounds are done" if rounds > 1 else "all sites are done"

    def _order(self, number: int) -> tuple[str, ...]:
        """The names of the sites that a round visits: those that the network has when the round begins."""

        def choose() -> SiteOrder:
            chosen = chosen_sites(self.recipe, self.run.graph, self.run.context.shortcut)
            return SiteOrder(number, tuple(chosen if self.recipe.direction == "forward" else chosen[::-1]))

        return self.run.journal.once(SiteOrder, choose, round=number).sites

    def _spent(self) -> str:
        return "certification refused a cut, after which no other can be certified" if self.run.judge.spent else ""

    def rank(self, prepared: PreparedSite) -> Ranking:
        """The site's filters, least important first, by the recipe's criterion; kept in the folder."""
        number = self.run.step_number
        ranking = self.run.rank(prepared, number)
        save_ranking(self.run.journal, f"{number:04d}", prepared.site, ranking)
        return ranking

    def find_cut(self, prepared: PreparedSite, ranking: Ranking) -> Cut:
        """As many of the least important filters as the judge permits, journaled before the cut is made."""
        run, site, recipe, progress = self.run, prepared.site, self.recipe, self.progress
        context, judge, tried = run.context, run.judge, count(1)
        since = judge.enter(run.graph, run.state.accuracy)

        def find() -> SiteCut:
            judge.answers = []
            widths, total = context.price.widths_of(site), site.channels.bit_length() + 1
            cut = judge.largest_cut(
                ranking.order,
                judge.metric.under_masks(
                    context.evaluator(prepared, context.runtime.metric),
                    lambda keep: context.compacted(prepared, keep, verify=False)[0],
                ),
                since,
                visited=(progress.round * progress.sites + progress.number) / (recipe.rounds * progress.sites),
                trains=recipe.finetune is not None or context.runtime.finetune is not None,
                on_trial=lambda: progress.report("search", next(tried), total, site),
                accuracy_now=run.state.accuracy,
                method=recipe.search,
                largest_share=recipe.largest_share,
                round_to=context.round_to(site.name),
                widths=widths,
            )
            return SiteCut(run.step_number, site.name, cut, tuple(judge.answers))

        found = run.journal.once(SiteCut, find, step=run.step_number)
        if found.site != site.name or found.cut.channels != site.channels:
            raise RunError(
                f"journal.jsonl: the cut of step {run.step_number} does not fit site {site.name!r} of {site.channels} channels."
                f" Restore the run from a copy, or start a new one."
            )
        judge.answers = list(found.answers)
        return found.cut

    def remove(self, prepared: PreparedSite, cut: Cut) -> Cut:
        """Make the cut; returns it with the accuracy of the smaller network.

        Where rounding takes the accuracy of the compacted network over the edge, one filter fewer is removed, or one multiple
        of filters where widths are multiples.
        """
        run = self.run
        step = run.context.round_to(prepared.site.name)
        while cut.m:
            smaller = run.context.with_cut(run.state, prepared, cut.keep)
            if run.judge.confirms(smaller.accuracy, baseline=cut.baseline):
                run.state = smaller
                return replace(cut, accuracy=smaller.accuracy, drop=round(cut.baseline - smaller.accuracy, 12))
            cut = replace(
                cut, removed=cut.removed[: max(cut.m - step, 0)], evaluated=(*cut.evaluated, (cut.m, smaller.accuracy))
            )
        return cut

    def finetune(self, cut: Cut) -> None:
        """Recalibrate and fine-tune the network after the cut, if the recipe asks for that."""
        run = self.run
        run.loss_cut, run.training_seconds = run.state.loss, 0.0
        if cut.m:
            began = time.monotonic()
            run.state = recalibrate(run.context, run.judge, run.state)
            run.state = trainer_between(run.context).guarded(run.judge, run.state, "finetune", run.step_number)
            run.training_seconds = time.monotonic() - began
