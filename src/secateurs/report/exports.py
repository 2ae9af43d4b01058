"""What exports of a run's network measured: kept in its folder as exports.json, shown by its report."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from secateurs._util.decode import Malformed, decode_json, read_text_file
from secateurs._util.files import write_text
from secateurs._util.format import NOTHING, percent, size
from secateurs.export.deliver import ExportFigures

FILE = "exports.json"
_NAMES = {"onnx": "ONNX", "pt2": "torch.export (.pt2)", "source": "plain source"}


def note_exports(folder: Path, exports: Iterable[Mapping[str, Any]]) -> None:
    """Keep the figures of exports in the run's folder; a newer export replaces an older one of the same kind."""
    known = {str(one.get("kind")): one for one in _noted(folder, dict[str, Any], [])}
    known |= {str(one["kind"]): {**one, "path": str(one["path"])} for one in exports}
    write_text(folder / FILE, json.dumps({"exports": list(known.values())}, indent=1) + "\n")


def read_exports(folder: Path, notes: list[str]) -> tuple[ExportFigures, ...]:
    """The exports of a run; a damaged file is named in `notes` and left out."""
    return tuple(_noted(folder, ExportFigures, notes))


def _noted(folder: Path, kind: Any, notes: list[str]) -> list[Any]:
    try:
        found: dict[str, list[Any]] = decode_json(read_text_file(folder / FILE), dict[str, list[kind]])
        return found.get("exports", [])
    except FileNotFoundError:  # nothing has been exported
        return []
    except OSError as error:
        notes.append(f"{FILE}: cannot be read ({error.strerror}): exports are not shown.")
    except Malformed as error:
        notes.append(f"{FILE}: damaged ({error}): exports are not shown.")
    return []


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


def export_warnings(exports: Iterable[ExportFigures], shortcut: str = "before") -> list[str]:
    """Where the exported network gains nothing from pruning, in sentences; `shortcut` is the recipe's."""
    exports, found = list(exports), []
    slower = [timed for one in exports for timed in one.speeds if timed.speedup.high < 1]
    for runtime in dict.fromkeys(timed.runtime for timed in slower):
        cases = " and ".join(f"{t.speedup.summary()} at batch {t.batch}" for t in slower if t.runtime == runtime)
        engine = "onnxruntime" if runtime == "ONNX Runtime" else "torch"
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
