"""A journal: an append-only file of records in a folder, with the tensor files beside it. What is in it survives a crash.

Every line of journal.jsonl is a JSON object, synced before the next unit of work begins. Its last field, "digest", is the
SHA-256 of the digest of the line before and of the line without it; the first line continues from the file that says what was
started (provenance.json, training.json). So no line and no file can be changed, swapped, left out or taken from another folder
unnoticed. A last line that a crash cut short is dropped: its unit of work is repeated, with the same result. Tensor files name
the line that they were written after, or the next line lists their digests.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec
import torch
from torch import Tensor

from secateurs._util.decode import Malformed, brief, checked, decode_json
from secateurs._util.files import write_bytes
from secateurs._util.folders import disk_errors, lock, refuse_links
from secateurs._util.tensors import Damaged, dump, parse
from secateurs.distributed import ALONE, KeptAnswers, Workers
from secateurs.errors import RunError

JOURNAL, PROVENANCE, TRAINING = "journal.jsonl", "provenance.json", "training.json"
ANSWERS = "answers"  # folder of what workers have measured of a unit of work under way
ORIGINS = (PROVENANCE, TRAINING)  # what the first line continues from, where there is one
MAX_LINE = 16 << 20  # bytes

_LINE = b'{"unit": "'  # how every line begins
_DIGEST = re.compile(rb', "digest": "([0-9a-f]{64})"\}$')

R = TypeVar("R")
Kinds = Mapping[str, type[Any]]
"""The dataclass of a line by its "unit"."""


# ---- records ------------------------------------------------------------------------------------------------------------


def plain(record: Any) -> dict[str, Any]:
    """The fields of a dataclass as JSON has them, without those declared with `metadata={"journal": False}`."""
    kept = [field.name for field in fields(record) if field.metadata.get("journal", True)]
    return {name: msgspec.to_builtins(getattr(record, name), enc_hook=_tensor_to_list) for name in kept}


def record_from(entry: Mapping[str, Any], kind: type[R]) -> R:
    """The dataclass that `plain` wrote; `Malformed` names the first field that does not fit."""
    return checked(entry, kind, _tensor_from_list)


def _tensor_to_list(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be written to a journal")


def _tensor_from_list(kind: type, value: Any) -> Any:
    if kind is Tensor and isinstance(value, list):
        return torch.tensor(value)
    raise ValueError(f"Expected a list of numbers for a {kind.__name__}, got {type(value).__name__}")


# ---- reading ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class JournalLines:
    """The lines of a journal up to the first damaged one."""

    records: tuple[Any, ...]
    digests: tuple[str, ...]  # the origin's, then one for each line
    size: int  # bytes of the whole lines
    notes: tuple[str, ...] = ()  # what is wrong with the file, in sentences; empty: nothing

    def of(self, kind: type[R], **key: Any) -> list[R]:
        """The records of one kind whose fields have the given values, in order."""
        return records_of(self.records, kind, **key)


def records_of(records: Sequence[Any], kind: type[R], **key: Any) -> list[R]:
    """The records of one kind whose fields have the given values, in order."""
    return [r for r in records if type(r) is kind and all(getattr(r, name) == value for name, value in key.items())]


def read_lines(folder: Path, kinds: Kinds) -> JournalLines:
    """Read the journal of a folder, which another process may be writing, up to its first damaged line.

    What is wrong is in `notes`. RunError if there is no journal.
    """
    path = folder / JOURNAL
    refuse_links(folder)
    try:
        before = _origin_digest(folder)
        with path.open("rb") as file:
            return _lines(file, path, before, kinds)
    except IsADirectoryError as error:
        raise RunError(f"{path}: {error.strerror}. Restore it from a copy, or start a new run.") from error
    except OSError as error:
        raise RunError(
            f"{folder}: not the folder of a run: no {JOURNAL} ({error.strerror}). Give a folder that secateurs prune wrote."
        ) from error


def _lines(file: IO[bytes], path: Path, before: str, kinds: Kinds) -> JournalLines:
    """The lines of an open journal, one in memory at a time, after the origin with the digest `before`."""
    folder, records, notes = path.parent, list[Any](), list[str]()
    digests, size = [before], 0
    for number, line in enumerate(iter(partial(file.readline, MAX_LINE + 1), b""), 1):
        if not line.endswith(b"\n") and len(line) <= MAX_LINE:  # the last one
            rest = line.rstrip(b"\0")  # file systems may leave zeros behind a crash
            if not notes and rest[: len(_LINE)] != _LINE[: len(rest)]:
                text = brief(rest[:200].decode(errors="replace"), 40)
                notes.append(_damaged(path, number, f"neither a line nor the beginning of one: {text!r}"))
            break
        try:
            body, claimed = _split(line)
            if _digest(body, digests[-1]) != claimed:
                if number > 1:
                    raise Malformed("it does not match its digest, or is not the line that followed")
                origin = next((name for name in ORIGINS if (folder / name).is_file()), ORIGINS[0])
                notes.append(
                    f"{path}, line 1: does not continue from {folder / origin}: one of the two was changed, or comes from "
                    f"another folder. Restore both from one copy, or start a new run."
                )
            records.append(_record(body, kinds))
        except Malformed as error:
            notes.append(_damaged(path, number, str(error)))
            break
        digests.append(claimed)
        size += len(line)
    return JournalLines(tuple(records), tuple(digests), size, tuple(notes))


def read_records(folder: Path, kinds: Kinds) -> list[Any]:
    """All records of a journal; RunError names the first line that is damaged."""
    found = read_lines(folder, kinds)
    if found.notes:
        raise RunError(found.notes[0])
    return list(found.records)


def changed_files(folder: Path, record: Any) -> list[tuple[str, str]]:
    """The files that a record's `files` relies on and that have changed since: name, and what is wrong."""
    found = []
    for name, wanted in record.files.items():
        try:
            if _file_digest(folder / name) != wanted:
                found.append((name, "damaged, or not the file that the journal relies on"))
        except (OSError, ValueError) as error:  # ValueError: a name that no file can have
            found.append((name, f"cannot be read ({brief(getattr(error, 'strerror', error))})"))
    return found


def read_tensors(path: Path, name: str, digests: Sequence[str], kind: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and plain values of a file that `Journal.save_tensors` wrote as `name` after one of the lines with `digests`."""
    try:
        tensors, header = parse(path.read_bytes())
    except OSError as error:
        raise Malformed(f"cannot be read ({error.strerror})") from error
    except Damaged as error:
        raise Malformed(f"damaged ({error})") from error
    if "digest" not in header:
        raise Malformed("damaged (it has no digest)")
    if header.get("name") != name or header.get("journal", digests[0]) not in digests:
        raise Malformed("not a file of this run at this point of its journal: it comes from another run or another step")
    try:
        meta: dict[str, Any] = decode_json(header.get("meta", ""), dict[str, Any])
        checked(meta, kind)
    except Malformed as error:
        raise Malformed(f"damaged (meta: {error})") from error
    return tensors, meta


def _origin_digest(folder: Path) -> str:
    origin = next((folder / name for name in ORIGINS if (folder / name).is_file()), None)
    return hashlib.sha256(b"").hexdigest() if origin is None else _file_digest(origin)


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(body: bytes, before: str) -> str:
    return hashlib.sha256(before.encode() + body).hexdigest()


def _split(line: bytes) -> tuple[bytes, str]:
    """A line without its digest, and the digest."""
    if len(line) > MAX_LINE:
        raise Malformed(f"longer than {MAX_LINE:,} bytes")
    line = line.removesuffix(b"\n")
    found = _DIGEST.search(line)
    if found is None:
        raise Malformed(f"not a line with a digest at its end: {brief(line[:200].decode(errors='replace'), 40)!r}")
    return line[: found.start()] + b"}", found[1].decode()


def _record(body: bytes, kinds: Kinds) -> Any:
    entry: dict[str, Any] = decode_json(body, dict[str, Any])
    unit = entry.get("unit")
    if not isinstance(unit, str) or unit not in kinds:
        raise Malformed(f"unknown unit {brief(repr(unit), 40)}")
    try:
        return record_from(entry, kinds[unit])
    except Malformed as error:
        raise Malformed(f"{unit!r}: {error}") from error


def _damaged(path: Path, number: int, what: str) -> str:
    return (
        f"{path}, line {number}: damaged ({what}). Restore the file from a copy, or start again in another folder: "
        f"an earlier state cannot be resumed, because only the latest checkpoint is kept."
    )


# ---- writing ------------------------------------------------------------------------------------------------------------


class Journal:
    """The records of a run, on disk in the folder `path`; in memory if that is None.

    A folder belongs to the process that opened it until `close`; its journal must be undamaged. Of several workers the first
    has the folder: the others hold its records in memory, as it sends them, and their `path` is None.
    """

    def __init__(self, path: Path | None, kinds: Kinds, workers: Workers = ALONE) -> None:
        self.path, self.workers = path if workers.first else None, workers
        self.records: list[Any] = []
        self.answers = KeptAnswers()
        self._units = {kind: unit for unit, kind in kinds.items()}
        self._digests: list[str] = []  # the origin's, then one for each line
        self._file: IO[bytes] | None = None
        self._lock: IO[bytes] | None = None
        if workers.size == 1:
            self._open(kinds)
        else:
            self._open_together(kinds)
            self.answers = KeptAnswers() if path is None else workers.answers_in(path / ANSWERS)

    def _open_together(self, kinds: Kinds) -> None:
        """Open the folder as the first worker; as another, take its records."""

        def opened() -> bytes:
            self._open(kinds)
            return json.dumps([self._entry(record) for record in self.records], allow_nan=True).encode()

        sent: list[dict[str, Any]] = json.loads(self.workers.shared("the journal", opened))
        if not self.workers.first:
            self.records = [record_from(entry, kinds[entry["unit"]]) for entry in sent]

    def _open(self, kinds: Kinds) -> None:
        path = self.path
        if path is None:
            return
        with disk_errors(path):
            refuse_links(path)
        self._lock = lock(path)
        try:
            with disk_errors(path):
                self._file = (path / JOURNAL).open("a+b", buffering=0)
            found = read_lines(path, kinds)
            if found.notes:
                raise RunError(found.notes[0])
            self._file.truncate(found.size)  # a last line that was being written when the process died
        except BaseException:
            self.close()
            raise
        self.records, self._digests = list(found.records), list(found.digests)

    def close(self) -> None:
        """Let other processes use the folder."""
        for file in (self._file, self._lock):
            if file is not None:
                file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def once(self, kind: type[R], compute: Callable[[], R], **key: Any) -> R:
        """Return the record of `kind` with the fields `key`; where there is none, compute and append it.

        This is how a unit of work survives a crash: what is journaled is never computed again. Of several workers all compute,
        sharing what can be shared, and the record of the first is everybody's.
        """
        if not self.of(kind, **key):
            self._append_together(kind, compute())
        return self.of(kind, **key)[0]

    def once_timed(self, kind: type[R], compute: Callable[[], R], **key: Any) -> R:
        """As `once`, of something that a clock measures: only the first worker does, while the others wait."""
        if not self.of(kind, **key):
            self._append_together(kind, compute() if self.workers.first else None)
        return self.of(kind, **key)[0]

    def _append_together(self, kind: type[R], own: R | None) -> None:
        if self.workers.size == 1:
            self.append(own)
            return

        def appended() -> bytes:
            self.append(own)
            return json.dumps(self._entry(own), allow_nan=True).encode()

        sent = self.workers.shared(f"journal: {kind.__name__}", appended)
        if not self.workers.first:
            self.records.append(record_from(json.loads(sent), kind))

    def _entry(self, record: Any) -> dict[str, Any]:
        return {"unit": self._units[type(record)], **plain(record)}

    def of(self, kind: type[R], **key: Any) -> list[R]:
        """The records of one kind whose fields have the given values, in order."""
        return records_of(self.records, kind, **key)

    def append(self, record: Any) -> None:
        """Append a record; on return it is safe."""
        if self._file is not None and self.path is not None:
            with disk_errors(self.path):
                self._append_line(self._file, self.path, self._entry(record))
        self.records.append(record)

    def _append_line(self, file: IO[bytes], folder: Path, entry: Mapping[str, Any]) -> None:
        if len(self._digests) < 2:  # the origin may have been written since the folder was opened
            self._digests = [_origin_digest(folder)]
        body = json.dumps(entry, allow_nan=True).encode()
        digest = _digest(body, self._digests[-1])
        line, size = body[:-1] + f', "digest": "{digest}"}}\n'.encode(), file.seek(0, os.SEEK_END)
        try:
            while line:
                line = line[file.write(line) :]
            os.fsync(file.fileno())
        except OSError:
            with suppress(OSError):
                file.truncate(size)  # a line that is not safe must not be continued from
            raise
        self._digests.append(digest)

    def save_tensors(
        self, name: str, tensors: Mapping[str, Tensor], meta: Mapping[str, Any] | None = None, *, listed: bool = False
    ) -> None:
        """Write `name`.safetensors with `meta` in its header; `listed`: the next record holds the file's digest."""
        if self.path is None:
            return
        header = {"meta": json.dumps(meta or {}), "name": name}
        if not listed:
            header["journal"] = self._digests[-1]
        with disk_errors(self.path):
            write_bytes(self.path / f"{name}.safetensors", dump(tensors, header))

    def load_tensors(self, name: str, kind: Any = dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Read `name`.safetensors, with plain values of the type `kind`; None if there is none.

        A file that is damaged or of another run is a RunError. Of several workers the first reads it and sends it to all.
        """
        if self.workers.size > 1:
            return self._load_together(name, kind)
        return self._load(name, kind)

    def _load_together(self, name: str, kind: Any) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        own: list[tuple[dict[str, Tensor], dict[str, Any]] | None] = []

        def loaded() -> bytes:
            own.append(self._load(name, kind))
            return b"" if own[0] is None else dump(own[0][0], {"meta": json.dumps(own[0][1])})

        sent = self.workers.shared(f"file {name}", loaded)
        if own or not sent:
            return own[0] if own else None
        tensors, header = parse(sent)
        return tensors, json.loads(header["meta"])

    def _load(self, name: str, kind: Any) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        if self.path is None or not (path := self.path / f"{name}.safetensors").exists():
            return None
        try:
            return read_tensors(path, name, self._digests, kind)
        except Malformed as error:
            raise RunError(f"{path}: {error}. {_advice(name)}") from error

    def file_digests(self, *files: str) -> dict[str, str]:
        """SHA-256 of files of the folder by name, for the record that relies on them; nothing in memory."""
        if self.path is None:
            return {}
        with disk_errors(self.path):
            return {name: _file_digest(self.path / name) for name in files}

    def check_files(self, record: Any) -> None:
        """Refuse to continue from files that are missing, or not those that the record relies on."""
        for name, what in () if self.path is None else changed_files(self.path, record):
            raise RunError(f"{self.path}/{brief(name)}: {what}. {_advice(name)}")

    def delete(self, name: str) -> None:
        """Remove `name`.safetensors, if it is there."""
        if self.path is not None:
            (self.path / f"{name}.safetensors").unlink(missing_ok=True)


def _advice(name: str) -> str:
    if "training" in name:
        return "Delete it and resume: this training starts again from its first epoch, with the same result."
    return (
        f"Restore it from a copy. Or delete {JOURNAL} and all of checkpoints/ but start.safetensors, and resume: the run "
        f"starts again, and uses what was measured."
    )
