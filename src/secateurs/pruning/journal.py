"""The journal of a folder: JSON lines in a chain, each with a digest over itself and the line before, checked when read.

A line is a JSON object whose last field, "digest", is the SHA-256 of the digest of the line before and of the line without it.
The first line continues from the file that says what was started (provenance.json, training.json), so that no line and no file
can be changed, swapped, left out or taken from another folder unnoticed. A last line that a crash cut short is not part of it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import msgspec
from torch import Tensor

from secateurs._util.decode import Malformed, brief, checked, decode_json, read_text_file
from secateurs._util.tensors import Damaged, parse
from secateurs.errors import RunError

JOURNAL, PROVENANCE, TRAINING = "journal.jsonl", "provenance.json", "training.json"
ORIGINS = (PROVENANCE, TRAINING)  # what the first line continues from, where there is one
MAX_LINE = 16 << 20  # bytes

_LINE = b'{"unit": "'  # how every line begins
_DIGEST = re.compile(rb', "digest": "([0-9a-f]{64})"\}$')


# ---- what the lines hold -------------------------------------------------------------------------------------------------

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]


class Change(TypedDict):
    """A figure before and after."""

    before: float
    after: float


class TestChange(Change):
    """Accuracy on the test set before and after, and the number of its examples."""

    count: Count


class NodeLine(TypedDict):
    """A node of the traced network."""

    name: str
    kind: str
    sources: list[Count]
    filters: NotRequired[Count]
    axis: NotRequired[Count]
    macs: NotRequired[Count]


class NetworkLine(TypedDict):
    """The network before any cut."""

    nodes: list[NodeLine]


class StartLine(TypedDict):
    """Accuracy and loss before any cut."""

    accuracy: float
    loss: float


class RoundLine(TypedDict):
    """The sites of a round, in the order in which they are visited."""

    round: Count
    sites: list[str]


class WidthsLine(TypedDict):
    """The numbers of filters that run fast at a site."""

    site: str
    channels: Count
    widths: list[Count]
    seconds: list[tuple[Count, float]]


class CutLine(TypedDict):
    """The cut that was found at a site, before it is made."""

    step: Count
    site: str
    answers: list[bool]
    removed: list[Count]
    evaluated: list[tuple[Count, float]]
    baseline: float
    accuracy: float
    drop: float
    by_estimate: Count | None
    bound: float | None
    refused: list[Count]


class StepLine(TypedDict):
    """A finished step; `files` are the SHA-256 of the checkpoint files that hold the network it left."""

    number: Count
    round: Count
    site: str
    channels: Count
    removed: list[Count]
    accuracy_before: float
    accuracy_cut: float
    accuracy: float
    loss: float
    parameters_removed: float
    macs_removed: float
    evaluated: list[tuple[Count, float]]
    masks: Count
    r2_held_out: float
    split_half: float
    seconds: Seconds
    criterion: str
    note: str
    examples: Count
    compared: list[tuple[str, float]]
    bound: float | None
    images: Count
    by_estimate: Count | None
    refused: list[Count]
    answers: list[bool]
    repaired: tuple[float, float] | None
    loss_cut: float | None
    files: NotRequired[dict[str, str]]


class EpochLine(TypedDict):
    """A finished epoch of a training; `step` and `phase` where it belongs to a run."""

    epoch: Count
    steps: Count
    lr: float
    loss: float
    accuracy: float | None
    search_loss: float | None
    search_accuracy: float | None
    step: NotRequired[Count]
    phase: NotRequired[Literal["finetune", "retrain"]]


class RetrainedLine(TypedDict):
    """The end of retraining."""

    accuracy: float
    loss: float
    files: NotRequired[dict[str, str]]


class CurveLine(TypedDict):
    """The loss of a site along its ranking, and the ranking; `passes` and `seconds` where a comparison measured it."""

    site: str
    order: list[Count]
    removed: list[Count]
    loss: list[float]
    saved: list[float]
    criterion: str
    masks: Count
    examples: Count
    note: str
    r2_held_out: float
    split_half: float
    compared: list[tuple[str, float]]
    passes: NotRequired[Count]
    seconds: NotRequired[Seconds]


class TrialLine(TypedDict):
    """One allocation that was tried: by its accuracy on the search part, or by its upper bound on the certifying part."""

    judge: Literal["steering", "certifying"]
    place: Count
    accepted: bool
    accuracy: NotRequired[float]
    upper: NotRequired[float | None]


class DivisionLine(TypedDict):
    """The allocation that was chosen: filters removed by site."""

    removed: dict[str, Count]
    saved: float
    loss: float
    tried: list[tuple[float, float, bool]]
    answers: list[bool]
    bound: float | None
    images: Count
    by_estimate: float
    frontier: list[tuple[float, float]]


class ClassesLine(TypedDict):
    """Test accuracy by class, NaN for a class without examples."""

    before: list[float | None]
    after: list[float | None]
    names: NotRequired[list[str]]


class LatencyLine(TypedDict):
    """How much faster the smaller network was measured to be."""

    speedup: float
    batch: Count
    low: NotRequired[float]
    high: NotRequired[float]
    aligning: NotRequired[float]


class EndLine(TypedDict):
    """The result of a run."""

    stopped: str
    metric: str
    search: Change
    test: TestChange
    parameters: Change
    macs: Change
    bytes: Change
    classes: ClassesLine
    latency: LatencyLine | None
    seconds: Seconds
    files: NotRequired[dict[str, str]]


class TaskLine(TypedDict):
    """What a method of a comparison was asked to do."""

    method: str
    fingerprints: dict[str, Any]


LINES: dict[str, Any] = {
    "network": NetworkLine,
    "start": StartLine,
    "round": RoundLine,
    "widths": WidthsLine,
    "cut": CutLine,
    "step": StepLine,
    "epoch": EpochLine,
    "retrained": RetrainedLine,
    "curve": CurveLine,
    "course": CurveLine,
    "trial": TrialLine,
    "division": DivisionLine,
    "end": EndLine,
    "task": TaskLine,
}
"""The fields of a line by its "unit"."""


# ---- what provenance.json holds ------------------------------------------------------------------------------------------


class ModelOrigin(TypedDict, total=False):
    """The network that a run was started with."""

    weights_sha256: str
    leaves: list[str]


class SetOrigin(TypedDict):
    """One set of examples."""

    count: Count
    sha256: NotRequired[str]


class DataOrigin(TypedDict, total=False):
    """The data that a run was started with."""

    name: str
    sha256: str
    sets: dict[str, SetOrigin]
    classes: list[Any]
    origin: dict[str, Any]


class Provenance(TypedDict, total=False):
    """What provenance.json holds. The folder of a run has all of it; a report is also made of less."""

    format: int
    model: ModelOrigin
    data: DataOrigin
    seed: int
    measures: dict[str, str]
    fingerprints: dict[str, Any]
    store: str | None
    origin: dict[str, Any]
    versions: dict[str, str]
    machine: dict[str, Any]
    started: str
    recipe_sha256: str


# ---- writing and reading -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Journal:
    """The lines of a journal up to the first damaged one."""

    entries: tuple[dict[str, Any], ...]  # without their digests
    digests: tuple[str, ...]  # the origin's, then one for each line
    size: int  # bytes of the lines that are whole
    notes: tuple[str, ...] = ()  # what is wrong with the file, in sentences; empty: nothing


def chained(entry: Mapping[str, Any], before: str) -> tuple[bytes, str]:
    """The line of an entry that continues from the digest `before`, and its own digest."""
    body = json.dumps(entry, allow_nan=True).encode()
    digest = _digest(body, before)
    return body[:-1] + f', "digest": "{digest}"}}\n'.encode(), digest


def origin_digest(folder: Path) -> str:
    """What the first line of the folder's journal continues from: the SHA-256 of the file that says what was started."""
    for name in ORIGINS:
        if (folder / name).is_file():
            return hashlib.sha256((folder / name).read_bytes()).hexdigest()
    return hashlib.sha256(b"").hexdigest()


def read_entries(folder: Path) -> Journal:
    """The journal of a folder as far as it is whole, with what is wrong in `notes`; RunError if there is none to read."""
    path = folder / JOURNAL
    try:
        data, before = path.read_bytes(), origin_digest(folder)
    except OSError as error:
        raise RunError(
            f"{folder}: not the folder of a run: no {JOURNAL} ({error.strerror}). Give a folder that secateurs prune wrote."
        ) from error
    entries: list[dict[str, Any]] = []
    digests, size, notes = [before], 0, []
    for number, line in enumerate(data[: data.rfind(b"\n") + 1].split(b"\n")[:-1], 1):
        try:
            body, claimed = _split(line)
            if _digest(body, digests[-1]) != claimed:
                if number > 1:
                    raise Malformed("it does not match its digest, or is not the line that followed")
                notes.append(_foreign(folder, path))
            entries.append(_entry(body))
        except Malformed as error:
            notes.append(
                f"{path}, line {number}: damaged ({error}). Restore the file from a copy; or keep the lines before it "
                f"(head -n {number - 1}) and resume: what follows is done again."
            )
            break
        digests.append(claimed)
        size += len(line) + 1
    rest = data[data.rfind(b"\n") + 1 :].rstrip(b"\0")  # file systems may leave zeros behind a crash
    if not notes and rest[: len(_LINE)] != _LINE[: len(rest)]:
        notes.append(
            f"{path}, line {len(entries) + 1}: damaged (neither a line nor the beginning of one: "
            f"{brief(rest[:200].decode(errors='replace'), 40)!r}). Restore the file from a copy; or keep the lines before it "
            f"(head -n {len(entries)}) and resume: what follows is done again."
        )
    return Journal(tuple(entries), tuple(digests), size, tuple(notes))


def read_journal(folder: Path) -> list[dict[str, Any]]:
    """The entries of a journal that another process may be writing; RunError names the first line that is damaged."""
    found = read_entries(folder)
    if found.notes:
        raise RunError(found.notes[0])
    return list(found.entries)


def changed_files(folder: Path, entry: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The files of the folder that an entry relies on and that are not as they were then: name, and what is wrong."""
    found = []
    for name, wanted in entry.get("files", {}).items():
        try:
            if hashlib.sha256((folder / name).read_bytes()).hexdigest() != wanted:
                found.append((name, f"damaged, or not the file that the journal's {entry['unit']!r} relies on"))
        except (OSError, ValueError) as error:  # ValueError: a name that no file can have
            found.append((name, f"cannot be read ({brief(getattr(error, 'strerror', error))})"))
    return found


def parse_provenance(folder: Path) -> dict[str, Any]:
    """What provenance.json says, every field of its type; `Malformed` or OSError if it cannot be read."""
    found: dict[str, Any] = decode_json(read_text_file(folder / PROVENANCE), dict[str, Any])
    checked(found, Provenance)
    return found


def read_kept(path: Path, name: str, digests: Sequence[str], kind: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and plain values of a file that `save_tensors` wrote as `name` after one of the lines with these digests."""
    try:
        tensors, header = parse(path.read_bytes())
    except OSError as error:
        raise Malformed(f"cannot be read ({error.strerror})") from error
    except Damaged as error:
        raise Malformed(f"damaged ({error})") from error
    if "digest" not in header:
        raise Malformed("damaged (its digest is gone)")
    if header.get("name") != name or header.get("journal", digests[0]) not in digests:
        raise Malformed(
            "not a file of this run as its journal has it: it comes from another run, another step or another state"
        )
    try:
        meta: dict[str, Any] = decode_json(header.get("meta", ""), dict[str, Any])
        checked(meta, kind)
    except Malformed as error:
        raise Malformed(f"damaged (meta: {error})") from error
    return tensors, meta


def _digest(body: bytes, before: str) -> str:
    return hashlib.sha256(before.encode() + body).hexdigest()


def _split(line: bytes) -> tuple[bytes, str]:
    """A line without its digest, and the digest."""
    if len(line) > MAX_LINE:
        raise Malformed(f"longer than {MAX_LINE:,} bytes")
    found = _DIGEST.search(line)
    if found is None:
        raise Malformed(f"not a line with a digest at its end: {brief(line[:200].decode(errors='replace'), 40)!r}")
    return line[: found.start()] + b"}", found[1].decode()


def _entry(body: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = decode_json(body, dict[str, Any])
    unit = entry.get("unit")
    if not isinstance(unit, str) or unit not in LINES:
        raise Malformed(f"unknown unit {brief(repr(unit), 40)}")
    try:
        checked(entry, LINES[unit])
        figure = {"steering": "accuracy", "certifying": "upper"}.get(entry.get("judge", ""))
        if unit == "trial" and figure not in entry:
            raise Malformed(f"Object missing required field `{figure}`")
    except Malformed as error:
        raise Malformed(f"{unit!r}: {error}") from error
    return entry


def _foreign(folder: Path, path: Path) -> str:
    origin = next((name for name in ORIGINS if (folder / name).is_file()), ORIGINS[0])
    return (
        f"{path}, line 1: does not continue from {folder / origin}: one of the two was changed, or comes from another folder. "
        f"Restore both from one copy, or start anew."
    )
