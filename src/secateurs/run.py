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

from secateurs.artefact import load, save
from secateurs.compaction import compact, verify
from secateurs.costs import cost
from secateurs.data.examples import Examples
from secateurs.data.seeding import derive, generator_for
from secateurs.data.splits import Data, subset
from secateurs.engine import split_for
from secateurs.ensemble import Ensemble, accuracy_under, score_masks
from secateurs.errors import InvalidInput, RunError, suggest
from secateurs.evaluate import Device, Evaluation, Measure, correct, cross_entropy, evaluate
from secateurs.graph import Graph, trace
from secateurs.importance import Importance, PairImportance, fit_importance, fit_pairs, order, scores
from secateurs.masks import sample_masks
from secateurs.recipe import Recipe
from secateurs.record import Record, create_folder, disk_errors, environment, open_folder
from secateurs.search import Cut, find_cut
from secateurs.sites import Site, find_sites
from secateurs.steps import Outcome, Progress, Step, outcome_fields, step_fields, step_from
from secateurs.tensorfile import digest
from secateurs.training import EpochRecord, TrainSettings, TrainState, carry_momentum, recalibrate_, train_

START = "checkpoints/start"
TRAINING = "checkpoints/training"


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
) -> Run:
    """Prune a copy of `model` as `recipe` says: iterate over the run for its Steps, then (or at once) ask for `run.finish()`.

    With a `folder` every unit of work is kept there, and `resume` goes on after a crash. `loss_fn` and `metric` take outputs
    and targets (higher metric = better; "accuracy" everywhere means this metric). `origin` is kept in the provenance.
    """
    recipe = recipe or Recipe()
    graph = trace(model, data.train.batch(slice(0, 2)).inputs.to(_device_of(model)), leaves=leaves)
    record = Record()
    if folder is not None:
        record = create_folder(Path(folder), recipe, _provenance(graph, data, recipe, leaves, origin))
    run = Run(graph, data, recipe, record, loss_fn=loss_fn, metric=metric, device=device, watch=watch)
    run.save_start()
    return run


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
        example = data.train.batch(slice(0, 2)).inputs.to(_device_of(model))
        if not (path / f"{START}.safetensors").exists():
            raise RunError(f"{path}: was stopped before its first checkpoint. Delete the folder and start the run again.")
        start = load(model, path / f"{START}.safetensors", example_input=example)
        run = Run(start, data, stored, record, loss_fn=loss_fn, metric=metric, device=device, watch=watch)
        run.restore(model)
        return run
    except BaseException:
        record.close()
        raise


class Run:
    """A journey through the sites of a network. Iterating does the work, one Step at a time."""

    def __init__(
        self,
        graph: Graph,
        data: Data,
        recipe: Recipe,
        record: Record,
        *,
        loss_fn: Measure,
        metric: Measure,
        device: Device,
        watch: Callable[[Progress], None] | None,
    ) -> None:
        self.graph, self.original, self.data, self.recipe, self.record = graph, graph, data, recipe, record
        self.loss_fn, self.metric, self.device, self._watch = loss_fn, metric, device, watch
        self.steps: list[Step] = []
        self.outcome: Outcome | None = None
        self.momentum: dict[str, Tensor] = {}
        self.cost_before = cost(graph)
        self._search = data.search.ready(_dtype_of(graph.module))
        self._scoring: Examples | None = None
        self._accuracy = float("nan")
        self._loss = float("nan")
        self._start_accuracy = float("nan")
        self._stopped = ""
        self._began = time.monotonic()
        self._position = (0, 0)

    # ---- Algorithm 1 -------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Step]:
        try:
            yield from self._walk()
        except Exception:
            self.close()
            raise

    def _walk(self) -> Iterator[Step]:
        self._measure_start()
        for name in self._sites_in_turn():
            began = time.monotonic()
            site = self._look_up(name)
            if site is None:
                continue
            before = self._accuracy
            ensemble = self._score(site)
            importance = self._fit(ensemble)
            cut = self._find_cut(site, importance)
            cut = self._remove(site, cut)
            if cut.m:
                self._finetune()
            yield self._settle(site, cut, before, importance, len(ensemble.masks), time.monotonic() - began)
        self._finish()

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

    def _look_up(self, name: str) -> Site | None:
        """The site as it is now: an earlier cut may have narrowed it, or folded its branch away."""
        found = next((site for site in find_sites(self.graph, self.recipe.shortcut) if site.name == name), None)
        return found if found is not None and found.channels > 1 else None

    # ---- the parts of a step -----------------------------------------------------------------------------------------

    def _score(self, site: Site) -> Ensemble:
        """Draw masks and measure the loss under each."""
        recipe, number = self.recipe, len(self.steps) + 1
        count = recipe.masks or recipe.masks_per_filter * site.channels
        generator = generator_for(recipe.seed, "masks", number)
        masks = sample_masks(site.channels, count, off=recipe.off, design=recipe.design, generator=generator)
        known = [loss for entry in self.record.units("masks", step=number) for loss in entry["losses"]]

        def note(start: int, losses: Tensor) -> None:
            self.record.append("masks", step=number, start=start, losses=losses.tolist())
            self._tell("score", start + len(losses), count, site)

        ensemble = score_masks(
            self.graph,
            site,
            masks,
            self._scoring_examples(),
            loss_fn=self.loss_fn,
            batch=recipe.batch,
            device=self.device,
            known=torch.tensor(known, dtype=torch.float64),
            on_scored=note,
        )
        tensors = {"masks": ensemble.masks, "losses": ensemble.losses}
        self.record.save_tensors(f"ensembles/{number:04d}", tensors, {"site": site.name, "original": list(site.original)})
        return ensemble

    def _scoring_examples(self) -> Examples:
        if self._scoring is None:
            pool = self.data.train if self.recipe.scoring == "train" else self.data.search
            count = min(self.recipe.scoring_examples or len(pool), len(pool))
            chosen = pool if count == len(pool) else subset(pool, count, seed=derive(self.recipe.seed, "scoring"))
            self._scoring = chosen.ready(_dtype_of(self.graph.module))
        return self._scoring

    def _fit(self, ensemble: Ensemble) -> Importance | PairImportance:
        """The linear model mask → score (Eq. 3), or the one with pairwise terms."""
        scored = scores(ensemble.losses, self.recipe.transform)
        if self.recipe.model == "pairs":
            return fit_pairs(ensemble.masks, scored, ridge=self.recipe.ridge or 1e-4)
        return fit_importance(ensemble.masks, scored, ridge=self.recipe.ridge)

    def _find_cut(self, site: Site, importance: Importance | PairImportance) -> Cut:
        """How many of the least important filters may go."""
        number = len(self.steps) + 1
        known = self.record.units("cut", step=number)
        if known:
            return _cut_from(known[0], site.channels)
        network = split_for(self.graph, site, self._search, batch=self.recipe.batch, device=self.device)
        measured = 0

        def measure(keep: Tensor) -> float:
            nonlocal measured
            measured += 1
            self._tell("search", measured, site.channels.bit_length() + 1, site)
            return accuracy_under(network, keep, self.metric)

        cut = find_cut(
            order(importance),
            measure,
            baseline=self._start_accuracy if self.recipe.budget == "run" else self._accuracy,
            max_drop=self.recipe.max_drop,
            method=self.recipe.search,
            largest_share=self.recipe.largest_share,
            accuracy_now=self._accuracy,
        )
        fields = {"baseline": cut.baseline, "accuracy": cut.accuracy, "drop": cut.drop}
        self.record.append(
            "cut", step=number, site=site.name, removed=list(cut.removed), evaluated=list(cut.evaluated), **fields
        )
        return cut

    def _remove(self, site: Site, cut: Cut) -> Cut:
        """Make the cut. Where rounding tips the accuracy of the compacted network over the edge, a filter less goes."""
        while cut.m:
            smaller = self._compacted(site, cut)
            found = self._evaluate(self._search, smaller)
            if round(cut.baseline - found.accuracy, 12) <= self.recipe.max_drop:
                self._take(smaller, found)
                break
            cut = _one_less(cut, found.accuracy)
        return cut

    def _compacted(self, site: Site, cut: Cut) -> Graph:
        """The network without the filters, proved to compute what the masked one does."""
        masks: dict[str | Site, Tensor] = {site.name: cut.keep}
        smaller = compact(self.graph, masks)
        verify(self.graph, masks, smaller)
        return smaller

    def _take(self, smaller: Graph, found: Evaluation) -> None:
        """Go on with the smaller network; the momentum of the weights that are left comes along."""
        self.momentum = carry_momentum(self.momentum, smaller.kept, dict(smaller.module.named_parameters()))
        self.graph, self._accuracy, self._loss = smaller, found.accuracy, found.loss
        if self.recipe.recalibrate is not None:
            with self._unless_over_budget():
                self._recalibrate(self.recipe.recalibrate)

    @contextmanager
    def _unless_over_budget(self) -> Iterator[None]:
        """Take the weights that the block made, measure them, and undo them if they break a budget for the whole run."""
        weights = copy.deepcopy(self.graph.module.state_dict())
        before = self._accuracy, self._loss, self.momentum
        yield
        found = self._evaluate(self._search)
        self._accuracy, self._loss = found.accuracy, found.loss
        if self.recipe.budget == "run" and not round(self._start_accuracy - found.accuracy, 12) <= self.recipe.max_drop:
            self.graph.module.load_state_dict(weights)
            self._accuracy, self._loss, self.momentum = before

    def _recalibrate(self, count: int) -> None:
        chosen = subset(self.data.train, min(count, len(self.data.train)), seed=derive(self.recipe.seed, "recalibrate"))
        recalibrate_(self.graph.module, chosen, batch=self.recipe.batch, device=self.device)

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

        resumed = self._training_state(phase, number)
        if resumed is not None:  # killed between the checkpoint and its line in the journal
            note(resumed)
        with self._unless_over_budget():
            history = train_(
                self.graph.module,
                self.data.train,
                settings,
                search=self._search,
                teacher=teacher,
                loss_fn=None if self.loss_fn is cross_entropy else self.loss_fn,
                metric=self.metric,
                device=self.device,
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

    def _settle(
        self, site: Site, cut: Cut, before: float, importance: Importance | PairImportance, masks: int, seconds: float
    ) -> Step:
        """Write the step down, with a checkpoint if the network changed."""
        parameters, macs = self._shares_removed()
        step = Step(
            number=len(self.steps) + 1,
            round=self._round,
            site=site.name,
            channels=site.channels,
            removed=tuple(site.original[i] for i in cut.removed),
            accuracy_before=before,
            accuracy_cut=cut.accuracy,
            accuracy=self._accuracy,
            loss=self._loss,
            parameters_removed=parameters,
            macs_removed=macs,
            evaluated=cut.evaluated,
            masks=masks,
            r2_held_out=float(importance.r2_held_out),
            split_half=float(getattr(importance, "split_half", float("nan"))),
            seconds=seconds,
            importance=importance,
        )
        self._checkpoint(step)
        self.steps.append(step)
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
            found = self._evaluate(self._search)
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
        test = self.data.test.ready(_dtype_of(self.graph.module))
        self.outcome = Outcome(
            graph=self.graph,
            steps=tuple(self.steps),
            stopped=self._stopped,
            search_before=self._evaluate(self._search, self.original),
            search_after=self._evaluate(self._search),
            test_before=self._evaluate(test, self.original),
            test_after=self._evaluate(test),
            cost_before=self.cost_before,
            cost_after=cost(self.graph),
            seconds=time.monotonic() - self._began,
        )
        self._write_outcome(self.outcome)
        self.close()

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

    # ---- small services ----------------------------------------------------------------------------------------------

    def _evaluate(self, examples: Examples, graph: Graph | None = None) -> Evaluation:
        module = (graph or self.graph).module
        options = {"batch": self.recipe.batch, "device": self.device}
        return evaluate(module, examples, loss_fn=self.loss_fn, metric=self.metric, **options)  # type: ignore[arg-type]

    def _shares_removed(self) -> tuple[float, float]:
        now = cost(self.graph)
        return 1 - now.parameters / self.cost_before.parameters, 1 - now.macs / max(self.cost_before.macs, 1)

    def _tell(self, phase: str, done: int, total: int, site: Site | None = None) -> None:
        if self._watch is not None:
            self._watch(Progress(phase, done, total, "" if site is None else site.name, *self._position))


def _cut_from(entry: Mapping[str, Any], channels: int) -> Cut:
    removed = tuple(int(i) for i in entry["removed"])
    keep = torch.ones(channels, dtype=torch.bool)
    keep[list(removed)] = False
    evaluated = tuple((int(m), float(a)) for m, a in entry["evaluated"])
    return Cut(keep, removed, len(removed), entry["baseline"], entry["accuracy"], entry["drop"], evaluated)


def _one_less(cut: Cut, accuracy: float) -> Cut:
    """The same cut with its most important filter put back; `accuracy` is what the larger one was found to have."""
    removed = cut.removed[:-1]
    keep = cut.keep.clone()
    keep[cut.removed[-1]] = True
    evaluated = (*cut.evaluated, (cut.m, accuracy))
    return replace(cut, keep=keep, removed=removed, m=len(removed), evaluated=evaluated)


def _provenance(
    graph: Graph, data: Data, recipe: Recipe, leaves: tuple[str, ...], origin: Mapping[str, Any] | None
) -> dict[str, Any]:
    weights = {name: tensor.detach().cpu() for name, tensor in graph.module.state_dict().items()}
    return {
        "model": {"class": graph.plan.model, "weights_sha256": digest(weights), "leaves": list(leaves)},
        "data": data.record(),
        "seed": recipe.seed,
        "origin": dict(origin or {}),
        **environment(),
    }


def _with_seed(settings: TrainSettings, seed: int) -> TrainSettings:
    return replace(settings, seed=seed)


def _dtype_of(module: nn.Module) -> torch.dtype:
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)


def _device_of(module: nn.Module) -> torch.device:
    return next((p.device for p in module.parameters()), torch.device("cpu"))
