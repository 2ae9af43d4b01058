"""`secateurs show`: what a run has done so far, without disturbing it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from secateurs._util.files import is_held
from secateurs.cli import train as training_folder
from secateurs.cli.inputs import Json
from secateurs.cli.results import print_closing, print_steps
from secateurs.cli.terminal import percent, print_json, print_table, say

Entries = Sequence[Mapping[str, Any]]


def show(
    run: Path,
    *,
    as_json: Json = False,
) -> None:
    """Show the steps of a run and its state: finished, running, or stopped (then also how to go on).

    Reads without disturbing a run that is going on. Works for the folders of `secateurs train` too.

    Parameters
    ----------
    run
        The folder.
    as_json
        Print one JSON document on stdout: origin, recipe, steps, outcome.
    """
    if training_folder.is_training(run):
        _show_training(run, as_json=as_json)
    else:
        _show_run(run, as_json=as_json)


def _show_run(run: Path, *, as_json: bool) -> None:
    from secateurs.config import read_recipe, recipe_fields
    from secateurs.pruning.folder import RECIPE, read_provenance
    from secateurs.pruning.journal import read_journal

    provenance, entries = read_provenance(run), read_journal(run)
    recipe = read_recipe(run / RECIPE)
    steps, ends = _units(entries, "step"), _units(entries, "end")
    state = _state(run, finished=bool(ends))
    if as_json:
        outcome = ends[-1] if ends else None
        known = {"folder": str(run), "state": state, "at": _at(run, entries), "provenance": provenance}
        print_json({**known, "recipe": recipe_fields(recipe), "steps": steps, "outcome": outcome})
        return
    _say_origin(provenance)
    if steps:
        print_steps(steps)
    if ends:
        print_closing(run, ends[-1])
    else:
        say(f"{state.capitalize()}, {_at(run, entries)}.")
        _say_how_to_go_on(run, state)


def _show_training(run: Path, *, as_json: bool) -> None:
    from secateurs.pruning.journal import read_journal

    known = training_folder.read(run)
    epochs = _units(read_journal(run), "epoch") if (run / "journal.jsonl").exists() else []
    state = _state(run, finished=training_folder.weights_file(run).exists())
    if as_json:
        print_json({"folder": str(run), "state": state, "provenance": known, "epochs": epochs})
        return
    _say_origin(known)
    print_table(("epoch", "loss", "accuracy while training", "accuracy on the search set"), map(_epoch_row, epochs))
    if state == "finished":
        say(f"Finished. The weights: {training_folder.weights_file(run)}")
    else:
        say(f"{state.capitalize()}, {len(epochs)} of {known['settings']['epochs']} epochs are done.")
        _say_how_to_go_on(run, state)


def _state(run: Path, *, finished: bool) -> str:
    if is_held(run):
        return "running"
    return "finished" if finished else "stopped"


def _at(run: Path, entries: Entries) -> str:
    """What the run is, or was, working on."""
    steps = len(_units(entries, "step"))
    after = entries[max((n for n, entry in enumerate(entries) if entry["unit"] == "step"), default=-1) + 1 :]
    epochs = _units(after, "epoch")
    if epochs:
        what = "retraining" if epochs[-1].get("phase") == "retrain" else f"fine-tuning after step {steps + 1}"
        return f"{what}: {len(epochs)} epochs are done"
    if _units(after, "cut"):
        return f"at step {steps + 1}: the cut is found"
    curves = len(_units(entries, "curve"))
    if curves and not steps:
        divided = "; the cuts are divided" if _units(entries, "division") else ""
        return f"{curves} curves are measured{divided}; {_measured(run)}"
    if steps or _units(entries, "round"):
        return f"at step {steps + 1}: filters are being ranked; {_measured(run)}"
    return "before its first measurement"


def _measured(run: Path) -> str:
    """How much the run's store holds, which may be growing."""
    from secateurs.scoring.cache import MeasurementCache

    path = run / "measured.sqlite"
    return f"{len(MeasurementCache(path)) if path.exists() else 0:,} values are measured so far"


def _units(entries: Entries, unit: str) -> list[dict[str, Any]]:
    return [{key: value for key, value in entry.items() if key != "unit"} for entry in entries if entry["unit"] == unit]


def _say_origin(provenance: Mapping[str, Any]) -> None:
    model = provenance.get("origin", {}).get("model", "a model given in Python")
    data, started = provenance.get("data", {}).get("name", "unknown data"), provenance.get("started", "at an unknown time")
    say(f"{model} on {data}, started {started.replace('T', ' ')}")


def _say_how_to_go_on(run: Path, state: str) -> None:
    if state == "stopped":
        say(f"Go on with: secateurs resume {run}")


def _epoch_row(epoch: Mapping[str, Any]) -> tuple[str, ...]:
    shares = (epoch["accuracy"], epoch["search_accuracy"])
    return (str(epoch["epoch"] + 1), f"{epoch['loss']:.4f}", *("" if s is None else percent(s, 2) for s in shares))


def report(
    *runs: Path,
    out: Annotated[Path | None, Parameter(show_default="RUN/report.html, or comparison.html")] = None,
) -> None:
    """Write what a run did as one HTML file: figures, tables, warnings. Several runs give a comparison.

    The file needs nothing else: no network, no other files; it is readable on a phone and can be printed. A run that is going
    on, or that was stopped, gives a report that says so.

    Examples:

    `secateurs report runs/demo-1`

    `secateurs report runs/a runs/b --out compared.html`

    Parameters
    ----------
    runs
        One run folder, or several.
    out
        Where the page goes.
    """
    from secateurs.report import write_report

    say(str(write_report(runs, out)))
