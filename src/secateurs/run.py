"""Step 9 of 9: takes a model, data and a Recipe, gives one Step per site and a run folder: the whole of Algorithm 1.

Everything random follows from the recipe's seed, and every unit of work is journaled before the next one starts. So a run that
was killed goes on where it stopped, and ends with the same plan and the same weights as one that was not.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from secateurs.allocation import Division
from secateurs.artefact import load, save
from secateurs.costs import cost
from secateurs.cutting import Looking, Start, find_site_cut, summon
from secateurs.data.examples import Examples
from secateurs.data.seeding import derive
from secateurs.data.splits import Data, subset
from secateurs.dividing import Course, course_fields, course_from, find_division, measure_course
from secateurs.errors import InvalidInput, RunError, suggest
from secateurs.evaluate import Device, Evaluation, Measure, correct, cross_entropy
from secateurs.graph import Graph, trace
from secateurs.ranking import Ranking
from secateurs.recipe import Recipe, recipe_fields
from secateurs.record import Record, create_folder, disk_errors, environment, open_folder
from secateurs.repair import Repair
from secateurs.report import Plots, describe, plots, write_report
from secateurs.search import Cut
from secateurs.sites import Site, find_sites
from secateurs.steps import Outcome, Progress, Step, kept_of_ranking, outcome_fields, step_fields, step_from
from secateurs.store import Store
from secateurs.tensorfile import digest
from secateurs.timing import SpeedUp, latency
from secateurs.training import EpochRecord, TrainSettings, TrainState, carry_momentum, recalibrate_, train_
from secateurs.widths import fast_widths
from secateurs.workshop import Place, Tools, Workshop

START = "checkpoints/start"
TRAINING = "checkpoints/training"
MEASURED = "measured.sqlite"
REPORT = "report.html"

_TIMED, _TIMINGS = 64, 12  # examples at once, and how often, when the speed is measured at the end


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
    graph = trace(model, _example(model, data), leaves=leaves)
    summon(data.search, recipe.contract(), metric, seed=recipe.seed)  # an error here leaves no folder behind
    record = Record()
    if folder is not None:
        measures = {"loss": loss_fn, "metric": metric}
        record = create_folder(Path(folder), recipe, _provenance(graph, data, recipe, measures, store, origin))
    try:
        tools = Tools(loss_fn, metric, device, _open_store(record, store), cache_bytes)
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
    record, stored, provenance = open_folder(path)
    try:
        if recipe is not None and recipe != stored:
            raise RunError(f"{path}: was started with another recipe. Resume without one, or start a new run.")
        if data.digest() != provenance["data"]["sha256"]:
            raise RunError(
                f"{path}: was started on other data ({provenance['data']['name']}): contents or split have changed. Give the "
                f"data it was started with, or start a new run."
            )
        example = _example(model, data)
        if not (path / f"{START}.safetensors").exists():
            raise RunError(f"{path}: was stopped before its first checkpoint. Delete the folder and start the run again.")
        start = load(model, path / f"{START}.safetensors", example_input=example)
        tools = Tools(loss_fn, metric, device, _open_store(record, store or provenance.get("store")), cache_bytes)
        run = Run(Workshop(start, data, stored, tools), record, watch=watch)
        run.restore(model)
        return run
    except BaseException:
        record.close()
        raise


class Run:
    """A journey through the sites of a network. Iterating does the work, one Step at a time."""

    def __init__(self, workshop: Workshop, record: Record, *, watch: Callable[[Progress], None] | None) -> None:
        self.workshop, self.record, self._watch = workshop, record, watch
        self.graph = self.original = workshop.original
        self.data, self.recipe = workshop.data, workshop.recipe
        self.steps: list[Step] = []
        self.outcome: Outcome | None = None
        self.momentum: dict[str, Tensor] = {}
        self.cost_before = cost(self.graph)
        self._jury = workshop.jury  # too few images for the contract are an error at once
        self._start: Start | None = None  # of the untouched network
        self._counted: Start | None = None  # of the network that the drop counts from at the site at hand
        self._answers: list[bool] = []  # of the certifying images, in the step at hand
        self._repair: Repair | None = None  # that the latest cut was made with
        self._accuracy = self._loss = self._start_accuracy = self._baseline = float("nan")
        self._stopped = ""
        self._began = time.monotonic()
        self._round, self._position = 0, (0, 0)

    # ---- Algorithm 1 -------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Step]:
        try:
            yield from self._walk()
        except Exception:
            self.close()
            raise

    def _walk(self) -> Iterator[Step]:
        self._measure_start()
        if self.recipe.allocation == "global":
            yield from self._divided()
        else:
            for name in self._sites_in_turn():
                site = self.workshop.site(self.graph, name)
                if site is not None:
                    yield self._visit(site)
        self._finish()

    def _visit(self, site: Site) -> Step:
        """Algorithm 1 at one site: rank its filters, find how many may go, remove them, fine-tune."""
        began, before = time.monotonic(), self._accuracy
        place = self.workshop.place(self.graph, site)
        ranking = self._rank(place, len(self.steps) + 1)
        cut = self._find_cut(place, ranking)
        cut = self._remove(place, cut)
        if cut.m:
            self._finetune()
        return self._settle(place, cut, before, ranking, time.monotonic() - began)

    def _divided(self) -> Iterator[Step]:
        """All sites weighed against each other: measure every curve, divide, then make the cuts in network order."""
        courses = self._courses()
        division = self._divide(courses)
        chosen = [name for name in courses if division.removed.get(name, 0)]
        for name in chosen:
            self._position = (list(courses).index(name) + 1, len(courses))
            site, course = self.workshop.site(self.graph, name), courses[name]
            if site is None or self._done(0, name):
                continue
            began, before = time.monotonic(), self._accuracy
            place = self.workshop.place(self.graph, site)
            self._make(place, course.keep(division.removed[name], site))
            cut = course.cut(division.removed[name], site, before, self._accuracy)
            if name == chosen[-1]:  # only now is this the network that was judged
                self._refit()
                cut = replace(cut, accuracy=self._accuracy, drop=before - self._accuracy)
                cut = replace(cut, bound=self.record.units("division")[0]["bound"])
                self._refresh()
                self._finetune()
            self._file_ranking(f"ensembles/curve-{self._position[0]:04d}", len(self.steps) + 1)
            yield self._settle(place, cut, before, course.ranking, time.monotonic() - began)
        self._stopped = self._why_divided()

    def _file_ranking(self, name: str, number: int) -> None:
        """Keep the ranking of a curve under the number of its step, too."""
        found = self.record.load_tensors(name)
        if found is not None:
            self.record.save_tensors(f"ensembles/{number:04d}", *found)

    def _why_divided(self) -> str:
        if not self.steps:
            return "no division is within the allowed drop"
        wanted = self.recipe.target_macs is not None or self.recipe.target_parameters is not None
        if wanted and not self._reached_target():
            return "all cuts of the division are made; no larger one is within the allowed drop, so the target is not reached"
        return self._stopped or "all cuts of the division are made"

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
        return None if self.record.path is None else write_report(self.record.path)

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

    def _sites_in_turn(self) -> Iterator[str]:
        """Names of the sites to visit, round by round, until a stopping condition holds; notes why it stopped."""
        for number in range(self.recipe.rounds):
            names = self._names_of_round(number)
            for place, name in enumerate(names):
                self._position = (place + 1, len(names))
                if self._done(number, name):
                    continue
                if self._reached_target():
                    return
                self._round = number
                yield name
            if self._reached_target():
                return
            if not any(step.removed for step in self.steps if step.round == number):
                self._stopped = "no site yields a filter within the allowed drop"
                return
        self._stopped = f"all {self.recipe.rounds} rounds are done" if self.recipe.rounds > 1 else "all sites are done"

    def _names_of_round(self, number: int) -> list[str]:
        known = self.record.units("round", round=number)
        if known:
            return list(known[0]["sites"])
        names = [site.name for site in find_sites(self.graph, self.recipe.shortcut)]
        if self.recipe.sites:
            chosen = [n for n in names if any(fnmatch(n, pattern) for pattern in self.recipe.sites)]
            if not chosen:
                wanted = ", ".join(self.recipe.sites)
                raise InvalidInput(f"sites = [{wanted}]: no site has such a name.{suggest(wanted, names)}")
            names = chosen
        names = names if self.recipe.direction == "forward" else names[::-1]
        self.record.append("round", round=number, sites=names)
        return names

    def _done(self, number: int, name: str) -> bool:
        return any(step.round == number and step.site == name for step in self.steps)

    def _reached_target(self) -> bool:
        parameters, macs = self._shares_removed()
        for what, wanted, got in (
            ("parameters", self.recipe.target_parameters, parameters),
            ("MACs", self.recipe.target_macs, macs),
        ):
            if wanted is not None and got >= wanted:
                self._stopped = f"{got:.1%} of the {what} are removed, of {wanted:.1%} wanted"
                return True
        return False

    # ---- the parts of a step -----------------------------------------------------------------------------------------

    def _rank(self, place: Place, number: int, name: str = "") -> Ranking:
        """The order in which the site's filters would go; kept in the folder."""
        ranking = self.workshop.rank(place, step=number, on_scored=lambda done, of: self._tell("score", done, of, place.site))
        self.record.save_tensors(f"ensembles/{name}{number:04d}", *kept_of_ranking(place.site, ranking))
        return ranking

    def _find_cut(self, place: Place, ranking: Ranking) -> Cut:
        """How many of the least important filters may go."""
        number, site, recipe = len(self.steps) + 1, place.site, self.recipe
        known = self.record.units("cut", step=number)
        if known:
            self._answers = [bool(answer) for answer in known[0]["answers"]]
            self._counted, self._baseline = self._counted_from(), known[0]["baseline"]
            return _cut_from(known[0], site.channels)
        looks = 0

        def looked() -> None:
            nonlocal looks
            looks += 1
            self._tell("search", looks, site.channels.bit_length() + 1, site)

        earlier, self._counted = self._earlier_answers(), self._counted_from()
        self._baseline = self._start_accuracy if recipe.budget == "run" else self._accuracy
        cut, answers = find_site_cut(
            self.workshop.bench(place, self.workshop.tools.metric),
            ranking.order,
            self._jury,
            self._counted,
            Looking(recipe.search, recipe.largest_share, recipe.round_to, self._widths(site)),
            baseline=self._baseline,
            accuracy_now=self._accuracy,
            answers=earlier,
            share=self._share_of_drop(),
            on_look=looked,
        )
        self._answers = list(answers[len(earlier) :])
        self.record.append("cut", step=number, site=site.name, answers=self._answers, **_cut_fields(cut))
        return cut

    def _widths(self, site: Site) -> tuple[int, ...] | None:
        """The numbers of filters that may be kept, as measured once; None: all."""
        if not self.recipe.latency_aware:
            return None
        known = {"site": site.name, "channels": site.channels}
        if not self.record.units("widths", **known):
            found = fast_widths(self.graph, site, device=self.workshop.tools.device)
            self.record.append("widths", **known, widths=list(found.widths), seconds=list(found.seconds.items()))
        return tuple(self.record.units("widths", **known)[0]["widths"])

    def _counted_from(self) -> Start | None:
        """What the network that the drop counts from gets on each image; None where only means count."""
        if self.recipe.budget == "site":
            return self.workshop.start(self.graph)
        if self._start is None:
            self._start = self.workshop.start(self.original)
        return self._start

    def _earlier_answers(self) -> list[bool]:
        """What the certifying images have answered before this step."""
        division = [answer for entry in self.record.units("division") for answer in entry["answers"]]
        return division + [answer for step in self.steps for answer in step.answers]

    def _share_of_drop(self) -> float:
        """What may be used of the drop up to here: with one budget for all sites and no training between, ever more."""
        if self.recipe.budget == "site" or self.recipe.finetune is not None:
            return 1.0
        place, count = self._position
        return (self._round * count + place) / (self.recipe.rounds * count)

    def _remove(self, place: Place, cut: Cut) -> Cut:
        """Make the cut. Where rounding tips the accuracy of the compacted network over the edge, a filter less goes."""
        while cut.m:
            kept = self.graph, self._accuracy, self._loss, self.momentum
            self._make(place, cut.keep)
            if not self._jury.by_means or self._within_drop(cut.baseline):
                cut = replace(cut, accuracy=self._accuracy, drop=round(cut.baseline - self._accuracy, 12))
                self._refresh()
                break
            cut = _one_less(cut, self._accuracy)
            self.graph, self._accuracy, self._loss, self.momentum = kept
        return cut

    def _within_drop(self, baseline: float) -> bool:
        return round(baseline - self._accuracy, 12) <= self.recipe.max_drop

    def _make(self, place: Place, keep: Tensor) -> None:
        """Go on with the smaller network; the momentum of the weights that are left comes along."""
        made = self.workshop.made(place, keep)
        parameters = dict(made.graph.module.named_parameters())
        self.momentum = carry_momentum(self.momentum, made.graph.kept, parameters)
        self.graph, self._repair = made.graph, made.repair
        self._note(self.workshop.evaluate(self.graph, self.workshop.search))

    def _note(self, found: Evaluation) -> None:
        self._accuracy, self._loss = found.accuracy, found.loss

    def _refit(self) -> None:
        """Solve every layer anew, if that is asked for: the last part of a division that was judged with it."""
        refitted = self.workshop.refitted(self.graph)
        if refitted is not self.graph:
            self.graph = refitted
            self._note(self.workshop.evaluate(self.graph, self.workshop.search))

    def _refresh(self) -> None:
        """Measure BatchNorm's statistics anew, if that is asked for."""
        if self.recipe.recalibrate is not None:
            with self._unless_over_budget(asked=True):
                self._recalibrate(self.recipe.recalibrate)

    @contextmanager
    def _unless_over_budget(self, *, asked: bool) -> Iterator[None]:
        """Take the weights that the block made, measure them, and undo them if they break the budget, if that is `asked`."""
        weights = copy.deepcopy(self.graph.module.state_dict())
        before = self._accuracy, self._loss, self.momentum
        yield
        self._note(self.workshop.evaluate(self.graph, self.workshop.search))
        if asked and not self._still_within():
            self.graph.module.load_state_dict(weights)
            self._accuracy, self._loss, self.momentum = before

    def _still_within(self) -> bool:
        """Whether the network as it is keeps the budget; where there are certifying images, they are asked."""
        start = self._counted_from() if self.recipe.budget == "run" else self._counted
        if start is None or self._jury.certifying is None:
            return self._within_drop(self._start_accuracy if self.recipe.budget == "run" else self._baseline)
        verdict = self.workshop.certified(self.graph, start, [*self._earlier_answers(), *self._answers])
        self._answers.append(verdict.accepted)
        return verdict.accepted

    # ---- dividing the cuts -------------------------------------------------------------------------------------------

    def _courses(self) -> dict[str, Course]:
        """The order and the curve of every site of the untouched network, each measured once."""
        names = sorted(self._names_of_round(0), key=[s.name for s in find_sites(self.original, self.recipe.shortcut)].index)
        found = {}
        for number, name in enumerate(names, 1):
            self._position = (number, len(names))
            site = self.workshop.site(self.original, name)
            if site is None:
                continue
            if not self.record.units("curve", site=name):
                place = self.workshop.place(self.original, site)
                course = measure_course(self.workshop, place, self._rank(place, number, "curve-"), self._widths(site))
                self.record.append("curve", site=name, **course_fields(course))
            found[name] = course_from(site, self.record.units("curve", site=name)[0])
        return found

    def _divide(self, courses: Mapping[str, Course]) -> Division:
        """How many filters go at each site: the most that is within the contract, or enough for the target."""
        if not self.record.units("division"):
            start = self._counted_from()
            found = find_division(
                self.workshop,
                courses,
                start,
                baseline=self._start_accuracy,
                on_trial=lambda done, of: self._tell("divide", done, of),
            )
            removed = dict(found.division.removed)
            self.record.append(
                "division",
                removed=removed,
                saved=found.division.saved,
                loss=found.division.predicted_loss,
                tried=[list(trial) for trial in found.tried],
                answers=list(found.answers),
                bound=found.bound,
                images=0 if self._jury.certifying is None else len(self._jury.certifying),
                by_estimate=found.by_estimate,
                frontier=[list(point) for point in found.frontier],
            )
        entry = self.record.units("division")[0]
        return Division(entry["removed"], entry["saved"], entry["loss"])

    # ---- training ----------------------------------------------------------------------------------------------------

    def _recalibrate(self, count: int) -> None:
        chosen = subset(self.data.train, min(count, len(self.data.train)), seed=derive(self.recipe.seed, "recalibrate"))
        recalibrate_(self.graph.module, chosen, batch=self.recipe.batch, device=self.workshop.tools.device)

    def _finetune(self) -> None:
        if self.recipe.finetune is not None:
            self._train(self.recipe.finetune, "finetune", len(self.steps) + 1)

    def _train(self, settings: TrainSettings, phase: str, number: int) -> None:
        """Train the network as it is; with a budget for the whole run, weights that exceed it are not taken."""
        settings = _with_seed(settings, derive(self.recipe.seed, phase, number))
        teacher = self.original.module if settings.distill else None

        def note(state: TrainState) -> None:
            """Journal the epochs that a checkpoint holds and the journal does not."""
            for epoch in state.meta["epochs"][len(self.record.units("epoch", step=number, phase=phase)) :]:
                self.record.append("epoch", step=number, phase=phase, **epoch)

        def kept(state: TrainState) -> None:
            self.record.save_tensors(TRAINING, state.tensors, {**state.meta, "phase": phase, "step": number})
            note(state)

        def told(epoch: EpochRecord) -> None:
            self._tell(phase, epoch.epoch + 1, settings.epochs)

        resumed, tools = self._training_state(phase, number), self.workshop.tools
        if resumed is not None:  # killed between the checkpoint and its line in the journal
            note(resumed)
        with self._unless_over_budget(asked=self.recipe.budget == "run"):
            history = train_(
                self.graph.module,
                self.data.train,
                settings,
                search=self.workshop.search,
                teacher=teacher,
                loss_fn=None if tools.loss_fn is cross_entropy else tools.loss_fn,
                metric=tools.metric,
                device=tools.device,
                momentum=self.momentum,
                resume=resumed,
                save=kept,
                on_epoch=told,
            )
            self.momentum = dict(history.momentum)

    def _training_state(self, phase: str, number: int) -> TrainState | None:
        found = self.record.load_tensors(TRAINING)
        if found is None or (found[1]["phase"], found[1]["step"]) != (phase, number):
            return None
        tensors, meta = found
        return TrainState(tensors, {key: value for key, value in meta.items() if key not in ("phase", "step")})

    def _settle(self, place: Place, cut: Cut, before: float, ranking: Ranking, seconds: float) -> Step:
        """Write the step down, with a checkpoint if the network changed."""
        parameters, macs = self._shares_removed()
        importance, repair = ranking.importance, self._repair if cut.m else None
        certifying = self._jury.certifying
        step = Step(
            number=len(self.steps) + 1,
            round=self._round,
            site=place.site.name,
            channels=place.site.channels,
            removed=tuple(place.site.original[i] for i in cut.removed),
            accuracy_before=before,
            accuracy_cut=cut.accuracy,
            accuracy=self._accuracy,
            loss=self._loss,
            parameters_removed=parameters,
            macs_removed=macs,
            evaluated=cut.evaluated,
            masks=ranking.masks,
            r2_held_out=ranking.r2_held_out,
            split_half=ranking.split_half,
            seconds=seconds,
            criterion=ranking.criterion,
            note=ranking.note,
            examples=ranking.examples,
            compared=ranking.compared,
            bound=cut.bound,
            images=0 if certifying is None or cut.bound is None else len(certifying),
            by_estimate=cut.by_estimate,
            refused=cut.refused,
            answers=tuple(self._answers),
            repaired=None if repair is None else (repair.error_before, repair.error_after),
            importance=importance,
        )
        self._checkpoint(step)
        self.steps.append(step)
        self._answers = []
        return step

    def _checkpoint(self, step: Step) -> None:
        if step.removed and self.record.path is not None:
            with disk_errors(self.record.path):
                save(self.graph, self.record.path / f"checkpoints/{step.number:04d}.safetensors")
            self.record.save_tensors(f"checkpoints/{step.number:04d}-momentum", self.momentum)
        self.record.append("step", **step_fields(step))
        self.record.delete(TRAINING)
        older = [s.number for s in self.steps if s.removed]
        if step.removed and older:
            self.record.delete(f"checkpoints/{older[-1]:04d}")
            self.record.delete(f"checkpoints/{older[-1]:04d}-momentum")

    # ---- start and end -----------------------------------------------------------------------------------------------

    def save_start(self) -> None:
        """Keep the network as it came."""
        if self.record.path is not None:
            with disk_errors(self.record.path):
                save(self.graph, self.record.path / f"{START}.safetensors")
            self.record.append("network", **describe(self.graph))

    def restore(self, model: nn.Module) -> None:
        """Take up what the journal and the checkpoints say was done."""
        self.steps = [step_from(entry) for entry in self.record.units("step")]
        cut = [step.number for step in self.steps if step.removed]
        if cut and self.record.path is not None:
            path = self.record.path / f"checkpoints/{cut[-1]:04d}.safetensors"
            self.graph = load(model, path, example_input=self.original.example)
            found = self.record.load_tensors(f"checkpoints/{cut[-1]:04d}-momentum")
            self.momentum = {} if found is None else found[0]
        if self.steps:
            self._accuracy, self._loss = self.steps[-1].accuracy, self.steps[-1].loss

    def _measure_start(self) -> None:
        known = self.record.units("start")
        if not known:
            found = self.workshop.evaluate(self.graph, self.workshop.search)
            self.record.append("start", accuracy=found.accuracy, loss=found.loss)
            known = self.record.units("start")
        self._start_accuracy = known[0]["accuracy"]
        if not self.steps:
            self._accuracy, self._loss = known[0]["accuracy"], known[0]["loss"]

    def _finish(self) -> None:
        """Retrain, then read the test set: once, for the network as it came and as it is now."""
        retrained = self.record.units("retrained")
        if self.recipe.retrain is not None and any(step.removed for step in self.steps):
            if retrained:
                self._load_retrained()
            else:
                self._train(self.recipe.retrain, "retrain", len(self.steps) + 1)
                self.record.save_tensors("checkpoints/retrained", self.graph.module.state_dict())
                self.record.append("retrained", accuracy=self._accuracy, loss=self._loss)
                self.record.delete(TRAINING)
        test, search = self.data.test.ready(self.workshop.dtype), self.workshop.search
        speed, batch = self._speed(test)
        self.outcome = Outcome(
            graph=self.graph,
            steps=tuple(self.steps),
            stopped=self._stopped,
            search_before=self.workshop.evaluate(self.original, search),
            search_after=self.workshop.evaluate(self.graph, search),
            test_before=self.workshop.evaluate(self.original, test),
            test_after=self.workshop.evaluate(self.graph, test),
            cost_before=self.cost_before,
            cost_after=cost(self.graph),
            classes=self._classes(test),
            speed=speed,
            batch=batch,
            seconds=time.monotonic() - self._began,
        )
        self._write_outcome(self.outcome)
        self.close()

    def _classes(self, test: Examples) -> tuple[tuple[str, float, float], ...]:
        """Test accuracy of every class before and after."""
        each = [self.workshop.by_class(graph, test) for graph in (self.original, self.graph)]
        return tuple(zip(self.data.classes, *each, strict=True)) if all(each) else ()

    def _speed(self, test: Examples) -> tuple[SpeedUp | None, int]:
        """How much faster the smaller network is here, on a batch of test inputs; not measured where nothing was cut."""
        if not any(step.removed for step in self.steps):
            return None, 0
        inputs = test.batch(slice(0, _TIMED)).inputs
        found = latency(self.original, self.graph, example_input=inputs, repeats=_TIMINGS, device=self.workshop.tools.device)
        return found.speedups[0], len(inputs)

    def _load_retrained(self) -> None:
        found = self.record.load_tensors("checkpoints/retrained")
        if found is None:
            raise RunError(f"{self.record.path}: the retrained weights are missing. Restore checkpoints/ from a copy.")
        self.graph.module.load_state_dict(found[0])

    def _write_outcome(self, outcome: Outcome) -> None:
        if self.record.path is None:
            return
        with disk_errors(self.record.path):
            save(outcome.graph, self.record.path / "pruned.safetensors")
            outcome.graph.plan.save(self.record.path / "plan.json")
        if not self.record.units("end"):
            self.record.append("end", **outcome_fields(outcome))
        self.report()

    # ---- small services ----------------------------------------------------------------------------------------------

    def _shares_removed(self) -> tuple[float, float]:
        now = cost(self.graph)
        return 1 - now.parameters / self.cost_before.parameters, 1 - now.macs / max(self.cost_before.macs, 1)

    def _tell(self, phase: str, done: int, total: int, site: Site | None = None) -> None:
        if self._watch is not None:
            self._watch(Progress(phase, done, total, "" if site is None else site.name, *self._position, self._round))


def _cut_fields(cut: Cut) -> dict[str, Any]:
    names = ("removed", "evaluated", "baseline", "accuracy", "drop", "by_estimate", "bound", "refused")
    return {name: getattr(cut, name) for name in names}


def _cut_from(entry: Mapping[str, Any], channels: int) -> Cut:
    removed = tuple(int(i) for i in entry["removed"])
    keep = torch.ones(channels, dtype=torch.bool)
    keep[list(removed)] = False
    evaluated = tuple((int(m), float(a)) for m, a in entry["evaluated"])
    figures = (entry["baseline"], entry["accuracy"], entry["drop"])
    more = (entry["by_estimate"], entry["bound"], tuple(int(m) for m in entry["refused"]))
    return Cut(keep, removed, len(removed), *figures, evaluated, *more)


def _one_less(cut: Cut, accuracy: float) -> Cut:
    """The same cut with its most important filter put back; `accuracy` is what the larger one was found to have."""
    removed = cut.removed[:-1]
    keep = cut.keep.clone()
    keep[cut.removed[-1]] = True
    evaluated = (*cut.evaluated, (cut.m, accuracy))
    return replace(cut, keep=keep, removed=removed, m=len(removed), evaluated=evaluated)


def _provenance(
    graph: Graph,
    data: Data,
    recipe: Recipe,
    measures: Mapping[str, Measure],
    store: str | Path | None,
    origin: Mapping[str, Any] | None,
) -> dict[str, Any]:
    weights = {name: tensor.detach().cpu() for name, tensor in graph.module.state_dict().items()}
    return {
        "model": {"class": graph.plan.model, "weights_sha256": digest(weights), "leaves": list(graph.leaves)},
        "data": data.record(),
        "seed": recipe.seed,
        "measures": {what: getattr(measure, "__name__", type(measure).__name__) for what, measure in measures.items()},
        "store": None if store is None else str(Path(store).absolute()),
        "origin": dict(origin or {}),
        **environment(),
    }


def _open_store(record: Record, path: str | Path | None) -> Store:
    """The store at `path`, or in the run folder, or in memory for a run that has none."""
    if path is not None:
        return Store(Path(path))
    return Store(None if record.path is None else record.path / MEASURED)


def _with_seed(settings: TrainSettings, seed: int) -> TrainSettings:
    return replace(settings, seed=seed)


def _example(model: nn.Module, data: Data) -> Tensor:
    """Two training inputs where the model is, and of the kind of numbers that it computes with."""
    inputs = data.train.batch(slice(0, 2)).inputs
    first = next((p for p in model.parameters() if p.is_floating_point()), None)
    if first is None:
        return inputs
    return inputs.to(first.device, first.dtype if inputs.is_floating_point() else inputs.dtype)
