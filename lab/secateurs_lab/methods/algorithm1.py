"""Algorithm 1 of the paper as a method of comparisons, with a target to meet and a budget to keep.

Rounds follow each other until the target is reached, and the last cut removes no more filters than that needs. A stage of the
training between cuts follows every cut, as long as there is any left.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace
from itertools import count

from secateurs.compaction import compact
from secateurs.config import Direction
from secateurs.criteria.ranking import Ranking
from secateurs.errors import InvalidInput
from secateurs.pruning.algorithm1 import Lines, algorithm1
from secateurs.pruning.context import PreparedSite
from secateurs.pruning.run import Run
from secateurs.selection.search import Cut
from secateurs_lab.methods.base import MethodRun, MethodState, Pruned, Spent, StepCost, Task, Watch, opened, recipe_for
from secateurs_lab.methods.one_shot import ranked, repair_passes
from secateurs_lab.methods.training import finished, train_next, train_rest, training_stages

# The drop that a cut may cost: the paper tunes its α and does not say to what. It is doubled after a round that cuts nothing,
# so that every target is met.
MAX_DROP = 0.01


def paper(
    task: Task,
    *,
    name: str = "paper",
    repair: bool = False,
    direction: Direction = "forward",
    max_drop: float = MAX_DROP,
    watch: Watch | None = None,
) -> Pruned:
    """Prune by Algorithm 1 with ensembles; with `repair`, by portfolios, consumers repaired in closed form after every cut."""
    recipe = replace(
        recipe_for(task, "portfolio" if repair else "ensemble", repair="least-squares" if repair else "none"),
        # with training between, repairs aim at the current network, not at the original one
        finetune=task.budget.between,
        budget="site",
        max_drop=max_drop,
        direction=direction,
    )
    with opened(task, name, recipe, watch) as run:
        return finished(run, train_rest(run, run.load() or run.save(TargetRun(run).reach_target())))


class TargetRun(Run):
    """Algorithm 1 until the target is reached, however much accuracy that costs."""

    def __init__(self, method: MethodRun) -> None:
        super().__init__(method.context)
        self.method = method
        self.restore()

    def reach_target(self) -> MethodState:
        """Do the work, and return the network with what was spent on it."""
        for _ in algorithm1(self, TargetLines(self)):
            pass
        costs, steps = self.journal.of(StepCost), self.steps
        training = sum(cost.training_seconds for cost in costs)
        elsewhere = sum(cost.elsewhere for cost in costs)
        rounds, cuts = len(steps) / max(len(self.method.sites), 1), sum(bool(step.removed) for step in steps)
        spent = Spent(
            self.stages_done(),
            sum(cost.passes for cost in costs),
            sum(step.seconds for step in steps) - training,
            training + elsewhere,
            f"{cuts} cuts in {rounds:.1f} rounds, each within a drop of {self.judge.max_drop:g}",
        )
        return MethodState(self.graph, spent, self.state.momentum)

    def stages_done(self) -> int:
        """How many stages of the budget are done."""
        return sum(cost.trained for cost in self.journal.of(StepCost))


class TargetLines(Lines):
    """The lines of the algorithm where a target ends it, not the drop, and passes are counted."""

    run: TargetRun

    def __init__(self, run: TargetRun) -> None:
        super().__init__(run)
        self.method = run.method
        self._passes = 0  # of the current step

    def sites(self) -> Iterator[PreparedSite]:
        """In the direction of the recipe, round after round, until the target is reached."""
        run, progress, sites = self.run, self.progress, self.method.sites
        sites = sites if self.recipe.direction == "forward" else sites[::-1]
        for number in count():
            for place, site in enumerate(sites, 1):
                if run.done(site.name, number):
                    continue
                if self.method.reached(run.graph):
                    return
                progress.round, progress.number, progress.sites = number, place, len(sites)
                found = run.enter(site.name)
                if found is not None:
                    yield run.context.prepare(run.graph, found)
            if self.method.reached(run.graph):
                return
            if not any(step.removed for step in run.steps if step.round == number):
                run.judge.max_drop *= 2
            if run.judge.max_drop > 1:
                raise InvalidInput(
                    f"target_macs = {self.method.task.target_macs:g}: wanted at most {self.method.removed(run.graph):.3f}, "
                    f"after which no site has a filter to spare."
                )

    def rank(self, prepared: PreparedSite) -> Ranking:
        """Rank the site's filters, and count the passes."""
        ranking, self._passes = ranked(self.method, prepared, self.run.step_number)
        return ranking

    def find_cut(self, prepared: PreparedSite, ranking: Ranking) -> Cut:
        """The largest cut within the drop, or the smallest that reaches the target."""
        cut = super().find_cut(prepared, ranking)
        self._passes += (1 + len(cut.evaluated)) * len(self.run.context.validation) + repair_passes(self.method)

        def reaches(m: int) -> bool:
            keep = replace(cut, removed=cut.removed[:m]).keep
            return self.method.reached(compact(prepared.graph, {prepared.site.name: keep}, verify=False))

        if not cut.m or not reaches(cut.m):
            return cut
        return replace(cut, removed=cut.removed[: bisect_left(range(1, cut.m), True, key=reaches) + 1])

    def finetune(self, cut: Cut) -> None:
        """Train by the next stage of the budget, if there is one left."""
        run = self.run
        run.loss_cut, began, done = run.state.loss, time.monotonic(), run.stages_done()
        stages = training_stages(self.method.task, len(self.method.sites))
        trained = bool(cut.m) and done < len(stages) and stages[done].phase == "finetune"
        elsewhere = 0.0
        if trained:
            after = train_next(self.method, MethodState(run.graph, Spent(done), run.state.momentum))
            elsewhere = after.spent.training_seconds - (time.monotonic() - began)
            run.state = run.context.measured(replace(run.state, momentum=dict(after.momentum)))
        number, seconds = run.step_number, time.monotonic() - began
        run.journal.once(StepCost, lambda: StepCost(number, self._passes, seconds, trained, elsewhere), step=number)
