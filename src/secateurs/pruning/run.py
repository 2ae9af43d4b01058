"""How a run ends: the test set is read, once, for the network as it came and as it is now, and the speed is measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn

from secateurs.compaction.serialization import save
from secateurs.data.dataset import Examples
from secateurs.graph.cost import cost
from secateurs.graph.latency import SpeedUp, aligning_share, latency
from secateurs.graph.sites import Site
from secateurs.graph.trace import Graph
from secateurs.metrics import Evaluation, display_name
from secateurs.pruning.checkpoints import (
    keep_description,
    keep_outcome,
    keep_start,
    keep_step,
    measure_start,
    standing_kept,
)
from secateurs.pruning.context import (
    AccuracyBudget,
    NetworkState,
    ProgressReporter,
    PruningContext,
    RunContext,
    refitted,
    with_cut,
)
from secateurs.pruning.finetune import finetune_, recalibrate_statistics_, retrain_
from secateurs.pruning.folder import Record
from secateurs.pruning.global_allocation import SiteCurve, allocate, bound_of_division, file_ranking, find_curves
from secateurs.pruning.order import sites_of_round, target_reached, why_division_ends, why_rounds_end
from secateurs.pruning.results import Progress, Result, Step, step_from
from secateurs.pruning.visiting import SiteResult, find_site_cut, rank_site, remove_filters, step_of

_TIMED, _TIMINGS = 64, 12  # examples at once, and how often, when the speed is measured


def find_outcome(outfit: RunContext, graph: Graph, steps: Sequence[Step], *, stopped: str, began: float) -> Result:
    """What the run gives, with `graph` as its last network; `began` is by the monotonic clock."""
    workshop, original = outfit.workshop, outfit.workshop.original
    test, search = workshop.data.test.ready(workshop.dtype), workshop.search
    before, after = (workshop.evaluate(network, test) for network in (original, graph))
    timed = test.batch(slice(0, _TIMED)).inputs if any(step.removed for step in steps) else None
    return Result(
        graph=graph,
        steps=tuple(steps),
        stopped=stopped,
        metric=display_name(workshop.tools.metric),
        search_before=workshop.evaluate(original, search),
        search_after=workshop.evaluate(graph, search),
        test_before=before,
        test_after=after,
        cost_before=outfit.cost_before,
        cost_after=cost(graph),
        classes=_classes(workshop, (before, after), test),
        speed=None if timed is None else _speed(workshop, graph, timed),
        batch=0 if timed is None else len(timed),
        aligning=0.0 if timed is None else aligning_share(graph, timed),
        seconds=time.monotonic() - began,
    )


def _classes(workshop: PruningContext, found: Sequence[Evaluation], test: Examples) -> tuple[tuple[str, float, float], ...]:
    """Test accuracy of every class before and after."""
    each = [workshop.by_class(one, test) for one in found]
    return tuple(zip(workshop.data.classes, *each, strict=True)) if all(each) else ()


def _speed(workshop: PruningContext, graph: Graph, inputs: Tensor) -> SpeedUp:
    """How much faster the smaller network is here."""
    found = latency(workshop.original, graph, example_input=inputs, repeats=_TIMINGS, device=workshop.tools.device)
    return found.speedups[0]


class Run:
    """A journey through the sites of a network. Iterating does the work, one Step at a time."""

    def __init__(self, workshop: PruningContext, record: Record, *, watch: Callable[[Progress], None] | None) -> None:
        self.workshop, self.record = workshop, record
        self.original, self.data, self.recipe = workshop.original, workshop.data, workshop.recipe
        self.steps: list[Step] = []
        self.outcome: Result | None = None
        self._here = ProgressReporter(watch)
        self._outfit = RunContext(workshop, record, AccuracyBudget(workshop, record), self._here)
        self._standing = NetworkState(workshop.original)
        self.cost_before = self._outfit.cost_before
        self._stopped = ""
        self._began = time.monotonic()

    # ---- Algorithm 1 -------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Step]:
        try:
            yield from self._walk()
        except GeneratorExit:  # a loop that was left may be taken up again
            raise
        except BaseException:  # Ctrl-C too: the run can then be resumed in the same process
            self.close()
            raise

    def _walk(self) -> Iterator[Step]:
        self._standing = measure_start(self._outfit, self._standing)
        steps = self._divided() if self.recipe.allocation == "global" else self._site_by_site()
        yield from steps
        self._finish()

    def _site_by_site(self) -> Iterator[Step]:
        """Each site in turn, as far as it goes."""
        for name in self._sites_in_turn():
            site = self.workshop.site(self.graph, name)  # looked up again: an earlier cut may have narrowed it
            if site is not None:
                yield self._visit(site)

    def _visit(self, site: Site) -> Step:
        """Algorithm 1 at one site: rank its filters, find how many may go, remove them, fine-tune."""
        outfit, began, before = self._outfit, time.monotonic(), self._standing.accuracy
        place = self.workshop.place(self.graph, site)
        ranking = rank_site(outfit, place, number=outfit.step, name=f"{outfit.step:04d}")
        cut = find_site_cut(outfit, self._standing, place, ranking)
        self._standing, cut = remove_filters(outfit, self._standing, place, cut)
        loss = self._standing.loss
        if cut.m:
            self._train_after_cut()
        return self._settle(SiteResult(place, ranking, cut, before, loss, began))

    def _divided(self) -> Iterator[Step]:
        """All sites weighed against each other: measure every curve, divide, then make the cuts in network order."""
        courses = find_curves(self._outfit)
        removed = allocate(self._outfit, courses).removed
        chosen = [name for name in courses if removed.get(name, 0)]
        for name in chosen:
            self._here.number, self._here.sites = list(courses).index(name) + 1, len(courses)
            site = self.workshop.site(self.graph, name)
            if site is not None and not self._done(0, name):
                yield self._take_share(site, courses[name], removed[name], last=name == chosen[-1])
        self._stopped = why_division_ends(self._outfit, self.graph)

    def _take_share(self, site: Site, course: SiteCurve, m: int, *, last: bool) -> Step:
        """A division's cut at one site; after the last one the network is the one that was judged, and is trained."""
        began, before = time.monotonic(), self._standing.accuracy
        place = self.workshop.place(self.graph, site)
        self._standing = with_cut(self.workshop, self._standing, place, course.keep(m, site))
        cut = course.cut(m, site, before, self._standing.accuracy)
        if last:
            self._standing = refitted(self.workshop, self._standing)
            accuracy, bound = self._standing.accuracy, bound_of_division(self.record)
            cut = replace(cut, accuracy=accuracy, drop=before - accuracy, bound=bound)
        loss = self._standing.loss
        if last:
            self._train_after_cut()
        file_ranking(self._outfit)
        return self._settle(SiteResult(place, course.ranking, cut, before, loss, began))

    def _train_after_cut(self) -> None:
        self._standing = recalibrate_statistics_(self._outfit, self._standing)
        self._standing = finetune_(self._outfit, self._standing)

    def _settle(self, visit: SiteResult) -> Step:
        """Write the step down, with a checkpoint if the network changed."""
        step = step_of(self._outfit, self._standing, visit)
        keep_step(self.record, self._standing, step)
        self.steps.append(step)
        self._outfit.judge.answers = []
        return step

    def _sites_in_turn(self) -> Iterator[str]:
        """Names of the sites to visit, round by round, until a stopping condition holds; notes why it stopped."""
        for number in range(self.recipe.rounds):
            names = sites_of_round(self._outfit, self.graph, number)
            for place, name in enumerate(names, 1):
                self._here.number, self._here.sites = place, len(names)
                if self._done(number, name):
                    continue
                if self._reached_target() or self._closed():
                    return
                self._here.round = number
                yield name
            if self._reached_target():
                return
            if not any(step.removed for step in self.steps if step.round == number):
                self._stopped = "no site yields a filter within the allowed drop"
                return
        self._stopped = why_rounds_end(self.recipe.rounds)

    def _done(self, number: int, name: str) -> bool:
        return any(step.round == number and step.site == name for step in self.steps)

    def _reached_target(self) -> bool:
        self._stopped = target_reached(self._outfit, self.graph)
        return bool(self._stopped)

    def _closed(self) -> bool:
        if self._outfit.judge.closed:
            self._stopped = "certification refused a cut, after which no other can be certified"
        return self._outfit.judge.closed

    def _finish(self) -> None:
        """Retrain, then read the test set: once, for the network as it came and as it is now."""
        if any(step.removed for step in self.steps):
            self._standing = retrain_(self._outfit, self._standing)
        self.outcome = find_outcome(self._outfit, self.graph, self.steps, stopped=self._stopped, began=self._began)
        keep_outcome(self.record, self.outcome)

    # ---- what a run can be asked for ---------------------------------------------------------------------------------

    @property
    def graph(self) -> Graph:
        """The network as it is now."""
        return self._standing.graph

    @property
    def momentum(self) -> dict[str, Tensor]:
        """The optimiser's momentum as it is now, by parameter name."""
        return self._standing.momentum

    def finish(self) -> Result:
        """Do all that is left, and give the outcome."""
        if self.outcome is None:
            for _ in self:
                pass
        assert self.outcome is not None
        return self.outcome

    def close(self) -> None:
        """Let go of the run folder, so that others can go on with it; a finished or failed run has done so."""
        self.record.close()
        self.workshop.tools.store.close()

    def save(self, path: str | Path) -> Path:
        """Save the network as it is now (see `secateurs.save`)."""
        return save(self.graph, path)

    def save_start(self) -> None:
        """Keep the network as it came."""
        keep_start(self.record, self.graph)

    def restore(self, model: nn.Module) -> None:
        """Take up what the journal and the checkpoints say was done."""
        keep_description(self.record, self.original)
        self.steps = [step_from(entry) for entry in self.record.units("step")]
        self._standing = standing_kept(self.record, model, self.original)
