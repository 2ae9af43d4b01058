"""The entries of a journal as records; fields that an older journal lacks are tolerated."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from secateurs._util.decode import MAX_TOML_BYTES, Malformed, brief, decode_toml, read_text_file
from secateurs._util.files import is_held
from secateurs._util.format import Metric, plural
from secateurs._util.tensors import Damaged, read_header
from secateurs.config import Recipe, recipe_from
from secateurs.errors import RecipeError, RunError
from secateurs.graph.structure import Node, nodes_from
from secateurs.pruning.journal import Journal, changed_files, parse_provenance, read_entries, read_kept
from secateurs.report.exports import read_exports
from secateurs.report.records import (
    DivisionRecord,
    End,
    Event,
    InMemory,
    LayerRecord,
    Pair,
    RankingMeta,
    RankingRecord,
    RunRecord,
    State,
    StepRecord,
    ranking_from,
    ranking_of,
)

Entry = Mapping[str, Any]


def units(entries: Sequence[Entry], unit: str, **fields: Any) -> list[Entry]:
    """The entries of one kind whose fields have the given values, in order."""
    return [e for e in entries if e["unit"] == unit and all(e.get(k) == v for k, v in fields.items())]


def step_of(entry: Entry, entries: Sequence[Entry], ranking: RankingRecord | None) -> StepRecord:
    """The record of one step; the baseline of its allowed drop stands in the cut's own entry."""
    number = int(entry["number"])
    cut: Entry = next(iter(reversed(units(entries, "cut", step=number))), {})
    return StepRecord(
        number=number,
        round=int(entry.get("round", 0)),
        site=str(entry["site"]),
        channels=int(entry["channels"]),
        removed=tuple(map(int, entry["removed"])),
        accuracy_before=float(entry["accuracy_before"]),
        accuracy_cut=float(entry["accuracy_cut"]),
        accuracy=float(entry["accuracy"]),
        baseline=float(cut.get("baseline", entry["accuracy_before"])),
        parameters_removed=float(entry["parameters_removed"]),
        macs_removed=float(entry["macs_removed"]),
        evaluated=tuple((int(m), float(a)) for m, a in entry.get("evaluated", ())),
        masks=int(entry.get("masks") or 0),
        r2=_figure(entry.get("r2_held_out")),
        split_half=_figure(entry.get("split_half")),
        seconds=float(entry.get("seconds", 0.0)),
        criterion=str(entry.get("criterion") or ""),
        note=str(entry.get("note") or ""),
        loss_before=_loss_before(number, entries),
        loss_cut=_figure(entry.get("loss_cut", entry.get("loss") if _untouched(entry, entries) else None)),
        examples=int(entry.get("examples") or 0),
        bound=_figure(entry.get("bound")),
        images=int(entry.get("images") or 0),
        by_estimate=None if entry.get("by_estimate") is None else int(entry["by_estimate"]),
        compared=tuple((str(name), float(loss)) for name, loss in entry.get("compared") or ()),
        repaired=None if not entry.get("repaired") else (float(entry["repaired"][0]), float(entry["repaired"][1])),
        ranking=ranking,
    )


def division_of(entry: Entry) -> DivisionRecord:
    """How the cuts were divided."""
    return DivisionRecord(
        saved=float(entry["saved"]),
        frontier=tuple((float(saved), float(rise)) for saved, rise in entry["frontier"]),
        tried=tuple((float(saved), float(accuracy), bool(fine)) for saved, accuracy, fine in entry["tried"]),
        bound=_figure(entry.get("bound")),
        images=int(entry.get("images") or 0),
        by_estimate=_figure(entry.get("by_estimate")),
    )


def events_of(entries: Sequence[Entry], start: float | None) -> tuple[Event, ...]:
    """Every moment when the accuracy on the search set was measured, in order, with the MACs left then.

    A step's own entry comes after its cut and epochs, but its MACs hold from the cut on.
    """
    left = {int(e["number"]): 1 - float(e["macs_removed"]) for e in units(entries, "step") if "macs_removed" in e}
    found = [] if start is None else [Event("start", 0, start, "at the start", 1.0)]
    macs = 1.0
    for entry in entries:
        step = int(entry.get("step") or 0)
        if entry["unit"] == "cut" and "accuracy" in entry:
            macs = left.get(step, macs)
            went = len(entry.get("removed", ()))
            label = f"step {step}, {entry.get('site', '')}: {went} filter{'' if went == 1 else 's'} cut"
            found.append(Event("cut", step, float(entry["accuracy"]), label, macs))
        elif entry["unit"] == "epoch" and entry.get("search_accuracy") is not None:
            phase: Literal["retrain", "finetune"] = "retrain" if entry.get("phase") == "retrain" else "finetune"
            word = "retraining" if phase == "retrain" else f"step {step}, fine-tuning"
            label = f"{word}, epoch {int(entry.get('epoch', 0)) + 1}"
            found.append(Event(phase, step, float(entry["search_accuracy"]), label, macs))
    return tuple(found)


def end_of(entry: Entry) -> End:
    """How the run ended."""
    test = entry["test"]
    return End(
        stopped=str(entry.get("stopped", "")),
        search=_pair(entry["search"]),
        test=_pair(test),
        test_count=int(test.get("count", 0)),
        parameters=_pair(entry["parameters"]),
        macs=_pair(entry["macs"]),
        bytes=_pair(entry["bytes"]),
        seconds=float(entry.get("seconds", 0.0)),
        classes=_classes(entry.get("classes")),
        latency=entry["latency"] if isinstance(entry.get("latency"), Mapping) else None,
    )


def where_it_stands(entries: Sequence[Entry]) -> str:
    """What the run is, or was, working on."""
    steps = len(units(entries, "step"))
    after = entries[max((n for n, entry in enumerate(entries) if entry["unit"] == "step"), default=-1) + 1 :]
    epochs = units(after, "epoch")
    if epochs:
        what = "retraining" if epochs[-1].get("phase") == "retrain" else f"fine-tuning after the cut of step {steps + 1}"
        return f"{what}, {plural(len(epochs), 'epoch')} done"
    if units(after, "cut"):
        return f"step {steps + 1}, the cut is found"
    masks = sum(len(entry.get("losses", ())) for entry in units(after, "masks"))
    if masks:
        return f"step {steps + 1}, {plural(masks, 'mask')} scored"
    return f"after {plural(steps, 'step')}" if entries else "before its first measurement"


def _untouched(entry: Entry, entries: Sequence[Entry]) -> bool:
    """Whether the network is still as the cut left it: then what was measured at the step's end holds for the cut."""
    return not units(entries, "epoch", step=entry["number"]) and entry["accuracy"] == entry["accuracy_cut"]


def _loss_before(number: int, entries: Sequence[Entry]) -> float | None:
    """On the search set, as the step before left it."""
    earlier = [e for e in units(entries, "step") if e.get("number") == number - 1] or units(entries, "start")
    return _figure(earlier[-1].get("loss")) if earlier else None


def _pair(fields: Mapping[str, Any]) -> Pair:
    return Pair(float(fields["before"]), float(fields["after"]))


def _classes(fields: Any) -> tuple[Pair, ...]:
    if not isinstance(fields, Mapping):
        return ()
    before, after = fields.get("before") or (), fields.get("after") or ()
    return tuple(Pair(_or_nan(b), _or_nan(a)) for b, a in zip(before, after, strict=False))


def _or_nan(value: Any) -> float:
    return math.nan if value is None else float(value)


def _figure(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


_Shapes = dict[str, tuple[int, ...]]


def layers_of(folder: Path, nodes: Sequence[Node], cuts: Sequence[int], notes: list[str]) -> tuple[LayerRecord, ...]:
    """Every layer of the network in the order of its picture, or of the names where there is no picture.

    `cuts` are the numbers of the steps that removed something. A layer that the latest network no longer has was folded away:
    nothing is left of it.
    """
    before = _shapes(folder / "checkpoints/start.safetensors", notes)
    if before is None:
        return ()
    latest = [
        folder / "pruned.safetensors",
        *(folder / f"checkpoints/{n:04d}.safetensors" for n in sorted(cuts, reverse=True)),
    ]
    found = next((path for path in latest if path.exists()), None)
    if found is None and cuts:
        notes.append("checkpoints/: the network after the latest cut is missing: the widths of the layers are not shown.")
        return ()
    after = before if found is None else _shapes(found, notes)
    if after is None:
        return ()
    pictured = {node.name: node for node in nodes if node.is_layer}
    names = [name for name in pictured if f"{name}.weight" in before]
    if pictured and not names:
        notes.append("checkpoints/start.safetensors: not the network of this run: the widths of the layers are not shown.")
        return ()
    if not names:
        weights = [name for name, shape in before.items() if name.endswith(".weight") and len(shape) > 1]
        names = sorted((name.removesuffix(".weight") for name in weights), key=_natural)
    return tuple(_layer(name, pictured.get(name), before, after) for name in dict.fromkeys(names))


def _layer(name: str, node: Node | None, before: _Shapes, after: _Shapes) -> LayerRecord:
    had = before[f"{name}.weight"]
    has = after.get(f"{name}.weight", (0,) * len(had))
    axis = 0 if node is None or node.axis >= min(len(had), len(has)) else node.axis
    filters = had[axis] if node is None else node.filters
    left = round(filters * has[axis] / had[axis]) if had[axis] else 0
    return LayerRecord(name, filters, left, math.prod(had), math.prod(has), None if node is None else node.macs)


def _shapes(path: Path, notes: list[str]) -> _Shapes | None:
    try:
        return read_header(path)[1]
    except (OSError, Damaged) as error:
        what = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error})"
        notes.append(f"{path.parent.name}/{path.name}: {what}: the widths of the layers are not shown.")
        return None


def _natural(name: str) -> list[tuple[int, str]]:
    """conv2 before conv10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


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
    rankings: Mapping[int, RankingRecord | None],
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
) -> RankingRecord | None:
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
