"""How a run is told: its table of steps, its closing line, and both as plain values for machines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from secateurs.cli.progress import RunWatcher
from secateurs.cli.terminal import clock, percent, print_json, print_table, say

if TYPE_CHECKING:
    from secateurs.api import Pruner
    from secateurs.pruning.results import Result, Step

_COLUMNS = ("site", "round", "filters", "accuracy after the cut", "after training", "parameters removed", "MACs removed")


def follow(run: Pruner, watcher: RunWatcher, report_every: int = 1) -> Result:
    """Do all of the run's work, telling the watcher; the report is written after every so many steps (0: at the end only)."""
    for step in run:
        watcher.step(step)
        if report_every and step.number % report_every == 0:
            run.report()
    return run.finish()


@contextmanager
def holding(run: Pruner, folder: Path) -> Iterator[None]:
    """Let the folder go at the end; whoever interrupts is told how to go on."""
    try:
        yield
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(interrupted(folder)) from stop
    finally:
        run.close()


def interrupted(folder: Path) -> str:
    """What to tell whoever pressed Ctrl-C."""
    return f"Interrupted. All that was done is kept. Go on with: secateurs resume {folder}"


def step_fields(step: Step) -> dict[str, Any]:
    """A step as plain values, without its coefficients."""
    return {field.name: getattr(step, field.name) for field in fields(step) if field.name != "importance"} | {"kept": step.kept}


def print_outcome(folder: Path, outcome: Result) -> None:
    """The table of steps and the closing lines of a finished run."""
    from secateurs.pruning.results import outcome_fields

    print_steps([step_fields(step) for step in outcome.steps])
    print_closing(folder, outcome_fields(outcome))


def print_steps(steps: Sequence[Mapping[str, Any]]) -> None:
    """The table of steps; shares are removed since the start of the run."""
    print_table(_COLUMNS, [_row(step) for step in steps])
    say("Accuracies are on the search set. Removed is what the whole network has lost so far.")


def print_closing(folder: Path, outcome: Mapping[str, Any]) -> None:
    """What came of a run, and where it is."""
    from secateurs.pruning.results import summary_of

    say(summary_of(outcome) + ".")
    say(f"Stopped because {outcome['stopped']}, after {clock(outcome['seconds'])}.")
    say(f"The smaller network: {folder / 'pruned.safetensors'}")
    say(f"The report: {folder / 'report.html'}")


def print_run_json(folder: Path, run: Pruner, outcome: Result, **more: Any) -> None:
    """A finished run as one JSON document."""
    from secateurs.config import recipe_fields
    from secateurs.pruning.results import outcome_fields

    print_json(
        {
            "folder": str(folder),
            "state": "finished",
            "recipe": recipe_fields(run.recipe),
            "steps": [step_fields(step) for step in outcome.steps],
            "outcome": outcome_fields(outcome),
            "pruned": str(folder / "pruned.safetensors"),
            **more,
        }
    )


def _row(step: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        step["site"],
        str(step["round"] + 1),
        f"{step['channels']} → {step['channels'] - len(step['removed'])}",
        percent(step["accuracy_cut"], 2),
        percent(step["accuracy"], 2),
        percent(step["parameters_removed"]),
        percent(step["macs_removed"]),
    )
