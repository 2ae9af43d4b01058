"""What exports of a run's network have shown: kept in its folder as exports.json, told by its report."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from secateurs._util.decode import Malformed, brief, decode_json, read_text_file
from secateurs._util.files import write_text
from secateurs._util.format import NOTHING, percent, size
from secateurs.graph.latency import SpeedUp
from secateurs.report.charts.figure import Child, Html
from secateurs.report.widgets import copyable, table

FILE = "exports.json"
_NAMES = {"onnx": "ONNX", "pt2": "torch.export (.pt2)", "source": "plain source"}


@dataclass(frozen=True)
class Timed:
    """Seconds of the unpruned network's export and of the pruned one's, run in turns on batches of one size."""

    batch: int
    runtime: str
    before: float
    after: float
    speedup: SpeedUp

    @property
    def slower(self) -> bool:
        """Measurably."""
        return self.speedup.high < 1


@dataclass(frozen=True)
class ExportRecord:
    """One export: bytes before and after, the largest difference of any output, speeds, and what aligning takes."""

    kind: str
    bytes: int
    bytes_before: int | None
    difference: float
    scale: float  # the largest output
    speeds: tuple[Timed, ...]
    aligning: float  # share of the pruned network's time in PyTorch
    aligned_batch: int

    @property
    def alignment_outweighs(self) -> bool:
        """Whether, in PyTorch, aligning channels takes longer than all that pruning saves."""
        return any(
            self.aligning * timed.after > max(timed.before - timed.after, 0.0)
            for timed in self.speeds
            if self.aligning and timed.runtime == "PyTorch" and timed.batch == self.aligned_batch
        )


class _Exports(TypedDict):
    exports: list[dict[str, Any]]


def note_exports(folder: Path, exports: Iterable[Mapping[str, Any]]) -> None:
    """Keep the figures of exports in the run's folder; a newer export of the same kind takes the place of an older one."""
    notes: list[str] = []
    known = {str(one.get("kind")): one for one in _noted(folder, notes)}
    known |= {str(one["kind"]): {**one, "path": str(one["path"])} for one in exports}
    write_text(folder / FILE, json.dumps({"exports": list(known.values())}, indent=1) + "\n")


def read_exports(folder: Path, notes: list[str]) -> tuple[ExportRecord, ...]:
    """What was noted; a damaged file is named in `notes` and left out."""
    try:
        return tuple(record_of(one) for one in _noted(folder, notes))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        notes.append(f"{FILE}: damaged ({type(error).__name__}: {brief(error)}): exports are not shown.")
        return ()


def _noted(folder: Path, notes: list[str]) -> list[dict[str, Any]]:
    try:
        return decode_json(read_text_file(folder / FILE), _Exports)["exports"]
    except FileNotFoundError:  # nothing has been exported
        return []
    except OSError as error:
        notes.append(f"{FILE}: cannot be read ({error.strerror}): exports are not shown.")
    except Malformed as error:
        notes.append(f"{FILE}: damaged ({error}): exports are not shown.")
    return []


def record_of(fields: Mapping[str, Any]) -> ExportRecord:
    """The record of an export's plain values."""
    agreement, alignment = fields["agreement"], fields["alignment"]
    return ExportRecord(
        kind=str(fields["kind"]),
        bytes=int(fields["bytes"]),
        bytes_before=None if fields.get("original_bytes") is None else int(fields["original_bytes"]),
        difference=float(agreement["difference"]),
        scale=float(agreement["scale"]),
        speeds=tuple(
            Timed(int(s["batch"]), str(s["runtime"]), float(s["original"]), float(s["pruned"]), SpeedUp(**s["speedup"]))
            for s in fields.get("speeds", ())
        ),
        aligning=float(alignment["share"]),
        aligned_batch=int(alignment["batch"]),
    )


def exports_table(exports: Iterable[ExportRecord]) -> Html | None:
    """A line for each export and batch; None where nothing was exported."""
    columns = ("Export", "Unpruned", "Pruned", "Largest difference", "Batch", "Runs in", "Unpruned", "Pruned", "Speed")
    rows = [row for one in exports for row in _rows(one)]
    return copyable(table(columns, rows)) if rows else None


def _rows(one: ExportRecord) -> list[list[Child]]:
    difference = f"{one.difference:.0e} of {one.scale:.3g}"
    before = NOTHING if one.bytes_before is None else size(one.bytes_before)
    first: list[Child] = [_NAMES.get(one.kind, one.kind), before, size(one.bytes), difference]
    if not one.speeds:
        return [[*first, *(NOTHING,) * 5]]
    return [[*first, *_times(timed)] for timed in one.speeds]


def _times(timed: Timed) -> list[Child]:
    return [
        str(timed.batch),
        timed.runtime,
        *(f"{1e3 * seconds:.3g} ms" for seconds in (timed.before, timed.after)),
        timed.speedup.summary(),
    ]


def export_warnings(exports: Iterable[ExportRecord]) -> list[str]:
    """Where pruning does not pay once the network is exported, in sentences."""
    exports, found = list(exports), []
    slower = [timed for one in exports for timed in one.speeds if timed.slower]
    for runtime in dict.fromkeys(timed.runtime for timed in slower):
        cases = " and ".join(f"{t.speedup.summary()} at batch {t.batch}" for t in slower if t.runtime == runtime)
        aware = " or --latency-aware" if runtime == "PyTorch" else ""  # which measures PyTorch, on this device
        found.append(
            f"In {runtime} the exported network is slower than the unpruned one: {cases}. Numbers of filters that are no "
            f"multiples of eight are slow on many devices: prune with --round-to 8{aware}."
        )
    outweighs = next((one for one in exports if one.alignment_outweighs), None)
    if outweighs is not None:
        found.append(aligning_warning(outweighs.aligning))
    return found


def aligning_warning(share: float) -> str:
    """What to say where aligning channels takes longer than all that pruning saves."""
    return (
        f"Aligning channels takes {percent(share)} of the pruned network's time in PyTorch, more than pruning saves: the terms "
        f"of its sums have lost different channels. Masks after the add (--shortcut after) need less of it."
    )
