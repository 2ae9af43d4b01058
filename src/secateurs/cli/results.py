"""How runs and trainings are shown: steps, closing lines and JSON; `secateurs show` and `secateurs report`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from secateurs._util.format import SPACE, MetricName
from secateurs._util.terminal import clock, percent, print_json, print_table, say
from secateurs.cli import train as training_folder
from secateurs.cli.inputs import Json
from secateurs.cli.progress import RunWatcher
from secateurs.cli.trust import interrupted, resume_with

if TYPE_CHECKING:
    from secateurs.api import Pruner
    from secateurs.config import Recipe
    from secateurs.pruning.figures import ResultFigures, RunResult
    from secateurs.pruning.results import Step
    from secateurs.training import EpochRecord

_EPOCH_COLUMNS = ("epoch", "loss", "accuracy while training", "accuracy on the validation set")


def follow(run: Pruner, watcher: RunWatcher, report_every: int = 1) -> RunResult:
    """Do all of the run's work; the report is written after every `report_every` steps (0: only at the end)."""
    from secateurs.pruning.estimate import opening

    noted, watcher.metric = 0, MetricName.called(run.context.runtime.metric_name)
    for line in opening(run.context, run.estimate()):
        watcher.shown.line(line)
    for step in run:
        for note in run.notes[noted:]:
            watcher.shown.line(f"Note: {note}.")
        noted = len(run.notes)
        watcher.step(step)
        if report_every and step.number % report_every == 0:
            run.report()
    result = run.finish()
    for note in run.notes[noted:]:  # known at the end, such as a target that was missed
        watcher.shown.line(f"Note: {note}.")
    return result


@contextmanager
def holding(run: Pruner, folder: Path) -> Iterator[None]:
    """Release the folder at the end; Ctrl-C says how to resume."""
    try:
        yield
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(interrupted(folder)) from stop
    finally:
        run.close()


def print_run(folder: Path, run: Pruner, result: RunResult, *, as_json: bool) -> None:
    """Print a finished run: the table of steps and the closing lines, or one JSON document."""
    from secateurs._util.journal import plain
    from secateurs.config import recipe_fields

    if as_json:
        steps = [{**plain(step), "kept": step.kept} for step in result.steps]
        document = {"folder": str(folder), "state": "finished", "recipe": recipe_fields(run.recipe), "steps": steps}
        document["notes"] = run.notes
        print_json({**document, "outcome": plain(result.figures()), "pruned": str(folder / "pruned.safetensors")})
    else:
        print_steps(result.steps, result.metric)
        _print_closing(folder, result, run.recipe, run.journal.records)


def print_steps(steps: Sequence[Step], metric: str = "accuracy") -> None:
    """Print the table of steps; shares are of the original network."""
    known = MetricName.called(metric)
    print_table(
        ("site", "round", "filters", f"{metric} after the cut", "after training", "parameters removed", "MACs removed"),
        [
            (
                step.site,
                str(step.round + 1),
                f"{step.channels} → {step.kept}",
                known.value(step.accuracy_cut),
                known.value(step.accuracy),
                percent(step.parameters_removed),
                percent(step.macs_removed),
            )
            for step in steps
        ],
    )
    values = "Accuracies are" if known.share else f"Values of {metric} are"
    say(f"{values} on the validation set. Removed: shares of the whole original network, up to this step.")


def _print_closing(folder: Path, figures: ResultFigures, recipe: Recipe, records: Sequence[Any]) -> None:
    from secateurs.report.result import closing

    for line in closing(figures, recipe, records):
        say(line)
    say(f"Stopped because {figures.stopped}, after {clock(figures.seconds)}.")
    say(f"Pruned network: {folder / 'pruned.safetensors'}")
    say(f"Report: {folder / 'report.html'}")


# ---- commands -----------------------------------------------------------------------------------------------------------


def show(run: Path, *, as_json: Json = False) -> None:
    """Show the steps of a run and its state: finished, running, or stopped, and then how to resume it.

    Only reads, so the run may be running. Also shows the folders of `secateurs train`.

    Parameters
    ----------
    run
        The folder.
    """
    if training_folder.is_training(run):
        _show_training(run, as_json=as_json)
    else:
        _show_run(run, as_json=as_json)


def report(
    *runs: Path,
    out: Annotated[Path | None, Parameter(show_default="RUN/report.html, or comparison.html")] = None,
) -> None:
    """Write a run as one HTML page with figures, tables and warnings; several runs give a page that compares them.

    The page needs no other file and no network; it can be read on a phone and printed. A run that is running or stopped gives
    a page that says so.

    Examples:

    `secateurs report runs/demo-1`

    `secateurs report runs/a runs/b --out compared.html`

    Parameters
    ----------
    runs
        One run folder, or several.
    out
        Path of the page.
    """
    from secateurs.report import write_report

    say(str(write_report(runs, out)))


def _show_run(run: Path, *, as_json: bool) -> None:
    from secateurs._util.journal import plain, read_records, records_of
    from secateurs.config import read_recipe, recipe_fields
    from secateurs.pruning.figures import KINDS, ResultFigures
    from secateurs.pruning.folder import RECIPE, read_provenance
    from secateurs.pruning.results import Step
    from secateurs.report import state_of, where_it_stands
    from secateurs.scoring.cache import MeasurementCache

    provenance, records = read_provenance(run), read_records(run, KINDS)
    recipe = read_recipe(run / RECIPE)
    steps, ends = records_of(records, Step), records_of(records, ResultFigures)
    state, at, store = state_of(run, finished=bool(ends)), where_it_stands(records), run / "measured.sqlite"
    if state != "finished":
        at = f"{at}; {len(MeasurementCache(store)) if store.exists() else 0:,} values are measured".replace(SPACE, " ")
    if as_json:
        known = {"folder": str(run), "state": state, "at": at, "provenance": provenance, "recipe": recipe_fields(recipe)}
        print_json({**known, "steps": [plain(step) for step in steps], "outcome": plain(ends[-1]) if ends else None})
        return
    _say_origin(provenance)
    if steps:
        print_steps(steps, provenance.get("measures", {}).get("metric", "accuracy"))
    if ends:
        _print_closing(run, ends[-1], recipe, records)
    else:
        _say_state(run, state, at)


def _show_training(run: Path, *, as_json: bool) -> None:
    from secateurs._util.journal import JOURNAL, plain, read_records
    from secateurs.report import state_of

    known, weights = training_folder.read(run), training_folder.weights_file(run)
    epochs = read_records(run, training_folder.kinds()) if (run / JOURNAL).exists() else []
    state = state_of(run, finished=weights.exists())
    if as_json:
        print_json({"folder": str(run), "state": state, "provenance": known, "epochs": [plain(epoch) for epoch in epochs]})
        return
    _say_origin(known)
    print_table(_EPOCH_COLUMNS, map(_epoch_row, epochs))
    if state == "finished":
        say(f"Finished. Weights: {weights}")
    else:
        _say_state(run, state, f"{len(epochs)} of {known['settings']['epochs']} epochs are done")


def _epoch_row(epoch: EpochRecord) -> tuple[str, ...]:
    accuracies = ("" if value is None else percent(value, 2) for value in (epoch.accuracy, epoch.search_accuracy))
    return (str(epoch.epoch + 1), f"{epoch.loss:.4f}", *accuracies)


def _say_origin(provenance: Mapping[str, Any]) -> None:
    origin = provenance.get("origin", {})
    model, started = origin.get("model", "a model given in Python"), provenance.get("started", "at an unknown time")
    data = origin.get("data") or provenance.get("data", {}).get("name", "unknown data")
    say(f"{model} on {data}, started {started.replace('T', ' ')}")


def _say_state(run: Path, state: str, at: str) -> None:
    say(f"{state.capitalize()}: {at}.")
    if state == "stopped":
        say(resume_with(run))
