"""The default procedure: what every cut costs and saves alone, then whole networks along the frontier, certified, trained."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from secateurs.criteria.ranking import Ranking
from secateurs.graph.sites import Site
from secateurs.pruning.choice import choose
from secateurs.pruning.curves import measure_curves
from secateurs.pruning.cuts import CutsTogether
from secateurs.pruning.folder import copy_ranking
from secateurs.pruning.frontiers import Frontier, frontiers_of
from secateurs.pruning.results import ChosenAllocation, Step, Trial
from secateurs.pruning.trainer import recalibrate, reconstruct, trainer_between
from secateurs.pruning.trials import take_trial
from secateurs.selection.search import Cut

if TYPE_CHECKING:
    from secateurs.pruning.run import Run


def together(run: Run) -> Iterator[Step]:
    """Prune all sites at once: of the networks that cuts of all of them make, the one that saves most within the drop."""
    run.measure_original()
    found = list[Frontier]()
    for context in run.positions():
        curves = measure_curves(run, context)  # what cuts cost and save at each site alone
        found += frontiers_of(context, curves)  # networks with cuts at many sites, each of which saves more than the last
    chosen = choose(run.judge, found)  # the last that is certified on the way, and faster than the original
    cuts = ChosenCuts(run, chosen, found)
    for site in cuts.sites():
        yield run.record(*cuts.make(site))  # repaired together; after the last one every layer is solved again, and trained
    run.stopped = cuts.why_stopped()


class ChosenCuts:
    """The cuts of the allocation that was chosen, made in a run one after the other."""

    def __init__(self, run: Run, chosen: ChosenAllocation, found: list[Frontier]) -> None:
        self.run, self.chosen = run, chosen
        source = next((each for each in found if each.context.shortcut == chosen.shortcut), found[0])
        self.context, self.curves = source.context, source.curves
        run.context, run.saved = source.context, chosen.saved
        self.names = [name for name in self.curves if chosen.removed.get(name, 0)]
        self.together = CutsTogether(self.context, self.curves, chosen.removed)

    def sites(self) -> Iterator[Site]:
        """The sites that lose filters, in network order, but for those that are done."""
        run, progress = self.run, self.context.progress
        places = {name: place for place, name in enumerate(self.curves, 1)}
        for number, name in enumerate(self.names):
            progress.report("cut", number, len(self.names))
            progress.number, progress.sites = places[name], len(places)
            site = None if run.done(name) else run.enter(name)
            if site is not None:
                yield site

    def make(self, site: Site) -> tuple[Site, Ranking, Cut]:
        """Make the cut of a site. The network is measured, refitted and trained as a whole after the last one."""
        run, curve, last = self.run, self.curves[site.name], site.name == self.names[-1]
        cut = curve.cut(self.chosen.removed[site.name], site, run.state.accuracy)
        if self.together.possible:
            graph = self.together.up_to(site.name, verify=last)
            repair = self.together.surveyed[site.name].solve(self.together.masks[site.name])
            smaller = replace(run.state, graph=graph, repair=repair)
            smaller = smaller if last else self.context.estimated(smaller, run.measured_original)
        else:
            smaller = self.context.with_cut(run.state, self.context.prepare(run.graph, site), cut.keep)
        if last:
            smaller, cut = self.context.refitted(smaller), replace(cut, bound=self.chosen.bound)
        run.state, run.loss_cut, run.training_seconds = smaller, smaller.loss, 0.0
        if last:
            self._train()
        place = self.context.site(run.original, site.name)
        assert place is not None
        copy_ranking(run.journal, f"curve-{place.node}", f"{run.step_number:04d}")
        cut = replace(cut, accuracy=smaller.accuracy, drop=round(cut.baseline - smaller.accuracy, 12))
        return site, curve.ranking, cut

    def _train(self) -> None:
        """Train the network with all cuts made, if the recipe asks for that."""
        run, context, began = self.run, self.context, time.monotonic()
        if context.recipe.train_trials:  # trained when it was tried
            run.state = take_trial(context, run.state, self.chosen.place)
            return
        run.state = reconstruct(context, run.judge, run.state, run.step_number)
        run.state = recalibrate(context, run.judge, run.state)
        run.state = trainer_between(context).guarded(run.judge, run.state, "finetune", run.step_number)
        run.training_seconds = time.monotonic() - began

    def why_stopped(self) -> str:
        """Why nothing more is removed."""
        run, chosen = self.run, self.chosen
        reached = run.reached_target()
        if chosen.note:
            found = chosen.note
        elif not run.steps:
            found = "no allocation is within the allowed drop"
        elif reached:
            found = reached
        else:
            found = "all cuts of the allocation are made"
            if run.recipe.has_target:
                found += "; no larger one is within the allowed drop, so the target is not reached"
        trials = run.journal.of(Trial, judge="trained", place=chosen.place) if run.steps else ()
        return "; ".join([found, *(trial.note for trial in trials if trial.note)])
