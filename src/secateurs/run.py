"""Step 9 of 9: takes a model, data and a Recipe, gives one Step per site and a run folder: the whole of Algorithm 1.

Everything random follows from the recipe's seed, and every unit of work is journaled before the next one starts. So a run that
was killed goes on where it stopped, and ends with the same plan and the same weights as one that was not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from secateurs.artefact import save
from secateurs.cutting import summon
from secateurs.data.splits import Data
from secateurs.dividing import Course
from secateurs.errors import RunError
from secateurs.evaluate import Device, Measure, correct, cross_entropy
from secateurs.graph import Graph, trace
from secateurs.journey.ending import find_outcome
from secateurs.journey.itinerary import sites_of_round, target_reached, why_division_ends, why_rounds_end
from secateurs.journey.judging import Judge
from secateurs.journey.keeping import keep_description, keep_outcome, keep_start, keep_step, standing_kept
from secateurs.journey.outfit import Outfit, Whereabouts
from secateurs.journey.schooling import finetune_, refresh_, retrain_
from secateurs.journey.standing import Standing, refitted, with_cut
from secateurs.journey.starting import (
    check_data,
    check_measures,
    example_for,
    load_start,
    measure_start,
    open_store,
    provenance,
)
from secateurs.journey.visiting import Visit, find_cut, rank, remove, step_of
from secateurs.journey.weighing import bound_of_division, divide, file_ranking, find_courses
from secateurs.recipe import Recipe, recipe_fields
from secateurs.record import Record, create_folder, disk_errors, open_folder
from secateurs.report import Plots, plots, write_report
from secateurs.sites import Site
from secateurs.steps import Outcome, Progress, Step, step_from
from secateurs.workshop import Tools, Workshop


def prune(
    model: nn.Module,
    data: Data,
    recipe: Recipe | None = None,
    *,
    folder: str | Path | None = None,
    loss_fn: Measure = cross_entropy,
    metric: Measure = correct,
    device: Device = None,
    leaves: tuple[str, ...] = (),
    watch: Callable[[Progress], None] | None = None,
    origin: Mapping[str, Any] | None = None,
    store: str | Path | None = None,
    cache_bytes: int | None = None,
) -> Run:
    """Prune a copy of `model` as `recipe` says: iterate over the run for its Steps, then (or at once) ask for `run.finish()`.

    With a `folder` every unit of work is kept there, and `resume` goes on after a crash. `loss_fn` and `metric` take outputs
    and targets (higher metric = better; "accuracy" everywhere means this metric). `origin` is kept in the provenance. What
    was measured is kept in `store` (by default in the folder), where another run of the same network finds it; while masks are
    scored, `cache_bytes` of activations are kept (by default a quarter of the free memory).
    """
    recipe = recipe or Recipe()
    graph = trace(model, example_for(model, data), leaves=leaves)
    summon(data.search, recipe.contract(), metric, seed=recipe.seed)  # an error here leaves no folder behind
    record = Record()
    if folder is not None:
        measures = {"loss": loss_fn, "metric": metric}
        known = provenance(graph, data, recipe, measures=measures, store=store, origin=origin)
        record = create_folder(Path(folder), recipe, known)
    try:
        tools = Tools(loss_fn, metric, device, open_store(record, store), cache_bytes)
        run = Run(Workshop(graph, data, recipe, tools), record, watch=watch)
        run.save_start()
        return run
    except BaseException:
        record.close()
        raise


def resume(
    folder: str | Path,
    model: nn.Module,
    data: Data,
    recipe: Recipe | None = None,
    *,
    loss_fn: Measure = cross_entropy,
    metric: Measure = correct,
    device: Device = None,
    watch: Callable[[Progress], None] | None = None,
    store: str | Path | None = None,
    cache_bytes: int | None = None,
) -> Run:
    """Go on with the run in `folder`, on a freshly built `model` of the same class (its weights do not matter), same data."""
    path = Path(folder)
    record, stored, known = open_folder(path)
    try:
        if recipe is not None and recipe != stored:
            raise RunError(f"{path}: was started with another recipe. Resume without one, or start a new run.")
        check_data(path, data, known)
        check_measures(path, {"loss": loss_fn, "metric": metric}, known)
        start = load_start(path, model, data, known)
        tools = Tools(loss_fn, metric, device, open_store(record, store or known.get("store")), cache_bytes)
        run = Run(Workshop(start, data, stored, tools), record, watch=watch)
        run.restore(model)
        return run
    except BaseException:
        record.close()
        raise


class Run:
    """A journey through the sites of a network. Iterating does the work, one Step at a time."""

    def __init__(self, workshop: Workshop, record: Record, *, watch: Callable[[Progress], None] | None) -> None:
        self.workshop, self.record = workshop, record
        self.original, self.data, self.recipe = workshop.original, workshop.data, workshop.recipe
        self.steps: list[Step] = []
        self.outcome: Outcome | None = None
        self._here = Whereabouts(watch)
        self._outfit = Outfit(workshop, record, Judge(workshop, record), self._here)
        self._standing = Standing(workshop.original)
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
        ranking = rank(outfit, place, number=outfit.step, name=f"{outfit.step:04d}")
        cut = find_cut(outfit, self._standing, place, ranking)
        self._standing, cut = remove(outfit, self._standing, place, cut)
        loss = self._standing.loss
        if cut.m:
            self._train_after_cut()
        return self._settle(Visit(place, ranking, cut, before, loss, began))

    def _divided(self) -> Iterator[Step]:
        """All sites weighed against each other: measure every curve, divide, then make the cuts in network order."""
        courses = find_courses(self._outfit)
        removed = divide(self._outfit, courses).removed
        chosen = [name for name in courses if removed.get(name, 0)]
        for name in chosen:
            self._here.number, self._here.sites = list(courses).index(name) + 1, len(courses)
            site = self.workshop.site(self.graph, name)
            if site is not None and not self._done(0, name):
                yield self._take_share(site, courses[name], removed[name], last=name == chosen[-1])
        self._stopped = why_division_ends(self._outfit, self.graph)

    def _take_share(self, site: Site, course: Course, m: int, *, last: bool) -> Step:
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
        return self._settle(Visit(place, course.ranking, cut, before, loss, began))

    def _train_after_cut(self) -> None:
        self._standing = refresh_(self._outfit, self._standing)
        self._standing = finetune_(self._outfit, self._standing)

    def _settle(self, visit: Visit) -> Step:
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
        self.report()
        self.close()

    # ---- what a run can be asked for ---------------------------------------------------------------------------------

    @property
    def graph(self) -> Graph:
        """The network as it is now."""
        return self._standing.graph

    @property
    def momentum(self) -> dict[str, Tensor]:
        """The optimiser's momentum as it is now, by parameter name."""
        return self._standing.momentum

    def finish(self) -> Outcome:
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

    def report(self) -> Path | None:
        """Write the page of the run as it stands into its folder; a run without a folder has none."""
        if self.record.path is None:
            return None
        with disk_errors(self.record.path):
            return write_report(self.record.path)

    @property
    def plot(self) -> Plots:
        """The figures of the run as it stands, for notebooks."""
        return plots(
            self.record.entries if self.record.path is None else self.record.path,
            recipe=recipe_fields(self.recipe),
            importances={step.number: step.importance for step in self.steps if step.importance is not None},
        )

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
