"""What exports of a run's network measured: kept in its folder as exports.json, shown by its report."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypedDict

from secateurs._util.decode import Malformed, checked, decode_json, read_text_file
from secateurs._util.files import write_text
from secateurs._util.format import NOTHING, percent, size
from secateurs.errors import RunError
from secateurs.export.deliver import TIMED_BATCHES, ExportFigures, Int8Figures

FILE = "exports.json"
_NAMES = {
    "onnx": "ONNX",
    "pt2": "torch.export (.pt2)",
    "source": "plain source",
    "int8": "ONNX, int8",
    "pt2-int8": "torch.export (.pt2), int8",
}


class _Noted(TypedDict, total=False):
    """What exports.json holds."""

    exports: list[dict[str, Any]]
    answers: list[bool]  # of the certification images, about int8 files


def note_exports(folder: Path, exports: Iterable[Mapping[str, Any]]) -> None:
    """Keep the figures of exports in the run's folder; a newer export replaces an older one of the same kind."""
    noted = _noted(folder, [])
    known = {str(one.get("kind")): one for one in noted.get("exports", [])}
    known |= {str(one["kind"]): {**one, "path": str(one["path"])} for one in exports}
    _write(folder, {**noted, "exports": list(known.values())})


def note_answers(folder: Path, answers: Iterable[bool]) -> None:
    """Keep what the certification images said of int8 files, also where none was written."""
    noted = _noted(folder, [])
    _write(folder, {**noted, "answers": [*noted.get("answers", []), *answers]})


def read_answers(folder: Path) -> list[bool]:
    """What the certification images said of int8 files; RunError where that cannot be read."""
    notes: list[str] = []
    noted = _noted(folder, notes)
    if notes:
        raise RunError(f"{folder}: {notes[0]} Restore it from a copy: it holds what was certified.")
    return noted.get("answers", [])


def read_exports(folder: Path, notes: list[str]) -> tuple[ExportFigures, ...]:
    """The exports of a run; a damaged file is named in `notes` and left out."""
    try:
        return tuple(checked(one, ExportFigures) for one in _noted(folder, notes).get("exports", []))
    except Malformed as error:
        notes.append(f"{FILE}: damaged ({error}): exports are not shown.")
        return ()


def _write(folder: Path, noted: _Noted) -> None:
    write_text(folder / FILE, json.dumps(noted, indent=1) + "\n")


def _noted(folder: Path, notes: list[str]) -> _Noted:
    try:
        found: _Noted = decode_json(read_text_file(folder / FILE), _Noted)
        return found
    except FileNotFoundError:  # nothing has been exported
        return {}
    except OSError as error:
        notes.append(f"{FILE}: cannot be read ({error.strerror}): exports are not shown.")
    except Malformed as error:
        notes.append(f"{FILE}: damaged ({error}): exports are not shown.")
    return {}


def export_rows(exports: Iterable[ExportFigures]) -> list[list[str]]:
    """A line of the report's table for each export and batch."""
    rows = []
    for one in exports:
        difference = f"{one.agreement.difference:.0e} of {one.agreement.scale:.3g}"
        first = [_NAMES[one.kind], size(one.original_bytes), size(one.bytes), difference]
        for timed in one.speeds:
            seconds = [f"{1e3 * seconds:.3g} ms" for seconds in (timed.original, timed.pruned)]
            rows.append([*first, str(timed.batch), timed.runtime, *seconds, timed.speedup.summary()])
        if not one.speeds:
            rows.append([*first, *[NOTHING] * 5])
    return rows


STAGE_COLUMNS = ("network", "bytes", "bits", "BOPs", "accuracy", *(f"batch {batch}" for batch in TIMED_BATCHES))


def stage_rows(figures: Int8Figures) -> list[list[str]]:
    """A line for each stage on the way to an int8 file."""
    rows = []
    for stage in figures.stages:
        times = dict(stage.seconds)
        shown = [f"{1e3 * times[batch]:.3g} ms" if batch in times else NOTHING for batch in TIMED_BATCHES]
        accuracy = NOTHING if stage.accuracy is None else f"{100 * stage.accuracy:.2f} %"
        rows.append([stage.name, size(stage.bytes), str(stage.bits), f"{stage.bops / 1e9:.3g} G", accuracy, *shown])
    return rows


def int8_sentences(figures: Int8Figures) -> list[str]:
    """What is promised of an int8 file, how it was made, and where it is slower than float32, in sentences."""
    found = [f"{words[0].upper()}{words[1:]}." for words in (figures.summary(), figures.how.summary())]
    times = {stage.name: dict(stage.seconds) for stage in figures.stages}
    slower = [
        f"{1e3 * seconds:.3g} ms against {1e3 * times['pruned, float32'][batch]:.3g} at batch {batch}"
        for batch, seconds in times.get("pruned, int8", {}).items()
        if seconds > times["pruned, float32"][batch]
    ]
    if slower:
        found.append(f"The int8 file is slower here than the same network in float32: {' and '.join(slower)}.")
    return found


def export_warnings(exports: Iterable[ExportFigures], shortcut: str = "before") -> list[str]:
    """Where the exported network gains nothing from pruning, in sentences; `shortcut` is the recipe's."""
    exports, found = list(exports), []
    slower = [timed for one in exports for timed in one.speeds if timed.speedup.high < 1]
    for runtime in dict.fromkeys(timed.runtime for timed in slower):
        cases = " and ".join(f"{t.speedup.summary()} at batch {t.batch}" for t in slower if t.runtime == runtime)
        engine = "torch" if runtime == "PyTorch" else "onnxruntime"
        found.append(
            f"In {runtime} the exported network is slower than the unpruned one: {cases}. Widths that do not fit its blocks "
            f"are slow: prune with --engine {engine}, or export with --pad-to 8 or 16."
        )
    return found + [aligning_warning(one.alignment.share, shortcut) for one in exports if one.alignment_outweighs][:1]


def aligning_warning(share: float, shortcut: str) -> str:
    """The warning where aligning channels takes longer than all that pruning saves."""
    advice = " One mask for each stage (--shortcut stream) needs hardly any aligning." if shortcut != "stream" else ""
    return (
        f"Aligning channels takes {percent(share)} of the pruned network's time in PyTorch, more than pruning saves: the terms "
        f"of its sums have lost different channels.{advice}"
    )
