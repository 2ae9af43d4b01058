"""The front door: prune a network, go on with a run, and look at what came of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from secateurs._util.modules import Device, eval_mode
from secateurs.config import Recipe, recipe_fields
from secateurs.data.splits import Data, refuse_nonfinite
from secateurs.errors import RunError
from secateurs.graph.trace import Graph, trace
from secateurs.metrics import Measure, check_targets, correct, cross_entropy
from secateurs.pruning.budget import contract_of, split_acceptance_sets
from secateurs.pruning.checkpoints import (
    check_data,
    check_measures,
    example_for,
    load_start,
    open_store,
    provenance,
)
from secateurs.pruning.context import PruningContext, Runtime
from secateurs.pruning.folder import Record, create_folder, disk_errors, open_folder
from secateurs.pruning.results import Progress
from secateurs.pruning.run import Run
from secateurs.report import Plots, plots, write_report


class Pruner(Run):
    """A run that also draws itself: its report and its figures. Iterating does the work, one Step at a time."""

    def _finish(self) -> None:
        super()._finish()
        self.report()
        self.close()

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
) -> Pruner:
    """Prune a copy of `model` as `recipe` says: iterate over the run for its Steps, then (or at once) ask for `run.finish()`.

    With a `folder` every unit of work is kept there, and `resume` goes on after a crash. `loss_fn` and `metric` take outputs
    and targets (higher metric = better; "accuracy" everywhere means this metric). `origin` is kept in the provenance. What
    was measured is kept in `store` (by default in the folder), where another run of the same network finds it; while masks are
    scored, `cache_bytes` of activations are kept (by default a quarter of the free memory).
    """
    recipe = recipe or Recipe()
    graph = trace(model, example_for(model, data), leaves=leaves)
    _check_data(graph, data, loss_fn, metric)
    split_acceptance_sets(data.search, contract_of(recipe), metric, seed=recipe.seed)  # an error here leaves no folder behind
    record = Record()
    if folder is not None:
        measures = {"loss": loss_fn, "metric": metric}
        known = provenance(graph, data, recipe, measures=measures, store=store, origin=origin)
        record = create_folder(Path(folder), recipe, known)
    try:
        tools = Runtime(loss_fn, metric, device, open_store(record, store), cache_bytes)
        run = Pruner(PruningContext(graph, data, recipe, tools), record, watch=watch)
        run.save_start()
        return run
    except BaseException:
        record.close()
        raise


def _check_data(graph: Graph, data: Data, loss_fn: Measure, metric: Measure) -> None:
    """Refuse data that the network or our own loss and metric cannot take, before anything is written."""
    refuse_nonfinite(data)
    with eval_mode(graph.module):
        check_targets(data, graph.module(*graph.example), {"loss_fn": loss_fn, "metric": metric})


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
) -> Pruner:
    """Go on with the run in `folder`, on a freshly built `model` of the same class (its weights do not matter), same data."""
    path = Path(folder)
    record, stored, known = open_folder(path)
    try:
        if recipe is not None and recipe != stored:
            raise RunError(f"{path}: was started with another recipe. Resume without one, or start a new run.")
        check_data(path, data, known)
        check_measures(path, {"loss": loss_fn, "metric": metric}, known)
        start = load_start(path, model, data, known)
        tools = Runtime(loss_fn, metric, device, open_store(record, store or known.get("store")), cache_bytes)
        run = Pruner(PruningContext(start, data, stored, tools), record, watch=watch)
        run.restore(model)
        return run
    except BaseException:
        record.close()
        raise
