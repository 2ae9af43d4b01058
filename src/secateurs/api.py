"""The public entry points: `prune` a network in one call, watch a `Pruner` step by step, `resume` a run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from torch import nn

from secateurs._util.folders import disk_errors
from secateurs._util.journal import Journal
from secateurs._util.modules import Device, check_device, unwrapped
from secateurs._util.tensors import digest
from secateurs.config import Deploy, EngineName, Recipe, ShortcutChoice, TrainSettings, declarations
from secateurs.criteria import named, resolved, taken_up, user_function
from secateurs.data.dataset import Examples, class_labels
from secateurs.data.drawn import reopen_loaders, save_drawn
from secateurs.data.forms import PAIR, BatchForm, Forward
from secateurs.data.splits import Data
from secateurs.data.stream import Stream
from secateurs.distributed import ALONE, Workers, join, restarts
from secateurs.distributed import rank as torchrun_rank
from secateurs.errors import InvalidInput, RunError, suggest
from secateurs.export.engines import engine_for
from secateurs.export.int8 import int8_module
from secateurs.graph.trace import Graph, trace
from secateurs.metrics import Measure, correct, cross_entropy, display_name, output_loss
from secateurs.pruning.arguments import (
    Ignore,
    check_autograd,
    check_call,
    check_data,
    check_functions,
    check_trials,
    feasible,
    open_sets,
    recipe_for,
    within_time_budget,
    without_ignored,
)
from secateurs.pruning.context import ProgressReporter, PruningContext, Runtime, Stopwatch
from secateurs.pruning.curves import chosen_sites
from secateurs.pruning.estimate import Estimate, estimate, opening
from secateurs.pruning.figures import KINDS, ResultFigures
from secateurs.pruning.folder import (
    check_origin,
    create_folder,
    environment,
    example_for,
    is_resumable,
    load_start,
    open_cache,
    open_folder,
    provenance,
    recipe_digest,
)
from secateurs.pruning.forecast import Forecast
from secateurs.pruning.results import Progress, Start, Step
from secateurs.pruning.run import Run
from secateurs.pruning.sanity import accuracy_note, better_than_guessing, shape_notes
from secateurs.pruning.trainer import check_training
from secateurs.pruning.user_training import with_step
from secateurs.pruning.whole_metric import Evaluate, WholeMetric
from secateurs.report import Plots, plots, write_report
from secateurs.report.progress import RunWatcher, display
from secateurs.report.result import Result
from secateurs.scoring.cache import MeasurementCache, is_store
from secateurs.speed.engines import Engine
from secateurs.training.guard import START, KeptWeights
from secateurs.training.state import EpochRecord


class Pruner(Run):
    """A pruning that is watched: iterating does the work, one `Step` at a time; `finish` does the rest. See `prune`.

    `train` may also be a `Data` with all three sets in memory; then `val` and `test` are not given. `uncertified` says whether
    a validation set that is too small for the recipe's confidence gives a run by point estimates, instead of an error; by
    default it does where neither a recipe nor a confidence is given.
    """

    def __init__(
        self,
        model: nn.Module,
        train: Any,
        val: Any = None,
        *,
        max_drop: float | None = None,
        macs: float | None = None,
        parameters: float | None = None,
        target_latency: float | None = None,
        max_ms: float | None = None,
        engine: EngineName | None = None,
        latency_batch: int | None = None,
        shortcut: ShortcutChoice | None = None,
        confidence: float | None = None,
        deploy: Deploy | None = None,
        measure: Callable[[nn.Module], float] | None = None,
        test: Any = None,
        evaluate: Evaluate | None = None,
        finetune: Callable[..., Any] | None = None,
        retrain: str | TrainSettings | None = None,
        criterion: str | Callable[..., Any] | None = None,
        forward: Forward | None = None,
        loss: Measure | None = None,
        metric: Measure | None = None,
        recipe: Recipe | None = None,
        ignore: Ignore = (),
        time_budget: float | None = None,
        folder: str | Path | None = None,
        device: Device = None,
        callback: Callable[[Progress], None] | None = None,
        leaves: tuple[str, ...] = (),
        origin: Mapping[str, Any] | None = None,
        store: str | Path | None = None,
        cache_bytes: int | None = None,
        uncertified: bool | None = None,
        distributed: bool = True,
    ) -> None:
        check_autograd()
        clock, model, notes = Stopwatch(), unwrapped(model), list[str]()
        workers = join() if distributed else ALONE
        folder = None if folder is None else Path(folder).expanduser()
        check_device(device)
        functions = {"evaluate": evaluate, "finetune": finetune, "forward": forward, "loss": loss, "metric": metric}
        check_call(model, recipe, time_budget, {**functions, "measure": measure, "callback": callback})
        finetune = with_step(finetune)
        own, seed = _given(loss=loss, metric=metric), 0 if recipe is None else recipe.seed
        place = folder if workers.first else None
        opened = open_sets(model, train, val, test, evaluate, forward=forward, own=own, seed=seed, folder=place)
        data, form = opened.data, opened.form
        streams: dict[str, Any] = {"train": opened.train, "test": opened.test}
        seen = replace(data, test=opened.first_test) if opened.train is not None else data
        notes += data.notes
        targets = {"target_macs": macs, "target_parameters": parameters, "target_latency": target_latency, "max_ms": max_ms}
        timing = {"engine": engine, "latency_batch": latency_batch}
        kept = {"confidence": confidence, "deploy": deploy, "shortcut": shortcut}
        asked = recipe_for(recipe, criterion, max_drop=max_drop, retrain=retrain, **timing, **kept, **targets)
        timed_in = _engine(asked, measure, device)
        graph = trace(model, example_for(model, data), leaves=leaves)
        asked = without_ignored(asked, graph, model, ignore)
        chosen_sites(asked, graph)  # an error here leaves no folder
        loss_fn, metric_fn = _measures(form, loss, metric)
        check_data(graph, seen, loss_fn, metric_fn, evaluate)
        notes += shape_notes(seen)
        notes += _check_trainings(asked, finetune, graph, seen.train, opened.train, loss_fn)
        whole = _whole_metric(evaluate, graph, workers)
        uncertified = recipe is None and confidence is None if uncertified is None else uncertified
        asked = feasible(asked, data, whole, trains=finetune is not None, given=not uncertified, notes=notes)
        if time_budget is not None:
            runtime = Runtime(
                *(loss_fn, metric_fn, device, MeasurementCache(), None, whole, finetune), engine=timed_in, served=_served(data)
            )
            asked = within_time_budget(workers, time_budget, asked, graph, data, runtime, notes)
        measures = {"loss": loss_fn, "metric": evaluate or metric_fn, **({} if measure is None else {"time": measure})}
        _check_workers(workers, graph, data, asked, measures)
        if folder is None:
            journal = Journal(None, KINDS, workers)
        else:
            again = _given(**functions, measure=measure, test=test)
            known = provenance(graph, data, asked, measures=measures, again=again, notes=notes, store=store, origin=origin)
            journal = create_folder(folder, asked, known, workers)
        try:
            if opened.train is not None and folder is not None and workers.first:
                with disk_errors(folder):
                    data = save_drawn(data, folder, whole=form.whole or form.gives_loss)
            cache = open_cache(journal, store)
            runtime = Runtime(
                *(loss_fn, metric_fn, device, cache, cache_bytes, whole, finetune),
                engine=timed_in,
                served=_served(data),
                quantise=_quantise(asked),
                **streams,
            )
            reporter = ProgressReporter(callback if workers.first else None)
            super().__init__(PruningContext(graph, data, asked, runtime, journal, reporter, clock))
            self.notes = notes
            self.save_start()
        except BaseException as error:
            workers.fail(error)
            journal.close()
            raise

    @classmethod
    def _resumed(cls, context: PruningContext, notes: Sequence[str]) -> Pruner:
        found = cls.__new__(cls)
        Run.__init__(found, context)
        found.notes = list(notes)
        found.restore()
        return found

    def __iter__(self) -> Iterator[Step]:
        progress = self.context.progress
        if progress.callback is not None and progress.forecast is None:
            progress.forecast = Forecast(self.estimate().phases)
        return super().__iter__()

    def estimate(self) -> Estimate:
        """Roughly how long what is left of the run takes on this machine, by its phases."""
        return estimate(self.context)

    def measure_original(self) -> None:
        """Measure the original network, and note if it is no better than guessing, with what may be the cause."""
        super().measure_original()
        labels, (start,) = class_labels(self.data.search.targets), self.journal.of(Start)
        if labels is None or self.context.runtime.metric is not correct or self.context.runtime.evaluate:
            return
        if better_than_guessing(start.accuracy, labels):
            return
        answers, classes = self.context.answers(self.original)
        note = accuracy_note(answers, labels.cpu().long(), classes)
        self.notes += [note] if note not in self.notes else []  # a loop that was left measures again

    def _finish(self) -> None:
        super()._finish()
        assert self.result is not None
        for what, want, found in (
            ("MACs", self.recipe.target_macs, self.result.macs),
            ("parameters", self.recipe.target_parameters, self.result.parameters),
        ):
            if want is not None and found.removed < want:
                self.notes.append(
                    f"only {found.removed:.1%} of the {what} are removed, of {want:.1%} wanted: {self.result.stopped}"
                )
        self.report()
        self.close()

    def finish(self) -> Result:
        """Do all that is left, and return the result."""
        return self._result if self.result is not None else (super().finish(), self._result)[1]

    @cached_property
    def _result(self) -> Result:
        found = self.result
        assert found is not None
        known = {each.name: getattr(found, each.name) for each in fields(found)}
        return Result(
            **known,
            max_drop=self.recipe.max_drop,
            confidence=self.recipe.confidence,
            notes=(*self.notes, *self._otherwise(), *self._undone()),
            folder=self.journal.path,
            records=tuple(self.journal.records),
            recipe=self.recipe,
            context=self.context,
        )

    def _otherwise(self) -> list[str]:
        """What trainings did otherwise than asked for."""
        return list(dict.fromkeys(f"training: {epoch.note}" for epoch in self.journal.of(EpochRecord) if epoch.note))

    def _undone(self) -> list[str]:
        """A note on trainings whose weights were not kept; those of trials are in the record of the trial."""
        undone = [kept for kept in self.journal.of(KeptWeights) if kept.kept == START and kept.phase != "trial"]
        if len(undone) < 2:
            return [f"training was undone: {kept.summary()}" for kept in undone]
        return [f"{len(undone)} trainings were undone: the weights before them are kept, as the report shows"]

    def report(self) -> Path | None:
        """Write the report of the run so far into its folder; None for a run without a folder."""
        if self.journal.path is None:
            return None
        with disk_errors(self.journal.path):
            return write_report(self.journal.path)

    @property
    def plot(self) -> Plots:
        """The figures of the run so far, for notebooks."""
        return plots(self.journal.records if self.journal.path is None else self.journal.path, recipe=self.recipe)


class OtherOptions(TypedDict, total=False):
    """Options of `prune` that few runs need; see `Pruner`."""

    max_ms: float | None
    latency_batch: int | None
    deploy: Deploy | None
    measure: Callable[[nn.Module], float] | None
    criterion: str | Callable[..., Any] | None
    forward: Forward | None
    loss: Measure | None
    metric: Measure | None
    time_budget: float | None
    callback: Callable[[Progress], None] | None
    leaves: tuple[str, ...]
    origin: Mapping[str, Any] | None
    store: str | Path | None
    cache_bytes: int | None
    uncertified: bool | None
    distributed: bool


def prune(
    model: nn.Module,
    train: Any,
    val: Any = None,
    *,
    max_drop: float | None = None,
    confidence: float | None = None,
    target_latency: float | None = None,
    macs: float | None = None,
    parameters: float | None = None,
    engine: EngineName | None = None,
    shortcut: ShortcutChoice | None = None,
    test: Any = None,
    evaluate: Evaluate | None = None,
    finetune: Callable[..., Any] | None = None,
    retrain: str | TrainSettings | None = None,
    recipe: Recipe | None = None,
    ignore: Ignore = (),
    folder: str | Path | None = None,
    device: Device = None,
    progress: bool = True,
    **others: Unpack[OtherOptions],
) -> Result:
    """Prune a copy of `model` and return the smaller network: as much is removed as the allowed drop permits.

    `train`, `val` and `test` are loaders: any iterables of batches that can be read more than once, streamed and never copied
    whole. Batches are (inputs, targets), or dicts with the arguments of the model and labels; for others give
    `forward(model, batch)`, `loss(outputs, batch)` and `metric(outputs, batch)`, one value for each example, higher = better.
    `max_drop` is a fraction: 0.01 is one point. `macs=0.5` or `parameters=0.5` stop at a share removed, `target_latency=0.5` at
    a share of the time that remains and `max_ms=4.0` at milliseconds. Cuts are weighed by time in the `engine` ("torch",
    "compile", "onnxruntime"; by default PyTorch on the model's device), at the batch that `val` gives and no slower at single
    examples, or at `latency_batch` alone; by `measure(module) -> seconds` on a device of your own; with a target in MACs or
    parameters and no engine, by that. `shortcut` says where residual blocks are cut ("before" or "after" the add, "stream";
    "auto" weighs all three). Drops are certified at a `confidence` of 0.95, if there are enough examples; with 0 point
    estimates decide. `deploy="int8"` prunes for an int8 file, and certifies that file.
    `evaluate(model)` replaces the metric by one of the whole validation set: one number, with which point estimates decide,
    or a tensor (N,) with a value for each example, whose mean is then
    certified as a metric is. `finetune(model)` is the user's own training after the cuts, `retrain="gentle"` (or
    `TrainSettings`) is ours, `criterion` a name or a function (graph, site, data) -> scores (C,). `ignore` lists layers that
    keep all filters. With a `time_budget` in seconds a cheaper recipe is taken where the work may take longer. `recipe` has all
    other settings; without one, `Recipe()`. With a `folder` all is kept there, and `resume` continues after a crash.

    In a script that torchrun started on several processes, all of them call this and share the measurements; the first one
    prints and has the folder, and after a restart of torchrun the run in it goes on. `distributed=False`: this process alone.

    `others` are the options of `Pruner` that are not listed (`OtherOptions`). Progress is shown on a terminal, as plain lines
    elsewhere, not at all with `progress=False`; `callback` gets every `Progress`.
    """
    given = dict(locals())
    known, unlisted = inspect.signature(Pruner).parameters, dict[str, Any](given.pop("others"))
    for name in unlisted:
        if name in declarations(Recipe) and name not in known:
            raise InvalidInput(f"prune: {name} is a field of the recipe. Give recipe=Recipe({name}=…).")
        if name not in known:
            raise InvalidInput(f"prune: unknown option {name!r}.{suggest(name, known)}")
    options = {name: value for name, value in given.items() if name in known} | unlisted
    check_functions(callback=options.get("callback"))
    quiet = options.get("distributed", True) and torchrun_rank() > 0
    leave = torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
    with leave, _shown(progress and not quiet, options.pop("callback", None)) as (callback, follow):
        return follow(start_or_continue(callback=callback, **options))


def start_or_continue(model: nn.Module, train: Any, val: Any = None, **options: Any) -> Pruner:
    """A new `Pruner`; where torchrun has restarted the workers, the run that its `folder` holds, resumed.

    The script is then the same, from its beginning. A run that was killed before it could be resumed is started again.
    """
    folder = None if options.get("folder") is None else Path(options["folder"]).expanduser()
    if not restarts() or folder is None or not options.get("distributed", True):
        return Pruner(model, train, val, **options)
    if join().shared("whether to resume", lambda: b"resume" if is_resumable(folder) else b"start") == b"start":
        return Pruner(model, train, val, **options)
    names = set(inspect.signature(resume).parameters) - {"recipe", "folder", "model", "train", "val"}
    given = {name: value for name, value in options.items() if name in names}
    if isinstance(options.get("criterion"), str):  # the script names it, so it may be imported
        given["criterion"] = user_function(options["criterion"])
    if isinstance(options.get("recipe"), Recipe):
        resolved(options["recipe"])
    return resume(folder, model, train, val, **given)


def resume(
    folder: str | Path,
    model: nn.Module,
    train: Any = None,
    val: Any = None,
    *,
    recipe: Recipe | None = None,
    test: Any = None,
    evaluate: Evaluate | None = None,
    finetune: Callable[..., Any] | None = None,
    criterion: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
    forward: Forward | None = None,
    loss: Measure | None = None,
    metric: Measure | None = None,
    measure: Callable[[nn.Module], float] | None = None,
    device: Device = None,
    callback: Callable[[Progress], None] | None = None,
    store: str | Path | None = None,
    cache_bytes: int | None = None,
    distributed: bool = True,
) -> Pruner:
    """Open the run in `folder` to continue it, on a freshly built `model` of the same class (its weights do not matter).

    Iterate over it, or call `finish`. A run that was started with loaders has kept what it drew from them; `train` is needed
    again only where the recipe trains or own measures take whole batches, `test` where a test set was given. Own callables are
    given again, criteria of a portfolio as a list: a folder is data, and nothing is imported by a name from it.
    """
    check_autograd()
    path, model, finetune = Path(folder).expanduser(), unwrapped(model), with_step(finetune)
    check_device(device)
    workers = join() if distributed else ALONE
    journal, stored, known = open_folder(path, workers)
    try:
        again = () if criterion is None else criterion if isinstance(criterion, Sequence) else (criterion,)
        asked, ended = None if recipe is None else resolved(recipe), bool(journal.of(ResultFigures))
        stored = named(stored) if ended else taken_up(stored, again, path)
        if asked not in (None, stored):
            raise RunError(f"{path}: was started with another recipe. Resume without one, or start a new run.")
        if isinstance(train, Data):
            data, form, streams = train, PAIR, dict[str, Any]()
        else:
            own = _given(loss=loss, metric=metric)
            data, form, streams = reopen_loaders(path, model, train, test, forward=forward, own=own)
        loss_fn, metric_fn = _measures(form, loss, metric)
        check_origin(path, data, {"loss": loss_fn, "metric": evaluate or metric_fn}, known)
        absent = {name for name, given in (("finetune", finetune), ("test", test)) if given is None}
        missing = [f"{name}=…" for name in known.get("again", ()) if name in absent]
        if missing and not ended:
            raise RunError(
                f"{path}: was started with {' and '.join(missing)}, which the folder does not hold. Give it again: "
                f"secateurs.resume({str(path)!r}, model, train, val, {', '.join(missing)})"
                f"{', or --data on the command line' * (missing == ['test=…'])}."
            )
        if train is None and (stored.finetune or stored.retrain) and not ended:
            raise RunError(f"{path}: its recipe trains on the train loader. Give it again: resume(folder, model, train).")
        if ("time" in known["measures"]) != (measure is not None):
            raise RunError(f"{path}: was started with{'out' * (measure is not None)} measure=. Resume it the same way.")
        start = load_start(path, model, data, known)
        cache = open_cache(journal, store or _own_store(known.get("store")))
        with workers.active():
            whole, engine = None if evaluate is None else WholeMetric.of(evaluate, start), _engine(stored, measure, device)
        _check_workers(workers, start, data, stored, {"loss": loss_fn, "metric": evaluate or metric_fn})
        runtime = Runtime(
            *(loss_fn, metric_fn, device, cache, cache_bytes, whole, finetune),
            engine=engine,
            served=_served(data),
            quantise=_quantise(stored),
            **streams,
        )
        context = PruningContext(start, data, stored, runtime, journal, ProgressReporter(callback if workers.first else None))
        return Pruner._resumed(context, known.get("notes", data.notes))
    except BaseException as error:
        workers.fail(error)
        journal.close()
        raise


@contextmanager
def _shown(
    progress: bool, callback: Callable[[Progress], None] | None
) -> Iterator[tuple[Callable[[Progress], None], Callable[[Pruner], Result]]]:
    """A callback that shows events besides handing them on, and a function that does a run's work, showing its steps."""
    with display(quiet=not progress) as screen:
        watchers: list[RunWatcher] = []

        def event(found: Progress) -> None:
            if callback is not None:
                callback(found)
            if watchers:
                watchers[0].watch(found)

        def follow(pruner: Pruner) -> Result:
            watchers.append(RunWatcher(screen, pruner.recipe, pruner.steps, metric=pruner.context.runtime.metric_name))
            if progress:
                for line in opening(pruner.context, pruner.estimate()):
                    screen.line(line)
            shown = 0
            for step in pruner:
                for note in pruner.notes[shown:]:
                    screen.line(f"Note: {note}.")
                shown = len(pruner.notes)
                watchers[0].step(step)
            return pruner.finish()

        yield event, follow


def _own_store(named: str | None) -> Path | None:
    """The store of measurements that a folder names, if there is one: a folder may not say where tables or files are made."""
    return Path(named) if named is not None and is_store(Path(named)) else None


def _given(**options: object) -> list[str]:
    return [name for name, value in options.items() if value is not None]


def _measures(form: BatchForm, loss: Measure | None, metric: Measure | None) -> tuple[Measure, Measure]:
    """The loss and the metric of batches of that form."""
    own_loss = form.measure(loss, output_loss if form.gives_loss else cross_entropy)
    return own_loss, form.measure(metric, correct)


def _whole_metric(evaluate: Evaluate | None, graph: Graph, workers: Workers) -> WholeMetric | None:
    """The user's metric of the whole validation set, refused where it gives all networks the same."""
    if evaluate is None:
        return None
    with workers.active():
        whole = WholeMetric.of(evaluate, graph)
        whole.check_tells_networks_apart(graph)
    return whole


def _check_trainings(
    recipe: Recipe, own: object, graph: Graph, examples: Examples, stream: Stream | None, loss_fn: Measure
) -> list[str]:
    """Refuse trainings that cannot be; the user's `own` between the cuts takes the place of the recipe's, which is noted."""
    check_trials(recipe, trains=own is not None)
    for settings in filter(None, (None if own else recipe.finetune, recipe.retrain)):
        check_training(graph, settings, examples, stream, loss_fn=loss_fn)
    taken = recipe.finetune is not None and own is not None
    return ["your finetune takes the place of that of the recipe"] if taken else []


def _engine(recipe: Recipe, measure: Callable[[nn.Module], float] | None, device: Device) -> Engine | None:
    """The engine that cuts are weighed in; None where only MACs and parameters count."""
    named = recipe.engine not in ("auto", "none")
    return engine_for(recipe, measure, device) if named or recipe.weighs_time or measure is not None else None


def _served(data: Data) -> int | None:
    """Examples at once in the validation loader; None where the data came in no batches."""
    found = data.origin.get("batch")
    return found if isinstance(found, int) else None


def _quantise(recipe: Recipe) -> Callable[..., nn.Module] | None:
    """What makes the file that is certified; None where it is the network itself."""
    return int8_module if recipe.deploy == "int8" else None


def _check_workers(
    workers: Workers, graph: Graph, data: Data, recipe: Recipe, measures: Mapping[str, Callable[..., Any]]
) -> None:
    """Refuse workers that were started with something else than the first."""
    if workers.size == 1:
        return
    found = environment()
    facts = {f"version of {name}": text for name, text in found["versions"].items()}
    facts |= {"number of threads": str(found["machine"]["threads"]), "data": data.digest(), "recipe": recipe_digest(recipe)}
    facts["network"] = digest({name: t.detach().cpu() for name, t in graph.module.state_dict().items()})
    workers.check_same("before the run", {**facts, **{name: display_name(each) for name, each in measures.items()}})
