"""A run folder as records: reads without holding the folder, and says what is missing or damaged instead of failing on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from secateurs.decode import MAX_TOML_BYTES, Malformed, brief, decode_toml, read_text_file
from secateurs.errors import RecipeError, RunError
from secateurs.files import is_held
from secateurs.journal import Journal, changed_files, parse_provenance, read_entries, read_kept
from secateurs.recipe import Recipe, recipe_from
from secateurs.report.entries import division_of, end_of, events_of, step_of, units, where_it_stands
from secateurs.report.exports import read_exports
from secateurs.report.ranking import InMemory, RankingMeta, ranking_from, ranking_of
from secateurs.report.records import Ranking, RunRecord, State
from secateurs.report.structure import nodes_from
from secateurs.report.weights import layers_of
from secateurs.report.words import Metric

T = TypeVar("T")


def read_run(folder: str | Path) -> RunRecord:
    """All that the folder of a run tells, finished or not; `RunError` if it is none."""
    path = Path(folder)
    notes: list[str] = []
    journal = _journal(path, notes)
    entries = journal.entries
    provenance = _provenance(path, notes)
    recipe, text = _recipe(path, notes)
    rankings = {e["number"]: _ranking(path, e, journal.digests, recipe, notes) for e in units(entries, "step")}
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


def _journal(path: Path, notes: list[str]) -> Journal:
    """The journal up to its first damaged line."""
    if (path / "training.json").exists():
        raise RunError(f"{path}: the folder of a training, not of a pruning run. See it with: secateurs show {path}")
    found = read_entries(path)
    notes += [f"{note} What came after it is not shown." if "damaged" in note else note for note in found.notes]
    for entry in units(found.entries, "end")[-1:]:
        notes += [f"{name}: {what}." for name, what in changed_files(path, entry)]
    if not found.entries:
        notes.append("The journal is empty: nothing has been measured yet.")
    return found


def _provenance(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        return parse_provenance(path)
    except OSError as error:
        notes.append(f"provenance.json: cannot be read ({error.strerror}): model, data and versions are not known.")
    except Malformed as error:
        notes.append(f"provenance.json: damaged ({error}): model, data and versions are not known.")
    return {}


def _recipe(path: Path, notes: list[str]) -> tuple[dict[str, Any], str]:
    """As plain fields, so that the recipe of another release can still be shown."""
    known = {field.name for field in fields(Recipe)}
    try:
        text = read_text_file(path / "recipe.toml", max_bytes=MAX_TOML_BYTES)
        found: dict[str, Any] = decode_toml(text)
        recipe_from({name: value for name, value in found.items() if name in known})  # a field of the wrong type is an error
        return found, text.decode()
    except OSError as error:
        notes.append(f"recipe.toml: cannot be read ({error.strerror}): what was asked is not known.")
    except (Malformed, RecipeError) as error:
        notes.append(f"recipe.toml: damaged ({error}): what was asked is not known.")
    return {}, ""


def _ranking(
    path: Path, step: Mapping[str, Any], digests: Sequence[str], recipe: Mapping[str, Any], notes: list[str]
) -> Ranking | None:
    """The importances of a step; what is wrong with their file is named in `notes`."""
    name = f"ensembles/{step['number']:04d}"
    try:
        tensors, meta = read_kept(path / f"{name}.safetensors", name, digests, RankingMeta)
        return ranking_from(tensors, meta, recipe)
    except (Malformed, ValueError, RuntimeError, IndexError) as error:
        what = f"the importances of step {step['number']} are not shown"
        notes.append(f"{name}.safetensors: {error if isinstance(error, Malformed) else f'damaged ({brief(error)})'}: {what}.")
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
