"""The entries of a journal as records; fields that an older journal lacks are tolerated."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from secateurs.report.records import DivisionRecord, End, Event, Pair, Ranking, StepRecord
from secateurs.report.words import plural

Entry = Mapping[str, Any]


def units(entries: Sequence[Entry], unit: str, **fields: Any) -> list[Entry]:
    """The entries of one kind whose fields have the given values, in order."""
    return [e for e in entries if e["unit"] == unit and all(e.get(k) == v for k, v in fields.items())]


def step_of(entry: Entry, entries: Sequence[Entry], ranking: Ranking | None) -> StepRecord:
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
