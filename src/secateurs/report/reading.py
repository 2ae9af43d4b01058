"""A run folder as records: reads without holding the folder, and says what is missing or damaged instead of failing on it."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from secateurs.errors import RunError
from secateurs.files import is_held
from secateurs.report.entries import division_of, end_of, events_of, step_of, units, where_it_stands
from secateurs.report.exports import read_exports
from secateurs.report.ranking import InMemory, ranking_from, ranking_of
from secateurs.report.records import Ranking, RunRecord, State
from secateurs.report.structure import nodes_from
from secateurs.report.weights import layers_of
from secateurs.report.words import Metric

T = TypeVar("T")


def read_run(folder: str | Path) -> RunRecord:
    """All that the folder of a run tells, finished or not; `RunError` if it is none."""
    path = Path(folder)
    notes: list[str] = []
    entries = _journal(path, notes)
    provenance = _provenance(path, notes)
    recipe, text = _recipe(path, notes)
    rankings = {
        int(e["number"]): _ranking(path, int(e["number"]), recipe, notes) for e in units(entries, "step") if "number" in e
    }
    return assemble(entries, path=path, provenance=provenance, recipe=recipe, text=text, rankings=rankings, notes=notes)


def run_in_memory(
    entries: Sequence[Mapping[str, Any]],
    *,
    recipe: Mapping[str, Any] | None = None,
    importances: Mapping[int, InMemory] | None = None,
) -> RunRecord:
    """The record of a run that keeps no folder: its journal's entries, its recipe's fields, and importances by step number."""
    rankings = {number: ranking_of(importance) for number, importance in (importances or {}).items()}
    return assemble(entries, path=None, provenance={}, recipe=recipe or {}, text="", rankings=rankings, notes=[])


def assemble(
    entries: Sequence[Mapping[str, Any]],
    *,
    path: Path | None,
    provenance: Mapping[str, Any],
    recipe: Mapping[str, Any],
    text: str,
    rankings: Mapping[int, Ranking | None],
    notes: list[str],
) -> RunRecord:
    """Put the parts of a run together."""
    steps = []
    for entry in units(entries, "step"):
        try:
            steps.append(step_of(entry, entries, rankings.get(entry.get("number", 0))))
        except (KeyError, TypeError, ValueError) as error:
            notes.append(f"A step of the journal cannot be read ({type(error).__name__}: {error}) and is left out.")
    start = next((float(e["accuracy"]) for e in units(entries, "start") if "accuracy" in e), None)
    end = _last(entries, "end", end_of, notes)
    nodes = next((nodes_from(e) for e in units(entries, "network")), ())
    metric, loss = _measures(provenance)
    return RunRecord(
        folder=path,
        state=_state(path, finished=bool(units(entries, "end"))),
        metric=metric,
        loss_name=loss,
        provenance=provenance,
        recipe=recipe,
        recipe_text=text,
        start=start,
        steps=tuple(steps),
        events=events_of(entries, start),
        end=end,
        division=_last(entries, "division", division_of, notes),
        nodes=nodes,
        layers=() if path is None else layers_of(path, nodes, [step.number for step in steps if step.removed], notes),
        at=where_it_stands(entries),
        exports=() if path is None else read_exports(path, notes),
        notes=tuple(notes),
    )


def _last(
    entries: Sequence[Mapping[str, Any]], unit: str, made: Callable[[Mapping[str, Any]], T], notes: list[str]
) -> T | None:
    """What the last entry of a kind tells; None where there is none, or it cannot be read."""
    for entry in reversed(units(entries, unit)):
        try:
            return made(entry)
        except (KeyError, TypeError, ValueError) as error:
            notes.append(f"The {unit} in the journal cannot be read ({type(error).__name__}: {error}).")
    return None


def _journal(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """The entries up to the first damaged line."""
    if (path / "training.json").exists():
        raise RunError(f"{path}: the folder of a training, not of a pruning run. See it with: secateurs show {path}")
    try:
        data = (path / "journal.jsonl").read_bytes()
    except OSError as error:
        raise RunError(
            f"{path}: not the folder of a run: no journal.jsonl ({error.strerror}). Give a folder that secateurs prune wrote."
        ) from error
    entries: list[dict[str, Any]] = []
    for number, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), 1):
        try:
            entry = json.loads(line)
        except ValueError as error:
            notes.append(f"journal.jsonl, line {number}: damaged ({error}). What came after it is not shown.")
            break
        if isinstance(entry, dict) and "unit" in entry:
            entries.append(entry)
    if not entries:
        notes.append("The journal is empty: nothing has been measured yet.")
    return entries


def _provenance(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        found = json.loads((path / "provenance.json").read_text())
    except OSError as error:
        notes.append(f"provenance.json: cannot be read ({error.strerror}): model, data and versions are not known.")
        return {}
    except ValueError as error:
        notes.append(f"provenance.json: damaged ({error}): model, data and versions are not known.")
        return {}
    return found if isinstance(found, dict) else {}


def _recipe(path: Path, notes: list[str]) -> tuple[dict[str, Any], str]:
    """As plain fields, so that the recipe of another release can still be shown."""
    try:
        text = (path / "recipe.toml").read_text()
        return tomllib.loads(text), text
    except OSError as error:
        notes.append(f"recipe.toml: cannot be read ({error.strerror}): what was asked is not known.")
    except ValueError as error:
        notes.append(f"recipe.toml: damaged ({error}): what was asked is not known.")
    return {}, ""


def _ranking(path: Path, number: int, recipe: Mapping[str, Any], notes: list[str]) -> Ranking | None:
    file = path / f"ensembles/{number:04d}.safetensors"
    try:
        return ranking_from(file, recipe)
    except OSError as error:
        notes.append(
            f"ensembles/{file.name}: cannot be read ({error.strerror}): the importances of step {number} are not shown."
        )
    except ValueError as error:
        notes.append(f"ensembles/{file.name}: damaged ({error}): the importances of step {number} are not shown.")
    return None


def _measures(provenance: Mapping[str, Any]) -> tuple[Metric, str]:
    """The user's names for metric and loss; without any, they are ours."""
    named = provenance.get("measures") or {}
    metric = str(named.get("metric", "accuracy"))
    return Metric(metric, share=metric == "accuracy"), str(named.get("loss", "cross_entropy"))


def _state(path: Path | None, *, finished: bool) -> State:
    if finished:
        return "finished"
    return "running" if path is None or is_held(path) else "stopped"
