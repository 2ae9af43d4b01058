"""The public entry points: `prune` a network in one call, watch a `Pruner` step by step, `resume` a run; and their `Result`."""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from secateurs._util.journal import Journal, disk_errors
from secateurs._util.modules import Device, device_of, eval_mode
from secateurs._util.terminal import clock
from secateurs.compaction.serialization import save
from secateurs.config import EngineName, Recipe
from secateurs.criteria import as_criterion
from secateurs.data.dataset import Examples, class_labels, derive
from secateurs.data.drawn import drawn, load_drawn, save_drawn
from secateurs.data.splits import Data, refuse_nonfinite
from secateurs.data.stream import Forward, form_of, stream_of
from secateurs.errors import DataError, InvalidInput, RunError
from secateurs.export.engines import engine_for
from secateurs.graph.engine import Engine
from secateurs.graph.plan import Plan
from secateurs.graph.sites import find_sites
from secateurs.graph.trace import Graph, trace
from secateurs.metrics import Measure, check_targets, correct, cross_entropy
from secateurs.pruning.acceptance import check_contract, contract_of
from secateurs.pruning.context import ProgressReporter, PruningContext, Runtime
from secateurs.pruning.estimate import Estimate, estimate
from secateurs.pruning.folder import check_origin, create_folder, example_for, load_start, open_cache, open_folder, provenance
from secateurs.pruning.results import KINDS, Progress, RunResult
from secateurs.pruning.run import Run, chosen_sites
from secateurs.report import Plots, plots, write_report
from secateurs.report.progress import RunWatcher, display
from secateurs.scoring.cache import MeasurementCache

Ignore = Sequence[str | nn.Module | type[nn.Module]]
"""Layers that keep all their filters: by pattern of names, by module, or by type."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Result(RunResult):
    """The smaller network, and all that is known about it. `print(result)` says what matters in five lines."""

    max_drop: float = field(metadata={"journal": False})
    confidence: float = field(metadata={"journal": False})  # of the bound; 0: nothing is promised
    notes: tuple[str, ...] = field(metadata={"journal": False})
    folder: Path | None = field(metadata={"journal": False})
    records: tuple[Any, ...] = field(metadata={"journal": False}, repr=False)  # of the journal
    recipe: Recipe = field(metadata={"journal": False}, repr=False)

    @property
    def model(self) -> nn.Module:
        """The smaller network: an ordinary module, to be called, trained, saved."""
        return self.graph.module

    @property
    def plan(self) -> Plan:
        """The filters that were removed, in the original network's numbers."""
        return self.graph.plan

    @property
    def accuracy_before(self) -> float:
        """The metric of the original network, on the test set if one was given, else on the validation set."""
        return self.test.before if self.test.count else self.search.before

    @property
    def accuracy_after(self) -> float:
        """The metric of the smaller network, on the same set."""
        return self.test.after if self.test.count else self.search.after

    @property
    def bound(self) -> float | None:
        """Upper bound on the drop, at `confidence`; None: nothing is promised."""
        return next((step.bound for step in reversed(self.steps) if step.bound is not None), None)

    def save(self, path: str | Path) -> Path:
        """Save the network as safetensors, to be loaded by `secateurs.load`."""
        return save(self.graph, path)

    def export(self, path: str | Path) -> Path:
        """Write the network for use without secateurs: NAME.onnx, NAME.pt2, or a folder of plain source."""
        from secateurs.export import to_onnx, to_pt2, to_source

        path = Path(path)
        write = {".onnx": to_onnx, ".pt2": to_pt2, "": to_source}.get(path.suffix)
        if write is None:
            raise InvalidInput(f"export: got {path.name!r}, wanted a name that ends in .onnx or .pt2, or a folder for source.")
        write(self.graph, path)
        return path

    def report(self) -> Path | None:
        """Write the report into the run folder; None for a run without one."""
        return None if self.folder is None else write_report(self.folder)

    @property
    def plot(self) -> Plots:
        """The figures of the run, for notebooks."""
        return plots(self.records if self.folder is None else self.folder, recipe=self.recipe)

    def __str__(self) -> str:
        shares = f"{100 * self.macs.removed:.1f} % of the MACs and {100 * self.parameters.removed:.1f} % of the parameters"
        kept = f" It is kept in {self.folder}." if self.folder is not None else ""
        if self.bound is not None:
            promise = f"At {100 * self.confidence:g} % confidence the drop is at most {self._amount(self.bound)}."
        elif self.macs.removed == 0 and self.parameters.removed == 0:
            promise = (
                f"No filter can be removed within a drop of {self._amount(self.max_drop)}: allow more, or give more examples."
            )
        else:
            promise = f"Nothing is promised: the drop of {self._amount(self.max_drop)} was allowed by point estimates."
        lines = [
            *([] if self.latency is None else [f"{self.latency.headline()}."]),
            f"{shares} are removed.",
            f"{self.summary().split('removed, ', 1)[1].capitalize()}.",
            promise,
            f'Next: result.model, result.save("small.safetensors"), result.export("small.onnx").{kept}',
        ]
        return "\n".join([*lines, *(f"Note: {note}." for note in self.notes)])

    def _amount(self, drop: float) -> str:
        return f"{100 * drop:.2f} points" if self.metric == "accuracy" else f"{drop:.4g}"


class Pruner(Run):
    """A pruning that is watched: iterating does the work, one `Step` at a time; `finish` does the rest. See `prune`.

    `train` may also be a `Data` with all three sets in memory; then `val` and `test` are not given.
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
        measure: Callable[[nn.Module], float] | None = None,
        test: Any = None,
        evaluate: Callable[[nn.Module], float] | None = None,
        finetune: Callable[..., Any] | None = None,
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
    ) -> None:
        model, notes = _unwrapped(model), list[str]()
        owned, streams = not isinstance(train, Data), dict[str, Any]()
        if isinstance(train, Data):
            data = train
            if val is not None or test is not None or forward is not None:
                raise InvalidInput("train is a Data, which has its validation and test sets: give no val, test or forward.")
        else:
            data, streams, measured = _from_loaders(train, val, test, forward, seed=0 if recipe is None else recipe.seed)
            loss, metric = measured(loss), measured(metric)
        notes += data.notes
        targets = {"target_macs": macs, "target_parameters": parameters, "target_latency": target_latency, "max_ms": max_ms}
        asked = _recipe(recipe, criterion, max_drop=max_drop, engine=engine, **targets)
        timed_in = _engine(asked, measure, device)
        if evaluate is not None and test is not None:
            raise InvalidInput(
                "evaluate measures a set of its own, and cannot measure the test set: give no test, and measure result.model "
                "on your test data."
            )
        if evaluate is not None and asked.confidence:
            asked = replace(asked, confidence=0.0)
            notes.append("evaluate gives one number for the whole set, so nothing can be certified: point estimates decide")
        graph = trace(model, example_for(model, data), leaves=leaves)
        asked = _without_ignored(asked, graph, model, ignore)
        chosen_sites(asked, graph)  # an error here leaves no folder
        loss_fn, metric_fn = loss or cross_entropy, metric or correct
        _check_data(graph, data, loss_fn, metric_fn, evaluate)
        asked = _feasible(asked, data, trains=finetune is not None, given=recipe is not None, notes=notes)
        if time_budget is not None:
            runtime = Runtime(loss_fn, metric_fn, device, MeasurementCache(), None)
            asked = _within(time_budget, asked, graph, data, runtime, notes)
        journal = Journal(None, KINDS)
        if folder is not None:
            measures = {"loss": loss_fn, "metric": evaluate or metric_fn, **({} if measure is None else {"time": measure})}
            known = provenance(graph, data, asked, measures=measures, store=store, origin=origin)
            journal = create_folder(Path(folder), asked, known)
        try:
            if owned and folder is not None:
                with disk_errors(Path(folder)):
                    save_drawn(data, Path(folder))
            cache = open_cache(journal, store)
            runtime = Runtime(loss_fn, metric_fn, device, cache, cache_bytes, evaluate, finetune, engine=timed_in, **streams)
            super().__init__(PruningContext(graph, data, asked, runtime, journal, ProgressReporter(callback)))
            self.notes = notes
            self.save_start()
        except BaseException:
            journal.close()
            raise

    @classmethod
    def _resumed(cls, context: PruningContext) -> Pruner:
        found = cls.__new__(cls)
        Run.__init__(found, context)
        found.notes = list(context.data.notes)
        found.restore()
        return found

    def estimate(self) -> Estimate:
        """Roughly how long the work takes on this machine, without training."""
        return estimate(self.context)

    def measure_original(self) -> None:
        """Measure the original network, and note if it is no better than guessing."""
        super().measure_original()
        labels = class_labels(self.data.search.targets)
        if self.steps or labels is None or self.context.runtime.metric is not correct or self.context.runtime.evaluate:
            return
        guessing = float(labels.bincount().max()) / len(labels)
        if self.state.accuracy <= guessing + 0.01:
            self.notes.append(
                f"the network is right on {100 * self.state.accuracy:.1f} % of the validation examples, and always naming the "
                f"most frequent class is right on {100 * guessing:.1f} %: it seems untrained"
            )

    def _finish(self) -> None:
        super()._finish()
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
            notes=tuple(self.notes),
            folder=self.journal.path,
            records=tuple(self.journal.records),
            recipe=self.recipe,
        )

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


def prune(model: nn.Module, train: Any, val: Any = None, *, progress: bool = True, **options: Any) -> Result:
    """Prune a copy of `model` and return the smaller network: as much is removed as the allowed drop permits.

    `train`, `val` and `test` are loaders: any iterables of batches that can be read more than once, streamed and never copied
    whole. Batches are (inputs, targets); for others give `forward(model, batch)`, `loss(outputs, batch)` and
    `metric(outputs, batch)`, one value for each example, higher metric = better. `max_drop` is a fraction: 0.01 is one point.
    `macs=0.5` or `parameters=0.5` stop at a share removed, `target_latency=0.5` at a share of the time that remains and
    `max_ms=4.0` at milliseconds, in the `engine` ("torch", "compile", "onnxruntime") or by `measure(module) -> seconds` on a
    device of your own. `evaluate(model) -> float` replaces the metric by one of the whole
    validation set, `finetune(model)` is the user's own training after the cuts, `criterion` a name or a function
    (graph, site, data) -> scores (C,). `ignore` lists layers that keep all filters. With a `time_budget` in seconds a cheaper
    recipe is taken where the work may take longer. `recipe` has all other settings; without
    one, `Recipe.best()`. With a `folder` everything is kept there, and `resume` continues after a crash.

    All options are those of `Pruner`. Progress is shown on a terminal, as plain lines elsewhere, not at all with
    `progress=False`; `callback` gets every `Progress`.
    """
    with _shown(progress, options.pop("callback", None)) as (callback, follow):
        return follow(Pruner(model, train, val, callback=callback, **options))


def resume(
    folder: str | Path,
    model: nn.Module,
    train: Any = None,
    val: Any = None,
    *,
    recipe: Recipe | None = None,
    test: Any = None,
    evaluate: Callable[[nn.Module], float] | None = None,
    finetune: Callable[..., Any] | None = None,
    criterion: Callable[..., Any] | None = None,
    forward: Forward | None = None,
    loss: Measure | None = None,
    metric: Measure | None = None,
    measure: Callable[[nn.Module], float] | None = None,
    device: Device = None,
    callback: Callable[[Progress], None] | None = None,
    store: str | Path | None = None,
    cache_bytes: int | None = None,
) -> Pruner:
    """Open the run in `folder` to continue it, on a freshly built `model` of the same class (its weights do not matter).

    Iterate over it, or call `finish`. A run that was started with loaders has kept what it drew from them; `train` is needed
    again only where the recipe trains, `test` where a test set was given. Own callables are given again.
    """
    path, model = Path(folder), _unwrapped(model)
    if criterion is not None:
        as_criterion(criterion)
    journal, stored, known = open_folder(path)
    try:
        if recipe is not None and recipe != stored:
            raise RunError(f"{path}: was started with another recipe. Resume without one, or start a new run.")
        streams: dict[str, Any] = {}
        data = train if isinstance(train, Data) else load_drawn(path)
        if data is None:
            raise RunError(f"{path}: was started with data in memory. Give the same: resume(folder, model, data).")
        if not isinstance(train, Data):
            form = form_of(forward, next(iter(train))) if train is not None else form_of(None, None)
            streams = {"train": stream_of(train, "train", form)} if train is not None else {}
            streams |= {"test": stream_of(test, "test", form)} if test is not None else {}
            loss, metric = (None if each is None else form.measure(each) for each in (loss, metric))
        loss_fn, metric_fn = loss or cross_entropy, metric or correct
        check_origin(path, data, {"loss": loss_fn, "metric": evaluate or metric_fn}, known)
        if ("time" in known["measures"]) != (measure is not None):
            raise RunError(f"{path}: was started with{'out' * (measure is not None)} measure=. Resume it the same way.")
        start = load_start(path, model, data, known)
        cache = open_cache(journal, store or known.get("store"))
        engine = _engine(stored, measure, device)
        runtime = Runtime(loss_fn, metric_fn, device, cache, cache_bytes, evaluate, finetune, engine=engine, **streams)
        return Pruner._resumed(PruningContext(start, data, stored, runtime, journal, ProgressReporter(callback)))
    except BaseException:
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
            watchers.append(RunWatcher(screen, pruner.recipe, pruner.steps))
            if progress:
                found, place = pruner.estimate(), device_of(pruner.graph.module)
                speed = f"{found.images_a_second:,.0f} images a second on {pruner.context.runtime.device or place}"
                screen.line(f"At {speed} this takes roughly {clock(found.seconds)}, without training.")
            shown = 0
            for step in pruner:
                for note in pruner.notes[shown:]:
                    screen.line(f"Note: {note}.")
                shown = len(pruner.notes)
                watchers[0].step(step)
            return pruner.finish()

        yield event, follow


def _from_loaders(
    train: Any, val: Any, test: Any, forward: Forward | None, *, seed: int
) -> tuple[Data, dict[str, Any], Callable[[Measure | None], Measure | None]]:
    """What a run draws from loaders, the streams that it reads, and how own measures see a batch."""
    if val is None:
        raise DataError(
            "val: got None, wanted a validation loader: examples that the network was not trained on, which decide how much "
            "may be removed."
        )
    for name, source in (("train", train), ("val", val), ("test", test)):
        if source is not None and not isinstance(source, Examples) and not hasattr(source, "__iter__"):
            raise DataError(f"{name}: got {type(source).__name__}, wanted a loader: an iterable of batches.")
    stream = stream_of(train, "train")
    form = form_of(forward, next(iter(stream.loader), None))
    streams: dict[str, Any] = {"train": stream_of(train, "train", form)}
    if test is not None:
        streams["test"] = stream_of(test, "test", form)
    return drawn(train, val, form=form, seed=seed), streams, lambda each: None if each is None else form.measure(each)


def _engine(recipe: Recipe, measure: Callable[[nn.Module], float] | None, device: Device) -> Engine | None:
    """The engine that cuts are weighed in; None where only MACs and parameters count."""
    return engine_for(recipe, measure, device) if recipe.weighs_time or measure is not None else None


def _recipe(recipe: Recipe | None, criterion: str | Callable[..., Any] | None, **changes: float | str | None) -> Recipe:
    """The recipe with the arguments of the call; the best one known where none is given."""
    known: dict[str, Any] = {name: value for name, value in changes.items() if value is not None}
    drop = known.get("max_drop")
    if drop is not None and drop >= 1:
        raise InvalidInput(f"max_drop={drop:g}: wanted a fraction below 1: 0.01 is one point of accuracy.")
    if criterion is not None:
        known["criterion"] = criterion if isinstance(criterion, str) else as_criterion(criterion)
    return Recipe.best(**known) if recipe is None else replace(recipe, **known)


def _feasible(recipe: Recipe, data: Data, *, trains: bool, given: bool, notes: list[str]) -> Recipe:
    """The recipe, without its promise where the validation set is too small for it and no recipe was given."""
    try:
        check_contract(data.search, contract_of(recipe, trains=trains), seed=derive(recipe.seed, "certify"))
    except InvalidInput as error:
        if given:
            raise
        notes.append(f"nothing is promised: {str(error).split('. ')[0]}; point estimates decide")
        return replace(recipe, confidence=0.0)
    return recipe


def _within(seconds: float, recipe: Recipe, graph: Graph, data: Data, runtime: Runtime, notes: list[str]) -> Recipe:
    """The recipe, or a cheaper one where it may take longer than `seconds`: criteria of weights, then the simpler repair."""
    cheaper: dict[str, Any] = {"criterion": "fpgm", "allocation": recipe.allocation}
    for one in (recipe, replace(recipe, **cheaper), replace(recipe, **cheaper, repair="none")):
        needed = estimate(PruningContext(graph, data, one, runtime)).seconds
        if needed <= seconds:
            break
    if one is not recipe:
        chosen = f"criterion {one.criterion!r} and repair {one.repair!r} are used"
        notes.append(f"the recipe may take longer than the time budget of {clock(seconds)}: {chosen}")
    if needed > seconds:
        notes.append(f"even so it takes up to {clock(needed)} on this machine")
    return one


def _without_ignored(recipe: Recipe, graph: Graph, model: nn.Module, ignore: Ignore) -> Recipe:
    """The recipe restricted to sites none of whose layers is ignored."""
    if not ignore:
        return recipe
    names = {id(module): name for name, module in model.named_modules()}
    ignored: set[str] = set()
    for one in ignore:
        if isinstance(one, str):
            found = [name for name in names.values() if fnmatch(name, one)]
        elif isinstance(one, nn.Module):
            found = [name for name, module in model.named_modules() if any(module is part for part in one.modules())]
        else:
            found = [name for name, module in model.named_modules() if isinstance(module, one)]
        if not found:
            raise InvalidInput(f"ignore: no layer of the network is {one!r}.")
        ignored |= set(found)
    sites = [site for site in find_sites(graph, recipe.shortcut) if not ignored.intersection(site.layers)]
    if not sites:
        raise InvalidInput("ignore: no site is left to prune.")
    return replace(recipe, sites=tuple(glob.escape(site.name) for site in sites))


def _check_data(
    graph: Graph, data: Data, loss_fn: Measure, metric: Measure, evaluate: Callable[[nn.Module], float] | None
) -> None:
    """Refuse data that the network or our own loss and metric cannot take, before anything is written."""
    refuse_nonfinite(data)
    with eval_mode(graph.module):
        measures = {"loss": loss_fn} if evaluate is not None else {"loss": loss_fn, "metric": metric}
        check_targets(data, graph.module(*graph.example), measures)


def _unwrapped(model: nn.Module) -> nn.Module:
    """The network itself, without the wrappers of torch.compile, DataParallel and DistributedDataParallel."""
    if not isinstance(model, nn.Module):
        raise InvalidInput(f"model: got {type(model).__name__}, wanted an nn.Module.")
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner
